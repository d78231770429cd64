"""Reproduce rows at a small scale that runs on two CPU cores.

The code is the same, but rows start from trained weights and train for a few hundred steps instead
of hundreds of epochs. The accuracies therefore differ from the paper's; the order of methods and
the savings can be compared.
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

from fpgm.latency.benchmark import bench
from fpgm.models import vgg16
from fpgm.models.checkpoint import load_weights
from fpgm.models.registry import load_model
from fpgm.paper import flops
from fpgm.paper.baselines.comparison import compare
from fpgm.paper.baselines.registry import METHODS, SgdSchedule, Task
from fpgm.paper.baselines.short_training import train_, train_and_prune_
from fpgm.paper.tables.paper_tables import TABLE3
from fpgm.paper.tables.row_files import RowResult
from fpgm.paper.tables.table_schema import TableRow
from fpgm.paper.tables.trained_weights import find_weights
from fpgm.pruning.compaction import compact
from fpgm.pruning.serialization import load, save
from fpgm.pruning.verification import verify
from fpgm.training.recipes import SHIPPED
from fpgm.utils.progress import Progress
from fpgm.workflow.api import plan, prune

VGG_WIDTH = 0.25
"""Width of VGG-16, relative to the paper's, which would take too long."""
VGG_WEIGHTS = "vgg16_quarter.safetensors"
SOFT_METHODS = {"fpgm": "fpgm-soft", "fpgm-mix": "fpgm-mix-soft"}
PAPER_PRUNING = ("prune.residual=independent", "prune.rounding=paper", "prune.mode=hard")
"""Changes that make a recipe prune as in the paper."""
IMAGE_SETTINGS = ("data", "mean", "std")
"""Options of the command that select and normalize images."""
LONG_TUNING_FACTOR = 4
"""Length of Table 3's second fine-tuning relative to the first: 160 epochs to 40."""


@dataclass(frozen=True)
class QuickData:
    """Images for calibration and training, and a function that measures accuracy."""

    calibration: Iterable[Any]
    training: Callable[[int], Iterable[Any]]
    """Returns the training batches of a seed, always in the same order."""
    accuracy: Callable[[nn.Module], float]


@dataclass(frozen=True)
class QuickBudget:
    """How much computation a quick row may use."""

    steps: int = 100
    """Training steps, with 128 images each."""
    epochs: int = 6
    """Epochs of training from scratch."""
    images: int = 1024
    """Images for calibration."""
    seconds: float = 4.0
    """Duration of a latency measurement."""
    batch: int = 4
    """Batch size of a latency measurement."""
    backend: str = "eager"
    """Runtime of a latency measurement."""


class QuickScale:
    """Reproduces rows at quick scale.

    Args:
        weights: the folder with trained weights.
        data: opens the data, when it is needed.
        effort: how much computation a row may use.
        progress: receives the progress.
        vgg_file: where VGG-16 is saved if it has to be trained; in `weights` by default.
    """

    def __init__(
        self,
        weights: Path,
        data: Callable[[], QuickData],
        budget: QuickBudget,
        progress: Progress | None,
        vgg_file: Path | None = None,
    ) -> None:
        self.weights, self._open_data, self.budget, self.progress = weights, data, budget, progress
        self._vgg_file = weights / VGG_WEIGHTS if vgg_file is None else vgg_file
        self._data: QuickData | None = None

    @property
    def data(self) -> QuickData:
        """The data, opened when it is first needed: latency rows need none."""
        if self._data is None:
            self._data = self._open_data()
        return self._data

    def run(self, table: str, row: TableRow, seed: int) -> RowResult | None:
        """Reproduce a row; return None if it cannot be at this scale, or weights are missing."""
        methods: dict[str, Callable[[TableRow, int], RowResult | None]] = {
            "baselines": self._run_baseline,
            "table1": self._run_table1,
            "table3": self._run_table3,
            "table4": self._run_table4,
            "table5": self._run_table5,
            "ablations": self._run_ablation,
        }
        torch.manual_seed(seed)
        return methods[table](row, seed) if table in methods else None

    @staticmethod
    def used_settings(table: str, row: TableRow) -> tuple[str, ...]:
        """List the options that a row's result depends on."""
        if table in ("table5", "ablations"):  # they have fixed settings and their own data
            return ()
        used = {
            "baselines": ("epochs",) if row.network == "vgg16" else (),
            "table1": ("steps", "images"),
            "table3": ("steps", "epochs"),
            "table4": ("epochs",),
        }
        return (*used.get(table, ()), "test", *IMAGE_SETTINGS)

    def start_weights(self, table: str, row: TableRow) -> Path | None:
        """Find the trained weights that a row starts from; None if there are none."""
        if table in ("table5", "ablations") or row.imagenet:
            return None
        if row.network != "vgg16":
            return find_weights(self.weights, row)
        given = self.weights / VGG_WEIGHTS
        return next((file for file in (given, self._vgg_file) if file.is_file()), None)

    def _run_baseline(self, row: TableRow, seed: int) -> RowResult | None:
        start = time.perf_counter()
        model, how = self._load_trained(row), "trained weights, measured"
        if row.network == "vgg16":
            model, how = self._load_or_train_vgg(), f"quarter width, {self.budget.epochs} epochs"
        if model is None:
            return None
        accuracy = 100 * self.data.accuracy(model)
        return RowResult({"top-1": accuracy}, round(time.perf_counter() - start, 1), how)

    def _load_trained(self, row: TableRow) -> nn.Module | None:
        file = self.start_weights("table1", row)
        if file is None or row.network == "vgg16":
            return None
        return load_weights(load_model(row.network), file).eval()

    def _run_table1(self, row: TableRow, seed: int) -> RowResult | None:
        model = self._load_trained(row)
        if model is None:
            return None
        layers = flops.cifar_resnet(int(row.network.removeprefix("resnet")))
        macs = row.macs if row.rate is None else flops.percent_saved(layers, row.rate) / 100
        task = self._task(model, macs, seed)
        start = time.perf_counter()
        # From scratch the paper prunes during training; from trained weights it fine-tunes.
        name = SOFT_METHODS.get(row.method, row.method) if row.start == "scratch" else row.method
        comparison = compare(
            METHODS[name], task, SgdSchedule(self.budget.steps), self.data.accuracy
        )
        baseline = 100 * self.data.accuracy(model)
        tuned = comparison.row.once if comparison.row.tuned is None else comparison.row.tuned
        ours = {
            "baseline": baseline, "accuracy": 100 * tuned, "drop": baseline - 100 * tuned,
            "FLOPs left": flops.macs(layers) * (1 - comparison.row.macs_removed),
            "FLOPs": 100 * comparison.row.macs_removed,
        }  # fmt: skip
        return RowResult(
            ours,
            round(time.perf_counter() - start, 1),
            f"{METHODS[name].title} from trained weights, {self.budget.steps} steps of training",
        )

    def _task(self, model: nn.Module, macs: float, seed: int) -> Task:
        return Task(
            model,
            torch.zeros(1, 3, 32, 32).normal_(generator=torch.Generator().manual_seed(0)),
            macs,
            loader=self.data.calibration,
            training=self.data.training(seed),
            images=self.budget.images,
            before_pruning=SgdSchedule(max(1, self.budget.steps // 2)),
            residual="independent",
            seed=seed,
            progress=self.progress,
        )

    def _load_or_train_vgg(self) -> nn.Module:
        """Load the trained VGG-16 of Tables 3 and 4; train and save it first if necessary."""
        file = self.start_weights("table3", TABLE3.rows[0])
        if file is not None:
            return load(file, lambda: vgg16(width=VGG_WIDTH)).eval()
        torch.manual_seed(0)
        model = vgg16(width=VGG_WIDTH)
        train_(model, self._task(model, 0.3, 0), self._scratch_schedule(), title="VGG-16")
        self._vgg_file.parent.mkdir(parents=True, exist_ok=True)
        save(model, self._vgg_file)
        return model

    def _scratch_schedule(self) -> SgdSchedule:
        batches = sum(1 for _ in self.data.calibration)
        return SgdSchedule(self.budget.epochs * batches, lr=0.05)

    def _run_table3(self, row: TableRow, seed: int) -> RowResult:
        model = self._load_or_train_vgg()
        task = self._task(model, row.macs, seed)
        start = time.perf_counter()
        pruning_plan = plan(model, task.example, **vgg_options(row))
        small = compact(model, pruning_plan)
        verify(model, pruning_plan, task.example, compacted=small).check()
        ours: dict[str, float | None] = {
            "baseline": 100 * self.data.accuracy(model),
            "without fine-tuning": 100 * self.data.accuracy(small.eval()),
        }
        for column, factor in (("40 epochs", 1), ("160 epochs", LONG_TUNING_FACTOR)):
            net = copy.deepcopy(small)
            train_(net, task, SgdSchedule(factor * self.budget.steps))
            ours[column] = 100 * self.data.accuracy(net)
        return RowResult(
            ours,
            round(time.perf_counter() - start, 1),
            f"quarter width, {self.budget.steps} and {LONG_TUNING_FACTOR * self.budget.steps} "
            "steps of fine-tuning",
        )

    def _run_table4(self, row: TableRow, seed: int) -> RowResult:
        baseline = 100 * self.data.accuracy(self._load_or_train_vgg())
        torch.manual_seed(seed)
        model = vgg16(width=VGG_WIDTH)
        task = self._task(model, row.macs, seed)
        schedule = self._scratch_schedule()
        start = time.perf_counter()
        pruner = train_and_prune_(
            model, task, schedule, self.budget.epochs, "VGG-16", mode="hard", **vgg_options(row)
        )
        assert pruner is not None
        small = pruner.compact()
        pruning_plan = pruner.plan
        assert pruning_plan is not None
        return RowResult(
            {"baseline": baseline, "accuracy": 100 * self.data.accuracy(small.eval()),
             "FLOPs": 100 * pruning_plan.macs_removed},
            round(time.perf_counter() - start, 1),
            f"quarter width, {self.budget.epochs} epochs",
        )  # fmt: skip

    def _run_ablation(self, row: TableRow, seed: int) -> RowResult:
        """Reproduce an ablation with a small residual network on digits, pruned as in the paper."""
        from fpgm.training import read_recipe, train

        start = time.perf_counter()
        changes = [f"seed={seed}", *row.changes]
        recipe = read_recipe(SHIPPED / "digits-quick.toml", [*PAPER_PRUNING, *changes])
        if not row.prunes:
            recipe = replace(recipe, prune=None)
        with tempfile.TemporaryDirectory() as folder:
            if row.start == "trained":
                unpruned = replace(recipe, prune=None)
                train(unpruned, Path(folder) / "whole")
                weights = str(Path(folder) / "whole" / "weights.safetensors")
                recipe = replace(
                    recipe,
                    model=replace(recipe.model, weights=weights),
                    train=replace(recipe.train, lr=recipe.train.lr / 10),
                )
            results: dict[str, Any] = train(recipe, Path(folder) / "run").results
        fraction_left = results["macs_after"] / results["macs_before"] if row.prunes else 1.0
        return RowResult(
            {"accuracy": 100 * results["accuracy"], "FLOPs": 100 * (1 - fraction_left)},
            round(time.perf_counter() - start, 1),
            f"digits, a small residual network, {recipe.train.epochs} epochs",
        )  # fmt: skip

    def _run_table5(self, row: TableRow, seed: int) -> RowResult:
        assert row.rate is not None
        start = time.perf_counter()
        model = load_model(row.network).eval()
        x = torch.zeros(self.budget.batch, 3, 224, 224).normal_()
        small = prune(
            model, x[:1], rate=row.rate, residual="independent", align=1, rounding="paper"
        )
        measured = bench(
            [model, small], x, backends=[self.budget.backend], seconds=self.budget.seconds
        )
        (row_measured,) = measured.rows
        before, after = row_measured.figures
        location = f"{row_measured.where} ({measured.versions[self.budget.backend]})"
        warning = "" if row_measured.crowd is None else f"; UNRELIABLE: {row_measured.crowd}"
        assert after.theory is not None
        return RowResult(
            {"ms before": 1000 * before.seconds, "ms after": 1000 * after.seconds,
             "realised": 100 * (1 - 1 / after.faster), "theory": 100 * (1 - 1 / after.theory)},
            round(time.perf_counter() - start, 1),
            f"{location}, random weights, every convolution pruned independently; realised is the "
            f"median of ratios of alternating measurements{warning}",
        )  # fmt: skip


def vgg_options(row: TableRow) -> dict[str, Any]:
    """Return options of `plan` for VGG-16: PFEC's rates, or one rate for every convolution."""
    common = {"criterion": row.method, "rounding": "paper", "align": 1}
    if row.rate is not None:
        return {**common, "rate": row.rate, "ignore": ["classifier.*"]}
    return {**common, "rates": pfec_rates()}


def pfec_rates() -> dict[str, float]:
    """Return PFEC's rates by the layer paths of this package's VGG-16."""
    paths = [name for name, m in vgg16(width=VGG_WIDTH).named_modules() if isinstance(m, nn.Conv2d)]
    return {
        path: rate
        for path, layer in zip(paths, flops.cifar_vgg16(), strict=False)
        if (rate := flops.pfec_vgg16_rate(layer.name)) > 0
    }
