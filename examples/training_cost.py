"""Estimate the hours and the memory that training on ImageNet takes.

    python examples/training_cost.py                      # the table of docs/guides/scale.md
    python examples/training_cost.py --models torchvision:resnet50 --gpus 32 --batch 128

    hours  = 3 · FLOPs of a forward pass · images · epochs / (sustained FLOP/s · GPUs · scaling)
    memory = 16 bytes per parameter + batch size · bytes saved per image for the backward pass

The backward pass costs twice the forward pass, once for the gradients of the inputs, once for those
of the weights: hence 3. A multiply-accumulate is two FLOPs. Sustained FLOP/s are derived from
the images per second that NVIDIA publishes for ResNet-50, so the estimates hold for similar
networks. Nothing is trained, and networks are built on the meta device, which needs no memory.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import rich
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fpgm.models.registry import load_model

IMAGES, EPOCHS, SIZE = 1_281_167, 100, 224
"""ImageNet's training images, and the paper's schedule."""
RESNET50 = 4_089_184_256
"""Multiply-accumulates of torchvision's ResNet-50 for one image of 224×224."""
OPTIMIZED = 16
"""Bytes per parameter: weight, gradient, momentum, and the gradient's communication buffer."""
SCALING = 16_621 / (8 * 2470)
"""Scaling efficiency of eight A100s; also used for more."""


@dataclass(frozen=True)
class Gpu:
    """A GPU at one precision, with its training speed for ResNet-50 in images per second.

    Source: NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5, README.
    """

    name: str
    images_per_second: float
    element_bytes: int
    """Bytes per element of an activation."""

    @property
    def sustained(self) -> float:
        """Return the sustained FLOP/s in training.

        >>> round(GPUS[0].sustained / 1e12, 1)
        60.6
        """
        return self.images_per_second * 3 * 2 * RESNET50


GPUS = (
    Gpu("A100 mixed", 2470, 2),
    Gpu("A100 TF32", 938, 4),
    Gpu("V100 mixed", 1156, 2),
    Gpu("V100 float32", 356, 4),
)


@dataclass(frozen=True)
class Network:
    """The cost of one image."""

    name: str
    macs: int
    parameters: int
    kept: int
    """Elements that autograd saves per image for the backward pass."""


def measure(name: str) -> Network:
    """Measure a model on the meta device."""
    with torch.device("meta"):
        net = load_model(name).train()
    return Network(
        name.rpartition(":")[2],
        forward_macs(net, torch.empty(1, 3, SIZE, SIZE, device="meta")),
        sum(p.numel() for p in net.parameters()),
        kept_elements(net, torch.empty(2, 3, SIZE, SIZE, device="meta")) // 2,
    )


def forward_macs(net: nn.Module, x: Tensor) -> int:
    """Count the multiply-accumulates of a forward pass."""
    with FlopCounterMode(display=False) as counter:
        net(x)
    return counter.get_total_flops() // 2


def kept_elements(net: nn.Module, x: Tensor) -> int:
    """Count the elements saved for the backward pass, each tensor once, without weights."""
    weights = {p.untyped_storage()._cdata for p in (*net.parameters(), *net.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage()._cdata
        if place not in weights:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net(x)
    return sum(t.untyped_storage().nbytes() // t.element_size() for t in kept.values())


def hours(network: Network, gpu: Gpu, gpus: int = 1, epochs: int = EPOCHS) -> float:
    """Return the hours of training, assuming that data loading keeps up.

    >>> resnet50 = Network("resnet50", RESNET50, 25_557_032, 0)
    >>> round(hours(resnet50, GPUS[0]), 1)
    14.4
    """
    flops = 3 * 2 * network.macs * IMAGES * epochs
    return flops / (gpu.sustained * gpus * (1 if gpus == 1 else SCALING)) / 3600


def gigabytes(network: Network, gpu: Gpu, batch: int) -> float:
    """Return the memory per GPU, without cuDNN's workspaces and the allocator's reserve."""
    return (OPTIMIZED * network.parameters + batch * gpu.element_bytes * network.kept) / 1e9


def table(names: Sequence[str], gpus: int, batch: int) -> Iterator[str]:
    """Return a Markdown table: hours on one GPU and on many, and memory at both precisions."""
    yield _row("network", "GMACs", *(gpu.name for gpu in GPUS), "GB mixed", "GB float32")
    yield _row("---", *["--:"] * (len(GPUS) + 3))
    for network in map(measure, names):
        yield _row(
            network.name,
            f"{network.macs / 1e9:.2f}",
            *(f"{hours(network, gpu):.1f} / {hours(network, gpu, gpus):.1f}" for gpu in GPUS),
            *(f"{gigabytes(network, gpu, batch):.1f}" for gpu in GPUS[:2]),
        )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=[f"torchvision:resnet{depth}" for depth in (18, 34, 50, 101)]
    )
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64, help="batch size per GPU")
    options = parser.parse_args()
    lines = "\n".join(table(options.models, options.gpus, options.batch))
    rich.get_console().print(lines, soft_wrap=True, highlight=False)
