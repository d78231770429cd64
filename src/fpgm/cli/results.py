"""A folder of results: what `fpgm prune` writes and `fpgm verify` reads."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from fpgm.cli.common import to_json
from fpgm.errors import FileError
from fpgm.models.spec import load_model
from fpgm.plan import Latency, Plan
from fpgm.store import load, save
from fpgm.verify import Certificate
from fpgm.wording import reason

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
        f"Time of one run in {found.backend}, threads: {found.threads}: "
        f"{1000 * found.seconds_before:.3g} ms, then {1000 * found.seconds_after:.3g} ms: "
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
    return (
        f"{verdict}: small and silenced original differ by {certificate.max_error:.1e} (at most "
        f"{certificate.tolerance:.0e} is rounding), silenced and original by "
        f"{certificate.moved:.3g}, over {certificate.inputs} inputs in {certificate.precision}"
        f"{kind}."
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
    left = set(out.glob(".*.part"))  # by a process that was killed
    inside = sorted(file.name for file in out.iterdir() if file not in left)
    others = [name for name in inside if not _ours(name)]
    if others and force:
        raise FileError(f"{out} holds {others[0]!r} too: --force replaces only results of prune.")
    if inside and not force:
        raise FileError(f"{out} is not empty: choose another --out, or --force to replace it.")


def write(
    out: Path, small: nn.Module, made: Plan, results: dict[str, Any], beside: Mapping[str, str]
) -> None:
    """Write all files or none: they are made aside and moved into place.

    `beside` has texts by file name, besides the three that are always there.
    """
    place = Path(os.path.realpath(out))
    there = place.exists()
    part = (place if there else place.parent) / f".{place.name}.{secrets.token_hex(4)}.part"
    try:
        part.mkdir(parents=True)
        save(small, part / SMALL)
        (part / PLAN).write_text(made.to_json(indent=1) + "\n", encoding="utf-8")
        (part / RESULTS).write_text(to_json(results) + "\n", encoding="utf-8")
        for name, text in beside.items():
            (part / name).write_text(text + "\n", encoding="utf-8")
        if there:  # it may be where one stands, or a mount: only its files can be replaced
            _replace(place, part)
        else:
            part.rename(place)
    except OSError as error:
        # What `save` says names a file nobody has asked for; its cause is what matters.
        cause = error.__cause__ if isinstance(error, FileError) else None
        raise FileError(f"{out} cannot be written: {reason(cause or error)}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _replace(place: Path, part: Path) -> None:
    """Move new files in and old ones out; on failure the old ones come back."""
    names = [file.name for file in part.iterdir()]
    old = part / "old"
    old.mkdir()
    try:
        for name in _OURS:  # what was made of the old model goes with it
            if (place / name).exists():
                (place / name).rename(old / name)
        for name in names:
            (part / name).rename(place / name)
    except OSError:
        for name in _OURS:
            if (old / name).exists():
                (old / name).replace(place / name)
        raise


def small_of(folder: Path, results: dict[str, Any]) -> nn.Module:
    """The small model in a folder: its architecture is that of the model it was made from."""
    return load(folder / SMALL, lambda: load_model(results["model"]))


def read(folder: Path, allowed: Sequence[str] = ()) -> dict[str, Any]:
    """What `fpgm prune` wrote about its own run.

    If its model is made by a Python file, that file would be run: only if the user names it.
    """
    file = folder / RESULTS
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{folder} holds no results of fpgm prune: no {RESULTS}.") from error
    except ValueError as error:
        raise FileError(f"{file} cannot be read: {error}.") from error
    needed = ("model", "weights", "original_sha256", "input")
    if not isinstance(results, dict) or any(key not in results for key in needed):
        raise FileError(f"{file} was not written by fpgm prune.")
    if results.get("format") != FORMAT:
        raise FileError(f"{file} is in another format than {FORMAT}: update fpgm.")
    model, shape = results["model"], results["input"]
    sized = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    if not isinstance(model, str) or not sized:
        raise FileError(f"{file} was not written by fpgm prune.")
    if ".py:" in model and model not in allowed:
        raise FileError(
            f"{folder} was made from {model}, which is code that would be run: if you trust it, "
            f"give --model {model}."
        )
    return results
