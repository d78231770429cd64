"""Recovery without training: new weights on the kept units that stand in for the removed ones.

Layer by layer, in the order they run, each layer of the compact model gets the weights with which
it comes nearest to what the original computes there, out of what the compact model, as far as it
is recovered, feeds it. That is a linear problem, solved exactly; labels are not needed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fpgm.errors import RequestError
from fpgm.pruning.compaction import compact
from fpgm.pruning.plan import Plan
from fpgm.recovery.bn_reestimation import reestimate_
from fpgm.recovery.data_free import stood_in
from fpgm.recovery.distillation import Distilled, distil_, endless
from fpgm.recovery.layer_solver import LayerWork, Solved
from fpgm.recovery.solvable_layers import Site, find_sites
from fpgm.recovery.staged_forward import Walks
from fpgm.utils.calibration_data import Inputs, explained, moved, read_apart
from fpgm.utils.copying import copy_model
from fpgm.utils.example_inputs import Example, float_outputs, squared, tensors_in
from fpgm.utils.modules import unwrapped
from fpgm.utils.precision import full_precision
from fpgm.utils.preserve_state import plain_attention, undisturbed
from fpgm.utils.progress import Progress

RECOVERY = "fpgm_recovery"
"""Attribute under which a recovered model carries what was done to it."""

Method = Literal["solve", "norms", "weights"]

MEMORY_SHARE = 0.25
"""Of the machine's memory passes waiting at a layer may hold; others run again from the start."""
UNTOLD = 8 * 2**30
"""Bytes of memory where the system does not tell."""
MOST_WAITING = 64
"""Batches whose passes may wait: each is two threads."""
JUDGES = 512
"""Inputs that say whether distillation helped, if the loader has more than are solved with."""
FEW_STEPS = 50
"""Of distillation, from which nothing is to be expected."""
HELD_PER_LAYER = 4
"""A waiting pass holds about so many times what its largest layer reads and writes."""


@dataclass(frozen=True)
class Recovery:
    """What recovery did: layer by layer, and to the outputs."""

    method: Method
    layers: tuple[Solved, ...]
    before: float | None
    """Squared error of the outputs, as a share of their size: compact against original."""
    after: float | None
    inputs: int
    """Looked at to recover from."""
    judges: int
    """Other inputs, on which `before` and `after` were measured; 0 if it was on the same."""
    steps: int
    """Of distillation, if it was kept."""
    seconds: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def recovery_of(model: nn.Module) -> Recovery:
    """What `recover` did to a model it returned."""
    told = getattr(model, RECOVERY, None)
    if not isinstance(told, Recovery):
        raise RequestError("This model was not returned by recover.")
    return told


@torch.no_grad()
def recover(
    model: nn.Module,
    plan: Plan,
    loader: Iterable[Any],
    *,
    method: Method = "solve",
    images: int = 1024,
    distil: float = 0.0,
    progress: Progress | None = None,
) -> nn.Module:
    """The compact model, with weights that make up for what is gone; the model is untouched.

    `loader` gives batches of inputs, or of inputs and labels, which are not looked at; they are
    read until they hold `images` inputs. `method="norms"` only takes batch norms' statistics anew,
    and `method="weights"` guesses from the weights alone how units vary together: one batch, of
    noise if need be, shows it how the model runs. Then `distil` seconds may go into training
    towards the original's answers, with all batches a loader gives if it can be read again, less
    up to 512 inputs that judge it. What was done is in the result's `fpgm_recovery`.

    >>> import fpgm
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    >>> x = [torch.randn(8, 3, 8, 8) for _ in range(4)]
    >>> small = fpgm.recover(net, fpgm.plan(net, x[0], rate=0.5, align=1), x)
    >>> small.fpgm_recovery.after < small.fpgm_recovery.before
    True
    """
    if method not in get_args(Method):
        raise RequestError(f"method is {method!r}: give 'solve', 'norms' or 'weights'.")
    if not isinstance(images, int) or images < 1:
        raise RequestError(f"images is {images!r}: give a whole number from 1 up.")
    if not isinstance(distil, int | float) or not 0 <= distil < math.inf:
        raise RequestError(f"distil is {distil!r}: give seconds, from 0 up.")
    if distil > 0 and torch.is_inference_mode_enabled():
        raise RequestError("distil trains: call recover outside of torch.inference_mode().")
    start = time.perf_counter()
    model = unwrapped(model)
    plain = compact(model, plan)
    small = compact(model, plan)
    modes = [module.training for module in small.modules()]
    # What was solved with is fitted already: only other inputs tell what training adds.
    inputs, judges = read_apart(moved(model, loader), images, JUDGES if distil > 0 else 0)
    notes: list[str] = []
    solved: list[Solved] = []
    trained: Distilled | None = None
    try:
        explaining = explained(model, inputs, judges)
        with undisturbed(model), plain_attention(), full_precision(), explaining:
            for net in (model, plain, small):
                net.eval()
            if method == "norms":
                reestimate_(small, inputs)
            elif method == "weights":
                full, changed = stood_in(model, plan, inputs[0])
                small = compact(full, plan).eval()
                notes = [] if changed else ["No layer was found that could stand in."]
            else:
                solved = _solve_(model, small, plan, inputs, progress)
                notes = [s.note for s in solved if s.note is not None]
            nets = [plain, small]
            if distil > 0:
                nets.append(copy_model(small))
                others = endless(model, loader, inputs, judges)
                trained = distil_(nets[-1], model, plan, others, distil, progress)
            errors = _output_errors(model, nets, judges if len(judges) else inputs)
    finally:
        inputs.close()
        judges.close()
    best, said = _best(errors)
    if trained is not None:
        said.append(_told(trained, distil, kept=best == 2))
    small = nets[best]
    for module, mode in zip(small.modules(), modes, strict=True):
        module.training = mode
    before, after = (None, None) if errors is None else (errors[0], errors[best])
    told = Recovery(
        method,
        tuple(solved),
        before,
        after,
        inputs.count,
        judges.count,
        trained.steps if trained is not None and best == 2 else 0,
        round(time.perf_counter() - start, 2),
        (*notes, *said),
    )
    setattr(small, RECOVERY, told)
    return small


def _best(errors: Sequence[float] | None) -> tuple[int, list[str]]:
    """Which of compact, recovered and distilled model is nearest to the original; what to say."""
    if errors is None:
        return 1, ["The outputs have other shapes: they were not compared."]
    # Only a smaller error is a reason to change anything.
    best = min(range(len(errors)), key=lambda i: (math.isnan(errors[i]), errors[i]))
    if best > 0:
        return best, []
    told = f"({errors[0]:.3g}, then {errors[1]:.3g})"
    return best, [f"The outputs' error would not have fallen {told}: weights were left alone."]


def _told(trained: Distilled, seconds: float, *, kept: bool) -> str:
    """What is to be said of a training.

    >>> _told(Distilled(steps=1), 5, kept=False)
    '1 step of distillation in 5 s; that did not help and was taken back: give it more time.'
    """
    if trained.why is not None:
        return f"Nothing was distilled: {trained.why}."
    said = f"{trained.steps} step{'s' * (trained.steps != 1)} of distillation in {seconds:g} s"
    if trained.skipped:
        said += f", {trained.skipped} more left out for numbers that are not finite"
    if not kept:
        said += "; that did not help and was taken back"
        said += ": give it more time" if trained.steps < FEW_STEPS else ""
    return f"{said}."


def memory_at(x: Tensor | None) -> int:
    """Bytes of memory where a tensor is: free on a GPU, else all this process may have."""
    if x is not None and x.device.type == "cuda":
        return int(torch.cuda.mem_get_info(x.device)[0])
    limits = [UNTOLD]
    with suppress(AttributeError, OSError, ValueError):
        limits = [max(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    with suppress(OSError, ValueError):  # a container's own limit; "max" if it has none
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def _solve_(
    model: nn.Module, small: nn.Module, plan: Plan, inputs: Inputs, progress: Progress | None
) -> list[Solved]:
    """Layer after layer, each with what the ones before it now give."""
    sites, largest = _sites(model, small, inputs[0])
    room = MEMORY_SHARE * memory_at(next(iter(tensors_in((inputs[0].args,))), None))
    waiting = min(MOST_WAITING, int(room / (2 * HELD_PER_LAYER * max(largest, 1))))
    walks = Walks(model, small, sites, inputs, waiting)
    solved = []
    try:
        for number, site in enumerate(sites):
            if progress is not None:
                progress(site.layer, number, len(sites))
            solved.append(LayerWork(model, small, plan, walks, number).solve_())
    finally:
        walks.close()
    return solved


def _sites(model: nn.Module, small: nn.Module, example: Example) -> tuple[list[Site], int]:
    """Layers to solve for; without their sums if the two models do not add alike."""
    mine, theirs = (find_sites(net, example) for net in (small, model))
    sites = mine.sites
    if mine.sums != theirs.sums:
        sites = [Site(site.layer, site.calls, site.norm) for site in sites]
    return sites, theirs.largest


def _output_errors(
    model: nn.Module, nets: Sequence[nn.Module], inputs: Inputs
) -> list[float] | None:
    """Squared difference of all outputs, where they are finite, as a share of their squares."""
    missed, size = [0.0] * len(nets), 0.0
    compared = False
    for number in range(len(inputs)):
        example = inputs[number]
        given = [float_outputs(net, example) for net in nets]
        for place, wanted in enumerate(float_outputs(model, example)):
            if any(own[place].shape != wanted.shape for own in given):
                continue
            compared = True
            size += squared(torch.zeros_like(wanted), wanted)
            for i, own in enumerate(given):
                missed[i] += squared(own[place], wanted)
    return [m / (size or 1.0) for m in missed] if compared else None
