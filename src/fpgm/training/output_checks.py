"""Check that a network's outputs are logits: one row per image, one column per class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fpgm.errors import ModelError
from fpgm.utils.preserve_state import preserve_state
from fpgm.utils.text import format_shape, reason


@torch.no_grad()
def check_outputs(
    model: nn.Module, teacher: nn.Module | None, example: Tensor, classes: int
) -> None:
    """Check that model and teacher return a logit for every class, before training begins."""
    widths = {}
    for name, net in (("model", model), ("teacher", teacher)):
        if net is None:
            continue
        training = net.training
        net.eval()
        try:
            output = net(example)
        except Exception as error:
            raise ModelError(
                f"The {name}'s forward fails on an image of {format_shape(example.shape)}: "
                f"{reason(error)}."
            ) from error
        finally:
            net.train(training)
        widths[name] = check_logits(output, f"of the {name}").shape[1]
    if widths["model"] < classes:
        raise ModelError(
            f"The model has {widths['model']} outputs and the data has {classes} classes: give a "
            "model with an output for every class."
        )
    if widths.get("teacher", widths["model"]) != widths["model"]:
        raise ModelError(
            f"The teacher has {widths['teacher']} outputs and the model has {widths['model']}: "
            "they must match."
        )


def all_weights_used(model: nn.Module, example: Tensor) -> bool:
    """Return whether every weight affects the output, so that each gets a gradient."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    with preserve_state(model):
        try:
            output = model.train()(torch.cat([example, example]))
        except Exception as error:
            raise ModelError(f"The model's forward fails in training: {reason(error)}.") from error
        total = check_logits(output, "in training").sum()
        parts = torch.autograd.grad(total, weights, allow_unused=True)
    return all(part is not None for part in parts)


def check_logits(output: Any, where: str) -> Tensor:
    """Return a network's output if it has one row of numbers per image."""
    if isinstance(output, Tensor) and output.ndim == 2:
        return output
    kind = (
        f"a tensor of {format_shape(output.shape)}"
        if isinstance(output, Tensor)
        else type(output).__name__
    )
    raise ModelError(
        f"The output {where} is {kind}: forward must return one tensor of shape [images, classes]. "
        "Wrap the model so that it returns the logits."
    )
