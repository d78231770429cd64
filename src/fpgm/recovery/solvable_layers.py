"""Which layers can be solved for, in the order they run, and what becomes of their outputs.

A layer's output may go through its batch norm, be placed among a stream's channels, and be added to
the stream. Where that is all that happens, it is the sum that has to come out right: the layer then
also makes up for what the stream has lost before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from fpgm.tracing.ops.registry import tensors
from fpgm.tracing.residual import PLAIN as PLAIN_CONVOLUTIONS
from fpgm.utils.example_inputs import Example
from fpgm.utils.modules import module_at, modules_by_path

PLAIN = {nn.Linear.forward, *PLAIN_CONVOLUTIONS}
"""Layers that do what their weights say, and nothing else."""


@dataclass(frozen=True)
class Sum:
    """A sum of two activations: the how-manieth of a pass, which operand, placed where in it."""

    number: int
    operand: int
    places: tuple[int, ...] | None = None
    dim: int = 1
    """Along which they are placed."""


@dataclass(frozen=True)
class Site:
    """A layer, how often it runs, the norm that alone reads it, and the sum it goes into."""

    layer: str
    calls: int = 1
    norm: str | None = None
    sum: Sum | None = None


def is_sum(func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether an operator adds two tensors of activations' kind; of one shape is for later.

    Sums are known by their number, which must not depend on the size of a batch.
    """
    return (
        func._schema.name in ("aten::add", "aten::add_")
        and len(args) > 1
        and isinstance(args[0], Tensor)
        and isinstance(args[1], Tensor)
        and args[0].ndim > 1
        and args[1].ndim > 1
        and (kwargs or {}).get("alpha", 1) == 1
    )


@dataclass(frozen=True)
class Found:
    """A model's layers in the order they can be solved, and what else a pass shows."""

    sites: list[Site]
    sums: int
    largest: int
    """Bytes that the largest layer reads and writes."""


def find_sites(model: nn.Module, example: Example) -> Found:
    """Look at one pass of a model."""
    seen = _Follow(model)
    seen.run(example)
    return Found(seen.sites(), seen.sums, seen.largest)


def solvable(module: nn.Module) -> bool:
    """Whether a layer's weights are its own to change, and all that it computes with."""
    return (
        isinstance(module, nn.Linear | _ConvNd)
        and type(module).forward in PLAIN
        and "forward" not in vars(module)
        and not is_parametrized(module)
        and isinstance(module._parameters.get("weight"), nn.Parameter)
    )


@dataclass(frozen=True)
class _Branch:
    """What a living tensor is: a layer's output, through a norm, in these places."""

    layer: str
    norm: str | None = None
    places: tuple[int, ...] | None = None
    dim: int = 1


class _Follow(TorchDispatchMode):
    """Follows layers' outputs as far as they go unmixed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self._events: list[str | int] = []
        """Layers at their last call, and sums by their number, as they came."""
        self.sums = self.largest = 0
        self._calls: Counter[str] = Counter()
        self._branches: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._uses: Counter[_Branch] = Counter()
        self._norms: dict[str, str] = {}
        self._normed_by: Counter[str] = Counter()
        self._into: dict[str, tuple[Sum, _Branch]] = {}

    def sites(self) -> list[Site]:
        """The layers, each where all about it has been seen."""
        found = [self._site(event) for event in self._events if isinstance(event, str)]
        at_sum: dict[int, list[Site]] = {}
        for site in found:
            if site.sum is not None:
                at_sum.setdefault(site.sum.number, []).append(site)
        by_layer = {site.layer: site for site in found if site.sum is None}
        order: list[Site] = []
        for event in self._events:
            if isinstance(event, int):
                order += at_sum.get(event, [])
            elif event in by_layer:
                order.append(by_layer[event])
        return order

    def _site(self, path: str) -> Site:
        """What was found about a layer."""
        found = Site(path, self._calls[path])
        if found.calls > 1 or self._uses[_Branch(path)] != 1:
            return found
        norm = self._norms.get(path)
        if norm is not None and self._normed_by[norm] > 1:
            return found  # what is done to the norm for one layer would be done to another
        found = replace(found, norm=norm)
        if path in self._into:
            total, branch = self._into[path]
            way = {_Branch(path, norm), branch}
            if branch.norm == norm and all(self._uses[step] == 1 for step in way):
                found = replace(found, sum=total)
        return found

    def run(self, example: Example) -> None:
        """One pass."""
        shared = Counter(id(p) for m in self.model.modules() for p in m._parameters.values())
        handles = []
        for path, module in modules_by_path(self.model).items():
            if solvable(module) and shared[id(module.weight)] == 1:
                handles.append(module.register_forward_hook(self._ran(path), prepend=True))
            elif isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward:
                handles.append(module.register_forward_hook(self._normed(path), prepend=True))
        try:
            with torch.no_grad(), self:
                example.call(self.model)
        finally:
            for handle in handles:
                handle.remove()

    def _ran(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            self.largest = max(self.largest, sum(t.nbytes for t in tensors((*args, out))))
            if self._calls[path]:
                self._events.remove(path)
            self._events.append(path)
            self._calls[path] += 1
            self._branches[out] = _Branch(path)

        return hook

    def _normed(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            branch = self._branches.get(args[0]) if args else None
            tokens = branch is not None and args[0].ndim > 2 and self._linear(branch.layer)
            if branch is not None and branch == _Branch(branch.layer) and not tokens:
                self._normed_by[path] += 1
                self._norms[branch.layer] = path
                self._branches[out] = replace(branch, norm=path)

        return hook

    def _linear(self, path: str) -> bool:
        """Whether a layer's channels are its output's last dim, where no batch norm looks."""
        return isinstance(module_at(self.model, path), nn.Linear)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = list(tensors((*args, *(kwargs or {}).values())))
        branches = [self._branches.get(x) for x in inputs]
        for branch in branches:
            if branch is not None and not func._schema.name.startswith("aten::new_"):
                self._uses[branch] += 1
        is_total = is_sum(func, args, kwargs)
        out = func(*args, **(kwargs or {}))
        if is_total:
            for operand, branch in enumerate(branches[:2]):
                if branch is not None and args[0].shape == args[1].shape:
                    total = Sum(self.sums, operand, branch.places, branch.dim)
                    self._into.setdefault(branch.layer, (total, branch))
            self._events.append(self.sums)
            self.sums += 1
        elif func._schema.name in ("aten::index_copy", "aten::index_copy_"):
            branch = self._branches.get(args[3])
            if branch is not None:
                places = tuple(args[2].tolist())
                self._branches[out] = replace(branch, places=places, dim=args[1])
        return out
