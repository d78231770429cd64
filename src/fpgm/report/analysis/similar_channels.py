"""What a layer shows of one input, and which of the channels that stay resemble those that go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fpgm.errors import ModelError, RequestError
from fpgm.pruning.plan import Plan
from fpgm.utils.example_inputs import as_examples, beside
from fpgm.utils.locking import in_turn
from fpgm.utils.modules import modules_by_path
from fpgm.utils.preserve_state import undisturbed

Maps = npt.NDArray[np.float64]


@in_turn
@torch.no_grad()
def layer_output(model: nn.Module, layer: str, inputs: Any) -> Maps:
    """What a module gives out for the first of these inputs: [channels, height, width]."""
    modules = modules_by_path(model)
    if layer not in modules:
        raise RequestError(f"The model has no module '{layer}'.")
    found: list[Tensor] = []

    def keep(module: nn.Module, args: object, out: object) -> None:
        if isinstance(out, Tensor) and not found:
            found.append(out.detach().clone())

    handle = modules[layer].register_forward_hook(keep)
    try:
        with undisturbed(model):
            model.eval()
            as_examples(beside(model, inputs))[0].call(model)
    finally:
        handle.remove()
    if not found or found[0].ndim != 4:
        raise ModelError(f"'{layer}' gives out no channels with a height and a width.")
    maps: Maps = found[0][0].double().cpu().numpy()
    return maps


def removed_filters(plan: Plan, layer: str) -> list[int]:
    """Numbers of a layer's filters that a plan removes."""
    found = plan.filters().get(layer or "weight")
    return [] if found is None else found.removed()


def most_alike(maps: Maps, removed: Sequence[int]) -> list[tuple[int, int, float]]:
    """For every channel that goes, the kept one it correlates with most, and how much.

    >>> a, b = np.array([[1.0, 2.0]]), np.array([[2.0, 1.0]])
    >>> most_alike(np.stack([a, 3 * a, b]), [0])
    [(0, 1, 1.0)]
    """
    flat = maps.reshape(len(maps), -1)
    flat = flat - flat.mean(axis=1, keepdims=True)
    lengths = np.linalg.norm(flat, axis=1, keepdims=True)
    flat = flat / np.where(lengths > 0, lengths, 1.0)
    kept = [n for n in range(len(maps)) if n not in set(removed)]
    if not kept:
        return []
    found = []
    for gone in removed:
        alike = flat[kept] @ flat[gone]
        best = int(np.argmax(np.abs(alike)))
        found.append((int(gone), kept[best], round(float(alike[best]), 6)))
    return found
