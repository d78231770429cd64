"""Accuracy of pruned CIFAR-10 ResNets without recovery and with each recovery method.

    python benchmarks/recovery.py --part 1/2 --threads 1       # 2/2 in parallel; 2 h; resumes
    python benchmarks/recovery.py                              # missing rows, and the tables

Trained weights are read from FPGM_WEIGHTS, CIFAR-10 from `fpgm data cifar10`. Accuracy is
measured on all 10,000 test images; recovery uses training images only, without labels. Each result
is kept in --runs, so nothing is measured twice.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fpgm
from fpgm.data import cifar10
from fpgm.models import resnet
from fpgm.models.checkpoint import load_weights
from fpgm.utils.atomic_io import write_text
from peer import peer_pruned
from trained import add_weights

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""The normalization the weights were trained with."""
DEPTHS = (56, 20, 32)
POLICIES = ("independent", "coupled")
SETTINGS: dict[str, dict[str, float]] = {
    "52.6 % of MACs": {"macs": 0.526},
    "40 % of units": {"rate": 0.4},
    "30 % of units": {"rate": 0.3},
    "50 % of units": {"rate": 0.5},
}
METHODS = {
    "none": "nothing",
    "norms": "BN re-estimated",
    "weights": "data-free",
    "solve": "least squares",
    "allocated": "least squares + allocation",
    "distilled": "the same + 1 min distillation",
}
CRITERIA = ("fpgm", "l1", "l2", "random")
PEER = "Torch-Pruning"
TABLE_IMAGES, HEADLINE_IMAGES = 512, 2048
MINUTES = 300
"""From this many seconds of distillation on, rates are allocated by the probe estimate."""

Method = Literal["none", "norms", "weights", "solve", "allocated", "distilled"]


@dataclass(frozen=True)
class Row:
    """One measurement."""

    depth: int
    policy: str
    setting: str
    criterion: str
    method: str
    images: int = TABLE_IMAGES
    distil: int = 0

    @property
    def trials(self) -> bool:
        """Tell whether to allocate rates by the measured error, not by the probe estimate."""
        return self.distil < MINUTES

    @property
    def file(self) -> str:
        parts = [str(value).replace(" ", "").replace("%", "") for value in asdict(self).values()]
        return "-".join(parts) + ".json"


def rows() -> Iterator[Row]:
    """List all rows, the most important first."""
    for depth in DEPTHS:
        for setting in SETTINGS:
            for policy in POLICIES:
                for method in METHODS:
                    distil = 60 if method == "distilled" else 0
                    yield Row(depth, policy, setting, "fpgm", method, distil=distil)
        for setting in SETTINGS:
            for policy in POLICIES:
                for criterion in CRITERIA[1:]:
                    yield Row(depth, policy, setting, criterion, "none")
                    yield Row(depth, policy, setting, criterion, "solve")
            yield Row(depth, "coupled", setting, PEER, "none")
            yield Row(depth, "coupled", setting, PEER, "norms")


HEADLINES = tuple(
    Row(
        56, policy, setting, "fpgm", "distilled" if distil else "allocated", HEADLINE_IMAGES, distil
    )
    for policy in POLICIES
    for setting, distil in (("52.6 % of MACs", 0), ("30 % of units", 0), ("52.6 % of MACs", 600))
)


class Clock:
    """Wall time and CPU time since it was created."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def spent(self) -> dict[str, float]:
        return {
            "seconds": time.perf_counter() - self._wall,
            "processor_seconds": time.process_time() - self._processor,
        }


@dataclass(frozen=True)
class Sensed:
    """Sensitivity, and the time its measurement took."""

    result: fpgm.Sensitivity
    spent: dict[str, float]


class Bench:
    """Models, data, and the folder of results."""

    def __init__(self, weights: Path, data: Path, runs: Path) -> None:
        self.weights, self.runs = weights, runs
        self.data = cifar10.read(data)
        order = torch.randperm(50_000, generator=torch.Generator().manual_seed(0))
        self.order = order[:HEADLINE_IMAGES]
        runs.mkdir(parents=True, exist_ok=True)

    @cache  # noqa: B019  (one bench a process)
    def model(self, depth: int) -> nn.Module:
        return load_weights(
            resnet(depth), self.weights / f"cifar10_resnet{depth}.safetensors"
        ).eval()

    def batches(self, count: int) -> list[Tensor]:
        """Return training images without labels."""
        return [shown(self.data.train_images[part]) for part in self.order[:count].split(128)]

    def measured(self, row: Row) -> dict[str, Any]:
        """Return the stored result of a row; measure it if there is none."""
        file = self.runs / row.file
        if not file.exists():
            result = self._measure(row)
            write_text(file, json.dumps(asdict(row) | result) + "\n")
        return dict(json.loads(file.read_text()))

    def original(self, depth: int) -> float:
        file = self.runs / f"original-{depth}.json"
        if not file.exists():
            write_text(file, json.dumps(accuracy(self.model(depth), self.data)))
        return float(json.loads(file.read_text()))

    def _measure(self, row: Row) -> dict[str, Any]:
        model = self.model(row.depth)
        allocate = row.method in ("allocated", "distilled")
        sensed = self._sensed(row.depth, row.policy, row.trials) if allocate else None
        clock = Clock()
        if row.criterion == PEER:
            small, macs = self._peer(row)
        else:
            plan = self._plan(row, model, sensed.result if sensed else None)
            small, macs = self._recovered(row, model, plan), plan.macs_removed
        spent = clock.spent()
        if sensed is not None:
            spent = {name: seconds + sensed.spent[name] for name, seconds in spent.items()}
        return {
            "macs_removed": macs,
            "accuracy": accuracy(small, self.data),
            **spent,
            "threads": torch.get_num_threads(),
        }

    def _sensed(self, depth: int, policy: str, trials: bool) -> Sensed:
        """Measure sensitivity once for all rows that use it; its time counts for each of them."""
        variant = "" if trials else "-probes"
        name = f"sensitivity-{depth}-{policy}-{torch.get_num_threads()}{variant}"
        cache, times = self.runs / f"{name}.json", self.runs / f"{name}-spent.json"
        clock = Clock()
        result = fpgm.sensitivity(
            self.model(depth),
            shown(self.data.train_images[:1]),
            self.batches(TABLE_IMAGES),
            residual=policy,
            align=1,
            cache=cache,
            trials=trials,
        )
        if not times.exists():
            write_text(times, json.dumps(clock.spent()))
        return Sensed(result, json.loads(times.read_text()))

    def _plan(self, row: Row, model: nn.Module, sensitivity: fpgm.Sensitivity | None) -> fpgm.Plan:
        return fpgm.plan(
            model,
            shown(self.data.train_images[:1]),
            residual=row.policy,  # type: ignore[arg-type]
            criterion=row.criterion,
            align=1,
            allocate=sensitivity or "uniform",
            **SETTINGS[row.setting],  # type: ignore[arg-type]
        )

    def _recovered(self, row: Row, model: nn.Module, plan: fpgm.Plan) -> nn.Module:
        if row.method == "none":
            return fpgm.compact(model, plan)
        method = row.method if row.method in ("norms", "weights") else "solve"
        loader: Any = self.batches(row.images)
        if row.distil:
            loader = Distilling(loader, self.data.train_images)
        return fpgm.recover(
            model, plan, loader,
            method=method, images=row.images, distil=row.distil,  # type: ignore[arg-type]
        )  # fmt: skip

    def _peer(self, row: Row) -> tuple[nn.Module, float]:
        """Prune with Torch-Pruning's FPGM at the rate whose MACs are closest to our uniform plan's.

        Torch-Pruning does not follow shortcuts that pad with zeros, so its models of these
        networks do not run. It may only prune what no shortcut reads: the first convolution of
        each block.
        """
        from fpgm.recovery.bn_reestimation import reestimate_batch_norms_
        from fpgm.utils.calibration_data import read_inputs

        model = self.model(row.depth)
        x = shown(self.data.train_images[:1])
        ours = fpgm.plan(model, x, align=1, **SETTINGS[row.setting])  # type: ignore[arg-type]
        small, removed = peer_pruned(model, x, ours.macs_removed, ignored=_in_stream)
        if row.method == "norms":
            reestimate_batch_norms_(small, read_inputs(self.batches(row.images), row.images))
        return small, removed


class Distilling:
    """The batches to solve with, then all training images, flipped and shifted at random."""

    def __init__(self, first: Sequence[Tensor], images: Tensor) -> None:
        self.first, self.images, self.epoch = first, images, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch += 1
        if self.epoch == 1:
            yield from self.first
            return
        random = torch.Generator().manual_seed(self.epoch)
        for part in torch.randperm(len(self.images), generator=random).split(64):
            x = shown(self.images[part])
            turned = torch.rand(len(part), generator=random) < 0.5
            x[turned] = x[turned].flip(-1)
            right, down = torch.randint(0, 9, (2,), generator=random).tolist()
            padded = nn.functional.pad(x, (4, 4, 4, 4))
            yield padded[:, :, down : down + 32, right : right + 32]


def _in_stream(path: str) -> bool:
    """Tell whether a convolution adds to a residual stream: the stem, and the second of a block."""
    return path == "conv1" or path.endswith(".conv2")


@torch.no_grad()
def accuracy(net: nn.Module, data: cifar10.Cifar10) -> float:
    net.eval()
    parts = zip(data.test_images.split(100), data.test_labels.split(100), strict=True)
    right = sum(int((net(shown(x)).argmax(1) == y).sum()) for x, y in parts)
    return right / len(data.test_labels)


def shown(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def markdown(
    command: str, lookup: Callable[[Row], dict[str, Any] | None], originals: dict[int, float]
) -> Iterator[str]:
    yield "# Accuracy without training, CIFAR-10"
    yield ""
    yield f"    {command}"
    yield ""
    yield (
        "Trained ResNet-20, 32 and 56, pruned one-shot (align 1); accuracy of the compact model "
        f"on the 10,000 test images. Recovery and sensitivity used {TABLE_IMAGES} training images "
        "each, without labels. A minute of distillation is 60 s on one core with all training "
        "images. With allocation, a rate stands for the MACs it would leave. Rows with 512 images "
        "ran on one core, two parts of the table in parallel. Torch-Pruning produces models that "
        "do not run if it may prune all layers (it does not support shortcuts that pad with "
        "zeros), so it pruned only the first convolution of each block, at equal MACs. torch "
        f"{torch.__version__}, {platform.machine()}."
    )
    yield ""
    yield f"## ResNet-56 solved with {HEADLINE_IMAGES} images on two cores"
    yield ""
    yield "| least squares + allocation | residual | MACs removed | accuracy | seconds |"
    yield "|---|---|--:|--:|--:|"
    for row in HEADLINES:
        if (r := lookup(row)) is not None:
            title = row.setting + (
                f", {row.distil // 60} minutes of distillation" * (row.distil > 0)
            )
            yield (
                f"| {title} | {row.policy} | {r['macs_removed']:.1%} | **{r['accuracy']:.2%}** "
                f"| {r['seconds']:.0f} |"
            )
    yield ""
    yield (
        "With minutes of distillation, rates are allocated by the probe estimate "
        "(`trials=False`). Accuracy then varies by about 0.1 between runs; [what was "
        "tried](../docs/recovery.md) lists other results."
    )
    for depth in DEPTHS:
        lines = list(_of_depth(depth, lookup))
        if lines:
            yield ""
            yield f"## ResNet-{depth}, original {originals[depth]:.2%}"
            yield from lines


def _of_depth(depth: int, lookup: Callable[[Row], dict[str, Any] | None]) -> Iterator[str]:
    for policy in POLICIES:
        lines = []
        for setting in SETTINGS:
            results = [
                lookup(Row(depth, policy, setting, "fpgm", method, distil=distil))
                for method, distil in zip(METHODS, (0, 0, 0, 0, 0, 60), strict=True)
            ]
            removed = next((f"{r['macs_removed']:.1%}" for r in results if r), None)
            if removed is not None:
                cells = " | ".join(_cell(r, seconds=True) for r in results)
                lines.append(f"| {setting} | {removed} | {cells} |")
        if lines:
            yield ""
            yield f"{policy.capitalize()}, FPGM; CPU seconds to plan and recover in parentheses:"
            yield ""
            yield f"| removed | MACs removed | {' | '.join(METHODS.values())} |"
            yield "|---|--:|" + "--:|" * len(METHODS)
            yield from lines
    yield from _criteria(depth, lookup)


def _criteria(depth: int, lookup: Callable[[Row], dict[str, Any] | None]) -> Iterator[str]:
    """List the rows of other criteria and of Torch-Pruning."""
    lines = []
    for setting in SETTINGS:
        for policy in POLICIES:
            pairs = [
                [lookup(Row(depth, policy, setting, c, m)) for m in ("none", "solve")]
                for c in CRITERIA
            ]
            peer = [lookup(Row(depth, policy, setting, PEER, m)) for m in ("none", "norms")]
            if any(r for pair in [*pairs[1:], peer] for r in pair):
                cells = " | ".join(_pair(*pair) for pair in [*pairs, peer])
                lines.append(f"| {setting} | {policy} | {cells} |")
    if lines:
        yield ""
        yield "Criteria, without recovery and with least squares, uniform rate:"
        yield ""
        yield f"| removed | policy | {' | '.join(CRITERIA)} | {PEER} (its FPGM), BN re-estimated |"
        yield "|---|---|" + "--:|" * (len(CRITERIA) + 1)
        yield from lines


def _cell(r: dict[str, Any] | None, *, seconds: bool = False) -> str:
    if r is None:
        return ""
    return f"{r['accuracy']:.2%}" + (f" ({r['processor_seconds']:.0f})" if seconds else "")


def _pair(plain: dict[str, Any] | None, solved: dict[str, Any] | None) -> str:
    return f"{_cell(plain)} → {_cell(solved)}" if plain or solved else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_weights(parser)
    parser.add_argument("--data", type=Path, default=cifar10.default_root())
    parser.add_argument("--runs", type=Path, default=Path("runs/recovery"))
    parser.add_argument("--part", metavar="I/N", help="only measure the I-th of N shares")
    parser.add_argument("--headline", action="store_true", help="only measure the first table")
    parser.add_argument("--only-table", action="store_true", help="measure nothing more")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = Bench(options.weights, options.data, options.runs)
    wanted = list(HEADLINES) if options.headline else [*rows(), *HEADLINES]
    if options.part:
        part, parts = (int(number) for number in options.part.split("/"))
        wanted = list(rows())[part - 1 :: parts]
    for row in [] if options.only_table else wanted:
        result = bench.measured(row)
        print(f"{row.file.removesuffix('.json')}: {result['accuracy']:.2%}", flush=True)
    if options.part or options.headline:
        return
    known = {row: bench.measured(row) for row in wanted if (options.runs / row.file).exists()}
    command = shlex.join(["python", "benchmarks/recovery.py"])
    originals = {depth: bench.original(depth) for depth in DEPTHS}
    kept = {"command": command, "original": originals, "rows": list(known.values())}
    (HERE / "recovery.json").write_text(json.dumps(kept, indent=1) + "\n")
    text = "\n".join(markdown(command, known.get, originals)) + "\n"
    (HERE / "recovery.md").write_text(text)
    print(text)


if __name__ == "__main__":
    sys.exit(main())
