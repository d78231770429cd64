"""Feature matching: points inside a network where distillation compares compact and original model.

A student learns faster if its features are matched as well as its outputs. Good points are where a
residual stream branches off, because all later layers depend on the values there, and the last
layer. Features that only one layer reads may differ: the network can learn to use them differently.
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
from fpgm.recovery.solvable_layers import is_solvable
from fpgm.recovery.unfold import input_of
from fpgm.tracing.ops.registry import tensors
from fpgm.utils.example_inputs import Example
from fpgm.utils.hooks import temporary_hooks
from fpgm.utils.modules import module_at, modules_by_path


@dataclass(frozen=True)
class MatchingPoint:
    """The input of a layer, and which of the original's channels the compact model still has."""

    layer: str
    dim: int
    keep: Tensor | None


def find_matching_points(
    model: nn.Module, small: nn.Module, plan: Plan, example: Example
) -> list[MatchingPoint]:
    """Find layers whose inputs have the same channels in both models.

    Of those, branching points and the last layer are returned, or all if nothing branches.
    """
    reads = {cut.tensor: cut for cut in plan.cuts if cut.role == "reads"}
    original, compact = _InputUses(), _InputUses()
    original.run(model, example)
    compact.run(small, example)
    candidates: list[tuple[MatchingPoint, bool]] = []
    for path, shape in compact.shapes.items():
        cut = reads.get(f"{path}.weight")
        if path not in original.shapes or (cut is not None and cut.blocks > 1):
            continue
        dim = -1 if isinstance(module_at(small, path), nn.Linear) else 1
        expected = list(original.shapes[path])
        keep = None
        if cut is not None and expected[dim] == cut.size:
            keep = torch.tensor(cut.keep)
            expected[dim] = cut.kept
        if tuple(expected) == shape:
            candidates.append((MatchingPoint(path, dim, keep), original.count(path) > 1))
    if not any(branches for _, branches in candidates):
        return [point for point, _ in candidates]
    last = list(compact.shapes)[-1]
    return [point for point, branches in candidates if branches or point.layer == last]


@contextmanager
def record_inputs(
    net: nn.Module, points: list[MatchingPoint], kept_only: bool
) -> Iterator[dict[str, Tensor]]:
    """Record the inputs of layers in a dict by path; the caller clears it before a pass.

    Args:
        net: the model to run.
        points: layers to record.
        kept_only: record only the channels that the compact model still has.
    """
    inputs: dict[str, Tensor] = {}

    def hook_of(point: MatchingPoint) -> Any:
        keep = point.keep if kept_only else None

        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            x = input_of(args, kwargs)
            kept = x if keep is None else x.index_select(point.dim, keep.to(x.device))
            inputs[point.layer] = kept

        return hook

    with temporary_hooks() as handles:
        for point in points:
            layer = module_at(net, point.layer)
            handles.append(layer.register_forward_pre_hook(hook_of(point), with_kwargs=True))
        yield inputs


class _InputUses(TorchDispatchMode):
    """Count how many operators use the input of each layer in one forward pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._uses: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def run(self, net: nn.Module, example: Example) -> None:
        """Run one forward pass."""
        with temporary_hooks() as handles:
            handles += [
                module.register_forward_pre_hook(self._input_hook(path), with_kwargs=True)
                for path, module in modules_by_path(net).items()
                if is_solvable(module)
            ]
            with torch.no_grad(), self:
                example.call(net)

    def count(self, path: str) -> int:
        """Return how often the input of a layer was used."""
        return int(self._uses.get(self._tensors[path], 0))

    def _input_hook(self, path: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            x = input_of(args, kwargs)
            if path in self._tensors:
                self.shapes.pop(path, None)  # with several calls, it is unclear which ones match
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
        for x in tensors(tuple(_written_arguments(func._schema, args, kwargs or {}))):
            self._uses[x] = 0  # the old values are overwritten, and the new ones not used yet
        return out


def _written_arguments(
    schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[Any]:
    """Yield the arguments that an operator writes into."""
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)
