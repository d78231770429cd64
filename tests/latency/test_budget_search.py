"""Time as a budget: reached, aligned for, refused, and asked for on the command line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.shell import run
from tests.helpers.simulated_backends import CONV, FULL, NET_SECONDS, Ideal, Stepwise, X, macs, net
from torch import nn

import fpgm
from fpgm.latency import backends, budget_search
from fpgm.latency.backends import BACKENDS, LoadedModel, get_backend
from fpgm.latency.best_alignment import best_step
from fpgm.latency.lookup_table import LatencyTable
from fpgm.planning.budget import Budget
from fpgm.planning.planner import Planner
from fpgm.planning.width_rounding import ALIGN, Rounder
from fpgm.tracing.layer_calls import LayerCall, LayerSpec, called_layers
from fpgm.utils.example_inputs import Example

pytestmark = pytest.mark.usefixtures("own_cache")


class TestBudget:
    def test_the_requested_saving_is_reached(self, ideal: Ideal) -> None:
        plan = fpgm.plan(net(), X, latency=0.5, backend="ideal", threads=1)
        latency = plan.latency
        assert latency is not None
        assert plan.macs_removed == pytest.approx(0.5, abs=0.05)
        assert latency.measured == pytest.approx(0.5, abs=0.05)
        assert latency.predicted == pytest.approx(plan.macs_removed, abs=0.02)
        assert plan.asked["latency"] == 0.5
        assert (latency.backend, latency.threads, latency.asked) == ("ideal", 1, 0.5)

    @pytest.mark.parametrize("wrong", [0.5, 2.0])
    def test_a_wrong_prediction_is_corrected(self, ideal: Ideal, wrong: float) -> None:
        ideal.wrong = wrong
        plan = fpgm.plan(net(), X, latency=0.5, backend="ideal", threads=1)
        assert plan.latency is not None
        assert plan.latency.measured == pytest.approx(0.5, abs=0.05)

    def test_widths_that_are_slower_than_similar_ones(
        self, ideal: Ideal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A plan is predicted by its own layers, not by those at other widths."""

        def lumpy(layer: LayerSpec, threads: int = 1) -> float:
            full = replace(layer, writes=32 * math.ceil(layer.writes / 32))
            return float(NET_SECONDS * 2 * macs(full) / FULL)

        def load(model: nn.Module, example: Example, threads: int) -> LoadedModel:
            seconds = sum(lumpy(call.layer) for call in called_layers(model, example))

            def run() -> None:
                ideal.now += seconds

            return LoadedModel(run)

        monkeypatch.setattr(ideal, "layer_seconds", lumpy)
        monkeypatch.setattr(ideal, "load", load)
        plan = fpgm.plan(net(), X, latency=0.4, backend="ideal", threads=1)
        assert plan.latency is not None
        assert plan.latency.predicted == pytest.approx(plan.latency.measured, abs=0.01)
        assert plan.macs_removed > 0

    def test_with_sensitivity(self, ideal: Ideal) -> None:
        batches = [torch.randn(8, 3, 8, 8)]
        plan = fpgm.plan(
            net(), X, latency=0.4, backend="ideal", threads=1, align=8,
            allocate="sensitivity", loader=batches,
        )  # fmt: skip
        assert plan.latency is not None
        assert plan.latency.measured == pytest.approx(0.4, abs=0.06)
        assert len({group.rate for group in plan.groups}) > 1

    def test_the_model_is_unchanged(self, ideal: Ideal) -> None:
        """It has modules that training would change."""
        model = nn.Sequential(
            nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Dropout(0.5), nn.Conv2d(64, 64, 3)
        ).train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        fpgm.plan(
            model, torch.randn(1, 3, 32, 32), latency=0.1, backend="ideal", threads=1, align=8
        )
        assert model.training
        assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())

    def test_a_plan_with_times_goes_to_json_and_back(self, ideal: Ideal) -> None:
        plan = fpgm.plan(net(), X, latency=0.3, backend="ideal", threads=1)
        assert fpgm.Plan.from_json(plan.to_json()) == plan
        assert "ideal, threads: 1" in str(plan)

    def test_the_nearest_plan_is_kept_if_the_budget_is_out_of_reach(self, ideal: Ideal) -> None:
        """The first plan is too slow, and no other can be built."""
        model = net()
        first = fpgm.plan(model, X, macs=0.3)

        def build(budget: Budget) -> fpgm.Plan:
            if budget.latency != 0.5:
                raise fpgm.RequestError("out of reach")
            return first

        config = budget_search.BackendConfig.of("ideal", 1)
        timed = budget_search.TimedModel(model, Example((X,), {}), config, Rounder())
        results = budget_search.reach_budget(timed, Budget(latency=0.5), build)
        assert results.cuts == first.cuts
        assert results.latency is not None
        assert results.latency.measured == pytest.approx(0.3, abs=0.05)
        assert "% of the time, not 50.0%." in results.notes[-1]

    def test_weight_normalized_layers_shrink_too(self, ideal: Ideal) -> None:
        model = net()
        for place in (0, 2):
            nn.utils.parametrizations.weight_norm(model[place])  # type: ignore[index]
        plan = fpgm.plan(model, X, latency=0.3, backend="ideal", threads=1, align=8)
        assert plan.latency is not None
        assert plan.latency.measured == pytest.approx(0.3, abs=0.05)

    def test_time_outside_of_layers_follows_its_macs(self, ideal: Ideal) -> None:
        class Bare(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Parameter(torch.randn(64, 3, 3, 3))
                self.b = nn.Parameter(torch.randn(16, 64, 3, 3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return nn.functional.conv2d(nn.functional.conv2d(x, self.a).relu(), self.b)

        x = torch.randn(1, 3, 24, 24)
        plan = fpgm.plan(Bare(), x, latency=0.3, backend="ideal", threads=1, align=1)
        assert plan.macs_removed == pytest.approx(0.3, abs=0.05)

    def test_a_budget_out_of_reach(self, ideal: Ideal) -> None:
        with pytest.raises(fpgm.RequestError, match=r"latency=0\.99 cannot be reached"):
            fpgm.plan(net(), X, latency=0.99, backend="ideal", min_channels=32)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"latency": 1.5}, r"latency is 1\.5"),
            ({"latency": 0}, "latency is 0: give a fraction above 0"),
            ({"latency": 0.5, "macs": 0.5}, "one budget, not 2: macs, latency"),
            ({"latency": 0.5, "backend": "abacus"}, "backend is 'abacus': give one of eager"),
            ({"latency": 0.5, "threads": 0}, "threads is 0"),
        ],
    )
    def test_bad_requests(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(fpgm.RequestError, match=message):
            fpgm.plan(net(), X, **options)

    def test_a_runtime_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backends, "install_hint", lambda *names: "pip install onnxruntime")
        with pytest.raises(fpgm.RequestError, match="on this machine: pip install onnx"):
            get_backend("onnxruntime")

    def test_soft_pruning_takes_no_latency_budget(self) -> None:
        with pytest.raises(TypeError, match="latency"):
            fpgm.SoftPruner(net(), X, rate=0.4, latency=0.5)


class TestAlignment:
    @pytest.mark.parametrize("overhead", [0.0, 0.02, 0.1, 0.5])
    @pytest.mark.parametrize("block", [1, 8, 16, 32])
    @pytest.mark.parametrize("width", [64, 128])
    def test_block_sizes_are_detected(self, block: int, overhead: float, width: int) -> None:
        """For any constant overhead of a layer."""
        layer = LayerCall("0", CONV.with_widths(width, width), 1)
        assert best_step([layer], LatencyTable(Stepwise(block, overhead), 1)) == block

    def test_narrow_layers_are_not_measured(self, ideal: Ideal) -> None:
        assert (
            best_step([LayerCall("0", CONV.with_widths(48, 48), 1)], LatencyTable(ideal, 1)) is None
        )
        narrow = nn.Sequential(nn.Conv2d(3, 48, 3), nn.ReLU(), nn.Conv2d(48, 16, 3))
        plan = fpgm.plan(narrow, X, rate=0.4, align="auto", backend="ideal")
        assert plan.asked["align"] == ALIGN
        assert "no layer is wide enough to measure" in plan.notes[-1]

    @pytest.mark.parametrize("writes", [64, 128, 200])
    def test_layers_of_any_width(self, writes: int) -> None:
        assert (
            best_step(
                [LayerCall("0", CONV.with_widths(64, writes), 1)], LatencyTable(Stepwise(), 1)
            )
            == 8
        )

    def test_any_width_if_alignment_does_not_matter(self, ideal: Ideal) -> None:
        assert best_step([LayerCall("0", CONV, 1)], LatencyTable(ideal, 1)) == 1

    def test_a_plan_uses_the_best_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(BACKENDS, "ideal", Stepwise())
        plan = fpgm.plan(net(), X, rate=0.4, align="auto", backend="ideal")
        assert plan.asked["align"] == 8


class TestFailures:
    def test_a_runtime_that_cannot_run_it_reports_it_in_a_line(self) -> None:
        if why := BACKENDS["onnxruntime"].unavailable_reason():
            pytest.skip(why)
        with pytest.raises(fpgm.ModelError, match=r"^onnxruntime cannot run this model: .*\.$"):
            fpgm.plan(net().double(), X.double(), latency=0.3, backend="onnxruntime", threads=1)

    def test_so_does_one_that_fails_on_a_layer(
        self, ideal: Ideal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> float:
            raise OSError("no such kernel")

        monkeypatch.setattr(ideal, "layer_seconds", fail)
        with pytest.raises(fpgm.ModelError, match="ideal cannot run this model: no such kernel"):
            fpgm.plan(net(), X, latency=0.3, backend="ideal", threads=1)

    def test_the_planner_keeps_its_budget(self, ideal: Ideal) -> None:
        planner = Planner(net(), X, budget=Budget(latency=0.31))
        budget_search.plan_for_latency(planner, budget_search.BackendConfig.of("ideal", 1))
        assert planner.budget == Budget(latency=0.31)

    def test_layers_of_other_dtypes_have_other_times(self) -> None:
        called = [called_layers(item, Example((x,), {}))[0].layer
                  for item, x in ((net(), X), (net().double(), X.double()))]  # fmt: skip
        assert called[0].key() != called[1].key()
        assert called[1].module().weight.dtype == called[1].input().dtype == torch.float64
        border = replace(CONV, border="circular")
        assert border.key() != CONV.key()
        assert border.module().padding_mode == "circular"

    @pytest.mark.skipif(bool(BACKENDS["compile"].unavailable_reason()), reason="no C++ compiler")
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
    def test_compiling_does_not_discard_earlier_compilations(self) -> None:
        graphs: list[Any] = []

        def count(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        mine = torch.compile(net(), backend=count)
        mine(X)
        assert len(graphs) == 1
        for _ in range(2):
            BACKENDS["compile"].load(nn.Identity(), Example((X,), {}), 1).run()
        mine(X)
        assert len(graphs) == 1


def test_the_command(ideal: Ideal, tmp_path: Path) -> None:
    out, _ = run(
        "prune", "resnet20", "--latency", 0.3, "--backend", "ideal", "--threads", 1,
        "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    result = json.loads(out)
    assert result["asked"]["latency"] == 0.3
    assert result["asked"]["backend"] == "ideal"
    assert result["achieved"]["latency"]["asked"] == 0.3


def test_a_budget_in_time_aligns_narrow_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "ideal", Ideal())
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 24, 3), nn.Conv2d(24, 64, 3))
    planned = Planner(model, torch.zeros(1, 3, 9, 9), budget=Budget(latency=0.3))
    assert [planned.rounder.kept_units(n, 0.3) for n in (16, 24, 64)] == [8, 16, 48]
