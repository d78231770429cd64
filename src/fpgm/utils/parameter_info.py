"""What an axis of a parameter does, and which layer a parameter belongs to."""

from __future__ import annotations

from typing import Literal

Role = Literal["filter", "depthwise", "both", "direction", "gain", "shift", "scale", "reads"]
WRITES: tuple[Role, ...] = ("filter", "depthwise", "both", "direction")
"""Roles of an axis whose rows are filters."""


def layer_of(tensor: str) -> str:
    """Path of the module that owns a tensor, however the tensor is made up.

    >>> layer_of("a.conv.weight"), layer_of("a.conv.parametrizations.weight.original1")
    ('a.conv', 'a.conv')
    >>> layer_of("weight")  # of a model that is one layer
    'weight'
    """
    owner = tensor.rpartition(".")[0]
    before, found, _ = owner.rpartition("parametrizations.")
    if found and (not before or before.endswith(".")):
        owner = before.rstrip(".")
    return owner or tensor
