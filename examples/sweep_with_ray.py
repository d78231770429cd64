"""Compare rates and criteria with Ray Tune, on one machine or a Ray cluster.

    pip install "ray[tune]"
    python examples/sweep_with_ray.py
    python examples/sweep_with_ray.py --rates 0.2 0.3 0.4 0.5 --criteria fpgm l2 bn random

Each trial prunes the ResNet-20 that comes with the package, recovers it on images that also
come with it, and reports accuracy and MACs. Takes two minutes on two cores. Writes sweep.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import rich
import torch
from ray import tune
from rich.table import Table

import fpgm
from fpgm.data.cifar10_sample import read_sample
from fpgm.data.registry import CIFAR10
from fpgm.models import trained_resnet20

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--rates", type=float, nargs="+", default=[0.2, 0.3, 0.4])
parser.add_argument("--criteria", nargs="+", default=["fpgm", "l2", "random"])
parser.add_argument("--images", type=int, default=512, help="images to recover with")
parser.add_argument("--cpus", type=float, default=1, help="cores per trial")
parser.add_argument("--out", type=Path, default=Path("sweep.json"))


def trial(config: dict[str, Any]) -> dict[str, float]:
    """Run one point of the grid; Ray calls this in a separate process, on any free machine."""
    torch.set_num_threads(max(1, int(config["cpus"])))
    train, test = read_sample()
    train_batches = CIFAR10.apply(train.take_first(config["images"]).images).split(50)
    test_images = CIFAR10.apply(test.images)
    model = trained_resnet20()
    plan = fpgm.plan(model, test_images[:1], rate=config["rate"], criterion=config["criterion"])
    fpgm.verify(model, plan, test_images[:8]).check()
    small = fpgm.recover(model, plan, train_batches, images=config["images"])
    with torch.no_grad():
        predictions = torch.cat([small(x).argmax(1) for x in test_images.split(250)])
    accuracy = float((predictions == test.labels).float().mean())
    return {"accuracy": accuracy, "macs_removed": plan.macs_removed}


def main() -> None:
    """Run every criterion at every rate, as many in parallel as there are cores."""
    options = parser.parse_args()
    space = {
        "rate": tune.grid_search(options.rates),
        "criterion": tune.grid_search(options.criteria),
        "images": options.images,
        "cpus": options.cpus,
    }
    results = tune.Tuner(tune.with_resources(trial, {"cpu": options.cpus}), param_space=space).fit()
    if results.errors:
        raise SystemExit(f"{len(results.errors)} trials failed: {results.errors[0]}")

    rows = [
        {name: result.config[name] for name in ("criterion", "rate")}
        | {name: result.metrics[name] for name in ("macs_removed", "accuracy")}
        for result in results
    ]
    rows.sort(key=lambda row: -row["accuracy"])
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    table = Table("criterion", "rate", "MACs removed", "accuracy")
    for row in rows:
        fractions = (f"{row[name]:.1%}" for name in ("macs_removed", "accuracy"))
        table.add_row(row["criterion"], f"{row['rate']:g}", *fractions)
    rich.print(table)


if __name__ == "__main__":
    main()
