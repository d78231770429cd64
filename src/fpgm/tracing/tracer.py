"""The dispatch mode under which a model runs while labels follow its data.

`Tracer` knows which module is running, passes each operator to its rule and keeps the labels of
live tensors. Subclasses decide what to do with a rule's results: `recorder.TraceRecorder` records
them, `dry_run_tracer.ValidatingTracer` checks a compact model against them.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fpgm.errors import FpgmError
from fpgm.tracing import adapter_labels as adapter_labels
from fpgm.tracing import labels as lb
from fpgm.tracing.call_context import CallContext
from fpgm.tracing.labels import Fields
from fpgm.tracing.operator_log import makes_nothing, name_tensors
from fpgm.tracing.ops import registry as rules
from fpgm.tracing.trace_values import Join, ParameterInfo, Place
from fpgm.utils.adapter_spec import Adapter
from fpgm.utils.channel_adapters import adapters_of
from fpgm.utils.example_inputs import Example
from fpgm.utils.hooks import temporary_hooks
from fpgm.utils.modules import outer_modules_by_path
from fpgm.utils.parameter_roles import Role
from fpgm.utils.preserve_state import disable_compilation, disable_fused_attention
from fpgm.utils.thread_lock import suppress_warnings
from fpgm.utils.tracebacks import source_line
from fpgm.utils.weight_norm import weight_norms

_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_RECENT = 4
"""Operators whose results stay alive: enough for one that is wrapped before the next runs."""


class RuleError(FpgmError):
    """A rule failed: a bug in fpgm, not in the model."""


class _TensorState:
    """What is known about a live tensor."""

    __slots__ = ("constant", "fields", "lifted", "offset", "source_parameters", "zero")

    def __init__(self) -> None:
        self.fields: Fields | None = None
        self.constant = False
        self.source_parameters: frozenset[int] = frozenset()
        self.offset = False
        self.lifted = False
        self.zero = False


class _TensorStates:
    """What is known about live tensors, by identity.

    Torch's `WeakIdKeyDictionary` does the same, but builds a reference for every look-up, and there
    are dozens of those for every operator.
    """

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ref[Tensor], _TensorState]] = {}
        """By the tensor's id; read directly where a function call would be too slow."""

    def get(self, tensor: Tensor) -> _TensorState | None:
        """Return what is known about a tensor, or None."""
        entry = self.entries.get(id(tensor))
        return None if entry is None else entry[1]

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self.entries

    def live_tensors(self) -> list[Tensor]:
        """Return all known tensors."""
        tensors = (reference() for reference, _ in list(self.entries.values()))
        return [tensor for tensor in tensors if tensor is not None]

    def add(self, tensor: Tensor) -> _TensorState:
        """Add a tensor; the entry is deleted with the tensor."""
        key, entries, known = id(tensor), self.entries, _TensorState()

        def forget(_: object) -> None:
            entries.pop(key, None)

        entries[key] = weakref.ref(tensor, forget), known
        return known


class Tracer(TorchDispatchMode):
    """Runs a model and lets labels follow the data; subclasses decide what relations mean."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap every operator in a switch that `disable_compilation` sets once."""
        return not hasattr(torch.compiler, "set_stance")

    def __init__(self, model: nn.Module, parameter_infos: Mapping[int, ParameterInfo]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.parameter_infos = parameter_infos
        self.stack: list[str] = []
        self.runs = 0
        # A weak reference, so that the model is freed with the tracer, not when cycles are sought.
        itself: Any = weakref.proxy(self)
        replacements: dict[Any, Callable[..., Any]] = {
            torch._weight_norm: lambda *args, **kwargs: itself.weight_norm(*args, **kwargs),
            _SET_DATA: lambda tensor, value: itself._set_data(tensor, value),
        }
        self.call_context = CallContext(
            lambda tensor, method: itself.on_values_leave(tensor, method), replacements
        )
        self._calls: Counter[str] = Counter()
        self._fixed_size_counts: Counter[str] = Counter()
        self._joins: Counter[tuple[Place, str]] = Counter()
        self._states = _TensorStates()
        self._weight_norms = {(id(n.direction), id(n.gain)) for n in weight_norms(model)}
        self._in_adapter = False
        """Whether one of our own adapters runs, whose operators need no rules."""
        self._hooked = False
        self.placed = adapter_labels.PlacedTensors()
        self.uncertain = False
        """Whether a tensor has an unknown origin: what it depends on is not known."""
        self.nested_in = ""
        """Where code first uses nested tensors, if anywhere."""
        self.given: Mapping[int, str] = {}
        """Names of the tensors that were there before the run, by their ids."""
        self._recent: deque[Any] = deque(maxlen=_RECENT)
        """The latest results, of which a new Python object may show the same numbers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._in_adapter or makes_nothing(func, args):
            return func(*args, **kwargs)
        given = args
        if not isinstance(func, HigherOrderOperator) and torch.Tag.inplace_view in func.tags:
            given = (self._alias_before_write(args[0]), *args[1:])
        inputs = rules.tensors((*args, *kwargs.values()) if kwargs else args)
        if any(tensor.is_nested for tensor in inputs):
            return self._run_nested(func, args, kwargs, inputs)
        self.recognize(inputs)
        constant = all(map(self.is_constant, inputs))
        out = self.call(func, args, kwargs)
        self._recent.append(out)
        try:
            rules.apply(self, func, given, kwargs, out, inputs)
            if constant and inputs:
                self.note_constant(inputs, out, rules.adds_offset(func))
                if rules.lifts_zeros(self, func, args, inputs, out):
                    self.mark_lifted(out)
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
            self.on_rule_error(func, (*args, *kwargs.values()), out, error)
        return out

    def on_rule_error(self, func: Any, args: tuple[Any, ...], out: Any, error: Exception) -> None:
        """Raise an error of our own: one in our code must not look like one in the user's."""
        raise RuleError(f"The rule for '{func}' failed in {self.where()}: {error!r}") from error

    def _run_nested(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[Tensor]
    ) -> Any:
        """Run an operator on nested tensors, which have no axes of one size to label."""
        self.nested_in = self.nested_in or self.where()
        for tensor in inputs:
            if not tensor.is_nested:
                self.freeze(self.fields(tensor), "nested tensors read them")
        out = func(*args, **kwargs)
        for result in rules.tensors((out,)):
            self._get_or_add(result)
        return out

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator itself."""
        return func(*args, **kwargs)

    def _alias_before_write(self, tensor: Tensor) -> Tensor:
        """Return an alias with the current shape, for an operator that changes it in place."""
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
        """Label tensors that no operator created: another object with a known one's values.

        Subclasses (`as_subclass`), `nn.Parameter(y)` and DLPack make such objects.
        """
        known, parameter_infos = self._states.entries, self.parameter_infos
        for tensor in tensors:
            if id(tensor) in known or id(tensor) in parameter_infos:
                continue
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self._recognize(tensor)

    def _recognize(self, tensor: Tensor) -> None:
        source = None
        if id(tensor) not in self.given and tensor.is_floating_point() and tensor.numel() > 1:
            place = _memory_layout(tensor)
            if place is not None:
                others = [*rules.tensors(reversed(self._recent)), *self._states.live_tensors()]
                source = next((other for other in others if _memory_layout(other) == place), None)
            self.uncertain = self.uncertain or source is None
        self._states.add(tensor)
        if source is not None:
            self._copy_state(source, tensor)

    def _copy_state(self, source: Tensor, tensor: Tensor) -> None:
        """Copy what is known about a tensor to another with the same values."""
        old, new = self._states.get(source), self._get_or_add(tensor)
        if old is not None:
            new.fields, new.constant, new.zero = old.fields or (), old.constant, old.zero
            new.source_parameters, new.offset = old.source_parameters, old.offset
            new.lifted = old.lifted
        else:
            new.fields = self.fields(source)
        self.placed.pass_on(source, tensor)

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """Assign another tensor's data (`y.data = x`), and its labels."""
        _SET_DATA(tensor, value)
        self._copy_state(value, tensor)

    # What rules ask.

    def fields(self, tensor: Tensor) -> Fields:
        """Return a tensor's labels; a parameter without any gets new ones on every axis."""
        entry = self._states.entries.get(id(tensor))
        if entry is not None and entry[1].fields is not None:
            return entry[1].fields
        info = self.parameter_infos.get(id(tensor))
        if info is None:
            return ()
        if not info.has_labels:
            info.open = True
            ndim = len(info.shape)
            info.name_axes(
                [
                    (lb.along(self.new_labels(n), ndim, d), "scale")
                    for d, n in enumerate(info.shape)
                    if n > 1
                ]
            )
        return tuple(info.fields)

    def set(self, tensor: Tensor, fields: Sequence[Tensor]) -> None:
        """Label a tensor."""
        kept = tuple(f for f in fields if f.numel() > 1)
        known = self._get_or_add(tensor)
        if kept or known.fields is not None:  # a parameter's own labels are in its info
            known.fields = kept

    def unlabelled_parameter(self, tensor: Tensor) -> ParameterInfo | None:
        """Return the info of a parameter without labels, so that a rule can assign its axes."""
        info = self.parameter_infos.get(id(tensor))
        return info if info is not None and not info.has_labels else None

    def has_role(self, tensor: Tensor) -> bool:
        """Tell whether a rule has assigned a parameter's axes."""
        info = self.parameter_infos.get(id(tensor))
        return info is not None and info.has_labels and not info.open

    def is_constant(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is computed from parameters and buffers only."""
        if id(tensor) in self.parameter_infos:
            return True
        entry = self._states.entries.get(id(tensor))
        return entry is not None and entry[1].constant

    def source_parameters(self, tensor: Tensor) -> frozenset[int]:
        """Return the ids of the parameters and buffers a constant tensor is computed from."""
        if id(tensor) in self.parameter_infos:
            return frozenset((id(tensor),))
        known = self._states.get(tensor)
        return frozenset() if known is None else known.source_parameters

    def has_offset(self, tensor: Tensor) -> bool:
        """Tell whether a constant includes an added term, which keeps it from being zero."""
        known = self._states.get(tensor)
        return known is not None and known.offset

    def note_constant(self, inputs: Sequence[Tensor], out: Any, offset: bool = False) -> None:
        """Note that a result is computed from these constants only."""
        source_parameters = frozenset().union(*map(self.source_parameters, inputs))
        offset = offset or any(map(self.has_offset, inputs))
        for result in rules.tensors((out,)):
            known = self._get_or_add(result)
            known.constant, known.source_parameters, known.offset = True, source_parameters, offset

    def is_lifted(self, tensor: Tensor) -> bool:
        """Tell whether a constant may not be zero where the parameters it comes from are."""
        known = self._states.get(tensor)
        return known is not None and known.lifted

    def mark_lifted(self, out: Any) -> None:
        """Note that zeros in parameters may not be zeros here."""
        for result in rules.tensors((out,)):
            self._get_or_add(result).lifted = True

    def note_read_by(self, weight: Tensor, labels: Tensor) -> None:
        """Note the labels that a computed weight reads."""

    def scales_gain(self, v: Tensor, g: Tensor) -> bool:
        """Tell whether these two are the parameters of a known weight norm."""
        return (id(v), id(g)) in self._weight_norms

    def is_zero(self, tensor: Tensor) -> bool:
        """Tell whether a unit is zero here once its filter, bias and shifts are zero."""
        known = self._states.get(tensor)
        return known is not None and known.zero

    def mark_zero(self, tensor: Tensor, zero: bool) -> None:
        """Note whether zeroing a unit's weights makes it zero here."""
        self._get_or_add(tensor).zero = zero

    def _get_or_add(self, tensor: Tensor) -> _TensorState:
        return self._states.get(tensor) or self._states.add(tensor)

    @property
    def module(self) -> str:
        """Return the path of the module whose forward is running."""
        return self.stack[-1] if self.stack else ""

    def where(self) -> str:
        """Describe the running module and the line of user code."""
        place = source_line()
        return f"{self.module or 'the model'} ({place})" if place else self.module or "the model"

    trusts_positions = False
    """Whether constant channel positions are right: in a dry run they are the plan's."""

    may_assume_sizes = True
    """Whether rules may assume which sizes the code keeps; a dry run sees them."""

    # What rules find; subclasses say what it means.

    def new_labels(self, count: int) -> Tensor:
        """Return new labels."""
        raise NotImplementedError

    def constant_labels(self, count: int) -> Tensor:
        """Return new labels for an axis of a constant, which may turn out to hold no channels."""
        return self.new_labels(count)

    def drop_constant(self, field: Tensor) -> bool:
        """Drop an axis of a constant that met one without channels; tell whether it was one."""
        return False

    def fixed_labels(self, number: int, count: int) -> Tensor:
        """Return labels for an unlabelled part of a concatenation, which cannot shrink."""
        raise NotImplementedError

    def end_concat(self) -> None:
        """Note that a concatenation is complete."""
        self._joins[self.current_call(self.module), source_line()] += 1

    def relate(self, a: Tensor, b: Tensor) -> None:
        """Relate two fields that are combined, with broadcasting: their units are the same."""
        raise NotImplementedError

    def freeze(self, fields: Sequence[Tensor], reason: str, soft: bool = False) -> None:
        """Note that these labels cannot be removed."""
        raise NotImplementedError

    def tie(self, field: Tensor, dims: Sequence[int]) -> None:
        """Tie labels along these dims: they are removed together."""
        for dim in dims:
            if field.shape[dim] > 1:
                self.relate(field, field.narrow(dim, 0, 1))

    def labels_of(self, inputs: Sequence[Tensor]) -> Any:
        """Return the labels of an operator's inputs, for `check_passed` after its rule."""

    def check_passed(self, name: str, carried: Any, out: Any) -> None:
        """Detect labels that a rule neither passed on nor reported."""

    def on_values_leave(self, tensor: Tensor, method: str) -> None:
        """Handle values that the model's code takes out of torch, where labels cannot follow."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self.freeze(self.fields(tensor), f"their values leave torch by '{method}'")

    def note_stack(self, rows: Tensor) -> None:
        """Note that branches were stacked, one row of labels each."""

    def are_stacked(self, a: Tensor, b: Tensor) -> bool:
        """Tell whether two labels are at the same position of stacked branches."""
        return False

    def prefer(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the label of a position where two related fields are combined."""
        return a

    def labels_read(self, x: Tensor, weight: Tensor, row: Tensor | None) -> Tensor | None:
        """Return the labels a convolution reads, given those of its input."""
        return row

    def note_picked(self, x: Tensor, out: Tensor) -> None:
        """Note that channels were picked out of `x` by position."""

    def at_sum(self, operands: list[Tensor]) -> list[Tensor]:
        """Return the operands of a sum of two activations, before they are added."""
        return operands

    def note_passed(self, x: Tensor, out: Tensor) -> None:
        """Note that an operator that keeps channels and zeros produced `out` from `x`."""
        self.placed.pass_on(x, out)

    def note_overwritten(self, x: Tensor) -> None:
        """Note that `x` was overwritten: what was known about its zeros no longer applies."""
        self.placed.forget(x)

    def handles_adapter(self, adapter: Adapter) -> bool:
        """Tell whether labels are carried through an adapter by what it does, not by operators."""
        return True

    def place(self, adapter: Adapter, labels: Tensor | None, zero: bool) -> tuple[Tensor, Tensor]:
        """Return the labels of channels that a scatter places, and those of all it returns."""
        raise NotImplementedError

    def pick(self, adapter: Adapter, labels: Tensor | None, wide: Tensor | None) -> Tensor:
        """Return the labels of channels that a gather picks, `wide` those it picks from."""
        raise NotImplementedError

    def carry_through_adapter(self, adapter: Adapter, x: Tensor, out: Tensor) -> Tensor | None:
        """Carry labels through an adapter of an earlier plan; a result takes the output's place."""
        adapter_labels.carry(self, adapter, x, out)
        return None

    def balance(self, blocks: Tensor, whole: bool = True) -> None:
        """Require that rows of labels keep equally many; some may be removed `whole`.

        Groups of a convolution are counted; pieces of a split are not, since it yields equally many
        from fewer channels.
        """

    def pair_groups(self, ins: Tensor, outs: Tensor) -> None:
        """Note which labels each group of a grouped operator reads and writes, one row each."""

    def note_role(self, field: Tensor, role: Role, weight: Tensor) -> None:
        """Note the role of a computed weight's field in the operator that uses it."""

    def note_sum_term(self, out: Tensor, part: Tensor, terms: Sequence[Tensor]) -> None:
        """Note that a field of a sum of parameters has the role of a term's field."""

    def note_padding(self, ends: Sequence[Tensor]) -> None:
        """Note that these labels are padding before and after."""

    def note_piece_sizes(self, pieces: Sequence[Tensor]) -> None:
        """Note the pieces whose sizes were passed to the next fixed-size operator."""

    def note_cost(self, times: int, factors: Sequence[tuple[Fields, Sequence[int]]]) -> None:
        """Count multiply-accumulates."""

    def note_grouped_op(self, blocks: Tensor) -> None:
        """Note that a grouped operator ran, with these labels in each group."""

    def note_norm_group(self, size: int) -> None:
        """Note how many channels share a group norm's statistics; pruning must not change it."""

    def slide_along_channels(self, dim: int, labels: Tensor) -> bool:
        """Tell whether a convolution that slides along labels can be given the full width."""
        return False

    def note_fixed_size_op(
        self, out: Tensor, source: Tensor | None, dims: Sequence[int] | None
    ) -> None:
        """Note that an operator whose sizes may be fixed in user code computed `out`.

        `source` is its input, if any. The sizes are of these `dims`, or of any if None.
        """

    def on_module_return(self, path: str, out: Any) -> Any:
        """Handle a module's output; a result other than None replaces it.

        The mode is still active here: an override that computes must disable it.
        """
        return None

    def current_call(self, path: str) -> Place:
        """Identify this call of a module, the same in every run of the same model."""
        return self.runs, path, self._calls[path]

    def current_concat(self) -> Join:
        """Identify the running concatenation, the same in every run.

        It is identified by its line, because values that modules cache are not concatenated again
        in every call.
        """
        here, line = self.current_call(self.module), source_line()
        return here, line, self._joins[here, line]

    def next_fixed_size_op(self) -> tuple[Place, int]:
        """Identify the fixed-size operator that just ran, the same in every run."""
        self._fixed_size_counts[self.module] += 1
        return self.current_call(self.module), self._fixed_size_counts[self.module]

    # Running.

    def run(self, example: Example) -> Any:
        """Run one forward pass under the mode."""
        self.runs += 1
        self._calls.clear()
        self._fixed_size_counts.clear()
        self._joins.clear()
        self.given = name_tensors(self.model, example)
        with (
            suppress_warnings(),
            self._hooks(),
            torch.inference_mode(False),
            torch.no_grad(),
            disable_fused_attention(),
            disable_compilation(),
            self.call_context,
            self,
        ):
            return example.call(self.model)

    @contextmanager
    def hooks_installed(self) -> Iterator[None]:
        """Install hooks once for several runs: installing takes a good part of a run."""
        with temporary_hooks() as handles:
            try:
                self._hook_all(handles)
                self._hooked = True
                yield
            finally:
                self._hooked = False

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        try:
            with nullcontext() if self._hooked else self.hooks_installed():
                yield
        finally:
            self.stack.clear()
            self._in_adapter = False
            self._recent.clear()

    def _hook_all(self, handles: list[Any]) -> None:
        """Put hooks on every module; handles of those that are there are kept in the list."""
        for path, module in outer_modules_by_path(self.model).items():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks, but its operators are traced anyway
            for part, adapter in adapters_of(module, path):
                handles.append(part.register_forward_pre_hook(self._before_adapter(adapter)))
                done = self._after_adapter(adapter)
                handles.append(part.register_forward_hook(done, always_call=True))
            handles.append(
                module.register_forward_pre_hook(self._before_module(path), prepend=True)
            )
            handles.append(module.register_forward_hook(self._after_module(path), always_call=True))

    def _before_adapter(self, adapter: Adapter) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._in_adapter = self.handles_adapter(adapter)

        return hook

    def _after_adapter(self, adapter: Adapter) -> Callable[[nn.Module, Any, Any], Tensor | None]:
        def hook(module: nn.Module, args: Any, out: Any) -> Tensor | None:
            moving, self._in_adapter = self._in_adapter, False
            if not moving or not isinstance(out, Tensor):
                return None
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return self.carry_through_adapter(adapter, args[0], out)

        return hook

    def _before_module(self, path: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.stack.append(path)
            self._calls[path] += 1
            self._fixed_size_counts[path] = 0

        return hook

    def _after_module(self, path: str) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(module: nn.Module, args: Any, out: Any) -> Any:
            if not self.stack or self.stack[-1] != path:
                return None
            self.stack.pop()
            with torch._C.DisableTorchFunction():  # each look at a tensor would be a call to track
                if isinstance(out, Tensor):
                    if out.is_nested:
                        return None
                    self.recognize([out])
                return self.on_module_return(path, out)

        return hook


def _memory_layout(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return a tensor's memory address and layout; None if it has none.

    Inside `vmap` and `grad` a tensor only wraps another and has no memory of its own.
    """
    if tensor.is_nested or tensor.layout is not torch.strided or not tensor.numel():
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
