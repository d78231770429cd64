"""Latency: measured in turns, predicted from layers, and cached on disk."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.simulated_backends import CONV, NET_SECONDS, Ideal, X, net
from torch import nn

import fpgm
from fpgm.exporters.onnx import layer_to_onnx
from fpgm.latency.backends import BACKENDS
from fpgm.latency.lookup_table import LatencyTable
from fpgm.latency.predictor import Predictor
from fpgm.planning.budget import Budget
from fpgm.planning.planner import Planner
from fpgm.planning.width_rounding import Rounder
from fpgm.tracing.layer_calls import LayerSpec, called_layers
from fpgm.utils.example_inputs import Example
from fpgm.utils.timing import Timing, time_interleaved, time_ratio

pytestmark = pytest.mark.usefixtures("own_cache")


class TestTiming:
    def test_calls_take_turns_and_each_begins_a_round(self) -> None:
        order: list[str] = []

        def call(name: str) -> Any:
            return lambda: (order.append(name), time.sleep(0.002))

        time_interleaved([call("a"), call("b")], 0.0)
        assert "".join(order[6:]) == "abbaabbaab"

    def test_short_calls_are_repeated_within_a_sample(self) -> None:
        count = 0

        def call() -> None:
            nonlocal count
            count += 1

        (timing,) = time_interleaved([call], 0.0)
        assert count > 10 * len(timing.samples)
        assert 0 < timing.median < 1e-4

    def test_a_ratio_is_of_calls_that_ran_beside_each_other(self) -> None:
        """The machine got ten times slower half-way; both paid for it."""
        assert time_ratio(Timing((2.0, 2.0, 20.0)), Timing((1.0, 1.0, 10.0))) == 2

    def test_spread_is_the_middle_half(self) -> None:
        assert Timing((1.0, 2.0, 3.0, 4.0, 5.0)).spread == pytest.approx(1.0)
        assert Timing((1.0,)).spread == 0


class TestLayers:
    def test_every_call_with_its_sizes(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding="valid"),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.Flatten(1), nn.Linear(4 * 6 * 6, 5),
        )  # fmt: skip
        model.train()
        results = called_layers(model, Example((torch.zeros(2, 3, 8, 8),), {}))
        assert [call.path for call in results] == ["0", "1", "3"]
        assert [(c.layer.reads, c.layer.writes, c.layer.batch) for c in results] == [
            (3, 8, 2), (8, 4, 2), (144, 5, 2),
        ]  # fmt: skip
        assert [call.given for call in results] == [2 * 8 * 9, 2 * 4 * 36, 10]
        assert model.training
        assert not any(module._forward_hooks for module in model.modules())

    def test_a_layer_called_twice_counts_twice(self) -> None:
        conv = nn.Conv2d(4, 4, 1)
        model = nn.Sequential(conv, conv)
        assert len(called_layers(model, Example((torch.zeros(1, 4, 2, 2),), {}))) == 2

    @pytest.mark.parametrize(
        "layer",
        [
            CONV,
            LayerSpec("conv", 2, (9, 9), 8, 16, (3, 3), (2, 2), "valid", (2, 2), groups=4),
            LayerSpec("conv", 1, (8, 8), 6, 6, (3, 3), (1, 1), "same", (1, 1), groups=6),
            LayerSpec("conv", 1, (12,), 4, 6, (5,), (1,), (2,), (1,), bias=False),
            LayerSpec("transposed", 1, (5, 5), 6, 4, (3, 3), (2, 2), (1, 1), (1, 1), (1, 1)),
            LayerSpec("linear", 7, (), 12, 5),
        ],
        ids=["conv", "grouped", "depthwise same", "1-d", "transposed", "linear"],
    )
    def test_a_layer_is_the_same_in_torch_and_onnx(self, layer: LayerSpec) -> None:
        ort = pytest.importorskip("onnxruntime")
        session = ort.InferenceSession(layer_to_onnx(layer), providers=["CPUExecutionProvider"])
        (given,) = session.run(None, {"x": layer.input().numpy()})
        assert given.shape == tuple(layer.module()(layer.input()).shape)

    def test_other_widths(self) -> None:
        depthwise = LayerSpec("conv", 1, (8, 8), 6, 6, (3, 3), (1, 1), (1, 1), (1, 1), groups=6)
        assert depthwise.with_widths(4, 4).groups == 4
        assert CONV.with_widths(8, 16).module()(torch.zeros(1, 8, 8, 8)).shape[1] == 16
        assert CONV.key() != CONV.with_widths(64, 8).key()


class TestTable:
    def test_layers_are_measured_once(self, ideal: Ideal) -> None:
        table = LatencyTable(ideal, 1)
        first = table.seconds(CONV)
        table.save()
        again = LatencyTable(ideal, 1)
        assert again.seconds(CONV) == first
        assert ideal.asked == [CONV]

    def test_threads_and_versions_have_their_own_times(
        self, ideal: Ideal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = LatencyTable(ideal, 1)
        table.seconds(CONV)
        table.save()
        LatencyTable(ideal, 2).seconds(CONV)
        monkeypatch.setattr(ideal, "version", lambda: "2")
        LatencyTable(ideal, 1).seconds(CONV)
        assert len(ideal.asked) == 3

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"seconds": 3}'])
    def test_a_damaged_file_is_named(self, ideal: Ideal, text: str) -> None:
        table = LatencyTable(ideal, 1)
        table.seconds(CONV)
        table.save()
        table.file.write_text(text)
        with pytest.raises(fpgm.FileError, match=r"ideal-.*\.json is not a latency cache"):
            LatencyTable(ideal, 1)

    def test_an_unwritable_cache_is_only_a_warning(
        self, ideal: Ideal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FPGM_CACHE", str(tmp_path / "file" / "folder"))
        table = LatencyTable(ideal, 1)
        assert table.seconds(CONV) > 0
        with pytest.warns(UserWarning, match="cannot be written"):
            table.save()

    def test_two_tables_write_the_times_of_both(self, ideal: Ideal) -> None:
        one, other = LatencyTable(ideal, 1), LatencyTable(ideal, 1)
        one.seconds(CONV)
        other.seconds(CONV.with_widths(8, 8))
        one.save()
        other.save()
        kept = json.loads(one.file.read_text())["seconds"]
        assert set(kept) == {CONV.key(), CONV.with_widths(8, 8).key()}


class TestPrediction:
    def predictor(self, ideal: Ideal, whole: float = NET_SECONDS) -> tuple[Planner, Predictor]:
        planner = Planner(net(), X, budget=Budget(rate=0.5))
        called = called_layers(net(), Example((X,), {}))
        predictor = Predictor(planner.structure, called, LatencyTable(ideal, 1), whole, Rounder())
        return planner, predictor

    @pytest.mark.parametrize("rate", [0.0, 0.25, 0.5, 0.75])
    def test_times_that_follow_macs_are_predicted_as_macs(self, ideal: Ideal, rate: float) -> None:
        planner, predictor = self.predictor(ideal)
        planner.budget = Budget(rate=rate)
        plotted = planner.build_plan()
        fraction = predictor.without(plotted.removed) / NET_SECONDS
        assert fraction == pytest.approx(1 - plotted.plan.macs_removed, rel=1e-6)

    def test_time_outside_of_layers_follows_output_sizes(self, ideal: Ideal) -> None:
        planner, predictor = self.predictor(ideal, whole=2 * NET_SECONDS)
        pools = len(planner.structure.groups)
        halved = float(predictor.at(np.full(pools, 0.5)))
        given = np.array([64 * 64, 64 * 64, 64 * 64, 16 * 64.0])
        rest = (given[:3].sum() / 2 + given[3]) / given.sum()
        layers = 1 - planner_macs(planner, 0.5)
        assert halved == pytest.approx(NET_SECONDS * (layers + rest), rel=1e-6)

    def test_layers_that_take_longer_when_isolated_are_scaled(self, ideal: Ideal) -> None:
        _, predictor = self.predictor(ideal, whole=NET_SECONDS / 2)
        assert predictor.without(torch.zeros(0, dtype=torch.int64)) == pytest.approx(
            NET_SECONDS / 2
        )

    def test_many_at_once(self, ideal: Ideal) -> None:
        _, predictor = self.predictor(ideal)
        pools = 2
        kept = np.array([[1.0, 0.5], [0.25, 0.75]])
        assert predictor.at(kept).shape == (2,)
        assert np.allclose(predictor.at(kept), [float(predictor.at(row)) for row in kept])
        assert len(predictor._units) == pools


def planner_macs(planner: Planner, rate: float) -> float:
    planner.budget = Budget(rate=rate)
    return planner.build_plan().plan.macs_removed


def test_measuring_draws_no_random_numbers(ideal: Ideal) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    CONV.module()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", ["eager", "channels-last", "onnxruntime", "openvino"])
class TestRuntimes:
    def test_a_model_runs_and_a_layer_has_a_time(self, name: str) -> None:
        backend = BACKENDS[name]
        if why := backend.unavailable_reason():
            pytest.skip(why)
        loaded = backend.load(net(), Example((X,), {}), 1)
        loaded.run()
        assert 0 < backend.layer_seconds(CONV, 1) < 1
        assert backend.layer_seconds(CONV.with_widths(64, 640), 1) > backend.layer_seconds(CONV, 1)
        if loaded.profile is not None:
            assert sum(node.seconds for node in loaded.profile()) > 0
