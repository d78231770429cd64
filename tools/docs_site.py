"""Add pages from outside docs/ to the site: benchmarks, project pages, the command line.

mkdocs calls these functions by name. Pages link to files of the repository, as on any code host;
these links are replaced by links to the same page on the site.
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
    """Add the pages from other folders, and the generated page of commands."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text("utf-8")))
    page_text = "# Command line, every option\n\n" + command_line()
    files.append(File.generated(config, "reference/command-line.md", content=page_text))
    for image in sorted(ROOT.glob("benchmarks/*.svg")):
        target = f"benchmarks/{image.name}"
        files.append(File.generated(config, target, abs_src_path=str(image)))
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: Any) -> str:
    """Replace links between files by links between pages; links to code become plain text."""
    here = page.file.src_uri
    source = next((item for item, target in PAGES.items() if target == here), f"docs/{here}")

    def turn_link(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        target = moved(link, source)
        if files.get_file_from_path(target) is None and (ROOT / _there(link, source)).exists():
            return text
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(turn_link, markdown)


def moved(link: str, source: str) -> str:
    """Return the path on the site of a file that another file links to.

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
    """Describe every command with its arguments and options, as Typer has them."""
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
    for name, item in getattr(command, "commands", {}).items():
        parts += _command(item, typer.Context(item, parent=context, info_name=name))
    return parts


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
