"""Models timed against each other, and what is said about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.shell import refused, run
from torch import nn

import fpgm
from fpgm.examples import Example
from fpgm.latency.backends import Piece, backend_of
from fpgm.latency.bench import bench
from fpgm.latency.breakdown import Spent, breakdown
from fpgm.latency.memory import process_bytes, torch_bytes
from fpgm.latency.verdict import reasons, verdict

X = torch.randn(1, 3, 32, 32)


def wide(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 8, 3)
    )


class TestMemory:
    def test_weights_and_the_worst_moment_in_pytorch(self) -> None:
        net = nn.Sequential(nn.Linear(1000, 500), nn.ReLU(), nn.Linear(500, 10)).eval()
        x = torch.randn(64, 1000)
        kilobytes = torch_bytes(net, lambda: net(x)) / 4000
        weights = 1000 * 0.5 + 0.5 + 0.5 * 10 + 0.01
        at_once = 2 * 64 * 0.5  # what the first layer gives, and that without what is below zero
        assert kilobytes == pytest.approx(weights + at_once, rel=0.05)

    @pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
    def test_other_runtimes_need_more_for_more_inputs(self, runtime: str) -> None:
        backend = backend_of(runtime)
        needed = []
        for batch in (1, 64):
            example = Example((torch.zeros(batch, 3, 64, 64),), {})
            needed.append(backend.load(wide(64).eval(), example, 1).memory())
        few, many = needed
        assert few is not None
        assert many is not None
        at_least = 63 * 64 * 62 * 62 * 4  # the widest output of 63 more pictures
        assert many - few > 0.9 * at_least

    def test_a_system_that_does_not_say(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.platform", "darwin")
        assert process_bytes("onnxruntime", b"", {}, 1) is None

    def test_a_runtime_that_fails_there(self) -> None:
        assert process_bytes("onnxruntime", b"no model", {}, 1) is None


class TestBench:
    def test_a_smaller_model_is_faster_in_every_runtime(self) -> None:
        found = bench(
            {"big": wide(256), "small": wide(16)}, X,
            backends=["eager", "channels-last", "onnxruntime"], threads=[1], seconds=0.1,
        )  # fmt: skip
        assert [row.backend for row in found.rows] == ["eager", "channels-last", "onnxruntime"]
        for row in found.rows:
            big, small = row.figures
            assert small.faster > 2, row
            assert big.faster == 1
            assert small.file_bytes < big.file_bytes
            assert small.memory_bytes is not None
            assert big.memory_bytes is not None
            assert small.memory_bytes < big.memory_bytes
            assert big.per_second == pytest.approx(1 / big.seconds)
            assert row.theory == pytest.approx(16, rel=0.1)
            assert "× faster; theory" in row.verdict

    def test_batches_and_threads_are_all_combined(self) -> None:
        found = bench(
            [wide(8), wide(4)], X, backends=["eager"], batches=[1, 3], threads=[1, 2], seconds=0.0
        )
        assert [(r.threads, r.batch) for r in found.rows] == [(1, 1), (1, 3), (2, 1), (2, 3)]

    def test_a_runtime_that_fails_costs_only_its_own_rows(self) -> None:
        found = bench(
            [wide(8).double()], X.double(), backends=["eager", "onnxruntime"], seconds=0.0
        )
        assert [row.backend for row in found.rows] == ["eager"]
        assert list(found.skipped) == ["onnxruntime"]

    def test_an_input_the_model_cannot_take(self) -> None:
        with pytest.raises(fpgm.ModelError, match="Model 'original' fails on the example"):
            bench([wide(8)], torch.zeros(1, 5, 8, 8), backends=["eager"])

    def test_inputs_are_not_written_to(self) -> None:
        class Greedy(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.mul_(0.5)

        x = torch.ones(1, 3)
        bench([Greedy()], x, backends=["eager"], seconds=0.0)
        assert (x == 1).all()

    def test_models_stay_as_they_were(self) -> None:
        model = wide(8).train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        threads = torch.get_num_threads()
        bench([model], X, backends=["eager", "channels-last"], threads=[1], seconds=0.0)
        assert model.training
        assert torch.get_num_threads() == threads
        assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def test_what_cannot_be_used_is_named(self) -> None:
        found = bench([wide(8)], X, backends=["eager", "cuda"], seconds=0.0)
        if not torch.cuda.is_available():
            assert found.skipped == {"cuda": "no CUDA device"}
            with pytest.raises(fpgm.RequestError, match="cuda: no CUDA device"):
                bench([wide(8)], X, backends=["cuda"])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"backends": ["abacus"]}, "backends has 'abacus'"),
            ({"batches": [0]}, "batches has 0"),
            ({"threads": [0]}, "threads is 0"),
            ({"threads": 2}, "threads is 2: give a list"),
            ({"backends": "eager"}, "backends is 'eager': give a list"),
        ],
    )
    def test_bad_requests(self, options: dict[str, list[object]], message: str) -> None:
        with pytest.raises(fpgm.RequestError, match=message):
            bench([wide(8)], X, **options)  # type: ignore[arg-type]
        with pytest.raises(fpgm.RequestError, match="models is one module"):
            bench(wide(8), X)  # type: ignore[arg-type]
        with pytest.raises(fpgm.RequestError, match="models is empty"):
            bench([], X)


def test_where_the_time_goes() -> None:
    found = {s.path: s for s in breakdown([wide(256), wide(8)], Example((X,), {}), 1)}
    assert list(found) == ["0", "1", "2", "3"]
    assert found["0"].widths == ((3, 256), (3, 8))
    assert found["1"].widths == (None, None)
    assert found["3"].seconds[0] > found["3"].seconds[1]
    assert found["3"].seconds[0] > found["2"].seconds[1]


def spent(widths: tuple[int, int], seconds: float, kind: str = "Conv2d") -> Spent:
    known = kind == "Conv2d"
    both = ((128, 128), widths) if known else (None, None)
    return Spent("x", kind, both, (1.0, seconds), known)


def said(
    faster: float, layers: list[Spent], pieces: Callable[[], list[Piece]] | None = None
) -> str:
    return verdict(faster, 2.0, 0.02, reasons(layers, pieces))


class TestVerdict:
    def test_near_enough(self) -> None:
        assert said(1.9, [spent((79, 79), 1.0)]) == "1.9× faster; theory 2.0×"

    def test_odd_widths_are_named(self) -> None:
        found = said(1.1, [spent((79, 80), 1.0), spent((80, 80), 1.0)])
        assert "1 wide layers (50% of the time in PyTorch) have widths that are no mult" in found

    def test_narrow_layers_cannot_be_wider(self) -> None:
        narrow = Spent("x", "Conv2d", ((16, 16), (10, 10)), (1.0, 1.0))
        assert "multiple" not in said(1.1, [narrow])

    def test_memory_is_named(self) -> None:
        found = said(1.1, [spent((80, 80), 1.0), spent((0, 0), 3.0, "BatchNorm2d")])
        assert "75% of the time goes into BatchNorm2d, which wait for memory" in found

    def test_a_runtime_speaks_for_itself(self) -> None:
        pieces = [Piece("a", "FusedConv", 1.0), Piece("b", "Add", 1.0), Piece("c", "Gemm", 2.0)]
        layers = [spent((80, 80), 1.0), spent((0, 0), 3.0, "BatchNorm2d")]
        found = said(1.1, layers, lambda: pieces)
        assert "25% of the time goes into Add, which" in found
        assert "BatchNorm" not in found

    def test_a_busy_machine_is_named(self) -> None:
        assert "the machine is busy" in verdict(1.1, 2.0, 0.7, list)

    def test_slower(self) -> None:
        assert verdict(0.8, 1.5, 0.02, list).startswith("1.2× slower; theory 1.5×. Less than MACs")


def test_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    run("prune", "resnet20", "--rate", 0.4, "--out", folder)
    options = ("--backend", "eager", "--threads", 1, "--seconds", 0.1)
    out, _ = run("bench", folder, *options, "--json")
    told = json.loads(out)
    assert told["models"] == ["original", str(folder)]
    assert told["rows"][0]["theory"] > 1.5
    text, _ = run("bench", "resnet20", folder, *options)
    assert "eager, batch 1, threads 1: " in text
    assert "Where the time goes" in text
    assert "named twice" in refused("bench", folder, folder, *options)
