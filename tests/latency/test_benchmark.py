"""Models timed against each other: times, memory, layers, and the summary in words."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.shell import refused, run
from torch import nn

import fpgm
from fpgm.cli.bench import _format_times, _show, _sum_layers
from fpgm.latency.backends import BACKENDS, LoadedModel, ProfiledNode, TorchBackend, get_backend
from fpgm.latency.benchmark import bench
from fpgm.latency.layer_breakdown import (
    BETWEEN_LAYERS,
    LayerTime,
    _Round,
    _seconds_between,
    breakdown,
)
from fpgm.latency.memory import process_bytes, torch_bytes
from fpgm.latency.speedup_summary import find_contradiction, slowdown_reasons, summarize
from fpgm.report.headline import cards
from fpgm.report.records import BenchRecord, decode
from fpgm.report.run import Run
from fpgm.report.speed import speeds
from fpgm.utils.example_inputs import Example
from fpgm.utils.timing import Timing

X = torch.randn(1, 3, 32, 32)


def wide(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 8, 3)
    )


class TestMemory:
    def test_weights_and_peak_activations_in_pytorch(self) -> None:
        net = nn.Sequential(nn.Linear(1000, 500), nn.ReLU(), nn.Linear(500, 10)).eval()
        x = torch.randn(64, 1000)
        kilobytes = torch_bytes(net, lambda: net(x)) / 4000
        weights = 1000 * 0.5 + 0.5 + 0.5 * 10 + 0.01
        at_once = 2 * 64 * 0.5  # the first layer's output, before and after the ReLU
        assert kilobytes == pytest.approx(weights + at_once, rel=0.05)

    @pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
    def test_other_runtimes_need_more_for_more_inputs(self, runtime: str) -> None:
        backend = get_backend(runtime)
        needed = []
        for batch in (1, 64):
            example = Example((torch.zeros(batch, 3, 64, 64),), {})
            needed.append(backend.load(wide(64).eval(), example, 1).memory())
        few, many = needed
        assert few is not None
        assert many is not None
        at_least = 63 * 64 * 62 * 62 * 4  # the largest output, for 63 more images
        assert many - few > 0.9 * at_least

    def test_a_system_without_proc(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.platform", "darwin")
        assert process_bytes("onnxruntime", b"", {}, 1) is None

    def test_a_runtime_that_fails_there(self) -> None:
        assert process_bytes("onnxruntime", b"no model", {}, 1) is None

    def test_a_runtime_that_takes_too_long_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def late(command: list[str], **options: Any) -> None:
            raise subprocess.TimeoutExpired(command, options["timeout"])

        monkeypatch.setattr("fpgm.latency.memory.subprocess.run", late)
        (row,) = bench([wide(8)], X, backends=["onnxruntime"], seconds=0.0).rows
        assert row.figures[0].memory_bytes is None

    @pytest.mark.parametrize("own", [None, "3"])
    def test_the_environment_is_unchanged(
        self, own: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
        if own is not None:
            monkeypatch.setenv("KINETO_LOG_LEVEL", own)
        net = nn.Linear(4, 4)
        torch_bytes(net, lambda: net(torch.zeros(1, 4)))
        assert os.environ.get("KINETO_LOG_LEVEL") == own

    def test_memory_of_others_on_the_device_does_not_count(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """1,000 bytes are allocated before, the model's 80 among them; a run takes 300 more."""

        class OnCuda(nn.Linear):
            def parameters(self, recurse: bool = True) -> Iterator[Any]:
                yield SimpleNamespace(is_cuda=True)

        monkeypatch.setattr("torch.cuda.memory_allocated", lambda: 1000)
        monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
        monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 1300)
        assert torch_bytes(OnCuda(4, 4), lambda: None) == 4 * (16 + 4) + 300


class Fussy(TorchBackend):
    """PyTorch that fails on batches of two."""

    def load(self, model: nn.Module, example: Example, threads: int) -> LoadedModel:
        if len(example.args[0]) == 2:
            raise RuntimeError("no pairs here.")
        return super().load(model, example, threads)


class Idle:
    """Stands in for MachineLoad on an idle machine."""

    def describe_contention(self, threads: int) -> None:
        return None


class TestBench:
    def test_a_smaller_model_is_faster_in_every_runtime(self) -> None:
        for _ in range(5):  # other work on the machine may disturb one measurement, or two
            results = bench(
                {"big": wide(256), "small": wide(16)}, X,
                backends=["eager", "channels-last", "onnxruntime"], threads=[1], seconds=0.1,
            )  # fmt: skip
            if all(row.figures[1].faster > 2 for row in results.rows):
                break
        assert [row.backend for row in results.rows] == ["eager", "channels-last", "onnxruntime"]
        for row in results.rows:
            big, small = row.figures
            assert small.faster > 2, row
            assert big.faster == 1
            assert small.file_bytes < big.file_bytes
            assert small.memory_bytes is not None
            assert big.memory_bytes is not None
            assert small.memory_bytes < big.memory_bytes
            assert big.per_second == pytest.approx(1 / big.seconds)
            assert (big.theory, big.verdict) == (None, None)
            assert small.theory == pytest.approx(16, rel=0.1)
            assert small.verdict is not None
            assert "× faster; theory" in small.verdict

    def test_str_has_a_line_for_every_model(self) -> None:
        results = bench({"big": wide(32), "small": wide(8)}, X, backends=["eager"], seconds=0.0)
        big, small = str(results).splitlines()
        assert big.startswith(f"{results.rows[0].where}: big ")
        assert big.endswith(" ms")
        assert small.endswith(f" ms ({results.rows[0].figures[1].verdict})")

    def test_every_model_has_its_own_theory_and_verdict(self) -> None:
        models = {"a": wide(64), "b": wide(32), "c": wide(16)}
        (row,) = bench(models, X, backends=["eager"], threads=[1], seconds=0.05).rows
        assert [own.theory for own in row.figures] == [None, pytest.approx(2), pytest.approx(4)]
        _, b, c = (own.verdict for own in row.figures)
        assert b is not None
        assert c is not None
        assert "; theory 2.0×" in b
        assert "; theory 4.0×" in c

    def test_batches_and_threads_are_all_combined(self) -> None:
        results = bench(
            [wide(8), wide(4)], X, backends=["eager"], batches=[1, 3], threads=[1, 2], seconds=0.0
        )
        assert [(r.threads, r.batch) for r in results.rows] == [(1, 1), (1, 3), (2, 1), (2, 3)]

    def test_a_runtime_that_fails_is_skipped(self) -> None:
        results = bench(
            [wide(8).double()], X.double(), backends=["eager", "onnxruntime"], seconds=0.0
        )
        assert [row.backend for row in results.rows] == ["eager"]
        assert list(results.skipped) == [f"onnxruntime, batch 1, threads {torch.get_num_threads()}"]

    def test_a_batch_size_that_fails_is_skipped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(BACKENDS, "eager", Fussy("eager"))
        results = bench(
            [wide(8)], X, backends=["eager"], batches=[1, 2, 3], threads=[1], seconds=0.0
        )
        assert [row.where for row in results.rows] == [
            "eager, batch 1, threads 1",
            "eager, batch 3, threads 1",
        ]
        assert results.skipped == {"eager, batch 2, threads 1": "no pairs here"}
        with pytest.raises(
            fpgm.ModelError, match=r": eager, batch 2, threads 1 \(no pairs here\)\.$"
        ):
            bench([wide(8)], X, backends=["eager"], batches=[2], threads=[1])

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
    def test_compiled(self) -> None:
        if (why := BACKENDS["compile"].unavailable_reason()) is not None:
            pytest.skip(why)
        (row,) = bench([wide(16), wide(8)], X, backends=["compile"], seconds=0.0).rows
        verdict = row.figures[1].verdict
        assert verdict is not None
        assert "; theory 2.0×" in verdict

    def test_an_input_the_model_cannot_take(self) -> None:
        with pytest.raises(fpgm.ModelError, match="Model 'original' fails on the example"):
            bench([wide(8)], torch.zeros(1, 5, 8, 8), backends=["eager"])

    def test_inputs_are_unchanged(self) -> None:
        class Greedy(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.mul_(0.5)

        x = torch.ones(1, 3)
        bench([Greedy()], x, backends=["eager"], seconds=0.0)
        assert (x == 1).all()

    def test_models_are_unchanged(self) -> None:
        model = wide(8).train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        threads = torch.get_num_threads()
        bench([model], X, backends=["eager", "channels-last"], threads=[1], seconds=0.0)
        assert model.training
        assert torch.get_num_threads() == threads
        assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def test_unavailable_runtimes_are_named(self) -> None:
        results = bench([wide(8)], X, backends=["eager", "cuda"], seconds=0.0)
        if not torch.cuda.is_available():
            assert results.skipped == {"cuda": "no CUDA device"}
            with pytest.raises(fpgm.RequestError, match=r"cuda \(no CUDA device\)"):
                bench([wide(8)], X, backends=["cuda"])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"backends": ["abacus"]}, "backends has 'abacus'"),
            ({"batches": [0]}, "batches has 0"),
            ({"batches": [10**20]}, "batches has 1.*: give integers from 1 to 65,536"),
            ({"seconds": -1}, "seconds is -1: give a number of at least 0"),
            ({"seconds": float("nan")}, "seconds is nan"),
            ({"threads": [0]}, "threads is 0"),
            ({"threads": 2}, "threads is 2: give a list"),
            ({"backends": "eager"}, "backends is 'eager': give a list"),
            ({"backends": []}, "backends is empty: give at least one"),
            ({"batches": []}, "batches is empty: give at least one"),
            ({"threads": []}, "threads is empty: give at least one"),
        ],
    )
    def test_bad_requests(self, options: dict[str, list[object]], message: str) -> None:
        with pytest.raises(fpgm.RequestError, match=message):
            bench([wide(8)], X, **options)  # type: ignore[arg-type]
        with pytest.raises(fpgm.RequestError, match="models is a single module"):
            bench(wide(8), X)  # type: ignore[arg-type]
        with pytest.raises(fpgm.RequestError, match="models is empty"):
            bench([], X)


def test_times_of_layers() -> None:
    results = {s.path: s for s in breakdown([wide(256), wide(8)], Example((X,), {}), 1)}
    assert list(results) == ["0", "1", "2", "3", BETWEEN_LAYERS]
    assert results["0"].widths == ((3, 256), (3, 8))
    assert results["1"].widths == (None, None)
    assert results["3"].seconds[0] > results["3"].seconds[1]
    assert results["3"].seconds[0] > results["2"].seconds[1]


class Sorts(nn.Module):
    """Nearly all its time is layer_time outside of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).repeat(1, 16, 1, 1).flatten(1).sort().values


def test_time_between_layers() -> None:
    conv, between = results = breakdown([Sorts(), Sorts()], Example((X,), {}), 1)
    assert (conv.path, between.path) == ("conv", "between layers")
    assert all(b > c for b, c in zip(between.seconds, conv.seconds, strict=True))
    assert "of the time goes into functional code, which are memory-bound" in summary(1.1, results)


def test_with_noise_the_time_between_layers_is_an_upper_bound() -> None:
    """The layers of one run took longer than all of the other."""
    quiet = [_Round({"a": 3.0}, 5.0, 4.0)] * 7
    noisy = [_Round({"a": 6.0}, 8.0, 4.0)] * 7
    assert (_seconds_between(quiet), _seconds_between(noisy)) == ((1.0, False), (2.0, True))
    results = LayerTime(
        BETWEEN_LAYERS, "functional code", (None, None), (1.0, 2.0), False, (False, True)
    )
    assert _format_times(results) == ["1,000", "≤ 2,000"]
    layer = LayerTime("a", "Conv2d", (None, None), (3.0, 6.0))
    assert _format_times(_sum_layers([layer, results])) == ["4,000", "≤ 8,000"]
    assert slowdown_reasons([layer, results], 1, None)() == []
    assert (
        "25% of the time goes into functional code"
        in slowdown_reasons([layer, results], 0, None)()[0]
    )


def test_layers_that_only_some_models_have() -> None:
    split = nn.Sequential(nn.Sequential(nn.Conv2d(3, 2, 1), nn.Conv2d(2, 8, 3)), nn.ReLU())
    complete = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    results = {s.path: s for s in breakdown([complete, split], Example((X,), {}), 1)}
    assert list(results) == ["0", "1", "0.0", "0.1", BETWEEN_LAYERS]
    assert (results["0"].kind, results["0"].seconds[1]) == ("Conv2d", 0)
    assert results["0.1"].widths == (None, (2, 8))
    assert results["0.1"].seconds[0] == 0


def test_time_of_children_that_are_not_called_is_their_parent_s() -> None:
    """Attention uses the weights of its linear layer without calling it."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x, x, x)[0]

    (own, _) = breakdown([Attends().eval()], Example((torch.zeros(5, 1, 8),), {}), 1)
    assert (own.path, own.multiplies) == ("inner", True)


def layer_time(widths: tuple[int, int], seconds: float, kind: str = "Conv2d") -> LayerTime:
    known = kind == "Conv2d"
    both = ((128, 128), widths) if known else (None, None)
    return LayerTime("x", kind, both, (1.0, seconds), known)


def summary(
    faster: float, layers: list[LayerTime], profile: Callable[[], list[ProfiledNode]] | None = None
) -> str:
    return summarize(faster, 2.0, 0.02, slowdown_reasons(layers, 1, profile))


class TestVerdict:
    def test_a_speedup_near_the_theory(self) -> None:
        assert summary(1.9, [layer_time((79, 79), 1.0)]) == "1.9× faster; theory 2.0×"

    def test_odd_widths_are_named(self) -> None:
        results = summary(1.1, [layer_time((79, 80), 1.0), layer_time((80, 80), 1.0)])
        assert "1 layer has widths that are not multiples of 16" in results
        assert "(50% of the time in PyTorch)" in results

    def test_odd_widths_matter_from_twice_the_multiple_on(self) -> None:
        def layer(before: int, after: int) -> LayerTime:
            return LayerTime("x", "Conv2d", ((before,) * 2, (after,) * 2), (1.0, 1.0))

        both = summary(1.1, [layer(64, 39)] * 2)
        assert "2 layers have" in both
        assert "(100% of the time in PyTorch)" in both
        assert "1 layer has" in summary(1.1, [layer(32, 20)])
        assert "multiple" not in summary(1.1, [layer(64, 48)])
        assert "multiple" not in summary(1.1, [layer(16, 10)])

    def test_each_model_has_its_own_reasons(self) -> None:
        layer = LayerTime("x", "Conv2d", ((64, 64), (48, 48), (39, 39)), (1.0, 1.0, 1.0))
        assert slowdown_reasons([layer], 1, None)() == []
        assert len(slowdown_reasons([layer], 2, None)()) == 1

    def test_memory_bound_layers_are_named(self) -> None:
        results = summary(1.1, [layer_time((80, 80), 1.0), layer_time((0, 0), 3.0, "BatchNorm2d")])
        assert "75% of the time goes into BatchNorm2d, which are memory-bound" in results

    def test_the_profile_of_a_runtime_is_used_if_it_has_one(self) -> None:
        nodes = [
            ProfiledNode("a", "FusedConv", 1.0),
            ProfiledNode("b", "Add", 1.0),
            ProfiledNode("c", "Gemm", 2.0),
        ]
        layers = [layer_time((80, 80), 1.0), layer_time((0, 0), 3.0, "BatchNorm2d")]
        results = summary(1.1, layers, lambda: nodes)
        assert "25% of the time goes into Add, which" in results
        assert "BatchNorm" not in results

    def test_a_busy_machine_is_named(self) -> None:
        assert "the machine is busy (times vary by 11%)" in summarize(1.2, 2.0, 0.11, list)
        assert "busy" not in summarize(1.2, 2.0, 0.09, list)

    @pytest.mark.parametrize(
        ("faster", "spread", "words"),
        [
            (0.99, 0.0, "as fast"),
            (1.04, 0.0, "as fast"),
            (1.06, 0.0, "1.1× faster"),
            (1.06, 0.06, "as fast"),
            (0.92, 0.1, "as fast"),
            (0.92, 0.02, "1.1× slower"),
            (1.5, 0.5, "1.5× faster"),  # runs are compared in pairs, so this is no chance
        ],
    )
    def test_small_differences(self, faster: float, spread: float, words: str) -> None:
        assert summarize(faster, 1.0, spread, list) == f"{words}; theory 1.0×"

    def test_paired_runs_and_medians_that_contradict_each_other(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Every second pair is slowed down, and then the other model is the slow one."""
        times = [Timing((8.0, 8.0, 28.0, 8.0, 28.0)), Timing((8.0, 28.0, 28.0, 28.0, 8.0))]
        monkeypatch.setattr("fpgm.latency.benchmark.time_interleaved", lambda *_: times)
        results = bench([wide(16), wide(8)], X, backends=["eager"], threads=[1])
        why = "paired runs say 1.0× as fast, medians say 0.3×"
        assert results.rows[0].crowd == why
        assert str(results).splitlines()[1] == (
            f"eager, batch 1, threads 1: small 8,000 ms (unreliable: {why}; measure "
            "again on an idle machine; theory 2.0×)"
        )
        _show(results, None, {})
        out = capsys.readouterr().out
        verdict, _, _, _, _, small = out.splitlines()[:6]
        assert verdict.startswith(f"eager, batch 1, threads 1: unreliable: {why}")
        assert "| 8,000 |" in small
        assert "|      – |" in small
        assert f"Where the time goes (PyTorch):\n\nUnreliable: {why}.\n" in out

    def test_milliseconds_and_faster_agree(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Of both statistics, pairs of runs count: medians would say 1.55×."""
        times = [Timing((12.0, 12.4, 13.0)), Timing((7.0, 10.0, 8.0))]
        monkeypatch.setattr("fpgm.latency.benchmark.time_interleaved", lambda *_: times)
        monkeypatch.setattr("fpgm.latency.benchmark.MachineLoad", Idle)
        found = bench([wide(16), wide(8)], X, backends=["eager"], threads=[1])
        big, small = found.rows[0].figures
        assert small.faster == pytest.approx(13 / 8)
        assert big.seconds / small.seconds == pytest.approx(small.faster)
        assert small.per_second / big.per_second == pytest.approx(small.faster)
        assert small.verdict is not None
        assert small.verdict.startswith("1.6× faster")
        _show(found, None, {})
        assert "1.62× |" in capsys.readouterr().out
        record = decode(BenchRecord, json.loads(json.dumps(found.to_dict())))
        run = Run("a", bench=record)
        assert [card.value for card in cards(run)] == ["1.6× faster"]
        assert [speed.milliseconds for speed in speeds(run)] == [("12,400", "7,630")]

    @pytest.mark.parametrize(
        ("faster", "medians", "contradicts"),
        [
            (1.8, 1.3, False),
            (1.0, 1.2, False),
            (1.0, 1.3, True),
            (1.2, 0.7, True),
            (0.8, 0.7, False),
        ],
    )
    def test_contradictions(self, faster: float, medians: float, contradicts: bool) -> None:
        assert (find_contradiction(faster, medians) is not None) == contradicts

    def test_slower(self) -> None:
        assert summarize(0.8, 1.5, 0.02, list).startswith(
            "1.2× slower; theory 1.5×. Less than the MACs"
        )


def test_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    run("prune", "resnet20", "--rate", 0.4, "--out", folder)
    options = ("--backend", "eager", "--threads", 1, "--seconds", 0.1)
    out, _ = run("bench", folder, *options, "--json")
    result = json.loads(out)
    assert result["models"] == ["original", str(folder)]
    original, small = result["rows"][0]["figures"]
    assert (original["theory"], original["verdict"]) == (None, None)
    assert small["theory"] > 1.5
    text, _ = run("bench", "resnet20", folder, *options)
    assert "eager, batch 1, threads 1: " in text
    assert "Where the time goes" in text
    message = refused("bench", folder, folder, "resnet20", *options)
    assert message == f"{folder} is named twice: give different models."
    text, _ = run("bench", "resnet20", folder, "resnet32", *options)
    assert f"eager, batch 1, threads 1, {folder}: " in text
    assert "eager, batch 1, threads 1, resnet32: " in text


def test_a_folder_called_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("prune", "digits", "--rate", 0.4, "--out", "original")
    out, _ = run("bench", "original", "--backend", "eager", "--seconds", 0, "--json")
    result = json.loads(out)
    assert result["models"] == ["its original", "original"]
    assert result["rows"][0]["figures"][1]["theory"] > 1.5


def test_the_report_knows_the_theory_of_old_and_new_files() -> None:
    results = bench([wide(16), wide(8)], X, backends=["eager"], seconds=0.0)
    (row,) = decode(BenchRecord, json.loads(json.dumps(results.to_dict()))).rows
    assert row.theoretical_speedup == pytest.approx(2)
    old = asdict(results.rows[0]) | {"theory": 3.0, "verdict": "3.0× faster"}
    for own in old["figures"]:
        del own["theory"], own["verdict"]
    (row,) = decode(BenchRecord, json.loads(json.dumps({"rows": [old]}))).rows
    assert row.theoretical_speedup == 3


def test_a_folder_that_is_not_there() -> None:
    message = refused("bench", "runs/nothere")
    assert message == "There is no folder runs/nothere: give a folder of fpgm prune, or a model."
