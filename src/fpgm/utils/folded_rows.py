"""Fold lines that differ in one index of a module path: `blocks.{0..11}.attn.qkv`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

Row = tuple[str, ...]

_MIN_ROWS = 3
"""Fewer like rows are not folded: two are as easy to read."""
_PATH = re.compile(r"[\w.]*[A-Za-z_][\w.]*")
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a path that is a number: 0 in blocks.0.conv1."""


def fold_rows(rows: Sequence[Row]) -> list[Row]:
    """Fold rows that are equal but for one index, wherever they are, into the first of them.

    >>> rows = [(f"{i}.{name}", "8 → 4") for i in range(3) for name in ("a", "b")]
    >>> fold_rows([("stem", "8 → 4"), *rows])
    [('stem', '8 → 4'), ('{0..2}.a', '8 → 4'), ('{0..2}.b', '8 → 4')]
    """
    patterns = [_patterns(row) for row in rows]
    alike: dict[Row, list[tuple[int, int]]] = defaultdict(list)
    for number, of_row in enumerate(patterns):
        for index, pattern in of_row:
            alike[pattern].append((number, index))
    folded: list[Row] = []
    done: set[int] = set()
    for number, row in enumerate(rows):
        if number in done:
            continue
        options = {
            pattern: [match for match in alike[pattern] if match[0] not in done]
            for _, pattern in patterns[number]
        }
        pattern = max(options, key=lambda key: len(options[key]), default=row)
        matches = options.get(pattern, [])
        if len(matches) >= _MIN_ROWS:
            done.update(match for match, _ in matches)
            indices = _format_indices(sorted(index for _, index in matches))
            row = tuple(cell.replace(_HOLE, indices) for cell in pattern)
        folded.append(row)
    return folded


_HOLE = "\0"
"""Stands for the index in a pattern; no module's name contains it."""


def _patterns(row: Row) -> list[tuple[int, Row]]:
    """Return, for each index in a row's paths, the index and the row without it.

    An index stands for a place in a path: all paths that begin alike lose it together.
    """
    places = {
        (path[0][: index.start()], index[0])
        for cell in row
        for path in _PATH.finditer(cell)
        for index in _INDEX.finditer(path[0])
    }
    return [
        (int(index), tuple(_without(cell, before, index) for cell in row))
        for before, index in sorted(places)
    ]


def _without(cell: str, before: str, index: str) -> str:
    place = re.compile(rf"(?<![\w.]){re.escape(before)}{index}(?![\w])")
    return place.sub(lambda _: f"{before}{_HOLE}", cell)


def _format_indices(indices: Sequence[int]) -> str:
    """Format sorted indices.

    >>> _format_indices([0, 1, 2]), _format_indices([0, 2, 5])
    ('{0..2}', '{0,2,5}')
    """
    first, last = indices[0], indices[-1]
    if list(indices) == list(range(first, last + 1)):
        return f"{{{first}..{last}}}"
    return f"{{{','.join(map(str, indices))}}}"
