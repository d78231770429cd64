"""Reading trained weights from a file, without ever running code from it.

safetensors files and tensor-only torch checkpoints are read; any other pickle is refused. The file
is compared with the model before anything is copied, so a mismatch leaves the model as it was.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fpgm.errors import FileError

M = TypeVar("M", bound=nn.Module)

WRAPPERS = ("state_dict", "model")
"""Keys under which training scripts keep the weights beside epoch and optimizer."""


def load_weights(model: M, file: str | Path) -> M:
    """Copy a checkpoint's tensors into the model, all of them or none, and return the model."""
    state = read_weights(file)
    if problem := _mismatch(model.state_dict(), state):
        raise FileError(f"{file} does not fit {type(model).__name__}: {problem}.")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = _one_line(error)
        raise FileError(f"{file} does not fit {type(model).__name__}: {reason}") from error
    return model


def read_weights(file: str | Path) -> dict[str, Tensor]:
    """Read a state dict by name, with wrappers and a `module.` prefix taken off."""
    path = Path(file)
    if not path.exists():
        raise FileError(f"{file} does not exist.")
    if path.is_dir():
        raise FileError(f"{file} is a folder: name the weights file in it.")
    try:
        with path.open("rb") as stream:
            head = stream.read(9)
    except OSError as error:
        raise FileError(f"{file} cannot be read: {error.strerror}.") from error
    if not head:
        raise FileError(f"{file} is empty.")
    # By content, not by suffix: checkpoints come as .pt, .pth, .th, .bin, .tar and more.
    if head.startswith((b"PK\x03\x04", b"\x80")):
        return _state_of(_read_torch(path), file)
    if head[8:9] == b"{":
        return _state_of(_read_safetensors(path), file)
    raise FileError(f"{file} is neither a safetensors file nor a torch checkpoint.")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise FileError(
            f"{path} is truncated or damaged ({_one_line(error)}): fetch it again."
        ) from error


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            # torch warns about a TorchScript archive and then refuses it; once is enough.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FileError(
            f"{path} holds Python objects besides tensors, which could run code, or is no "
            "checkpoint: save `model.state_dict()` instead."
        ) from error
    except Exception as error:  # a cut pickle fails wherever it was cut: struct, lookup, EOF…
        raise FileError(
            f"{path} is truncated or no checkpoint of tensors ({_one_line(error)})."
        ) from error


def _state_of(raw: Any, file: str | Path) -> dict[str, Tensor]:
    while isinstance(raw, Mapping):
        inner = next((raw[k] for k in WRAPPERS if isinstance(raw.get(k), Mapping)), None)
        if inner is None:
            break
        raw = inner
    if not isinstance(raw, Mapping) or not raw:
        raise FileError(f"{file} holds no state dict but {type(raw).__name__}.")
    if others := [key for key, value in raw.items() if not isinstance(value, Tensor)]:
        raise FileError(
            f"{file} holds no state dict: {_few(others)} "
            f"{'is' if len(others) == 1 else 'are'} not tensors."
        )
    prefix = "module."
    if all(key.startswith(prefix) for key in raw):
        return {key.removeprefix(prefix): value for key, value in raw.items()}
    return dict(raw)


def _mismatch(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    # torch fills this counter in by itself; older checkpoints do not have it.
    missing = [k for k in expected if k not in found and not k.endswith("num_batches_tracked")]
    surplus = [k for k in found if k not in expected]
    shapes = [
        f"{k} is {_size(found[k])}, not {_size(expected[k])}"
        for k in expected
        if k in found and isinstance(expected[k], Tensor) and found[k].shape != expected[k].shape
    ]
    parts = [
        f"{len(names)} {what} ({_few(names)})"
        for what, names in (
            ("missing", missing),
            ("unexpected", surplus),
            ("of another shape", shapes),
        )
        if names
    ]
    return ", ".join(parts)


def _few(names: Sequence[str], most: int = 3) -> str:
    shown: Iterable[str] = names[:most]
    return ", ".join(shown) + (", …" if len(names) > most else "")


def _size(tensor: Tensor) -> str:
    return "×".join(str(n) for n in tensor.shape) or "a scalar"


def _one_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0].rstrip(".: ") if lines else type(error).__name__
