"""Inputs shown to a copy of a model, with someone watching single layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fpgm.paper.baselines.base import Task
from fpgm.recovery.unfold import read
from fpgm.utils.copying import shadow
from fpgm.utils.example_inputs import batch_of, resized

Watcher = Callable[[Tensor, object], None]
"""Told what a layer reads and what it gives out."""


@contextmanager
def watching(net: nn.Module, watchers: Mapping[str, Watcher]) -> Iterator[None]:
    """In here the layers of these paths tell what they do."""

    def hook_of(watcher: Watcher) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, out: object) -> None:
            watcher(read(args, kwargs), out)

        return hook

    handles = [
        net.get_submodule(path).register_forward_hook(hook_of(watcher), with_kwargs=True)
        for path, watcher in watchers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def show(task: Task, watchers: Mapping[str, Watcher], most: int | None = None) -> None:
    """Run the task's inputs, at most so many, and tell what the layers of these paths do.

    The copy shares the model's weights, and nothing is ever hung on the model itself.
    """
    net = shadow(task.model).eval()
    inputs = task.inputs()
    left = task.images if most is None else most
    try:
        with watching(net, watchers):
            for number in range(len(inputs)):
                if left > 0:
                    example = inputs[number]
                    count = min(left, batch_of(example) or left)
                    resized(example, count).call(net)
                    left -= count
    finally:
        inputs.close()
