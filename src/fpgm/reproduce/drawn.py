"""The paper's Figures 3, 4 and 5: norms, what varies, and feature maps."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fpgm import figures
from fpgm.analysis import analyze
from fpgm.analysis.alike import layer_output, most_alike, removed_filters
from fpgm.errors import RequestError
from fpgm.examples import as_examples
from fpgm.latency.layers import called_layers
from fpgm.planning import plan
from fpgm.reproduce.results import Results

RATE = 0.4
MOST_PICTURES = 100
"""Over which correlations of maps are told."""


def figure3(model: nn.Module, example: Tensor, folder: Path, kind: str) -> list[Path]:
    """Norms of the first and the last convolution, on both scales."""
    found = [own for own in analyze(model, example).layers if len(own.norms) > 1]
    convolutions = [own for own in found if isinstance(model.get_submodule(own.layer), nn.Conv2d)]
    if not convolutions:
        raise RequestError("fig3 is drawn of convolutions: this model has none.")
    files = []
    for name, layer in (("first", convolutions[0]), ("last", convolutions[-1])):
        for log in (False, True):
            file = folder / f"fig3-{name}{'-log' * log}.{kind}"
            figures.save(figures.norm_distribution(layer, log=log, title=layer.layer), file)
            files.append(file)
    return files


def figure4(results: Results, folder: Path, kind: str) -> list[Path]:
    """Accuracy against the interval and against MACs removed, from the ablations made so far."""
    interval: list[tuple[float, float]] = []
    macs: list[tuple[float, float]] = []
    for row in results.table.rows:
        for made in results.all(row):
            accuracy, saved = made.ours.get("accuracy"), made.ours.get("FLOPs")
            if accuracy is None:
                continue
            if row.labels[0] == "interval":
                interval.append((float(row.labels[1]), accuracy / 100))
            elif row.labels[0] == "rate" and saved is not None:
                macs.append((saved / 100, accuracy / 100))
    if not interval or not macs:
        raise RequestError("fig4 is drawn from ablations: run fpgm reproduce ablations first.")
    files = [folder / f"fig4-interval.{kind}", folder / f"fig4-flops.{kind}"]
    figures.save(figures.accuracy_by_interval({"FPGM": _means(interval)}), files[0])
    figures.save(figures.accuracy_by_macs({"FPGM": _means(macs)}), files[1])
    return files


def figure5(model: nn.Module, pictures: Iterable[Tensor], folder: Path, kind: str) -> list[Path]:
    """Maps of the first layer inside the network that loses channels, and which kept ones stand in.

    The first picture is drawn; correlations are over all of them.
    """
    shown = list(islice((x for batch in pictures for x in batch), MOST_PICTURES))
    made = plan(model, shown[0][None], rate=RATE, residual="independent", align=1, rounding="paper")
    paths = [call.path for call in called_layers(model, as_examples(shown[0][None])[0])]
    layer = next((own for own in paths[1:] if removed_filters(made, own)), None)
    if layer is None:
        raise RequestError("fig5 is drawn of a layer that loses channels: none does.")
    gone = removed_filters(made, layer)
    outputs = [layer_output(model, layer, x[None]) for x in shown]
    files = [folder / f"fig5.{kind}", folder / f"fig5-replaced.{kind}"]
    title = f"{layer}: framed channels go"
    figures.save(figures.feature_maps(outputs[0], gone, title=title), files[0])
    pairs = most_alike(np.concatenate(outputs, axis=1), gone)
    figures.save(
        figures.replaced_maps(outputs[0], pairs, title="Removed, and the kept most like it"),
        files[1],
    )
    return files


def _means(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """One point for every place: the mean over seeds."""
    places = sorted({round(x, 3) for x, _ in points})
    return [
        (place, float(torch.tensor([y for x, y in points if round(x, 3) == place]).mean()))
        for place in places
    ]
