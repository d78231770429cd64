"""Every Python block of the README and the documentation runs, and shows what it really prints.

Links lead somewhere: to files that exist, and to headings by the names that mkdocs gives them.
"""

from __future__ import annotations

import doctest
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page: Path) -> list[tuple[int, str]]:
    """Line number and text of each block fenced as python."""
    text = page.read_text(encoding="utf-8")
    results = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in results]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_python_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}  # a page imports what it uses
    runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
    for line, source in blocks(page):
        if ">>>" in source:
            test = doctest.DocTestParser().get_doctest(source, names, page.name, str(page), line)
            runner.run(test, clear_globs=False)
            names = test.globs
        else:
            # Padded so that a traceback shows the page's own line numbers.
            exec(compile("\n" * line + source, str(page), "exec"), names)
    assert runner.failures == 0


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_between_pages(page: Path) -> None:
    for target, anchor in links(page):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(prose(there)), f"{target}#{anchor}"


def prose(page: Path) -> str:
    """A page without its fenced blocks, whose comments look like headings."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def links(page: Path) -> list[tuple[str, str]]:
    """File and heading of each link that stays in the repository; either may be empty."""
    return re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", prose(page))


def anchors(text: str) -> set[str]:
    """What mkdocs makes of headings: words and hyphens, a number behind those that come again.

    >>> sorted(anchors("# A `b`, c: d\\n## [Über](x.md)\\n## Über\\n####### no heading"))
    ['a-b-c-d', 'uber', 'uber_1']
    """
    results: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?)[ #]*$", text, re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        plain = unicodedata.normalize("NFKD", shown).encode("ascii", "ignore").decode()
        name = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        again = sum(known == name or known.startswith(f"{name}_") for known in results)
        results.add(f"{name}_{again}" if again else name)
    return results


def test_anchors_are_those_of_the_site() -> None:
    """The library that mkdocs renders with is the judge, of all pages and of hard cases."""
    markdown = pytest.importorskip("markdown")
    for text in ("# A `b`, c: d\n## [Über](x.md)\n## Über\n## a - *b*", *map(prose, PAGES)):
        result = markdown.Markdown(extensions=["toc", "tables"])
        result.convert(text)
        assert anchors(text) == set(ids(result.toc_tokens))


def ids(tokens: list[dict[str, Any]]) -> list[str]:
    return [name for token in tokens for name in (token["id"], *ids(token["children"]))]


def test_a_wrong_anchor_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[up](#one) [on](page.md#two)\n```\n# Two\n```\n")
    assert links(page) == [("", "one"), ("page.md", "two")]
    with pytest.raises(AssertionError, match=r"page\.md#two"):
        test_links_between_pages(page)


def test_there_is_something_to_run() -> None:
    assert {page.name for page in PAGES if blocks(page)} >= {"README.md", "api.md", "paper.md"}
