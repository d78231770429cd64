"""Reproduce the paper's Figures 3 (norms), 4 (ablations) and 5 (feature maps)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from torch import Tensor, nn

from fpgm.errors import RequestError
from fpgm.paper.tables.row_files import RowStore
from fpgm.report import charts
from fpgm.report.analysis.api import analyze
from fpgm.report.analysis.similar_channels import layer_output, most_correlated, removed_filters
from fpgm.tracing.layer_calls import called_layers
from fpgm.utils.example_inputs import as_examples
from fpgm.workflow.api import plan

NORM_NETWORKS = {"quick": ("resnet56",), "full": ("resnet110", "torchvision:resnet18")}
"""Networks of Figure 3 by scale; the paper has those of the full scale."""
MAP_NETWORKS = {"quick": ("resnet56", 0.4), "full": ("torchvision:resnet50", 0.1)}
"""Network of Figure 5 by scale, and the pruning rate."""
MAX_IMAGES = 100
"""Images over which the correlation of feature maps is computed."""
SERIES_NAME = "FPGM"


def figure3(model: nn.Module, example: Tensor, folder: Path, name: str, kind: str) -> list[Path]:
    """Plot the norms of the first and the last convolution, linear and logarithmic."""
    layers = [layer for layer in analyze(model, example).layers if len(layer.norms) > 1]
    convolutions = [
        layer for layer in layers if isinstance(model.get_submodule(layer.layer), nn.Conv2d)
    ]
    if not convolutions:
        raise RequestError("fig3 needs a model with convolutions: this one has none.")
    files = []
    for position, layer in (("first", convolutions[0]), ("last", convolutions[-1])):
        for log in (False, True):
            file = folder / f"fig3-{name}-{position}{'-log' * log}.{kind}"
            title = f"{name}, {layer.layer}"
            charts.save(charts.norm_distribution(layer, log=log, title=title), file)
            files.append(file)
    return files


def figure4(results: RowStore, folder: Path, kind: str) -> list[Path]:
    """Plot accuracy against the interval and against MACs removed, from the saved ablations."""
    interval: dict[float, list[float]] = {}
    macs: dict[float, list[float]] = {}
    unpruned: list[float] = []
    for row in results.table.rows:
        metrics = results.metrics(row)
        accuracies = [value / 100 for value in metrics.get("accuracy", [])]
        if not accuracies:
            continue
        if row.labels[0] == "interval":
            interval[float(row.labels[1])] = accuracies
        elif row.labels[0] == "rate":
            macs[mean(metrics["FLOPs"]) / 100] = accuracies
            unpruned = unpruned if row.prunes else accuracies
    if not interval or not macs:
        raise RequestError(
            "fig4 needs results of the ablations: run fpgm reproduce ablations first, with the "
            "same --scale and --out."
        )
    original = mean(unpruned) if unpruned else None
    files = [folder / f"fig4-interval.{kind}", folder / f"fig4-flops.{kind}"]
    for draw, points, file in zip(
        (charts.accuracy_by_interval, charts.accuracy_by_macs), (interval, macs), files,
        strict=True,
    ):  # fmt: skip
        line, band = mean_and_band(points)
        several = any(len(value) > 1 for value in points.values())
        bands = {SERIES_NAME: band} if several else None
        charts.save(draw({SERIES_NAME: line}, bands=bands, original=original), file)
    return files


def mean_and_band(
    points: dict[float, list[float]],
) -> tuple[list[tuple[float, float]], list[tuple[float, float, float]]]:
    """Compute the mean over seeds at each x, and a band of one standard deviation around it.

    >>> mean_and_band({2.0: [0.5], 1.0: [0.0, 1.0, 0.5]})
    ([(1.0, 0.5), (2.0, 0.5)], [(1.0, 0.0, 1.0), (2.0, 0.5, 0.5)])
    """
    line, band = [], []
    for x, values in sorted(points.items()):
        center, spread = mean(values), stdev(values) if len(values) > 1 else 0.0
        line.append((x, center))
        band.append((x, center - spread, center + spread))
    return line, band


def figure5(
    model: nn.Module,
    batches: Iterable[Tensor],
    folder: Path,
    name: str,
    kind: str,
    rate: float,
) -> list[Path]:
    """Plot the feature maps of the first pruned inner layer, and the kept channels most like them.

    The maps are those of the first image; correlations are over all images.

    Args:
        model: The trained model.
        batches: Images, without labels.
        folder: Where the files are written.
        name: The model's name, in file names and titles.
        kind: The image format, such as "svg".
        rate: Fraction of filters to remove.
    """
    images: Sequence[Tensor] = list(islice((x for batch in batches for x in batch), MAX_IMAGES))
    example = images[0][None]
    pruning_plan = plan(
        model, example, rate=rate, residual="independent", align=1, rounding="paper"
    )
    paths = [call.path for call in called_layers(model, as_examples(example)[0])]
    layer = next((path for path in paths[1:] if removed_filters(pruning_plan, path)), None)
    if layer is None:
        raise RequestError("fig5 shows removed channels, but no layer loses any at this rate.")
    removed = removed_filters(pruning_plan, layer)
    outputs = [layer_output(model, layer, x[None]) for x in images]
    files = [folder / f"fig5-{name}.{kind}", folder / f"fig5-{name}-replaced.{kind}"]
    title = f"{name}, {layer} at {rate:.0%}: framed channels are removed"
    charts.save(charts.feature_maps(outputs[0], removed, title=title), files[0])
    pairs = most_correlated(np.concatenate(outputs, axis=1), removed)
    charts.save(
        charts.similar_maps(
            outputs[0], pairs, title="Removed channels, and the most similar kept ones"
        ),
        files[1],
    )
    return files
