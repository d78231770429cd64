"""Time: measured in turns, predicted from layers, kept on disk, and reached as a budget."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.shell import run
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fpgm
from fpgm.budget import ALIGN, Budget, Rounder
from fpgm.examples import Example
from fpgm.export.onnx import layer_to_onnx
from fpgm.latency import aim, backends
from fpgm.latency.alignment import best_step
from fpgm.latency.backends import BACKENDS, Loaded, backend_of
from fpgm.latency.layers import Called, Layer, called_layers
from fpgm.latency.predict import Predictor
from fpgm.latency.table import Table
from fpgm.latency.timing import Timing, ratio, side_by_side
from fpgm.planning import Planner

CONV = Layer("conv", 1, (8, 8), 64, 64, (3, 3), (1, 1), (1, 1), (1, 1))
NET_SECONDS = 0.004


def macs(layer: Layer) -> float:
    per = layer.reads // layer.groups * layer.writes * math.prod(layer.kernel)
    return per * layer.batch * math.prod(layer.space)


class Ideal:
    """A runtime whose time is its MACs, of layers and of models, by a clock of its own."""

    name = "ideal"

    def __init__(self, wrong: float = 1.0) -> None:
        self.asked: list[Layer] = []
        self.wrong = wrong
        """Power of the true share that its layers' times follow."""
        self.now = 0.0

    def missing(self) -> None:
        return None

    def version(self) -> str:
        return "1"

    def load(self, model: nn.Module, example: Example, threads: int) -> Loaded:
        with FlopCounterMode(display=False) as counter:
            example.call(model)
        seconds = NET_SECONDS * counter.get_total_flops() / FULL

        def run() -> None:
            self.now += seconds

        return Loaded(run)

    def layer_seconds(self, layer: Layer, threads: int) -> float:
        self.asked.append(layer)
        return float(NET_SECONDS * (2 * macs(layer) / FULL) ** self.wrong)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.ReLU(),
        nn.Conv2d(64, 16, 1),
    ).eval()  # fmt: skip


X = torch.randn(1, 3, 8, 8)
with FlopCounterMode(display=False) as _counter:
    net()(X)
FULL = _counter.get_total_flops()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FPGM_CACHE", str(tmp_path))
    return tmp_path / "latency"


@pytest.fixture
def ideal(monkeypatch: pytest.MonkeyPatch) -> Ideal:
    backend = Ideal()
    monkeypatch.setattr(aim, "side_by_side", partial(side_by_side, clock=lambda: backend.now))
    monkeypatch.setitem(BACKENDS, "ideal", backend)
    return backend


class TestTiming:
    def test_calls_take_turns_and_each_begins_a_round(self) -> None:
        order: list[str] = []

        def call(name: str) -> Any:
            return lambda: (order.append(name), time.sleep(0.002))

        side_by_side([call("a"), call("b")], 0.0)
        assert "".join(order[6:]) == "abbaabbaab"

    def test_short_calls_are_repeated_within_a_sample(self) -> None:
        count = 0

        def call() -> None:
            nonlocal count
            count += 1

        (timing,) = side_by_side([call], 0.0)
        assert count > 10 * len(timing.samples)
        assert 0 < timing.median < 1e-4

    def test_a_ratio_is_of_calls_that_ran_beside_each_other(self) -> None:
        """The machine got ten times slower half-way; both paid for it."""
        assert ratio(Timing((2.0, 2.0, 20.0)), Timing((1.0, 1.0, 10.0))) == 2

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
        found = called_layers(model, Example((torch.zeros(2, 3, 8, 8),), {}))
        assert [call.path for call in found] == ["0", "1", "3"]
        assert [(c.layer.reads, c.layer.writes, c.layer.batch) for c in found] == [
            (3, 8, 2), (8, 4, 2), (144, 5, 2),
        ]  # fmt: skip
        assert [call.given for call in found] == [2 * 8 * 9, 2 * 4 * 36, 10]
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
            Layer("conv", 2, (9, 9), 8, 16, (3, 3), (2, 2), "valid", (2, 2), groups=4),
            Layer("conv", 1, (8, 8), 6, 6, (3, 3), (1, 1), "same", (1, 1), groups=6),
            Layer("conv", 1, (12,), 4, 6, (5,), (1,), (2,), (1,), bias=False),
            Layer("transposed", 1, (5, 5), 6, 4, (3, 3), (2, 2), (1, 1), (1, 1), (1, 1)),
            Layer("linear", 7, (), 12, 5),
        ],
        ids=["conv", "grouped", "depthwise same", "1-d", "transposed", "linear"],
    )
    def test_a_layer_is_the_same_in_torch_and_onnx(self, layer: Layer) -> None:
        ort = pytest.importorskip("onnxruntime")
        session = ort.InferenceSession(layer_to_onnx(layer), providers=["CPUExecutionProvider"])
        (given,) = session.run(None, {"x": layer.input().numpy()})
        assert given.shape == tuple(layer.module()(layer.input()).shape)

    def test_other_widths(self) -> None:
        depthwise = Layer("conv", 1, (8, 8), 6, 6, (3, 3), (1, 1), (1, 1), (1, 1), groups=6)
        assert depthwise.sized(4, 4).groups == 4
        assert CONV.sized(8, 16).module()(torch.zeros(1, 8, 8, 8)).shape[1] == 16
        assert CONV.key() != CONV.sized(64, 8).key()


class TestTable:
    def test_what_was_measured_is_not_measured_again(self, ideal: Ideal) -> None:
        table = Table(ideal, 1)
        first = table.seconds(CONV)
        table.save()
        again = Table(ideal, 1)
        assert again.seconds(CONV) == first
        assert ideal.asked == [CONV]

    def test_threads_and_versions_are_apart(
        self, ideal: Ideal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = Table(ideal, 1)
        table.seconds(CONV)
        table.save()
        Table(ideal, 2).seconds(CONV)
        monkeypatch.setattr(ideal, "version", lambda: "2")
        Table(ideal, 1).seconds(CONV)
        assert len(ideal.asked) == 3

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"seconds": 3}'])
    def test_a_damaged_file_is_named(self, ideal: Ideal, text: str) -> None:
        table = Table(ideal, 1)
        table.seconds(CONV)
        table.save()
        table.file.write_text(text)
        with pytest.raises(fpgm.FileError, match=r"ideal-.*\.json holds no times of layers"):
            Table(ideal, 1)

    def test_a_disk_that_refuses_stops_nothing(
        self, ideal: Ideal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FPGM_CACHE", str(tmp_path / "file" / "folder"))
        table = Table(ideal, 1)
        assert table.seconds(CONV) > 0
        table.save()

    def test_two_at_once_keep_what_both_know(self, ideal: Ideal) -> None:
        one, other = Table(ideal, 1), Table(ideal, 1)
        one.seconds(CONV)
        other.seconds(CONV.sized(8, 8))
        one.save()
        other.save()
        kept = json.loads(one.file.read_text())["seconds"]
        assert set(kept) == {CONV.key(), CONV.sized(8, 8).key()}


class TestPrediction:
    def predictor(self, ideal: Ideal, whole: float = NET_SECONDS) -> tuple[Planner, Predictor]:
        planner = Planner(net(), X, budget=Budget(rate=0.5))
        called = called_layers(net(), Example((X,), {}))
        made = Predictor(planner.structure, called, Table(ideal, 1), whole, Rounder())
        return planner, made

    @pytest.mark.parametrize("rate", [0.0, 0.25, 0.5, 0.75])
    def test_times_that_follow_macs_are_predicted_as_macs(self, ideal: Ideal, rate: float) -> None:
        planner, predictor = self.predictor(ideal)
        planner.budget = Budget(rate=rate)
        drawn = planner.draw()
        share = predictor.without(drawn.removed) / NET_SECONDS
        assert share == pytest.approx(1 - drawn.plan.macs_removed, rel=1e-6)

    def test_what_is_no_layers_follows_what_layers_give_out(self, ideal: Ideal) -> None:
        planner, predictor = self.predictor(ideal, whole=2 * NET_SECONDS)
        pools = len(planner.structure.pools)
        halved = float(predictor.at(np.full(pools, 0.5)))
        given = np.array([64 * 64, 64 * 64, 64 * 64, 16 * 64.0])
        rest = (given[:3].sum() / 2 + given[3]) / given.sum()
        layers = 1 - planner_macs(planner, 0.5)
        assert halved == pytest.approx(NET_SECONDS * (layers + rest), rel=1e-6)

    def test_layers_that_take_longer_alone_are_scaled(self, ideal: Ideal) -> None:
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
    return planner.draw().plan.macs_removed


class TestBudget:
    def test_a_share_of_the_time_goes(self, ideal: Ideal) -> None:
        plan = fpgm.plan(net(), X, latency=0.5, backend="ideal", threads=1)
        told = plan.latency
        assert told is not None
        assert plan.macs_removed == pytest.approx(0.5, abs=0.05)
        assert told.measured == pytest.approx(0.5, abs=0.05)
        assert told.predicted == pytest.approx(plan.macs_removed, abs=0.02)
        assert plan.asked["latency"] == 0.5
        assert (told.backend, told.threads, told.asked) == ("ideal", 1, 0.5)

    @pytest.mark.parametrize("wrong", [0.5, 2.0])
    def test_a_wrong_prediction_is_measured_and_mended(self, ideal: Ideal, wrong: float) -> None:
        ideal.wrong = wrong
        plan = fpgm.plan(net(), X, latency=0.5, backend="ideal", threads=1)
        assert plan.latency is not None
        assert plan.latency.measured == pytest.approx(0.5, abs=0.05)

    def test_widths_that_are_slower_than_their_neighbours(
        self, ideal: Ideal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What a plan promises is by its own layers, not by those at other widths."""

        def lumpy(layer: Layer, threads: int = 1) -> float:
            full = replace(layer, writes=32 * math.ceil(layer.writes / 32))
            return float(NET_SECONDS * 2 * macs(full) / FULL)

        def load(model: nn.Module, example: Example, threads: int) -> Loaded:
            seconds = sum(lumpy(call.layer) for call in called_layers(model, example))

            def run() -> None:
                ideal.now += seconds

            return Loaded(run)

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

    def test_the_model_stays_as_it_was(self, ideal: Ideal) -> None:
        """With what training would change."""
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

    def test_what_was_found_is_kept_if_no_more_can_go(self, ideal: Ideal) -> None:
        """The first plan is too slow, and what would be needed is out of reach."""
        model = net()
        made = fpgm.plan(model, X, macs=0.3)

        def draw(budget: Budget) -> fpgm.Plan:
            if budget.latency != 0.5:
                raise fpgm.RequestError("out of reach")
            return made

        where = aim.Where.of("ideal", 1)
        clocked = aim.Clocked(model, Example((X,), {}), where, Rounder())
        found = aim.reach(clocked, Budget(latency=0.5), draw)
        assert found.cuts == made.cuts
        assert found.latency is not None
        assert found.latency.measured == pytest.approx(0.3, abs=0.05)
        assert "% less time, not 50.0%" in found.notes[-1]

    def test_normed_weights_shrink_too(self, ideal: Ideal) -> None:
        model = net()
        for place in (0, 2):
            nn.utils.parametrizations.weight_norm(model[place])  # type: ignore[index]
        plan = fpgm.plan(model, X, latency=0.3, backend="ideal", threads=1, align=8)
        assert plan.latency is not None
        assert plan.latency.measured == pytest.approx(0.3, abs=0.05)

    def test_work_that_is_no_layers_follows_its_macs(self, ideal: Ideal) -> None:
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

    def test_more_than_can_go(self, ideal: Ideal) -> None:
        with pytest.raises(fpgm.RequestError, match=r"latency=0\.99 cannot be reached"):
            fpgm.plan(net(), X, latency=0.99, backend="ideal", min_channels=32)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"latency": 1.5}, r"latency is 1\.5"),
            ({"latency": 0}, "latency is 0: give a share above 0"),
            ({"latency": 0.5, "macs": 0.5}, "one budget, not 2: macs, latency"),
            ({"latency": 0.5, "backend": "abacus"}, "backend is 'abacus': give one of eager"),
            ({"latency": 0.5, "threads": 0}, "threads is 0"),
        ],
    )
    def test_bad_requests(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(fpgm.RequestError, match=message):
            fpgm.plan(net(), X, **options)

    def test_a_runtime_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backends, "uninstalled", lambda *names: "pip install onnxruntime")
        with pytest.raises(fpgm.RequestError, match="cannot be used here: pip install onnx"):
            backend_of("onnxruntime")

    def test_during_training_time_is_no_budget(self) -> None:
        with pytest.raises(TypeError, match="latency"):
            fpgm.SoftPruner(net(), X, rate=0.4, latency=0.5)


def test_measuring_draws_no_random_numbers(ideal: Ideal) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    CONV.module()
    assert torch.equal(torch.rand(3), expected)


class Stepwise(Ideal):
    """Works on blocks of channels, as vector units do, and takes some time before it begins."""

    def __init__(self, block: int = 8, overhead: float = 0.0) -> None:
        super().__init__()
        self.block, self.overhead = block, overhead
        """Time of a layer before any work, as a share of one of 64 channels."""

    def layer_seconds(self, layer: Layer, threads: int) -> float:
        blocks = math.ceil(layer.reads / self.block) * math.ceil(layer.writes / self.block)
        return 1e-6 * (blocks * self.block**2 + self.overhead * 64**2)


class TestAlignment:
    @pytest.mark.parametrize("overhead", [0.0, 0.02, 0.1, 0.5])
    @pytest.mark.parametrize("block", [1, 8, 16, 32])
    @pytest.mark.parametrize("width", [64, 128])
    def test_blocks_are_noticed(self, block: int, overhead: float, width: int) -> None:
        """Whatever a layer takes before its work begins."""
        layer = Called("0", CONV.sized(width, width), 1)
        assert best_step([layer], Table(Stepwise(block, overhead), 1)) == block

    def test_of_narrow_layers_nothing_is_claimed(self, ideal: Ideal) -> None:
        assert best_step([Called("0", CONV.sized(48, 48), 1)], Table(ideal, 1)) is None
        narrow = nn.Sequential(nn.Conv2d(3, 48, 3), nn.ReLU(), nn.Conv2d(48, 16, 3))
        plan = fpgm.plan(narrow, X, rate=0.4, align="auto", backend="ideal")
        assert plan.asked["align"] == ALIGN
        assert "no layer is wide enough to measure" in plan.notes[-1]

    @pytest.mark.parametrize("writes", [64, 128, 200])
    def test_layers_of_any_width(self, writes: int) -> None:
        assert best_step([Called("0", CONV.sized(64, writes), 1)], Table(Stepwise(), 1)) == 8

    def test_where_nothing_is_lost_widths_are_free(self, ideal: Ideal) -> None:
        assert best_step([Called("0", CONV, 1)], Table(ideal, 1)) == 1

    def test_a_plan_takes_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(BACKENDS, "ideal", Stepwise())
        plan = fpgm.plan(net(), X, rate=0.4, align="auto", backend="ideal")
        assert plan.asked["align"] == 8


class TestFailures:
    def test_a_runtime_that_cannot_run_it_says_so_in_a_line(self) -> None:
        if why := BACKENDS["onnxruntime"].missing():
            pytest.skip(why)
        with pytest.raises(fpgm.ModelError, match=r"^onnxruntime cannot run this model: .*\.$"):
            fpgm.plan(net().double(), X.double(), latency=0.3, backend="onnxruntime", threads=1)

    def test_nor_a_layer(self, ideal: Ideal, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> float:
            raise OSError("no such kernel")

        monkeypatch.setattr(ideal, "layer_seconds", fail)
        with pytest.raises(fpgm.ModelError, match="ideal cannot run this model: no such kernel"):
            fpgm.plan(net(), X, latency=0.3, backend="ideal", threads=1)

    def test_the_planner_remembers_what_was_asked(self, ideal: Ideal) -> None:
        planner = Planner(net(), X, budget=Budget(latency=0.31))
        planner.timed(aim.Where.of("ideal", 1))
        assert planner.budget == Budget(latency=0.31)

    def test_layers_of_other_numbers_have_other_times(self) -> None:
        called = [called_layers(own, Example((x,), {}))[0].layer
                  for own, x in ((net(), X), (net().double(), X.double()))]  # fmt: skip
        assert called[0].key() != called[1].key()
        assert called[1].module().weight.dtype == called[1].input().dtype == torch.float64
        border = replace(CONV, border="circular")
        assert border.key() != CONV.key()
        assert border.module().padding_mode == "circular"

    @pytest.mark.skipif(bool(BACKENDS["compile"].missing()), reason="no C++ compiler")
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
    def test_compiling_leaves_what_was_compiled_alone(self) -> None:
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


@pytest.mark.parametrize("name", ["eager", "channels-last", "onnxruntime", "openvino"])
class TestRuntimes:
    def test_a_model_runs_and_a_layer_has_a_time(self, name: str) -> None:
        backend = BACKENDS[name]
        if why := backend.missing():
            pytest.skip(why)
        loaded = backend.load(net(), Example((X,), {}), 1)
        loaded.run()
        assert 0 < backend.layer_seconds(CONV, 1) < 1
        assert backend.layer_seconds(CONV.sized(64, 640), 1) > backend.layer_seconds(CONV, 1)
        if loaded.pieces is not None:
            assert sum(piece.seconds for piece in loaded.pieces()) > 0


def test_the_command(ideal: Ideal, tmp_path: Path) -> None:
    out, _ = run(
        "prune", "resnet20", "--latency", 0.3, "--backend", "ideal", "--threads", 1,
        "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    told = json.loads(out)
    assert told["asked"]["latency"] == 0.3
    assert told["asked"]["backend"] == "ideal"
    assert told["achieved"]["latency"]["asked"] == 0.3


def test_a_budget_in_time_aligns_narrow_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "ideal", Ideal())
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 24, 3), nn.Conv2d(24, 64, 3))
    planned = Planner(model, torch.zeros(1, 3, 9, 9), budget=Budget(latency=0.3))
    assert [planned.rounder.kept(n, 0.3) for n in (16, 24, 64)] == [8, 16, 48]
