"""Feature maps of one layer, and the kept channels that are most similar to removed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fpgm.errors import ModelError, RequestError
from fpgm.pruning.plan import Plan
from fpgm.utils.example_inputs import as_examples, to_model_device
from fpgm.utils.hooks import temporary_hooks
from fpgm.utils.modules import modules_by_path
from fpgm.utils.preserve_state import preserve_state
from fpgm.utils.thread_lock import with_global_lock

Maps = npt.NDArray[np.float64]


@with_global_lock
@torch.no_grad()
def layer_output(model: nn.Module, layer: str, inputs: Any) -> Maps:
    """Return a module's output for the first of the inputs: [channels, height, width]."""
    modules = modules_by_path(model)
    if layer not in modules:
        raise RequestError(f"The model has no module '{layer}'.")
    outputs: list[Tensor] = []

    def record(module: nn.Module, args: object, out: object) -> None:
        if isinstance(out, Tensor) and not outputs:
            outputs.append(out.detach().clone())

    with temporary_hooks() as handles:
        handles.append(modules[layer].register_forward_hook(record))
        with preserve_state(model):
            model.eval()
            as_examples(to_model_device(model, inputs))[0].call(model)
    if not outputs or outputs[0].ndim != 4:
        raise ModelError(
            f"The output of '{layer}' is not [batch, channels, height, width]: choose a "
            "convolution or another module with feature maps."
        )
    maps: Maps = outputs[0][0].double().cpu().numpy()
    return maps


def removed_filters(plan: Plan, layer: str) -> list[int]:
    """List the indices of a layer's filters that a plan removes."""
    cut = plan.filters().get(layer or "weight")
    return [] if cut is None else cut.removed()


def most_correlated(maps: Maps, removed: Sequence[int]) -> list[tuple[int, int, float]]:
    """Find, for every removed channel, the kept channel with the largest absolute correlation.

    Returns (removed, kept, correlation) tuples.

    >>> a, b = np.array([[1.0, 2.0]]), np.array([[2.0, 1.0]])
    >>> most_correlated(np.stack([a, 3 * a, b]), [0])
    [(0, 1, 1.0)]
    """
    flat = maps.reshape(len(maps), -1)
    flat = flat - flat.mean(axis=1, keepdims=True)
    lengths = np.linalg.norm(flat, axis=1, keepdims=True)
    flat = flat / np.where(lengths > 0, lengths, 1.0)
    kept = [n for n in range(len(maps)) if n not in set(removed)]
    if not kept:
        return []
    pairs = []
    for channel in removed:
        correlations = flat[kept] @ flat[channel]
        best = int(np.argmax(np.abs(correlations)))
        pairs.append((int(channel), kept[best], round(float(correlations[best]), 6)))
    return pairs
