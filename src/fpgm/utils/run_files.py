"""The folder of a run: the names of its files, what results.json holds, and safe replacement.

results.json        the request and its results; every command
small.safetensors   the compact model; prune, recover, compare, train
plan.json           the plan that made it
analysis.json       what the original's filters look like; prune
sensitivity.json    how much pruning its groups tolerate; prune --allocate
bench.json          times; bench
solved.safetensors  layers that an interrupted recovery has solved; recover
report.html         the page about all this; report
small.onnx, …       the compact model for another runtime; export
weights.safetensors the trained model, if nothing was pruned; train
recipe.json, environment.json, metrics.jsonl
                    the recipe, the machine, every epoch; train
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

from fpgm.errors import FileError
from fpgm.utils.adapter_spec import MAX_DIMS
from fpgm.utils.atomic_io import create_folder, is_unfinished, temp_dir, write_text
from fpgm.utils.replace_files import NEW, recover_interrupted_write, replace_files
from fpgm.utils.safe_read import read_json
from fpgm.utils.text import reason

FORMAT = 1
"""Version of results.json."""

SMALL, PLAN, RESULTS = "small.safetensors", "plan.json", "results.json"
ANALYSIS, SENSITIVITY, BENCH, REPORT = (
    "analysis.json", "sensitivity.json", "bench.json", "report.html",
)  # fmt: skip
EXPORTED = (
    "small.onnx", "small.int8.onnx", "small.low-rank.onnx", "small.low-rank.int8.onnx",
    "small.pt2", "small.pt",
)  # fmt: skip
"""Where `fpgm export` writes unless --out names another file."""
PRUNED = (SMALL, PLAN, RESULTS, ANALYSIS, SENSITIVITY, BENCH, REPORT, *EXPORTED)
"""All files of a folder of `fpgm prune`, which are replaced together with the model."""

SOLVED = "solved.safetensors"
"""What an interrupted `fpgm recover` continues from."""

RECIPE, ENVIRONMENT, METRICS, WEIGHTS = (
    "recipe.json", "environment.json", "metrics.jsonl", "weights.safetensors",
)  # fmt: skip
CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"
"""Folders that training writes."""

REPORTED = (RESULTS, PLAN, ANALYSIS, SENSITIVITY, BENCH, METRICS, RECIPE, ENVIRONMENT)
"""Files that a report is made from."""

_TEMP_NAME = "results"
"""Name of the temporary folder in which new files are written."""


class WeightsFile(TypedDict):
    """Trained weights that a model was built with."""

    file: str
    sha256: str


class _Required(TypedDict):
    format: int
    model: str
    weights: WeightsFile | None
    original_sha256: str
    input: list[int]


class RunResults(_Required, total=False):
    """results.json of a pruned model."""

    untrained: bool | None
    """Whether the original has random weights; null if its code may have loaded trained ones."""
    asked: dict[str, Any]
    achieved: dict[str, Any]
    certificate: dict[str, Any]
    recovery: dict[str, Any]
    small_sha256: str
    """Digest of the compact model's tensors, where they are not simply the original's."""
    accuracy: dict[str, float] | None
    test_images: int
    versions: dict[str, str]
    seconds: dict[str, float]
    command: str
    earlier: list[dict[str, Any]]
    """Options and measurements before `fpgm recover`, oldest first."""
    row: dict[str, Any]
    """Of `fpgm compare`: its row of the table."""


def read_results(folder: Path) -> RunResults:
    """Read and check the results.json of a pruned model."""
    restore_interrupted(folder)
    file = folder / RESULTS
    try:
        results = read_json(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not folder.is_dir():
            raise FileError(
                f"There is no folder {folder}: give one that fpgm prune wrote."
            ) from error
        raise FileError(f"{folder} contains no results of fpgm prune: no {RESULTS}.") from error
    except (OSError, ValueError) as error:
        raise FileError(f"{file} cannot be read: {reason(error)}.") from error
    if not isinstance(results, dict) or any(key not in results for key in _CHECKS):
        raise FileError(f"{file} was not written by fpgm prune.")
    if results.get("format") != FORMAT:
        raise FileError(f"{file} is not in format {FORMAT}: update fpgm.")
    wrong = [key for key, fits in _CHECKS.items() if not fits(results[key])]
    wrong += [key for key, kind in _KINDS.items() if not isinstance(results.get(key, kind()), kind)]
    if wrong:
        raise FileError(f"{file} was not written by fpgm prune: {wrong[0]} has the wrong type.")
    return cast(RunResults, results)


def check_out(out: Path, *, force: bool) -> None:
    """Refuse early, before anything is computed, to overwrite what is in a folder."""
    if not out.exists():
        return
    if not out.is_dir():
        raise FileError(f"{out} is a file: --out must be a folder.")
    restore_interrupted(out)
    check_replaceable(out, force=force)


def check_replaceable(out: Path, *, force: bool) -> None:
    """Refuse a folder that is not empty; with `force`, one that holds other files than ours."""
    inside = sorted(file.name for file in out.iterdir() if not is_unfinished(file.name))
    others = [name for name in inside if name not in PRUNED]
    if others and force:
        raise FileError(
            f"{out} also contains {others[0]!r}: --force replaces only results of prune."
        )
    if inside and not force:
        raise FileError(f"{out} is not empty: choose another --out, or --force to replace it.")


def restore_interrupted(folder: Path) -> None:
    """Restore old files if a process was killed while it replaced them."""
    recover_interrupted_write(folder, PRUNED)


def write_files(
    out: Path,
    texts: Mapping[str, str],
    write_model: Callable[[Path], None],
    check: Callable[[], None],
) -> None:
    """Write all files of a pruned model or none: in a temporary folder, then moved into place.

    Args:
        out: The folder; all of our files in it are replaced, others stay.
        texts: Contents by file name.
        write_model: Writes the model to the path it is given.
        check: Called when nobody else can write to a folder that exists; may refuse it.
    """
    place = Path(os.path.realpath(out))
    exists = place.exists()
    # It may be the working directory, or a mount: then only its files can be replaced.
    around = place if exists else place.parent
    try:
        with create_folder(around), temp_dir(around, _TEMP_NAME) as part:
            new = part / NEW
            new.mkdir()
            write_model(new / SMALL)
            for name, text in texts.items():
                write_text(new / name, text + "\n")
            if exists:
                replace_files(place, part, PRUNED, check)
            else:
                new.rename(place)
    except OSError as error:
        if isinstance(error, FileError) and error.__cause__ is None:
            raise
        # The error of `save` names a temporary file; its cause is what matters.
        cause = error.__cause__ if isinstance(error, FileError) else error
        raise FileError(f"{out} cannot be written: {reason(cause or error)}.") from error


def _is_shape(value: Any) -> bool:
    sizes_valid = isinstance(value, list) and all(type(n) is int and n > 0 for n in value)
    return sizes_valid and 0 < len(value) <= MAX_DIMS


def _is_weights_file(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("file", "sha256")
    )


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "model": lambda value: isinstance(value, str),
    "weights": lambda value: value is None or _is_weights_file(value),
    "original_sha256": lambda value: isinstance(value, str),
    "input": _is_shape,
}
"""Fields that commands rely on, and whether a value is of the right kind."""

_KINDS: dict[str, type] = {"asked": dict, "earlier": list}
"""Fields that may be missing, and that commands add to."""
