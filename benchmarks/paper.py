"""The paper's CIFAR-10 networks pruned by every method it compares with, and by later ones.

    python benchmarks/paper.py --jobs 2     # resumes; about two hours on two cores

ResNet-20 at 30 and 40 %, ResNet-56 at 40 %, from trained weights (FPGM_WEIGHTS), every convolution
on its own as in the paper, all methods at the MACs that whole filters leave; and a quarter-width
VGG-16 trained here, for the paper's Tables 3 and 4. Accuracy on all 10,000 test pictures (CIFAR-10
from where `fpgm data cifar10` put it): at once, recovered without training, and after as many steps
of training for all. What was measured is kept in --runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fpgm.data.batches import ALONE
from fpgm.data.readings import Epochs, Once
from fpgm.data.sources import Sets, Wanted, open_sets
from fpgm.errors import FpgmError
from fpgm.files import write_text
from fpgm.methods import METHODS, Schedule, Task
from fpgm.methods.comparison import compare
from fpgm.models import resnet
from fpgm.models.weights import load_weights
from fpgm.paper import cifar_resnet, fractional, saving, whole
from fpgm.reproduce import TABLES, Results
from fpgm.reproduce.page import shown
from fpgm.reproduce.quick import LONG, Data, Effort, Quick
from fpgm.tables import markdown, mean_and_spread
from trained import add_weights

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""As the weights were trained."""
STEPS = 100
"""Of training for every method, 128 pictures each: a quarter of an epoch."""
IMAGES = 1024
SEEDS = 3
"""Chance is in every training: it decides the order of pictures."""
VGG = ("table3", "table4")
LEVEL = 0.005
"""Accuracies this near are called level: of 10,000 pictures, two standard errors of one network's
accuracy at 90 % are 0.6 points, and those of a difference on the same pictures somewhat less."""
TRAINED = 0.01
"""The same after training, which another order of pictures changes too."""


@dataclass(frozen=True)
class Setting:
    """A network and how much of it goes."""

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
            saving(layers, rate, whole) / 100,
            f"{saving(layers, rate, fractional):.1f} %",
        )


@cache
def sets(augment: bool) -> Sets:
    wanted = Wanted("cifar10", 128, crop=4 if augment else 0, flip=augment, mean=MEAN, std=STD)
    return open_sets(wanted, 0, ALONE, "cpu")


@torch.no_grad()
def accuracy(net: nn.Module) -> float:
    right = seen = 0
    for batch in sets(False).test.epoch(0):
        right += int((net(batch.images).argmax(1) == batch.labels).sum())
        seen += len(batch.labels)
    return right / seen


def model_of(name: str, weights: Path) -> nn.Module:
    depth = int(name.removeprefix("resnet").partition("-")[0])
    return load_weights(resnet(depth), weights / f"cifar10_resnet{depth}.safetensors").eval()


def one(setting: Setting, method: str, seed: int, weights: Path, file: Path) -> str:
    """Measure a row and keep it."""
    torch.set_num_threads(1)
    model, look = model_of(setting.name, weights), Once(sets(False))
    task = Task(
        model,
        next(iter(look))[0][:1],
        setting.macs,
        loader=look,
        training=Epochs(sets(True), seed),
        images=IMAGES,
        before=Schedule(STEPS // 2),
        residual="independent",
        seed=seed,
    )
    # Where a choice has no chance in it, what is recovered from it is the same for every seed.
    by_chance = method == "random" or METHODS[method].needs == "training"
    try:
        done = compare(
            METHODS[method],
            task,
            Schedule(STEPS),
            accuracy,
            recovering=seed == 0 or by_chance,
        )
        told: dict[str, Any] = done.row.to_dict()
    except FpgmError as error:
        told = {"method": method, "seed": seed, "failed": str(error)}
    write_text(file, json.dumps(told) + "\n")
    return file.name


def original(setting: Setting, weights: Path, file: Path) -> str:
    torch.set_num_threads(1)
    write_text(file, json.dumps({"accuracy": accuracy(model_of(setting.name, weights))}) + "\n")
    return file.name


def vgg(table: str, key: str, seed: int, runs: Path) -> str:
    """A row of the paper's Table 3 or 4 at quick scale."""
    torch.set_num_threads(1)
    data = Data(Once(sets(False)), partial(Epochs, sets(True)), accuracy)
    quick = Quick(runs, lambda: data, Effort(steps=STEPS, images=IMAGES), None)
    row = TABLES[table].row(key)
    made = quick.make(table, row, seed)
    assert made is not None
    command = f"fpgm reproduce {table} --rows {key} --seeds {SEEDS}"
    Results(runs, TABLES[table], "quick").keep(row, seed, made, command)
    return f"{table} {key} {seed}"


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
    """Everything that is not there yet; rows of VGG wait until one of them has trained it."""
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
        for done in waiting:
            print(done.result(), flush=True)
    missing = [
        (name, row.key, seed)
        for seed in range(SEEDS)
        for name in VGG
        for row in TABLES[name].rows
        if Results(runs, TABLES[name], "quick").made(row, seed) is None
    ]
    if missing:
        print(vgg(*missing[0], runs), flush=True)
    with ProcessPoolExecutor(jobs) as pool:
        for done in [pool.submit(vgg, *own, runs) for own in missing[1:]]:
            print(done.result(), flush=True)


def collected(runs: Path) -> dict[str, Any]:
    """What was measured so far."""

    def read(name: str) -> Any:
        file = runs / name
        return json.loads(file.read_text()) if file.exists() else None

    found: dict[str, Any] = {"settings": [], "tables": {}}
    for setting in settings():
        rows = [
            row
            for method in METHODS
            for seed in range(SEEDS)
            if (row := read(f"{setting.name}-{method}-{seed}.json")) is not None
        ]
        whole_model = read(f"{setting.name}-original.json")
        found["settings"].append({**asdict(setting), "original": whole_model, "rows": rows})
    for name in VGG:
        header, lines = shown(Results(runs, TABLES[name], "quick"))
        found["tables"][name] = {"header": header, "lines": lines}
    return found


def page(result: dict[str, Any]) -> Iterator[str]:
    yield "# Every method, the same network, the same MACs"
    yield ""
    yield f"    {result['command']}"
    yield ""
    yield (
        "Accuracy on CIFAR-10's 10,000 test pictures. *At once*: as the method leaves the network. "
        f"*Recovered*: its choice of units, weights solved for with {result['images']} unlabelled "
        f"pictures. *Trained on*: from at once, {result['steps']} steps of SGD with 128 pictures "
        "each, which is all the training a method gets: one that trains before it prunes has half "
        "of them left. Every convolution on its own (`independent`), the classifier left alone, "
        "all at the MACs that whole filters leave; the paper's own figure, of fractional filters, "
        "stands beside. Mean and deviation of as many seeds as the last column says: they decide "
        "the order of pictures, and which units go where that is by chance or follows training. A "
        "figure without a deviation is the same for all. Seconds are those of "
        "choosing, and of training before it, on one thread beside other work. What is missing has "
        "not been measured."
    )
    for setting in result["settings"]:
        yield from _section(setting)
    yield from _verdict(result["settings"])
    for name, own in result["tables"].items():
        yield ""
        yield f"## {TABLES[name].title} ({name.title()})"
        yield ""
        yield (
            f"`fpgm reproduce {name} --seeds N`, N as in its column: VGG-16 a quarter as wide, "
            f"trained for {Effort.epochs} epochs; fine-tuning of {STEPS} and {LONG * STEPS} steps "
            "stands for the paper's 40 and 160 epochs. The paper's figures are of the full width. "
            "So narrow a network after so short a training has nothing to spare: pruned without "
            "fine-tuning, it gives all pictures one class."
        )
        yield ""
        yield markdown(own["header"], own["lines"], len(TABLES[name].labels))


def _section(setting: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"## {setting['title']}"
    yield ""
    kept = setting["original"]
    first = "missing" if kept is None else f"{kept['accuracy']:.2%}"
    yield (
        f"{setting['macs']:.1%} of MACs asked of all (the paper prints {setting['printed']}); "
        f"original {first}."
    )
    yield ""
    rows = []
    for name in METHODS:
        own = [row for row in setting["rows"] if row["method"] == name]
        if not own:
            rows.append((METHODS[name].title, "missing", "", "", "", "", "0"))
        elif any("failed" in row for row in own):
            rows.append((METHODS[name].title, "failed", own[0]["failed"], "", "", "", ""))
        else:
            shares = [_share(own, key) for key in ("once", "recovered", "tuned")]
            removed = statistics.mean(row["macs_removed"] for row in own)
            seconds = statistics.mean(row["seconds"] for row in own)
            rows.append(
                (METHODS[name].title, f"{removed:.1%}", *shares, f"{seconds:.0f}", str(len(own)))
            )
    header = ("method", "MACs removed", "at once", "recovered", "trained on", "seconds", "seeds")
    yield markdown(header, rows)


def _verdict(settings: list[dict[str, Any]]) -> Iterator[str]:
    """FPGM against each of the others, in words."""
    yield ""
    yield "## Where FPGM wins, ties and loses"
    yield ""
    yield (
        f"Level is within {100 * LEVEL:g} points, after training within {100 * TRAINED:g}. MIL "
        "removes nothing and is left out, and so are FPGM's own variants."
    )
    yield ""
    rows = []
    for setting in settings:
        means = {name: _means(setting, name) for name in METHODS}
        for key, title, near in (
            ("recovered", "recovered", LEVEL),
            ("tuned", "trained on", TRAINED),
        ):
            own = means["fpgm"].get(key)
            ahead, level, behind = [], [], []
            for name, found in means.items():
                if own is None or key not in found or name.startswith(("fpgm", "mil")):
                    continue
                more = own - found[key]
                side = ahead if more > near else behind if more < -near else level
                side.append(METHODS[name].title)
            rows.append((setting["title"], title, *map("; ".join, (ahead, level, behind))))
    yield markdown(("network", "", "FPGM is ahead of", "level with", "behind"), rows, 5)


def _share(rows: list[dict[str, Any]], key: str) -> str:
    """Mean and deviation; a figure that is the same for every seed has none."""
    found = [row[key] for row in rows if row[key] is not None]
    return mean_and_spread(found[:1] if len(set(found)) == 1 else found)


def _means(setting: dict[str, Any], method: str) -> dict[str, float]:
    own = [row for row in setting["rows"] if row["method"] == method and "failed" not in row]
    found = {
        key: [row[key] for row in own if row[key] is not None] for key in ("recovered", "tuned")
    }
    return {key: statistics.mean(values) for key, values in found.items() if values}


if __name__ == "__main__":
    sys.exit(main())
