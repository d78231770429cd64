"""Exported models compute the same as in PyTorch, or no file is written."""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from tests.helpers.exported import Mixed, loaded
from tests.helpers.recoverable import stir
from tests.helpers.shell import refused, run
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import fpgm
from fpgm.exporters import comparison
from fpgm.exporters.api import _WRITERS
from fpgm.exporters.bn_folding import fold_batch_norms
from fpgm.exporters.onnx import to_onnx
from fpgm.exporters.output_error import relative_difference
from fpgm.models import resnet
from fpgm.pruning.serialization import read_plans
from fpgm.utils.example_inputs import Example

X = torch.randn(2, 3, 16, 16)


class TestFolding:
    def test_only_norms_that_are_the_only_consumer_are_folded(self) -> None:
        model = stir(Mixed())
        small = fold_batch_norms(model, Example((X,), {}))
        folded = {name for name, m in small.named_modules() if isinstance(m, nn.Identity)}
        assert folded == {"an", "un", "ln"}
        assert torch.allclose(small(X), model(X), atol=1e-5)

    @pytest.mark.parametrize("residual", ["coupled", "independent"])
    def test_pruned_networks(self, residual: str) -> None:
        model = stir(resnet(20))
        small = fpgm.prune(model, X, rate=0.4, residual=residual)
        thin = fold_batch_norms(small, Example((X,), {}))
        assert not any(isinstance(m, nn.BatchNorm2d) for m in thin.modules())
        assert torch.allclose(thin(X), small(X), atol=1e-4)

    def test_the_model_is_unchanged(self) -> None:
        model = stir(Mixed()).train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        fold_batch_norms(model, Example((X,), {}))
        assert model.training
        assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())

    def test_a_norm_without_statistics_stays(self) -> None:
        norm = nn.BatchNorm2d(8, track_running_stats=False)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), norm).eval()
        assert isinstance(fold_batch_norms(model, Example((X,), {}))[1], nn.BatchNorm2d)  # type: ignore[index]


@pytest.mark.parametrize("to", ["onnx", "pt2", "torchscript"])
@pytest.mark.parametrize("residual", ["coupled", "independent"])
class TestFormats:
    def test_of_any_batch_size(self, tmp_path: Path, to: str, residual: str) -> None:
        small = fpgm.prune(stir(resnet(20)), X, rate=0.4, residual=residual)
        done = fpgm.export(small, X[:1], tmp_path / "small", to=to)  # type: ignore[arg-type]
        assert done.error < 1e-5
        assert done.bytes == (tmp_path / "small").stat().st_size
        assert torch.allclose(loaded(tmp_path / "small", to)(X), small(X), atol=1e-4)


def written_instead(monkeypatch: pytest.MonkeyPatch, other: nn.Module, to: str = "onnx") -> None:
    """Let the file contain another model than the given one."""
    exporting = importlib.import_module("fpgm.exporters.api")
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
            results = func(*args, **(kwargs or {}))
            if func is Tensor.cpu:
                return results.as_subclass(Tensor)
            return tree_map(lambda t: t.as_subclass(cls) if isinstance(t, Tensor) else t, results)


class TestExport:
    def test_the_file_has_no_paths_of_source_files(self, tmp_path: Path) -> None:
        fpgm.export(Mixed(), X, tmp_path / "a.onnx")
        assert "site-packages" not in str(onnx.load(tmp_path / "a.onnx").graph.node)

    def test_norms_are_folded_in_onnx(self, tmp_path: Path) -> None:
        model = stir(Mixed())
        fpgm.export(model, X, tmp_path / "a.onnx")
        kinds = [node.op_type for node in onnx.load(tmp_path / "a.onnx").graph.node]
        assert kinds.count("BatchNormalization") == 2
        assert (
            not relative_difference([fold_batch_norms(model, Example((X,), {}))(X)], [model(X)])
            > 1e-5
        )

    def test_real_inputs_are_compared_too(self, tmp_path: Path) -> None:
        batches = [(torch.randn(4, 3, 16, 16), torch.zeros(4)) for _ in range(3)]
        model = stir(Mixed())
        plain = fpgm.export(model, X, tmp_path / "a.onnx")
        more = fpgm.export(model, X, tmp_path / "a.onnx", loader=batches, images=8)
        assert (plain.noise, plain.inputs) == (1 + 2 + 5, 0)
        assert (more.noise, more.inputs) == (1 + 2 + 5, 8)

    @pytest.mark.parametrize("any_batch", [True, False])
    def test_a_wrong_file_is_not_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, any_batch: bool
    ) -> None:
        """Not even if the example is all zeros, for which the first layer does not matter."""
        model = stir(Mixed())
        other = copy.deepcopy(model)
        nn.init.normal_(other.a.weight)  # type: ignore[arg-type]
        x = torch.zeros_like(X)
        assert torch.equal(other(x), model(x))
        written_instead(monkeypatch, other)
        with pytest.raises(fpgm.VerificationError, match="no file was written"):
            fpgm.export(model, x, tmp_path / "a.onnx", any_batch=any_batch)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("to", ["onnx", "pt2"])
    @pytest.mark.parametrize("whole", [torch.arange(2), torch.tensor(1), None])
    def test_noise_replaces_only_floating_point_arguments(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, whole: Tensor | None
    ) -> None:
        """Integers are row numbers of a table; only tensors have several sizes."""
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

    def test_tokens_are_checked_in_several_batch_sizes(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)).eval()
        tokens = torch.tensor([[0, 4, 2]])
        assert fpgm.export(model, tokens, tmp_path / "a.onnx").noise == 1 + 2 + 5
        assert fpgm.export(model, tokens, tmp_path / "a.onnx", any_batch=False).noise == 0

    def test_outputs_on_another_device(self) -> None:
        here = torch.tensor([1.0, 4.0, torch.nan])
        assert relative_difference([here], [here.as_subclass(Far)]) == 0
        assert relative_difference([2 * here], [here.as_subclass(Far)]) == 1

    def test_a_link_stays_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        file, link = tmp_path / "folder" / "a.onnx", tmp_path / "link.onnx"
        link.symlink_to(file)
        for _ in ("a name for nothing yet", "a name for a file"):
            done = fpgm.export(Mixed(), X, link)
            assert link.is_symlink()
            assert file.stat().st_size == done.bytes
            assert list(file.parent.iterdir()) == [file]

    def test_values_that_are_not_finite_have_to_agree(self) -> None:
        nan, inf = torch.tensor([float("nan"), 1.0]), torch.tensor([float("-inf"), 1.0])
        assert relative_difference([nan], [torch.ones(2)]) == float("inf")
        assert relative_difference([torch.ones(2)], [inf]) == float("inf")
        assert relative_difference([-inf], [inf]) == float("inf")
        assert relative_difference([inf], [inf]) == 0
        assert relative_difference([torch.ones(1)], [torch.ones(2)]) == float("inf")

    def test_a_layers_output_that_is_also_the_models(self, tmp_path: Path) -> None:
        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                y = self.conv(x)
                return self.norm(y), y

        assert fpgm.export(stir(Both()), X, tmp_path / "a.onnx").error < 1e-5

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

    @pytest.mark.parametrize("to", ["onnx", "pt2"])
    def test_the_batch_size_is_fixed_where_it_cannot_vary(self, tmp_path: Path, to: str) -> None:
        """And a warning says so, with the exporter's whole reason."""

        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 3)

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = self.conv(x) * int(x.shape[0])
                return y

        model, batches = Counting().eval(), iter([(torch.randn(5, 3, 16, 16), torch.zeros(5))])
        with pytest.warns(UserWarning, match="takes only batches of 2, as with any_batch=False: "):
            done = fpgm.export(model, X, tmp_path / "a", to=to, loader=batches)  # type: ignore[arg-type]
        assert not done.any_batch
        why = {"onnx": "Expected: 2 Please fix", "pt2": "Constraints violated (batch)! For more"}
        assert why[to] in done.batch_problem
        assert (done.noise, done.inputs) == (2, 5)  # a loader that can be read only once
        assert torch.allclose(loaded(tmp_path / "a", to)(X), model(X), atol=1e-4)

    def test_if_a_fixed_batch_fails_too_the_first_reason_is_given(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is never cut: a runtime says what matters at the end."""
        said = "Non-zero status code:\n" + "Reshape of " * 500 + "\n the last line."

        def fails(*given: Any) -> Any:
            raise RuntimeError(f"{'any' if given[2] else 'fixed'} batch: {said}")

        monkeypatch.setitem(_WRITERS, "onnx", fails)
        with pytest.raises(fpgm.ModelError) as caught:
            fpgm.export(Mixed(), X, tmp_path / "a.onnx")
        assert str(caught.value) == (
            "The exported model cannot be loaded: any batch: Non-zero status code: "
            f"{'Reshape of ' * 500}the last line."
        )

    def test_a_file_that_does_not_run_says_all_of_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(_: Any) -> Any:
            raise RuntimeError("first line\nname: 'Add_3'\nShape mismatch: {1} and {2}")

        monkeypatch.setitem(_WRITERS, "onnx", lambda *_: (b"", fails))
        with pytest.raises(
            fpgm.ModelError, match=r"does not run: first line name: 'Add_3' Shape m"
        ):
            fpgm.export(Mixed(), X, tmp_path / "a.onnx", any_batch=False)

    @pytest.mark.parametrize("to", ["onnx", "pt2", "torchscript"])
    def test_a_shape_cached_from_the_last_call_fixes_no_batch_size(
        self, tmp_path: Path, to: str
    ) -> None:
        class Gridded(Mixed):
            kept: torch.Size | None = None

            def forward(self, x: Tensor) -> Tensor:
                if self.kept != x.shape:
                    self.grid, self.kept = torch.arange(x.shape[3]).to(x), x.shape
                return super().forward(x + self.grid)

        model = Gridded().eval()
        model(X)
        fpgm.export(model, X, tmp_path / "a", to=to)  # type: ignore[arg-type]
        results = loaded(tmp_path / "a", to)
        for x in (X, X[:1], X.repeat(4, 1, 1, 1)):
            assert torch.allclose(results(x), model(x), atol=1e-4)
        assert model.kept == (8, 3, 16, 16)

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
            fpgm.export(Mixed(), X, tmp_path / "a.onnx", int8=True)
        with pytest.raises(
            fpgm.RequestError, match=r"write fpgm\.export\(model, example_inputs, p"
        ):
            fpgm.export(Mixed(), tmp_path / "a.onnx", X)  # type: ignore[arg-type]

    def test_the_suffix_is_the_default_format(self, tmp_path: Path) -> None:
        model = Mixed()
        for name, to in {"a.onnx": "onnx", "a.pt2": "pt2", "a.pt": "torchscript"}.items():
            assert fpgm.export(model, X, tmp_path / name).format == to
        for name in ("a.foo", "a"):
            with pytest.raises(fpgm.RequestError) as caught:
                fpgm.export(model, X, tmp_path / name)
            assert str(caught.value) == (
                f"The format of {name} is unknown: use a suffix (.onnx, .pt2, .pt), or give the "
                "format."
            )
            assert not (tmp_path / name).exists()
        assert fpgm.export(model, X, tmp_path / "a.foo", to="onnx").format == "onnx"

    def test_inputs_the_model_cannot_take(self, tmp_path: Path) -> None:
        """The batch size is not the cause."""
        grey, why = X[:, :1], "Given groups=1"
        with pytest.raises(fpgm.ModelError, match=why) as caught:
            fpgm.export(Mixed(), grey, tmp_path / "a.onnx")
        assert str(caught.value).startswith("The model's own forward fails on the example input: ")
        assert "any_batch" not in str(caught.value)
        with pytest.raises(fpgm.ModelError, match=why) as caught:
            fpgm.export(Mixed(), X, tmp_path / "a.onnx", loader=[grey])
        assert "fails on a batch of the loader (" in str(caught.value)
        assert "any_batch" not in str(caught.value)


def description(file: Path, to: str) -> dict[str, str]:
    """Read the metadata of a file as its runtime reads it."""
    if to == "onnx":
        return {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    keys = ("fpgm_version", "torch_version", "fpgm_plans", "fpgm_low_rank", "fpgm_int8")
    results: dict[str, Any] = dict.fromkeys(keys, "")
    if to == "pt2":
        torch.export.load(file, extra_files=results)
        return results
    with pytest.warns(DeprecationWarning, match="torch.jit.load"):
        torch.jit.load(file, _extra_files=results)
    return {key: value.decode() for key, value in results.items()}


class TestDescription:
    @pytest.mark.parametrize("to", ["onnx", "pt2", "torchscript"])
    def test_versions_and_plans(self, tmp_path: Path, to: str) -> None:
        small = fpgm.prune(stir(resnet(20)), X, rate=0.4)
        fpgm.export(small, X, tmp_path / "a", to=to)  # type: ignore[arg-type]
        metadata = description(tmp_path / "a", to)
        ((name, (plan,)),) = json.loads(metadata["fpgm_plans"]).items()
        assert name == ""
        assert fpgm.Plan.from_json(json.dumps(plan)) == small.fpgm_plans[0]
        assert metadata["fpgm_version"] == fpgm.__version__
        assert metadata["torch_version"] == torch.__version__
        assert (metadata["fpgm_int8"], metadata["fpgm_low_rank"]) == ("false", "null")
        if to == "onnx":
            assert metadata["onnx_version"] == onnx.__version__
            assert metadata["onnxruntime_version"] == onnxruntime.__version__

    def test_separately_pruned_submodules_keep_their_plans(self, tmp_path: Path) -> None:
        backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
        small = fpgm.prune(backbone, X, rate=0.5, align=1)
        model = nn.Sequential(small, nn.Flatten(), nn.LazyLinear(2)).eval()
        model(X)
        fpgm.export(model, X, tmp_path / "a.onnx")
        fpgm.save(model, tmp_path / "a.safetensors")
        saved = json.loads(description(tmp_path / "a.onnx", "onnx")["fpgm_plans"])
        plans = {
            name: tuple(fpgm.Plan.from_json(json.dumps(plan)) for plan in item)
            for name, item in saved.items()
        }
        assert plans == {"0": small.fpgm_plans} == read_plans(tmp_path / "a.safetensors")

    def test_split_layers_and_eight_bits(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(comparison, "_SECONDS", 0.2)
        small = fpgm.prune(stir(resnet(20)), X, rate=0.4)
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


def test_channels_are_scattered_by_a_gather() -> None:
    """Runtimes have no cheap scatter."""
    small = fpgm.prune(stir(resnet(20)), X, rate=0.4, residual="independent").eval()
    data = to_onnx(small, Example((X,), {}))
    kinds = {node.op_type for node in onnx.load_from_string(data).graph.node}
    assert "Gather" in kinds
    assert not kinds & {"ScatterND", "ScatterElements", "Transpose"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `fpgm prune`."""
    created = tmp_path_factory.mktemp("export") / "small"
    run("prune", "resnet20", "--weights", "shipped", "--rate", 0.3, "--out", created)
    return created


class TestCommand:
    few = ("--data", "cifar10-sample", "--images", 64, "--test", 64)

    def test_it_writes_what_it_compared(self, folder: Path, tmp_path: Path) -> None:
        result = json.loads(run("export", folder, *self.few, "--json")[0])
        assert result["error"] < 1e-4
        assert result["noise"] == 1 + 2 + 5
        assert result["inputs"] >= 64
        assert result["accuracy"]["PyTorch"] == result["accuracy"]["small.onnx"]
        assert (folder / "small.onnx").stat().st_size == result["bytes"]
        text, _ = run("export", folder, "--out", tmp_path / "a.pt2")
        first, second, *_ = text.splitlines()
        assert first.startswith(f"File  {tmp_path}/a.pt2 (pt2, ")
        assert second == f"Next  fpgm report {folder} --open"
        assert "\nThe batch size may vary.\n" in text
        assert "Largest difference from PyTorch: " in text
        assert "relative to the largest output, over 8 random inputs.\n" in text

    def test_of_one_batch_size(self, folder: Path, tmp_path: Path) -> None:
        options = ("--fixed-batch", "--input", "3x3x32x32", "--out", tmp_path / "a.onnx")
        text, _ = run("export", folder, *self.few, *options)
        assert re.search(r"over 3 random inputs and \d+ images\.\n", text)
        assert "\nThe batch size is fixed.\n" in text
        fractions = re.search(r"Accuracy on test images: PyTorch (\S+), a.onnx (\S+)\.\n", text)
        assert fractions is not None
        assert fractions[1] == fractions[2]

    @pytest.mark.parametrize(
        ("options", "key", "name", "title"),
        [
            (("--int8",), "int8", "small.int8.onnx", "int8"),
            (("--low-rank", 0.05), "low_rank", "small.low-rank.onnx", r"low rank, \d+ layers"),
        ],
    )
    def test_int8_metrics_are_shown_next_to_the_float_model(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        options: tuple[object, ...],
        key: str,
        name: str,
        title: str,
    ) -> None:
        monkeypatch.setattr(comparison, "_SECONDS", 0.2)
        result = json.loads(run("export", folder, *self.few, *options, "--json")[0])
        compared = result[key]
        assert 0 < compared["error"] < 0.5
        assert (
            min(
                compared["seconds"],
                compared["seconds_before"],
                compared["faster"],
            )
            > 0
        )
        assert result["bytes"] < compared["bytes_before"]
        assert set(result["accuracy"]) == {"PyTorch", name}
        assert result["accuracy"][name] == pytest.approx(result["accuracy"]["PyTorch"], abs=0.1)
        assert bool(result["splits"]) == (key == "low_rank")
        text, _ = run("export", folder, *self.few, *options)
        assert re.search(
            rf"^{title}: \S+ MB before; relative squared error of the outputs \S+%; "
            r"\S+ ms → \S+ ms \(\S+× as fast, ONNX Runtime, threads: \d+\)\.$",
            text,
            re.MULTILINE,
        )
        assert re.search(
            rf"^Accuracy on test images: PyTorch \S+%, {name} \S+%\.$", text, re.MULTILINE
        )

    def test_bad_requests(self, folder: Path) -> None:
        assert "need --to onnx" in refused("export", folder, "--to", "pt2", "--low-rank", 0.1)
        assert "--to is 'tflite'" in refused("export", folder, "--to", "tflite")
        assert "use a suffix (.onnx, .pt2, .pt)" in refused(
            "export", folder, "--out", folder / "a.foo"
        )
        assert "pass --data" in refused("export", folder, "--int8")
