"""Watching one real forward pass and collecting everything the rules find in it.

The model's weights, buffers, mode and random state are as before when the watching ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fpgm.calls import Calls
from fpgm.errors import ForwardError
from fpgm.examples import Example, tensors_in
from fpgm.findings import (
    Balance,
    Factor,
    Grouped,
    Join,
    Place,
    Risk,
    Site,
    Slot,
    Stop,
    Work,
)
from fpgm.labels import Fields
from fpgm.plan import Role
from fpgm.tensors import named_tensors
from fpgm.tracer import RuleError, Tracer, source_line
from fpgm.undisturbed import undisturbed


class Watch(Tracer):
    """Collects everything the rules find in one or several forward passes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, _slots(model))
        self.count = 1
        self.calls = Calls()
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.stops: list[Stop] = []
        self.balances: list[Balance] = []
        self.roles: dict[Role, list[Tensor]] = {}
        self.works: list[Work] = []
        self.groupings: list[Grouped] = []
        self.pairings: list[tuple[Tensor, Tensor]] = []
        self.windows: list[Site] = []
        self.parts: dict[tuple[Join, int], Tensor] = {}
        self.pads: list[Tensor] = []
        self._pieces: tuple[Tensor, ...] = ()
        self.sites: list[Site] = []
        self.picks: list[Site] = []
        self.returns: dict[Place, Factor] = {}
        self.outputs: list[Factor] = []
        self.watched_training = False
        self.notes: list[str] = []
        self.risks: dict[tuple[Place, int], Risk] = {}

    def run(self, example: Example) -> Any:
        with self.calls:
            return super().run(example)

    def fresh(self, count: int) -> Tensor:
        start = self.count
        self.count += count
        return torch.arange(start, self.count)

    def fixed(self, number: int, count: int) -> Tensor:
        labels = self.fresh(count)
        self.freeze([labels], "a part of fixed size is concatenated")
        self.parts[self.this_join(), number] = labels
        return labels

    def relate(self, a: Tensor, b: Tensor) -> None:
        a, b = torch.broadcast_tensors(a, b)
        if a is not b:
            self.pairs.append((a.reshape(-1), b.reshape(-1)))

    def freeze(self, fields: Sequence[Tensor], reason: str, soft: bool = False) -> None:
        if fields:
            where = self.where()
            for f in fields:
                self.stops.append(Stop(f.reshape(-1), f"{reason} in {where}", soft))

    def balance(self, blocks: Tensor, whole: bool = True) -> None:
        if blocks.shape[0] > 1:
            self.balances.append(Balance(blocks, whole))

    def role(self, field: Tensor, role: Role) -> None:
        self.roles.setdefault(role, []).append(field.reshape(-1))

    def padded(self, ends: Sequence[Tensor]) -> None:
        self.pads += ends
        self.sized(ends)

    def sized(self, pieces: Sequence[Tensor]) -> None:
        self._pieces = tuple(piece.reshape(-1) for piece in pieces)

    def work(self, times: int, factors: Sequence[tuple[Fields, Sequence[int]]]) -> None:
        if self.runs == 1:
            self.works.append(Work(times, tuple(Factor(f, tuple(s)) for f, s in factors)))

    def paired(self, ins: Tensor, outs: Tensor) -> None:
        self.pairings.append((ins, outs))

    def grouped(self, blocks: Tensor) -> None:
        self.groupings.append(Grouped(self.module, blocks))

    def window(self, dim: int, labels: Tensor) -> bool:
        if not self.module or not isinstance(
            self.model.get_submodule(self.module), nn.modules.conv._ConvNd
        ):
            return False
        self.windows.append(Site(self.module, dim, labels))
        return True

    def returned(self, path: str, out: Any) -> None:
        if isinstance(out, Tensor):
            self.returns[self.here(path)] = Factor(self.fields(out), tuple(out.shape))

    def risky(self, out: Tensor, source: Tensor | None) -> None:
        known = Factor(self.fields(out), tuple(out.shape))
        origin = None if source is None else Factor(self.fields(source), tuple(source.shape))
        even = len({len(piece) for piece in self._pieces}) <= 1  # chunk may leave a shorter rest
        safe = self.calls.derives_sizes and even
        self.risks[self.next_risk()] = Risk(known, origin, self._pieces, safe, source_line())
        self._pieces = ()

    def unreached(self) -> list[str]:
        """Trainable parameters that no operator has used."""
        return [slot.name for slot in self.slots.values() if slot.trainable and not slot.seen]


def watch(seen: Watch, examples: Sequence[Example], keep_outputs: bool = True) -> Watch:
    """Run every example once and collect what is seen; the model is left as it was.

    Train mode is watched too when eval leaves parameters unreached (auxiliary heads), because a
    compact model that only fits in eval would crash in training.
    """
    model = seen.model
    with undisturbed(model):
        model.eval()
        for example in examples:
            _run(seen, example, keep_outputs)
        missing = seen.unreached()
        if missing:
            model.train()
            try:
                for example in examples:
                    _run(seen, example, keep_outputs)
                seen.watched_training = True
            except ForwardError as error:
                _give_up_on(seen, missing, str(error))
    return seen


def _give_up_on(seen: Watch, missing: Sequence[str], why: str) -> None:
    """Training could not be watched to its end: what only it reaches, and that reads, stays."""
    seen.notes.append(f"Train mode could not be watched: {why}")
    for slot in seen.slots.values():
        if slot.name in missing:
            for f in slot.fields:
                seen.stops.append(Stop(f.reshape(-1), "only training reaches them", False))


def _run(seen: Watch, example: Example, keep_outputs: bool) -> None:
    try:
        out = seen.run(example)
    except RuleError:
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise ForwardError(
            f"The model's own forward fails on the example input: {text.rstrip('.')}."
            f"{_dtype_hint(seen, example)}"
        ) from error
    results = [t for t in tensors_in(out) if t.numel()]
    if keep_outputs:
        for tensor in results:
            for f in seen.fields(tensor):
                seen.stops.append(Stop(f.reshape(-1), "the model's output", False))
    elif seen.runs == 1:
        seen.outputs = [Factor(seen.fields(t), tuple(t.shape)) for t in results]


def _dtype_hint(seen: Watch, example: Example) -> str:
    """Name both precisions where they differ: torch's own words rarely do."""
    weights = {p.dtype for p in seen.model.parameters() if p.is_floating_point()}
    given = {
        t.dtype for t in tensors_in((example.args, dict(example.kwargs))) if t.is_floating_point()
    }
    if not weights or not given or given <= weights:
        return ""
    have, want = (
        ", ".join(sorted(str(d).removeprefix("torch.") for d in kinds))
        for kinds in (given, weights)
    )
    return f" The example is {have}, the weights are {want}: bring one to the other's precision."


def _slots(model: nn.Module) -> dict[int, Slot]:
    return {
        id(tensor): Slot(name, tuple(tensor.shape), isinstance(tensor, nn.Parameter))
        for name, tensor in named_tensors(model).items()
    }
