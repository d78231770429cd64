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
    made = Decoder().record(Outer, table)
    wanted = Outer(
        Inner("x", (1, 2)), (Inner("x"), Inner("x")), 1.0, "b", (3,), {"0.5": None, "1": 2.0},
        {"a": [True]},
    )  # fmt: skip
    assert made == wanted
    assert type(made.share) is float


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "it is of another kind"),
        ({}, "first is missing"),
        ({"first": {}}, "first.name is missing"),
        ({"first": {"name": 3}}, "first.name is of another kind"),
        ({"first": {"name": "x", "sizes": [1.0]}}, "first.sizes is of another kind"),
        ({"first": {"name": "x", "sizes": [True]}}, "first.sizes is of another kind"),
        ({"first": INNER, "others": INNER}, "others is of another kind"),
        ({"first": INNER, "share": "1"}, "share is of another kind"),
        ({"first": INNER, "share": 10**400}, "share is of another kind"),
        ({"first": INNER, "kind": ["a"]}, "kind is of another kind"),
        ({"first": INNER, "mixed": None}, "mixed is of another kind"),
        ({"first": INNER, "table": {"a": "b"}}, "table is of another kind"),
    ],
)
def test_what_does_not_fit(table: Any, message: str) -> None:
    with pytest.raises(FieldTypeError) as caught:
        Decoder().record(Outer, table)
    assert str(caught.value) == message
