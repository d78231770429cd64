"""Images to train and test on: CIFAR-10, folders of images, scikit-learn's digits, noise.

- `registry`: data sets by name, as in recipes
- `base`: the interface of a data set
- `in_memory`: data sets in memory, augmented batch by batch
- `image_folder`: folders of images, read by torchvision
- `loaders`: training images for code that takes any loader
- `cifar10`, `cifar10_fetch`, `fetch`: CIFAR-10: read, locate or download
- `cifar10_sample`: the images that come with the package
"""

from fpgm.data.base import Batch, Batches
from fpgm.data.in_memory import Images
from fpgm.data.registry import DataSpec, DataSplits, open_splits

__all__ = ["Batch", "Batches", "DataSpec", "DataSplits", "Images", "open_splits"]
