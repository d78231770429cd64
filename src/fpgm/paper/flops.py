"""The paper's FLOPs columns, from its architectures and pruning rates alone; no model is built.

The paper counts fractional filters, `n·(1−P)`; a network that can be built loses `int(n·P)` of
them, as in the authors' code. Both counts run over the same layer list. What is pruned is the
paper's choice: every convolution on its own, except projection shortcuts and the classifier, so a
residual stream stays at full width. `benchmarks/paper_flops.py` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Rate = Callable[[str], float]
"""From a layer's name to the share of its filters removed."""


@dataclass(frozen=True)
class Layer:
    """One convolution (or linear layer) and where its input channels come from.

    `source` names the convolution whose kept filters this one reads; `None` means that it reads
    the image or a full-width residual stream, so pruning others does not make it cheaper.
    """

    name: str
    inputs: int
    outputs: int
    taps: int
    pixels: int
    source: str | None = None
    prunable: bool = True

    @property
    def macs(self) -> int:
        """Multiply-accumulates before pruning."""
        return self.inputs * self.outputs * self.taps * self.pixels


def fractional(width: int, rate: float) -> float:
    """Width kept if filters could be cut into parts: what the paper counts.

    >>> fractional(16, 0.25)
    12.0
    """
    return width * (1 - rate)


def whole(width: int, rate: float) -> float:
    """Width kept after removing `int(n·P)` filters: what the authors' code removes.

    >>> [16 - whole(16, 0.4), 32 - whole(32, 0.4), 64 - whole(64, 0.4)]
    [6, 12, 25]
    """
    return width - int(width * rate)


def macs(
    layers: Sequence[Layer], rate: Rate | float = 0.0, kept: Callable[[int, float], float] = whole
) -> float:
    """Multiply-accumulates that remain when each prunable layer loses its rate of filters.

    A convolution reading another's pruned output pays for the kept inputs only:

    >>> two = [Layer("a", 3, 10, 9, 1), Layer("b", 10, 10, 9, 1, source="a")]
    >>> macs(two), macs(two, 0.5)      # 3·10·9 + 10·10·9, then 3·5·9 + 5·5·9
    (1170.0, 360.0)
    """
    rate_of: Rate = rate if callable(rate) else lambda _: rate
    widths: dict[str | None, float] = {}
    total = 0.0
    for layer in layers:
        removed = rate_of(layer.name) if layer.prunable else 0.0
        widths[layer.name] = kept(layer.outputs, removed)
        inputs = layer.inputs if layer.source is None else widths[layer.source]
        total += inputs * widths[layer.name] * layer.taps * layer.pixels
    return total


def saving(
    layers: Sequence[Layer], rate: Rate | float, kept: Callable[[int, float], float] = whole
) -> float:
    """Share of multiply-accumulates removed, in percent.

    >>> round(saving(cifar_resnet(56), 0.4, fractional), 1), round(saving(cifar_resnet(56), 0.4), 1)
    (52.6, 50.4)
    """
    return 100 * (1 - macs(layers, rate, kept) / macs(layers))


def cifar_resnet(depth: int) -> list[Layer]:
    """Convolutions and classifier of the CIFAR ResNets with parameter-free shortcuts."""
    layers = [Layer("conv1", 3, 16, 9, 32 * 32)]
    width, size = 16, 32
    for stage in range(3):
        for block in range((depth - 2) // 6):
            narrows = stage > 0 and block == 0
            inputs = width
            if narrows:
                width, size = 2 * width, size // 2
            first, second = (f"layer{stage + 1}.{block}.conv{i}" for i in (1, 2))
            # Only the block right behind the stem reads pruned channels: nothing has been added
            # to them yet. Every later block reads a sum, where each channel is some branch's.
            stem = "conv1" if stage == block == 0 else None
            layers += [
                Layer(first, inputs, width, 9, size * size, source=stem),
                Layer(second, width, width, 9, size * size, source=first),
            ]
    return [*layers, Layer("linear", 64, 10, 1, 1, prunable=False)]


BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def imagenet_resnet(depth: int, stride_in_3x3: bool = False) -> list[Layer]:
    """Convolutions and classifier of the ImageNet ResNets at 224 pixels.

    The paper's figures fit the original bottleneck, whose first 1×1 convolution strides;
    `stride_in_3x3` gives torchvision's variant, about 6 % dearer.
    """
    bottleneck = depth >= 50
    expansion = 4 if bottleneck else 1
    layers = [Layer("conv1", 3, 64, 49, 112 * 112)]
    stream, size = 64, 56
    for stage, blocks in enumerate(BLOCKS[depth]):
        width = 64 * 2**stage
        for block in range(blocks):
            name = f"layer{stage + 1}.{block}"
            before = size * size
            if stage > 0 and block == 0:
                size //= 2
            after = size * size
            stem = "conv1" if stage == block == 0 else None
            one, two, three = (f"{name}.conv{i}" for i in (1, 2, 3))
            out = width * expansion
            if bottleneck:
                reduce = before if stride_in_3x3 else after
                layers += [
                    Layer(one, stream, width, 1, reduce, source=stem),
                    Layer(two, width, width, 9, after, source=one),
                    Layer(three, width, out, 1, after, source=two),
                ]
            else:
                layers += [
                    Layer(one, stream, width, 9, after, source=stem),
                    Layer(two, width, width, 9, after, source=one),
                ]
            if block == 0 and stream != out:
                shortcut = f"{name}.downsample.0"
                layers.append(Layer(shortcut, stream, out, 1, after, source=stem, prunable=False))
            stream = out
    return [*layers, Layer("fc", stream, 1000, 1, 1, prunable=False)]


VGG_WIDTHS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
VGG_SIZES = (32, 32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2)


def cifar_vgg16() -> list[Layer]:
    """VGG-16 on CIFAR as PFEC has it: 13 convolutions, then 512 → 512 → 10."""
    layers: list[Layer] = []
    inputs, source = 3, None
    for i, (width, size) in enumerate(zip(VGG_WIDTHS, VGG_SIZES, strict=True), start=1):
        layers.append(Layer(f"conv{i}", inputs, width, 9, size * size, source=source))
        inputs, source = width, f"conv{i}"
    return [
        *layers,
        Layer("linear1", 512, 512, 1, 1, source=source, prunable=False),
        Layer("linear2", 512, 10, 1, 1, prunable=False),
    ]


def pfec_vgg16(name: str) -> float:
    """PFEC's choice for VGG-16: half of the first convolution and of the last six, no others."""
    return 0.5 if name in {"conv1", *(f"conv{i}" for i in range(8, 14))} else 0.0


def as_printed(layers: Sequence[Layer]) -> list[Layer]:
    """The layers as the paper's figures count them, slips included.

    No classifier. For the ImageNet ResNets of basic blocks (18 and 34) no projection shortcuts
    either, and the first convolution of the third stage is taken for 256 → 256 channels; it reads
    128. This is what their script's arithmetic comes to, and the only reading found that gives
    both 41.8 % and 41.1 %.

    >>> real = imagenet_resnet(18)
    >>> round(saving(as_printed(real), 0.3, fractional), 1), round(saving(real, 0.3, fractional), 1)
    (41.8, 41.7)
    """
    convs = [layer for layer in layers if not layer.name.startswith(("linear", "fc"))]
    names = {layer.name for layer in convs}
    if "layer4.0.conv2" not in names or "layer4.0.conv3" in names:
        return convs
    return [
        replace(layer, inputs=layer.outputs) if layer.name == "layer3.0.conv1" else layer
        for layer in convs
        if ".downsample." not in layer.name
    ]


@dataclass(frozen=True)
class Row:
    """One figure of the paper and how to count it again; `rate` is what was asked of each layer."""

    table: int
    model: str
    asked: str
    layers: Sequence[Layer]
    rate: Rate | float
    printed_percent: float | None = None
    printed_flops: float | None = None
    note: str = ""

    @property
    def counted_their_way(self) -> float:
        """Percent removed by the paper's own counting."""
        return saving(as_printed(self.layers), self.rate, fractional)

    @property
    def fractional(self) -> float:
        """Percent removed from the whole network, if filters were divisible."""
        return saving(self.layers, self.rate, fractional)

    @property
    def whole(self) -> float:
        """Percent removed from the whole network by a model that can be built."""
        return saving(self.layers, self.rate, whole)

    @property
    def reproduced(self) -> bool | None:
        """Whether the printed percentage follows from the paper's counting, to its last digit."""
        if self.printed_percent is None:
            return None
        return round(self.counted_their_way, 1) == self.printed_percent


def rows() -> list[Row]:
    """Every FLOPs figure the paper prints for its own method, in its order."""
    cifar = [
        Row(1, f"ResNet-{depth}", f"{rate:.0%}", cifar_resnet(depth), rate, percent, flops, note)
        for depth, rate, percent, flops, note in (
            (20, 0.3, 42.2, 2.43e7, "2.43E7 is a misprint of 2.34E7"),
            (20, 0.4, 54.0, 1.87e7, ""),
            (32, 0.3, 41.5, 4.03e7, ""),
            (32, 0.4, 53.2, 3.23e7, ""),
            (56, 0.3, None, None, "not in the paper"),
            (56, 0.4, 52.6, 5.94e7, ""),
            (110, 0.3, 40.8, 1.50e8, "printed for SFP only"),
            (110, 0.4, 52.3, 1.21e8, ""),
        )
    ]
    imagenet = [
        Row(2, f"ResNet-{depth}", f"{rate:.0%}", imagenet_resnet(depth), rate, percent, None, note)
        for depth, rate, percent, note in (
            (18, 0.3, 41.8, "shortcuts not counted, one layer miscounted"),
            (34, 0.3, 41.1, "shortcuts not counted, one layer miscounted"),
            (50, 0.3, 42.2, ""),
            (50, 0.4, 53.5, ""),
            (101, 0.3, 42.2, "misprint: the paper's counting gives 44.1"),
        )
    ]
    vgg = [
        Row(
            4,
            "VGG-16",
            "PFEC's rates",
            cifar_vgg16(),
            pfec_vgg16,
            34.2,
            None,
            "half of conv1, 8–13",
        ),
        Row(4, "VGG-16", "20%", cifar_vgg16(), 0.2, 35.9, None, "rate not in the paper"),
    ]
    return [*cifar, *imagenet, *vgg]
