"""MIL: beside each convolution a cheap one; where that gives zero, the dear one is not needed.

Dong and others put a 1×1 convolution with batch norm and ReLU (a low-cost collaborative layer)
beside a 3×3 one and multiply the two, number by number. A zero of the cheap one stays zero, so the
dear sum for that place can be left out. Nothing is removed, and nothing presses for zeros: their
share is what training and ReLU happen to give. Saved is the dear layer's work at the zeros, less
the work of the cheap one.

Their text multiplies what comes behind both ReLUs; their code multiplies directly behind the
convolution, before its own batch norm, and so does this. Their code has it at both 3×3 convolutions
of every residual block, with a stride or without, and never at the first layer of the network; here
every convolution larger than 1×1 has one, but for the first and those in groups. A cheap layer has
a filter for every channel it guards, or one filter that all of them share, as in their code
(`shared`).

What differs: they train the whole from random weights for hundreds of epochs, and their cheap
layers begin with zeros in half of all places; so they do in `fpgm reproduce`, whose networks have
their norms behind convolutions, though, and not before them. In a comparison a trained
network goes on for a few steps, so cheap layers begin near one, where it computes nearly what it
did, and few zeros come. They set savings against the layers that have a cheap one, here it is the
whole network; they also count a residual block as saved if one of its layers is zero everywhere,
here only zeros count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fpgm.paper.baselines.base import Method, Pruned, Task
from fpgm.paper.baselines.hooks import Watcher, watching
from fpgm.paper.baselines.short_training import train_
from fpgm.tracing.layer_calls import called_layers
from fpgm.utils.calibration_data import Inputs
from fpgm.utils.example_inputs import Example, as_examples, beside
from fpgm.utils.locking import TURN
from fpgm.utils.modules import modules_by_path
from fpgm.utils.preserve_state import undisturbed

SPREAD = 0.1
"""Standard deviation of a cheap map around one at first.

Before any training the package's ResNet-20 loses about one point of accuracy by it (2,000 test
pictures, three seeds); with 0.25 it would be ten to twenty.
"""


def mil(task: Task, *, shared: bool = False) -> Pruned:
    """Put cheap layers in, train, and count what their zeros would save."""
    model = task.copy()
    example = as_examples(beside(model, task.example))[0]

    def zeros_of(net: nn.Module) -> dict[str, float]:
        inputs = task.inputs()
        try:
            return zero_ratios(net, inputs)
        finally:
            inputs.close()

    inputs = task.inputs()
    try:
        added = attach_(model, inputs[0], shared=shared, seed=task.seed)
    finally:
        inputs.close()
    if not added:
        why = "no cheap layer: no convolution behind the first is larger than 1×1 and ungrouped"
        return Pruned(model.eval(), 0.0, notes=(why,))
    train_(model, task, task.before)
    zeros = zeros_of(model)
    came = saving(model, example, zeros)
    return Pruned(
        model,
        came,
        saving=lambda net: saving(net, example, zeros_of(net)),
        notes=(
            in_words(zeros),
            f"{task.macs:.1%} of the MACs asked, {came:.1%} came: nothing presses for zeros",
            "skipping needs a sparse kernel: the time does not fall in PyTorch",
        ),
    )


class Collaborative(nn.Module):
    """A convolution, multiplied by a cheap one: 1×1 with the same stride, batch norm, ReLU.

    The cheap one reads the middle of each window. It starts at about one everywhere: the product is
    nearly what the convolution gave, and both get a gradient at every place. (With a norm's usual
    start half of a trained network's numbers would be zero at once; with a scale of zero the cheap
    convolution could not learn.)
    """

    def __init__(self, conv: nn.Conv2d, *, shared: bool = False) -> None:
        super().__init__()
        outputs = 1 if shared else conv.out_channels
        self.conv = conv
        self.cheap = nn.Conv2d(conv.in_channels, outputs, 1, bias=False)
        self.cheap.stride = conv.stride
        self.norm = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        nn.init.constant_(self.norm.weight, SPREAD)
        nn.init.ones_(self.norm.bias)
        for added in (self.cheap, self.norm, self.relu):
            added.to(conv.weight).train(conv.training)
        self._margins = margins(conv)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x) * self.relu(self.norm(self._seen(x)))
        return out

    @torch.no_grad()
    def fit_(self, x: Tensor) -> None:
        """Take the norm's running statistics from an input, so that eval mode starts at one too."""
        seen = self._seen(x)
        assert self.norm.running_mean is not None
        assert self.norm.running_var is not None
        self.norm.running_mean.copy_(seen.mean((0, 2, 3)))
        self.norm.running_var.copy_(seen.var((0, 2, 3), correction=0))

    def _seen(self, x: Tensor) -> Tensor:
        seen: Tensor = self.cheap(F.pad(x, self._margins))
        return seen


def margins(conv: nn.Conv2d) -> tuple[int, int, int, int]:
    """What to add to an input's left, right, top and bottom for a 1×1 window to see the middles.

    >>> margins(nn.Conv2d(1, 1, 3, padding=1)), margins(nn.Conv2d(1, 1, (1, 4)))
    ((0, 0, 0, 0), (-1, -2, 0, 0))
    """
    found: list[int] = []
    for axis in (1, 0):
        reach = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
        if conv.padding == "same":
            around = (reach // 2, reach - reach // 2)
        elif isinstance(conv.padding, str):
            around = (0, 0)
        else:
            around = (int(conv.padding[axis]),) * 2
        found += [around[0] - reach // 2, around[1] - (reach - reach // 2)]
    return found[0], found[1], found[2], found[3]


@torch.no_grad()
def attach_(
    model: nn.Module, example: Example, *, shared: bool = False, seed: int = 0
) -> dict[str, Collaborative]:
    """Put a cheap layer beside every convolution that can have one; they come by its path.

    That is every nn.Conv2d the example calls that is larger than 1×1 and not in groups, but for the
    first layer called.
    """
    order = list(dict.fromkeys(call.path for call in called_layers(model, example)))
    convs = {path: model.get_submodule(path) for path in order[1:]}
    with TURN, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        added = {
            path: Collaborative(conv, shared=shared)
            for path, conv in convs.items()
            if isinstance(conv, nn.Conv2d) and conv.groups == 1 and max(conv.kernel_size) > 1
        }

    def fitter(layer: Collaborative) -> Watcher:
        return lambda x, _: layer.fit_(x)

    with watching(model, {path: fitter(own) for path, own in added.items()}), undisturbed(model):
        model.eval()
        example.call(model)
    around = {layer.conv: layer for layer in added.values()}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, nn.Conv2d) and child in around:
                parent._modules[name] = around[child]
    return added


@torch.no_grad()
def zero_ratios(model: nn.Module, inputs: Inputs) -> dict[str, float]:
    """The share of zeros in every cheap layer's output, by the path of the layer it stands in."""
    zeros: Counter[str] = Counter()
    numbers: Counter[str] = Counter()

    def counter(path: str) -> Watcher:
        def count(_: Tensor, out: Any) -> None:
            zeros[path] += int((out == 0).sum())
            numbers[path] += out.numel()

        return count

    watchers = {f"{path}.relu": counter(path) for path in layers_of(model)}
    with watching(model, watchers), undisturbed(model):
        model.eval()
        for number in range(len(inputs)):
            inputs[number].call(model)
    return {path: zeros[path] / count for path, count in numbers.items()}


def in_words(zeros: Mapping[str, float]) -> str:
    """Zero ratios as a note has them.

    >>> in_words({"layer1": 0.25, "layer2": 0.5})
    'zero ratio of 2 layers: 37.5% (from 25.0% to 50.0%)'
    """
    mean = sum(zeros.values()) / len(zeros)
    least, most = min(zeros.values()), max(zeros.values())
    return f"zero ratio of {len(zeros)} layers: {mean:.1%} (from {least:.1%} to {most:.1%})"


@torch.no_grad()
def saving(model: nn.Module, example: Example, zeros: Mapping[str, float]) -> float:
    """Share of the network's MACs that zeros save, less the cheap layers' own.

    Below zero if these cost more than they save.
    """
    macs: Counter[str] = Counter()
    for call in called_layers(model, example):
        macs[call.path] += call.macs
    cheap = sum(macs[f"{path}.cheap"] for path in zeros)
    saved = sum(macs[f"{path}.conv"] * share for path, share in zeros.items())
    with undisturbed(model), FlopCounterMode(display=False) as counter:
        model.eval()
        example.call(model)
    before = int(counter.get_total_flops()) // 2 - cheap
    return (saved - cheap) / before


def layers_of(model: nn.Module) -> dict[str, Collaborative]:
    """Convolutions with a cheap layer beside them, by path."""
    found = modules_by_path(model).items()
    return {path: layer for path, layer in found if isinstance(layer, Collaborative)}


METHOD = Method(
    "mil",
    "MIL",
    "Dong, Huang, Yang, Yan: More is Less: A More Complicated Network with Less Inference "
    "Complexity (CVPR 2017), arXiv:1703.08651",
    "A cheap 1×1 convolution beside each larger one says where its output is zero and need not be "
    "computed.",
    "training",
    partial(mil, shared=True),
)
