"""Built-in networks by name; `fpgm.models.registry.load_model` loads any other."""

from fpgm.models.builtin import BUILTIN, Builtin, build, trained_resnet20, trained_wide_resnet
from fpgm.models.digits_net import digits
from fpgm.models.resnet_cifar import resnet
from fpgm.models.resnet_wide import wide_resnet
from fpgm.models.vgg_cifar import vgg16

__all__ = [
    "BUILTIN",
    "Builtin",
    "build",
    "digits",
    "resnet",
    "trained_resnet20",
    "trained_wide_resnet",
    "vgg16",
    "wide_resnet",
]
