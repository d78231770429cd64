"""What is said about filters, on layers whose answers can be worked out by hand."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.shell import refused, run
from torch import Tensor, nn

import fpgm
from fpgm.models import resnet
from fpgm.report.analysis.api import analyze, analyze_planner
from fpgm.report.analysis.redundancy import GramMatrix
from fpgm.report.analysis.result import LARGE_MINIMUM, SMALL_DEVIATION, LayerAnalysis, verdict
from fpgm.report.analysis.similar_channels import layer_output, most_correlated, removed_filters
from fpgm.workflow.api import make_plan
from fpgm.workflow.plan_request import PlanRequest

X = torch.zeros(1, 1, 1, 1)


def layer_of(filters: list[list[float]], rate: float = 0.5) -> LayerAnalysis:
    """The analysis of a layer with these filters, one row each."""
    rows = torch.tensor(filters)
    conv = nn.Conv2d(rows.shape[1], len(rows), 1, bias=False)
    with torch.no_grad():
        conv.weight.copy_(rows[:, :, None, None])
    net = nn.Sequential(conv, nn.Conv2d(len(rows), 1, 1))
    return analyze(net, torch.zeros(1, rows.shape[1], 1, 1), rate=rate).layers[0]


def net_of(*layers: nn.Module) -> Callable[[], tuple[nn.Sequential, list[str]]]:
    """Some layers, a last one that stays, and the paths of those with filters to lose."""

    def built() -> tuple[nn.Sequential, list[str]]:
        result = [copy.deepcopy(layer) for layer in layers]
        paths = [str(n) for n, layer in enumerate(result) if hasattr(layer, "out_channels")]
        last = result[int(paths[-1])].out_channels
        return nn.Sequential(*result, nn.Conv2d(last, 2, 1)), paths  # type: ignore[arg-type]

    return built


BUILT = {
    "plain": net_of(nn.Conv2d(3, 8, 3)),
    "depthwise": net_of(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8)),
    "depthwise, two each": net_of(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 3, groups=8)),
    "weight norm": net_of(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3))),
    "grouped": net_of(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 3, groups=2)),
    "transposed": net_of(nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 12, 3)),
    "transposed in groups": net_of(nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 12, 3, groups=2)),
    "whole groups": net_of(
        nn.Conv2d(3, 8, 1), nn.GroupNorm(4, 8), nn.ConvTranspose2d(8, 12, 3, groups=4)
    ),
    "transposed depthwise": net_of(nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 8, 3, groups=8)),
}


class TestLayer:
    def test_norms_in_order(self) -> None:
        assert layer_of([[3.0, 4.0], [0.0, 1.0]]).norms == (5.0, 1.0)

    def test_the_two_requirements(self) -> None:
        result = layer_of([[1.0, 0.0], [3.0, 0.0]])
        assert result.deviation == pytest.approx(1 / 2)  # one on each side of a mean of two
        assert result.least == pytest.approx(1 / 2)

    def test_distances_to_the_median_and_to_the_nearest(self) -> None:
        square = [[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [1.0, 1.0]]
        result = layer_of(square)
        assert result.to_median == pytest.approx([math.sqrt(2)] * 4 + [0], abs=1e-5)
        assert result.to_nearest == pytest.approx([math.sqrt(2)] * 5, rel=1e-5)

    def test_the_map_keeps_distances_to_the_median_where_it_shows_all(self) -> None:
        """Filters of two numbers lie on a plane anyway."""
        result = layer_of([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [1.0, 1.0]])
        lengths = [math.hypot(*place) for place in result.places]
        assert lengths == pytest.approx(result.to_median, rel=1e-4, abs=1e-5)

    def test_filters_of_one_number_lie_on_a_line(self) -> None:
        assert all(place[1] == 0 for place in layer_of([[1.0], [2.0], [4.0]]).places)

    def test_criteria_that_disagree(self) -> None:
        """Two short filters far apart, two long ones at one place: norms and medians differ."""
        result = layer_of([[-1.0, 0.0], [1.0, 0.0], [0.0, 5.0], [0.0, 5.1]])
        assert result.overlap["l1 and l2"] == 1
        assert result.overlap["fpgm and l2"] < 1

    def test_shares_of_the_cost_add_up(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 4, 3, bias=False))
        layers = analyze(net, torch.zeros(1, 3, 9, 9)).layers
        assert sum(item.macs_share for item in layers) == pytest.approx(1)
        assert sum(item.params_share for item in layers) == pytest.approx(1)

    def test_zeros_have_no_part_that_divides(self) -> None:
        result = layer_of([[0.0, 0.0], [0.0, 0.0]])
        assert (result.deviation, result.least, result.effective_rank) == (0, 0, 1)
        assert result.nearest_ratio == 0

    def test_depthwise_filters_are_filters(self) -> None:
        net = nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.Conv2d(8, 2, 1)
        )
        analysis = analyze(net, torch.zeros(1, 3, 4, 4))
        assert [(item.layer, item.filters) for item in analysis.layers] == [
            ("0", 8),
            ("1", 8),
            ("2", 2),
        ]
        assert analysis.layers[1].writes == ("0",)

    def test_a_parametrised_layer_is_named_and_placed_as_the_module(self) -> None:
        first = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 1))
        analysis = analyze(nn.Sequential(first, nn.Conv2d(8, 2, 1)), torch.zeros(1, 3, 4, 4))
        assert [item.layer for item in analysis.layers] == ["0", "1"]
        assert analysis.layers[0].macs_share == pytest.approx(24 / 40)

    def test_groups_are_those_of_a_plan_with_the_same_choices(self) -> None:
        x = torch.zeros(1, 3, 32, 32)
        model = resnet(20)
        for choices in ({}, {"residual": "independent"}, {"ignore": ["layer2.*"]}):
            groups = fpgm.plan(model, x, rate=0.4, **choices).groups
            analysis = analyze(model, x, **choices)
            assert analysis.groups == tuple(group.name for group in groups)
            for item in analysis.layers:
                mine = tuple(n for n, group in enumerate(groups) if item.layer in group.layers)
                assert item.write_groups == mine

    def test_weights_that_are_no_numbers(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1))
        for value in (math.nan, math.inf):
            nn.init.constant_(net[0].weight, value)
            with pytest.raises(fpgm.ModelError, match="Layer '0' has NaN or infinite weights"):
                analyze(net, torch.zeros(1, 3, 4, 4))

    def test_in_a_hurry_large_layers_are_not_compared(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Comparing takes as many products as filters × weights: 8 · 24 and 4 · 32 here."""
        monkeypatch.setattr("fpgm.report.analysis.api.MAX_QUICK_PRODUCTS", 8 * 24 - 1)
        net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1))
        _, planner = make_plan(net, torch.zeros(1, 3, 4, 4), PlanRequest(rate=0.5))
        first, second = analyze_planner(planner, quick=True).layers
        assert (len(first.norms), first.places, first.nearest_ratio) == (8, (), None)
        assert len(second.places) == 4
        assert len(analyze_planner(planner).layers[0].places) == 8

    def test_the_model_stays_as_it_was(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)).train()
        before = {name: value.clone() for name, value in net.state_dict().items()}
        analyze(net, torch.randn(2, 3, 8, 8))
        assert net.training
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())

    def test_a_rate_that_is_invalid(self) -> None:
        with pytest.raises(fpgm.RequestError, match="rate is 2"):
            analyze(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 1)), X, rate=2)


class TestVerdict:
    def test_each_requirement_by_itself(self) -> None:
        assert verdict(SMALL_DEVIATION, LARGE_MINIMUM).endswith("both requirements hold")
        assert verdict(SMALL_DEVIATION - 0.01, LARGE_MINIMUM).startswith("small deviation")
        assert verdict(SMALL_DEVIATION, LARGE_MINIMUM + 0.01).startswith("large minimum")

    def test_layers_are_counted_by_it(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 3))
        analysis = analyze(net, torch.zeros(1, 3, 9, 9))
        assert sum(len(layers) for layers in analysis.verdicts().values()) == 3


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(2, 9), length=st.integers(1, 9))
def test_nearest_and_rank_by_their_definitions(seed: int, count: int, length: int) -> None:
    rows = torch.randn(count, length, generator=torch.Generator().manual_seed(seed)).double()
    wanted = [
        min(float((a - b).norm()) for j, b in enumerate(rows) if i != j) for i, a in enumerate(rows)
    ]
    assert GramMatrix(rows).nearest_distances().tolist() == pytest.approx(wanted)
    rank = GramMatrix(rows).effective_rank()
    assert 1 - 1e-9 <= rank <= min(count, length) + 1e-9
    assert GramMatrix(7 * rows).effective_rank() == pytest.approx(rank)
    assert GramMatrix(rows - rows[0]).effective_rank(around=rows[0]) == pytest.approx(
        rank, rel=1e-5
    )
    fractions = torch.linalg.svdvals(rows) / torch.linalg.svdvals(rows).sum()
    assert rank == pytest.approx(float((-(fractions * fractions.log()).sum()).exp()))
    left, sizes, _ = torch.linalg.svd(rows, full_matrices=False)
    wanted_places = torch.nn.functional.pad(left * sizes, (0, 1))[:, :2]
    assert torch.allclose(
        GramMatrix(rows).principal_coordinates().abs(), wanted_places.abs(), atol=1e-6
    )


def test_many_filters_at_once_and_in_parts() -> None:
    rows = torch.randn(1100, 3).double()
    result = GramMatrix(rows).nearest_distances()
    assert torch.allclose(result[:5], nearest_by_hand(rows)[:5])
    assert torch.allclose(result[-5:], nearest_by_hand(rows)[-5:])


def nearest_by_hand(rows: Tensor) -> Tensor:
    distances = (rows[:, None] - rows).norm(dim=2)
    distances.fill_diagonal_(torch.inf)
    return distances.min(dim=1).values


class TestAlike:
    def test_a_copy_turned_around_is_as_good(self) -> None:
        a, b = np.array([[0.0, 1.0], [2.0, 3.0]]), np.array([[1.0, 0.0], [0.0, 0.0]])
        assert most_correlated(np.stack([a, b, 5 - 2 * a]), [0]) == [(0, 2, -1.0)]

    def test_a_channel_that_shows_nothing(self) -> None:
        maps = np.stack([np.zeros((2, 2)), np.eye(2)])
        assert most_correlated(maps, [0]) == [(0, 1, 0.0)]

    def test_all_filters_removed(self) -> None:
        assert most_correlated(np.ones((2, 2, 2)), [0, 1]) == []

    def test_what_a_layer_gives_out(self) -> None:
        net = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.ReLU(), nn.Conv2d(2, 1, 1))
        x = torch.randn(3, 1, 4, 4)
        result = layer_output(net, "1", x)
        assert np.allclose(result, torch.relu(net[0](x))[0].detach().numpy())

    def test_modules_without_feature_maps(self) -> None:
        net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        with pytest.raises(fpgm.ModelError, match="The output of '1' is not"):
            layer_output(net, "1", torch.zeros(1, 1, 2, 2))
        with pytest.raises(fpgm.RequestError, match="no module '7'"):
            layer_output(net, "7", torch.zeros(1, 1, 2, 2))

    @pytest.mark.parametrize("name", list(BUILT))
    def test_filters_that_a_plan_removes(self, name: str) -> None:
        """Against the compact model: its biases are those of the filters that stay."""
        net, layers = BUILT[name]()
        x = torch.randn(1, 3, 8, 8)
        plan = fpgm.plan(net, x, rate=0.5, align=1)
        small = fpgm.compact(net, plan)
        for layer in layers:
            removed = removed_filters(plan, layer)
            before, after = net.get_submodule(layer), small.get_submodule(layer)
            assert len(removed) == before.out_channels - after.out_channels > 0
            kept = [n for n in range(before.out_channels) if n not in removed]
            assert torch.equal(after.bias, before.bias[kept])
        assert removed_filters(plan, str(len(net) - 1)) == []


class TestCommand:
    def test_json(self) -> None:
        out, _ = run("analyze", "resnet20", "--weights", "shipped", "--json")
        document = json.loads(out)
        assert document["rate"] == 0.4
        first = document["layers"][0]
        assert (first["layer"], len(first["norms"])) == ("conv1", 16)
        assert (first["writes"], first["reads"]) == (["conv1"], [])
        assert document["layers"][2]["reads"] == ["layer1.0.conv1"]
        assert first["verdict"].startswith("large minimum norm")

    def test_table(self) -> None:
        out, _ = run("analyze", "resnet20", "--weights", "shipped", "--rate", 0.3, "--all")
        assert "| layer3.2.conv2 |      64 |" in out
        assert "18 of 20 layers: small deviation" in out

    def test_a_figure_of_no_kind(self, tmp_path: object) -> None:
        message = refused("analyze", "resnet20", "--figures", str(tmp_path), "--format", "gif")
        assert "Unknown image format 'gif': give one of png, svg, pdf." in message
