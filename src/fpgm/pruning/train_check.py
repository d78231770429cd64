"""Check that a compact model trains if the original does: a forward and backward pass of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fpgm.utils.copying import copy_model
from fpgm.utils.example_inputs import Example, batch_size, map_tensors, resize_batch, tensors_in
from fpgm.utils.rng import seed_torch
from fpgm.utils.thread_lock import suppress_warnings
from fpgm.utils.tracebacks import describe_error


def training_problem(model: nn.Module, small: nn.Module, examples: Sequence[Example]) -> str:
    """Describe why the compact model does not train though the original does, if so."""
    problems = (_problem(model, small, example) for example in examples)
    return next(filter(None, problems), "")


def _problem(model: nn.Module, small: nn.Module, example: Example) -> str:
    try:
        _step(small, example)
    except Exception as error:
        return _explain_failure(model, small, example, error)
    return ""


def _explain_failure(model: nn.Module, small: nn.Module, example: Example, error: Exception) -> str:
    """Describe why the compact model fails, unless the original fails too, also on more inputs."""
    if not _runs(model, example):
        batch = batch_size(example)
        if batch is None or batch > 1:
            return ""
        example = resize_batch(example, 2)  # batch norm needs more than one value per channel
        if not _runs(model, example):
            return ""
        try:
            _step(small, example)
        except Exception as again:
            error = again
        else:
            return ""
    return f"The compact model does not train, the original does: {describe_error(error)}."


def _runs(model: nn.Module, example: Example) -> bool:
    try:
        _step(model, example)
    except Exception:
        return False
    return True


def _step(model: nn.Module, example: Example) -> None:
    """Run one training step without an optimizer, in a copy."""
    with suppress_warnings(), torch.inference_mode(False), torch.enable_grad():
        copied = copy_model(model).train()
        seed_torch(0)
        out = tensors_in(map_tensors(example, _detach).call(copied))
        losses = [_loss(value) for value in out if _has_gradient(value)]
        if losses:
            torch.stack(losses).sum().backward()


def _detach(value: Tensor) -> Tensor:
    """Cut an input off from whatever it was computed from; that must get no gradients."""
    return value.detach().clone().requires_grad_(value.requires_grad)


def _has_gradient(value: Tensor) -> bool:
    return value.requires_grad and value.layout == torch.strided


def _loss(value: Tensor) -> Tensor:
    value = torch.view_as_real(value) if value.is_complex() else value
    return value.double().sum().cpu()
