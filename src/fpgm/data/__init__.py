"""Images to train and test on: CIFAR-10, folders of pictures, scikit-learn's digits, noise."""
