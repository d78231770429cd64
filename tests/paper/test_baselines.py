"""Every compared method: what it chooses in cases worked out by hand, and that all run anywhere."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.helpers.baseline_tasks import Two, data, task_of
from tests.helpers.recoverable import Streams, stir
from torch import Tensor, nn

import fpgm
from fpgm.paper.baselines import comparison as cmp
from fpgm.paper.baselines.registry import METHODS, SgdSchedule, Task, get_method
from fpgm.paper.baselines.short_training import train_

PRUNING = [name for name in METHODS if name != "mil"]


@pytest.fixture
def two() -> Two:
    return stir(Two()).eval()  # type: ignore[return-value]


class TestAll:
    @pytest.mark.parametrize("residual", ["coupled", "independent"])
    @pytest.mark.parametrize("name", PRUNING)
    def test_a_certified_smaller_model_of_the_requested_size(
        self, name: str, residual: Any
    ) -> None:
        """And the caller's model stays as it was."""
        model = stir(Streams()).eval()
        before = copy.deepcopy(model.state_dict())
        result = METHODS[name].prune(task_of(model, residual=residual))
        assert result.plan is not None
        assert result.macs_removed == pytest.approx(0.4, abs=0.06)
        trained = model if result.trained_model is None else result.trained_model
        assert fpgm.verify(trained, result.plan, data()[0][0][:2]).ok
        assert result.plan.asked["criterion"]
        x = data()[0][0]
        assert result.model.eval()(x).shape == model(x).shape
        assert all(torch.equal(before[key], v) for key, v in model.state_dict().items())
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    @pytest.mark.parametrize("name", PRUNING)
    def test_in_train_mode_and_frozen(self, name: str) -> None:
        model = stir(Streams()).train().requires_grad_(False)
        before = copy.deepcopy(model.state_dict())
        METHODS[name].prune(task_of(model, before_pruning=SgdSchedule(2)))
        assert model.training
        assert all(torch.equal(before[key], v) for key, v in model.state_dict().items())

    @pytest.mark.parametrize("name", [n for n in PRUNING if METHODS[n].needs != "weights"])
    def test_after_a_loader_that_fails(self, name: str) -> None:
        """Nothing is left hanging on the model."""

        def broken() -> Iterator[Any]:
            yield data()[0]
            raise OSError("the disk is gone")

        class Broken:
            def __iter__(self) -> Iterator[Any]:
                return broken()

        model = stir(Streams()).eval()
        task = Task(
            model, data()[0][0][:1], 0.4, loader=Broken(), images=64, before_pruning=SgdSchedule(3)
        )
        with pytest.raises(OSError, match="the disk is gone"):
            METHODS[name].prune(task)
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    def test_each_says_where_it_comes_from(self) -> None:
        for method in METHODS.values():
            assert method.summary.endswith(".")
            assert method.cite or method.name in ("l2", "random")

    def test_a_name_that_is_invalid(self) -> None:
        with pytest.raises(
            fpgm.RequestError, match=r"Unknown method 'thinnet' \(did you mean 'thinet'"
        ):
            get_method("thinnet")

    def test_batches_without_classes(self, two: Two) -> None:
        task = Task(two, data()[0][0][:1], 0.4, loader=[x for x, _ in data()])
        with pytest.raises(fpgm.RequestError, match="batches without labels"):
            METHODS["taylor"].prune(task)


class TestTraining:
    def test_hooks_are_called_with_the_rate(self, two: Two) -> None:
        rates: list[float] = []
        task = task_of(two)
        net = task.trainable_copy()
        train_(net, task, SgdSchedule(4, lr=0.1), after_step=rates.append)
        assert rates == pytest.approx([0.1, 0.0853553, 0.05, 0.0146447], rel=1e-4)
        assert not net.training
        assert all(p.grad is None for p in net.parameters())

    def test_training_lowers_the_loss(self) -> None:
        model = stir(Two()).eval()
        batches = data(2)
        task = Task(model, batches[0][0][:1], 0.4, loader=batches)

        def loss(net: nn.Module) -> float:
            with torch.no_grad():
                return sum(float(nn.functional.cross_entropy(net(x), y)) for x, y in batches)

        net = task.trainable_copy()
        train_(net, task, SgdSchedule(40, lr=0.05))
        assert loss(net) < loss(model)

    def test_a_loss_that_is_no_number(self, two: Two) -> None:
        with pytest.raises(fpgm.ModelError, match=r"The loss is .* lower lr"):
            train_(two, task_of(two), SgdSchedule(50, lr=1e9))


class TestComparison:
    def accuracy(self, model: nn.Module) -> float:
        x, _ = data()[0]
        with torch.no_grad():
            return float(model(x).mean().sigmoid())

    def test_all_get_the_same_training(self) -> None:
        model = stir(Streams()).eval()
        task = task_of(model, before_pruning=SgdSchedule(3))
        rows = [cmp.compare(METHODS[name], task, SgdSchedule(5), self.accuracy).row
                for name in ("fpgm", "slimming")]  # fmt: skip
        assert [row.steps for row in rows] == [5, 5]
        alone = cmp.compare(METHODS["slimming"], task, SgdSchedule(5), self.accuracy).row
        assert (alone.once, alone.tuned) == (rows[1].once, rows[1].tuned)
        assert all(row.tuned is not None and row.recovered is not None for row in rows)

    def test_without_training_there_is_none(self) -> None:
        model = stir(Streams()).eval()
        result = cmp.compare(METHODS["fpgm"], task_of(model), SgdSchedule(0), self.accuracy)
        assert (result.row.tuned, result.row.steps) == (None, 0)
        trains = cmp.compare(METHODS["slimming"], task_of(model), SgdSchedule(0), self.accuracy)
        assert (trains.row.tuned, trains.row.steps) == (None, 0)
        with torch.no_grad():
            result.best_model(data()[0][0])

    @pytest.mark.parametrize("shares", [(0.1, 0.9, 0.5), (0.1, 0.5, 0.9), (0.9, 0.5, 0.1)])
    def test_the_most_accurate_is_kept(self, shares: tuple[float, ...], two: Two) -> None:
        """As left, recovered, trained on: in the order in which they are counted."""
        recorded: list[nn.Module] = []

        def counted(net: nn.Module) -> float:
            recorded.append(net)
            return shares[len(recorded) - 1]

        result = cmp.compare(METHODS["fpgm"], task_of(two), SgdSchedule(1), counted)
        assert (result.row.once, result.row.recovered, result.row.tuned) == shares
        assert result.best_model is recorded[shares.index(0.9)]

    def test_recovery_starts_from_the_original(self) -> None:
        """What soft pruning has zeroed cannot be learnt from."""
        model = stir(Streams()).eval()
        x = data()[0][0]

        def nearness(net: nn.Module) -> float:
            with torch.no_grad():
                return -float((net(x) - model(x)).square().mean())

        task = task_of(model, before_pruning=SgdSchedule(5, lr=0.1), images=64)
        row = cmp.compare(METHODS["sfp"], task, SgdSchedule(5, lr=0.1), nearness).row
        assert row.recovered is not None
        assert row.recovered > row.once

    def test_seeds_change_what_is_left_to_chance(self) -> None:
        model = stir(Streams()).eval()
        plans = [cmp.compare(METHODS["random"], task_of(model, seed=seed), SgdSchedule(0),
                             self.accuracy).plan for seed in (0, 1)]  # fmt: skip
        assert plans[0] is not None
        assert plans[1] is not None
        assert plans[0].cuts != plans[1].cuts


def test_scores_that_a_layer_lacks() -> None:
    from fpgm.planning.precomputed_scores import PrecomputedScores

    model = Two().eval()
    with pytest.raises(fpgm.RequestError, match="criterion 'mine': layer 'a' has no scores"):
        fpgm.plan(model, torch.zeros(1, 3, 6, 6), rate=0.5, criterion=PrecomputedScores("mine", {}))
    scores = PrecomputedScores("mine", {"a": torch.arange(8.0).flip(0), "b": torch.zeros(6)})
    plan = fpgm.plan(model, torch.zeros(1, 3, 6, 6), rate=0.5, align=1, criterion=scores)
    assert plan.asked["criterion"] == "mine"
    assert plan.cuts[0].keep == (0, 1, 2, 3)


@pytest.mark.parametrize("name", ["sfp", "taylor", "pfec-sensitivity"])
def test_what_is_no_classifier_is_named(name: str) -> None:
    class Told(Two):
        def forward(self, x: Tensor) -> Any:
            return {"out": super().forward(x)}

    with pytest.raises(fpgm.ModelError, match=r"returns a dict: .* one tensor of class"):
        METHODS[name].prune(task_of(Told().eval()))
