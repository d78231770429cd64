"""The paper's CIFAR-10 networks pruned by every method it compares with, and by later ones.

    python benchmarks/paper.py --jobs 2     # resumes; about six hours on two cores

ResNet-20 at 30 and 40 %, ResNet-56 at 40 %, from trained weights (FPGM_WEIGHTS), every convolution
separately as in the paper, all methods at the MACs that whole filters leave; and a quarter-width
VGG-16 trained here, for the paper's Tables 3 and 4. Accuracy on all 10,000 test images (CIFAR-10
from `fpgm data cifar10`): one-shot, recovered without training, and after the same number of
training steps for all. MIL, whose zeros appear when training from random weights, is also trained
that way. Results are kept in --runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fpgm.data.base import SINGLE_PROCESS
from fpgm.data.loaders import Epochs, FirstEpoch
from fpgm.data.registry import DataSpec, DataSplits, open_splits
from fpgm.errors import FpgmError
from fpgm.models import resnet
from fpgm.models.checkpoint import load_weights
from fpgm.paper.baselines.comparison import compare
from fpgm.paper.baselines.registry import METHODS, SgdSchedule, Task
from fpgm.paper.flops import cifar_resnet, fractional_width, integer_width, percent_saved
from fpgm.paper.tables import TABLES, RowStore
from fpgm.paper.tables.full_scale import FullScale
from fpgm.paper.tables.paper_tables import BASELINES, baseline_row
from fpgm.paper.tables.quick_scale import QuickBudget, QuickData, QuickScale
from fpgm.paper.tables.render import table_cells
from fpgm.utils.atomic_io import write_text
from paper_page import page
from trained import add_weights

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""The normalization the weights were trained with."""
STEPS = 100
"""Training steps of every method, 128 images each: a quarter of an epoch."""
IMAGES = 1024
SEEDS = 3
"""Every training depends on the seed, which decides the order of images."""
VGG = {"table3": 25, "table4": 6}
"""Tables, and the epochs of all trainings from scratch in them: Table 4 has nine of its own."""
MIL = ("table1", "resnet32-mil-scratch")
SCRATCH = ((BASELINES.name, baseline_row("resnet32").key), MIL)
"""MIL from random weights, and the same network without it."""
CHANGES = (
    "train.epochs=3", "train.schedule=cosine", "train.warmup=1", "train.warmup_lr=0.01",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A network and how much of it is removed."""

    name: str
    title: str
    macs: float
    printed: str
    """What the paper prints for this saving."""


def settings() -> Iterator[Setting]:
    for depth, rate in ((20, 0.3), (20, 0.4), (56, 0.4)):
        layers = cifar_resnet(depth)
        yield Setting(
            f"resnet{depth}-{rate:.0%}".replace("%", ""),
            f"ResNet-{depth}, {rate:.0%} of all filters",
            percent_saved(layers, rate, integer_width) / 100,
            f"{percent_saved(layers, rate, fractional_width):.1f} %",
        )


@cache
def sets(augment: bool) -> DataSplits:
    wanted = DataSpec("cifar10", 128, crop=4 if augment else 0, flip=augment, mean=MEAN, std=STD)
    return open_splits(wanted, 0, SINGLE_PROCESS, "cpu")


@torch.no_grad()
def accuracy(net: nn.Module) -> float:
    right = recorded = 0
    for batch in sets(False).test.epoch(0):
        right += int((net(batch.images).argmax(1) == batch.labels).sum())
        recorded += len(batch.labels)
    return right / recorded


def model_of(name: str, weights: Path) -> nn.Module:
    depth = int(name.removeprefix("resnet").partition("-")[0])
    return load_weights(resnet(depth), weights / f"cifar10_resnet{depth}.safetensors").eval()


def one(setting: Setting, method: str, seed: int, weights: Path, file: Path) -> str:
    """Measure one row and store it."""
    torch.set_num_threads(1)
    model, look = model_of(setting.name, weights), FirstEpoch(sets(False))
    task = Task(
        model,
        next(iter(look))[0][:1],
        setting.macs,
        loader=look,
        training=Epochs(sets(True), seed),
        images=IMAGES,
        before_pruning=SgdSchedule(STEPS // 2),
        residual="independent",
        seed=seed,
    )
    # Where a choice has no chance in it, what is recovered from it is the same for every seed.
    by_chance = method == "random" or METHODS[method].needs == "training"
    try:
        done = compare(
            METHODS[method],
            task,
            SgdSchedule(STEPS),
            accuracy,
            with_recovery=seed == 0 or by_chance,
        )
        output: dict[str, Any] = done.row.to_dict()
    except FpgmError as error:
        output = {"method": method, "seed": seed, "failed": str(error)}
    write_text(file, json.dumps(output) + "\n")
    return file.name


def original(setting: Setting, weights: Path, file: Path) -> str:
    torch.set_num_threads(1)
    write_text(file, json.dumps({"accuracy": accuracy(model_of(setting.name, weights))}) + "\n")
    return file.name


def vgg_rows(table: str, runs: Path) -> QuickScale:
    """Return rows of the paper's Table 3 or 4 at quick scale, from a network trained here."""
    data = QuickData(FirstEpoch(sets(False)), partial(Epochs, sets(True)), accuracy)
    effort = QuickBudget(steps=STEPS, epochs=VGG[table], images=IMAGES)
    kept = runs / f"vgg16-{VGG[table]}-epochs.safetensors"
    return QuickScale(runs / "weights", lambda: data, effort, None, kept)


def vgg_results(table: str, runs: Path) -> RowStore:
    """Open the stored rows; rows of another training budget are refused."""
    spent = {"steps": STEPS, "epochs": VGG[table], "images": IMAGES}
    return RowStore(runs, TABLES[table], "quick", lambda _row, _seed: spent)


def vgg_trained(table: str, runs: Path) -> str:
    """Train the network that a table starts from, unless it was trained before."""
    torch.set_num_threads(1)
    vgg_rows(table, runs).run(BASELINES.name, baseline_row("vgg16"), 0)
    return f"{table}, its VGG-16"


def vgg(table: str, key: str, seed: int, runs: Path) -> str:
    torch.set_num_threads(1)
    row = TABLES[table].row(key)
    row_result = vgg_rows(table, runs).run(table, row, seed)
    assert row_result is not None
    vgg_results(table, runs).save(row, seed, row_result, vgg_command(table))
    return f"{table} {key} {seed}"


def vgg_command(table: str) -> str:
    mean, std = (",".join(map(str, item)) for item in (MEAN, STD))
    given = f"--epochs {VGG[table]} --seeds {SEEDS} --mean {mean} --std {std}"
    return f"fpgm reproduce {table} {given}"


def scratch(table: str, key: str, runs: Path) -> str:
    """Run a row with the paper's schedule, shortened."""
    torch.set_num_threads(1)
    row = TABLES[table].row(key)
    row_result = FullScale(runs, runs, CHANGES).run(TABLES[table], row, 0)
    scratch_results(table, runs).save(row, 0, row_result, scratch_command(table, key))
    return f"{table} {key}"


def scratch_results(table: str, runs: Path) -> RowStore:
    return RowStore(runs, TABLES[table], "full", FullScale(runs, runs, CHANGES).settings)


def scratch_command(table: str, key: str) -> str:
    changes = " ".join(f"--set {item}" for item in CHANGES)
    return f"fpgm reproduce {table} --scale full --rows {key} {changes}"


# All of it, and the page.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_weights(parser)
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only-table", action="store_true", help="measure nothing more")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    if not options.only_table:
        measure(options.runs, options.weights, options.jobs)
    command = shlex.join(["python", "benchmarks/paper.py", "--jobs", "2"])
    result = {"command": command, "steps": STEPS, "images": IMAGES, **collected(options.runs)}
    (HERE / "paper.json").write_text(json.dumps(result, indent=1) + "\n")
    text = "\n".join(page(result)) + "\n"
    (HERE / "paper.md").write_text(text)
    print(text)


def measure(runs: Path, weights: Path, jobs: int) -> None:
    """Measure all missing rows; rows of VGG wait until it is trained."""
    with ProcessPoolExecutor(jobs) as pool:
        waiting = [
            pool.submit(original, setting, weights, file)
            for setting in settings()
            if not (file := runs / f"{setting.name}-original.json").exists()
        ]
        for seed, setting, method in itertools.product(range(SEEDS), settings(), METHODS):
            file = runs / f"{setting.name}-{method}-{seed}.json"
            if not file.exists():
                waiting.append(pool.submit(one, setting, method, seed, weights, file))
        missing = [
            (name, row.key, seed)
            for seed in range(SEEDS)
            for name in VGG
            for row in TABLES[name].rows
            if vgg_results(name, runs).load(row, seed) is None
        ]
        unfinished = sorted({name for name, _, _ in missing})
        trained = [pool.submit(vgg_trained, name, runs) for name in unfinished]
        for name, key in SCRATCH:
            if scratch_results(name, runs).load(TABLES[name].row(key), 0) is None:
                waiting.append(pool.submit(scratch, name, key, runs))
        for done in trained:
            print(done.result(), flush=True)
        waiting += [pool.submit(vgg, *item, runs) for item in missing]
        for done in waiting:
            print(done.result(), flush=True)


def collected(runs: Path) -> dict[str, Any]:
    """Return all results measured so far."""

    def read(name: str) -> Any:
        file = runs / name
        return json.loads(file.read_text()) if file.exists() else None

    measurements: dict[str, Any] = {"settings": [], "tables": {}}
    for setting in settings():
        rows = [
            row
            for method in METHODS
            for seed in range(SEEDS)
            if (row := read(f"{setting.name}-{method}-{seed}.json")) is not None
        ]
        whole_model = read(f"{setting.name}-original.json")
        measurements["settings"].append({**asdict(setting), "original": whole_model, "rows": rows})
    for name in VGG:
        header, lines = table_cells(vgg_results(name, runs))
        measurements["tables"][name] = {"epochs": VGG[name], "command": vgg_command(name),
                                 "header": header, "lines": lines}  # fmt: skip
    name, key = MIL
    header, lines = table_cells(scratch_results(name, runs), [TABLES[name].row(key)])
    measurements["mil"] = {"table": name, "command": scratch_command(name, key), "header": header,
                    "lines": lines}  # fmt: skip
    return measurements


if __name__ == "__main__":
    sys.exit(main())
