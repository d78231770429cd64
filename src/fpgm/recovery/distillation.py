"""Distillation: train the compact model for a short time towards the original's outputs.

The loss is the error of the outputs, and of the features where residual streams branch off
(`feature_matching`). No labels are needed. The caller sets the time limit. Several ranks take
different batches and average their gradients; rank 0's clock tells all when to stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from fpgm.pruning.plan import Plan
from fpgm.recovery.feature_matching import find_matching_points, record_inputs
from fpgm.utils.calibration_data import Inputs, InputSet, batch_to_example
from fpgm.utils.distributed import ALONE, Ranks
from fpgm.utils.example_inputs import Example, float_outputs, map_tensors, to_model_device
from fpgm.utils.precision import bfloat16_autocast, has_fast_bfloat16
from fpgm.utils.progress import Progress
from fpgm.utils.training_loop import cosine_decay, train_steps, wrap_model_errors

LEARNING_RATE = 1e-3
"""Of AdamW; it falls to zero along a cosine of the time that has passed."""
FULL_RATE_STEPS = 1000
"""With fewer steps the learning rate is scaled by the square root of their fraction: a few large
steps do more damage than they can repair."""
WARM_UP = 0.05
"""Fraction of the time in which the learning rate rises from zero: the weights are close to a
solution already."""


@dataclass
class DistillationResult:
    """The outcome of distillation."""

    steps: int = 0
    skipped: int = 0
    """Steps left out because their gradients were not finite."""
    not_trained: str | None = None
    """Why nothing could be trained, if nothing could."""

    def failure(self) -> str:
        """Name the step that fails, for the beginning of a message."""
        return f"Distillation fails at step {self.steps + 1}"


def distil_(
    small: nn.Module,
    model: nn.Module,
    plan: Plan,
    batches: Iterator[Example],
    seconds: float,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> DistillationResult:
    """Train the compact model towards the original for a number of seconds.

    It runs in bfloat16 (autocast) where the hardware supports it, and in channels-last order,
    unless the model does not run that way.
    Batch norms keep their statistics: batches may be small, and the statistics are already right.
    Frozen weights (`requires_grad=False`) are trained too, as recovery also solves for them.

    Args:
        small: The compact model; its weights are changed.
        model: The original, which gives the targets.
        plan: The plan that `small` was compacted with.
        batches: Training inputs, as many as are needed.
        seconds: Time limit.
        progress: Reports progress.
        ranks: The processes that divide the batches.
    """
    small.eval()
    parameters = [p for p in small.parameters() if p.is_floating_point()]
    result = DistillationResult()
    if any(p.dtype == torch.float16 for p in parameters):
        result.not_trained = "the weights are float16, too coarse for small steps"
        return result
    flags = [p.requires_grad for p in parameters]
    for p in parameters:
        p.requires_grad_(True)
    try:
        with torch.enable_grad(), wrap_model_errors(result.failure):
            _train(small, model, plan, batches, seconds, parameters, result, progress, ranks)
    finally:
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)
    return result


def _train(
    small: nn.Module,
    model: nn.Module,
    plan: Plan,
    batches: Iterator[Example],
    seconds: float,
    parameters: Sequence[nn.Parameter],
    result: DistillationResult,
    progress: Progress | None,
    ranks: Ranks,
) -> None:
    """Take steps until the time is up, and count them in `result`.

    Args:
        small: The compact model, which is trained.
        model: The original model, the teacher.
        plan: The plan; it tells which features of both models correspond.
        batches: Training inputs, as many as are needed.
        seconds: Time limit, by rank 0's clock.
        parameters: The parameters to train.
        result: Counts the steps.
        progress: Reports progress.
        ranks: The processes that divide the batches.
    """
    first = next(batches)
    plain = _FastForward(channels_last=False, bfloat16=False, device=parameters[0].device)
    everyone = ranks.gather(_FastForward.choose([small, model], first, plain))
    fast = everyone[0] if len(set(everyone)) == 1 else plain
    points = find_matching_points(model, small, plan, first)
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, weight_decay=0.0)
    start = time.perf_counter()
    elapsed = 0.0

    def batches_in_time() -> Iterator[Example]:
        nonlocal elapsed
        for example in chain([first], batches):
            now = torch.tensor((time.perf_counter() - start) / seconds, dtype=torch.float64)
            ranks.copy_from_first_([now])
            elapsed = float(now)
            if elapsed >= 1 or result.not_trained is not None:
                break
            if progress is not None:
                progress("distilling", int(elapsed * seconds), math.ceil(seconds))
            yield example

    def backward(_: int, example: Example) -> bool:
        targets.clear()
        features.clear()
        with torch.no_grad():
            target_outputs = fast.outputs(model, example)
        outputs = fast.outputs(small, example)
        loss = _normalized_mse(outputs, target_outputs)
        both = [name for name in features if name in targets]
        loss = loss + _normalized_mse([features[n] for n in both], [targets[n] for n in both])
        gradients: Sequence[Tensor | None] = [None] * len(parameters)
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        gradients, trainable = _average_gradients(gradients, parameters, loss, ranks)
        if not trainable:
            result.not_trained = "autograd finds no path from the outputs to the weights"
            return False
        if not get_total_norm([g for g in gradients if g is not None]).isfinite():
            result.skipped += 1  # one such step would make every weight NaN
            return False
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return True

    def count_step(_: int) -> None:
        result.steps += 1

    with (
        record_inputs(model, points, kept_only=True) as targets,
        record_inputs(small, points, kept_only=False) as features,
    ):
        train_steps(
            batches_in_time(),
            optimizer,
            lambda _: learning_rate_at(elapsed, result.steps),
            backward,
            count_step,
            lambda _: result.failure(),
        )


@dataclass(frozen=True)
class _FastForward:
    """How models run fastest: with inputs in channels-last order, and products in bfloat16."""

    channels_last: bool
    bfloat16: bool
    device: torch.device

    def outputs(self, net: nn.Module, example: Example) -> list[Tensor]:
        """Run a model and return its floating-point outputs."""
        if self.channels_last:
            example = map_tensors(example, _to_channels_last)
        with bfloat16_autocast(self.device, self.bfloat16):
            return float_outputs(net, example)

    @classmethod
    def choose(
        cls, nets: Sequence[nn.Module], example: Example, plain: _FastForward
    ) -> _FastForward:
        """Choose what the models run with, and give finite outputs where they did before."""
        bfloat16 = has_fast_bfloat16(plain.device)
        options = [(True, bfloat16), (False, bfloat16), (True, False)]
        for option in (cls(*option, plain.device) for option in dict.fromkeys(options)):
            if option != plain and all(option._works(net, example, plain) for net in nets):
                return option
        return plain

    @torch.no_grad()
    def _works(self, net: nn.Module, example: Example, plain: _FastForward) -> bool:
        try:
            outputs = self.outputs(net, example)
        except Exception:  # as code that views an activation as another shape
            return False
        expected = plain.outputs(net, example)
        return all(
            out.shape == other.shape and bool((out.isfinite() | ~other.isfinite()).all())
            for out, other in zip(outputs, expected, strict=True)
        )


def _to_channels_last(x: Tensor) -> Tensor:
    """Return images, or volumes, in channels-last order; other tensors as they are."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.ndim]) if x.ndim in formats else x


def _average_gradients(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], loss: Tensor, ranks: Ranks
) -> tuple[Sequence[Tensor | None], bool]:
    """Average gradients over ranks; return them, and whether some rank could compute any."""
    if ranks.size == 1:
        return gradients, loss.requires_grad
    trainable = torch.tensor(float(loss.requires_grad))
    sums = [
        torch.zeros_like(p) if gradient is None else gradient.clone()
        for gradient, p in zip(gradients, parameters, strict=True)
    ]
    ranks.sum_(trainable, *sums)
    return [gradient / ranks.size for gradient in sums], bool(trainable)


def learning_rate_at(elapsed: float, steps: int) -> float:
    """Compute the learning rate from the fraction of the time that passed and the steps so far.

    >>> [round(learning_rate_at(elapsed, 10**6), 4) for elapsed in (0.0, 0.05, 0.5, 1.0)]
    [0.0, 0.001, 0.0005, 0.0]
    """
    peak = LEARNING_RATE * min(1.0, math.sqrt(steps / max(elapsed, 1e-9) / FULL_RATE_STEPS))
    return peak * min(1.0, elapsed / WARM_UP) * cosine_decay(elapsed)


def training_batches(
    model: nn.Module, loader: Iterable[Any], inputs: Inputs, validation: Inputs
) -> Iterator[Example]:
    """Yield the loader's batches over and over, without the validation inputs.

    Ranks take turns: of two ranks, each gets every second batch.

    Args:
        model: batches are moved to its device.
        loader: read again in every epoch, if that is possible.
        inputs: used instead if the loader can be read only once.
        validation: inputs to leave out.
    """
    held_out = InputSet(validation)
    epoch: Iterable[Any] = () if isinstance(loader, Iterator) else loader
    total = 0
    while True:
        before = total
        for batch in epoch:
            example = held_out.remove_from(batch_to_example(batch))
            if example is not None:
                total += 1
                if inputs.ranks.owns(total - 1):
                    yield Example(*to_model_device(model, (example.args, dict(example.kwargs))))
        if total == before:
            epoch = ()
            yield from (inputs[number] for number in range(len(inputs)))
            if not len(inputs):
                yield inputs.first


def _normalized_mse(outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Compute the loss: the average of mean squared errors, each divided by its target's square.

    `training.loss` has the loss of training with a teacher.
    """
    errors = []
    for out, target in zip(outputs, targets, strict=True):
        finite = target.isfinite()
        if out.shape != target.shape or not bool(finite.any()):
            continue
        if not bool(finite.all()):  # indexing by a mask is slow, above all in the backward pass
            out, target = out[finite], target[finite]
        if out.dtype.itemsize < torch.float32.itemsize:
            out, target = out.float(), target.float()
        size = target.square().mean().clamp(min=1e-12)
        errors.append((out - target).square().mean() / size)
    return torch.stack(errors).mean() if errors else torch.zeros(())
