"""Checkpoints that survive being killed: written aside, then moved; believed only if whole.

Each is a file of tensors and plain values, read without running any code, beside a small file with
its SHA-256. What was not finished has no such file, or does not match it, and is passed over.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch

from fpgm.errors import FileError
from fpgm.utils.atomic_io import file_sha256, sweep, write_text, write_whole
from fpgm.utils.safe_read import json_of


class Checkpoints:
    """The checkpoints of one run, newest last."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def save(self, epoch: int, state: dict[str, Any]) -> None:
        """Write the state after an epoch; older ones go only once this one is whole."""
        target = self.folder / f"epoch-{epoch:05}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _seal(target).unlink(missing_ok=True)
            data = io.BytesIO()
            torch.save(state, data)
            write_whole(target, lambda stream: stream.write(data.getbuffer()))
            seal = {"epoch": epoch, "sha256": file_sha256(target)}
            write_text(_seal(target), json.dumps(seal) + "\n")
        except OSError as error:
            advice = "Make room and start again."
            if any(_is_whole(file) for file in self.written()):
                advice = "The last one is intact: make room and start again to go on from there."
            raise FileError(
                f"The checkpoint {target} cannot be written: {error.strerror}. {advice}"
            ) from error
        for old in self.written()[: -self.keep]:
            _seal(old).unlink(missing_ok=True)
            old.unlink(missing_ok=True)

    def newest(self) -> dict[str, Any] | None:
        """The state of the newest checkpoint that is whole."""
        for file in reversed(self.written()):
            if _is_whole(file):
                try:
                    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
                except Exception as error:  # whatever a foreign file makes the reader stumble over
                    raise FileError(
                        f"{file} is no checkpoint of this version: remove it to go on from an "
                        "older one."
                    ) from error
                return state
        return None

    def written(self) -> list[Path]:
        """Checkpoint files, oldest first, whole or not."""
        return sorted(self.folder.glob("epoch-*.pt"), key=lambda file: (len(file.name), file.name))

    def sweep(self) -> None:
        """Remove what was being written when a process was killed."""
        sweep(self.folder)


def _seal(file: Path) -> Path:
    return file.with_suffix(".json")


def _is_whole(file: Path) -> bool:
    try:
        wanted = json_of(_seal(file))["sha256"]
        return bool(wanted == file_sha256(file))
    except (OSError, ValueError, KeyError, TypeError):
        return False
