"""Runs a recipe: trains, prunes at the ends of epochs, and writes what a run leaves behind.

Built on Accelerate: the same code runs in one process, under `accelerate launch` and `torchrun`, on
one machine or several. Killed at any moment, it goes on from the last finished epoch when started
again, and ends with the same weights, bit by bit, as a run that was left alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from accelerate.utils import broadcast, broadcast_object_list, gather_object
from torch import nn

from fpgm.data.base import Batch, Share
from fpgm.data.registry import Sets, open_sets
from fpgm.errors import FileError, FpgmError, ModelError, RequestError
from fpgm.models.checkpoint import load_weights
from fpgm.models.registry import load_model
from fpgm.pruning.compaction import compact
from fpgm.pruning.masking import mask_
from fpgm.pruning.plan import Plan
from fpgm.pruning.serialization import load, save
from fpgm.pruning.verification import verify
from fpgm.training.distributed import expect_unreached, make_accelerator
from fpgm.training.ema import Average
from fpgm.training.loss import Loss
from fpgm.training.lr_schedule import learning_rate
from fpgm.training.metrics import Figures, accuracy, filter_norms
from fpgm.training.output_checks import check_answers, checked, reaches_all
from fpgm.training.recipe import DistillPart, Recipe
from fpgm.training.run_dir import PLAN, SMALL, WEIGHTS, RunFolder
from fpgm.utils.rng import random_state, restore_random_state, seed_everything
from fpgm.utils.safe_read import at_home
from fpgm.utils.text import reason
from fpgm.workflow.api import check_prunes
from fpgm.workflow.soft_pruner import SoftPruner, Step

TELL_SECONDS = 0.1
"""How long figures of a running epoch stay on the device: fetching them holds a GPU up."""


class Reporter(Protocol):
    """Who is told how it goes, in the first process."""

    def started(self, epoch: int, epochs: int, steps: int) -> None:
        """Training starts, or goes on, after so many epochs."""

    def stepped(self, epoch: int, step: int, figures: dict[str, float]) -> None:
        """Steps are done: loss, accuracy and images a second so far; told now and then."""

    def finished(self, metrics: dict[str, Any]) -> None:
        """An epoch is done, and what came of it."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to: its figures, and its network, compact if it was pruned."""

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
    """Run a recipe to its end, from wherever an earlier try left it.

    Every process of a distributed run calls this; the first one writes to `out`. A `factory` makes
    the network where no name can: it stands for what `model.name` would make. A run is gone on
    with if it was of the same recipe, or of the same `identity`: what of it counts for the caller,
    to whom the same weights may lie elsewhere.
    """
    return _Run(recipe, Path(out), reporter, factory, identity).run()


class _Run:
    """One run: everything that is made once, and the loop over epochs."""

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
        self._first(self.folder.check)
        seed_everything(recipe.seed)
        share = Share(self.accelerator.process_index, self.accelerator.num_processes)
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
            check_prunes(self.pruner.planner.draw().plan)  # now, not after all the training
        ema = recipe.train.ema
        self.average = None if ema is None else Average(self.model, ema)
        teacher = _make_teacher(recipe.distill, self.accelerator.device)
        check_answers(self.model, teacher, self.example, self.data.classes)
        self.loss = Loss(recipe.train.label_smoothing, recipe.distill, teacher)
        self.epoch = 0
        if share.world > 1 and not reaches_all(self.model, self.example):
            expect_unreached(self.accelerator)
        seed_everything(recipe.seed + share.rank)  # dropout is each process's own
        self.net, self.stepper = self.accelerator.prepare(self.model, self.optimizer)
        if recipe.run.compile:
            self.net = torch.compile(self.net)

    def run(self) -> Outcome:
        done = self._first(self.folder.results)
        if done is not None:
            return Outcome(done, self._kept(done["files"][0]))
        try:
            self._first(lambda: self.folder.create(self.accelerator.num_processes))
            self._resume()
            epochs = self.recipe.train.epochs
            if self.reporter is not None:
                self.reporter.started(self.epoch, epochs, len(self.data.train))
            while self.epoch < epochs:
                self._epoch()
            return self._finish()
        finally:
            self.folder.close()

    # One epoch.

    def _epoch(self) -> None:
        number = self.epoch
        start = time.perf_counter()
        figures = self._train_epoch(number)
        seconds = time.perf_counter() - start
        if not math.isfinite(figures.loss):
            raise ModelError(
                f"The loss is {figures.loss} in epoch {number + 1}: lower train.lr, or start with "
                "train.warmup."
            )
        metrics: dict[str, Any] = {
            "epoch": number + 1,
            "lr": learning_rate(self.recipe.train, number),
            "train_loss": figures.loss,
            "train_accuracy": figures.accuracy,
            "images_per_second": round(figures.count / seconds, 1),
            "seconds": round(seconds, 2),
            "test_accuracy": self._accuracy(self.model),
        }
        if self.pruner is not None:
            start = time.perf_counter()
            step = self.pruner.step()
            metrics |= _step_metrics(step)
            metrics["pruning_seconds"] = round(time.perf_counter() - start, 2)
            last = number + 1 == self.recipe.train.epochs  # then the average is cut, and kept
            if self.average is not None and step.changed and not last:
                self.average.restart(self.model)
            if step.share is not None:
                metrics["pruned_accuracy"] = self._accuracy(self.model)
        if self.average is not None:
            metrics["average_accuracy"] = self._accuracy(self.average.module)
        self.epoch = number + 1
        self._first(lambda: self.folder.log(metrics, filter_norms(self.model)))
        self._save()
        if self.reporter is not None:
            self.reporter.finished(metrics)

    def _train_epoch(self, number: int) -> Figures:
        self.net.train()
        figures = Figures(self.accelerator.device)
        start = told = time.perf_counter()
        steps = len(self.data.train)
        for index, batch in enumerate(self.data.train.epoch(number)):
            if batch.total < self.accelerator.num_processes:
                break  # the last pictures are too few for every process to have one
            lr = learning_rate(self.recipe.train, number + index / steps)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            try:
                self._train_batch(batch, figures)
                self.stepper.step()
            except FpgmError:
                raise
            except Exception as error:  # the user's network and torch raise what they like
                raise ModelError(
                    f"Training fails at batch {index + 1} of epoch {number + 1}: {reason(error)}."
                ) from error
            self.stepper.zero_grad()
            if self.average is not None:
                self.average.update_parameters(self.model)
            now = time.perf_counter()
            if self.reporter is not None and (now - told > TELL_SECONDS or index + 1 == steps):
                self.reporter.stepped(number, index + 1, figures.so_far(start))
                told = now
        return figures.summed(self.accelerator)

    def _train_batch(self, batch: Batch, figures: Figures) -> None:
        """Gradients of the batch's mean loss, whatever parts it is computed in."""
        parts = self.recipe.run.accumulate
        images = batch.images
        if self.recipe.run.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        pieces = list(zip(images.chunk(parts), batch.labels.chunk(parts), strict=True))
        # Gradients are averaged over processes, so each stands for its share of the whole batch.
        weight = self.accelerator.num_processes / batch.total
        for number, (x, labels) in enumerate(pieces, 1):
            last = number == len(pieces)
            with nullcontext() if last else self.accelerator.no_sync(self.net):
                with self.accelerator.autocast():
                    logits = checked(self.net(x), "in training")
                loss = self.loss(logits, x, labels)
                self.accelerator.backward(loss * weight)
            figures.add(loss.detach(), logits.detach(), labels)

    def _accuracy(self, net: nn.Module) -> float:
        # Processes see other pictures, so their norms' statistics differ until the next step.
        for buffer in net.buffers():
            broadcast(buffer)
        return accuracy(net, self.data.test, self.accelerator)

    # Stopping, going on, ending.

    def _save(self) -> None:
        """A checkpoint of everything the next epoch depends on, the same for all processes."""
        randomness = gather_object([random_state()])
        state = {
            "epoch": self.epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "pruner": None if self.pruner is None else self.pruner.state_dict(),
            "scaler": None
            if self.accelerator.scaler is None
            else self.accelerator.scaler.state_dict(),
            "random": randomness,
        }
        self._first(lambda: self.folder.checkpoints.save(self.epoch, state))

    def _resume(self) -> None:
        """Go on from the newest checkpoint that is whole, if there is one."""
        state = self._first(self.folder.checkpoints.newest)
        if state is None:
            self._first(lambda: self.folder.forget_after(0))
            return
        try:
            self._restore(state)
        except Exception as error:
            raise FileError(
                f"The checkpoints in {self.folder.path} do not fit the network as it is now "
                f"({reason(error)}): undo the change, or choose another folder."
            ) from error
        self._first(lambda: self.folder.forget_after(self.epoch))

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        if self.pruner is not None:
            self.pruner.load_state_dict(state["pruner"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        if len(state["random"]) == self.accelerator.num_processes:
            restore_random_state(state["random"][self.accelerator.process_index])
        self.epoch = int(state["epoch"])

    def _kept(self, name: str) -> nn.Module:
        """The network a finished run wrote; other machines may not see the file."""
        if self.accelerator.num_processes == 1:
            return load(self.folder.path / name, self.factory).to(self.accelerator.device).eval()
        data = self._first((self.folder.path / name).read_bytes)
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
            model, plan, found = self._compacted(model)
            results |= found
            self._first(lambda: self.folder.write_plan(plan))
        results["accuracy"] = self._accuracy(model)
        results["parameters"] = sum(p.numel() for p in model.parameters())
        name = WEIGHTS if self.pruner is None and self.recipe.model.compact is None else SMALL
        results["files"] = [name, *([PLAN] if self.pruner is not None else [])]
        self._first(lambda: save(model, self.folder.path / name))
        self._first(lambda: self.folder.finish(results))
        return Outcome(results, model)

    def _compacted(self, model: nn.Module) -> tuple[nn.Module, Plan, dict[str, Any]]:
        assert self.pruner is not None
        small = self.pruner.compact()
        plan, certificate = self.pruner.plan, self.pruner.certificate
        assert plan is not None
        assert certificate is not None
        if model is not self.model:  # the average is cut like the model it is the average of
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

    def _first(self, act: Callable[[], Any]) -> Any:
        """Let the first process act, and all have the result; its errors are everybody's."""
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


def _open_data(recipe: Recipe, share: Share, device: torch.device) -> Sets:
    data = recipe.data
    if data.batch % share.world:
        raise RequestError(
            f"data.batch is {data.batch}, which {share.world} processes cannot share equally."
        )
    return open_sets(data, recipe.seed, share, device)


def _make_model(recipe: Recipe, factory: Callable[[], nn.Module]) -> nn.Module:
    part = recipe.model
    if part.compact is not None:
        return load(at_home(part.compact), factory)
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


def _make_teacher(part: DistillPart | None, device: torch.device) -> nn.Module | None:
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
