"""Find the names that a model's forward code may read, without running it.

An attribute whose name does not appear in that code cannot change what a forward pass computes. All
functions and classes that forward code names are followed, except torch's own, and so are objects
in modules, globals and class attributes, and methods that torch's code calls. Code that cannot be
read (a C function of another package) or that computes names (`getattr(self, f"width{i}")`) means
that anything may be read.
"""

from __future__ import annotations

import argparse
import dis
import functools
import importlib.util
import operator
import sys
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from fpgm.utils.modules import MODULE_ATTRIBUTES, modules_by_path
from fpgm.utils.preserve_state import CACHED_FUNCTION
from fpgm.utils.size_names import LAYER_SIZES


class CodeNames:
    """Names in the code that runs in forward passes of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.names: set[str] = set()
        self.complete = True
        """Whether all code could be read."""
        self._reads_sizes = False
        self._reads_mode = False
        self._visited: set[int] = set()
        self._waiting: list[FunctionType] = []
        """Functions that are named and not yet read."""
        self._kinds: set[type] = set()
        self._read: dict[int, Any] = {}
        """Objects already read, kept alive so that their ids stay unique."""
        modules = modules_by_path(model).values()
        for module in modules:
            self._read_module(module)
        self._read_hooks(_global_forward_pre_hooks, _global_forward_hooks)
        known = -1
        while known < len(self._visited) + len(self._kinds):  # a method may name others
            known = len(self._visited) + len(self._kinds)
            self._read_waiting()
            self._follow_methods()
            self._read_waiting()
        self.changes_mode = _have_own_mode(modules)

    def may_read(self, name: str) -> bool:
        """Tell whether forward code may read an attribute of this name."""
        return not self.complete or name in self.names

    @property
    def may_compute_with_sizes(self) -> bool:
        """Tell whether code may use a layer's stored width as a number: labels do not show that.

        `y / self.conv.out_channels` does. Sizes of tensors are seen when they are read.
        """
        return self._reads_sizes or not self.complete

    @property
    def may_depend_on_mode(self) -> bool:
        """Tell whether train mode may change more than dropout and batch norm."""
        return self.changes_mode or self._reads_mode or not self.complete

    def _read_module(self, module: nn.Module) -> None:
        kind = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            self.complete = False
            return
        self._read_module_class(kind)
        held = (
            v
            for n, v in module.__dict__.items()
            if n not in MODULE_ATTRIBUTES and type(v) not in _PLAIN
        )
        self._read_values(held)
        self._read_hooks(module._forward_pre_hooks, module._forward_hooks)

    def _read_hooks(self, *tables: Mapping[int, Any]) -> None:
        added = (function for table in tables for function in table.values())
        # Our own hooks here belong to another thread that is tracing the same model.
        self._read_values(f for f in added if not _is_ours(f))

    def _read_module_class(self, kind: type[nn.Module]) -> None:
        if issubclass(kind, torch.jit.ScriptModule):
            self.complete = False
            return
        if kind in self._kinds or kind.__module__ in _DROP:
            return
        self._kinds.add(kind)
        if not _is_torch_layer(kind):
            self._read_values(_called_by_torch(kind))

    def _read_values(self, values: Iterable[Any]) -> None:
        """Read the functions, and the classes of the objects, in these values."""
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if type(value) is FunctionType:
                self._read_function(value)
            elif type(value) not in _PLAIN and id(value) not in self._read:
                if len(self._read) > _MAX_OBJECTS:
                    self.complete = False
                    return
                self._read[id(value)] = value
                waiting += self._read_value(value)

    def _read_value(self, value: Any) -> Iterable[Any]:
        """Read a value; return what it holds."""
        if isinstance(value, functools.partial):
            return value.func, *value.args, *value.keywords.values()
        if isinstance(value, MethodType):
            return value.__func__, value.__self__
        if isinstance(value, staticmethod | classmethod):
            return (value.__func__,)
        if isinstance(value, property):
            return value.fget, value.fset
        if isinstance(value, weakref.ref):
            return (value(),)
        if isinstance(value, type):
            return self._read_class(value)
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._read_module_class(type(module))
            return ()
        if _cannot_be_read(value):
            self.complete = False
        if isinstance(value, dict | MappingProxyType):
            return *value.values(), *self._read_object(value)
        if isinstance(value, list | tuple | set | frozenset | deque):
            return *value, *self._read_object(value)
        if isinstance(value, _HOLDERS) or not _is_known(type(value)):
            return self._read_object(value)
        return ()

    def _read_object(self, value: Any) -> list[Any]:
        """Read what operators call on an object; its other methods are read if code names them."""
        kind = type(value)
        if kind not in self._kinds:
            self._kinds.add(kind)
            for base in _own_bases(kind):
                for name, function in vars(base).items():
                    if name.startswith("__") and name != "__init__":
                        self._read_values([function] if isinstance(function, _METHODS) else ())
        return [*getattr(value, "__dict__", {}).values(), *_slot_values(value)]

    def _read_class(self, kind: type) -> Iterable[Any]:
        """Read a class that code names, which may create objects of it; return what it holds."""
        if issubclass(kind, nn.Module):
            self._read_module_class(kind)
            return ()
        held = [item for base in _own_bases(kind) for item in vars(base).items()]
        return [v for name, v in held if isinstance(v, _METHODS) or not name.startswith("__")]

    def _read_function(self, function: FunctionType) -> None:
        if id(function) not in self._visited and not _is_trusted(function):
            self._visited.add(id(function))
            self._waiting.append(function)

    def _read_waiting(self) -> None:
        """Read the functions that were named so far, and those that they name."""
        while self._waiting:
            self._read_code(self._waiting.pop())

    def _read_code(self, function: FunctionType) -> None:
        names = set(_names_in(function.__code__))
        self.names |= names
        self._reads_sizes = self._reads_sizes or not names.isdisjoint(_SIZE_NAMES)
        self._reads_mode = self._reads_mode or ("training" in names and _uses_mode(function))
        if any(_names_at_run_time(code) for code in _codes_in(function.__code__)):
            self.complete = False
        cells = [cell for cell in function.__closure__ or () if cell != CellType()]
        held = [cell.cell_contents for cell in cells]
        held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self._read_values((*held, *vars(function).values()))
        for name in names:
            if name in function.__globals__:
                self._read_global(function.__globals__[name], names)
        for imported in _imports_in(function):
            if imported is None:
                self.complete = False
            else:
                self._read_global(imported, names)

    def _read_global(self, value: Any, names: set[str]) -> None:
        """Read what code may reach through a global: of a module, what the code names."""
        modules, known = [value], set()
        while modules:
            value = modules.pop()
            if not isinstance(value, ModuleType):
                self._read_values([value])
            elif value.__name__ not in known and not _is_known(value):
                known.add(value.__name__)
                modules += [vars(value)[name] for name in names & vars(value).keys()]

    def _follow_methods(self) -> None:
        """Read methods, and other attributes, of the model's classes that any code names."""
        for base in {base for kind in self._kinds for base in _own_bases(kind)}:
            self._read_values(vars(base)[name] for name in self.names & vars(base).keys())


_DROP = frozenset(("torchvision.ops.stochastic_depth", "timm.layers.drop"))
"""Code that only drops at random in train mode, in the shape of its input, like nn.Dropout."""
_BATCH_NORMS = frozenset((("timm.layers.norm_act", "BatchNormAct2d.forward"),))
"""Functions that use the mode as nn.BatchNorm2d does, by module and name."""
_PLAIN = frozenset((int, float, bool, str, type(None), torch.Tensor, nn.Parameter, torch.Size,
                    torch.dtype, torch.device))  # fmt: skip
_HOLDERS = (SimpleNamespace, argparse.Namespace, functools.cached_property, functools.partialmethod,
            functools.singledispatchmethod, CACHED_FUNCTION)  # fmt: skip
"""Objects of Python's own, with functions that code may call."""
_METHODS = (FunctionType, property, staticmethod, classmethod, *_HOLDERS)
_NOT_CALLED = frozenset(
    ("__init__", "__new__", "__repr__", "__dir__", "__del__", "__deepcopy__", "__reduce__",
     "__getstate__", "__setstate__", "extra_repr", "reset_parameters", "_load_from_state_dict",
     "_save_to_state_dict", "from_float")
)  # fmt: skip
"""Methods that a forward pass does not call, unless its code names them."""
_MAX_OBJECTS = 2000
"""Most objects that are read; a model that refers to more may do anything with them."""
_SIZE_NAMES = LAYER_SIZES - {"normalized_shape"}
"""Sizes that layers store; what a norm over channels stores does not change."""
_RUN_TIME_NAMES = frozenset(
    ("vars", "__dict__", "attrgetter", "methodcaller", "__getattribute__", "eval", "exec",
     "globals", "locals", "import_module", "__import__")
)  # fmt: skip
"""With these, code may read attributes whose names do not appear in it."""
_MATCH_CLASS = dis.opmap["MATCH_CLASS"]
"""Code for `case Net(training=True)`, which lists the names of attributes as it does arguments."""


def is_dropout(module: nn.Module) -> bool:
    """Tell whether a module's forward differs in train mode only by random dropping."""
    kind = type(module)
    is_own = "forward" in vars(module)
    return not is_own and (kind.__module__ in _DROP or kind.forward in _DROPOUTS)


_DROPOUTS = frozenset(
    kind.forward
    for kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
                 nn.FeatureAlphaDropout)
)  # fmt: skip


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():  # getattr(self, "width")
            yield constant


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def _names_at_run_time(code: CodeType) -> bool:
    """Tell whether code may read an attribute by a computed name.

    >>> _names_at_run_time((lambda m: getattr(m, "width", 1)).__code__)
    False
    >>> _names_at_run_time((lambda m, i: getattr(m.parts[i + 1], "width")).__code__)
    False
    >>> _names_at_run_time((lambda m, i: getattr(m, f"width{i}")).__code__)
    True
    >>> _names_at_run_time((lambda m, i: getattr(m, "width" + str(i), "width")).__code__)
    True
    """
    if not _RUN_TIME_NAMES.isdisjoint(code.co_names) or _MATCH_CLASS in code.co_code[::2]:
        return True
    if "getattr" not in code.co_names:
        return False
    steps = _steps_of(code)
    places = [i for i, step in enumerate(steps) if step.argval == "getattr"]
    return not all(_is_called_with_constant(steps[i:]) for i in places)


def _steps_of(code: CodeType) -> list[dis.Instruction]:
    """List a code's instructions; Python 3.11 does not show the names of arguments itself."""
    return [
        step._replace(argval=code.co_consts[step.arg or 0]) if step.opname == "KW_NAMES" else step
        for step in dis.get_instructions(code)
    ]


def _is_called_with_constant(steps: Sequence[dis.Instruction]) -> bool:
    """Tell whether the loaded function is called with a constant text as second argument."""
    values, names = _arguments(steps)
    return len(values) > 1 + len(names) and values[1].opname == "LOAD_CONST"


def _uses_mode(function: FunctionType) -> bool:
    """Tell whether code that reads the mode does more with it than pass it to torch's dropout."""
    if (function.__module__, function.__qualname__) in _BATCH_NORMS:
        return False
    if not _is_trusted(F.dropout):  # replaced by the user's
        return True
    for code in _codes_in(function.__code__):
        if "training" in code.co_consts:
            return True
        steps = _steps_of(code) if "training" in code.co_names else []
        passed = {
            id(value)
            for i, step in enumerate(steps)
            if i and step.argval == "dropout" and steps[i - 1].opname == "LOAD_GLOBAL"
            if function.__globals__.get(steps[i - 1].argval) is F
            for value in _named_arguments(steps[i:], "training")
        }
        if not all(id(step) in passed for step in steps if step.argval == "training"):
            return True
    return False


def _named_arguments(steps: Sequence[dis.Instruction], name: str) -> list[dis.Instruction]:
    """Return the instruction that computes an argument, if the loaded function is given it."""
    values, names = _arguments(steps)
    given = values[len(values) - len(names) :]
    return [value for value, own in zip(given, names, strict=True) if own == name]


def _arguments(
    steps: Sequence[dis.Instruction],
) -> tuple[list[dis.Instruction], tuple[str, ...]]:
    """Find the last instruction of each argument that the function loaded first is called with.

    Also returns the names of those that are given by name, which come last. Without arguments if
    the code branches before the call, or calls in an unknown way.
    """
    pushed: list[dis.Instruction] = []
    names: tuple[str, ...] = ()
    for step in steps[1:]:
        count = step.arg or 0
        if step.opname in ("CALL", "CALL_FUNCTION") and len(pushed) == count:
            return pushed, names
        if step.opname in ("CALL_KW", "CALL_FUNCTION_KW") and len(pushed) == count + 1:
            return pushed[:-1], pushed[-1].argval
        if step.opname == "PRECALL":  # a part of CALL
            continue
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            break
        calls = step.opname == "CALL"
        names = step.argval if step.opname == "KW_NAMES" else () if calls else names
        depth = len(pushed) + (-count - 1 if calls else dis.stack_effect(step.opcode, step.arg))
        if step.opname == "KW_NAMES":
            continue
        if depth < 1:
            break
        pushed = pushed[: depth - 1]
        pushed += [step] * (depth - len(pushed))
    return [], ()


def _imports_in(function: FunctionType) -> Iterator[ModuleType | None]:
    """Yield modules that a function imports when it runs; None for those not imported yet."""
    for code in _codes_in(function.__code__):
        if _IMPORT_NAME in code.co_code[::2]:
            steps = list(dis.get_instructions(code))
            for level, wanted, step in zip(steps, steps[1:], steps[2:], strict=False):
                if step.opname == "IMPORT_NAME":
                    yield from _imported(function, step.argval, level.argval, wanted.argval)


def _imported(
    function: FunctionType, name: str, level: Any, wanted: Any
) -> Iterator[ModuleType | None]:
    """Yield what `from name import wanted` imports, with as many dots before it as the level."""
    if level == 0 and _is_known_package(name):
        return
    package = function.__globals__.get("__package__") or ""
    try:
        module = sys.modules.get(importlib.util.resolve_name("." * level + name, package))
    except (ImportError, TypeError):
        yield None
        return
    found = isinstance(module, ModuleType) and vars(module).keys() >= set(wanted or ())
    yield module if found else None
    if not wanted and "." in name:  # `import a.b` gives `a`
        yield sys.modules.get(name.partition(".")[0])


_IMPORT_NAME = dis.opmap["IMPORT_NAME"]


def _is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "fpgm"


def _own_bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if not _is_known(base)]


def _slot_values(value: Any) -> Iterator[Any]:
    for base in _own_bases(type(value)):
        for slot in vars(base).values():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # not set yet
                    yield slot.__get__(value)


def _called_by_torch(kind: type[nn.Module]) -> list[Any]:
    """List methods that torch's code or an operator may call, so that no own code names them."""
    own = {name for base in _own_bases(kind) for name in vars(base)}
    torchs = {name for base in kind.__mro__ if base not in (nn.Module, object) and _is_known(base)
              for name in vars(base)}  # fmt: skip
    called = {name for name in own if name in torchs or name.startswith("__")}
    called |= own & {"_call_impl", "_slow_forward", "_wrapped_call_impl"}
    values = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    methods = [values[name] for name in called - _NOT_CALLED if isinstance(values[name], _METHODS)]
    return [values["forward"], *methods]


def _cannot_be_read(value: Any) -> bool:
    """Tell whether calling a value may read attributes whose names are not in any code."""
    if isinstance(value, BuiltinFunctionType):
        return value is getattr or not (value.__module__ is None or _is_known(value))
    if isinstance(value, torch.jit.ScriptFunction | operator.attrgetter | operator.methodcaller):
        return True
    kind = type(value)
    if not callable(value) or _is_known(kind):
        return False
    return isinstance(kind.__call__, WrapperDescriptorType)  # of a C extension


def _have_own_mode(modules: Collection[nn.Module]) -> bool:
    """Tell whether setting the mode of modules runs code of the user."""
    kinds = {type(module) for module in modules}
    setters = {getattr(kind, name) for kind in kinds for name in ("train", "eval", "__setattr__")}
    setters |= {vars(m)[name] for m in modules for name in ("train", "eval") if name in vars(m)}
    properties = any("training" in vars(base) for kind in kinds for base in _own_bases(kind))
    return properties or not all(map(_is_trusted, setters))


def _is_torch_layer(kind: type[nn.Module]) -> bool:
    """Tell whether a class is torch's, with a forward that nobody has replaced."""
    return _is_torchs(kind) and _is_trusted(kind.forward)


def _is_trusted(function: Any) -> bool:
    """Tell whether a function is torch's or Python's own; `functools.wraps` copies `__module__`."""
    function = getattr(function, "__func__", function)
    homes = function.__module__, getattr(function, "__globals__", {}).get("__name__")
    return all(str(home).partition(".")[0] in ("torch", "math", "functools") for home in homes)


def _is_known(thing: Any) -> bool:
    """Tell whether a class or module is torch's, Python's own or NumPy's, which read no sizes."""
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", "")
    return _is_known_package(str(name))


def _is_known_package(name: str) -> bool:
    top = name.partition(".")[0]
    return top in ("torch", "numpy") or (top in sys.stdlib_module_names and top != "__main__")


def _is_torchs(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in ("torch", "builtins")
