"""Pages taken apart, and plans to make some of."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import fpgm
from fpgm.pruning.plan import Group


class Parts(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def embedded(text: str) -> Any:
    """The data inside a page."""
    results = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL
    )
    assert results is not None
    return json.loads(results[1])


def plan_of(groups: list[tuple[str, tuple[str, ...]]]) -> fpgm.Plan:
    return fpgm.Plan("", {}, (), groups=tuple(Group(n, item, 8, 4) for n, item in groups))
