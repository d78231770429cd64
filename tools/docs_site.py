"""What the documentation's site takes from outside of docs/: benchmarks, project pages, the CLI.

mkdocs calls these functions by their names. Pages link to files of the repository as one does on
any code host; here those links are turned to where the same page is on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from fpgm.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "src/fpgm/models/assets/README.md": "assets.md",
    **{f"benchmarks/{p.name}": f"benchmarks/{p.name}" for p in ROOT.glob("benchmarks/*.md")},
}
"""Pages by where they are in the repository, and where on the site."""
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are kept elsewhere, and the one that is made from the code."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text("utf-8")))
    made = "# Command line, every option\n\n" + command_line()
    files.append(File.generated(config, "reference/command-line.md", content=made))
    for picture in sorted(ROOT.glob("benchmarks/*.svg")):
        target = f"benchmarks/{picture.name}"
        files.append(File.generated(config, target, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: Any) -> str:
    """Turn links between files of the repository to links between pages; code has no page."""
    here = page.file.src_uri
    source = next((own for own, target in PAGES.items() if target == here), f"docs/{here}")

    def turned(found: re.Match[str]) -> str:
        text, link, anchor = found[1], found[2], found[3] or ""
        target = moved(link, source)
        if files.get_file_from_path(target) is None and (ROOT / _there(link, source)).exists():
            return text
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(turned, markdown)


def moved(link: str, source: str) -> str:
    """Where on the site the file is that a file of the repository links to.

    >>> moved("../../benchmarks/zoo.md", "docs/guides/timm.md")
    'benchmarks/zoo.md'
    >>> moved("docs/paper.md", "CHANGELOG.md")
    'paper.md'
    """
    target = _there(link, source)
    return PAGES.get(target, target.removeprefix("docs/"))


def _there(link: str, source: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def command_line() -> str:
    """Every command with its arguments and options, as Typer knows them."""
    root = typer.main.get_command(app)
    context = typer.Context(root, info_name="fpgm")
    return "\n".join(_command(root, context))


def _command(command: Any, context: typer.Context) -> list[str]:
    parts: list[str] = []
    if context.parent is not None:
        parts += [f"## {context.command_path}", "", command.help or "", ""]
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        parts += ["```", usage, "```", ""]
    rows = [record for p in command.params if (record := p.get_help_record(context)) is not None]
    if rows and context.parent is not None:
        parts += ["| option | meaning |", "| --- | --- |"]
        parts += [f"| `{_cell(name)}` | {_cell(text)} |" for name, text in rows]
        parts += [""]
    for name, own in getattr(command, "commands", {}).items():
        parts += _command(own, typer.Context(own, parent=context, info_name=name))
    return parts


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
