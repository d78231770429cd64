"""From a description to a model and its inputs, the same ones every time."""

from __future__ import annotations

from typing import Any

import torch
from tests.helpers import output_comparison
from torch import Tensor, nn

from .describe import HEADS, SPACE, Net
from .parts import Shape, chain, make, unit

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def build(net: Net, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Inputs]:
    """The model and inputs a description stands for; the same ones every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(net.seed)
        model = Network(net)
        _randomise(model)
        image = torch.randn(2, 3, *SPACE[net.dims], dtype=dtype)
        extra = torch.randn(2, 2, *SPACE[net.dims], dtype=dtype)
    inputs: dict[str, Inputs] = {
        "tensor": image,
        "tuple": (image,),
        "dict": {"image": image},
        "two_tuple": (image, extra),
        "two_dict": {"image": image, "extra": extra},
    }
    return model.to(dtype).train(net.training), inputs[net.inputs]


def call(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output on inputs of any of the three kinds."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def leaves(output: Any) -> list[Tensor]:
    """Every tensor of floating-point numbers in an output of any kind, in a fixed order.

    >>> len(leaves({"a": torch.ones(1), "b": (torch.ones(1), torch.tensor(3))}))
    2
    """
    results = output_comparison.leaves(output)
    return [t for t in results if isinstance(t, Tensor) and t.is_floating_point()]


class Network(nn.Module):
    """Stem, blocks and head; a second input, where there is one, has a stem of its own."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        shape: Shape = (net.stem, *SPACE[net.dims])
        self.stem = unit(shape, 3, net.stem)
        self.side = unit(shape, 2, net.stem) if net.inputs.startswith("two") else None
        self.concatenates = net.inputs == "two_dict"
        if self.concatenates:
            shape = (2 * net.stem, *shape[1:])
        self.blocks, shape = chain(shape, net.blocks)
        self.head = make(HEADS[net.head.name], shape, net.head)

    def forward(self, image: Tensor, extra: Tensor | None = None) -> Any:
        x = self.stem(image)
        if self.side is not None:
            y = self.side(extra)
            x = torch.cat([x, y], 1) if self.concatenates else x + y
        return self.head(self.blocks(x))


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Make nothing degenerate: no norm is the identity, no bias zero, no signal dies with depth."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(2)
    for module in model.modules():
        if getattr(module, "weight", None) is None and not hasattr(module, "running_mean"):
            continue
        if isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)):
            if module.weight is not None:
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(0.1, 0.5).mul_(torch.randn_like(module.bias).sign())
            if getattr(module, "running_mean", None) is not None:
                module.running_mean.uniform_(0.1, 0.5)
                module.running_mean.mul_(torch.randn_like(module.running_mean).sign())
                module.running_var.uniform_(0.5, 2)
        elif isinstance(module, nn.PReLU):
            module.weight.uniform_(0.1, 0.4)
