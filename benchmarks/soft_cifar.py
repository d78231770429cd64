"""CIFAR-10 ResNet-20, 40 % soft-pruned for 3 epochs from trained weights: criteria and policies.

    FPGM_WEIGHTS=DIR python benchmarks/soft_cifar.py               # 90 minutes; resumes
    FPGM_WEIGHTS=DIR python benchmarks/soft_cifar.py --part 1/2 --threads 1    # and 2/2 in parallel

With --part only that part is trained. Without it, missing rows are trained and the table is
written.

Every variant has the same budget, seed and recipe (`cifar10-resnet20-quick` with the normalization
the weights were trained with, ImageNet's). Accuracy is that of the compact model on all 10,000
test images.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fpgm.cli.train import TrainingBar
from fpgm.training import read_recipe, train
from fpgm.training.recipes import SHIPPED
from trained import add_weights

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


@dataclass(frozen=True)
class Way:
    """One variant of pruning."""

    name: str
    criterion: str = "fpgm"
    residual: str = "independent"
    mode: str = "soft"
    hold: int | None = 2


CRITERIA = (("FPGM", "fpgm"), ("l2 norm (SFP)", "l2"), ("l1 norm", "l1"))
VARIANTS = (
    *(
        Way(f"{title}, {residual}", criterion, residual)
        for residual in ("independent", "coupled")
        for title, criterion in CRITERIA
    ),
    Way("FPGM, independent, hard", mode="hard", hold=None),
    *(
        Way(f"{title}, independent, soft to the end", criterion, hold=None)
        for title, criterion in CRITERIA
    ),
)


def run(way: Way, weights: Path, runs: Path, changes: Sequence[str]) -> dict[str, Any]:
    """Train once, resume, or read the stored result."""
    recipe = read_recipe(
        SHIPPED / "cifar10-resnet20-quick.toml",
        [
            f"model.weights={weights}",
            "data.mean=[0.485, 0.456, 0.406]",
            "data.std=[0.229, 0.224, 0.225]",
            f"prune.criterion={way.criterion}",
            f"prune.residual={way.residual}",
            f"prune.mode={way.mode}",
            f"prune.hold={way.hold or 'none'}",
            *changes,
        ],
    )
    folder = runs / way.name.replace(", ", "-").replace(" ", "-")
    with TrainingBar() as bars:
        outcome = train(recipe, folder, bars)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    threads = json.loads((folder / "environment.json").read_text())["threads"]
    return {
        "way": asdict(way),
        "threads": threads,
        "results": outcome.results,
        "metrics": metrics,
    }


def markdown(command: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "# Algorithm 1 on CIFAR-10, ResNet-20, three epochs"
    yield ""
    yield f"    {command}"
    yield ""
    yield (
        "From trained weights (91.73 %), 40 % of the filters, SGD with a learning rate from 0.02 "
        "to 0 over 3 epochs, one seed. Soft pruning at the end of epochs 1 and 2; filters zeroed "
        "the second time stay zero in the third epoch, unless the name says otherwise. Accuracy "
        "of the compact model on the 10,000 test images. Results differ slightly with the number "
        f"of threads, because of rounding. torch {torch.__version__}, {platform.machine()}."
    )
    yield ""
    yield "| | accuracy | MACs removed | parameters removed | threads |"
    yield "|---|--:|--:|--:|--:|"
    for row in rows:
        r = row["results"]
        macs, params = (1 - r[f"{k}_after"] / r[f"{k}_before"] for k in ("macs", "params"))
        yield (
            f"| {row['way']['name']} | {r['accuracy']:.2%} | {macs:.1%} | {params:.1%} "
            f"| {row['threads']} |"
        )
    yield ""
    yield "## Regrowth"
    yield ""
    yield (
        "At the end of each epoch: how many of the units zeroed an epoch before were no longer "
        "zero (regrown), how many of those were then kept (returned), how many of all units were "
        "zeroed or released (changed), and the test accuracy just before and just after zeroing."
    )
    yield ""
    yield "| | epoch | zeroed | regrown | returned | changed | before | after |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        for m in row["metrics"]:
            yield (
                f"| {row['way']['name']} | {m['epoch']} | {m['zeroed']} of {m['units']} | "
                f"{m['regrown']} | {m['returned']} | {m['changed']} | {m['test_accuracy']:.2%} | "
                f"{m['pruned_accuracy']:.2%} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_weights(parser)
    parser.add_argument("--runs", type=Path, default=Path("runs/soft_cifar"))
    parser.add_argument("--set", action="append", default=[], help="as of fpgm train")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="train the I-th of N shares")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    part, parts = (int(number) for number in options.part.split("/"))
    weights = options.weights / "cifar10_resnet20.safetensors"
    if not 1 <= part <= parts:
        parser.error(f"--part is {options.part}: give 1/2 or 2/2, say.")
    rows = []
    for way in VARIANTS[part - 1 :: parts]:
        rows.append(run(way, weights, options.runs, options.set))
        if parts > 1:
            continue
        command = shlex.join(["python", "benchmarks/soft_cifar.py", *sys.argv[1:]])
        (HERE / "soft_cifar.json").write_text(
            json.dumps({"command": command, "rows": rows}, indent=1) + "\n"
        )
        (HERE / "soft_cifar.md").write_text("\n".join(markdown(command, rows)) + "\n")
    if parts == 1:
        print((HERE / "soft_cifar.md").read_text())


if __name__ == "__main__":
    main()
