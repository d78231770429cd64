"""A short training of the compact model towards the original's answers: no labels, a time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fpgm.examples import Example, beside, float_outputs
from fpgm.plan import Plan
from fpgm.progress import Progress
from fpgm.recovery.batches import Inputs, as_call
from fpgm.recovery.midway import find_places, reading

RATE = 1e-3
"""Of AdamW; it falls to zero along a cosine of the time that has passed."""
ENOUGH_STEPS = 1000
"""With fewer the rate is lower, by the root of their share: what a few large steps break they do
not mend."""
WARM_UP = 0.05
"""In this share of the time it rises from nothing: the network is nearly right already."""


def distil_(
    small: nn.Module,
    model: nn.Module,
    plan: Plan,
    loader: Iterable[Any],
    inputs: Inputs,
    seconds: float,
    progress: Progress | None = None,
    spared: int = 0,
) -> int:
    """Train for so many seconds; returns how many steps that were.

    The compact model is to give the original's answers, and to have on the way what the original
    has where streams branch off. Norms keep their statistics: batches may be small, and what they
    were told is right already. Of every reading of the loader as many batches as are `spared` are
    passed over, behind those that `inputs` came from: they are there to judge by.
    """
    small.eval()
    parameters = [p for p in small.parameters() if p.requires_grad]
    if not parameters:
        return 0
    optimizer = torch.optim.AdamW(parameters, RATE, weight_decay=0.0)
    places = find_places(model, small, plan, inputs[0])
    start, steps = time.perf_counter(), 0
    with reading(model, places, cut=True) as theirs, reading(small, places, cut=False) as mine:
        for example in _endless(model, loader, inputs, spared):
            share = (time.perf_counter() - start) / seconds
            if share >= 1:
                break
            rate = RATE * min(1.0, math.sqrt(steps / max(share, 1e-9) / ENOUGH_STEPS))
            if progress is not None:
                progress("distilling", int(share * seconds), math.ceil(seconds))
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, share / WARM_UP) * (1 + math.cos(math.pi * share)) / 2
            theirs.clear()
            mine.clear()
            with torch.no_grad():
                wanted = float_outputs(model, example)
            with torch.enable_grad():
                loss = _distance(float_outputs(small, example), wanted)
                both = [name for name in mine if name in theirs]
                loss = loss + _distance([mine[n] for n in both], [theirs[n] for n in both])
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            steps += 1
    for parameter in parameters:
        parameter.grad = None
    return steps


def _endless(
    model: nn.Module, loader: Iterable[Any], inputs: Inputs, spared: int
) -> Iterator[Example]:
    """All of a loader's batches again and again; of one that can be read only once, what was."""
    once = iter(loader) is loader
    while True:
        count = 0
        for place, batch in enumerate(() if once else loader):
            if not 0 <= place - len(inputs) < spared:
                count += 1
                yield as_call(beside(model, batch))
        if not count:
            once = True
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
    return torch.stack(parts).mean() if parts else torch.zeros((), requires_grad=True)
