"""Rows at the paper's scale: the recipe behind each, its command, and how long it takes.

Hours are a calculation, not a measurement: three times the forward pass's MACs for every picture of
every epoch, at a rate that is stated.
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

import fpgm.paper.flops as counted
from fpgm.errors import RequestError
from fpgm.models.checkpoint import load_weights
from fpgm.models.registry import default_shape, load_model
from fpgm.paper.baselines.registry import METHODS
from fpgm.paper.tables import cited_rows as quoted
from fpgm.paper.tables.paper_tables import BASELINES, TABLE3, TABLE5, TUNED, baseline_of
from fpgm.paper.tables.processes import everywhere, first, join, tops
from fpgm.paper.tables.quick_scale import LONG, pfec_rates
from fpgm.paper.tables.row_files import WEIGHTS, Made
from fpgm.paper.tables.table_schema import Row, Table
from fpgm.paper.tables.trained_weights import digest, find_weights, weights_name
from fpgm.pruning.compaction import compact
from fpgm.pruning.serialization import save
from fpgm.pruning.verification import verify
from fpgm.training.recipes import SHIPPED
from fpgm.utils.progress import Progress
from fpgm.workflow.api import plan

if TYPE_CHECKING:
    from fpgm.training import Recipe
    from fpgm.training.trainer import Reporter

SPEED = 4.4e12
"""Multiply-accumulates a second of a V100 in float32, by the pictures of ResNet-50 that NVIDIA
trains on with one (DeepLearningExamples, resnet50v1.5); `examples/training_cost.py` has others."""
LEAST = 8.0
"""Seconds of an epoch on CIFAR-10 that no GPU goes below: its kernels are too small."""
PICTURES = {"cifar10": 50_000, "imagenet": 1_281_167}
TIMING = 0.1
"""Hours for a row of times, which needs no training."""
SHORT_LR = 0.001
"""Of Table 3's shorter fine-tuning: the authors' script's, as the text has none."""
MACHINE = ("data.root=", "data.workers=", "run.")
"""Settings that are a machine's own: rows made with other ones may stand in one table."""
SCHEDULE = {"mode", "interval", "start", "end", "ramp", "hold"}
"""When a recipe prunes; the rest says what."""


def command(table: Table, row: Row, out: Path) -> str:
    """What makes a row, on one GPU or, behind `accelerate launch`, on many.

    Words in capitals are the user's folders.
    """
    launch = ["fpgm"] if table is TABLE5 else ["accelerate", "launch", "-m", "fpgm"]
    weights = ["--weights", "WEIGHTS"] if row.begins else []
    pictures = ["--data", "IMAGENET"] if row.imagenet and table is not TABLE5 else []
    return shlex.join(
        [*launch, "reproduce", table.name, "--scale", "full", "--rows", row.key, *weights,
         *pictures, "--out", str(out)]
    )  # fmt: skip


def hours(table: Table, row: Row) -> float:
    """Of one GPU, by calculation."""
    if table is TABLE5:
        return TIMING
    pictures = PICTURES["imagenet" if row.imagenet else "cifar10"]
    seconds = 3 * counted.macs(_layers(row)) * pictures / SPEED
    trains = row.quoted and row.start == "trained" and METHODS[row.method].needs == "training"
    epochs = row.epochs + (quoted.EPOCHS if trains else 0)
    return epochs * max(seconds, 0.0 if row.imagenet else LEAST) / 3600


def _layers(row: Row) -> Sequence[counted.Layer]:
    """The row's network as the paper counts it."""
    if row.network == "vgg16":
        return counted.cifar_vgg16()
    depth = int(row.net.removeprefix("resnet"))
    return counted.imagenet_resnet(depth) if row.imagenet else counted.cifar_resnet(depth)


@dataclass(frozen=True)
class _Quoted:
    """What came of a quoted method."""

    model: nn.Module
    seconds: float
    """Of its training."""
    before: float
    """MACs, and those that are left."""
    after: float
    note: str = ""


class Full:
    """Makes rows; each training is a folder below `out`, shared by rows that have it in common."""

    def __init__(self, out: Path, weights: Path, changes: Sequence[str]) -> None:
        self.runs = out / "runs"
        self.weights, self.changes = weights, tuple(changes)

    def check(self, rows: Sequence[Row]) -> None:
        """Refuse changes that no recipe can have, before anything long is done."""
        for row in rows:
            data = self._recipe(row, 0).data
            if data.name == "folder" and data.root is None:
                raise RequestError(
                    f"{row.key} is of ImageNet: name its folder, which holds train and val, "
                    "with --data."
                )

    def settings(self, row: Row, seed: int) -> dict[str, Any]:
        """What a row depends on besides its recipe."""
        given = sorted(own for own in self.changes if not own.startswith(MACHINE))
        start = self.start(row, seed) if row.begins else None
        return {"--set": given, WEIGHTS: digest(start)}

    def start(self, row: Row, seed: int) -> Path | None:
        """Trained weights of a row's network: given ones, or those of a baseline made here."""
        found = find_weights(self.weights, row)
        if found is None:
            base = baseline_of(row.network)
            made = self._folder(base, self._recipe(base, seed)) / "weights.safetensors"
            found = made if made.is_file() else None
        return found

    def make(
        self,
        table: Table,
        row: Row,
        seed: int,
        reporter: Reporter | None = None,
        progress: Progress | None = None,
    ) -> Made:
        """Train by the row's recipe, or go on with it; `progress` is told of what comes before."""
        recipe = self._recipe(row, seed)
        if row.begins:
            recipe = replace(recipe, model=replace(recipe.model, weights=self._given(row, seed)))
        if table is TABLE3:
            return self._tuned(row, recipe, reporter)
        before = after = 1.0
        how = f"{row.recipe}, {recipe.train.epochs} epochs"
        if row.quoted:
            made = self._quoted(row, recipe, reporter, progress)
            model, seconds, before, after = made.model, made.seconds, made.before, made.after
            how = f"{METHODS[row.method].title}, {how}{made.note}"
        else:
            results, model, seconds = self._train(row, recipe, reporter)
            if row.prunes:
                before, after = results["macs_before"], results["macs_after"]
        ours: dict[str, float | None] = {"FLOPs": 100 * (1 - after / before)}
        if row.prunes or row.quoted:
            ours["FLOPs left"] = float(after)
        kinds = (1, 5) if row.imagenet else (1,)
        nets = {"after": model}
        if row.start == "trained":
            nets["before"] = _started(recipe, next(model.parameters()).device)
        for which, net in nets.items():
            found = tops(net, recipe.data, kinds)
            for own, share in zip(table.accuracies, found, strict=False):
                ours[getattr(own, which)] = share
        kept = {key: value for key, value in ours.items() if key in table.keys}
        return Made(kept, seconds, how)

    def _quoted(
        self, row: Row, recipe: Recipe, reporter: Reporter | None, progress: Progress | None
    ) -> _Quoted:
        fresh = partial(load_model, recipe.model.name)
        if row.method == "mil":
            factory = partial(quoted.collaborative, row, fresh, recipe.seed)
            _, model, seconds = self._train(row, recipe, reporter, factory)
            saved, zeros = first(lambda: quoted.skipped(row, model, recipe.data))
            whole = counted.macs(_layers(row))
            return _Quoted(model, seconds, whole, whole * (1 - saved), f"; {zeros}")
        device = join()
        folder = self._folder(row, recipe)
        file = folder.with_name(f"{folder.name}-{quoted.digest(row)[:10]}.safetensors")

        def choose() -> None:
            if not file.is_file():
                quoted.choose(row, _started(recipe, device), recipe.data, recipe.seed, fresh, file,
                              progress)  # fmt: skip

        first(choose)
        everywhere(file)
        small = replace(recipe.model, weights=None, compact=str(file))
        _, model, seconds = self._train(row, replace(recipe, model=small), reporter)
        plan = quoted.chosen(file)
        return _Quoted(model, seconds, plan.macs_before, plan.macs_after)

    def _tuned(self, row: Row, recipe: Recipe, reporter: Reporter | None) -> Made:
        """Table 3: pruned at once, and fine-tuned twice, a quarter as long and in full."""
        assert recipe.prune is not None
        device = join()
        model = _started(recipe, device)
        example = torch.randn(
            default_shape(row.network), generator=torch.Generator().manual_seed(0)
        ).to(device)
        options = {key: value for key, value in asdict(recipe.prune).items()
                   if value is not None and key not in SCHEDULE}  # fmt: skip
        made = plan(model, example, **options)
        small = compact(model, made)
        verify(model, made, example, compacted=small).check()
        file = self._folder(row, recipe).with_suffix(".safetensors")
        file.parent.mkdir(parents=True, exist_ok=True)
        save(small, file)
        ours: dict[str, float | None] = {
            "baseline": tops(model, recipe.data)[0],
            "without fine-tuning": tops(small, recipe.data)[0],
        }
        whole, total = recipe.train, 0.0
        short = replace(
            whole, epochs=max(1, whole.epochs // LONG), lr=SHORT_LR,
            milestones=tuple(own // LONG for own in whole.milestones),
        )  # fmt: skip
        for column, train in zip(TUNED, (short, whole), strict=True):
            start = replace(recipe.model, weights=None, compact=str(file))
            tuning = replace(recipe, model=start, prune=None, train=train)
            results, _, seconds = self._train(row, tuning, reporter)
            ours[column] = 100 * results["accuracy"]
            total += seconds
        return Made(
            ours,
            round(total, 1),
            f"{row.recipe}, {short.epochs} epochs from {SHORT_LR:g} and {whole.epochs} from "
            f"{whole.lr:g}",
        )

    def _recipe(self, row: Row, seed: int) -> Recipe:
        """The row's recipe with its own changes and the user's."""
        from fpgm.training import read_recipe

        assert row.recipe is not None
        given = [*row.changes, f"seed={seed}", *self.changes]
        if row.begins:
            given.append("model.weights=unknown")  # `start` finds them
        recipe = read_recipe(SHIPPED / f"{row.recipe}.toml", given)
        if row.method == "mil" and not any(own.startswith("train.warmup") for own in self.changes):
            part = recipe.train
            slow = replace(part, warmup=quoted.slow_start(part.epochs), warmup_lr=part.lr / 10)
            recipe = replace(recipe, train=slow)
        if not row.prunes:
            return replace(recipe, prune=None)
        if row.network == "vgg16" and row.rate is None and recipe.prune is not None:
            recipe = replace(recipe, prune=replace(recipe.prune, rate=None, rates=pfec_rates()))
        return recipe

    def _given(self, row: Row, seed: int) -> str:
        found = first(partial(self.start, row, seed))
        if found is None:
            base = baseline_of(row.network)
            raise RequestError(
                f"{self.weights} has no {weights_name(row)}: name its folder with --weights, or "
                f"train it: fpgm reproduce {BASELINES.name} --scale full --rows {base.key} "
                f"--seeds {seed + 1} --out {shlex.quote(str(self.runs.parent))}"
            )
        if self.runs in found.parents:
            everywhere(found)
        elif digest(found) != first(partial(digest, found)):  # the user's file is not ours to mend
            raise RequestError(
                f"{found} is not here, or not what it is for the first process: let --weights name "
                "the same on every machine."
            )
        return str(found)

    def _train(
        self,
        row: Row,
        recipe: Recipe,
        reporter: Reporter | None,
        factory: Callable[[], nn.Module] | None = None,
    ) -> tuple[dict[str, Any], nn.Module, float]:
        """Results, network, and seconds of all its epochs, whenever they were."""
        from fpgm.training import train
        from fpgm.training.run_dir import RunFolder

        folder = self._folder(row, recipe)
        outcome = train(recipe, folder, reporter, factory=factory, identity=_shared(row, recipe))
        told = RunFolder(folder, recipe).metrics()
        seconds = sum(own.get("seconds", 0) + own.get("pruning_seconds", 0) for own in told)
        return outcome.results, outcome.model, round(seconds, 1)

    def _folder(self, row: Row, recipe: Recipe) -> Path:
        """Of a training: rows with the same settings and the same weights have the same."""
        name = row.recipe if row.prunes else f"{row.recipe}-unpruned"
        name = f"{row.recipe}-{row.method}" if row.quoted else name
        return self.runs / f"{name}-{recipe.seed}-{_shared(row, recipe).digest()[:10]}"


def _shared(row: Row, recipe: Recipe) -> Recipe:
    """What of a recipe is the same on every machine: by it a training is known.

    Weights are known by their content and not by their path, a machine's own settings do not
    count, and a network with other layers than its name says is no other's.
    """
    part = recipe.model
    start = f", {quoted.START}" if row.method == "mil" else ""
    return replace(
        recipe,
        model=replace(
            part,
            name=f"{part.name}, {row.method}{start}" if row.quoted else part.name,
            weights=part.weights and digest(Path(part.weights)),
            compact=part.compact and digest(Path(part.compact)),
        ),
        data=replace(recipe.data, root=None, workers=0),
        run=type(recipe.run)(),
    )


def _started(recipe: Recipe, device: torch.device) -> nn.Module:
    """The trained network that a recipe starts from."""
    assert recipe.model.weights is not None
    model = load_weights(load_model(recipe.model.name), recipe.model.weights)
    return model.to(device).eval()
