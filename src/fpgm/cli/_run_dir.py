"""A folder of results: what `fpgm prune` writes and `fpgm verify` reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

from torch import nn

from fpgm.cli._common import to_json
from fpgm.errors import FileError
from fpgm.models.registry import load_model, names_code
from fpgm.pruning.plan import Latency, Plan
from fpgm.pruning.serialization import load, save
from fpgm.pruning.verification import Certificate
from fpgm.utils import replace_files as together
from fpgm.utils.adapter_spec import MOST_DIMS
from fpgm.utils.atomic_io import aside, is_unfinished, write_text
from fpgm.utils.atomic_io import made as made_folder
from fpgm.utils.safe_read import json_of
from fpgm.utils.text import figure, printable, reason

SMALL, PLAN, RESULTS = "small.safetensors", "plan.json", "results.json"
ANALYSIS, SENSITIVITY, BENCH, REPORT = (
    "analysis.json", "sensitivity.json", "bench.json", "report.html",
)  # fmt: skip
"""What may lie beside: all of it goes when the model is replaced."""
EXPORTED = (
    "small.onnx", "small.int8.onnx", "small.low-rank.onnx", "small.low-rank.int8.onnx",
    "small.pt2", "small.pt",
)  # fmt: skip
"""Where `fpgm export` writes if it is not told."""
FORMAT = 1
"""Version of results.json."""
_ASIDE = "results"
"""Of the folder that new files are made in, beside the old."""
_OURS = (SMALL, PLAN, RESULTS, ANALYSIS, SENSITIVITY, BENCH, REPORT, *EXPORTED)


def achieved(made: Plan) -> dict[str, Any]:
    """Costs before and after."""
    return {
        "macs_before": made.macs_before,
        "macs_after": made.macs_after,
        "macs_removed": round(made.macs_removed, 6),
        "params_before": made.params_before,
        "params_after": made.params_after,
        "params_removed": round(made.params_removed, 6),
        **({} if made.latency is None else {"latency": asdict(made.latency)}),
    }


def latency_line(found: Latency) -> str:
    """Time before and after in one sentence."""
    return (
        f"Time of one run in {printable(found.backend)}, threads: {found.threads}: "
        f"{figure(1000 * found.seconds_before)} ms, then {figure(1000 * found.seconds_after)} ms: "
        f"{found.measured:.1%} less, where {found.asked:.1%} was asked. The times of its layers "
        f"had foretold {found.predicted:.1%}."
    )


def certificate_dict(certificate: Certificate) -> dict[str, Any]:
    """A certificate with its verdict."""
    return {"ok": certificate.ok, **asdict(certificate)}


def certificate_line(certificate: Certificate) -> str:
    """A certificate in one sentence."""
    verdict = "Certified" if certificate.ok else "NOT certified"
    kind = "" if certificate.exact else " (approximate: norms over fewer channels)"
    where = f", most at {certificate.worst}" if certificate.worst and not certificate.ok else ""
    notes = "".join(f" {note}" for note in certificate.notes)
    return (
        f"{verdict}: small and masked original differ by {certificate.max_error:.1e}{where} (at "
        f"most {certificate.tolerance:.0e} is rounding), masked and original by "
        f"{certificate.moved:.3g}, over {certificate.inputs} inputs in {certificate.precision}"
        f"{kind}.{notes}"
    )


def _ours(name: str) -> bool:
    """Whether a file's name is one that prune, bench, report or export gives."""
    return name in _OURS


def check_folder(out: Path, force: bool) -> None:
    """Refuse early, before anything is computed, to overwrite what is there."""
    if not out.exists():
        return
    if not out.is_dir():
        raise FileError(f"{out} is a file: --out names a folder.")
    settle(out)
    _check_inside(out, force)


def _check_inside(out: Path, force: bool) -> None:
    inside = sorted(file.name for file in out.iterdir() if not is_unfinished(file.name))
    others = [name for name in inside if not _ours(name)]
    if others and force:
        raise FileError(f"{out} holds {others[0]!r} too: --force replaces only results of prune.")
    if inside and not force:
        raise FileError(f"{out} is not empty: choose another --out, or --force to replace it.")


def settle(folder: Path) -> None:
    """Bring old results back if a process was killed while it replaced them."""
    together.settle(folder, _OURS)


def write(
    out: Path,
    small: nn.Module,
    made: Plan,
    results: dict[str, Any],
    beside: Mapping[str, str],
    *,
    force: bool = False,
) -> None:
    """Write all files or none: they are made aside and moved into place.

    `beside` has texts by file name, besides the three that are always there. What another process
    put there meanwhile is replaced only by `force`.
    """
    place = Path(os.path.realpath(out))
    there = place.exists()
    # It may be where one stands, or a mount: then only its files can be replaced.
    around = place if there else place.parent
    texts = {PLAN: made.to_json(indent=1), RESULTS: to_json(results), **beside}
    try:
        with made_folder(around), aside(around, _ASIDE) as part:
            new = part / together.NEW
            new.mkdir()
            save(small, new / SMALL)
            for name, text in texts.items():
                write_text(new / name, text + "\n")
            if there:
                together.swap(place, part, _OURS, lambda: _check_inside(out, force))
            else:
                new.rename(place)
    except OSError as error:
        if isinstance(error, FileError) and error.__cause__ is None:
            raise
        # What `save` says names a file nobody has asked for; its cause is what matters.
        cause = error.__cause__ if isinstance(error, FileError) else error
        raise FileError(f"{out} cannot be written: {reason(cause or error)}.") from error


def small_of(folder: Path, results: dict[str, Any]) -> nn.Module:
    """The small model in a folder: its architecture is that of the model it was made from."""
    return load(folder / SMALL, lambda: load_model(results["model"]))


def read(folder: Path, allowed: Sequence[str] = ()) -> dict[str, Any]:
    """What `fpgm prune` wrote about its own run.

    If its model is made by a Python file, that file would be run: only if the user names it.
    """
    results = told_in(folder)
    if (why := untrusted(folder, results, allowed)) is not None:
        raise FileError(f"{why}.")
    return results


def told_in(folder: Path) -> dict[str, Any]:
    """The same, whether its model may be made or not."""
    settle(folder)
    file = folder / RESULTS
    try:
        results = json_of(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileError(f"{folder} holds no results of fpgm prune: no {RESULTS}.") from error
    except (OSError, ValueError) as error:
        raise FileError(f"{file} cannot be read: {reason(error)}.") from error
    if not isinstance(results, dict) or any(key not in results for key in _NEEDED):
        raise FileError(f"{file} was not written by fpgm prune.")
    if results.get("format") != FORMAT:
        raise FileError(f"{file} is in another format than {FORMAT}: update fpgm.")
    if wrong := [key for key, fits in _NEEDED.items() if not fits(results[key])]:
        raise FileError(f"{file} was not written by fpgm prune: {wrong[0]} is of another kind.")
    return results


def untrusted(folder: Path, results: dict[str, Any], allowed: Sequence[str]) -> str | None:
    """What is to be said of code that nobody has allowed to be run."""
    model: str = results["model"]
    if not names_code(model) or model in allowed:
        return None
    return (
        f"{folder} was made from {model}, which is code that would be run: if you trust it, give "
        f"--model {quote(model)}"
    )


def _is_shape(value: Any) -> bool:
    whole = isinstance(value, list) and all(type(n) is int and n > 0 for n in value)
    return whole and 0 < len(value) <= MOST_DIMS


def _is_file(value: Any) -> bool:
    """Whether this names trained weights: a file's name and its digest."""
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("file", "sha256")
    )


_NEEDED: dict[str, Callable[[Any], bool]] = {
    "model": lambda value: isinstance(value, str),
    "weights": lambda value: value is None or _is_file(value),
    "original_sha256": lambda value: isinstance(value, str),
    "input": _is_shape,
}
"""What the commands look up, and of which kind it is."""
