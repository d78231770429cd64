"""Rows at a scale that two cores finish: the same code, from trained weights, on a small budget.

What takes the paper hundreds of epochs is a few hundred steps here, so figures are not the
paper's; what can be compared is the order of methods, and the savings.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fpgm.paper.flops as counted
from fpgm.latency.benchmark import bench
from fpgm.models import vgg16
from fpgm.models.checkpoint import load_weights
from fpgm.models.registry import load_model
from fpgm.paper.baselines.comparison import compare
from fpgm.paper.baselines.registry import METHODS, Schedule, Task
from fpgm.paper.baselines.short_training import train_, train_pruning_
from fpgm.paper.tables.paper_tables import TABLE3
from fpgm.paper.tables.row_files import Made
from fpgm.paper.tables.table_schema import Row
from fpgm.paper.tables.trained_weights import find_weights
from fpgm.pruning.compaction import compact
from fpgm.pruning.serialization import load, save
from fpgm.pruning.verification import verify
from fpgm.training.recipes import SHIPPED
from fpgm.utils.progress import Progress
from fpgm.workflow.api import plan, prune

WIDTH = 0.25
"""Of VGG-16, which takes too long at full width."""
VGG_WEIGHTS = "vgg16_quarter.safetensors"
SOFT = {"fpgm": "fpgm-soft", "fpgm-mix": "fpgm-mix-soft"}
PRUNED = ("prune.residual=independent", "prune.rounding=paper", "prune.mode=hard")
"""As the paper's recipes have it."""
PICTURES = ("data", "mean", "std")
"""What says which pictures a network sees, and how."""
LONG = 4
"""Times as long is the second fine-tuning, as the paper's 160 epochs are beside its 40."""


@dataclass(frozen=True)
class Data:
    """Pictures to look at, to train on, and to count accuracy on."""

    look: Iterable[Any]
    learn: Callable[[int], Iterable[Any]]
    """By seed: the same batches in the same order, whatever ran before."""
    accuracy: Callable[[nn.Module], float]


@dataclass(frozen=True)
class Effort:
    """What a quick row may spend."""

    steps: int = 100
    """Of training, 128 pictures each."""
    epochs: int = 6
    """Of training from scratch."""
    images: int = 1024
    seconds: float = 4.0
    """For a comparison of times."""
    batch: int = 4
    backend: str = "eager"
    """In which times are taken."""


class Quick:
    """Makes rows; trained weights are read from a folder.

    A VGG-16 that is not among them is trained here and left at `kept`, by default with them.
    """

    def __init__(
        self,
        weights: Path,
        data: Callable[[], Data],
        effort: Effort,
        progress: Progress | None,
        kept: Path | None = None,
    ) -> None:
        self.weights, self._open, self.effort, self.progress = weights, data, effort, progress
        self._kept = weights / VGG_WEIGHTS if kept is None else kept
        self._data: Data | None = None

    @property
    def data(self) -> Data:
        """Opened when it is needed: times need none."""
        if self._data is None:
            self._data = self._open()
        return self._data

    def make(self, table: str, row: Row, seed: int) -> Made | None:
        """A row, or None where this scale has none."""
        makers: dict[str, Callable[[Row, int], Made | None]] = {
            "baselines": self._baseline,
            "table1": self._cifar,
            "table3": self._vgg_trained,
            "table4": self._vgg_scratch,
            "table5": self._times,
            "ablations": self._ablation,
        }
        torch.manual_seed(seed)
        return makers[table](row, seed) if table in makers else None

    @staticmethod
    def uses(table: str, row: Row) -> tuple[str, ...]:
        """What of an effort and of the data a row depends on, by name."""
        if table in ("table5", "ablations"):  # by times of their own, and by their recipe
            return ()
        spent = {
            "baselines": ("epochs",) if row.network == "vgg16" else (),
            "table1": ("steps", "images"),
            "table3": ("steps", "epochs"),
            "table4": ("epochs",),
        }
        return (*spent.get(table, ()), "test", *PICTURES)

    def start(self, table: str, row: Row) -> Path | None:
        """The trained weights a row starts from, as far as there are any."""
        if table in ("table5", "ablations") or row.imagenet:
            return None
        if row.network != "vgg16":
            return find_weights(self.weights, row)
        given = self.weights / VGG_WEIGHTS
        return next((file for file in (given, self._kept) if file.is_file()), None)

    def _baseline(self, row: Row, seed: int) -> Made | None:
        start = time.perf_counter()
        model, how = self._trained(row), "trained weights, measured"
        if row.network == "vgg16":
            model, how = self._vgg(), f"a quarter as wide, {self.effort.epochs} epochs"
        if model is None:
            return None
        share = 100 * self.data.accuracy(model)
        return Made({"top-1": share}, round(time.perf_counter() - start, 1), how)

    def _trained(self, row: Row) -> nn.Module | None:
        file = self.start("table1", row)
        if file is None or row.network == "vgg16":
            return None
        return load_weights(load_model(row.network), file).eval()

    def _cifar(self, row: Row, seed: int) -> Made | None:
        model = self._trained(row)
        if model is None:
            return None
        layers = counted.cifar_resnet(int(row.network.removeprefix("resnet")))
        macs = row.macs if row.rate is None else counted.saving(layers, row.rate) / 100
        task = self._task(model, macs, seed)
        start = time.perf_counter()
        # From scratch the paper prunes while it trains; from trained weights it fine-tunes.
        name = SOFT.get(row.method, row.method) if row.start == "scratch" else row.method
        made = compare(METHODS[name], task, Schedule(self.effort.steps), self.data.accuracy)
        whole = 100 * self.data.accuracy(model)
        tuned = made.row.once if made.row.tuned is None else made.row.tuned
        ours = {
            "baseline": whole, "accuracy": 100 * tuned, "drop": whole - 100 * tuned,
            "FLOPs left": counted.macs(layers) * (1 - made.row.macs_removed),
            "FLOPs": 100 * made.row.macs_removed,
        }  # fmt: skip
        return Made(
            ours,
            round(time.perf_counter() - start, 1),
            f"{METHODS[name].title} from trained weights, {self.effort.steps} steps of training",
        )

    def _task(self, model: nn.Module, macs: float, seed: int) -> Task:
        return Task(
            model,
            torch.zeros(1, 3, 32, 32).normal_(generator=torch.Generator().manual_seed(0)),
            macs,
            loader=self.data.look,
            training=self.data.learn(seed),
            images=self.effort.images,
            before=Schedule(max(1, self.effort.steps // 2)),
            residual="independent",
            seed=seed,
            progress=self.progress,
        )

    def _vgg(self) -> nn.Module:
        """The trained network of Tables 3 and 4, trained now if it never was."""
        file = self.start("table3", TABLE3.rows[0])
        if file is not None:
            return load(file, lambda: vgg16(width=WIDTH)).eval()
        torch.manual_seed(0)
        model = vgg16(width=WIDTH)
        train_(model, self._task(model, 0.3, 0), self._long(), title="VGG-16")
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        save(model, self._kept)
        return model

    def _long(self) -> Schedule:
        batches = sum(1 for _ in self.data.look)
        return Schedule(self.effort.epochs * batches, lr=0.05)

    def _vgg_trained(self, row: Row, seed: int) -> Made:
        model = self._vgg()
        task = self._task(model, row.macs, seed)
        start = time.perf_counter()
        made = plan(model, task.example, **vgg_options(row))
        small = compact(model, made)
        verify(model, made, task.example, compacted=small).check()
        ours: dict[str, float | None] = {
            "baseline": 100 * self.data.accuracy(model),
            "without fine-tuning": 100 * self.data.accuracy(small.eval()),
        }
        for column, times in (("40 epochs", 1), ("160 epochs", LONG)):
            net = copy.deepcopy(small)
            train_(net, task, Schedule(times * self.effort.steps))
            ours[column] = 100 * self.data.accuracy(net)
        return Made(
            ours,
            round(time.perf_counter() - start, 1),
            f"a quarter as wide, {self.effort.steps} and {LONG * self.effort.steps} steps of "
            "fine-tuning",
        )

    def _vgg_scratch(self, row: Row, seed: int) -> Made:
        whole = 100 * self.data.accuracy(self._vgg())
        torch.manual_seed(seed)
        model = vgg16(width=WIDTH)
        task = self._task(model, row.macs, seed)
        schedule = self._long()
        start = time.perf_counter()
        pruner = train_pruning_(
            model, task, schedule, self.effort.epochs, "VGG-16", mode="hard", **vgg_options(row)
        )
        assert pruner is not None
        small = pruner.compact()
        made = pruner.plan
        assert made is not None
        return Made(
            {"baseline": whole, "accuracy": 100 * self.data.accuracy(small.eval()),
             "FLOPs": 100 * made.macs_removed},
            round(time.perf_counter() - start, 1),
            f"a quarter as wide, {self.effort.epochs} epochs",
        )  # fmt: skip

    def _ablation(self, row: Row, seed: int) -> Made:
        """On digits, a small residual network by its own recipe, pruned as the full ones are."""
        from fpgm.training import read_recipe, train

        start = time.perf_counter()
        given = [f"seed={seed}", *row.changes]
        recipe = read_recipe(SHIPPED / "digits-quick.toml", [*PRUNED, *given])
        if not row.prunes:
            recipe = replace(recipe, prune=None)
        with tempfile.TemporaryDirectory() as place:
            if row.start == "trained":
                whole = replace(recipe, prune=None)
                train(whole, Path(place) / "whole")
                weights = str(Path(place) / "whole" / "weights.safetensors")
                recipe = replace(
                    recipe,
                    model=replace(recipe.model, weights=weights),
                    train=replace(recipe.train, lr=recipe.train.lr / 10),
                )
            results: dict[str, Any] = train(recipe, Path(place) / "run").results
        left = results["macs_after"] / results["macs_before"] if row.prunes else 1.0
        return Made(
            {"accuracy": 100 * results["accuracy"], "FLOPs": 100 * (1 - left)},
            round(time.perf_counter() - start, 1),
            f"digits, a small residual network, {recipe.train.epochs} epochs",
        )  # fmt: skip

    def _times(self, row: Row, seed: int) -> Made:
        assert row.rate is not None
        start = time.perf_counter()
        model = load_model(row.network).eval()
        x = torch.zeros(self.effort.batch, 3, 224, 224).normal_()
        small = prune(
            model, x[:1], rate=row.rate, residual="independent", align=1, rounding="paper"
        )
        measured = bench(
            [model, small], x, backends=[self.effort.backend], seconds=self.effort.seconds
        )
        (found,) = measured.rows
        before, after = found.figures
        where = f"{found.where} ({measured.versions[self.effort.backend]})"
        doubt = "" if found.crowd is None else f"; NOT TO BE RELIED ON: {found.crowd}"
        assert after.theory is not None
        return Made(
            {"ms before": 1000 * before.seconds, "ms after": 1000 * after.seconds,
             "realised": 100 * (1 - 1 / after.faster), "theory": 100 * (1 - 1 / after.theory)},
            round(time.perf_counter() - start, 1),
            f"{where}, fresh weights, every convolution on its own; realised is the median of "
            f"ratios taken in turns{doubt}",
        )  # fmt: skip


def vgg_options(row: Row) -> dict[str, Any]:
    """What PFEC prunes of VGG-16 by its sensitivity, or the same share of every convolution."""
    common = {"criterion": row.method, "rounding": "paper", "align": 1}
    if row.rate is not None:
        return {**common, "rate": row.rate, "ignore": ["classifier.*"]}
    return {**common, "rates": pfec_rates()}


def pfec_rates() -> dict[str, float]:
    """PFEC's rates by the paths of this package's VGG-16."""
    paths = [name for name, m in vgg16(width=WIDTH).named_modules() if isinstance(m, nn.Conv2d)]
    return {
        path: rate
        for path, layer in zip(paths, counted.cifar_vgg16(), strict=False)
        if (rate := counted.pfec_vgg16(layer.name)) > 0
    }
