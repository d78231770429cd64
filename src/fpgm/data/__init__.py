"""Images to train and test on: CIFAR-10, folders of images, scikit-learn's digits, noise."""
