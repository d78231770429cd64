"""The folder of one run: recipe, versions, metrics, checkpoints, and in the end the results."""

from __future__ import annotations

import json
import os
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
from fpgm.utils.atomic_io import is_unfinished, locked, sweep, write_text, writing
from fpgm.utils.safe_read import bytes_of, json_of, parsed, text_of
from fpgm.utils.text import reason

RECIPE, ENVIRONMENT, METRICS, RESULTS = (
    "recipe.json",
    "environment.json",
    "metrics.jsonl",
    "results.json",
)
PLAN, SMALL, WEIGHTS = "plan.json", "small.safetensors", "weights.safetensors"


class RunFolder:
    """Written by the first process only."""

    def __init__(self, path: Path, recipe: Recipe, identity: Recipe | None = None) -> None:
        self.path, self.recipe = path, recipe
        self.digest = (identity or recipe).digest()
        self.checkpoints = Checkpoints(path / "checkpoints", recipe.run.keep_checkpoints)
        self._board: Any = None
        self._lock: int | None = None

    def check(self) -> None:
        """Refuse a folder that holds anything but a run of this recipe.

        A run that came to no checkpoint has nothing to lose: its folder may be used again.
        """
        file = self.path / RECIPE
        try:
            there = {entry.name for entry in self.path.iterdir()}
        except FileNotFoundError:
            return
        except NotADirectoryError:
            there = {"a file"}
        except OSError as error:
            raise FileError(f"{self.path} cannot be read: {reason(error)}.") from error
        if RECIPE not in there:
            if any(name != ENVIRONMENT and not is_unfinished(name) for name in there):
                raise FileError(f"{self.path} is there and is no run: choose another folder.")
        elif _digest_in(_text(file)) != self.digest and (
            there & {RESULTS, SMALL, WEIGHTS} or self.checkpoints.written()
        ):
            raise FileError(
                f"{self.path} holds a run of another recipe ({self._other(file)}): choose another "
                f"folder, or give the recipe it was started with ({file})."
            )

    def _other(self, file: Path) -> str:
        """The first setting that differs, and how."""
        try:
            old = _flat(json_of(file))
        except (OSError, ValueError, AttributeError):
            return "its own cannot be read"
        new = _flat(json.loads(json.dumps(asdict(self.recipe))))
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and key != "digest"]
        return f"{keys[0]} was {old.get(keys[0])}, is {new.get(keys[0])}" if keys else "of old"

    def create(self, processes: int) -> None:
        """Make the folder, once everything else is known to work."""
        file = self.path / RECIPE
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
            if not locked(self._lock):
                raise BusyError(
                    f"{self.path} is being written by another process: wait, or choose another "
                    "folder."
                )
            # By way of the lock: to close any other handle of the file would give it away.
            with open(self._lock, "r+", encoding="utf-8", closefd=False) as stream:
                if _digest_in(stream.read()) != self.digest:
                    stream.seek(0)
                    stream.truncate()
                    stream.write(_json({**asdict(self.recipe), "digest": self.digest}))
            os.fsync(self._lock)
            sweep(self.path)
            self.checkpoints.sweep()
            write_text(self.path / ENVIRONMENT, _json(environment(processes)))

    def close(self) -> None:
        """Let others in again."""
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def log(self, metrics: dict[str, Any], norms: Mapping[str, Tensor]) -> None:
        """Append one epoch's figures, for machines and for TensorBoard, which also gets norms."""
        file = self.path / METRICS
        with writing(file), file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(metrics) + "\n")
        with writing(self.path / "tensorboard"):
            board = self._tensorboard(metrics["epoch"])
            if board is not None:
                for name, value in metrics.items():
                    if isinstance(value, int | float) and name != "epoch":
                        board.add_scalar(name, value, metrics["epoch"])
                for name, values in norms.items():
                    if bool(values.isfinite().all()):  # of others it can draw nothing
                        board.add_histogram(f"norms/{name}", values, metrics["epoch"])
                board.flush()

    def metrics(self) -> list[dict[str, Any]]:
        """What was logged, one entry an epoch."""
        try:
            text = bytes_of(self.path / METRICS).decode(errors="replace")
        except OSError:
            return []
        found = []
        for line in text.splitlines():
            with suppress(ValueError):  # cut short where a process was killed
                entry = json.loads(line)
                if isinstance(entry, dict) and isinstance(entry.get("epoch"), int):
                    found.append(entry)
        return found

    def forget_after(self, epoch: int) -> None:
        """Drop the metrics of epochs that will be trained again."""
        kept = [json.dumps(m) + "\n" for m in self.metrics() if m["epoch"] <= epoch]
        with writing(self.path / METRICS):
            write_text(self.path / METRICS, "".join(kept))

    def finish(self, results: dict[str, Any]) -> None:
        """Write the results: with them the run is done."""
        with writing(self.path / RESULTS):
            write_text(self.path / RESULTS, _json(results))

    def write_plan(self, plan: Plan) -> None:
        """Write what went."""
        with writing(self.path / PLAN):
            write_text(self.path / PLAN, plan.to_json(indent=1) + "\n")

    def results(self) -> dict[str, Any] | None:
        """The results of a run that is done; None if any of its files is gone."""
        try:
            found = json_of(self.path / RESULTS)
        except (OSError, ValueError):
            return None
        if not _is_result(found):
            return None
        return found if all((self.path / name).is_file() for name in found["files"]) else None

    def _tensorboard(self, epoch: int) -> Any:
        """TensorBoard's writer where it is installed; entries of a resumed run replace older."""
        if self._board is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return None
            with suppress(UnicodeEncodeError):  # it knows no path that is not text
                self._board = SummaryWriter(str(self.path / "tensorboard"), purge_step=epoch)
        return self._board


def _is_result(found: Any) -> TypeGuard[dict[str, Any]]:
    """Whether this is what `finish` wrote: the files of a run, and numbers about them."""
    if not isinstance(found, dict) or not isinstance(found.get("files"), list):
        return False
    numbers = ["epochs", "accuracy", "parameters"]
    if "macs_after" in found:
        numbers += ["masked_accuracy", "max_error", "macs_before", "macs_after", "params_before",
                    "params_after"]  # fmt: skip
    files = found["files"]
    return (
        files[:1] in ([WEIGHTS], [SMALL])
        and files[1:] in ([], [PLAN])
        and all(type(found.get(name)) in (int, float) for name in numbers)
    )


def _flat(table: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return found


def environment(processes: int) -> dict[str, Any]:
    """Where and with what a run was made."""
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
    """The commit of the code one stands in, with a mark if it was changed since."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _text(file: Path) -> str:
    try:
        return text_of(file)
    except (OSError, UnicodeDecodeError):
        return ""


def _digest_in(text: str) -> str | None:
    try:
        found = parsed(text)["digest"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(found)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
