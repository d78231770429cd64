"""Every Python block of the README and the documentation runs, and shows what it really prints."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page: Path) -> list[tuple[int, str]]:
    """Line number and text of each block fenced as python."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


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
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target


def test_there_is_something_to_run() -> None:
    assert {page.name for page in PAGES if blocks(page)} >= {"README.md", "api.md", "paper.md"}
