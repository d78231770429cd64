"""The paper's Figures 3 and 5 for trained CIFAR-10 ResNets, drawn for the documentation.

    python benchmarks/figures.py          # seconds

Weights are read from FPGM_WEIGHTS; the image comes with the package. Writes docs/figures/*.svg
and the numbers behind them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fpgm
from fpgm.data.cifar10_sample import read_sample
from fpgm.models import resnet
from fpgm.models.checkpoint import load_weights
from fpgm.report import charts as figures
from fpgm.report.analysis.api import analyze
from fpgm.report.analysis.similar_channels import layer_output, most_correlated, removed_filters
from recovery import shown
from trained import add_weights

HERE = Path(__file__).resolve().parent
OUTPUT_FOLDER = HERE.parent / "docs" / "figures"
X = torch.zeros(1, 3, 32, 32)
FIRST, LAST = "conv1", "layer3.8.conv2"
LAYER, NORM = "layer1.0.conv1", "layer1.0.bn1"
"""The layer whose channels are shown: an early one, whose maps are large."""
IMAGES = 100
"""Images for the correlations; the first is plotted."""


def norms(model: nn.Module) -> dict[str, Any]:
    """Plot Figure 3: the first and the last convolution, linear and logarithmic."""
    analysis = analyze(model, X)
    by_name = {item.layer: item for item in analysis.layers}
    output = {}
    for name in (FIRST, LAST):
        layer = by_name[name]
        for log in (False, True):
            title = f"ResNet-56, {name}"
            sampled = figures.norm_distribution(layer, log=log, title=title)
            figures.save(sampled, OUTPUT_FOLDER / f"norms-{name}{'-log' * log}.svg")
        output[name] = {
            "filters": layer.filters,
            "smallest": min(layer.norms),
            "largest": max(layer.norms),
            "deviation": layer.deviation,
            "least": layer.least,
            "verdict": layer.verdict,
        }
    output["verdicts"] = {words: len(layers) for words, layers in analysis.verdicts().items()}
    convolutions = [item for item in analysis.layers if item.prunable]
    agree = [item.overlap["fpgm and l2"] for item in convolutions]
    output["fpgm and l2 agree"] = statistics.fmean(agree)
    return output


def maps(model: nn.Module) -> dict[str, Any]:
    """Plot Figure 5: removed channels of one layer at 40 %, and the most similar kept ones."""
    plan = fpgm.plan(model, X, rate=0.4, residual="independent", align=1, rounding="paper")
    dropped = removed_filters(plan, LAYER)
    _, test = read_sample()
    photos = shown(test.images[:IMAGES])
    outputs = [layer_output(model, NORM, photo[None]) for photo in photos]
    first = outputs[0]
    figures.save(
        figures.feature_maps(first, dropped, title=f"ResNet-56, {LAYER}: framed channels go"),
        OUTPUT_FOLDER / "maps.svg",
    )
    pairs = most_correlated(np.concatenate(outputs, axis=1), dropped)
    figures.save(
        figures.similar_maps(first, pairs, title="Removed, and the kept channel most like it"),
        OUTPUT_FOLDER / "maps-replaced.svg",
    )
    return {
        "layer": LAYER,
        "channels": len(first),
        "pictures": len(outputs),
        "pairs": [{"removed": a, "kept": b, "correlation": c} for a, b, c in pairs],
    }


def markdown(command: str, result: dict[str, Any]) -> Iterator[str]:
    yield "# The paper's Figures 3 and 5 for a trained CIFAR-10 ResNet-56"
    yield ""
    yield f"    {command}"
    yield ""
    yield "| layer | filters | norms from | to | deviation ÷ mean | smallest ÷ mean | verdict |"
    yield "|---|--:|--:|--:|--:|--:|---|"
    for name in (FIRST, LAST):
        r = result["norms"][name]
        yield (
            f"| {name} | {r['filters']} | {r['smallest']:.3f} | {r['largest']:.2f} "
            f"| {r['deviation']:.2f} | {r['least']:.3f} | {r['verdict']} |"
        )
    yield ""
    for words, count in result["norms"]["verdicts"].items():
        yield f"- {count} layers: {words}"
    yield ""
    yield (
        "Of the filters that FPGM removes at 40 %, the l2 norm removes "
        f"{result['norms']['fpgm and l2 agree']:.0%} too, on average over layers."
    )
    yield ""
    m = result["maps"]
    yield (
        f"Channels of {m['layer']} (after its batch norm) removed at 40 %, and the kept channel "
        f"each correlates with most, over {m['pictures']} test images:"
    )
    yield ""
    yield "| removed | kept | correlation |"
    yield "|--:|--:|--:|"
    for pair in m["pairs"]:
        yield f"| {pair['removed']} | {pair['kept']} | {pair['correlation']:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_weights(parser)
    options = parser.parse_args()
    model = load_weights(resnet(56), options.weights / "cifar10_resnet56.safetensors").eval()
    OUTPUT_FOLDER.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "benchmarks/figures.py"])
    result = {"command": command, "norms": norms(model), "maps": maps(model)}
    (HERE / "figures.json").write_text(json.dumps(result, indent=1) + "\n")
    text = "\n".join(markdown(command, result)) + "\n"
    (HERE / "figures.md").write_text(text)
    print(text)


if __name__ == "__main__":
    sys.exit(main())
