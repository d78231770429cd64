"""A model handed over computes what it computed here, or is not handed over."""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from tests.shell import refused, run
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import fpgm
from fpgm.examples import Example, batch_of
from fpgm.export import comparison
from fpgm.export.fold import folded
from fpgm.export.low_rank import split_layers
from fpgm.export.onnx import OnnxModule, to_onnx
from fpgm.latency.timing import side_by_side
from fpgm.models import resnet
from fpgm.store import read_plans

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


def written_instead(monkeypatch: pytest.MonkeyPatch, other: nn.Module, to: str = "onnx") -> None:
    """Let the file hold another model than the one that was given."""
    exporting = importlib.import_module("fpgm.export")
    right = exporting._WRITERS[to]
    monkeypatch.setitem(exporting._WRITERS, to, lambda _, *rest: right(other, *rest))


class Looking(nn.Module):
    """A row of a table, looked up for every input or for all, beside what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.table = nn.Linear(4, 3), nn.Embedding(2, 3)

    def forward(self, x: Tensor, row: Tensor | None, twice: bool = False) -> Tensor:
        y: Tensor = self.line(2 * x if twice else x)
        return y if row is None else y + self.table(row)


class Far(Tensor):
    """As if on another device: it goes with nothing that is here until it is brought here."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if any(type(leaf) is Tensor for leaf in tree_leaves((args, kwargs))):
            raise RuntimeError("Expected all tensors to be on the same device")
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            if func is Tensor.cpu:
                return found.as_subclass(Tensor)
            return tree_map(lambda t: t.as_subclass(cls) if isinstance(t, Tensor) else t, found)


class TestExport:
    def test_where_it_came_from_is_nobodys_business(self, tmp_path: Path) -> None:
        fpgm.export(Mixed(), X, tmp_path / "a.onnx")
        assert "site-packages" not in str(onnx.load(tmp_path / "a.onnx").graph.node)

    def test_norms_are_folded_in_onnx(self, tmp_path: Path) -> None:
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
        assert (plain.noise, plain.inputs) == (1 + 2 + 5, 0)
        assert (more.noise, more.inputs) == (1 + 2 + 5, 8)

    @pytest.mark.parametrize("any_batch", [True, False])
    def test_a_wrong_file_is_not_left(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, any_batch: bool
    ) -> None:
        """Not even if the example is all zeros, of which every first layer makes nothing."""
        model = shaken(Mixed())
        other = copy.deepcopy(model)
        nn.init.normal_(other.a.weight)  # type: ignore[arg-type]
        x = torch.zeros_like(X)
        assert torch.equal(other(x), model(x))
        written_instead(monkeypatch, other)
        with pytest.raises(fpgm.VerificationError, match="nothing was written"):
            fpgm.export(model, x, tmp_path / "a.onnx", any_batch=any_batch)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("to", ["onnx", "pt2"])
    @pytest.mark.parametrize("whole", [torch.arange(2), torch.tensor(1), None])
    def test_noise_goes_beside_arguments_that_stay(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, whole: Tensor | None
    ) -> None:
        """Whole numbers would be no rows of the table any more; only tensors have several sizes."""
        model = Looking().eval()
        x = {"x": torch.zeros(2, 4), "row": whole, "twice": True}
        done = fpgm.export(model, x, tmp_path / "a", to=to)  # type: ignore[arg-type]
        resizable = whole is None or whole.ndim == 1
        assert (done.noise, done.inputs) == (1 + 2 + 5 if resizable else 2, 0)
        other = copy.deepcopy(model)
        nn.init.normal_(other.line.weight)
        written_instead(monkeypatch, other, to)
        with pytest.raises(fpgm.VerificationError):
            fpgm.export(model, x, tmp_path / "b", to=to)  # type: ignore[arg-type]

    def test_tokens_are_tried_in_several_sizes(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)).eval()
        tokens = torch.tensor([[0, 4, 2]])
        assert fpgm.export(model, tokens, tmp_path / "a.onnx").noise == 1 + 2 + 5
        assert fpgm.export(model, tokens, tmp_path / "a.onnx", any_batch=False).noise == 0

    def test_outputs_on_another_device(self) -> None:
        exporting = importlib.import_module("fpgm.export")
        here = torch.tensor([1.0, 4.0, torch.nan])
        assert exporting.difference([here], [here.as_subclass(Far)]) == 0
        assert exporting.difference([2 * here], [here.as_subclass(Far)]) == 1

    def test_a_link_stays_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        file, link = tmp_path / "folder" / "a.onnx", tmp_path / "link.onnx"
        link.symlink_to(file)
        for _ in ("a name for nothing yet", "a name for a file"):
            done = fpgm.export(Mixed(), X, link)
            assert link.is_symlink()
            assert file.stat().st_size == done.bytes
            assert list(file.parent.iterdir()) == [file]

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
        assert (done.noise, done.inputs) == (1, 0)

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


def description(file: Path, to: str) -> dict[str, str]:
    """What a file says about itself, as its own runtime reads it."""
    if to == "onnx":
        return {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    keys = ("fpgm_version", "torch_version", "fpgm_plans", "fpgm_low_rank", "fpgm_int8")
    found: dict[str, Any] = dict.fromkeys(keys, "")
    if to == "pt2":
        torch.export.load(file, extra_files=found)
        return found
    with pytest.warns(DeprecationWarning, match="torch.jit.load"):
        torch.jit.load(file, _extra_files=found)
    return {key: value.decode() for key, value in found.items()}


class TestDescription:
    @pytest.mark.parametrize("to", ["onnx", "pt2", "torchscript"])
    def test_versions_and_plans(self, tmp_path: Path, to: str) -> None:
        small = fpgm.prune(shaken(resnet(20)), X, rate=0.4)
        fpgm.export(small, X, tmp_path / "a", to=to)  # type: ignore[arg-type]
        told = description(tmp_path / "a", to)
        ((name, (plan,)),) = json.loads(told["fpgm_plans"]).items()
        assert name == ""
        assert fpgm.Plan.from_json(json.dumps(plan)) == small.fpgm_plans[0]
        assert told["fpgm_version"] == fpgm.__version__
        assert told["torch_version"] == torch.__version__
        assert (told["fpgm_int8"], told["fpgm_low_rank"]) == ("false", "null")
        if to == "onnx":
            assert told["onnx_version"] == onnx.__version__
            assert told["onnxruntime_version"] == onnxruntime.__version__

    def test_submodules_pruned_alone_have_their_plans_as_when_saved(self, tmp_path: Path) -> None:
        backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
        small = fpgm.prune(backbone, X, rate=0.5, align=1)
        model = nn.Sequential(small, nn.Flatten(), nn.LazyLinear(2)).eval()
        model(X)
        fpgm.export(model, X, tmp_path / "a.onnx")
        fpgm.save(model, tmp_path / "a.safetensors")
        told = json.loads(description(tmp_path / "a.onnx", "onnx")["fpgm_plans"])
        plans = {
            name: tuple(fpgm.Plan.from_json(json.dumps(plan)) for plan in own)
            for name, own in told.items()
        }
        assert plans == {"0": small.fpgm_plans} == read_plans(tmp_path / "a.safetensors")

    def test_split_layers_and_eight_bits(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(comparison, "_SECONDS", 0.2)
        small = fpgm.prune(shaken(resnet(20)), X, rate=0.4)
        file = tmp_path / "a.onnx"
        thin = fpgm.export(small, X, file, low_rank=0.2)
        first = description(file, "onnx")
        ranks = {split.layer: split.rank for split in thin.splits}
        assert ranks
        assert json.loads(first["fpgm_low_rank"]) == {"error": 0.2, "ranks": ranks}
        assert first["fpgm_int8"] == "false"
        fpgm.export(small, X, file, low_rank=0.2, int8=True, loader=[torch.randn(8, 3, 16, 16)])
        second = description(file, "onnx")
        assert second["fpgm_int8"] == "true"
        assert {**second, "fpgm_int8": "false"}.items() >= first.items()


class TestEightBits:
    def test_smaller_and_nearly_the_same(self, tmp_path: Path) -> None:
        model = shaken(resnet(20))
        batches = [torch.randn(8, 3, 16, 16) for _ in range(4)]
        done = fpgm.export(model, X, tmp_path / "a.onnx", loader=batches, int8=True)
        told = done.int8
        assert told is not None
        assert done.bytes < 0.5 * told.bytes_before
        assert 0 < told.error < 0.2
        assert 0 < told.seconds < 1
        assert 0 < told.seconds_before < 1
        assert told.faster > 0
        assert told.threads == torch.get_num_threads()
        assert OnnxModule((tmp_path / "a.onnx").read_bytes())(X).shape == (2, 10)

    def test_times_are_those_of_the_float_model_and_of_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By a clock that goes on with every byte of a model that runs."""
        now = [0]

        def timed(data: bytes, *_: Any) -> Any:
            return lambda: now.append(now[-1] + len(data))

        monkeypatch.setattr(comparison, "_timed", timed)
        monkeypatch.setattr(
            comparison, "side_by_side", partial(side_by_side, clock=lambda: float(now[-1]))
        )
        done = fpgm.export(Mixed(), X, tmp_path / "a.onnx", loader=[X], int8=True)
        assert done.int8 is not None
        assert (done.int8.seconds_before, done.int8.seconds) == (done.int8.bytes_before, done.bytes)
        assert done.int8.faster == pytest.approx(done.int8.bytes_before / done.bytes)

    @pytest.mark.parametrize(("batch", "pieces"), [(1, 24), (2, 12), (3, 3 * 3), (16, 3)])
    def test_every_input_is_looked_at_whatever_the_size(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, pieces: int
    ) -> None:
        exporting = importlib.import_module("fpgm.export")
        right, looked = exporting.to_int8, list[Example]()

        def spied(data: bytes, examples: list[Example], *rest: Any) -> bytes:
            looked.extend(examples)
            made: bytes = right(data, examples, *rest)
            return made

        monkeypatch.setattr(exporting, "to_int8", spied)
        monkeypatch.setattr(comparison, "_SECONDS", 0.2)
        batches = [torch.randn(8, 3, 16, 16) for _ in range(3)]
        done = fpgm.export(
            shaken(Mixed()), torch.zeros(batch, 3, 16, 16), tmp_path / "a.onnx",
            loader=batches, images=24, any_batch=False, int8=True,
        )  # fmt: skip
        assert (done.noise, done.inputs) == (batch, 24)
        assert [batch_of(own) for own in looked] == [batch] * pieces
        rows = {tuple(row.flatten().tolist()) for own in looked for row in own.args[0]}
        assert rows == {tuple(row.flatten().tolist()) for own in batches for row in own}

    def test_a_ruined_file_is_not_left(self, tmp_path: Path) -> None:
        """One channel nobody reads is so large that eight bits leave nothing of the others."""
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
            r"Eight bits change the outputs by \d+% of their squares \(beyond 50% the model is "
            r"ruined\): nothing was written\. Export it without int8\.",
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `fpgm prune` leaves."""
    made = tmp_path_factory.mktemp("export") / "small"
    run("prune", "resnet20", "--weights", "shipped", "--rate", 0.3, "--out", made)
    return made


class TestCommand:
    few = ("--data", "cifar10-sample", "--images", 64, "--test", 64)

    def test_it_writes_what_it_compared(self, folder: Path, tmp_path: Path) -> None:
        told = json.loads(run("export", folder, *self.few, "--json")[0])
        assert told["error"] < 1e-4
        assert told["noise"] == 1 + 2 + 5
        assert told["inputs"] >= 64
        assert told["accuracy"]["PyTorch"] == told["accuracy"]["small.onnx"]
        assert (folder / "small.onnx").stat().st_size == told["bytes"]
        text, _ = run("export", folder, "--to", "pt2", "--out", tmp_path / "a.pt2")
        assert "Its outputs differ from PyTorch's by" in text
        assert "at most, over 8 inputs of noise.\n" in text

    def test_of_one_batch_size(self, folder: Path, tmp_path: Path) -> None:
        options = ("--fixed-batch", "--input", "3x3x32x32", "--out", tmp_path / "a.onnx")
        text, _ = run("export", folder, *self.few, *options)
        assert re.search(r"over 3 inputs of noise and \d+ pictures\.\n", text)
        shares = re.search(r"Accuracy on test pictures: PyTorch (\S+), a.onnx (\S+)\.\n", text)
        assert shares is not None
        assert shares[1] == shares[2]

    @pytest.mark.parametrize(
        ("options", "key", "name", "title"),
        [
            (("--int8",), "int8", "small.int8.onnx", "Eight bits"),
            (("--low-rank", 0.05), "low_rank", "small.low-rank.onnx", r"\d+ layers in two"),
        ],
    )
    def test_what_is_lost_and_gained_stands_beside_the_float_model(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        options: tuple[object, ...],
        key: str,
        name: str,
        title: str,
    ) -> None:
        monkeypatch.setattr(comparison, "_SECONDS", 0.2)
        told = json.loads(run("export", folder, *self.few, *options, "--json")[0])
        beside = told[key]
        assert 0 < beside["error"] < 0.5
        assert min(beside["seconds"], beside["seconds_before"], beside["faster"]) > 0
        assert told["bytes"] < beside["bytes_before"]
        assert set(told["accuracy"]) == {"PyTorch", name}
        assert told["accuracy"][name] == pytest.approx(told["accuracy"]["PyTorch"], abs=0.1)
        assert bool(told["splits"]) == (key == "low_rank")
        text, _ = run("export", folder, *self.few, *options)
        assert re.search(
            rf"^{title}: \S+ MB before; the outputs' squared error is \S+% of their squares; "
            r"\S+ ms before, \S+ ms now \(\S+× as fast, ONNX Runtime, threads: \d+\)\.$",
            text,
            re.MULTILINE,
        )
        assert re.search(
            rf"^Accuracy on test pictures: PyTorch \S+%, {name} \S+%\.$", text, re.MULTILINE
        )

    def test_bad_requests(self, folder: Path) -> None:
        assert "go with --to onnx" in refused("export", folder, "--to", "pt2", "--low-rank", 0.1)
        assert "--to is 'tflite'" in refused("export", folder, "--to", "tflite")
        assert "give --data" in refused("export", folder, "--int8")
