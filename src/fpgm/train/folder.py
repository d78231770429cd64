"""The folder of one run: recipe, versions, metrics, checkpoints, and in the end the results."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fpgm._version import __version__
from fpgm.errors import FileError
from fpgm.files import write_text
from fpgm.train.checkpoints import Checkpoints
from fpgm.train.recipe import Recipe

RECIPE, ENVIRONMENT, METRICS, RESULTS = (
    "recipe.json",
    "environment.json",
    "metrics.jsonl",
    "results.json",
)
PLAN, SMALL, WEIGHTS = "plan.json", "small.safetensors", "weights.safetensors"


class RunFolder:
    """Written by the first process only."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.path, self.recipe = path, recipe
        self.checkpoints = Checkpoints(path / "checkpoints", recipe.run.keep_checkpoints)
        self._board: Any = None

    def check(self) -> None:
        """Refuse a folder that holds anything but a run of this recipe."""
        file = self.path / RECIPE
        if file.exists():
            if _digest_in(file) != self.recipe.digest():
                raise FileError(
                    f"{self.path} holds a run of another recipe: choose another folder, or give "
                    f"the recipe it was started with ({file})."
                )
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise FileError(f"{self.path} is there and is no run: choose another folder.")

    def create(self, processes: int) -> None:
        """Make the folder, once everything else is known to work."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / RECIPE).exists():
                recipe = {**asdict(self.recipe), "digest": self.recipe.digest()}
                write_text(self.path / RECIPE, _json(recipe))
            write_text(self.path / ENVIRONMENT, _json(environment(processes)))
        except OSError as error:
            raise FileError(f"{self.path} cannot be written: {error.strerror}.") from error

    def log(self, metrics: dict[str, Any]) -> None:
        """Append one epoch's figures, for machines and for TensorBoard."""
        with (self.path / METRICS).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(metrics) + "\n")
        board = self._tensorboard(metrics["epoch"])
        if board is not None:
            for name, value in metrics.items():
                if isinstance(value, int | float) and name != "epoch":
                    board.add_scalar(name, value, metrics["epoch"])
            board.flush()

    def metrics(self) -> list[dict[str, Any]]:
        """What was logged, one entry an epoch."""
        file = self.path / METRICS
        if not file.exists():
            return []
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        # The last line has no end if the process was killed while it wrote.
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def forget_after(self, epoch: int) -> None:
        """Drop the metrics of epochs that will be trained again."""
        kept = [json.dumps(m) + "\n" for m in self.metrics() if m["epoch"] <= epoch]
        write_text(self.path / METRICS, "".join(kept))

    def finish(self, results: dict[str, Any]) -> None:
        """Write the results: with them the run is done."""
        if self._board is not None:
            self._board.close()
        write_text(self.path / RESULTS, _json(results))

    def results(self) -> dict[str, Any] | None:
        """The results of a run that is done."""
        file = self.path / RESULTS
        try:
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise FileError(f"{file} cannot be read: {error}.") from error
        return found

    def _tensorboard(self, epoch: int) -> Any:
        """TensorBoard's writer where it is installed; entries of a resumed run replace older."""
        if self._board is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError:
                return None
            self._board = SummaryWriter(str(self.path / "tensorboard"), purge_step=epoch)
        return self._board


def environment(processes: int) -> dict[str, Any]:
    """Where and with what a run was made."""
    return {
        "fpgm": __version__,
        "torch": torch.__version__,
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


def _digest_in(file: Path) -> str | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(found)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
