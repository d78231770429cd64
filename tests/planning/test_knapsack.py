"""Rates by sensitivity: the cost formula, the knapsack, and plans that keep to a budget."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.models import resnet
from fpgm.planning.budget import Budget
from fpgm.planning.knapsack import Allocation, Floats, Item
from fpgm.planning.options import PlanOptions
from fpgm.planning.planner import Planner
from fpgm.tracing.cost_model import Costs


def planner_of(model: nn.Module, x: Tensor, **options: Any) -> Planner:
    return Planner(model, x, budget=Budget(rate=0.5), options=PlanOptions(align=1, **options))


@pytest.mark.parametrize("residual", ["coupled", "independent"])
@pytest.mark.parametrize("measure", ["macs", "params"])
def test_the_formula_counts_as_the_structure_does(
    residual: Any, measure: Literal["macs", "params"]
) -> None:
    structure = planner_of(resnet(20), torch.randn(1, 3, 32, 32), residual=residual).structure
    costs = Costs(structure, measure)
    random = np.random.default_rng(0)
    for _ in range(10):
        dropped = [int(random.integers(0, len(p.units))) for p in structure.groups]
        removed = torch.cat([p.units[:n] for p, n in zip(structure.groups, dropped, strict=True)])
        counted = getattr(structure, measure)(structure.kept_labels(removed))
        kept = [1 - n / len(p.units) for p, n in zip(structure.groups, dropped, strict=True)]
        assert float(costs.at(np.array(kept))) == pytest.approx(counted, rel=1e-9)


def chain_cost(kept: Floats) -> Floats:
    """Layers in a row: each costs what it reads times what it writes."""
    ends = np.ones((*kept.shape[:-1], 1))
    widths = np.concatenate([ends, kept, ends], axis=-1)
    return np.asarray((widths[..., :-1] * widths[..., 1:]).sum(-1))


def best_by_trying(items: list[Item], goal: float) -> float:
    least = np.inf
    for choice in itertools.product(*(range(len(item.error)) for item in items)):
        kept = np.array([item.kept[o, 0] for item, o in zip(items, choice, strict=True)])
        if float(chain_cost(kept)) <= goal:
            least = min(least, sum(i.error[o] for i, o in zip(items, choice, strict=True)))
    return float(least)


def drawn(seed: int) -> tuple[list[Item], float]:
    """Five layers with rough harms, and a budget."""
    random = np.random.default_rng(seed)
    sizes = random.integers(3, 7, 5)
    items = [
        Item(
            (i,),
            (1 - np.arange(n) / n)[:, None],
            np.concatenate([[0.0], np.cumsum(random.random(n - 1) ** 2 * random.random())]),
        )
        for i, n in enumerate(sizes)
    ]
    return items, float(chain_cost(np.ones(5))) * random.uniform(0.35, 0.95)


@pytest.mark.slow
def test_as_good_as_trying_everything_or_nearly_so() -> None:
    ratios = []
    for seed in range(60):
        items, goal = drawn(seed)
        least = best_by_trying(items, goal)
        results = Allocation(items, chain_cost, len(items)).within(goal)
        if results is None:
            assert least == np.inf
            continue
        kept = np.array([item.kept[o, 0] for item, o in zip(items, results, strict=True)])
        assert float(chain_cost(kept)) <= goal * (1 + 1e-9)
        harm = sum(i.error[o] for i, o in zip(items, results, strict=True))
        ratios.append(1.0 if least == 0 else harm / least)
    assert np.mean(np.array(ratios) < 1 + 1e-9) > 0.9
    assert np.mean(ratios) < 1.02


def pictures(count: int = 4) -> list[Tensor]:
    return [
        torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(i)) for i in range(count)
    ]


@pytest.fixture(scope="module", params=["coupled", "independent"])
def measured(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Any, fpgm.Sensitivity]:
    """A network, an example, a mode for residual streams, and the sensitivity in that mode."""
    torch.manual_seed(0)
    model, x = resnet(20).eval(), torch.randn(1, 3, 32, 32)
    sensed = fpgm.sensitivity(model, x, pictures(), residual=request.param, align=1)
    return model, x, request.param, sensed


@pytest.mark.slow
@pytest.mark.parametrize("budget", [{"macs": 0.4}, {"params": 0.4}, {"rate": 0.3}])
def test_plans_keep_to_their_budget_with_less_output_error(measured: Any, budget: Any) -> None:
    model, x, residual, sensed = measured
    options: dict[str, Any] = {"residual": residual, "align": 1, **budget}
    uniform = fpgm.plan(model, x, **options)
    chosen = fpgm.plan(model, x, allocate=sensed, **options)
    measure = "params_after" if "params" in budget else "macs_after"
    assert getattr(chosen, measure) <= getattr(uniform, measure) * 1.005
    assert getattr(chosen, measure) >= getattr(uniform, measure) * 0.98

    def harm(plan: fpgm.Plan) -> float:
        curves = {group.name: group.harm for group in sensed.groups}
        return sum(curves[g.name][g.units - g.kept] for g in plan.groups)

    assert harm(chosen) < 0.9 * harm(uniform)
    assert fpgm.verify(model, chosen, x).ok
