"""The paper's residual policy: every convolution is pruned separately, streams keep their width.

A first pass finds where branches are added into a stream and which module outputs each branch; a
second pass cuts the labels there. In the compact model that module scatters its channels among
zeros, and a convolution that reads such a scattered tensor directly gathers the channels back, as
in the first block after the stem in the paper. Projection shortcuts are not pruned, as in the
paper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from fpgm.tracing import labels as lb
from fpgm.tracing.ops import registry as rules
from fpgm.tracing.recorder import TraceRecorder, record_eval_passes
from fpgm.tracing.trace_values import InsertionPoint
from fpgm.utils.channel_adapters import adapters_of
from fpgm.utils.example_inputs import Example
from fpgm.utils.modules import module_at
from fpgm.utils.preserve_state import preserve_state

Residual = Literal["coupled", "independent"]
"""Whether layers that produce a residual stream are pruned together or independently."""


@dataclass(frozen=True)
class Junctions:
    """Modules that output a branch, those of projection shortcuts, and those that run once."""

    branches: frozenset[str]
    projections: frozenset[str]
    once: frozenset[str]


def find_junctions(model: nn.Module, examples: Sequence[Example], values: bool = True) -> Junctions:
    """Trace once and find which modules' outputs are added to which."""
    finder = _BranchFinder(model, values)
    with preserve_state(model):
        record_eval_passes(finder, examples)
    return finder.junctions()


class _BranchFinder(TraceRecorder):
    """Records the origin of every activation and how many convolutions precede it."""

    def __init__(self, model: nn.Module, values: bool = True) -> None:
        super().__init__(model, values)
        self._origins: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._depth: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._read: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._times: Counter[str] = Counter()
        self._sums: list[list[tuple[tuple[str, ...], int, bool]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = rules.name_of(func).removesuffix("_")
        inputs = [x for x in rules.tensors(args) if not self.is_constant(x)]
        depth = max((self._depth.get(x, 0) for x in inputs), default=0)
        is_sum = name == "add" and len(inputs) == 2
        contracts = name in ("convolution", "addmm", "mm")
        if contracts and inputs:
            self._read[inputs[0]] = True
        for result in rules.tensors((out,)):
            self._depth[result] = 0 if is_sum else depth + contracts
        return out

    def note_passed(self, x: Tensor, out: Tensor) -> None:
        if out is not x:
            self._origins[out] = self._origins.get(x, ())

    def on_module_return(self, path: str, out: Any) -> None:
        super().on_module_return(path, out)
        self._times[path] += 1
        if isinstance(out, Tensor) and self.is_zero(out):
            self._origins[out] = (*self._origins.get(out, ()), path)

    def at_sum(self, operands: list[Tensor]) -> list[Tensor]:
        if not any(self.is_constant(x) or not self.fields(x) for x in operands):
            self._sums.append(
                [
                    (self._origins.get(x, ()), self._depth.get(x, 0), self._read.get(x, False))
                    for x in operands
                ]
            )
        return operands

    def junctions(self) -> Junctions:
        """Decide which modules output a branch."""
        branches: set[str] = set()
        projections: set[str] = set()
        for operands in self._sums:
            fresh = [(self._branch_end(o), depth, read) for o, depth, read in operands if depth > 0]
            ends = [(path, depth, read) for path, depth, read in fresh if path is not None]
            if len(ends) == 2 and not ends[0][2] and not ends[1][2]:
                shallow = min(ends, key=lambda item: item[1])
                if ends[0][1] != ends[1][1]:
                    projections.add(shallow[0])
                    ends.remove(shallow)
            branches.update(path for path, _, _ in ends)
        once = frozenset(path for path, times in self._times.items() if times == len(self.passes))
        return Junctions(frozenset(branches - projections), frozenset(projections), once)

    def _branch_end(self, origins: tuple[str, ...]) -> str | None:
        """Return the last module that output a branch, if it ran only once."""
        runs = len(self.passes)
        return next((p for p in reversed(origins) if p and self._times[p] == runs), None)


PLAIN = {
    kind.forward
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
                 nn.ConvTranspose3d)
}  # fmt: skip
"""Convolutions that do nothing else with their input, so that a gather before them is harmless."""


class IndependentTraceRecorder(TraceRecorder):
    """Records with the labels cut where a branch enters a stream."""

    def __init__(self, model: nn.Module, junctions: Junctions, values: bool = True) -> None:
        super().__init__(model, values)
        self.junctions = junctions
        self._scattered: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
        self._reads: dict[str, Tensor | None] = {}
        """The branch each convolution read first; None: a tensor of full width."""

    def on_module_return(self, path: str, out: Any) -> Any:
        result = None
        if isinstance(out, Tensor) and path in self.junctions.projections:
            with _disable_current_modes():
                self.freeze(self.fields(out), "projection shortcuts are not pruned")
        elif isinstance(out, Tensor) and path in self.junctions.branches:
            with _disable_current_modes():
                result = self._cut(path, out)
        super().on_module_return(path, out if result is None else result)
        return result

    def _cut(self, path: str, out: Tensor) -> Tensor | None:
        fields = self.fields(out)
        if any(a.side == "output" for _, a in adapters_of(self.model.get_submodule(path), path)):
            return None  # an earlier plan has cut the labels here
        if len(fields) != 1 or len(lb.axes(fields[0])) != 1:
            return None
        dim = lb.axes(fields[0])[0]
        branch = fields[0].reshape(-1)
        stream = self.new_labels(branch.numel())
        self.freeze([stream], "the residual stream keeps its full width")
        for point in self.insertion_points:
            if point.module == path and not torch.equal(point.labels, branch):
                self.freeze(
                    [point.labels, branch], "the order of the branches differs between runs"
                )
        self.insertion_points.append(InsertionPoint(path, dim, branch))
        out_alias: Tensor = torch.ops.aten.alias(out)
        self.set(out_alias, [lb.along(stream, out.ndim, dim)])
        self._scattered[out_alias] = branch
        return out_alias

    def note_overwritten(self, x: Tensor) -> None:
        super().note_overwritten(x)
        self._scattered.pop(x, None)

    def note_passed(self, x: Tensor, out: Tensor) -> None:
        super().note_passed(x, out)
        if x in self._scattered and out is not x and x.shape[1:2] == out.shape[1:2]:
            self._scattered[out] = self._scattered[x]

    def labels_read(self, x: Tensor, weight: Tensor, row: Tensor | None) -> Tensor | None:
        """Return the branch's labels for a convolution after a scatter, which gets a gather.

        If it runs several times, it reads other tensors too, for which a gather would be wrong.
        """
        module = module_at(self.model, self.module)
        if type(module).forward not in PLAIN or row is None:
            return row
        once = self.module in self.junctions.once
        branch: Tensor | None = self._scattered.get(x) if once else None
        before = self._reads.setdefault(self.module, branch)
        if not _same_labels(before, branch):
            stays = [row, *(b for b in (before, branch) if b is not None)]
            self.freeze(stays, "a convolution reads them in some runs only")
        if branch is None:
            return row
        self.picks.append(InsertionPoint(self.module, 1, branch))
        return branch


def _same_labels(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def make_recorder(
    model: nn.Module, examples: Sequence[Example], residual: Residual, values: bool = True
) -> TraceRecorder:
    """Create the recorder for a residual policy."""
    if residual == "coupled":
        return TraceRecorder(model, values)
    return IndependentTraceRecorder(model, find_junctions(model, examples, values), values)
