"""A short training of the compact model towards the original's answers: no labels, a time limit."""

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

from fpgm.errors import FpgmError, ModelError
from fpgm.pruning.plan import Plan
from fpgm.recovery.feature_matching import find_places, reading
from fpgm.utils.calibration_data import Inputs, Known, as_call
from fpgm.utils.example_inputs import Example, beside, float_outputs
from fpgm.utils.progress import Progress
from fpgm.utils.text import reason

RATE = 1e-3
"""Of AdamW; it falls to zero along a cosine of the time that has passed."""
ENOUGH_STEPS = 1000
"""With fewer the rate is lower, by the root of their share: what a few large steps break they do
not mend."""
WARM_UP = 0.05
"""In this share of the time it rises from nothing: the network is nearly right already."""


@dataclass
class Distilled:
    """What came of a training."""

    steps: int = 0
    skipped: int = 0
    """Steps that were not made: something in them was not finite."""
    why: str | None = None
    """Why there was nothing to train."""


def distil_(
    small: nn.Module,
    model: nn.Module,
    plan: Plan,
    batches: Iterator[Example],
    seconds: float,
    progress: Progress | None = None,
) -> Distilled:
    """Train on these batches for so many seconds.

    The compact model is to give the original's answers, and to have on the way what the original
    has where streams branch off. Norms keep their statistics: batches may be small, and what they
    were told is right already. Frozen weights learn too, as they are solved for too.
    """
    small.eval()
    parameters = [p for p in small.parameters() if p.is_floating_point()]
    done = Distilled()
    if any(p.dtype == torch.float16 for p in parameters):
        done.why = "its weights are float16, too coarse for small steps"
        return done
    flags = [p.requires_grad for p in parameters]
    for p in parameters:
        p.requires_grad_(True)
    try:
        with torch.enable_grad():
            _train(small, model, plan, batches, seconds, parameters, done, progress)
    except FpgmError:
        raise
    except Exception as error:  # the user's network and torch raise what they like
        raise ModelError(
            f"Distillation fails at step {done.steps + 1}: {reason(error)}."
        ) from error
    finally:
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)
    return done


def _train(
    small: nn.Module,
    model: nn.Module,
    plan: Plan,
    batches: Iterator[Example],
    seconds: float,
    parameters: Sequence[nn.Parameter],
    done: Distilled,
    progress: Progress | None,
) -> None:
    first = next(batches)
    places = find_places(model, small, plan, first)
    optimizer = torch.optim.AdamW(parameters, RATE, weight_decay=0.0)
    start = time.perf_counter()
    with reading(model, places, cut=True) as theirs, reading(small, places, cut=False) as mine:
        for example in chain([first], batches):
            share = (time.perf_counter() - start) / seconds
            if share >= 1:
                break
            if progress is not None:
                progress("distilling", int(share * seconds), math.ceil(seconds))
            for group in optimizer.param_groups:
                group["lr"] = rate_at(share, done.steps)
            theirs.clear()
            mine.clear()
            with torch.no_grad():
                wanted = float_outputs(model, example)
            loss = _distance(float_outputs(small, example), wanted)
            both = [name for name in mine if name in theirs]
            loss = loss + _distance([mine[n] for n in both], [theirs[n] for n in both])
            if not loss.requires_grad:
                done.why = "its outputs do not depend on its weights as far as autograd can see"
                break
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            if not get_total_norm([g for g in gradients if g is not None]).isfinite():
                done.skipped += 1  # one such step, and no weight would be a number any more
                continue
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            done.steps += 1
    optimizer.zero_grad()


def rate_at(share: float, steps: int) -> float:
    """The learning rate when such a share of the time went into so many steps.

    >>> [round(rate_at(share, 10**6), 4) for share in (0.0, 0.05, 0.5, 1.0)]
    [0.0, 0.001, 0.0005, 0.0]
    """
    most = RATE * min(1.0, math.sqrt(steps / max(share, 1e-9) / ENOUGH_STEPS))
    return most * min(1.0, share / WARM_UP) * (1 + math.cos(math.pi * share)) / 2


def endless(
    model: nn.Module, loader: Iterable[Any], inputs: Inputs, judges: Inputs
) -> Iterator[Example]:
    """All of a loader's batches again and again, without inputs that are there to judge by.

    Of a loader that can be read only once it is what was read.
    """
    known = Known(judges)
    again: Iterable[Any] = () if isinstance(loader, Iterator) else loader
    while True:
        count = 0
        for batch in again:
            example = known.without(as_call(batch))
            if example is not None:
                count += 1
                yield Example(*beside(model, (example.args, dict(example.kwargs))))
        if not count:
            again = ()
            yield from (inputs[number] for number in range(len(inputs)))


def _distance(given: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """Mean squared error of all these, each in units of its own size."""
    parts = []
    for g, w in zip(given, wanted, strict=True):
        finite = w.isfinite()
        if g.shape != w.shape or not bool(finite.any()):
            continue
        if not bool(finite.all()):  # choosing by a mask is slow, in the way back most of all
            g, w = g[finite], w[finite]
        size = w.square().mean().clamp(min=1e-12)
        parts.append((g - w).square().mean() / size)
    return torch.stack(parts).mean() if parts else torch.zeros(())
