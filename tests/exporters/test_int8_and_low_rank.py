"""Quantised models and split layers: their error is measured and bounded."""

from __future__ import annotations

import importlib
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.exported import Mixed, loaded
from tests.helpers.recoverable import stir
from torch import nn

import fpgm
from fpgm.exporters import comparison
from fpgm.exporters.low_rank import split_layers
from fpgm.exporters.onnx import OnnxModule
from fpgm.models import resnet
from fpgm.utils.example_inputs import Example, batch_size
from fpgm.utils.timing import time_interleaved

X = torch.randn(2, 3, 16, 16)


class TestInt8:
    def test_smaller_and_nearly_the_same(self, tmp_path: Path) -> None:
        model = stir(resnet(20))
        batches = [torch.randn(8, 3, 16, 16) for _ in range(4)]
        done = fpgm.export(model, X, tmp_path / "a.onnx", loader=batches, int8=True)
        int8 = done.int8
        assert int8 is not None
        assert done.bytes < 0.5 * int8.bytes_before
        assert 0 < int8.error < 0.2
        assert 0 < int8.seconds < 1
        assert 0 < int8.seconds_before < 1
        assert int8.faster > 0
        assert int8.threads == torch.get_num_threads()
        assert OnnxModule((tmp_path / "a.onnx").read_bytes())(X).shape == (2, 10)

    def test_times_are_those_of_the_float_model_and_of_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With a clock that advances by the size of the model at every run."""
        now = [0]

        def timed(data: bytes, *_: Any) -> Any:
            return lambda: now.append(now[-1] + len(data))

        monkeypatch.setattr(comparison, "_load_runner", timed)
        monkeypatch.setattr(
            comparison, "time_interleaved", partial(time_interleaved, clock=lambda: float(now[-1]))
        )
        done = fpgm.export(Mixed(), X, tmp_path / "a.onnx", loader=[X], int8=True)
        assert done.int8 is not None
        assert done.int8.seconds_before == done.int8.bytes_before
        assert done.int8.seconds == pytest.approx(done.bytes, rel=1e-9)  # by a quotient
        assert done.int8.faster == pytest.approx(done.int8.bytes_before / done.bytes)

    @pytest.mark.parametrize(("batch", "pieces"), [(1, 24), (2, 12), (3, 3 * 3), (16, 3)])
    def test_every_input_is_used_for_any_batch_size(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, pieces: int
    ) -> None:
        exporting = importlib.import_module("fpgm.exporters.api")
        right, looked = exporting.to_int8, list[Example]()

        def spied(data: bytes, examples: list[Example], *rest: Any) -> bytes:
            looked.extend(examples)
            result: bytes = right(data, examples, *rest)
            return result

        monkeypatch.setattr(exporting, "to_int8", spied)
        monkeypatch.setattr(comparison, "_SECONDS", 0.2)
        batches = [torch.randn(8, 3, 16, 16) for _ in range(3)]
        done = fpgm.export(
            stir(Mixed()), torch.zeros(batch, 3, 16, 16), tmp_path / "a.onnx",
            loader=batches, images=24, any_batch=False, int8=True,
        )  # fmt: skip
        assert (done.noise, done.inputs) == (batch, 24)
        assert [batch_size(item) for item in looked] == [batch] * pieces
        rows = {tuple(row.flatten().tolist()) for item in looked for row in item.args[0]}
        assert rows == {tuple(row.flatten().tolist()) for item in batches for row in item}

    def test_a_file_with_a_large_error_is_not_written(self, tmp_path: Path) -> None:
        """One unused channel is so large that int8 rounds all others to zero."""
        model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)).eval()
        with torch.no_grad():
            model[0].weight[0] *= 1e5
            model[1].weight[:, 0] = 0
            model[1].bias.zero_()
        assert fpgm.export(model, X, tmp_path / "a.onnx").error < 1e-4
        (tmp_path / "a.onnx").unlink()
        with pytest.raises(fpgm.VerificationError) as caught:
            fpgm.export(model, X, tmp_path / "a.onnx", loader=[X], int8=True)
        assert re.fullmatch(
            r"Quantization to int8 changes the outputs by \d+% of their squares \(at most 50% is "
            r"accepted\): no file was written\. Export without int8\.",
            str(caught.value),
        )
        assert list(tmp_path.iterdir()) == []


class TestLowRank:
    def net(self) -> nn.Sequential:
        """A convolution of rank 6 and one of full rank."""
        torch.manual_seed(0)
        conv = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        mix = torch.randn(32, 6) @ torch.randn(6, 16 * 9) / 20
        conv.weight.data = mix.reshape(conv.weight.shape)
        return nn.Sequential(nn.Conv2d(3, 16, 3), conv, nn.ReLU(), nn.Conv2d(32, 8, 1)).eval()

    def test_a_dependent_layer_is_split_without_loss(self) -> None:
        model = self.net()
        small, splits = split_layers(model, Example((X,), {}), error=1e-6)
        assert [(s.layer, s.rank) for s in splits] == [("1", 6)]
        assert torch.allclose(small(X), model(X), atol=1e-4)

    def test_more_error_gives_a_smaller_rank_within_the_bound(self) -> None:
        model = self.net()
        ranks = []
        for error in (1e-6, 0.05, 0.3):
            _, splits = split_layers(model, Example((X,), {}), error=error)
            assert all(s.error <= error for s in splits)
            ranks.append(next(s.rank for s in splits if s.layer == "1"))
        assert ranks == sorted(ranks, reverse=True)
        assert ranks[0] > ranks[-1]

    def test_layers_for_which_it_saves_nothing(self) -> None:
        with pytest.raises(fpgm.RequestError, match=r"low_rank is 0\.01: .* saves no weights"):
            split_layers(nn.Sequential(nn.Conv2d(3, 4, 1)), Example((X,), {}), error=0.01)

    def test_layers_with_hooks_and_layers_that_are_only_read_stay(self) -> None:
        model = self.net()
        model[1].register_forward_hook(lambda *_: None)
        with pytest.raises(fpgm.RequestError, match="saves no weights"):
            split_layers(model, Example((X,), {}), error=1e-6)

    def test_a_pruned_network_with_adapters(self, tmp_path: Path) -> None:
        small = fpgm.prune(stir(resnet(20)), X, rate=0.4, residual="independent")
        done = fpgm.export(small, X, tmp_path / "a.onnx", low_rank=0.4)
        assert done.splits
        assert done.low_rank is not None
        assert 0 < done.low_rank.error < 1

    def test_in_a_file(self, tmp_path: Path) -> None:
        done = fpgm.export(self.net(), X, tmp_path / "a.onnx", low_rank=1e-6)
        assert [s.layer for s in done.splits] == ["1"]
        assert done.low_rank is not None
        assert done.low_rank.error < 1e-9
        assert done.bytes < done.low_rank.bytes_before
        assert torch.allclose(loaded(tmp_path / "a.onnx", "onnx")(X), self.net()(X), atol=1e-4)
