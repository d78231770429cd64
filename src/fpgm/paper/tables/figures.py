"""The paper's Figures 3, 4 and 5: norms, what varies, and feature maps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from torch import Tensor, nn

from fpgm.errors import RequestError
from fpgm.paper.tables.row_files import Results
from fpgm.report import charts as figures
from fpgm.report.analysis.api import analyze
from fpgm.report.analysis.similar_channels import layer_output, most_alike, removed_filters
from fpgm.tracing.layer_calls import called_layers
from fpgm.utils.example_inputs import as_examples
from fpgm.workflow.api import plan

NORMS = {"quick": ("resnet56",), "full": ("resnet110", "torchvision:resnet18")}
"""Networks of Figure 3; the paper's are the full ones."""
MAPS = {"quick": ("resnet56", 0.4), "full": ("torchvision:resnet50", 0.1)}
"""Network of Figure 5, and the share of its filters that goes."""
MOST_PICTURES = 100
"""Over which correlations of maps are told."""
LINE = "FPGM"


def figure3(model: nn.Module, example: Tensor, folder: Path, name: str, kind: str) -> list[Path]:
    """Norms of the first and the last convolution, on both scales."""
    found = [own for own in analyze(model, example).layers if len(own.norms) > 1]
    convolutions = [own for own in found if isinstance(model.get_submodule(own.layer), nn.Conv2d)]
    if not convolutions:
        raise RequestError("fig3 is drawn of convolutions: this model has none.")
    files = []
    for place, layer in (("first", convolutions[0]), ("last", convolutions[-1])):
        for log in (False, True):
            file = folder / f"fig3-{name}-{place}{'-log' * log}.{kind}"
            title = f"{name}, {layer.layer}"
            figures.save(figures.norm_distribution(layer, log=log, title=title), file)
            files.append(file)
    return files


def figure4(results: Results, folder: Path, kind: str) -> list[Path]:
    """Accuracy against the interval and against MACs removed, from the ablations made so far."""
    interval: dict[float, list[float]] = {}
    macs: dict[float, list[float]] = {}
    whole: list[float] = []
    for row in results.table.rows:
        found = results.figures(row)
        accuracies = [own / 100 for own in found.get("accuracy", [])]
        if not accuracies:
            continue
        if row.labels[0] == "interval":
            interval[float(row.labels[1])] = accuracies
        elif row.labels[0] == "rate":
            macs[mean(found["FLOPs"]) / 100] = accuracies
            whole = whole if row.prunes else accuracies
    if not interval or not macs:
        raise RequestError(
            "fig4 is drawn from ablations: run fpgm reproduce ablations first, with the same "
            "--scale and --out."
        )
    original = mean(whole) if whole else None
    files = [folder / f"fig4-interval.{kind}", folder / f"fig4-flops.{kind}"]
    for draw, points, file in zip(
        (figures.accuracy_by_interval, figures.accuracy_by_macs), (interval, macs), files,
        strict=True,
    ):  # fmt: skip
        line, band = curve(points)
        several = any(len(own) > 1 for own in points.values())
        bands = {LINE: band} if several else None
        figures.save(draw({LINE: line}, bands=bands, original=original), file)
    return files


def curve(
    points: dict[float, list[float]],
) -> tuple[list[tuple[float, float]], list[tuple[float, float, float]]]:
    """Means over seeds from left to right, and one deviation to either side where there are some.

    >>> curve({2.0: [0.5], 1.0: [0.0, 1.0, 0.5]})
    ([(1.0, 0.5), (2.0, 0.5)], [(1.0, 0.0, 1.0), (2.0, 0.5, 0.5)])
    """
    line, band = [], []
    for place, values in sorted(points.items()):
        middle, wide = mean(values), stdev(values) if len(values) > 1 else 0.0
        line.append((place, middle))
        band.append((place, middle - wide, middle + wide))
    return line, band


def figure5(
    model: nn.Module,
    pictures: Iterable[Tensor],
    folder: Path,
    name: str,
    kind: str,
    rate: float,
) -> list[Path]:
    """Maps of the first layer inside the network that loses channels, and which kept ones stand in.

    The first picture is drawn; correlations are over all of them.
    """
    shown: Sequence[Tensor] = list(islice((x for batch in pictures for x in batch), MOST_PICTURES))
    example = shown[0][None]
    made = plan(model, example, rate=rate, residual="independent", align=1, rounding="paper")
    paths = [call.path for call in called_layers(model, as_examples(example)[0])]
    layer = next((own for own in paths[1:] if removed_filters(made, own)), None)
    if layer is None:
        raise RequestError("fig5 is drawn of a layer that loses channels: none does.")
    gone = removed_filters(made, layer)
    outputs = [layer_output(model, layer, x[None]) for x in shown]
    files = [folder / f"fig5-{name}.{kind}", folder / f"fig5-{name}-replaced.{kind}"]
    title = f"{name}, {layer} at {rate:.0%}: framed channels go"
    figures.save(figures.feature_maps(outputs[0], gone, title=title), files[0])
    pairs = most_alike(np.concatenate(outputs, axis=1), gone)
    figures.save(
        figures.replaced_maps(outputs[0], pairs, title="Removed, and the kept most like it"),
        files[1],
    )
    return files
