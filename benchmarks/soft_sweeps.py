"""The paper's Fig. 4 at a reduced scale: how often to prune, and how much, on digits.

    python benchmarks/soft_sweeps.py                # 3 seeds, a quarter of an hour on two cores
    python benchmarks/soft_sweeps.py --seeds 1      # a first look

Every run trains the digits network from scratch by the recipe `digits-quick`, 30 epochs, pruning
from the first epoch's end as the paper does. Writes soft_sweeps.json, .md and two plots.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from rich.progress import track

from fpgm.training import read_recipe, train
from fpgm.training.recipe import PruneConfig
from fpgm.training.recipes import SHIPPED

HERE = Path(__file__).resolve().parent
EPOCHS = 30
INTERVALS = tuple(range(1, 11))
RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def run(rate: float, interval: int, seed: int) -> dict[str, Any]:
    """Train once; return the accuracy and the MACs removed, in percent."""
    torch.set_num_threads(1)
    recipe = read_recipe(SHIPPED / "digits-quick.toml", [f"train.epochs={EPOCHS}", f"seed={seed}"])
    pruning = PruneConfig(rate=rate, interval=interval, align=1)
    recipe = replace(recipe, prune=pruning if rate else None)
    with tempfile.TemporaryDirectory() as folder:
        results = train(recipe, Path(folder) / "run").results
    removed = 1 - results["macs_after"] / results["macs_before"] if rate else 0.0
    return {
        "rate": rate,
        "interval": interval,
        "seed": seed,
        "accuracy": 100 * results["accuracy"],
        "macs_removed": 100 * removed,
    }


def summary(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return mean and standard deviation over the seeds, by one setting."""
    measurements = []
    for value in dict.fromkeys(row[key] for row in rows):
        entry = [row for row in rows if row[key] == value]
        scores = [row["accuracy"] for row in entry]
        measurements.append(
            {
                key: value,
                "macs_removed": statistics.mean(row["macs_removed"] for row in entry),
                "accuracy": statistics.mean(scores),
                "spread": statistics.stdev(scores) if len(scores) > 1 else 0.0,
            }
        )
    return measurements


def plot(rows: Sequence[dict[str, Any]], key: str, label: str, file: Path) -> None:
    """Plot accuracy and its deviation against one setting."""
    mpl.use("agg")
    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    axes.errorbar(
        [r[key] for r in rows],
        [r["accuracy"] for r in rows],
        [r["spread"] for r in rows],
        marker="o",
        capsize=3,
    )
    axes.set_xlabel(label)
    axes.set_ylabel("accuracy of the compact model, %")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def markdown(
    command: str, intervals: Sequence[dict[str, Any]], rates: Sequence[dict[str, Any]], seeds: int
) -> Iterator[str]:
    yield "# How often to prune, and how much"
    yield ""
    yield f"    {command}"
    yield ""
    yield (
        f"scikit-learn's digits from scratch, {EPOCHS} epochs, FPGM, soft; mean and standard "
        f"deviation of {seeds} seeds, on 497 images. torch {torch.__version__}, "
        f"{platform.machine()}."
    )
    yield ""
    yield "## Pruning interval, 40 % (the paper's Fig. 4a)"
    yield ""
    yield "![accuracy by interval](soft_interval.svg)"
    yield ""
    yield "| interval | accuracy | ± |"
    yield "|--:|--:|--:|"
    for r in intervals:
        yield f"| {r['interval']} | {r['accuracy']:.2f} | {r['spread']:.2f} |"
    yield ""
    yield "## Pruning rate, every epoch (Fig. 4b)"
    yield ""
    yield "![accuracy by MACs removed](soft_flops.svg)"
    yield ""
    yield "| rate | MACs removed, % | accuracy | ± |"
    yield "|--:|--:|--:|--:|"
    for r in rates:
        yield (
            f"| {r['rate']:g} | {r['macs_removed']:.1f} | {r['accuracy']:.2f} | {r['spread']:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    seeds = range(options.seeds)
    requested = [(0.4, i, s) for i in INTERVALS for s in seeds] + [
        (r, 1, s) for r in RATES if r != 0.4 for s in seeds
    ]
    with ProcessPoolExecutor(options.workers) as pool:
        waiting = [pool.submit(run, *item) for item in requested]
        rows = [future.result() for future in track(waiting, "training")]
    intervals = summary([r for r in rows if r["rate"] == 0.4], "interval")
    rates = summary(
        sorted((r for r in rows if r["interval"] == 1), key=lambda r: r["rate"]), "rate"
    )
    plot(intervals, "interval", "epochs between prunings", HERE / "soft_interval.svg")
    plot(rates, "macs_removed", "MACs removed, %", HERE / "soft_flops.svg")
    command = shlex.join(["python", "benchmarks/soft_sweeps.py", *sys.argv[1:]])
    record = {"command": command, "epochs": EPOCHS, "rows": rows}
    (HERE / "soft_sweeps.json").write_text(json.dumps(record, indent=1) + "\n")
    text = "\n".join(markdown(command, intervals, rates, options.seeds))
    (HERE / "soft_sweeps.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
