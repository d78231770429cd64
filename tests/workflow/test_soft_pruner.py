"""Algorithm 1: what is zeroed and when, what may come back, and what is left at the end."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.soft_pruning import Block, X, train, zeroed_filters
from torch import Tensor, nn

import fpgm
from fpgm.criteria import lowest
from fpgm.models import digits, resnet
from fpgm.workflow.prune_schedule import PruneSchedule


def test_a_step_zeroes_the_filters_with_the_smallest_scores_of_the_weights_as_they_are() -> None:
    torch.manual_seed(0)
    net = Block()
    pruner = fpgm.SoftPruner(net, X, rate=0.5, align=1)
    for _ in range(2):
        with torch.no_grad():
            net.inner.weight.normal_()
        wanted = lowest(fpgm.criteria.fpgm(net.inner.weight.flatten(1)), 12)
        report = pruner.step()
        assert zeroed_filters(net.inner) == wanted
    assert (report.epoch, report.units, report.zeroed) == (2, 40, 20)


def test_a_zeroed_unit_is_silent_in_eval_and_its_norm_scale_is_left_to_the_optimizer() -> None:
    net = Block()
    train(net, torch.optim.SGD(net.parameters(), 0.1), 3)
    scale = net.bn2.weight.detach().clone()
    fpgm.SoftPruner(net, X, rate=0.5, align=1).step()
    net.eval()
    recorded = net.bn2(net.inner(torch.randn(2, 16, 5, 5)))
    dropped = zeroed_filters(net.inner)
    assert not recorded[:, dropped].any()
    assert torch.equal(net.bn2.weight.detach(), scale)


@pytest.mark.parametrize("momentum", ["momentum_buffer", "exp_avg"])
def test_the_momentum_of_a_zeroed_unit_is_zeroed_with_it(momentum: str) -> None:
    """Behind a ReLU a unit at zero sees no gradient: only momentum could bring it back."""
    for given in (True, False):
        torch.manual_seed(0)
        net = Block()
        name = "sgd" if momentum == "momentum_buffer" else "adam"
        optimizer = OPTIMIZERS[name](net.parameters())
        train(net, optimizer, 3)
        pruner = fpgm.SoftPruner(net, X, rate=0.5, align=1, optimizer=optimizer if given else None)
        pruner.step()
        dropped = zeroed_filters(net.inner)
        assert bool(optimizer.state[net.inner.weight][momentum][dropped].any()) != given
        train(net, optimizer, 3)
        assert zeroed_filters(net.inner) == (dropped if given else [])


def test_soft_units_come_back_by_gradient_and_are_counted_hard_ones_never() -> None:
    for mode in ("soft", "hard"):
        torch.manual_seed(0)
        net = Block(nn.functional.silu)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-2)
        pruner = fpgm.SoftPruner(net, X, rate=0.5, align=1, mode=mode, optimizer=optimizer)
        train(net, optimizer, 3)
        first = pruner.step()
        assert (first.regrown, first.returned, first.changed) == (0, 0, first.zeroed)
        dropped = zeroed_filters(net.inner)
        train(net, optimizer, 5)
        assert bool(zeroed_filters(net.inner)) == (mode == "hard")
        second = pruner.step()
        back = len(set(dropped) - set(zeroed_filters(net.inner)))
        if mode == "hard":
            assert (second.regrown, second.returned, second.changed) == (0, 0, 0)
            assert zeroed_filters(net.inner) == dropped
        else:
            assert second.regrown > 0
            assert second.returned >= back
            assert second.changed == 2 * second.returned


@pytest.mark.parametrize("mode", ["soft", "hard"])
@pytest.mark.parametrize("activation", [torch.relu, torch.sigmoid])
def test_masked_equals_compact_at_the_end(mode: Any, activation: Any) -> None:
    torch.manual_seed(0)
    net = Block(activation).double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    pruner = fpgm.SoftPruner(net, X.double(), rate=0.4, mode=mode, optimizer=optimizer, align=1)
    for _ in range(3):
        train(net, optimizer, 4)
        pruner.step()
    train(net, optimizer, 2)
    small = pruner.compact()
    assert small.inner.out_channels == 14
    net.eval(), small.eval()
    with torch.no_grad():
        assert torch.allclose(net(X.double()), small(X.double()), rtol=0, atol=1e-12)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_without_a_jump(name: str) -> None:
    """The next 20 steps of the compact model are those of the masked one, momentum included."""
    torch.manual_seed(0)
    net = Block().double()
    optimizer = OPTIMIZERS[name](net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    pruner = fpgm.SoftPruner(net, X.double(), rate=0.4, align=1, mode="hard", optimizer=optimizer)
    train(net, optimizer, 5)
    pruner.step()
    train(net, optimizer, 5)
    small, moved = copy.deepcopy((net, optimizer))
    assert pruner.plan is not None
    small = fpgm.compact(small, pruner.plan, optimizer=moved)
    masked, cut = train(net, optimizer, 20), train(small, moved, 20)
    assert masked == pytest.approx(cut, rel=1e-9)
    assert masked[0] != pytest.approx(masked[-1], rel=1e-3)
    expected = fpgm.compact(net, pruner.plan).state_dict()
    for key, tensor in small.state_dict().items():
        if "running_var" not in key:
            assert torch.allclose(tensor, expected[key], rtol=1e-7, atol=1e-10), key
    scheduler.step()


def test_an_averaged_copy_is_cut_by_the_same_plan() -> None:
    torch.manual_seed(0)
    net = Block()
    average = torch.optim.swa_utils.AveragedModel(net)
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    average.module = fpgm.compact(average.module, plan)
    small = fpgm.compact(net, plan)
    average.update_parameters(small)
    assert torch.equal(average.module.inner.weight, small.inner.weight)


def test_a_foreign_optimizer_is_refused_and_unchanged() -> None:
    net, other = Block(), nn.Conv2d(3, 4, 1)
    optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], 0.1)
    before = [p for group in optimizer.param_groups for p in group["params"]]
    plan = fpgm.plan(net, X, rate=0.5)
    with pytest.raises(fpgm.RequestError) as error:
        fpgm.compact(net, plan, optimizer=optimizer)
    assert str(error.value) == (
        "The optimizer holds a parameter of shape [4, 3, 1, 1] that is not the model's: "
        "give the optimizer of this model."
    )
    assert all(a is b for a, b in zip(before, optimizer.param_groups[0]["params"], strict=True))


def test_a_saved_state_resumes_as_if_never_stopped() -> None:
    def run(stop: bool) -> tuple[list[fpgm.workflow.soft_pruner.Step], Tensor]:
        torch.manual_seed(0)
        net = Block()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        options: dict[str, Any] = {"rate": 0.5, "align": 1, "ramp": 3, "mode": "hard"}
        pruner = fpgm.SoftPruner(net, X, **options, optimizer=optimizer)
        steps = []
        for epoch in range(4):
            train(net, optimizer, 3)
            steps.append(pruner.step())
            if stop and epoch == 1:
                saved = copy.deepcopy(
                    (net.state_dict(), optimizer.state_dict(), pruner.state_dict())
                )
                net = Block()
                optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
                net.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                pruner = fpgm.SoftPruner(net, X, **options, optimizer=optimizer)
                pruner.load_state_dict(saved[2])
        return steps, net.inner.weight.detach()

    complete, weight = run(stop=False)
    parts, again = run(stop=True)
    assert complete == parts
    assert [step.zeroed for step in complete] == sorted(step.zeroed for step in complete)
    assert torch.equal(weight, again)


def test_a_state_of_the_other_mode_is_refused() -> None:
    net = Block()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    state = fpgm.SoftPruner(net, X, rate=0.5).state_dict()
    hard = fpgm.SoftPruner(net, X, rate=0.5, mode="hard", optimizer=optimizer)
    with pytest.raises(fpgm.RequestError, match="has mode='soft', but this pruner has mode='hard'"):
        hard.load_state_dict(state)


@pytest.mark.parametrize("criterion", ["fpgm", "exact", "l1", "l2", "bn", "random", "mix"])
def test_every_criterion_prunes_while_training(criterion: str) -> None:
    net = digits()
    x = torch.randn(4, 1, 8, 8)
    pruner = fpgm.SoftPruner(net, x, rate=0.4, criterion=criterion)
    assert pruner.step().zeroed > 0
    assert pruner.compact()(x).shape == (4, 10)


@pytest.mark.slow
def test_the_papers_residual_policy_and_a_budget_in_macs() -> None:
    net = resnet(20)
    x = torch.randn(2, 3, 32, 32)
    pruner = fpgm.SoftPruner(net, x, rate=0.4, residual="independent", rounding="paper")
    pruner.step()
    assert len(zeroed_filters(net.layer1[0].conv1)) == 6  # int(16 · 0.4)
    pruner = fpgm.SoftPruner(resnet(20), x, macs=0.5, ramp=2)
    half, full = pruner.step(), pruner.step()
    assert pruner.plan is not None
    assert half.zeroed < full.zeroed
    assert pruner.plan.macs_removed == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, [1, 1, 1, 1]),
        ({"interval": 2}, [None, 1, None, 1]),
        ({"start": 2, "end": 3}, [None, 1, 1, None]),
        ({"ramp": 2}, [0.5, 1, 1, 1]),
    ],
)
def test_schedules(options: dict[str, int], shares: list[float | None]) -> None:
    assert [PruneSchedule(**options).fraction(epoch) for epoch in range(1, 5)] == shares


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 0}, "interval is 0: give an integer of at least 1."),
        ({"start": 0}, "start is 0: give an integer of at least 1."),
        ({"ramp": -1}, "ramp is -1: give an integer of at least 0."),
        ({"start": 3, "end": 2}, "end is 2: give an integer of at least start (3), or None."),
        ({"mode": "semi"}, "mode is 'semi': give 'soft' or 'hard'."),
        ({"mode": "hard"}, "mode='hard' undoes steps of the optimizer: pass optimizer=."),
        ({"hold": 2}, "hold=2 undoes steps of the optimizer: pass optimizer=."),
        ({"hold": 0}, "hold is 0: give an integer of at least 1, or None."),
        ({"rate": 1.5}, "rate is 1.5: give a fraction of at least 0 and below 1."),
    ],
)
def test_bad_requests(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fpgm.RequestError) as error:
        fpgm.SoftPruner(Block(), X, **{"rate": 0.5, **options})
    assert str(error.value) == message


def test_reports_are_readable() -> None:
    pruner = fpgm.SoftPruner(Block(), X, rate=0.5, align=1, start=2)
    assert str(pruner.step()) == "epoch 1: not pruned"
    assert str(pruner.step()) == (
        "epoch 2: 20 of 40 units zeroed (20 added or removed), 0 had regrown, 0 released"
    )


@pytest.mark.parametrize("fused", [False, True])
def test_the_state_moves_in_the_layout_of_its_parameter(fused: bool) -> None:
    """Fused optimizers pair weights and state by their place in memory."""
    torch.manual_seed(0)
    net = Block().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, fused=fused)
    train(net, optimizer, 3)
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    small = fpgm.compact(net, plan, optimizer=optimizer)
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].stride() == parameter.stride()
    assert isinstance(train(small, optimizer, 2)[-1], float)


def test_nothing_happens_when_the_end_is_refused() -> None:
    net, other = Block(), Block()
    pruner = fpgm.SoftPruner(net, X, rate=0.5)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(fpgm.RequestError, match="not the model's"):
        pruner.compact(optimizer=torch.optim.SGD(other.parameters(), 0.1))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_requests_that_cannot_hold() -> None:
    net = Block()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(fpgm.RequestError, match="with a ramp needs rate="):
        fpgm.SoftPruner(net, X, macs=0.5, ramp=3, mode="hard", optimizer=optimizer)
    with pytest.raises(fpgm.RequestError, match="holds no parameter of the model"):
        fpgm.SoftPruner(Block(), X, rate=0.5, mode="hard", optimizer=optimizer)
    with pytest.raises(fpgm.RequestError, match="This would remove no unit"):
        fpgm.SoftPruner(net, X, rate=0.001, align=1).compact()
    wide = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 3))
    narrow = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3))
    saved = fpgm.SoftPruner(wide, X, rate=0.5)
    saved.step()
    with pytest.raises(fpgm.PlanError, match="another model"):
        fpgm.SoftPruner(narrow, X, rate=0.5).load_state_dict(saved.state_dict())


class Fixed(nn.Module):
    """Two layers, of which the first has a width written in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).reshape(-1, 8, 12, 12).relu()
        out: torch.Tensor = self.head(self.b(x).relu())
        return out


def test_frozen_groups_stay_frozen_after_resuming() -> None:
    first = fpgm.SoftPruner(Fixed(), X, rate=0.5, align=1)
    assert first.state_dict()["frozen"] == []
    first.step()
    state = json.loads(json.dumps(first.state_dict()))
    assert len(state["frozen"]) == 8
    again = fpgm.SoftPruner(first.model, X, rate=0.5, align=1)
    again.load_state_dict(state)
    assert [pool.name for pool in again.planner.structure.groups] == ["b"]
    assert again.state_dict() == first.state_dict()
