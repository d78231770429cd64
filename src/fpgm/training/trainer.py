"""Run a recipe: train, prune at the end of epochs, and write the run folder.

Built on Accelerate: the same code runs in one process, under `accelerate launch` and `torchrun`, on
one machine or several. If it is killed at any point, it resumes from the last finished epoch when
started again, and ends with bitwise the same weights as an uninterrupted run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from accelerate.utils import broadcast, broadcast_object_list
from torch import nn

from fpgm.data.base import Batch, ProcessShare
from fpgm.data.registry import DataSplits, open_splits
from fpgm.errors import ModelError, RequestError
from fpgm.models.checkpoint import load_weights
from fpgm.models.registry import load_model
from fpgm.pruning.compaction import compact
from fpgm.pruning.masking import mask_
from fpgm.pruning.plan import Plan
from fpgm.pruning.serialization import load, save
from fpgm.pruning.verification import verify
from fpgm.training.distributed import allow_unused_parameters, make_accelerator
from fpgm.training.ema import ExponentialAverage
from fpgm.training.loss import Loss
from fpgm.training.lr_schedule import learning_rate
from fpgm.training.metrics import EpochMetrics, RunningMetrics, evaluate_accuracy, filter_norms
from fpgm.training.output_checks import all_weights_used, check_logits, check_outputs
from fpgm.training.recipe import DistillConfig, Recipe
from fpgm.training.resume import restore_run_, run_state
from fpgm.training.run_folder import RunFolder
from fpgm.utils.allocator import reuse_freed_memory
from fpgm.utils.rng import seed_everything
from fpgm.utils.run_files import PLAN, SMALL, WEIGHTS
from fpgm.utils.safe_read import expand_user
from fpgm.utils.training_loop import train_steps
from fpgm.workflow.api import check_prunes
from fpgm.workflow.soft_pruner import SoftPruner, Step

REPORT_SECONDS = 0.1
"""Seconds between reading metrics from the device, which makes a GPU wait."""


class Reporter(Protocol):
    """Receives the progress, in the first process."""

    def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
        """Report that training starts, or resumes after some epochs."""

    def on_step(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        """Report loss, accuracy and images per second so far; called from time to time."""

    def on_epoch_end(self, metrics: dict[str, Any]) -> None:
        """Report the metrics of an epoch."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: its metrics and its network, compact if it was pruned."""

    results: dict[str, Any]
    model: nn.Module


def train(
    recipe: Recipe,
    out: str | Path,
    reporter: Reporter | None = None,
    *,
    factory: Callable[[], nn.Module] | None = None,
    identity: Recipe | None = None,
) -> Outcome:
    """Run a recipe to completion, resuming an earlier run.

    Every process of a distributed run calls this; the first one writes to `out`. A `factory` builds
    the network in place of `model.name`. A run is resumed if it used the same recipe. `identity`
    replaces the recipe in that comparison, for example if the same weights may have another path.
    """
    with reuse_freed_memory():
        return _TrainingRun(recipe, Path(out), reporter, factory, identity).run()


class _TrainingRun:
    """One run: everything that is created once, and the loop over epochs."""

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        reporter: Reporter | None,
        factory: Callable[[], nn.Module] | None,
        identity: Recipe | None,
    ) -> None:
        self.recipe = recipe
        self.factory = factory or partial(load_model, recipe.model.name)
        self.accelerator = make_accelerator(recipe.run.precision)
        self.reporter = reporter if self.accelerator.is_main_process else None
        self.folder = RunFolder(out, recipe, identity)
        self._run_on_first(self.folder.check)
        seed_everything(recipe.seed)
        share = ProcessShare(self.accelerator.process_index, self.accelerator.num_processes)
        self.data = _open_data(recipe, share, self.accelerator.device)
        self.model = _make_model(recipe, self.factory).to(self.accelerator.device)
        if recipe.run.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = _make_optimizer(recipe, self.model)
        self.example = torch.randn(
            1, *self.data.shape, generator=torch.Generator().manual_seed(0)
        ).to(self.accelerator.device)
        self.pruner = self._make_pruner()
        if self.pruner is not None:
            check_prunes(self.pruner.planner.build_plan().plan)  # fail now, not after the training
        ema = recipe.train.ema
        self.average = None if ema is None else ExponentialAverage(self.model, ema)
        teacher = _make_teacher(recipe.distill, self.accelerator.device)
        check_outputs(self.model, teacher, self.example, self.data.classes)
        self.loss = Loss(recipe.train.label_smoothing, recipe.distill, teacher)
        self.epoch = 0
        if share.world > 1 and not all_weights_used(self.model, self.example):
            allow_unused_parameters(self.accelerator)
        seed_everything(recipe.seed + share.rank)  # dropout is each process's own
        self.net, self.stepper = self.accelerator.prepare(self.model, self.optimizer)
        if recipe.run.compile:
            self.net = torch.compile(self.net)

    def run(self) -> Outcome:
        done = self._run_on_first(self.folder.results)
        if done is not None:
            return Outcome(done, self._load_finished(done["files"][0]))
        try:
            self._run_on_first(lambda: self.folder.create(self.accelerator.num_processes))
            self._resume()
            epochs = self.recipe.train.epochs
            if self.reporter is not None:
                self.reporter.on_epoch_start(self.epoch, epochs, len(self.data.train))
            while self.epoch < epochs:
                self._epoch()
            return self._finish()
        finally:
            self.folder.close()

    # One epoch.

    def _epoch(self) -> None:
        number = self.epoch
        start = time.perf_counter()
        epoch_metrics = self._train_epoch(number)
        seconds = time.perf_counter() - start
        if not math.isfinite(epoch_metrics.loss):
            raise ModelError(
                f"The loss is {epoch_metrics.loss} in epoch {number + 1}: lower train.lr, or start "
                "with train.warmup."
            )
        metrics: dict[str, Any] = {
            "epoch": number + 1,
            "lr": learning_rate(self.recipe.train, number),
            "train_loss": epoch_metrics.loss,
            "train_accuracy": epoch_metrics.accuracy,
            "images_per_second": round(epoch_metrics.count / seconds, 1),
            "seconds": round(seconds, 2),
            "test_accuracy": self._accuracy(self.model),
        }
        if self.pruner is not None:
            start = time.perf_counter()
            step = self.pruner.step()
            metrics |= _step_metrics(step)
            metrics["pruning_seconds"] = round(time.perf_counter() - start, 2)
            last = number + 1 == self.recipe.train.epochs  # then the average is compacted and saved
            if self.average is not None and step.changed and not last:
                self.average.restart(self.model)
            if step.share is not None:
                metrics["pruned_accuracy"] = self._accuracy(self.model)
        if self.average is not None:
            metrics["average_accuracy"] = self._accuracy(self.average.module)
        self.epoch = number + 1
        self._run_on_first(lambda: self.folder.log(metrics, filter_norms(self.model)))
        self._save()
        if self.reporter is not None:
            self.reporter.on_epoch_end(metrics)

    def _train_epoch(self, number: int) -> EpochMetrics:
        self.net.train()
        metrics = RunningMetrics(self.accelerator.device)
        start = reported = time.perf_counter()
        steps = len(self.data.train)

        def backward(_: int, batch: Batch) -> bool:
            self._train_batch(batch, metrics)
            return True

        def after(step: int) -> None:
            nonlocal reported
            if self.average is not None:
                self.average.update_parameters(self.model)
            now = time.perf_counter()
            if self.reporter is not None and (now - reported > REPORT_SECONDS or step + 1 == steps):
                self.reporter.on_step(number, step + 1, metrics.summarize(start))
                reported = now

        # The last images may be too few for every process to have one.
        enough = takewhile(
            lambda batch: batch.total >= self.accelerator.num_processes,
            self.data.train.epoch(number),
        )
        train_steps(
            enough,
            self.stepper,
            lambda step: learning_rate(self.recipe.train, number + step / steps),
            backward,
            after,
            lambda step: f"Training fails at batch {step + 1} of epoch {number + 1}",
        )
        return metrics.reduce(self.accelerator)

    def _train_batch(self, batch: Batch, metrics: RunningMetrics) -> None:
        """Compute gradients of the batch's mean loss, however the batch is split."""
        parts = self.recipe.run.accumulate
        images = batch.images
        if self.recipe.run.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        pieces = list(zip(images.chunk(parts), batch.labels.chunk(parts), strict=True))
        # Gradients are averaged over processes, so each is scaled by its part of the whole batch.
        weight = self.accelerator.num_processes / batch.total
        for number, (x, labels) in enumerate(pieces, 1):
            last = number == len(pieces)
            with nullcontext() if last else self.accelerator.no_sync(self.net):
                with self.accelerator.autocast():
                    logits = check_logits(self.net(x), "in training")
                loss = self.loss(logits, x, labels)
                self.accelerator.backward(loss * weight)
            metrics.add(loss.detach(), logits.detach(), labels)

    def _accuracy(self, net: nn.Module) -> float:
        # Processes have different images, so their norms' statistics differ until the next step.
        for buffer in net.buffers():
            broadcast(buffer)
        return evaluate_accuracy(net, self.data.test, self.accelerator)

    # Stop, resume, finish.

    def _save(self) -> None:
        """Write a checkpoint, for all processes."""
        state = run_state(self)
        self._run_on_first(lambda: self.folder.checkpoints.save(self.epoch, state))

    def _resume(self) -> None:
        """Resume from the newest complete checkpoint, if there is one."""
        state = self._run_on_first(self.folder.checkpoints.load_newest)
        if state is not None:
            restore_run_(self, state, self.folder.path)
        self._run_on_first(lambda: self.folder.forget_after(self.epoch))

    def _load_finished(self, name: str) -> nn.Module:
        """Load the network of a finished run; other machines may not see the file."""
        if self.accelerator.num_processes == 1:
            return load(self.folder.path / name, self.factory).to(self.accelerator.device).eval()
        data = self._run_on_first((self.folder.path / name).read_bytes)
        with TemporaryDirectory() as place:
            file = Path(place) / name
            file.write_bytes(data)
            model = load(file, self.factory)
        return model.to(self.accelerator.device).eval()

    def _finish(self) -> Outcome:
        """Compact, verify, measure and write."""
        self.accelerator.unwrap_model(self.net, keep_fp32_wrapper=False)
        results: dict[str, Any] = {"epochs": self.epoch}
        model: nn.Module = self.model
        if self.average is not None:
            model = self.average.module
        if self.pruner is not None:
            model, plan, found = self._compact_and_verify(model)
            results |= found
            self._run_on_first(lambda: self.folder.write_plan(plan))
        results["accuracy"] = self._accuracy(model)
        results["parameters"] = sum(p.numel() for p in model.parameters())
        name = WEIGHTS if self.pruner is None and self.recipe.model.compact is None else SMALL
        results["files"] = [name, *([PLAN] if self.pruner is not None else [])]
        self._run_on_first(lambda: save(model, self.folder.path / name))
        self._run_on_first(lambda: self.folder.finish(results))
        return Outcome(results, model)

    def _compact_and_verify(self, model: nn.Module) -> tuple[nn.Module, Plan, dict[str, Any]]:
        assert self.pruner is not None
        small = self.pruner.compact()
        plan, certificate = self.pruner.plan, self.pruner.certificate
        assert plan is not None
        assert certificate is not None
        if model is not self.model:  # the average is compacted like the model
            mask_(model, plan)
            small = compact(model, plan)
            certificate = verify(model, plan, self.example, compacted=small).check()
        found = {
            "masked_accuracy": self._accuracy(model),
            "max_error": certificate.max_error,
            "macs_before": plan.macs_before,
            "macs_after": plan.macs_after,
            "params_before": plan.params_before,
            "params_after": plan.params_after,
        }
        return small, plan, found

    def _make_pruner(self) -> SoftPruner | None:
        if self.recipe.prune is None:
            return None
        options = {k: v for k, v in asdict(self.recipe.prune).items() if v is not None}
        return SoftPruner(self.model, self.example, optimizer=self.optimizer, **options)

    def _run_on_first(self, act: Callable[[], Any]) -> Any:
        """Run a function in the first process, and broadcast its result or its error to all."""
        sent: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            try:
                sent[0] = act()
            except Exception as error:
                if self.accelerator.num_processes == 1:
                    raise
                sent[1] = error
        if self.accelerator.num_processes > 1:
            broadcast_object_list(sent)
        if sent[1] is not None:
            raise sent[1]
        return sent[0]


def _open_data(recipe: Recipe, share: ProcessShare, device: torch.device) -> DataSplits:
    data = recipe.data
    if data.batch % share.world:
        raise RequestError(
            f"data.batch is {data.batch}: it must be divisible by the {share.world} processes."
        )
    return open_splits(data, recipe.seed, share, device)


def _make_model(recipe: Recipe, factory: Callable[[], nn.Module]) -> nn.Module:
    part = recipe.model
    if part.compact is not None:
        return load(expand_user(part.compact), factory)
    model = factory()
    return model if part.weights is None else load_weights(model, part.weights)


def _make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    part = recipe.train
    if part.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), part.lr, weight_decay=part.weight_decay)
    return torch.optim.SGD(
        model.parameters(),
        part.lr,
        momentum=part.momentum,
        nesterov=part.nesterov,
        weight_decay=part.weight_decay,
    )


def _make_teacher(part: DistillConfig | None, device: torch.device) -> nn.Module | None:
    if part is None:
        return None
    teacher = load_weights(load_model(part.model), part.weights)
    return teacher.to(device).eval().requires_grad_(False)


def _step_metrics(step: Step) -> dict[str, Any]:
    return {
        "zeroed": step.zeroed,
        "units": step.units,
        "changed": step.changed,
        "regrown": step.regrown,
        "returned": step.returned,
    }
