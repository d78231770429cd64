"""`fpgm report`: one page about a run, or several side by side."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fpgm.cli import _common as common
from fpgm.errors import FileError, RequestError
from fpgm.report.page import compare as write_comparison
from fpgm.report.page import report as write_report
from fpgm.utils.run_files import restore_interrupted


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR", help="A folder written by `fpgm prune` or `fpgm train`."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write to this file; default: report.html in the folder."
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare several folders on one page.")
    ] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve", help="Serve the page on localhost and reload it when the folder changes."
        ),
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Set the port of --serve; 0: a free one.")
    ] = 8765,
    json: common.AsJson = False,
) -> None:
    """Write one self-contained HTML page about a run: metrics, network, charts, every layer."""
    if serve and (out is not None or json):
        raise RequestError("--serve writes nothing: leave out --out and --json.")
    for folder in folders:
        restore_interrupted(folder)
    if compare:
        if serve:
            raise RequestError("--serve follows one folder: leave out --compare.")
        written = write_comparison(folders, out or Path("comparison.html"))
    elif len(folders) > 1:
        raise RequestError("To show several folders side by side, add --compare.")
    elif serve:
        _serve(folders[0], port, show)
        return
    else:
        written = write_report(folders[0], out)
    if json:
        common.show_json({"file": str(written), "bytes": written.stat().st_size})
    else:
        typer.echo(f"Written: {written} ({written.stat().st_size / 1e6:.1f} MB)")
    if show:
        _open(written.resolve().as_uri())


def _open(address: str) -> None:
    """Open a page in the browser, or say that there is none."""
    if not webbrowser.open(address):
        typer.echo(f"fpgm: No browser was found: open {address} yourself.", err=True)


def _serve(folder: Path, port: int, show: bool) -> None:
    from fpgm.report.serve import HOST, create_server

    try:
        running = create_server(folder, port)
    except FileError:  # an OSError too, which is not about the port
        raise
    except OSError as error:
        raise RequestError(
            f"Port {port} cannot be used ({error.strerror}): pass --port."
        ) from error
    address = f"http://{HOST}:{running.server_address[1]}/"
    typer.echo(f"Serving {folder} at {address}; press Ctrl-C to stop.")
    if show:
        _open(address)
    try:
        running.serve_forever()
    except KeyboardInterrupt:
        typer.echo("")
    finally:
        running.server_close()
