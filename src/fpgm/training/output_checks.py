"""What a network must answer to be trained here: for every picture a number a class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fpgm.errors import ModelError
from fpgm.utils.preserve_state import undisturbed
from fpgm.utils.text import reason, size


@torch.no_grad()
def check_answers(
    model: nn.Module, teacher: nn.Module | None, example: Tensor, classes: int
) -> None:
    """Both must answer with a number for every class, before hours go by."""
    found = {}
    for name, net in (("model", model), ("teacher", teacher)):
        if net is None:
            continue
        was = net.training
        net.eval()
        try:
            answer = net(example)
        except Exception as error:
            raise ModelError(
                f"The {name}'s forward fails on a picture of {size(example.shape)}: "
                f"{reason(error)}."
            ) from error
        finally:
            net.train(was)
        found[name] = checked(answer, f"of the {name}").shape[1]
    if found["model"] < classes:
        raise ModelError(
            f"The model answers with {found['model']} classes and the data has {classes}: give a "
            "model of as many."
        )
    if found.get("teacher", found["model"]) != found["model"]:
        raise ModelError(
            f"The teacher answers with {found['teacher']} classes and the model with "
            f"{found['model']}: give a teacher of as many."
        )


def reaches_all(model: nn.Module, example: Tensor) -> bool:
    """Whether every weight has a part in the answer, so that a step gives each a gradient."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    with undisturbed(model):
        try:
            answer = model.train()(torch.cat([example, example]))
        except Exception as error:
            raise ModelError(f"The model's forward fails in training: {reason(error)}.") from error
        total = checked(answer, "in training").sum()
        parts = torch.autograd.grad(total, weights, allow_unused=True)
    return all(part is not None for part in parts)


def checked(answer: Any, where: str) -> Tensor:
    """What a network answered, if that is one row of numbers a picture."""
    if isinstance(answer, Tensor) and answer.ndim == 2:
        return answer
    kind = (
        f"a tensor of {size(answer.shape)}" if isinstance(answer, Tensor) else type(answer).__name__
    )
    raise ModelError(
        f"The answer {where} is {kind}: give a model whose forward returns one tensor, pictures by "
        "classes (a wrapper that picks the logits will do)."
    )
