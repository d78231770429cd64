"""Options of recovery, the same for `fpgm prune` and `fpgm recover`."""

from __future__ import annotations

import math
from typing import Annotated, Any, cast, get_args

import typer

from fpgm.errors import RequestError
from fpgm.recovery.api import Method
from fpgm.workflow.pipeline import RecoveryOptions

METHODS_HELP = (
    "solve: least squares on --data; norms: re-estimate batch norms only; weights: without data."
)

Distil = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Distill from the original's outputs for this long."),
]


def read_method(option: str, text: str | None) -> Method | None:
    """Read the name of a method of recovery."""
    if text is None or text in get_args(Method):
        return cast(Method | None, text)
    raise RequestError(f"{option} is {text!r}: give one of {', '.join(get_args(Method))}.")


def check_distil(distil: float) -> None:
    """Reject a value that is not a number of seconds."""
    if not 0 <= distil < math.inf:
        raise RequestError(f"--distil is {distil}: give a number of seconds, 0 or more.")


def check_images(images: int) -> None:
    """Refuse a number of images below 1."""
    if images < 1:
        raise RequestError(f"--images is {images}: give an integer of at least 1.")


def check_data(data: str | None, option: str, *, needed: bool) -> None:
    """Refuse an option that needs images if --data is not given."""
    if needed and data is None:
        raise RequestError(f"{option} needs images: pass --data.")


def recovery_request(
    options: RecoveryOptions | None, data: str | None, images: int, test: int
) -> dict[str, Any]:
    """Return the data options as results.json stores them."""
    return {
        "recover": None if options is None else options.method,
        "data": data,
        "images": None if options is None else images,
        "test": None if data is None else test,
        "distil": None if options is None else options.distil or None,
    }
