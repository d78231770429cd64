"""The loop sets rates, leaves steps out when asked, and clears gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fpgm.errors import ModelError, RequestError
from fpgm.utils.accuracy import AccuracyCounter
from fpgm.utils.hooks import temporary_hooks
from fpgm.utils.training_loop import train_steps


def one_weight() -> tuple[nn.Parameter, torch.optim.SGD]:
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.full((1,), 100.0)  # left by someone else
    return weight, torch.optim.SGD([weight], 1.0)


def test_every_step_has_its_rate_and_only_its_own_gradient() -> None:
    weight, optimizer = one_weight()
    after: list[float] = []

    def backward(step: int, batch: float) -> bool:
        (weight * batch).sum().backward()
        return True

    train_steps(
        [1.0, 1.0, 2.0], optimizer, lambda step: 0.1 * (step + 1), backward,
        lambda step: after.append(weight.item()),
    )  # fmt: skip
    assert after == pytest.approx([-0.1, -0.3, -0.9])
    assert weight.grad is None


def test_a_step_without_gradients_to_use_is_left_out() -> None:
    weight, optimizer = one_weight()
    after: list[int] = []

    def backward(step: int, batch: float) -> bool:
        (weight * batch).sum().backward()
        return step != 1

    train_steps([1.0, torch.inf, 1.0], optimizer, lambda _: 1.0, backward, after.append)
    assert weight.item() == -2.0
    assert after == [0, 2]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("no\nway."), ModelError, "Training fails at step 2: no."),
        (RequestError("Give more."), RequestError, "Give more."),
    ],
)
def test_a_failure_is_one_line(error: Exception, kind: type[Exception], message: str) -> None:
    _, optimizer = one_weight()

    def backward(step: int, batch: int) -> bool:
        if step:
            raise error
        return False

    with pytest.raises(kind) as caught:
        train_steps([0, 1], optimizer, lambda _: 1.0, backward)
    assert str(caught.value) == message


def test_hooks_go_if_registering_another_fails() -> None:
    net = nn.ReLU()

    def register() -> None:
        with temporary_hooks() as handles:
            handles.append(net.register_forward_hook(lambda *_: None))
            handles.append(net.get_submodule("none").register_forward_hook(lambda *_: None))

    with pytest.raises(AttributeError):
        register()
    assert not net._forward_hooks


def test_only_one_row_of_scores_per_label_is_counted() -> None:
    counter = AccuracyCounter()
    labels = torch.tensor([0, 1])
    assert counter.accuracy is None
    for outputs in ({"logits": torch.eye(2)}, torch.eye(2)[None], torch.eye(3)):
        assert not counter.add(outputs, labels)
    assert counter.total == 0
    assert counter.add(torch.eye(2), labels)
    assert counter.add(torch.eye(2).flip(0), labels)
    assert (counter.correct, counter.total, counter.accuracy) == (2, 4, 0.5)
    assert counter.sums(torch.zeros(1, dtype=torch.float64)).tolist() == [2.0, 4.0]
