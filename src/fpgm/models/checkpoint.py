"""Read trained weights from a file, without running code from it.

safetensors files and tensor-only torch checkpoints are read; any other pickle is refused. The file
is compared with the model before anything is copied, so a mismatch leaves the model unchanged.
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
from fpgm.utils.safe_read import expand_user
from fpgm.utils.safetensors_io import add_shared_tensors, is_safetensors, read_head, read_tensors
from fpgm.utils.text import format_shape, reason, shorten
from fpgm.utils.thread_lock import suppress_warnings

M = TypeVar("M", bound=nn.Module)

SHIPPED = "shipped"
"""Stands for the weights that come with the package, of two networks trained on CIFAR-10."""

WRAPPER_KEYS = ("state_dict", "model")
"""Keys under which training scripts store the weights, next to epoch and optimizer."""


_OTHER_SHAPE = "with a different shape"
"""What a message calls tensors that a pruned model has fewer channels of."""


def weights_file(name: str | Path) -> Path:
    """Resolve a path, which may begin with a tilde; the word "shipped" stays as it is."""
    if str(name) == SHIPPED:
        return Path(SHIPPED)
    if str(name).startswith(("http://", "https://")):
        raise FileError(f"{name} is a URL: download the file and give its path.")
    return expand_user(name)


def shipped_file(file: Path | None, model: str) -> Path | None:
    """Replace the word "shipped" by the file for a built-in network.

    >>> [shipped_file(Path(file), "resnet20").name for file in ("shipped", "own.pt")]
    ['resnet20.safetensors', 'own.pt']
    """
    if file is None or str(file) != SHIPPED:
        return file
    if model not in assets.SHIPPED_WEIGHTS:
        raise _no_shipped_weights()
    return assets.SHIPPED_WEIGHTS[model]


def load_weights(model: M, file: str | Path) -> M:
    """Copy a checkpoint's tensors into the model, all of them or none, and return the model.

    `file` may be "shipped".
    """
    if str(file) == SHIPPED:
        file = _find_fitting_weights(model)
    state = read_weights(file)
    if problem := _describe_mismatch(model.state_dict(), state):
        if file in assets.SHIPPED_WEIGHTS.values():
            raise _no_shipped_weights()
        if _OTHER_SHAPE in problem and _is_pruned(weights_file(file)):
            raise FileError(
                f"{file} is a pruned model: read it with fpgm.load(file, factory), or give the "
                "commands its folder."
            )
        raise FileError(f"{file} does not fit {type(model).__name__}: {problem}.")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise FileError(f"{file} does not fit {type(model).__name__}: {reason(error)}.") from error
    return model


def _find_fitting_weights(model: nn.Module) -> Path:
    """Find the shipped weights of a network."""
    for path in assets.SHIPPED_WEIGHTS.values():
        if not _describe_mismatch(model.state_dict(), read_weights(path)):
            return path
    raise _no_shipped_weights()


def _no_shipped_weights() -> FileError:
    names = " and ".join(assets.SHIPPED_WEIGHTS)
    return FileError(f"The shipped weights fit only {names} with 10 classes.")


def _is_pruned(path: Path) -> bool:
    """Tell whether a file was written by `fpgm.save`, with the plans that made the model."""
    return is_safetensors(read_head(path)) and read_tensors(path)[1].get("fpgm_plans", "{}") != "{}"


def read_weights(file: str | Path) -> dict[str, Tensor]:
    """Read a state dict by name, without wrappers and the `module.` prefix."""
    path = weights_file(file)
    head = read_head(path)
    # By content, not by suffix: checkpoints come as .pt, .pth, .th, .bin, .tar and more.
    if head.startswith((b"PK\x03\x04", b"\x80")):
        return _extract_state(_read_torch(path), file)
    if is_safetensors(head):
        return _extract_state(add_shared_tensors(path, *read_tensors(path)), file)
    raise FileError(f"{file} is neither a safetensors file nor a torch checkpoint.")


def _read_torch(path: Path) -> Any:
    try:
        with suppress_warnings():  # torch warns about a TorchScript archive, and then refuses it
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FileError(
            f"{path} holds Python objects besides tensors, which could run code, or is not a "
            "checkpoint: save `model.state_dict()` instead."
        ) from error
    except Exception as error:  # a cut pickle fails wherever it was cut: struct, lookup, EOF…
        raise FileError(
            f"{path} is truncated, or not a checkpoint of tensors ({reason(error)})."
        ) from error


def _extract_state(raw: Any, file: str | Path) -> dict[str, Tensor]:
    while isinstance(raw, Mapping):
        inner = next((raw[k] for k in WRAPPER_KEYS if isinstance(raw.get(k), Mapping)), None)
        if inner is None:
            break
        raw = inner
    if not isinstance(raw, Mapping) or not raw:
        raise FileError(f"{file} contains a {type(raw).__name__}, not a state dict.")
    state: dict[str, Any] = {str(key): value for key, value in raw.items()}
    if others := [key for key, value in state.items() if not isinstance(value, Tensor)]:
        raise FileError(
            f"{file} does not contain a state dict: {shorten(others)} "
            f"{'is not a tensor' if len(others) == 1 else 'are not tensors'}."
        )
    prefix = "module."
    if all(key.startswith(prefix) for key in state):
        return {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def _describe_mismatch(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    # torch adds this counter itself; older checkpoints do not have it.
    missing = [k for k in expected if k not in state and not k.endswith("num_batches_tracked")]
    surplus = [k for k in state if k not in expected]
    shapes = [
        f"{k} is {format_shape(state[k].shape)}, not {format_shape(expected[k].shape)}"
        for k in expected
        if k in state and isinstance(expected[k], Tensor) and state[k].shape != expected[k].shape
    ]
    kinds = [
        f"{k} is {state[k].dtype}, not {expected[k].dtype}"
        for k in expected
        if k in state
        and isinstance(expected[k], Tensor)
        and _value_kind(state[k]) != _value_kind(expected[k])
        and not k.endswith("num_batches_tracked")  # averages of checkpoints have fractions of it
    ]
    parts = [
        f"{len(names)} {what} ({shorten(names)})"
        for what, names in (
            ("missing", missing),
            ("unexpected", surplus),
            (_OTHER_SHAPE, shapes),
            ("with a different dtype", kinds),
        )
        if names
    ]
    return ", ".join(parts)


def _value_kind(tensor: Tensor) -> str:
    """Return the kind of a tensor's values; a copy between kinds would lose or change them."""
    if tensor.is_complex():
        return "complex"
    if tensor.is_floating_point():
        return "a byte" if tensor.dtype.itemsize < 2 else "floating"
    return "bool" if tensor.dtype == torch.bool else "whole"
