"""Units held at zero: from the start, from an epoch on, and against gradients of every origin."""

from __future__ import annotations

import gc
import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.helpers.soft_pruning import Block, X, batches, train, zeroed_filters
from torch import Tensor, nn

import fpgm


def test_held_units_stay_out_of_clipped_norms_and_closures() -> None:
    torch.manual_seed(0)
    net = Block(torch.sigmoid).double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    pruner = fpgm.SoftPruner(net, X.double(), rate=0.5, align=1, mode="hard", optimizer=optimizer)
    pruner.step()
    removed = zeroed_filters(net.inner)
    for x, y in batches(3, torch.float64):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            assert net.inner.weight.grad is not None
            assert net.outer.weight.grad is not None
            assert not net.inner.weight.grad[removed].any()
            assert not net.outer.weight.grad[:, removed].any()
            return loss

        optimizer.step(closure)
    assert not optimizer.state[net.inner.weight]["momentum_buffer"][removed].any()


def test_soft_first_then_held() -> None:
    """Before `hold` units come back by momentum and gradient, after it none does."""
    torch.manual_seed(0)
    net = Block(torch.sigmoid)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    pruner = fpgm.SoftPruner(net, X, rate=0.5, align=1, hold=2, optimizer=optimizer)
    steps, removed = [], []
    for _ in range(4):
        train(net, optimizer, 5)
        steps.append(pruner.step())
        removed.append(zeroed_filters(net.inner))
    assert steps[1].regrown > 0
    assert [step.regrown for step in steps[2:]] == [0, 0]
    assert removed[1] == removed[2] == removed[3]
    small = pruner.compact()
    assert pruner.certificate is not None
    assert pruner.certificate.ok
    torch.testing.assert_close(small.eval()(X), net.eval()(X), rtol=1e-5, atol=1e-6)


def test_holding_continues_after_resuming() -> None:
    torch.manual_seed(0)
    net = Block(torch.sigmoid)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    options: dict[str, Any] = {"rate": 0.5, "align": 1, "hold": 1, "interval": 2}
    pruner = fpgm.SoftPruner(net, X, optimizer=optimizer, **options)
    pruner.step()
    assert pruner.state_dict()["holding"] is False  # nothing was zeroed yet
    pruner.step()
    state = json.loads(json.dumps(pruner.state_dict()))
    del pruner  # and with it what it held
    again = fpgm.SoftPruner(net, X, optimizer=optimizer, **options)
    again.load_state_dict(state)
    removed = zeroed_filters(net.inner)
    train(net, optimizer, 5)
    assert zeroed_filters(net.inner) == removed
    assert again.state_dict() == state


def test_held_from_an_epoch_that_prunes_nothing() -> None:
    """Units that came back since the last pruning are zeroed again, and then held."""
    torch.manual_seed(0)
    net = Block(torch.sigmoid)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    pruner = fpgm.SoftPruner(net, X, rate=0.5, align=1, end=1, hold=2, optimizer=optimizer)
    pruner.step()
    removed = zeroed_filters(net.inner)
    train(net, optimizer, 5)
    assert zeroed_filters(net.inner) != removed
    pruner.step()
    train(net, optimizer, 5)
    assert zeroed_filters(net.inner) == removed


def test_a_deleted_pruner_holds_nothing() -> None:
    torch.manual_seed(0)
    net = Block(torch.sigmoid)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    pruner = fpgm.SoftPruner(net, X, rate=0.5, align=1, mode="hard", optimizer=optimizer)
    pruner.step()
    assert zeroed_filters(net.inner)
    del pruner
    gc.collect()
    train(net, optimizer, 5)
    assert not zeroed_filters(net.inner)


@pytest.mark.parametrize("how", ["trained later", "put there"])
def test_gradients_that_come_another_way_are_held_too(how: str) -> None:
    torch.manual_seed(0)
    net = Block()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    weight = net.inner.weight
    weight.requires_grad_(how != "trained later")
    pruner = fpgm.SoftPruner(net, X, rate=0.5, align=1, mode="hard", optimizer=optimizer)
    pruner.step()
    removed = zeroed_filters(net.inner)
    weight.requires_grad_(True)
    if how == "trained later":
        net(X).sum().backward()
        assert weight.grad is not None
        assert not weight.grad[removed].any()
    else:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    momentum = optimizer.state[weight]["momentum_buffer"]
    assert momentum.any()
    assert not momentum[removed].any()


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"mode": "hard", "ramp": 2}, True),
        ({"mode": "hard", "ramp": 1}, False),
        ({"hold": 1, "ramp": 2}, True),
        ({"hold": 2, "ramp": 2}, False),
        ({"hold": 3, "ramp": 3, "interval": 2}, False),
    ],
)
def test_amounts_of_macs_may_rise_only_before_holding(
    options: dict[str, Any], refused: bool
) -> None:
    net = Block()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(fpgm.RequestError) if refused else nullcontext():
        fpgm.SoftPruner(net, X, macs=0.5, optimizer=optimizer, **options)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    net = Block()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    pruner = fpgm.SoftPruner(net, X, rate=0.5, align=1, hold=1, optimizer=optimizer)
    pruner.step()
    state = pruner.state_dict()
    without = fpgm.SoftPruner(net, X, rate=0.5, align=1)
    before = without.state_dict()
    with pytest.raises(fpgm.RequestError, match="holds units at zero: pass optimizer="):
        without.load_state_dict(state)
    assert without.state_dict() == before
