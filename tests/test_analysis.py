"""What is said about filters, on layers whose answers can be worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shell import refused, run
from torch import Tensor, nn

import fpgm
from fpgm.analysis import analyze
from fpgm.analysis.alike import layer_output, most_alike, removed_filters
from fpgm.analysis.redundancy import effective_rank, nearest, on_a_plane
from fpgm.analysis.result import LARGE_MINIMUM, SMALL_DEVIATION, LayerAnalysis, verdict

X = torch.zeros(1, 1, 1, 1)


def layer_of(filters: list[list[float]], rate: float = 0.5) -> LayerAnalysis:
    """The analysis of a layer with these filters, one row each."""
    rows = torch.tensor(filters)
    conv = nn.Conv2d(rows.shape[1], len(rows), 1, bias=False)
    with torch.no_grad():
        conv.weight.copy_(rows[:, :, None, None])
    net = nn.Sequential(conv, nn.Conv2d(len(rows), 1, 1))
    return analyze(net, torch.zeros(1, rows.shape[1], 1, 1), rate=rate).layers[0]


class TestLayer:
    def test_norms_in_order(self) -> None:
        assert layer_of([[3.0, 4.0], [0.0, 1.0]]).norms == (5.0, 1.0)

    def test_the_two_requirements(self) -> None:
        found = layer_of([[1.0, 0.0], [3.0, 0.0]])
        assert found.deviation == pytest.approx(1 / 2)  # one on each side of a mean of two
        assert found.least == pytest.approx(1 / 2)

    def test_distances_to_the_median_and_to_the_nearest(self) -> None:
        square = [[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [1.0, 1.0]]
        found = layer_of(square)
        assert found.to_median == pytest.approx([math.sqrt(2)] * 4 + [0], abs=1e-5)
        assert found.to_nearest == pytest.approx([math.sqrt(2)] * 5, rel=1e-5)

    def test_the_map_keeps_distances_to_the_median_where_it_shows_all(self) -> None:
        """Filters of two numbers lie on a plane anyway."""
        found = layer_of([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [1.0, 1.0]])
        lengths = [math.hypot(*place) for place in found.places]
        assert lengths == pytest.approx(found.to_median, rel=1e-4, abs=1e-5)

    def test_filters_of_one_number_lie_on_a_line(self) -> None:
        assert all(place[1] == 0 for place in layer_of([[1.0], [2.0], [4.0]]).places)

    def test_criteria_that_disagree(self) -> None:
        """Two short filters far apart, two long ones at one place: norms and medians differ."""
        found = layer_of([[-1.0, 0.0], [1.0, 0.0], [0.0, 5.0], [0.0, 5.1]])
        assert found.overlap["l1 and l2"] == 1
        assert found.overlap["fpgm and l2"] < 1

    def test_shares_of_the_cost_add_up(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 4, 3, bias=False))
        layers = analyze(net, torch.zeros(1, 3, 9, 9)).layers
        assert sum(own.macs_share for own in layers) == pytest.approx(1)
        assert sum(own.params_share for own in layers) == pytest.approx(1)

    def test_zeros_have_no_part_that_divides(self) -> None:
        found = layer_of([[0.0, 0.0], [0.0, 0.0]])
        assert (found.deviation, found.least, found.effective_rank) == (0, 0, 1)
        assert found.nearest_share == 0

    def test_depthwise_filters_only_hand_on(self) -> None:
        net = nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.Conv2d(8, 2, 1)
        )
        found = analyze(net, torch.zeros(1, 3, 4, 4))
        assert [own.layer for own in found.layers] == ["0", "2"]

    def test_the_model_stays_as_it_was(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)).train()
        before = {name: value.clone() for name, value in net.state_dict().items()}
        analyze(net, torch.randn(2, 3, 8, 8))
        assert net.training
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())

    def test_a_rate_that_is_none(self) -> None:
        with pytest.raises(fpgm.RequestError, match="rate is 2"):
            analyze(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 1)), X, rate=2)


class TestVerdict:
    def test_each_requirement_by_itself(self) -> None:
        assert verdict(SMALL_DEVIATION, LARGE_MINIMUM).endswith("both requirements hold")
        assert verdict(SMALL_DEVIATION - 0.01, LARGE_MINIMUM).startswith("small deviation")
        assert verdict(SMALL_DEVIATION, LARGE_MINIMUM + 0.01).startswith("large minimum")

    def test_layers_are_counted_by_it(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 3))
        found = analyze(net, torch.zeros(1, 3, 9, 9))
        assert sum(len(layers) for layers in found.verdicts().values()) == 3


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(2, 9), length=st.integers(1, 9))
def test_nearest_and_rank_by_their_definitions(seed: int, count: int, length: int) -> None:
    rows = torch.randn(count, length, generator=torch.Generator().manual_seed(seed)).double()
    wanted = [
        min(float((a - b).norm()) for j, b in enumerate(rows) if i != j) for i, a in enumerate(rows)
    ]
    assert nearest(rows).tolist() == pytest.approx(wanted)
    assert 1 - 1e-9 <= effective_rank(rows) <= min(count, length) + 1e-9
    assert effective_rank(7 * rows) == pytest.approx(effective_rank(rows))
    shares = torch.linalg.svdvals(rows) / torch.linalg.svdvals(rows).sum()
    assert effective_rank(rows) == pytest.approx(float((-(shares * shares.log()).sum()).exp()))
    left, sizes, _ = torch.linalg.svd(rows, full_matrices=False)
    wanted_places = torch.nn.functional.pad(left * sizes, (0, 1))[:, :2]
    assert torch.allclose(on_a_plane(rows).abs(), wanted_places.abs(), atol=1e-6)


def test_many_filters_at_once_and_in_parts() -> None:
    rows = torch.randn(1100, 3).double()
    assert torch.allclose(nearest(rows)[:5], nearest_by_hand(rows)[:5])
    assert torch.allclose(nearest(rows)[-5:], nearest_by_hand(rows)[-5:])


def nearest_by_hand(rows: Tensor) -> Tensor:
    distances = (rows[:, None] - rows).norm(dim=2)
    distances.fill_diagonal_(torch.inf)
    return distances.min(dim=1).values


class TestAlike:
    def test_a_copy_turned_around_is_as_good(self) -> None:
        a, b = np.array([[0.0, 1.0], [2.0, 3.0]]), np.array([[1.0, 0.0], [0.0, 0.0]])
        assert most_alike(np.stack([a, b, 5 - 2 * a]), [0]) == [(0, 2, -1.0)]

    def test_a_channel_that_shows_nothing(self) -> None:
        maps = np.stack([np.zeros((2, 2)), np.eye(2)])
        assert most_alike(maps, [0]) == [(0, 1, 0.0)]

    def test_all_gone(self) -> None:
        assert most_alike(np.ones((2, 2, 2)), [0, 1]) == []

    def test_what_a_layer_gives_out(self) -> None:
        net = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.ReLU(), nn.Conv2d(2, 1, 1))
        x = torch.randn(3, 1, 4, 4)
        found = layer_output(net, "1", x)
        assert np.allclose(found, torch.relu(net[0](x))[0].detach().numpy())

    def test_modules_that_give_out_no_pictures(self) -> None:
        net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        with pytest.raises(fpgm.ModelError, match="'1' gives out no channels"):
            layer_output(net, "1", torch.zeros(1, 1, 2, 2))
        with pytest.raises(fpgm.RequestError, match="no module '7'"):
            layer_output(net, "7", torch.zeros(1, 1, 2, 2))

    def test_filters_that_a_plan_removes(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
        plan = fpgm.plan(net, torch.zeros(1, 3, 8, 8), rate=0.5)
        gone = removed_filters(plan, "0")
        assert len(gone) == 4
        assert removed_filters(plan, "1") == []
        small = fpgm.compact(net, plan)
        kept = [n for n in range(8) if n not in gone]
        assert torch.equal(small[0].weight, net[0].weight[kept])


class TestCommand:
    def test_json(self) -> None:
        out, _ = run("analyze", "resnet20", "--weights", "shipped", "--json")
        told = json.loads(out)
        assert told["rate"] == 0.4
        first = told["layers"][0]
        assert (first["layer"], len(first["norms"])) == ("conv1", 16)
        assert (first["writes"], first["reads"]) == (["conv1"], [])
        assert told["layers"][2]["reads"] == ["layer1.0.conv1"]
        assert first["verdict"].startswith("large minimum norm")

    def test_table(self) -> None:
        out, _ = run("analyze", "resnet20", "--weights", "shipped", "--rate", 0.3)
        assert "| layer3.2.conv2 |      64 |" in out
        assert "18 of 20 layers: small deviation" in out

    def test_a_figure_of_no_kind(self, tmp_path: object) -> None:
        told = refused("analyze", "resnet20", "--figures", str(tmp_path), "--format", "gif")
        assert "A figure cannot be 'gif': give one of png, svg, pdf." in told
