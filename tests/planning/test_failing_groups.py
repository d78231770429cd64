"""A plan whose compact model would be wrong is repaired: the group to blame is frozen."""

import os

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.planning.budget import Budget
from fpgm.planning.failing_groups import find_failing
from fpgm.planning.options import PlanOptions
from fpgm.planning.planner import Planner
from fpgm.workflow.api import compact_certified, make_plan
from fpgm.workflow.plan_request import PlanRequest


class CountsItsWeights(nn.Module):
    """Reads the number of its filters where no operator shows it: a scale that pruning changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 16, 3, padding=1)
        self.last = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = self.second(x).relu() * len(self.second.weight) ** -0.5
        out: Tensor = self.last(x)
        return out


def test_a_group_that_makes_the_outputs_differ_is_frozen_and_the_rest_is_pruned() -> None:
    torch.manual_seed(0)
    model, x = CountsItsWeights(), torch.randn(2, 3, 8, 8)
    small = fpgm.prune(model, x, rate=0.5, align=1)
    assert small.first.out_channels == 4
    assert small.second.out_channels == 16
    (plan,) = small.fpgm_plans
    reasons = {layer: f.reason for f in plan.frozen for layer in f.layers}
    assert "the compact model would be wrong" in reasons["second"]


def test_the_nearest_model_without_the_count_loses_both() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3)
    )
    small = fpgm.prune(model, torch.randn(2, 3, 8, 8), rate=0.5, align=1)
    assert [small[i].out_channels for i in (0, 2)] == [4, 8]


def test_soft_pruning_repairs_before_it_trains() -> None:
    torch.manual_seed(0)
    model, x = CountsItsWeights(), torch.randn(2, 3, 8, 8)
    pruner = fpgm.SoftPruner(model, x, rate=0.5, align=1)
    pruner.step()
    small = pruner.compact()
    assert [small.first.out_channels, small.second.out_channels] == [4, 16]
    assert pruner.certificate is not None
    assert pruner.certificate.ok


class NewEveryTime(nn.Module):
    """Adds a random number that no seed controls: no two runs agree."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + int.from_bytes(os.urandom(2))
        return out


def test_a_nondeterministic_model_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(fpgm.VerificationError, match="from one run to the next"):
        fpgm.prune(NewEveryTime(), torch.randn(2, 3, 8, 8), rate=0.5, align=1)


class ChecksItsWeights(nn.Module):
    """Refuses weights of zero, which the masked model has."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.checks = False

    def forward(self, x: Tensor) -> Tensor:
        if self.checks and np.any(self.head.weight.detach().numpy() == 0):
            raise ValueError("a weight is zero")
        out: Tensor = self.head(self.body(x).relu())
        return out


def test_the_reason_why_the_masked_model_cannot_run_is_reported() -> None:
    model = ChecksItsWeights()
    request = PlanRequest(rate=0.5, align=1)
    plan, planner = make_plan(model, torch.randn(4, 6), request)
    model.checks = True
    with pytest.raises(
        fpgm.VerificationError, match=r"masked model does not run .*a weight is zero"
    ):
        compact_certified(planner, plan, request)


@pytest.mark.parametrize("guilty", [{0}, {6}, {2, 5}, {0, 3, 6}])
def test_few_parts_that_fail_together_are_detected(guilty: set[int]) -> None:
    assert set(find_failing(range(7), lambda some: guilty <= set(some))) == guilty


def test_many_groups_are_searched_in_few_tries() -> None:
    tries = []

    def fails(some: object) -> bool:
        tries.append(some)
        return 37 in some  # type: ignore[operator]

    assert find_failing(range(100), fails) == [37]
    assert len(tries) < 20


def test_a_plan_is_certified_while_it_is_built_on_request() -> None:
    torch.manual_seed(0)
    model, x = CountsItsWeights(), torch.randn(2, 3, 8, 8)
    planner = Planner(model, x, budget=Budget(rate=0.5), options=PlanOptions(align=1))
    layers = {c.tensor.split(".")[0] for c in planner.build_plan(certified=True).plan.cuts}
    assert layers == {"first", "second"}  # what `second` reads goes, what it makes stays
