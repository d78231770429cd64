"""MIL (More is Less): a cheap layer next to each convolution predicts where its output is zero.

Dong et al. put a 1×1 convolution with batch norm and ReLU (a cheap collaborative layer) next to a
3×3 convolution and multiply the two outputs elementwise. Where the cheap output is zero, the
expensive convolution need not be computed. Nothing is removed, and no loss term encourages zeros:
their fraction is what training and ReLU happen to give. The saving is the expensive layer's MACs at
the zeros, minus the MACs of the cheap layer.

The paper's text multiplies after both ReLUs; the authors' code, like this one, multiplies right
after the convolution, before its batch norm. Their code adds cheap layers to both 3×3 convolutions
of every residual block and never to the first layer of the network. Here every ungrouped
convolution larger than 1×1 has one, except the first layer. A cheap layer has one filter per output
channel, or a single filter for all of them, as in their code (`shared`).

Differences: the authors train from random weights for hundreds of epochs, and half of the outputs
of their cheap layers are zero at first. `fpgm reproduce` does the same, although its networks have
batch norms after convolutions, not before them. `fpgm compare` continues to train a trained network
for a few steps, so cheap layers start near one, where the network's function hardly changes, and
few zeros appear. The authors report savings relative to the layers that have a cheap one; here they
are relative to the whole network. They also count a residual block as saved if one of its layers is
zero everywhere; here only zeros count.
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

from fpgm.paper.baselines.base import Method, MethodResult, Task
from fpgm.paper.baselines.hooks import LayerHook, layer_hooks
from fpgm.paper.baselines.short_training import train_
from fpgm.tracing.layer_calls import called_layers
from fpgm.utils.calibration_data import Inputs
from fpgm.utils.example_inputs import Example, as_examples, to_model_device
from fpgm.utils.modules import modules_by_path
from fpgm.utils.preserve_state import preserve_state
from fpgm.utils.thread_lock import GLOBAL_LOCK

INITIAL_STD = 0.1
"""Initial standard deviation of a cheap layer's output, whose mean is one.

With it the package's ResNet-20 loses about one point of accuracy before any training (2,000 test
images, three seeds); with 0.25 it would lose ten to twenty.
"""


def mil(task: Task, *, shared: bool = False) -> MethodResult:
    """Add cheap layers, train, and measure how many MACs their zeros would save.

    Args:
        task: the model, its budget and data. MIL ignores the budget.
        shared: one filter per cheap layer instead of one per output channel.
    """
    model = task.trainable_copy()
    example = as_examples(to_model_device(model, task.example))[0]

    def measure_zeros(net: nn.Module) -> dict[str, float]:
        inputs = task.inputs()
        try:
            return zero_ratios(net, inputs)
        finally:
            inputs.close()

    inputs = task.inputs()
    try:
        added = attach_cheap_layers_(model, inputs[0], shared=shared, seed=task.seed)
    finally:
        inputs.close()
    if not added:
        note = "no cheap layer: no convolution after the first is larger than 1×1 and ungrouped"
        return MethodResult(model.eval(), 0.0, notes=(note,))
    train_(model, task, task.before_pruning)
    zeros = measure_zeros(model)
    saved = macs_saving(model, example, zeros)
    return MethodResult(
        model,
        saved,
        measure_saving=lambda net: macs_saving(net, example, measure_zeros(net)),
        notes=(
            describe_zeros(zeros),
            f"requested {task.macs:.1%} of the MACs, saved {saved:.1%}: MIL's saving cannot be set",
            "skipping needs a sparse kernel: the model is not faster in PyTorch",
        ),
    )


class CollaborativeConv(nn.Module):
    """A convolution multiplied by a cheap layer: 1×1 with the same stride, batch norm, ReLU.

    The cheap convolution reads the center of each window. Its output is initially close to one, so
    that the product is close to the convolution's output and both layers have gradients everywhere.
    With the usual initialization of the batch norm, half of a trained network's outputs would be
    zero at once; with a scale of zero the cheap convolution could not learn.
    """

    def __init__(self, conv: nn.Conv2d, *, shared: bool = False) -> None:
        super().__init__()
        outputs = 1 if shared else conv.out_channels
        self.conv = conv
        self.cheap = nn.Conv2d(conv.in_channels, outputs, 1, bias=False)
        self.cheap.stride = conv.stride
        self.norm = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        nn.init.constant_(self.norm.weight, INITIAL_STD)
        nn.init.ones_(self.norm.bias)
        for added in (self.cheap, self.norm, self.relu):
            added.to(conv.weight).train(conv.training)
        self._padding = center_padding(conv)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x) * self.relu(self.norm(self._cheap_output(x)))
        return out

    @torch.no_grad()
    def init_statistics_(self, x: Tensor) -> None:
        """Initialize the batch norm's running statistics, so that eval mode starts near one too."""
        output = self._cheap_output(x)
        assert self.norm.running_mean is not None
        assert self.norm.running_var is not None
        self.norm.running_mean.copy_(output.mean((0, 2, 3)))
        self.norm.running_var.copy_(output.var((0, 2, 3), correction=0))

    def _cheap_output(self, x: Tensor) -> Tensor:
        output: Tensor = self.cheap(F.pad(x, self._padding))
        return output


def center_padding(conv: nn.Conv2d) -> tuple[int, int, int, int]:
    """Compute the padding (left, right, top, bottom) that aligns a 1×1 window with the centers.

    >>> center_padding(nn.Conv2d(1, 1, 3, padding=1)), center_padding(nn.Conv2d(1, 1, (1, 4)))
    ((0, 0, 0, 0), (-1, -2, 0, 0))
    """
    padding: list[int] = []
    for axis in (1, 0):
        reach = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
        if conv.padding == "same":
            existing = (reach // 2, reach - reach // 2)
        elif isinstance(conv.padding, str):
            existing = (0, 0)
        else:
            existing = (int(conv.padding[axis]),) * 2
        padding += [existing[0] - reach // 2, existing[1] - (reach - reach // 2)]
    return padding[0], padding[1], padding[2], padding[3]


@torch.no_grad()
def attach_cheap_layers_(
    model: nn.Module, example: Example, *, shared: bool = False, seed: int = 0
) -> dict[str, CollaborativeConv]:
    """Add a cheap layer to every suitable convolution; return the new layers by path.

    Suitable is every ungrouped `nn.Conv2d` larger than 1×1 that the example input reaches, except
    the first layer.
    """
    order = list(dict.fromkeys(call.path for call in called_layers(model, example)))
    convs = {path: model.get_submodule(path) for path in order[1:]}
    with GLOBAL_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        added = {
            path: CollaborativeConv(conv, shared=shared)
            for path, conv in convs.items()
            if isinstance(conv, nn.Conv2d) and conv.groups == 1 and max(conv.kernel_size) > 1
        }

    def make_hook(layer: CollaborativeConv) -> LayerHook:
        return lambda x, _: layer.init_statistics_(x)

    with (
        layer_hooks(model, {path: make_hook(layer) for path, layer in added.items()}),
        preserve_state(model),
    ):
        model.eval()
        example.call(model)
    replacements = {layer.conv: layer for layer in added.values()}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, nn.Conv2d) and child in replacements:
                parent._modules[name] = replacements[child]
    return added


@torch.no_grad()
def zero_ratios(model: nn.Module, inputs: Inputs) -> dict[str, float]:
    """Measure the fraction of zeros in the output of every cheap layer, by path."""
    zeros: Counter[str] = Counter()
    numbers: Counter[str] = Counter()

    def make_hook(path: str) -> LayerHook:
        def count(_: Tensor, out: Any) -> None:
            zeros[path] += int((out == 0).sum())
            numbers[path] += out.numel()

        return count

    hooks = {f"{path}.relu": make_hook(path) for path in collaborative_layers(model)}
    with layer_hooks(model, hooks), preserve_state(model):
        model.eval()
        for number in range(len(inputs)):
            inputs[number].call(model)
    return {path: zeros[path] / count for path, count in numbers.items()}


def describe_zeros(zeros: Mapping[str, float]) -> str:
    """Summarize zero ratios in a sentence.

    >>> describe_zeros({"layer1": 0.25, "layer2": 0.5})
    'zero ratio of 2 layers: 37.5% (from 25.0% to 50.0%)'
    """
    mean = sum(zeros.values()) / len(zeros)
    lowest, highest = min(zeros.values()), max(zeros.values())
    return f"zero ratio of {len(zeros)} layers: {mean:.1%} (from {lowest:.1%} to {highest:.1%})"


@torch.no_grad()
def macs_saving(model: nn.Module, example: Example, zeros: Mapping[str, float]) -> float:
    """Compute the fraction of the network's MACs that zeros save, minus the cheap layers' MACs.

    It is negative if the cheap layers cost more than they save.
    """
    macs: Counter[str] = Counter()
    for call in called_layers(model, example):
        macs[call.path] += call.macs
    cheap = sum(macs[f"{path}.cheap"] for path in zeros)
    saved = sum(macs[f"{path}.conv"] * fraction for path, fraction in zeros.items())
    with preserve_state(model), FlopCounterMode(display=False) as counter:
        model.eval()
        example.call(model)
    before = int(counter.get_total_flops()) // 2 - cheap
    return (saved - cheap) / before


def collaborative_layers(model: nn.Module) -> dict[str, CollaborativeConv]:
    """Return the convolutions that have a cheap layer, by path."""
    modules = modules_by_path(model).items()
    return {path: layer for path, layer in modules if isinstance(layer, CollaborativeConv)}


METHOD = Method(
    "mil",
    "MIL",
    "Dong, Huang, Yang, Yan: More is Less: A More Complicated Network with Less Inference "
    "Complexity (CVPR 2017), arXiv:1703.08651",
    "Adds a cheap 1×1 convolution to each larger one, whose zeros mark outputs that need not be "
    "computed.",
    "training",
    partial(mil, shared=True),
)
