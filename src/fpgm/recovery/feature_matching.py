"""Places inside a network where the compact model can be told what the original has there.

A distilled network learns faster if it is not only told the answers. Good places are where a
stream branches off, since what is read there is also handed on and every layer after it builds on
it, and before the last layer. What one layer alone reads, the network may use as it likes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from fpgm.pruning.plan import Plan
from fpgm.recovery import unfold as rows
from fpgm.recovery.solvable_layers import solvable
from fpgm.tracing.ops.registry import tensors
from fpgm.utils.example_inputs import Example
from fpgm.utils.modules import module_at, modules_by_path


@dataclass(frozen=True)
class Place:
    """What a layer reads, and which of the original's channels the compact model still has."""

    layer: str
    dim: int
    keep: Tensor | None


def find_places(model: nn.Module, small: nn.Module, plan: Plan, example: Example) -> list[Place]:
    """Where both models read the same channels: branchings and the last layer, or every layer."""
    reads = {cut.tensor: cut for cut in plan.cuts if cut.role == "reads"}
    theirs, mine = _Uses(), _Uses()
    theirs.run(model, example)
    mine.run(small, example)
    found: list[tuple[Place, bool]] = []
    for path, shape in mine.shapes.items():
        cut = reads.get(f"{path}.weight")
        if path not in theirs.shapes or (cut is not None and cut.blocks > 1):
            continue
        dim = -1 if isinstance(module_at(small, path), nn.Linear) else 1
        wanted = list(theirs.shapes[path])
        keep = None
        if cut is not None and wanted[dim] == cut.size:
            keep = torch.tensor(cut.keep)
            wanted[dim] = cut.kept
        if tuple(wanted) == shape:
            found.append((Place(path, dim, keep), theirs.count(path) > 1))
    if not any(branches for _, branches in found):
        return [place for place, _ in found]
    last = list(mine.shapes)[-1]
    return [place for place, branches in found if branches or place.layer == last]


@contextmanager
def reading(net: nn.Module, places: list[Place], cut: bool) -> Iterator[dict[str, Tensor]]:
    """What was read at the places, by layer: clear it before a pass. The kept part if `cut`."""
    read: dict[str, Tensor] = {}
    handles = []
    for place in places:
        keep = place.keep if cut else None

        def hook(
            _: nn.Module, args: Any, kwargs: Any, *, place: Place = place, keep: Any = keep
        ) -> None:
            x = rows.read(args, kwargs)
            read[place.layer] = x if keep is None else x.index_select(place.dim, keep.to(x.device))

        layer = module_at(net, place.layer)
        handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield read
    finally:
        for handle in handles:
            handle.remove()


class _Uses(TorchDispatchMode):
    """How often what a layer reads is used, by whomever."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._uses: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def run(self, net: nn.Module, example: Example) -> None:
        """One pass."""
        handles = [
            module.register_forward_pre_hook(self._read(path), with_kwargs=True)
            for path, module in modules_by_path(net).items()
            if solvable(module)
        ]
        try:
            with torch.no_grad(), self:
                example.call(net)
        finally:
            for handle in handles:
                handle.remove()

    def count(self, path: str) -> int:
        """Uses of what a layer read."""
        return int(self._uses.get(self._tensors[path], 0))

    def _read(self, path: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            x = rows.read(args, kwargs)
            if path in self._tensors:
                self.shapes.pop(path, None)  # at several calls it is not known which is which
            else:
                self.shapes[path] = tuple(x.shape)
            self._tensors[path] = x

        return hook

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for x in tensors((*args, *(kwargs or {}).values())):
            self._uses[x] = self._uses.get(x, 0) + 1
        out = func(*args, **(kwargs or {}))
        for x in tensors(tuple(_written(func._schema, args, kwargs or {}))):
            self._uses[x] = 0  # what it was is gone; what it is has not been used yet
        return out


def _written(schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Arguments that an operator writes into."""
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)
