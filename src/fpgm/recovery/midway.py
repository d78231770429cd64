"""Places inside a network where the compact model can be told what the original has there.

A distilled network learns faster if it is not only told the answers. Good places are where a
stream branches off, since what is read there is also handed on and every layer after it builds on
it, and before the last layer. What one layer alone reads, the network may use as it likes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from fpgm.examples import Example
from fpgm.plan import Plan
from fpgm.recovery.sites import solvable
from fpgm.rules import tensors
from fpgm.tensors import modules_by_path


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
        dim = -1 if isinstance(small.get_submodule(path), nn.Linear) else 1
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

        def hook(_: nn.Module, args: Any, *, place: Place = place, keep: Any = keep) -> None:
            x = args[0]
            read[place.layer] = x if keep is None else x.index_select(place.dim, keep.to(x.device))

        handles.append(net.get_submodule(place.layer).register_forward_pre_hook(hook))
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
            module.register_forward_pre_hook(self._read(path))
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
        def hook(_: nn.Module, args: Any) -> None:
            again = path in self._tensors
            if again or not args or not isinstance(args[0], Tensor):
                self.shapes.pop(path, None)  # at several calls it is not known which is which
            else:
                self.shapes[path] = tuple(args[0].shape)
            if args and isinstance(args[0], Tensor):
                self._tensors[path] = args[0]

        return hook

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for x in tensors((*args, *(kwargs or {}).values())):
            self._uses[x] = self._uses.get(x, 0) + 1
        out = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            self._uses[args[0]] = 0  # what it was is gone; what it is has not been used yet
        return out
