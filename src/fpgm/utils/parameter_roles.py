"""The roles of a parameter's axes, and the layer that owns a parameter."""

from __future__ import annotations

from typing import Literal

Role = Literal["filter", "depthwise", "both", "direction", "gain", "shift", "scale", "reads"]
PRODUCER_ROLES: tuple[Role, ...] = ("filter", "depthwise", "both", "direction")
"""Roles of an axis whose rows are filters."""


def layer_of(tensor: str) -> str:
    """Return the path of the module that owns a tensor, parametrized or not.

    >>> layer_of("a.conv.weight"), layer_of("a.conv.parametrizations.weight.original1")
    ('a.conv', 'a.conv')
    >>> layer_of("weight")  # of a model that is one layer
    'weight'
    """
    owner = tensor.rpartition(".")[0]
    before, separator, _ = owner.rpartition("parametrizations.")
    if separator and (not before or before.endswith(".")):
        owner = before.rstrip(".")
    return owner or tensor
