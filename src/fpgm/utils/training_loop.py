"""The loop that every training here runs, and the cosine its learning rate may follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from fpgm.errors import FpgmError, ModelError
from fpgm.utils.text import reason

B = TypeVar("B")


class Optimizer(Protocol):
    """What the loop needs of an optimizer, be it PyTorch's or Accelerate's."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def step(self) -> Any: ...

    def zero_grad(self) -> None: ...


def train_steps(
    batches: Iterable[B],
    optimizer: Optimizer,
    learning_rate: Callable[[int], float],
    backward: Callable[[int, B], bool],
    after: Callable[[int], None] = lambda _: None,
    failure: Callable[[int], str] = lambda step: f"Training fails at step {step + 1}",
) -> None:
    """Set the learning rate, compute gradients and step, for every batch; gradients go at the end.

    Args:
        batches: decide how long training takes.
        learning_rate: of a step, counted from 0.
        backward: leaves gradients of a step's batch in the parameters; False if there are none to
            be used, which leaves the step out.
        after: called after a step, before its gradients go.
        failure: begins the message of the ModelError if gradients or a step cannot be computed.
    """
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.zero_grad()
        with wrap_model_errors(partial(failure, step)):
            ready = backward(step, batch)
            if ready:
                optimizer.step()
        if ready:
            after(step)
    optimizer.zero_grad()


@contextmanager
def wrap_model_errors(message: Callable[[], str]) -> Iterator[None]:
    """Turn whatever the user's network and torch raise in here into a ModelError of one line."""
    try:
        yield
    except FpgmError:
        raise
    except Exception as error:
        raise ModelError(f"{message()}: {reason(error)}.") from error


def cosine_decay(fraction: float) -> float:
    """Return the factor of a learning rate after this fraction of a training.

    >>> [round(cosine_decay(fraction), 3) for fraction in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.0]
    """
    return (1 + math.cos(math.pi * fraction)) / 2
