"""A decoder gives exactly the annotated kinds, or says where something else stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from fpgm.utils.typed_json import Decoder, FieldTypeError


@dataclass
class Inner:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass
class Outer:
    first: Inner
    others: tuple[Inner, ...] = ()
    share: float | None = None
    kind: Literal["a", "b"] = "a"
    mixed: int | tuple[int, ...] = 0
    table: Mapping[str, float | None] = field(default_factory=dict)
    free: Mapping[str, Any] = field(default_factory=dict)


INNER = {"name": "x"}


def test_everything_at_once() -> None:
    table = {
        "first": {"name": "x", "sizes": [1, 2], "more": None},
        "others": [INNER, INNER],
        "share": 1,
        "kind": "b",
        "mixed": [3],
        "table": {"0.5": None, "1": 2},
        "free": {"a": [True]},
    }
    result = Decoder().record(Outer, table)
    wanted = Outer(
        Inner("x", (1, 2)), (Inner("x"), Inner("x")), 1.0, "b", (3,), {"0.5": None, "1": 2.0},
        {"a": [True]},
    )  # fmt: skip
    assert result == wanted
    assert type(result.share) is float


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "it has the wrong type"),
        ({}, "first is missing"),
        ({"first": {}}, "first.name is missing"),
        ({"first": {"name": 3}}, "first.name has the wrong type"),
        ({"first": {"name": "x", "sizes": [1.0]}}, "first.sizes has the wrong type"),
        ({"first": {"name": "x", "sizes": [True]}}, "first.sizes has the wrong type"),
        ({"first": INNER, "others": INNER}, "others has the wrong type"),
        ({"first": INNER, "share": "1"}, "share has the wrong type"),
        ({"first": INNER, "share": 10**400}, "share has the wrong type"),
        ({"first": INNER, "kind": ["a"]}, "kind has the wrong type"),
        ({"first": INNER, "mixed": None}, "mixed has the wrong type"),
        ({"first": INNER, "table": {"a": "b"}}, "table has the wrong type"),
    ],
)
def test_what_does_not_fit(table: Any, message: str) -> None:
    with pytest.raises(FieldTypeError) as caught:
        Decoder().record(Outer, table)
    assert str(caught.value) == message
