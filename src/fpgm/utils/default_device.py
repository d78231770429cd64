"""Tensors of ours are on the CPU, whatever the default device of the user's process is.

Labels, scores and random numbers are made without naming a device. Public functions therefore run
with the CPU as the default device, and give the user's own code (a model's forward, a loader, a
factory) the user's default device back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_users_device: ContextVar[torch.device | None] = ContextVar("_users_device", default=None)
"""The user's default device while it is replaced by the CPU."""


@contextmanager
def cpu_by_default() -> Iterator[None]:
    """Make the CPU the default device, as `with torch.device("cpu")` does."""
    device = torch.get_default_device()
    if device.type == "cpu":  # the usual case, for which every torch call would only be slower
        yield
        return
    token = _users_device.set(device)
    try:
        with torch.device("cpu"):
            yield
    finally:
        _users_device.reset(token)


@contextmanager
def users_default_device() -> Iterator[None]:
    """Make the user's default device the default again, for code of the user's.

    Except for "meta": its tensors have no values, so nothing could be computed with them.
    """
    device = _users_device.get()
    if device is None or device.type == "meta":
        yield
        return
    token = _users_device.set(None)
    try:
        with device:
            yield
    finally:
        _users_device.reset(token)
