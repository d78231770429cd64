"""The dispatch mode under which a model runs while labels follow its data.

`Tracer` knows which module is running, hands each operator to its rule and keeps the labels of
living tensors. What a rule's findings mean is left to subclasses: `recorder.Watch` collects them,
`dry_run_tracer.Checker` checks a compact model against them.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fpgm.errors import FpgmError
from fpgm.tracing import adapter_labels as moves
from fpgm.tracing import labels as lb
from fpgm.tracing.call_context import Calls
from fpgm.tracing.constraints import Join, Place, Slot
from fpgm.tracing.labels import Fields
from fpgm.tracing.ops import registry as rules
from fpgm.utils.adapter_spec import Adapter
from fpgm.utils.channel_adapters import adapters_of
from fpgm.utils.example_inputs import Example, tensors_in
from fpgm.utils.locking import quietly
from fpgm.utils.modules import TABLES, called_by_path, modules_by_path
from fpgm.utils.parameter_info import Role
from fpgm.utils.preserve_state import plain_attention, without_compiling
from fpgm.utils.tracebacks import user_file
from fpgm.utils.weight_norm import weight_norms

_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_RECENT = 4
"""Operators whose results stay alive: enough for one that is wrapped before the next runs."""


class RuleError(FpgmError):
    """A rule of ours broke: a bug here, not in the model."""


class _Known:
    """What is known of a living tensor."""

    __slots__ = ("constant", "fields", "made_of", "offset", "zero")

    def __init__(self) -> None:
        self.fields: Fields | None = None
        self.constant = False
        self.made_of: frozenset[int] = frozenset()
        self.offset = False
        self.zero = False


class _KnownTensors:
    """What is known of living tensors, by their identity.

    Torch's `WeakIdKeyDictionary` does the same, but builds a reference for every look-up, and there
    are dozens of those for every operator.
    """

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ref[Tensor], _Known]] = {}
        """By the tensor's id; read directly where a call for every look-up would be felt."""

    def get(self, tensor: Tensor) -> _Known | None:
        """Return what is known of a tensor, if anything is."""
        entry = self.entries.get(id(tensor))
        return None if entry is None else entry[1]

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self.entries

    def living(self) -> list[Tensor]:
        """Return the tensors that something is known of."""
        tensors = (reference() for reference, _ in list(self.entries.values()))
        return [tensor for tensor in tensors if tensor is not None]

    def add(self, tensor: Tensor) -> _Known:
        """Begin to know a tensor; the entry goes when the tensor does."""
        key, entries, known = id(tensor), self.entries, _Known()

        def forget(_: object) -> None:
            entries.pop(key, None)

        entries[key] = weakref.ref(tensor, forget), known
        return known


class Tracer(TorchDispatchMode):
    """Runs a model and lets labels follow the data; subclasses decide what relations mean."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap every operator in a switch that `without_compiling` sets once a run."""
        return not hasattr(torch.compiler, "set_stance")

    def __init__(self, model: nn.Module, slots: Mapping[int, Slot]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.slots = slots
        self.stack: list[str] = []
        self.runs = 0
        replacements: dict[Any, Callable[..., Any]] = {
            torch._weight_norm: self.weight_norm,
            _SET_DATA: self._set_data,
        }
        self.calls = Calls(self.leaves, replacements)
        self._calls: Counter[str] = Counter()
        self._risks: Counter[str] = Counter()
        self._joins: Counter[tuple[Place, str]] = Counter()
        self._known = _KnownTensors()
        self._weight_norms = {(id(n.direction), id(n.gain)) for n in weight_norms(model)}
        self._moving = False
        """Whether one of our own adapters runs, whose operators need no rules."""
        self._hooked = False
        self.placed = moves.Memory()
        self.uncertain = False
        """Whether a tensor came from nowhere: what it depends on is not known."""
        self._given: set[int] = set()
        """Ids of the tensors that were there before the run."""
        self._recent: deque[Any] = deque(maxlen=_RECENT)
        """The latest results, of which a new Python object may show the same numbers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._moving:
            return func(*args, **kwargs)
        given = args
        if not isinstance(func, HigherOrderOperator) and torch.Tag.inplace_view in func.tags:
            given = (self._as_it_was(args[0]), *args[1:])
        inputs = rules.tensors((*args, *kwargs.values()) if kwargs else args)
        self.recognize(inputs)
        constant = all(map(self.is_constant, inputs))
        out = self.call(func, args, kwargs)
        self._recent.append(out)
        try:
            rules.apply(self, func, given, kwargs, out, inputs)
            if constant and inputs:
                self.note_constant(inputs, out, rules.adds_offset(func))
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

    def _as_it_was(self, tensor: Tensor) -> Tensor:
        """An alias with the shape a tensor has now, for an operator that changes it in place."""
        alias = tensor.detach()
        self.set(alias, self.fields(tensor))
        return alias

    def weight_norm(self, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
        """Run a weight norm as one operator, which for most dims it is not."""
        with _disable_current_modes():
            out = torch._weight_norm(v, g, dim)
            rules.weight_norm(self, v, g, dim, out)
            if self.is_constant(v) and self.is_constant(g):
                self.note_constant([v, g], out)
        return out

    def recognize(self, tensors: Sequence[Tensor]) -> None:
        """Label tensors that no operator made: another object with the numbers of a known one.

        Subclasses (`as_subclass`), `nn.Parameter(y)` and DLPack make such objects.
        """
        known, slots = self._known.entries, self.slots
        for tensor in tensors:
            if id(tensor) in known or id(tensor) in slots:
                continue
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self._recognize(tensor)

    def _recognize(self, tensor: Tensor) -> None:
        source = None
        if id(tensor) not in self._given and tensor.is_floating_point() and tensor.numel() > 1:
            place = _place_of(tensor)
            if place is not None:
                others = [*rules.tensors(reversed(self._recent)), *self._known.living()]
                source = next((other for other in others if _place_of(other) == place), None)
            self.uncertain = self.uncertain or source is None
        self._known.add(tensor)
        if source is not None:
            self._take_over(source, tensor)

    def _take_over(self, source: Tensor, tensor: Tensor) -> None:
        """Know of a tensor what is known of another with the same numbers."""
        old, new = self._known.get(source), self._know(tensor)
        if old is not None:
            new.fields, new.constant, new.zero = old.fields or (), old.constant, old.zero
            new.made_of, new.offset = old.made_of, old.offset
        else:
            new.fields = self.fields(source)
        self.placed.pass_on(source, tensor)

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """Let a tensor have the numbers of another (`y.data = x`), and its labels."""
        _SET_DATA(tensor, value)
        self._take_over(value, tensor)

    # What rules ask.

    def fields(self, tensor: Tensor) -> Fields:
        """Labels of a tensor; a parameter seen for the first time gets fresh ones on every axis."""
        entry = self._known.entries.get(id(tensor))
        if entry is not None and entry[1].fields is not None:
            return entry[1].fields
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
        entry = self._known.entries.get(id(tensor))
        return entry is not None and entry[1].constant

    def made_of(self, tensor: Tensor) -> frozenset[int]:
        """Ids of the parameters and buffers a constant tensor is computed from."""
        if id(tensor) in self.slots:
            return frozenset((id(tensor),))
        known = self._known.get(tensor)
        return frozenset() if known is None else known.made_of

    def has_offset(self, tensor: Tensor) -> bool:
        """Whether something was added on the way to a constant, which keeps it from being zero."""
        known = self._known.get(tensor)
        return known is not None and known.offset

    def note_constant(self, inputs: Sequence[Tensor], out: Any, offset: bool = False) -> None:
        """A result is made of nothing but these constants."""
        made_of = frozenset().union(*map(self.made_of, inputs))
        offset = offset or any(map(self.has_offset, inputs))
        for result in rules.tensors((out,)):
            known = self._know(result)
            known.constant, known.made_of, known.offset = True, made_of, offset

    def scales_gain(self, v: Tensor, g: Tensor) -> bool:
        """Whether masking and compacting know that these two are a weight norm's."""
        return (id(v), id(g)) in self._weight_norms

    def is_zero(self, tensor: Tensor) -> bool:
        """Whether a unit is zero here once its filter, bias and shifts are."""
        known = self._known.get(tensor)
        return known is not None and known.zero

    def mark_zero(self, tensor: Tensor, zero: bool) -> None:
        """Note whether silencing a unit's weights silences it here."""
        self._know(tensor).zero = zero

    def _know(self, tensor: Tensor) -> _Known:
        return self._known.get(tensor) or self._known.add(tensor)

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

    assumes = True
    """Whether rules may assume what the code keeps of a size; a replay sees what it keeps."""

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

    def carried(self, inputs: Sequence[Tensor]) -> Any:
        """What an operator's inputs carry, for `check_passed` after its rule."""

    def check_passed(self, name: str, carried: Any, out: Any) -> None:
        """Notice labels that a rule neither passed on nor said anything about."""

    def leaves(self, tensor: Tensor, method: str) -> None:
        """The model's code takes values out of torch, where labels cannot follow."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self.freeze(self.fields(tensor), f"their values leave torch by '{method}'")

    def stacked(self, rows: Tensor) -> None:
        """Branches were stacked, one row of labels each."""

    def stacks(self, a: Tensor, b: Tensor) -> bool:
        """Whether two labels are at the same position of branches that were stacked."""
        return False

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
        self.placed.pass_on(x, out)

    def mixed(self, x: Tensor) -> None:
        """Something else was written into `x`: what was known of its zeros no longer holds."""
        self.placed.forget(x)

    def knows(self, adapter: Adapter) -> bool:
        """Tell whether labels are carried through an adapter by what it does, not by operators."""
        return True

    def place(self, adapter: Adapter, labels: Tensor | None, zero: bool) -> tuple[Tensor, Tensor]:
        """Return the labels of channels that a scatter places, and those of all it returns."""
        raise NotImplementedError

    def pick(self, adapter: Adapter, labels: Tensor | None, wide: Tensor | None) -> Tensor:
        """Return the labels of channels that a gather picks, `wide` those it picks from."""
        raise NotImplementedError

    def adapted(self, adapter: Adapter, x: Tensor, out: Tensor) -> Tensor | None:
        """Carry labels through an adapter of an earlier plan; a result takes the output's place."""
        moves.carry(self, adapter, x, out)
        return None

    def balance(self, blocks: Tensor, whole: bool = True) -> None:
        """Rows of labels that must keep equally many; some may go `whole` where they are counted.

        Groups of a convolution are counted, pieces of a split are not: it makes as many of less.
        """

    def paired(self, ins: Tensor, outs: Tensor) -> None:
        """What each group of a grouped operator reads and writes, one row a group."""

    def role(self, field: Tensor, role: Role, weight: Tensor) -> None:
        """What a field of a tensor made of parameters means to the operator that uses it."""

    def added(self, out: Tensor, part: Tensor, terms: Sequence[Tensor]) -> None:
        """A field of a sum of parameters (`terms`), and one of a term: they have the same role."""

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
        self._given = {id(tensor) for tensor in self._find_given(example)}
        with (
            quietly(),
            self._hooks(),
            torch.inference_mode(False),
            torch.no_grad(),
            plain_attention(),
            without_compiling(),
            self.calls,
            self,
        ):
            return example.call(self.model)

    def _find_given(self, example: Example) -> Iterator[Tensor]:
        """Yield tensors that the example and the attributes of modules hold."""
        yield from tensors_in((example.args, dict(example.kwargs)))
        for module in modules_by_path(self.model).values():
            for name, value in module.__dict__.items():
                if name not in TABLES and isinstance(value, Tensor | list | tuple | dict):
                    yield from tensors_in(value)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Let several runs use one set of hooks: a set costs as much as a good part of a run."""
        handles: list[Any] = []
        try:
            self._hook_all(handles)
            self._hooked = True
            yield
        finally:
            self._hooked = False
            for handle in handles:
                handle.remove()

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        try:
            with nullcontext() if self._hooked else self.hooked():
                yield
        finally:
            self.stack.clear()
            self._moving = False
            self._recent.clear()

    def _hook_all(self, handles: list[Any]) -> None:
        """Put hooks on every module; handles of those that are there are kept in the list."""
        for path, module in called_by_path(self.model).items():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks; its operators are seen all the same
            for part, adapter in adapters_of(module, path):
                handles.append(part.register_forward_pre_hook(self._starts_moving(adapter)))
                done = self._moved(adapter)
                handles.append(part.register_forward_hook(done, always_call=True))
            handles.append(module.register_forward_pre_hook(self._entering(path), prepend=True))
            handles.append(module.register_forward_hook(self._leaving(path), always_call=True))

    def _starts_moving(self, adapter: Adapter) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._moving = self.knows(adapter)

        return hook

    def _moved(self, adapter: Adapter) -> Callable[[nn.Module, Any, Any], Tensor | None]:
        def hook(module: nn.Module, args: Any, out: Any) -> Tensor | None:
            moving, self._moving = self._moving, False
            if not moving or not isinstance(out, Tensor):
                return None
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return self.adapted(adapter, args[0], out)

        return hook

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
                if isinstance(out, Tensor):
                    self.recognize([out])
                return self.returned(path, out)
            return None

        return hook


def _place_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """Where in memory a tensor's numbers are, and how they are laid out; None if nowhere.

    Inside `vmap` and `grad` a tensor only wraps another and has no memory of its own.
    """
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def source_line() -> str:
    """File and line of the innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (file := user_file(frame.f_code.co_filename)) is not None:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
