"""A model handed over computes what it computed here, or is not handed over."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import onnx
import pytest
import torch
from tests.shell import refused, run
from torch import Tensor, nn

import fpgm
from fpgm.examples import Example
from fpgm.export.fold import folded
from fpgm.export.low_rank import split_layers
from fpgm.export.onnx import OnnxModule, to_onnx
from fpgm.models import resnet

X = torch.randn(2, 3, 16, 16)


def shaken(model: nn.Module) -> nn.Module:
    """Norms that do something: fresh ones are nearly the identity."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval()


class Mixed(nn.Module):
    """A norm that can be folded, one behind two readers, one before its layer, a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.an = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.b, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.first, self.c = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.up, self.un = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.BatchNorm2d(4)
        self.line, self.ln = nn.Linear(4, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.an(self.a(x)))
        b = self.b(x)
        x = self.bn(b) + b
        x = self.un(self.up(self.c(torch.relu(self.first(x)))))
        y: Tensor = self.ln(self.line(x.mean((2, 3))))
        return y


class TestFolding:
    def test_only_norms_that_alone_read_a_layer_go(self) -> None:
        model = shaken(Mixed())
        small = folded(model, Example((X,), {}))
        gone = {name for name, m in small.named_modules() if isinstance(m, nn.Identity)}
        assert gone == {"an", "un", "ln"}
        assert torch.allclose(small(X), model(X), atol=1e-5)

    @pytest.mark.parametrize("residual", ["coupled", "independent"])
    def test_pruned_networks(self, residual: str) -> None:
        model = shaken(resnet(20))
        small = fpgm.prune(model, X, rate=0.4, residual=residual)
        thin = folded(small, Example((X,), {}))
        assert not any(isinstance(m, nn.BatchNorm2d) for m in thin.modules())
        assert torch.allclose(thin(X), small(X), atol=1e-4)

    def test_the_model_stays_as_it_was(self) -> None:
        model = shaken(Mixed()).train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        folded(model, Example((X,), {}))
        assert model.training
        assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())

    def test_a_norm_without_statistics_stays(self) -> None:
        norm = nn.BatchNorm2d(8, track_running_stats=False)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), norm).eval()
        assert isinstance(folded(model, Example((X,), {}))[1], nn.BatchNorm2d)  # type: ignore[index]


@pytest.mark.parametrize("to", ["onnx", "pt2", "torchscript"])
@pytest.mark.parametrize("residual", ["coupled", "independent"])
class TestFormats:
    def test_of_any_batch_size(self, tmp_path: Path, to: str, residual: str) -> None:
        small = fpgm.prune(shaken(resnet(20)), X, rate=0.4, residual=residual)
        done = fpgm.export(small, X[:1], tmp_path / "small", to=to)  # type: ignore[arg-type]
        assert done.error < 1e-5
        assert done.bytes == (tmp_path / "small").stat().st_size
        assert torch.allclose(loaded(tmp_path / "small", to)(X), small(X), atol=1e-4)


def loaded(file: Path, to: str) -> nn.Module:
    if to == "onnx":
        return OnnxModule(file.read_bytes())
    if to == "pt2":
        return torch.export.load(file).module()
    with pytest.warns(DeprecationWarning, match="torch.jit.load"):
        found: nn.Module = torch.jit.load(file)
    return found


class TestExport:
    def test_what_the_file_says_about_itself(self, tmp_path: Path) -> None:
        onnx = pytest.importorskip("onnx")
        small = fpgm.prune(shaken(resnet(20)), X, rate=0.4)
        fpgm.export(small, X, tmp_path / "a.onnx")
        proto = onnx.load(tmp_path / "a.onnx")
        told = {p.key: p.value for p in proto.metadata_props}
        (plan,) = json.loads(told["fpgm_plans"])
        assert fpgm.Plan.from_json(json.dumps(plan)) == small.fpgm_plans[0]
        assert told["fpgm_version"] == fpgm.__version__
        assert "site-packages" not in str(proto.graph.node)

    def test_norms_are_folded_in_onnx(self, tmp_path: Path) -> None:
        onnx = pytest.importorskip("onnx")
        model = shaken(Mixed())
        fpgm.export(model, X, tmp_path / "a.onnx")
        kinds = [node.op_type for node in onnx.load(tmp_path / "a.onnx").graph.node]
        assert kinds.count("BatchNormalization") == 2
        exporting = importlib.import_module("fpgm.export")
        assert not exporting.difference([folded(model, Example((X,), {}))(X)], [model(X)]) > 1e-5

    def test_real_inputs_are_compared_too(self, tmp_path: Path) -> None:
        batches = [(torch.randn(4, 3, 16, 16), torch.zeros(4)) for _ in range(3)]
        model = shaken(Mixed())
        plain = fpgm.export(model, X, tmp_path / "a.onnx")
        more = fpgm.export(model, X, tmp_path / "a.onnx", loader=batches, images=8)
        assert more.inputs == plain.inputs + 8

    def test_a_wrong_file_is_not_left(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        exporting = importlib.import_module("fpgm.export")
        right = exporting._WRITERS["onnx"]
        model, other = shaken(Mixed()), shaken(Mixed())
        nn.init.normal_(other.a.weight)  # type: ignore[arg-type]
        wrong = {"onnx": lambda _, *rest: right(other, *rest)}
        monkeypatch.setattr(exporting, "_WRITERS", wrong)
        with pytest.raises(fpgm.VerificationError, match="nothing was written"):
            fpgm.export(model, X, tmp_path / "a.onnx")
        assert list(tmp_path.iterdir()) == []

    def test_nothing_passes_for_nothing(self) -> None:
        exporting = importlib.import_module("fpgm.export")
        nan, inf = torch.tensor([float("nan"), 1.0]), torch.tensor([float("-inf"), 1.0])
        assert exporting.difference([nan], [torch.ones(2)]) == float("inf")
        assert exporting.difference([torch.ones(2)], [inf]) == float("inf")
        assert exporting.difference([-inf], [inf]) == float("inf")
        assert exporting.difference([inf], [inf]) == 0
        assert exporting.difference([torch.ones(1)], [torch.ones(2)]) == float("inf")

    def test_a_layers_output_that_is_also_the_models(self, tmp_path: Path) -> None:
        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                y = self.conv(x)
                return self.norm(y), y

        assert fpgm.export(shaken(Both()), X, tmp_path / "a.onnx").error < 1e-5

    def test_arguments_by_name_and_of_other_kinds(self, tmp_path: Path) -> None:
        class Named(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 3)

            def forward(self, x: Tensor, scale: Tensor, twice: bool = False) -> Tensor:
                y: Tensor = self.conv(x) * scale[:, None, None]
                return 2 * y if twice else y

        call = {"twice": True, "scale": torch.rand(4), "x": X}
        assert fpgm.export(Named(), call, tmp_path / "a.onnx").error < 1e-5

    def test_one_batch_size_only(self, tmp_path: Path) -> None:
        class One(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 3)

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = self.conv(x).reshape(1, -1)
                assert y.shape[1] == 784
                return y

        with pytest.raises(fpgm.ModelError, match="any_batch=False"):
            fpgm.export(One(), X[:1], tmp_path / "a.onnx")
        done = fpgm.export(One(), X[:1], tmp_path / "a.onnx", any_batch=False)
        assert done.inputs == 1

    def test_a_model_that_depends_on_its_data(self, tmp_path: Path) -> None:
        class Moody(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x if x.sum() > 0 else -x

        with pytest.raises(fpgm.ModelError, match="PyTorch cannot export this model"):
            fpgm.export(Moody(), X, tmp_path / "a.onnx")
        assert list(tmp_path.iterdir()) == []

    def test_bad_requests(self, tmp_path: Path) -> None:
        with pytest.raises(fpgm.RequestError, match="to is 'tflite'"):
            fpgm.export(Mixed(), X, tmp_path / "a", to="tflite")  # type: ignore[arg-type]
        with pytest.raises(fpgm.RequestError, match="int8=True"):
            fpgm.export(Mixed(), X, tmp_path / "a", int8=True)


def test_eight_bits(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = shaken(resnet(20))
    batches = [torch.randn(8, 3, 16, 16) for _ in range(4)]
    done = fpgm.export(model, X, tmp_path / "a.onnx", loader=batches, int8=True)
    told = done.int8
    assert told is not None
    assert done.bytes < 0.5 * told.bytes_before
    assert 0 < told.error < 0.2
    assert OnnxModule((tmp_path / "a.onnx").read_bytes())(X).shape == (2, 10)


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

    def test_where_it_does_not_pay_that_is_said(self) -> None:
        with pytest.raises(fpgm.RequestError, match=r"low_rank is 0\.01: no layer is cheaper"):
            split_layers(nn.Sequential(nn.Conv2d(3, 4, 1)), Example((X,), {}), error=0.01)

    def test_layers_with_hooks_and_layers_that_are_only_read_stay(self) -> None:
        model = self.net()
        model[1].register_forward_hook(lambda *_: None)
        with pytest.raises(fpgm.RequestError, match="no layer is cheaper"):
            split_layers(model, Example((X,), {}), error=1e-6)

    def test_a_pruned_network_with_adapters(self, tmp_path: Path) -> None:
        small = fpgm.prune(shaken(resnet(20)), X, rate=0.4, residual="independent")
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


def test_channels_are_placed_by_a_gather() -> None:
    """Runtimes have no cheap scatter."""
    small = fpgm.prune(shaken(resnet(20)), X, rate=0.4, residual="independent").eval()
    data = to_onnx(small, Example((X,), {}))
    kinds = {node.op_type for node in onnx.load_from_string(data).graph.node}
    assert "Gather" in kinds
    assert not kinds & {"ScatterND", "ScatterElements", "Transpose"}


def test_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    run("prune", "resnet20", "--weights", "shipped", "--rate", 0.3, "--out", folder)
    out, _ = run(
        "export", folder, "--data", "cifar10-sample", "--images", 64, "--test", 64, "--json"
    )
    told = json.loads(out)
    assert told["error"] < 1e-4
    assert told["accuracy"]["PyTorch"] == told["accuracy"]["small.onnx"]
    assert (folder / "small.onnx").stat().st_size == told["bytes"]
    text, _ = run("export", folder, "--to", "pt2", "--out", tmp_path / "a.pt2")
    assert "Its outputs differ from PyTorch's by" in text
    assert "go with --to onnx" in refused("export", folder, "--to", "pt2", "--low-rank", 0.1)
    assert "--to is 'tflite'" in refused("export", folder, "--to", "tflite")
    assert "give --data" in refused("export", folder, "--int8")
