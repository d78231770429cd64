"""Reading trained weights from a file, without ever running code from it.

safetensors files and tensor-only torch checkpoints are read; any other pickle is refused. The file
is compared with the model before anything is copied, so a mismatch leaves the model as it was.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fpgm.errors import FileError
from fpgm.models import assets
from fpgm.utils.locking import quietly
from fpgm.utils.safe_read import at_home
from fpgm.utils.safetensors_io import first_bytes, is_safetensors, read_tensors, with_shared
from fpgm.utils.text import reason, shorten, size

M = TypeVar("M", bound=nn.Module)

SHIPPED = "shipped"
"""Stands for the weights that come with the package: a ResNet-20 trained on CIFAR-10."""

WRAPPERS = ("state_dict", "model")
"""Keys under which training scripts keep the weights beside epoch and optimizer."""


def weights_file(name: str | Path) -> Path:
    """The file a name stands for: "shipped", or a path, which may begin with a tilde."""
    if str(name) == SHIPPED:
        return assets.WEIGHTS
    return at_home(name)


def load_weights(model: M, file: str | Path) -> M:
    """Copy a checkpoint's tensors into the model, all of them or none, and return the model.

    `file` may be "shipped".
    """
    state = read_weights(file)
    if problem := _mismatch(model.state_dict(), state):
        if str(file) in (SHIPPED, str(assets.WEIGHTS)):
            raise FileError("The shipped weights are of resnet20 with 10 classes, of no other.")
        raise FileError(f"{file} does not fit {type(model).__name__}: {problem}.")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise FileError(f"{file} does not fit {type(model).__name__}: {reason(error)}.") from error
    return model


def read_weights(file: str | Path) -> dict[str, Tensor]:
    """Read a state dict by name, with wrappers and a `module.` prefix taken off."""
    path = weights_file(file)
    head = first_bytes(path)
    # By content, not by suffix: checkpoints come as .pt, .pth, .th, .bin, .tar and more.
    if head.startswith((b"PK\x03\x04", b"\x80")):
        return _state_of(_read_torch(path), file)
    if is_safetensors(head):
        return _state_of(with_shared(path, *read_tensors(path)), file)
    raise FileError(f"{file} is neither a safetensors file nor a torch checkpoint.")


def _read_torch(path: Path) -> Any:
    try:
        with quietly():  # torch warns about a TorchScript archive, and then refuses it
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FileError(
            f"{path} holds Python objects besides tensors, which could run code, or is no "
            "checkpoint: save `model.state_dict()` instead."
        ) from error
    except Exception as error:  # a cut pickle fails wherever it was cut: struct, lookup, EOF…
        raise FileError(
            f"{path} is truncated or no checkpoint of tensors ({reason(error)})."
        ) from error


def _state_of(raw: Any, file: str | Path) -> dict[str, Tensor]:
    while isinstance(raw, Mapping):
        inner = next((raw[k] for k in WRAPPERS if isinstance(raw.get(k), Mapping)), None)
        if inner is None:
            break
        raw = inner
    if not isinstance(raw, Mapping) or not raw:
        raise FileError(f"{file} holds no state dict but {type(raw).__name__}.")
    state: dict[str, Any] = {str(key): value for key, value in raw.items()}
    if others := [key for key, value in state.items() if not isinstance(value, Tensor)]:
        raise FileError(
            f"{file} holds no state dict: {shorten(others)} "
            f"{'is' if len(others) == 1 else 'are'} not tensors."
        )
    prefix = "module."
    if all(key.startswith(prefix) for key in state):
        return {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def _mismatch(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    # torch fills this counter in by itself; older checkpoints do not have it.
    missing = [k for k in expected if k not in found and not k.endswith("num_batches_tracked")]
    surplus = [k for k in found if k not in expected]
    shapes = [
        f"{k} is {size(found[k].shape)}, not {size(expected[k].shape)}"
        for k in expected
        if k in found and isinstance(expected[k], Tensor) and found[k].shape != expected[k].shape
    ]
    kinds = [
        f"{k} is {found[k].dtype}, not {expected[k].dtype}"
        for k in expected
        if k in found
        and isinstance(expected[k], Tensor)
        and _kind(found[k]) != _kind(expected[k])
        and not k.endswith("num_batches_tracked")  # averages of checkpoints have fractions of it
    ]
    parts = [
        f"{len(names)} {what} ({shorten(names)})"
        for what, names in (
            ("missing", missing),
            ("unexpected", surplus),
            ("of another shape", shapes),
            ("of another kind", kinds),
        )
        if names
    ]
    return ", ".join(parts)


def _kind(tensor: Tensor) -> str:
    """What a tensor's values are: between kinds, a copy would lose something or mean nothing."""
    if tensor.is_complex():
        return "complex"
    if tensor.is_floating_point():
        return "a byte" if tensor.dtype.itemsize < 2 else "floating"
    return "bool" if tensor.dtype == torch.bool else "whole"
