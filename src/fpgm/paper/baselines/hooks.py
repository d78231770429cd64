"""Run a task's inputs through a model, and record inputs and outputs of single layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fpgm.paper.baselines.base import Task
from fpgm.recovery.unfold import input_of
from fpgm.utils.copying import copy_sharing_weights
from fpgm.utils.example_inputs import batch_size, resize_batch
from fpgm.utils.hooks import temporary_hooks

LayerHook = Callable[[Tensor, object], None]
"""Called with a layer's input and output."""


@contextmanager
def layer_hooks(net: nn.Module, hooks: Mapping[str, LayerHook]) -> Iterator[None]:
    """Call the given functions with the input and output of the layers at these paths."""

    def make_hook(function: LayerHook) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, out: object) -> None:
            function(input_of(args, kwargs), out)

        return hook

    with temporary_hooks() as handles:
        for path, function in hooks.items():
            layer = net.get_submodule(path)
            handles.append(layer.register_forward_hook(make_hook(function), with_kwargs=True))
        yield


@torch.no_grad()
def run_inputs(task: Task, hooks: Mapping[str, LayerHook], max_inputs: int | None = None) -> None:
    """Run the task's calibration inputs with hooks on a copy of the model that shares its weights.

    Args:
        task: the model and its data.
        hooks: functions by the path of their layer.
        max_inputs: at most this many inputs; `task.images` by default.
    """
    net = copy_sharing_weights(task.model).eval()
    inputs = task.inputs()
    remaining = task.images if max_inputs is None else max_inputs
    try:
        with layer_hooks(net, hooks):
            for number in range(len(inputs)):
                if remaining > 0:
                    example = inputs[number]
                    count = min(remaining, batch_size(example) or remaining)
                    resize_batch(example, count).call(net)
                    remaining -= count
    finally:
        inputs.close()
