"""`plan` and `prune`: the whole way from a model to a decision, and on to a certified result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fnmatch

import torch
from torch import Tensor, nn

from fpgm import criteria
from fpgm.budget import Budget, Residual, Rounder, Rounding, check_patterns
from fpgm.compact import compact
from fpgm.coupling import Structure, couple
from fpgm.draft import Remembered, Uneven, draft
from fpgm.errors import ModelError, RequestError
from fpgm.examples import as_examples
from fpgm.plan import Adapter, Plan
from fpgm.replay import Mismatch, replay
from fpgm.select import Selector
from fpgm.verify import verify
from fpgm.watch import watch

Criterion = str | Callable[[Tensor], Tensor]

_MOST_REPLAYS = 60


def plan(
    model: nn.Module,
    example_inputs: Any,
    *,
    rate: float | None = None,
    macs: float | None = None,
    params: float | None = None,
    rates: Mapping[str, float] | None = None,
    criterion: Criterion = "fpgm",
    distance: str = "l2",
    residual: Residual = "coupled",
    ignore: Sequence[str] = (),
    align: int = 8,
    rounding: Rounding = "nearest",
    min_channels: int = 1,
    approximate: bool = False,
    keep_outputs: bool = True,
    seed: int = 0,
) -> Plan:
    """Decide which units to remove; nothing happens to the model.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> print(plan(net, torch.zeros(1, 3, 8, 8), rate=0.5, align=1).groups[0].kept)
    4
    """
    budget = Budget(rate, macs, params, dict(rates or {}))
    rounder = Rounder(align, rounding, min_channels)
    if residual not in ("coupled", "independent"):
        raise RequestError(f"residual is {residual!r}: give 'coupled' or 'independent'.")
    scorer = criteria.resolve(criterion, distance=distance, seed=seed)
    examples = as_examples(example_inputs)
    structure = couple(watch(model, examples, keep_outputs), approximate)
    layers = [w.layer for w in structure.writers]
    check_patterns("rates", list(budget.rates), layers)
    check_patterns("ignore", list(ignore), layers)
    _ignore(structure, ignore)
    asked = {**budget.asked(), "criterion": _name(criterion), "distance": distance,
             "residual": residual, "align": align, "rounding": rounding}
    selector = Selector(model, structure, scorer, rounder, uses_scale=criterion == "bn")
    remembered: list[Remembered] = []
    adapters: Sequence[Adapter] = ()
    for _ in range(_MOST_REPLAYS):
        if not structure.pools:
            raise ModelError(_nothing(structure))
        choice = selector.choose(budget)
        try:
            found = draft(model, structure, choice.removed, choice.kept, asked, remembered)
            if len(choice.removed):
                adapters = replay(model, structure, found, choice.removed, examples)
        except Uneven as uneven:
            structure.freeze(_pool_units(structure, uneven.classes), "its groups cannot shrink alike")
            continue
        except Mismatch as mismatch:
            if __import__("os").environ.get("DBG"): print("MISMATCH", mismatch.reason, mismatch.sizes and mismatch.sizes[0][0], len(mismatch.classes))
            _resolve(model, structure, mismatch, remembered)
            continue
        if not adapters:
            return found
        return draft(model, structure, choice.removed, choice.kept, asked, remembered, adapters)
    raise ModelError("No plan could be made to fit the model's own code; please report this model.")


def prune(model: nn.Module, example_inputs: Any, **options: Any) -> nn.Module:
    """Plan, compact and verify in one call; takes the options of `plan`."""
    made = plan(model, example_inputs, **options)
    small = compact(model, made)
    verify(model, made, example_inputs, compacted=small).check()
    return small


def _ignore(structure: Structure, patterns: Sequence[str]) -> None:
    for writer in structure.writers:
        for pattern in patterns:
            if fnmatch.fnmatchcase(writer.layer, pattern):
                structure.freeze(writer.classes, f"ignored on request ({pattern!r})")


def _resolve(
    model: nn.Module, structure: Structure, mismatch: Mismatch, remembered: list[Remembered]
) -> None:
    """Update a number the module remembers, or leave the channels alone."""
    for size, labels in mismatch.sizes:
        path: str | None = mismatch.module
        while path is not None:
            holder = model.get_submodule(path)
            for name, value in vars(holder).items():
                known = any(r.module == path and r.name == name for r in remembered)
                if type(value) is int and value == size and not known:
                    remembered.append(Remembered(path, name, labels))
                    return
            path = path.rpartition(".")[0] if path else None
    units = _pool_units(structure, mismatch.classes)
    if not len(units):
        units = torch.cat([p.units for p in structure.pools])
    structure.freeze(units, mismatch.reason)


def _pool_units(structure: Structure, classes: Tensor) -> Tensor:
    """All units of the pools these classes belong to."""
    touched = [p.units for p in structure.pools if bool(torch.isin(p.units, classes).any())]
    return torch.cat(touched) if touched else torch.zeros(0, dtype=torch.int64)


def _nothing(structure: Structure) -> str:
    reasons = sorted(set(structure.reasons.values()))
    why = f" For example: {reasons[0]}." if reasons else ""
    return f"There is nothing to prune: no layer has a unit that can go.{why}"


def _name(criterion: Criterion) -> str:
    return criterion if isinstance(criterion, str) else getattr(criterion, "__name__", "custom")
