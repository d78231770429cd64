"""Recompute the paper's FLOPs columns from its architectures and pruning rates.

No model is built. The paper counts fractional filters, `n·(1−P)`; the authors' code removes
`int(n·P)` whole filters. Both counts use the same list of layers. As in the paper, every
convolution is pruned independently, except projection shortcuts and the classifier, so residual
streams keep their width. `benchmarks/paper_flops.py` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Rate = Callable[[str], float]
"""Maps a layer's name to the fraction of its filters that is removed."""


@dataclass(frozen=True)
class LayerShape:
    """Dimensions of one convolution or linear layer.

    `source` names the convolution whose output it consumes. `None` means the image or a residual
    stream of full width: pruning other layers does not make it cheaper.
    """

    name: str
    inputs: int
    outputs: int
    kernel_area: int
    pixels: int
    source: str | None = None
    prunable: bool = True

    @property
    def macs(self) -> int:
        """MACs before pruning."""
        return self.inputs * self.outputs * self.kernel_area * self.pixels


def fractional_width(width: int, rate: float) -> float:
    """Return the width that the paper counts, with fractions of filters.

    >>> fractional_width(16, 0.25)
    12.0
    """
    return width * (1 - rate)


def integer_width(width: int, rate: float) -> float:
    """Return the width after `int(n·P)` filters are removed, as in the authors' code.

    >>> [width - integer_width(width, 0.4) for width in (16, 32, 64)]
    [6, 12, 25]
    """
    return width - int(width * rate)


def macs(
    layers: Sequence[LayerShape],
    rate: Rate | float = 0.0,
    kept: Callable[[int, float], float] = integer_width,
) -> float:
    """Count the MACs that remain after each prunable layer is pruned by its rate.

    A convolution that consumes pruned channels costs less too:

    >>> two = [LayerShape("a", 3, 10, 9, 1), LayerShape("b", 10, 10, 9, 1, source="a")]
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
        total += inputs * widths[layer.name] * layer.kernel_area * layer.pixels
    return total


def percent_saved(
    layers: Sequence[LayerShape],
    rate: Rate | float,
    kept: Callable[[int, float], float] = integer_width,
) -> float:
    """Compute the percentage of MACs that is removed.

    >>> layers = cifar_resnet(56)
    >>> round(percent_saved(layers, 0.4, fractional_width), 1), round(percent_saved(layers, 0.4), 1)
    (52.6, 50.4)
    """
    return 100 * (1 - macs(layers, rate, kept) / macs(layers))


def cifar_resnet(depth: int) -> list[LayerShape]:
    """List the convolutions and the classifier of a CIFAR ResNet with parameter-free shortcuts."""
    layers = [LayerShape("conv1", 3, 16, 9, 32 * 32)]
    width, size = 16, 32
    for stage in range(3):
        for block in range((depth - 2) // 6):
            downsamples = stage > 0 and block == 0
            inputs = width
            if downsamples:
                width, size = 2 * width, size // 2
            first, second = (f"layer{stage + 1}.{block}.conv{i}" for i in (1, 2))
            # Only the first block consumes pruned channels, those of the stem. Later blocks
            # consume a sum, in which every channel is still used by some branch.
            stem = "conv1" if stage == block == 0 else None
            layers += [
                LayerShape(first, inputs, width, 9, size * size, source=stem),
                LayerShape(second, width, width, 9, size * size, source=first),
            ]
    return [*layers, LayerShape("linear", 64, 10, 1, 1, prunable=False)]


BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def imagenet_resnet(depth: int, stride_in_3x3: bool = False) -> list[LayerShape]:
    """List the convolutions and the classifier of an ImageNet ResNet at 224×224 pixels.

    Args:
        depth: 18, 34, 50 or 101.
        stride_in_3x3: torchvision's bottleneck, with about 6 % more MACs. The paper's numbers fit
            the original one, whose first 1×1 convolution has the stride.
    """
    bottleneck = depth >= 50
    expansion = 4 if bottleneck else 1
    layers = [LayerShape("conv1", 3, 64, 49, 112 * 112)]
    stream, size = 64, 56
    for stage, blocks in enumerate(BLOCKS[depth]):
        width = 64 * 2**stage
        for block in range(blocks):
            name = f"layer{stage + 1}.{block}"
            pixels_before = size * size
            if stage > 0 and block == 0:
                size //= 2
            pixels_after = size * size
            stem = "conv1" if stage == block == 0 else None
            one, two, three = (f"{name}.conv{i}" for i in (1, 2, 3))
            out = width * expansion
            if bottleneck:
                pixels_reduce = pixels_before if stride_in_3x3 else pixels_after
                layers += [
                    LayerShape(one, stream, width, 1, pixels_reduce, source=stem),
                    LayerShape(two, width, width, 9, pixels_after, source=one),
                    LayerShape(three, width, out, 1, pixels_after, source=two),
                ]
            else:
                layers += [
                    LayerShape(one, stream, width, 9, pixels_after, source=stem),
                    LayerShape(two, width, width, 9, pixels_after, source=one),
                ]
            if block == 0 and stream != out:
                shortcut = f"{name}.downsample.0"
                layers.append(
                    LayerShape(shortcut, stream, out, 1, pixels_after, source=stem, prunable=False)
                )
            stream = out
    return [*layers, LayerShape("fc", stream, 1000, 1, 1, prunable=False)]


VGG_WIDTHS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
VGG_SIZES = (32, 32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2)


def cifar_vgg16() -> list[LayerShape]:
    """List the layers of PFEC's VGG-16 for CIFAR: 13 convolutions, then 512 → 512 → 10."""
    layers: list[LayerShape] = []
    inputs, source = 3, None
    for i, (width, size) in enumerate(zip(VGG_WIDTHS, VGG_SIZES, strict=True), start=1):
        layers.append(LayerShape(f"conv{i}", inputs, width, 9, size * size, source=source))
        inputs, source = width, f"conv{i}"
    return [
        *layers,
        LayerShape("linear1", 512, 512, 1, 1, source=source, prunable=False),
        LayerShape("linear2", 512, 10, 1, 1, prunable=False),
    ]


def pfec_vgg16_rate(name: str) -> float:
    """Return PFEC's rate for a VGG-16 layer: half of the first and of the last six convolutions."""
    return 0.5 if name in {"conv1", *(f"conv{i}" for i in range(8, 14))} else 0.0


def paper_layer_list(layers: Sequence[LayerShape]) -> list[LayerShape]:
    """Return the layers as the paper counts them, including its mistakes.

    The classifier is not counted. For ImageNet ResNets with basic blocks (18 and 34) neither are
    projection shortcuts, and the first convolution of the third stage counts as 256 → 256 channels
    although its input has 128. This is the arithmetic of the authors' script, and the only variant
    found that gives both 41.8 % and 41.1 %.

    >>> real = imagenet_resnet(18)
    >>> paper = paper_layer_list(real)
    >>> [round(percent_saved(layers, 0.3, fractional_width), 1) for layers in (paper, real)]
    [41.8, 41.7]
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
class FlopsRow:
    """One FLOPs number of the paper, and the layers and the rate that it is computed from."""

    table: int
    model: str
    rate_label: str
    layers: Sequence[LayerShape]
    rate: Rate | float
    paper_percent: float | None = None
    paper_flops: float | None = None
    note: str = ""

    @property
    def paper_count_percent(self) -> float:
        """Percentage removed, counted as in the paper."""
        return percent_saved(paper_layer_list(self.layers), self.rate, fractional_width)

    @property
    def fractional_percent(self) -> float:
        """Percentage removed from the whole network, with fractional filters."""
        return percent_saved(self.layers, self.rate, fractional_width)

    @property
    def integer_percent(self) -> float:
        """Percentage removed from the whole network, with whole filters."""
        return percent_saved(self.layers, self.rate, integer_width)

    @property
    def matches_paper(self) -> bool | None:
        """Whether the paper's percentage equals its own way of counting, to the last digit."""
        if self.paper_percent is None:
            return None
        return round(self.paper_count_percent, 1) == self.paper_percent


def flops_rows() -> list[FlopsRow]:
    """List all FLOPs numbers that the paper prints for its own method, in its order."""
    cifar = [
        FlopsRow(
            1, f"ResNet-{depth}", f"{rate:.0%}", cifar_resnet(depth), rate, percent, flops, note
        )
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
        FlopsRow(
            2, f"ResNet-{depth}", f"{rate:.0%}", imagenet_resnet(depth), rate, percent, None, note
        )
        for depth, rate, percent, note in (
            (18, 0.3, 41.8, "shortcuts not counted, one layer miscounted"),
            (34, 0.3, 41.1, "shortcuts not counted, one layer miscounted"),
            (50, 0.3, 42.2, ""),
            (50, 0.4, 53.5, ""),
            (101, 0.3, 42.2, "misprint: the paper's counting gives 44.1"),
        )
    ]
    vgg = [
        FlopsRow(
            4,
            "VGG-16",
            "PFEC's rates",
            cifar_vgg16(),
            pfec_vgg16_rate,
            34.2,
            None,
            "half of conv1, 8–13",
        ),
        FlopsRow(4, "VGG-16", "20%", cifar_vgg16(), 0.2, 35.9, None, "rate not in the paper"),
    ]
    return [*cifar, *imagenet, *vgg]
