"""Reproduce rows at the paper's scale with training recipes, and estimate their GPU hours.

The hours are computed, not measured: three times the MACs of a forward pass for every image of
every epoch, divided by `MACS_PER_SECOND`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fpgm.errors import RequestError
from fpgm.models.checkpoint import load_weights
from fpgm.models.registry import default_shape, load_model
from fpgm.paper import flops
from fpgm.paper.baselines.registry import METHODS
from fpgm.paper.tables import cited_rows
from fpgm.paper.tables.paper_tables import BASELINES, TABLE3, TABLE5, TUNING_COLUMNS, baseline_row
from fpgm.paper.tables.processes import copy_to_all, init_processes, run_on_first, top_k_accuracy
from fpgm.paper.tables.quick_scale import LONG_TUNING_FACTOR, pfec_rates
from fpgm.paper.tables.row_files import WEIGHTS, RowResult
from fpgm.paper.tables.table_schema import PaperTable, TableRow
from fpgm.paper.tables.trained_weights import find_weights, weights_digest, weights_name
from fpgm.pruning.compaction import compact
from fpgm.pruning.serialization import save
from fpgm.pruning.verification import verify
from fpgm.training.recipes import SHIPPED
from fpgm.utils.progress import Progress
from fpgm.workflow.api import plan

if TYPE_CHECKING:
    from fpgm.training import Recipe
    from fpgm.training.trainer import Reporter

MACS_PER_SECOND = 4.4e12
"""MACs per second of a V100 in float32, from NVIDIA's training throughput of ResNet-50
(DeepLearningExamples, resnet50v1.5); `examples/training_cost.py` has other GPUs."""
MIN_EPOCH_SECONDS = 8.0
"""Minimum seconds of a CIFAR-10 epoch on a GPU: small kernels do not use it fully."""
TRAIN_IMAGES = {"cifar10": 50_000, "imagenet": 1_281_167}
TIMING_HOURS = 0.1
"""Hours for a row of Table 5, which needs no training."""
SHORT_TUNING_LR = 0.001
"""Learning rate of Table 3's shorter fine-tuning, from the authors' script."""
MACHINE_SETTINGS = ("data.root=", "data.workers=", "run.")
"""Settings that may differ between the machines that fill one table."""
SCHEDULE_OPTIONS = {"mode", "interval", "start", "end", "ramp", "hold"}
"""Options of `PrunePart` that say when to prune; the others are options of `plan`."""


def row_command(table: PaperTable, row: TableRow, out: Path) -> str:
    """Return the command that reproduces a row; words in capitals are the user's folders."""
    launch = ["fpgm"] if table is TABLE5 else ["accelerate", "launch", "-m", "fpgm"]
    weights = ["--weights", "WEIGHTS"] if row.needs_weights else []
    data = ["--data", "IMAGENET"] if row.imagenet and table is not TABLE5 else []
    return shlex.join(
        [*launch, "reproduce", table.name, "--scale", "full", "--rows", row.key, *weights,
         *data, "--out", str(out)]
    )  # fmt: skip


def gpu_hours(table: PaperTable, row: TableRow) -> float:
    """Estimate the hours on one GPU."""
    if table is TABLE5:
        return TIMING_HOURS
    images = TRAIN_IMAGES["imagenet" if row.imagenet else "cifar10"]
    seconds = 3 * flops.macs(_layer_shapes(row)) * images / MACS_PER_SECOND
    trains_before_pruning = (
        row.cited and row.start == "trained" and METHODS[row.method].needs == "training"
    )
    epochs = row.epochs + (cited_rows.TRAIN_EPOCHS if trains_before_pruning else 0)
    return epochs * max(seconds, 0.0 if row.imagenet else MIN_EPOCH_SECONDS) / 3600


def _layer_shapes(row: TableRow) -> Sequence[flops.LayerShape]:
    """List the layers of the row's network, as in the paper's FLOPs counts."""
    if row.network == "vgg16":
        return flops.cifar_vgg16()
    depth = int(row.network_name.removeprefix("resnet"))
    return flops.imagenet_resnet(depth) if row.imagenet else flops.cifar_resnet(depth)


@dataclass(frozen=True)
class _CitedResult:
    """The trained model of a cited method."""

    model: nn.Module
    seconds: float
    """Training time."""
    macs_before: float
    macs_after: float
    note: str = ""


class FullScale:
    """Reproduces rows at full scale; rows that need the same training share its run folder.

    Args:
        out: the folder for results and runs.
        weights: a folder with trained weights, or one file.
        changes: changes to recipes, as for `fpgm train --set`.
    """

    def __init__(self, out: Path, weights: Path, changes: Sequence[str]) -> None:
        self.runs = out / "runs"
        self.weights, self.changes = weights, tuple(changes)

    def check(self, rows: Sequence[TableRow]) -> None:
        """Check that the recipes of all rows are valid, before any of them is trained."""
        for row in rows:
            data = self._recipe(row, 0).data
            if data.name == "folder" and data.root is None:
                raise RequestError(
                    f"{row.key} needs ImageNet: give the folder that contains train and val with "
                    "--data."
                )

    def settings(self, row: TableRow, seed: int) -> dict[str, Any]:
        """Return the settings that a row's result depends on besides its recipe."""
        changes = sorted(
            change for change in self.changes if not change.startswith(MACHINE_SETTINGS)
        )
        start_weights = self.start_weights(row, seed) if row.needs_weights else None
        return {"--set": changes, WEIGHTS: weights_digest(start_weights)}

    def start_weights(self, row: TableRow, seed: int) -> Path | None:
        """Find trained weights of a row's network: the user's, or those of a trained baseline."""
        file = find_weights(self.weights, row)
        if file is None:
            base = baseline_row(row.network)
            trained = self._folder(base, self._recipe(base, seed)) / "weights.safetensors"
            file = trained if trained.is_file() else None
        return file

    def run(
        self,
        table: PaperTable,
        row: TableRow,
        seed: int,
        reporter: Reporter | None = None,
        progress: Progress | None = None,
    ) -> RowResult:
        """Train with the row's recipe, or resume it, and measure the result.

        Args:
            table: the row's table.
            row: the row.
            seed: of the training.
            reporter: receives the progress of the training.
            progress: receives the progress of pruning before it.
        """
        recipe = self._recipe(row, seed)
        if row.needs_weights:
            recipe = replace(
                recipe, model=replace(recipe.model, weights=self._required_weights(row, seed))
            )
        if table is TABLE3:
            return self._run_table3(row, recipe, reporter)
        macs_before = macs_after = 1.0
        how = f"{row.recipe}, {recipe.train.epochs} epochs"
        if row.cited:
            cited_result = self._run_cited(row, recipe, reporter, progress)
            model, seconds, macs_before, macs_after = (
                cited_result.model,
                cited_result.seconds,
                cited_result.macs_before,
                cited_result.macs_after,
            )
            how = f"{METHODS[row.method].title}, {how}{cited_result.note}"
        else:
            results, model, seconds = self._train(row, recipe, reporter)
            if row.prunes:
                macs_before, macs_after = results["macs_before"], results["macs_after"]
        ours: dict[str, float | None] = {"FLOPs": 100 * (1 - macs_after / macs_before)}
        if row.prunes or row.cited:
            ours["FLOPs left"] = float(macs_after)
        top_k = (1, 5) if row.imagenet else (1,)
        nets = {"after": model}
        if row.start == "trained":
            nets["before"] = _load_start_model(recipe, next(model.parameters()).device)
        for which, net in nets.items():
            accuracies = top_k_accuracy(net, recipe.data, top_k)
            for columns, accuracy in zip(table.accuracies, accuracies, strict=False):
                ours[getattr(columns, which)] = accuracy
        measured = {key: value for key, value in ours.items() if key in table.keys}
        return RowResult(measured, seconds, how)

    def _run_cited(
        self, row: TableRow, recipe: Recipe, reporter: Reporter | None, progress: Progress | None
    ) -> _CitedResult:
        fresh = partial(load_model, recipe.model.name)
        if row.method == "mil":
            factory = partial(cited_rows.build_collaborative, row, fresh, recipe.seed)
            _, model, seconds = self._train(row, recipe, reporter, factory)
            saved, zeros = run_on_first(lambda: cited_rows.mil_saving(row, model, recipe.data))
            whole = flops.macs(_layer_shapes(row))
            return _CitedResult(model, seconds, whole, whole * (1 - saved), f"; {zeros}")
        device = init_processes()
        folder = self._folder(row, recipe)
        file = folder.with_name(f"{folder.name}-{cited_rows.choice_digest(row)[:10]}.safetensors")

        def choose() -> None:
            if not file.is_file():
                trained = _load_start_model(recipe, device)
                cited_rows.prune_network(
                    row, trained, recipe.data, recipe.seed, fresh, file, progress
                )

        run_on_first(choose)
        copy_to_all(file)
        small = replace(recipe.model, weights=None, compact=str(file))
        _, model, seconds = self._train(row, replace(recipe, model=small), reporter)
        plan = cited_rows.read_pruning_plan(file)
        return _CitedResult(model, seconds, plan.macs_before, plan.macs_after)

    def _run_table3(self, row: TableRow, recipe: Recipe, reporter: Reporter | None) -> RowResult:
        """Reproduce a row of Table 3: one-shot pruning, then a short and a full fine-tuning."""
        assert recipe.prune is not None
        device = init_processes()
        model = _load_start_model(recipe, device)
        example = torch.randn(
            default_shape(row.network), generator=torch.Generator().manual_seed(0)
        ).to(device)
        options = {key: value for key, value in asdict(recipe.prune).items()
                   if value is not None and key not in SCHEDULE_OPTIONS}  # fmt: skip
        pruning_plan = plan(model, example, **options)
        small = compact(model, pruning_plan)
        verify(model, pruning_plan, example, compacted=small).check()
        file = self._folder(row, recipe).with_suffix(".safetensors")
        file.parent.mkdir(parents=True, exist_ok=True)
        save(small, file)
        ours: dict[str, float | None] = {
            "baseline": top_k_accuracy(model, recipe.data)[0],
            "without fine-tuning": top_k_accuracy(small, recipe.data)[0],
        }
        whole, total = recipe.train, 0.0
        short = replace(
            whole, epochs=max(1, whole.epochs // LONG_TUNING_FACTOR), lr=SHORT_TUNING_LR,
            milestones=tuple(milestone // LONG_TUNING_FACTOR for milestone in whole.milestones),
        )  # fmt: skip
        for column, train in zip(TUNING_COLUMNS, (short, whole), strict=True):
            start_model = replace(recipe.model, weights=None, compact=str(file))
            tuning = replace(recipe, model=start_model, prune=None, train=train)
            results, _, seconds = self._train(row, tuning, reporter)
            ours[column] = 100 * results["accuracy"]
            total += seconds
        return RowResult(
            ours,
            round(total, 1),
            f"{row.recipe}, {short.epochs} epochs from {SHORT_TUNING_LR:g} and {whole.epochs} from "
            f"{whole.lr:g}",
        )

    def _recipe(self, row: TableRow, seed: int) -> Recipe:
        """Read the row's recipe and apply its changes and the user's."""
        from fpgm.training import read_recipe

        assert row.recipe is not None
        changes = [*row.changes, f"seed={seed}", *self.changes]
        if row.needs_weights:
            changes.append("model.weights=unknown")  # `start_weights` finds them
        recipe = read_recipe(SHIPPED / f"{row.recipe}.toml", changes)
        if row.method == "mil" and not any(
            change.startswith("train.warmup") for change in self.changes
        ):
            train_settings = recipe.train
            with_warmup = replace(
                train_settings,
                warmup=cited_rows.warmup_epochs(train_settings.epochs),
                warmup_lr=train_settings.lr / 10,
            )
            recipe = replace(recipe, train=with_warmup)
        if not row.prunes:
            return replace(recipe, prune=None)
        if row.network == "vgg16" and row.rate is None and recipe.prune is not None:
            recipe = replace(recipe, prune=replace(recipe.prune, rate=None, rates=pfec_rates()))
        return recipe

    def _required_weights(self, row: TableRow, seed: int) -> str:
        file = run_on_first(partial(self.start_weights, row, seed))
        if file is None:
            base = baseline_row(row.network)
            raise RequestError(
                f"{self.weights} has no {weights_name(row)}: give its folder with --weights, or "
                f"train it: fpgm reproduce {BASELINES.name} --scale full --rows {base.key} "
                f"--seeds {seed + 1} --out {shlex.quote(str(self.runs.parent))}"
            )
        if self.runs in file.parents:
            copy_to_all(file)
        elif weights_digest(file) != run_on_first(
            partial(weights_digest, file)
        ):  # never overwrite the user's file
            raise RequestError(
                f"{file} is missing, or differs from the file of the first process: --weights must "
                "be the same on every machine."
            )
        return str(file)

    def _train(
        self,
        row: TableRow,
        recipe: Recipe,
        reporter: Reporter | None,
        factory: Callable[[], nn.Module] | None = None,
    ) -> tuple[dict[str, Any], nn.Module, float]:
        """Train or resume a run; return its results, its model, and the seconds of all epochs."""
        from fpgm.training import train
        from fpgm.training.run_folder import RunFolder

        folder = self._folder(row, recipe)
        outcome = train(
            recipe, folder, reporter, factory=factory, identity=_machine_independent(row, recipe)
        )
        epochs = RunFolder(folder, recipe).metrics()
        seconds = sum(epoch.get("seconds", 0) + epoch.get("pruning_seconds", 0) for epoch in epochs)
        return outcome.results, outcome.model, round(seconds, 1)

    def _folder(self, row: TableRow, recipe: Recipe) -> Path:
        """Return the run folder of a training, named after its settings and start weights."""
        name = row.recipe if row.prunes else f"{row.recipe}-unpruned"
        name = f"{row.recipe}-{row.method}" if row.cited else name
        return self.runs / f"{name}-{recipe.seed}-{_machine_independent(row, recipe).digest()[:10]}"


def _machine_independent(row: TableRow, recipe: Recipe) -> Recipe:
    """Reduce a recipe to what identifies a training on every machine.

    Weights are identified by content instead of path, settings of the machine are dropped, and a
    network that a cited method has changed gets a name of its own.
    """
    model = recipe.model
    start = f", {cited_rows.INITIALIZATION}" if row.method == "mil" else ""
    return replace(
        recipe,
        model=replace(
            model,
            name=f"{model.name}, {row.method}{start}" if row.cited else model.name,
            weights=model.weights and weights_digest(Path(model.weights)),
            compact=model.compact and weights_digest(Path(model.compact)),
        ),
        data=replace(recipe.data, root=None, workers=0),
        run=type(recipe.run)(),
    )


def _load_start_model(recipe: Recipe, device: torch.device) -> nn.Module:
    """Load the trained network that a recipe starts from."""
    assert recipe.model.weights is not None
    model = load_weights(load_model(recipe.model.name), recipe.model.weights)
    return model.to(device).eval()
