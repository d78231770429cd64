"""Algorithm 1 on scikit-learn's digits: modes and criteria compared with the unpruned network.

    python benchmarks/soft_digits.py                # 5 seeds, a few minutes
    python benchmarks/soft_digits.py --seeds 1      # a first look

Every run trains the same small residual network from scratch, 30 passes over 1,300 images, and
prunes 40 % at the end of every epoch of 3 passes. Accuracy is the compact model's on the other 497.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fpgm
from fpgm.models import digits

HERE = Path(__file__).resolve().parent
RATE, EPOCHS, PASSES = 0.4, 10, 3


@dataclass(frozen=True)
class Way:
    """One variant of pruning; `momentum` means that the pruner gets the optimizer."""

    name: str
    criterion: str | None
    mode: str = "soft"
    momentum: bool = True


VARIANTS = (
    Way("not pruned", None),
    Way("FPGM, soft", "fpgm"),
    Way("FPGM, soft, momentum left alone", "fpgm", momentum=False),
    Way("FPGM, hard", "fpgm", mode="hard"),
    Way("FPGM-mix, soft", "mix"),
    Way("l2 norm, soft (SFP)", "l2"),
    Way("l1 norm, soft", "l1"),
    Way("random, soft", "random"),
)


def run(way: Way, seed: int) -> dict[str, Any]:
    """Train once; return the compact model's accuracy and the mean number of regrown units."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    train, test = data()
    net = digits()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * PASSES)
    pruner = None
    if way.criterion is not None:
        options: dict[str, Any] = {"rate": RATE, "criterion": way.criterion, "mode": way.mode}
        given = optimizer if way.momentum else None
        pruner = fpgm.SoftPruner(net, train[0][:2], **options, seed=seed, optimizer=given)
    steps = []
    for _ in range(EPOCHS):
        for _ in range(PASSES):
            one_pass(net, optimizer, train)
            schedule.step()
        if pruner is not None:
            steps.append(pruner.step())
    result = net if pruner is None else pruner.compact()
    later = steps[1:]
    return {
        "way": way.name,
        "seed": seed,
        "accuracy": accuracy(result, test),
        "regrown": statistics.mean(s.regrown / s.zeroed for s in later) if later else None,
        "returned": statistics.mean(s.returned / s.zeroed for s in later) if later else None,
    }


def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Split the digits: 1,300 for training, 497 for testing."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1300], order[1300:]
    return (x[train], y[train]), (x[test], y[test])


def one_pass(
    net: nn.Module, optimizer: torch.optim.Optimizer, train: tuple[Tensor, Tensor]
) -> None:
    """Train on all images once, in batches of 64."""
    net.train()
    for batch in torch.randperm(len(train[0])).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(train[0][batch]), train[1][batch]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(net: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """Compute the accuracy in percent."""
    net.eval()
    return 100 * float((net(test[0]).argmax(1) == test[1]).float().mean())


def markdown(command: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "# Algorithm 1 on digits"
    yield ""
    yield f"    {command}"
    yield ""
    seeds = len({row["seed"] for row in rows})
    yield (
        f"scikit-learn's digits, a residual network trained from scratch, {EPOCHS} epochs of "
        f"{PASSES} passes, {RATE:.0%} of the units pruned at the end of every epoch; accuracy of "
        f"the compact model on 497 test images, mean and standard deviation of {seeds} seeds. "
        "Regrown: fraction of the units zeroed at the end of one epoch whose filters are not zero "
        "at the end of the next. Returned: fraction of them that is then kept. torch "
        f"{torch.__version__}, {platform.machine()}."
    )
    yield ""
    yield "| | accuracy | ± | regrown | returned |"
    yield "|---|--:|--:|--:|--:|"
    for way in VARIANTS:
        item = [row for row in rows if row["way"] == way.name]
        scores = [row["accuracy"] for row in item]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        cells = [f"{statistics.mean(scores):.2f}", f"{spread:.2f}"]
        for key in ("regrown", "returned"):
            known = [row[key] for row in item if row[key] is not None]
            cells.append(f"{statistics.mean(known):.0%}" if known else "–")
        yield f"| {way.name} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    jobs = [(way, seed) for seed in range(options.seeds) for way in VARIANTS]
    with ProcessPoolExecutor(options.workers) as pool:
        waiting = [pool.submit(run, way, seed) for way, seed in jobs]
        rows = [future.result() for future in track(waiting, "training")]
    command = shlex.join(["python", "benchmarks/soft_digits.py", *sys.argv[1:]])
    about = {"command": command, "rate": RATE, "epochs": EPOCHS, "passes": PASSES}
    record = {"about": about, "ways": [asdict(way) for way in VARIANTS], "rows": rows}
    (HERE / "soft_digits.json").write_text(json.dumps(record, indent=1) + "\n")
    (HERE / "soft_digits.md").write_text("\n".join(markdown(command, rows)) + "\n")
    print("\n".join(markdown(command, rows)))


if __name__ == "__main__":
    main()
