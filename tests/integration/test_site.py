"""The documentation's site: built strictly, complete, with commands that the program knows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

import fpgm
from fpgm.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(?:sh|console|bash)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """The lines of a page's blocks that call fpgm, continued ones joined."""
    results = []
    for block in FENCED.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.removeprefix("$ ").partition("  #")[0].strip()
            if command.startswith("fpgm "):
                results.append(command)
    return results


def mistaken(line: str) -> str | None:
    """What is wrong with a command's names, options and number of arguments, if anything."""
    words = [word for word in shlex.split(line)[1:] if word != "…"]
    command: Any = typer.main.get_command(app)
    context = typer.Context(command, info_name="fpgm")
    while commands := getattr(command, "commands", None):
        if (name := words.pop(0)) not in commands:
            return f"no command {name}"
        command = commands[name]
        context = typer.Context(command, info_name=name, parent=context)
    try:
        _, left, _ = command.make_parser(context).parse_args(words)
    except typer.BadParameter.__mro__[1] as error:  # of wrong use, in every version of typer
        return str(error)
    return f"too much: {left}" if left else None


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_commands_are_ones_the_program_takes(page: Path) -> None:
    assert [(line, why) for line in commands(page) if (why := mistaken(line))] == []


@pytest.mark.parametrize(
    "line", ["fpgm prun a", "fpgm prune a --rat 0.4 --uot b", "fpgm verify a b", "fpgm data mnist"]
)
def test_mistakes_are_seen(line: str) -> None:
    assert mistaken(line) is not None


def test_there_are_commands() -> None:
    assert len([line for page in PAGES for line in commands(page)]) > 30


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    listed = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith("::: ")}
    assert listed == set(fpgm.__all__) - {"__version__"}


def test_every_page_is_in_the_navigation() -> None:
    known = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if f": {page}\n" not in known} == set()
