"""Numbers that modules remember about their channels, and that must follow when channels go.

When the code of a module fixes a size, the size is often an attribute (`split(x, self.width)`). The
attributes whose value is a channel count at that place are tried in turn, in every module of the
same class at once; what does not mend the place is taken back.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from fpgm.checker import MismatchError
from fpgm.coupling import Structure
from fpgm.draft import Remembered
from fpgm.findings import Risk


class Attributes:
    """The attributes chosen so far, and those still to be tried for each place."""

    def __init__(self, model: nn.Module, structure: Structure) -> None:
        self.model = model
        self.structure = structure
        self.chosen: list[Remembered] = []
        self._options: dict[tuple[str, int], list[list[Remembered]]] = {}
        self._trying: list[Remembered] = []
        self._reason: MismatchError | None = None

    def mend(self, mismatch: MismatchError) -> MismatchError | None:
        """Try the next attribute; returns the mismatch to blame when there is none left.

        A try that does not bring the replay further than before was wrong: it is taken back, and
        the mismatch it was meant for is looked at again.
        """
        tried = self._reason
        if tried is not None and mismatch.progress <= tried.progress:
            dropped = {id(r) for r in self._trying}
            self.chosen = [r for r in self.chosen if id(r) not in dropped]
            mismatch = tried
        self._trying, self._reason = [], None
        if mismatch.place is None:
            return mismatch
        (_, path, _), number = mismatch.place
        key = (type(self.model.get_submodule(path)).__qualname__, number)
        if key not in self._options:
            self._options[key] = self._candidates(path, number)
        if not self._options[key]:
            return mismatch
        self._trying, self._reason = self._options[key].pop(0), mismatch
        self.chosen += self._trying
        return None

    def _candidates(self, path: str, number: int) -> list[list[Remembered]]:
        """By attribute name: that attribute in every module of the same class."""
        kind = type(self.model.get_submodule(path))
        by_name: dict[str, list[Remembered]] = {}
        for (place, n), risk in self.structure.seen.risks.items():
            module = self.model.get_submodule(place[1])
            if n != number or type(module) is not kind:
                continue
            for name, rows in _holders(module, risk):
                found = by_name.setdefault(name, [])
                if all(r.module != place[1] for r in found):
                    found.append(Remembered(place[1], name, rows))
        every = [r for found in by_name.values() for r in found]
        return [*by_name.values(), *([every] if len(by_name) > 1 else [])]


def _holders(module: nn.Module, risk: Risk) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Attributes of a module that hold a size seen at a risky operator, and what it counts."""
    lengths = [len(piece) for piece in risk.pieces]
    for name, value in vars(module).items():
        if isinstance(value, list | tuple) and value and list(value) == lengths:
            yield name, risk.pieces
        elif type(value) is int:
            row = next((row for row in risk.rows() if len(row) == value), None)
            if row is not None:
                yield name, (row,)
