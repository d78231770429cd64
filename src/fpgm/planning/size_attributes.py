"""Find numbers in modules that must change together with their channels.

When the code of a module fixes a size, the size is often an attribute (`split(x, self.width)`). The
attributes whose value is a channel count at that operator are tried in turn, in every module of the
same class at once. A change that does not fix the mismatch, or makes outputs differ
(`self.dim ** -0.5`), is undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from fpgm.planning.dry_run_tracer import MismatchError
from fpgm.planning.plan_builder import RememberedSize, build_plan
from fpgm.planning.remembered_sizes import Widths, follow_sizes
from fpgm.planning.selection import Choice
from fpgm.pruning.plan import Attribute, Plan
from fpgm.pruning.plan_checks import holds_size
from fpgm.tracing.grouping import Structure
from fpgm.tracing.trace_values import FixedSizeOp
from fpgm.utils.modules import module_at, modules_by_path
from fpgm.utils.size_names import LAYER_SIZES


class SizeAttributes:
    """The attributes chosen so far, and those still to be tried for each mismatch."""

    def __init__(self, model: nn.Module, structure: Structure) -> None:
        self.model = model
        self.structure = structure
        self.chosen: list[RememberedSize] = []
        self.protected: set[tuple[str, str]] = set()
        """Attributes that a plan must not change, by module and name."""
        self.doubtful: list[Attribute] = []
        """Attributes of the latest plan that may mean something else as well."""
        self._options: dict[tuple[str, int], list[list[RememberedSize]]] = {}
        self._trying: list[RememberedSize] = []
        self._reason: MismatchError | None = None
        self._accepted: list[tuple[list[RememberedSize], MismatchError]] = []

    @cached_property
    def widths(self) -> Widths:
        """Return the widths of the model's modules."""
        return Widths(self.structure)

    def build_plan(self, choice: Choice, requested: Mapping[str, Any]) -> Plan:
        """Build the plan of a choice, with the attributes chosen so far."""
        plan = build_plan(
            self.model, self.structure, choice, requested, self.chosen, self.protected, self.widths
        )
        kinds = {path: type(module) for path, module in modules_by_path(self.model).items()}
        self.doubtful = [a for a in plan.attributes if self._is_doubtful(a, kinds[a.module])]
        return plan

    def _is_doubtful(self, attribute: Attribute, kind: type[nn.Module]) -> bool:
        """Tell whether user code may read an attribute that is not one of torch's own."""
        if attribute.name in LAYER_SIZES and any(
            base.__module__.startswith("torch.nn.") and base is not nn.Module
            for base in kind.__mro__
        ):
            return False
        return self.structure.trace.code.may_read(attribute.name)

    def readable_attributes(self, plan: Plan, removed: Tensor) -> list[list[Attribute]]:
        """List attributes that could be updated but may be read: all together, then by class."""
        if not plan.stale:
            return []
        known = {(a.module, a.name) for a in plan.attributes}
        kept = self.structure.kept_labels(removed)
        followed, _ = follow_sizes(self.model, self.widths, kept, known)
        by_name: dict[tuple[type, str], list[Attribute]] = {}
        for a in followed:
            if (a.module, a.name) not in self.protected:
                kind = type(module_at(self.model, a.module))
                by_name.setdefault((kind, a.name), []).append(a)
        apart = list(by_name.values())
        return [[a for some in apart for a in some], *apart] if len(apart) > 1 else apart

    def fix_mismatch(self, mismatch: MismatchError) -> MismatchError | None:
        """Try the next attribute; return the mismatch when there is none left to try.

        A change that does not get the dry run further is undone, and the mismatch it was meant to
        fix is handled again. The latest change is also undone when outputs differ.
        """
        if self._reason is None and mismatch.wrong_outputs and self._accepted:
            self._trying, self._reason = self._accepted.pop()
        tried = self._reason
        if tried is None and mismatch.wrong_outputs:
            self._protect_first()
            return None
        if tried is not None and mismatch.progress <= tried.progress:
            dropped = {id(r) for r in self._trying}
            self.chosen = [r for r in self.chosen if id(r) not in dropped]
            mismatch = tried
        elif tried is not None:
            self._accepted.append((self._trying, tried))
        self._trying, self._reason = [], None
        if mismatch.place is None:
            return mismatch
        (_, path, _), number = mismatch.place
        key = (type(module_at(self.model, path)).__qualname__, number)
        if key not in self._options:
            self._options[key] = self._candidates(path, number)
        if not self._options[key]:
            return mismatch
        self._trying, self._reason = self._options[key].pop(0), mismatch
        self.chosen += self._trying
        return None

    def _protect_first(self) -> None:
        """Undo changes suggested by layers' own weights, one attribute of one class at a time."""
        first = self.doubtful[0]
        kind = type(module_at(self.model, first.module))
        self.protected |= {
            (a.module, a.name)
            for a in self.doubtful
            if a.name == first.name and type(module_at(self.model, a.module)) is kind
        }

    def _candidates(self, path: str, number: int) -> list[list[RememberedSize]]:
        """List candidates by attribute name: that attribute in every module of the same class."""
        kind = type(module_at(self.model, path))
        by_name: dict[str, list[RememberedSize]] = {}
        for (place, n), op in self.structure.trace.fixed_size_ops.items():
            module = module_at(self.model, place[1])
            if n != number or type(module) is not kind:
                continue
            for name, rows in _holders(module, op):
                same_name = by_name.setdefault(name, [])
                if all(r.module != place[1] for r in same_name):
                    same_name.append(RememberedSize(place[1], name, rows))
        every = [r for same_name in by_name.values() for r in same_name]
        return [*by_name.values(), *([every] if len(by_name) > 1 else [])]


def _holders(module: nn.Module, op: FixedSizeOp) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Yield attributes of a module that hold a size of a fixed-size operator, and its rows."""
    lengths = [len(piece) for piece in op.pieces]
    for name, value in vars(module).items():
        if not holds_size(module, name):
            continue
        if isinstance(value, list | tuple) and value and list(value) == lengths:
            yield name, op.pieces
        elif type(value) is int:
            row = next((row for row in op.rows() if len(row) == value), None)
            if row is not None:
                yield name, (row,)
