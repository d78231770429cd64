"""The dispatch mode under which a model runs while labels follow its data.

`Tracer` knows which module is running, hands each operator to its rule and keeps the labels of
living tensors. What a rule's findings mean is left to subclasses: `watch.Watch` collects them,
`checker.Checker` checks a compact model against them.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from fpgm import labels as lb
from fpgm import rules
from fpgm.errors import FpgmError
from fpgm.examples import Example
from fpgm.findings import Join, Place, Slot
from fpgm.labels import Fields
from fpgm.plan import Role
from fpgm.tensors import modules_by_path
from fpgm.turns import quietly
from fpgm.undisturbed import plain_attention

_PACKAGE = str(Path(__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep


class RuleError(FpgmError):
    """A rule of ours broke: a bug here, not in the model."""


class _Known:
    """What is known of a living tensor."""

    __slots__ = ("constant", "fields", "zero")

    def __init__(self) -> None:
        self.fields: Fields | None = None
        self.constant = False
        self.zero = False


class Tracer(TorchDispatchMode):
    """Runs a model and lets labels follow the data; subclasses decide what relations mean."""

    def __init__(self, model: nn.Module, slots: Mapping[int, Slot]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.slots = slots
        self.stack: list[str] = []
        self.runs = 0
        self._calls: Counter[str] = Counter()
        self._risks: Counter[str] = Counter()
        self._joins: Counter[tuple[Place, str]] = Counter()
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = list(rules.tensors((*args, *kwargs.values()) if kwargs else args))
        constant = all(map(self.is_constant, inputs))
        out = self.call(func, args, kwargs)
        try:
            rules.apply(self, func, args, kwargs, out, inputs)
            if constant and inputs:
                for result in rules.tensors((out,)):
                    self._know(result).constant = True
        except (
            ArithmeticError,
            AttributeError,
            StopIteration,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
            AssertionError,
        ) as error:
            # A fault of ours must not pass for one of the user's code.
            raise RuleError(f"The rule for '{func}' failed in {self.where()}: {error!r}") from error
        return out

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator itself."""
        return func(*args, **kwargs)

    # What rules ask.

    def fields(self, tensor: Tensor) -> Fields:
        """Labels of a tensor; a parameter seen for the first time gets fresh ones on every axis."""
        known: _Known | None = self._known.get(tensor)
        if known is not None and known.fields is not None:
            return known.fields
        slot = self.slots.get(id(tensor))
        if slot is None:
            return ()
        if not slot.seen:
            slot.open = True
            ndim = len(slot.shape)
            slot.name_axes(
                [
                    (lb.along(self.fresh(n), ndim, d), "scale")
                    for d, n in enumerate(slot.shape)
                    if n > 1
                ]
            )
        return tuple(slot.fields)

    def set(self, tensor: Tensor, fields: Sequence[Tensor]) -> None:
        """Label a tensor."""
        kept = tuple(f for f in fields if f.numel() > 1)
        known = self._know(tensor)
        if kept or known.fields is not None:  # a parameter's own labels are its slot's
            known.fields = kept

    def untouched(self, tensor: Tensor) -> Slot | None:
        """The slot of a parameter that no rule has labelled yet, so a rule may name its axes."""
        slot = self.slots.get(id(tensor))
        return slot if slot is not None and not slot.seen else None

    def has_role(self, tensor: Tensor) -> bool:
        """Whether a rule has named the axes of a parameter, so its labels are another's too."""
        slot = self.slots.get(id(tensor))
        return slot is not None and slot.seen and not slot.open

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is made of parameters and buffers only."""
        if id(tensor) in self.slots:
            return True
        known: _Known | None = self._known.get(tensor)
        return known is not None and known.constant

    def is_zero(self, tensor: Tensor) -> bool:
        """Whether a unit is zero here once its filter, bias and shifts are."""
        known: _Known | None = self._known.get(tensor)
        return known is not None and known.zero

    def mark_zero(self, tensor: Tensor, zero: bool) -> None:
        """Note whether silencing a unit's weights silences it here."""
        self._know(tensor).zero = zero

    def _know(self, tensor: Tensor) -> _Known:
        known: _Known | None = self._known.get(tensor)
        if known is None:
            known = self._known[tensor] = _Known()
        return known

    @property
    def module(self) -> str:
        """Path of the module whose forward is running."""
        return self.stack[-1] if self.stack else ""

    def where(self) -> str:
        """The running module and the line of user code, for people."""
        place = source_line()
        return f"{self.module or 'the model'} ({place})" if place else self.module or "the model"

    trusts_positions = False
    """Whether constant channel positions are right: they are ours in a replay, never before."""

    # What rules find; subclasses say what it means.

    def fresh(self, count: int) -> Tensor:
        """New labels."""
        raise NotImplementedError

    def fixed(self, number: int, count: int) -> Tensor:
        """Labels for an unlabelled part of a concatenation, which cannot shrink."""
        raise NotImplementedError

    def joined(self) -> None:
        """A concatenation is done."""
        self._joins[self.here(self.module), source_line()] += 1

    def relate(self, a: Tensor, b: Tensor) -> None:
        """Positions of two fields meet (with broadcasting): they belong to the same units."""
        raise NotImplementedError

    def freeze(self, fields: Sequence[Tensor], reason: str, soft: bool = False) -> None:
        """These labels cannot be removed."""
        raise NotImplementedError

    def tie(self, field: Tensor, dims: Sequence[int]) -> None:
        """Labels along these dims go together."""
        for dim in dims:
            if field.shape[dim] > 1:
                self.relate(field, field.narrow(dim, 0, 1))

    def prefer(self, a: Tensor, b: Tensor) -> Tensor:
        """The label of a position where two related fields meet."""
        return a

    def reading(self, x: Tensor, weight: Tensor, row: Tensor | None) -> Tensor | None:
        """The labels a convolution reads, given those its input carries."""
        return row

    def picked(self, x: Tensor, out: Tensor) -> None:
        """Channels were picked out of `x` by position."""

    def at_sum(self, operands: list[Tensor]) -> list[Tensor]:
        """Two activations are about to be added."""
        return operands

    def passed(self, x: Tensor, out: Tensor) -> None:
        """An operator that keeps channels and zeros produced `out` from `x`."""

    def mixed(self, x: Tensor) -> None:
        """Something else was written into `x`: what was known of its zeros no longer holds."""

    def balance(self, blocks: Tensor, whole: bool = True) -> None:
        """Rows of labels that must keep equally many; some may go `whole` where they are counted.

        Groups of a convolution are counted, pieces of a split are not: it makes as many of less.
        """

    def paired(self, ins: Tensor, outs: Tensor) -> None:
        """What each group of a grouped operator reads and writes, one row a group."""

    def role(self, field: Tensor, role: Role) -> None:
        """What a parameter-made tensor's field means to the operator that uses it."""

    def padded(self, ends: Sequence[Tensor]) -> None:
        """These labels stand for padding before and after."""

    def sized(self, pieces: Sequence[Tensor]) -> None:
        """The next risky operator was given the sizes of these pieces."""

    def work(self, times: int, factors: Sequence[tuple[Fields, Sequence[int]]]) -> None:
        """Multiply-accumulates spent."""

    def grouped(self, blocks: Tensor) -> None:
        """A grouped operator ran, with these labels in each group."""

    def window(self, dim: int, labels: Tensor) -> bool:
        """A convolution slides along a labelled axis; whether it can be given the full width."""
        return False

    def risky(self, out: Tensor, source: Tensor | None) -> None:
        """An operator whose sizes may be fixed in the user's code made `out`, maybe of `source`."""

    def returned(self, path: str, out: Any) -> Any:
        """A module returned; a result other than None takes the output's place.

        The mode is still on here: an override that computes must switch it off.
        """
        return None

    def here(self, path: str) -> Place:
        """Which call of a module this is, the same in every run of the same model."""
        return self.runs, path, self._calls[path]

    def this_join(self) -> Join:
        """A name for the concatenation that runs, the same in every run.

        By its line: what modules keep from one call to the next is not joined again in each.
        """
        here, line = self.here(self.module), source_line()
        return here, line, self._joins[here, line]

    def next_risk(self) -> tuple[Place, int]:
        """A name for the risky operator that just ran, the same in every run."""
        self._risks[self.module] += 1
        return self.here(self.module), self._risks[self.module]

    # Running.

    def run(self, example: Example) -> Any:
        """One forward pass under the mode."""
        self.runs += 1
        self._calls.clear()
        self._risks.clear()
        self._joins.clear()
        with (
            quietly(),
            self._hooks(),
            torch.inference_mode(False),
            torch.no_grad(),
            plain_attention(),
            self,
        ):
            return example.call(self.model)

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        handles = []
        try:
            for path, module in modules_by_path(self.model).items():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # takes no hooks; its operators are seen all the same
                handles.append(module.register_forward_pre_hook(self._entering(path), prepend=True))
                handles.append(module.register_forward_hook(self._leaving(path), always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.stack.clear()

    def _entering(self, path: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.stack.append(path)
            self._calls[path] += 1
            self._risks[path] = 0

        return hook

    def _leaving(self, path: str) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(module: nn.Module, args: Any, out: Any) -> Any:
            if self.stack and self.stack[-1] == path:
                self.stack.pop()
                return self.returned(path, out)
            return None

        return hook


def source_line() -> str:
    """File and line of the innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        ours = name.startswith(_PACKAGE) and not name.startswith(_PACKAGE + "models")
        if not ours and not name.startswith(_TORCH) and Path(name).exists():
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
