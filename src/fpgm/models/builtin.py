"""The built-in networks, by name. Any other PyTorch model works just as well: see `load_model`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from fpgm.errors import RequestError
from fpgm.models.checkpoint import SHIPPED, load_weights
from fpgm.models.digits_net import digits
from fpgm.models.resnet_cifar import resnet
from fpgm.models.resnet_wide import wide_resnet
from fpgm.models.vgg_cifar import vgg16
from fpgm.utils.text import did_you_mean


@dataclass(frozen=True)
class Builtin:
    """How to build a network, and the shape of one input."""

    factory: Callable[..., nn.Module]
    input_shape: tuple[int, ...]


BUILTIN: dict[str, Builtin] = {
    **{
        f"resnet{depth}": Builtin(partial(resnet, depth), (1, 3, 32, 32))
        for depth in (20, 32, 44, 56, 110, 1202)
    },
    "resnet11_wide": Builtin(wide_resnet, (1, 3, 32, 32)),
    "vgg16": Builtin(vgg16, (1, 3, 32, 32)),
    "digits": Builtin(digits, (1, 1, 8, 8)),
}


def build(name: str, classes: int = 10) -> nn.Module:
    """Build a built-in network with random weights.

    >>> build("resnet56").linear
    Linear(in_features=64, out_features=10, bias=True)
    >>> build("resnet65")
    Traceback (most recent call last):
    fpgm.errors.RequestError: There is no built-in model 'resnet65': did you mean 'resnet56'...
    """
    if name not in BUILTIN:
        hint = did_you_mean(name, BUILTIN, most=3) or f"give one of {', '.join(BUILTIN)}."
        raise RequestError(
            f"There is no built-in model {name!r}: {hint} Others are 'torchvision:NAME', "
            "'timm:NAME' or 'path/to/file.py:factory'."
        )
    return BUILTIN[name].factory(classes=classes)


def trained_resnet20() -> nn.Module:
    """Load the ResNet-20 that comes with the package, trained on CIFAR-10, in eval mode."""
    return load_weights(build("resnet20"), SHIPPED).eval()


def trained_wide_resnet() -> nn.Module:
    """Load the wide ResNet that comes with the package, trained on CIFAR-10, in eval mode."""
    return load_weights(build("resnet11_wide"), SHIPPED).eval()
