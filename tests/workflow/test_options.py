"""One set of options from the public functions to the planner, and what a misspelt one is told."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

import fpgm
from fpgm.planning.budget import Budget
from fpgm.planning.options import PlanKeywords, PlanOptions
from fpgm.planning.planner import Planner
from fpgm.training.recipe import PruneConfig
from fpgm.workflow.plan_request import PlanRequest

X = torch.zeros(1, 3, 8, 8)


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))


def keywords(function: Any) -> dict[str, Any]:
    """Defaults of a function's keyword-only options."""
    results = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in results if p.kind is p.KEYWORD_ONLY}


def defaults(kind: Any) -> dict[str, Any]:
    return {
        f.name: f.default if f.default is not MISSING else f.default_factory()
        for f in fields(kind)
        if f.default is not MISSING or f.default_factory is not MISSING
    }


def test_plan_and_its_request_have_the_same_options() -> None:
    assert keywords(fpgm.plan) == defaults(PlanRequest) == keywords(fpgm.prune)


def test_keywords_are_the_fields_of_the_options() -> None:
    assert get_type_hints(PlanKeywords) == get_type_hints(PlanOptions)


def test_types_of_the_public_functions_can_be_looked_up() -> None:
    assert get_type_hints(fpgm.prune)["return"] is nn.Module
    for function in (fpgm.sensitivity, fpgm.SoftPruner.__init__):
        assert PlanKeywords in get_args(get_type_hints(function)["options"])


def test_a_recipe_prunes_by_default_as_a_pruner_does() -> None:
    pruner = keywords(fpgm.SoftPruner) | defaults(PlanOptions)
    recipe = defaults(PruneConfig)
    assert {name: pruner[name] or value for name, value in recipe.items()} == recipe
    assert pruner.keys() - recipe.keys() == {"optimizer", "keep_outputs"}


def test_every_option_is_explained() -> None:
    text = inspect.getdoc(fpgm.plan)
    assert text is not None
    explained = text.partition("Args:")[2]
    for name in inspect.signature(fpgm.plan).parameters:
        assert f"\n    {name}: " in explained, name


@pytest.mark.parametrize("function", [fpgm.plan, fpgm.prune, fpgm.SoftPruner])
@pytest.mark.parametrize("kind", [fpgm.RequestError, TypeError])
def test_a_misspelled_option_gets_a_suggestion(function: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        function(net(), X, rate=0.5, criterian="l2")
    name = function.__name__
    assert str(caught.value) == f"{name}() has no option 'criterian' (did you mean 'criterion'?)."
    function(net(), X, rate=0.5, criterion="l2", align=1)


def test_sensitivity_reports_it_too() -> None:
    with pytest.raises(fpgm.RequestError, match=r"no option 'imagse' \(did you mean 'images'\?\)"):
        fpgm.sensitivity(net(), X, [X], imagse=4)


def test_an_option_like_none_points_to_the_help() -> None:
    with pytest.raises(fpgm.RequestError) as caught:
        fpgm.plan(net(), X, rate=0.5, zzz=1)
    assert str(caught.value) == "plan() has no option 'zzz': see help(fpgm.plan)."


def test_a_measured_width_needs_a_plan() -> None:
    with pytest.raises(fpgm.RequestError, match=r"align='auto' is measured by fpgm\.plan"):
        fpgm.SoftPruner(net(), X, rate=0.5, align="auto")


def test_options_reach_the_planner() -> None:
    options = PlanOptions("l1", "l1", "independent", (), 4, "paper", 2, seed=3)
    planner = Planner(net(), X, budget=Budget(rate=0.5), options=options)
    assert planner.requested == {
        "criterion": "l1", "distance": "l1", "residual": "independent", "align": 4,
        "rounding": "paper",
    }  # fmt: skip
    assert (planner.rounder.align, planner.rounder.min_channels, planner.seed) == (4, 2, 3)
