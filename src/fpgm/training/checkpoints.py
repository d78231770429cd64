"""Checkpoints that survive a kill: written atomically, and used only if their digest matches.

Each is a file of tensors and plain values, read without running any code, next to a small file with
its SHA-256. An incomplete checkpoint has no such file, or does not match it, and is skipped.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch

from fpgm.errors import FileError
from fpgm.utils.atomic_io import atomic_write_stream, file_sha256, remove_leftovers, write_text
from fpgm.utils.safe_read import read_json


class Checkpoints:
    """The checkpoints of one run, newest last."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def save(self, epoch: int, state: dict[str, Any]) -> None:
        """Write the state after an epoch, then remove older checkpoints."""
        target = self.folder / f"epoch-{epoch:05}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _digest_file(target).unlink(missing_ok=True)
            data = io.BytesIO()
            torch.save(state, data)
            atomic_write_stream(target, lambda stream: stream.write(data.getbuffer()))
            seal = {"epoch": epoch, "sha256": file_sha256(target)}
            write_text(_digest_file(target), json.dumps(seal) + "\n")
        except OSError as error:
            advice = "Make room and start again."
            if any(_is_complete(file) for file in self.list_files()):
                advice = "The last one is intact: make room and start again to resume from it."
            raise FileError(
                f"The checkpoint {target} cannot be written: {error.strerror}. {advice}"
            ) from error
        for old in self.list_files()[: -self.keep]:
            _digest_file(old).unlink(missing_ok=True)
            old.unlink(missing_ok=True)

    def load_newest(self) -> dict[str, Any] | None:
        """Return the state of the newest complete checkpoint."""
        for file in reversed(self.list_files()):
            if _is_complete(file):
                try:
                    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
                except Exception as error:  # a foreign file may raise anything
                    raise FileError(
                        f"{file} is not a checkpoint of this version: remove it to use an "
                        "older one."
                    ) from error
                return state
        return None

    def list_files(self) -> list[Path]:
        """List the checkpoint files, oldest first, complete or not."""
        return sorted(self.folder.glob("epoch-*.pt"), key=lambda file: (len(file.name), file.name))

    def remove_leftovers(self) -> None:
        """Remove files that a killed process left half-written."""
        remove_leftovers(self.folder)


def _digest_file(file: Path) -> Path:
    return file.with_suffix(".json")


def _is_complete(file: Path) -> bool:
    try:
        expected = read_json(_digest_file(file))["sha256"]
        return bool(expected == file_sha256(file))
    except (OSError, ValueError, KeyError, TypeError):
        return False
