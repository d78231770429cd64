"""The folder of one run: recipe, versions, metrics, checkpoints and finally the results."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fpgm._version import __version__
from fpgm.errors import BusyError, FileError
from fpgm.pruning.plan import Plan
from fpgm.training.checkpoints import Checkpoints
from fpgm.training.recipe import Recipe
from fpgm.utils.atomic_io import explain_write_errors, is_unfinished, remove_leftovers, write_text
from fpgm.utils.file_lock import LOCK_NAME, ProcessLock
from fpgm.utils.run_files import (
    CHECKPOINTS,
    ENVIRONMENT,
    METRICS,
    PLAN,
    RECIPE,
    RESULTS,
    SMALL,
    TENSORBOARD,
    WEIGHTS,
)
from fpgm.utils.safe_read import parse_json, read_bytes, read_json, read_text
from fpgm.utils.text import reason


class RunFolder:
    """Written by the first process only."""

    def __init__(self, path: Path, recipe: Recipe, identity: Recipe | None = None) -> None:
        self.path, self.recipe = path, recipe
        self.digest = (identity or recipe).digest()
        self.checkpoints = Checkpoints(path / CHECKPOINTS, recipe.run.keep_checkpoints)
        self._board: Any = None
        self._lock = ProcessLock(path / LOCK_NAME)

    def check(self) -> None:
        """Refuse a folder that holds anything but a run of this recipe.

        The folder of a run without checkpoints may be reused, since nothing is lost.
        """
        file = self.path / RECIPE
        try:
            names = {entry.name for entry in self.path.iterdir()}
        except FileNotFoundError:
            return
        except NotADirectoryError:
            names = {"a file"}
        except OSError as error:
            raise FileError(f"{self.path} cannot be read: {reason(error)}.") from error
        if RECIPE not in names:
            if any(name != ENVIRONMENT and not is_unfinished(name) for name in names):
                raise FileError(
                    f"{self.path} exists and is not a run folder: choose another folder."
                )
        elif _read_digest(_read_or_empty(file)) != self.digest and (
            names & {RESULTS, SMALL, WEIGHTS} or self.checkpoints.list_files()
        ):
            raise FileError(
                f"{self.path} contains a run of a different recipe "
                f"({self._describe_difference(file)}): choose another folder, or give the recipe "
                f"it was started with ({file})."
            )

    def _describe_difference(self, file: Path) -> str:
        """Describe the first setting that differs."""
        try:
            old = _flatten(read_json(file))
        except (OSError, ValueError, AttributeError):
            return "its recipe cannot be read"
        new = _flatten(json.loads(json.dumps(asdict(self.recipe))))
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and key != "digest"]
        return f"{keys[0]} was {old.get(keys[0])}, now {new.get(keys[0])}" if keys else "of old"

    def create(self, processes: int) -> None:
        """Create the folder, after everything else was checked."""
        file = self.path / RECIPE
        with explain_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if self._lock.acquire() is False:
                raise BusyError(
                    f"{self.path} is being written by another process: wait, or choose another "
                    "folder."
                )
            if _read_digest(_read_or_empty(file)) != self.digest:
                write_text(file, _to_json({**asdict(self.recipe), "digest": self.digest}))
            remove_leftovers(self.path)
            self.checkpoints.remove_leftovers()
            write_text(self.path / ENVIRONMENT, _to_json(describe_environment(processes)))

    def close(self) -> None:
        """Release the lock of the folder."""
        if self._board is not None:
            self._board.close()
            self._board = None
        self._lock.release()

    def log(self, metrics: dict[str, Any], norms: Mapping[str, Tensor]) -> None:
        """Log one epoch's metrics to the file and to TensorBoard, which also gets filter norms."""
        file = self.path / METRICS
        with explain_write_errors(file), file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(metrics) + "\n")
        with explain_write_errors(self.path / TENSORBOARD):
            board = self._tensorboard(metrics["epoch"])
            if board is not None:
                for name, value in metrics.items():
                    if isinstance(value, int | float) and name != "epoch":
                        board.add_scalar(name, value, metrics["epoch"])
                for name, values in norms.items():
                    if bool(values.isfinite().all()):  # it cannot plot other values
                        board.add_histogram(f"norms/{name}", values, metrics["epoch"])
                board.flush()

    def metrics(self) -> list[dict[str, Any]]:
        """Read the logged metrics, one entry per epoch."""
        try:
            text = read_bytes(self.path / METRICS).decode(errors="replace")
        except OSError:
            return []
        entries = []
        for line in text.splitlines():
            with suppress(ValueError):  # cut short where a process was killed
                entry = json.loads(line)
                if isinstance(entry, dict) and isinstance(entry.get("epoch"), int):
                    entries.append(entry)
        return entries

    def forget_after(self, epoch: int) -> None:
        """Drop the metrics of epochs that will be trained again."""
        kept = [json.dumps(m) + "\n" for m in self.metrics() if m["epoch"] <= epoch]
        with explain_write_errors(self.path / METRICS):
            write_text(self.path / METRICS, "".join(kept))

    def finish(self, results: dict[str, Any]) -> None:
        """Write the results, which marks the run as finished."""
        with explain_write_errors(self.path / RESULTS):
            write_text(self.path / RESULTS, _to_json(results))

    def write_plan(self, plan: Plan) -> None:
        """Write the plan."""
        with explain_write_errors(self.path / PLAN):
            write_text(self.path / PLAN, plan.to_json(indent=1) + "\n")

    def results(self) -> dict[str, Any] | None:
        """Return the results of a finished run; None if any of its files is missing."""
        try:
            results = read_json(self.path / RESULTS)
        except (OSError, ValueError):
            return None
        if not _is_result(results):
            return None
        return results if all((self.path / name).is_file() for name in results["files"]) else None

    def _tensorboard(self, epoch: int) -> Any:
        """Return TensorBoard's writer if installed; a resumed run replaces its older entries."""
        if self._board is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return None
            with suppress(UnicodeEncodeError):  # it does not support paths that are not text
                self._board = SummaryWriter(str(self.path / TENSORBOARD), purge_step=epoch)
        return self._board


def _is_result(value: Any) -> TypeGuard[dict[str, Any]]:
    """Tell whether this is what `finish` wrote: the files of a run, and numbers about them."""
    if not isinstance(value, dict) or not isinstance(value.get("files"), list):
        return False
    numbers = ["epochs", "accuracy", "parameters"]
    if "macs_after" in value:
        numbers += ["masked_accuracy", "max_error", "macs_before", "macs_after", "params_before",
                    "params_after"]  # fmt: skip
    files = value["files"]
    return (
        files[:1] in ([WEIGHTS], [SMALL])
        and files[1:] in ([], [PLAN])
        and all(type(value.get(name)) in (int, float) for name in numbers)
    )


def _flatten(table: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= (
            _flatten(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
        )
    return flat


def describe_environment(processes: int) -> dict[str, Any]:
    """Describe the machine and the versions of a run."""
    return {
        "fpgm": __version__,
        "torch": torch.__version__,
        "accelerate": version("accelerate"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "git": _git_hash(),
        "command": sys.argv,
    }


def _git_hash() -> str | None:
    """Return the commit of the working directory, marked if it has changes."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def _read_or_empty(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError):
        return ""


def _read_digest(text: str) -> str | None:
    try:
        digest = parse_json(text)["digest"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(digest)


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
