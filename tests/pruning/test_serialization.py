"""A saved model comes back equal; files appear whole or not at all; wrong ones say why."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fpgm
from fpgm.models import digits
from fpgm.pruning import serialization as store
from fpgm.pruning.compaction import PLANS

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def net(width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3),
        nn.ReLU(),
        nn.Conv2d(width, 4, 1),
    ).eval()


def pruned(model: nn.Module | None = None, rate: float = 0.5) -> nn.Module:
    model = net() if model is None else model
    return fpgm.compact(model, fpgm.plan(model, X, rate=rate, align=1))


def same(a: nn.Module, b: nn.Module, x: Tensor = X) -> bool:
    with torch.no_grad():
        return torch.equal(a(x), b(x))


def refused(path: Path, factory: Callable[[], Any] = net) -> str:
    with pytest.raises(fpgm.FpgmError) as caught:
        fpgm.load(path, factory)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), "FILE")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.safetensors"
    fpgm.save(pruned(), path)
    return path


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    small = pruned()
    fpgm.save(small, tmp_path / "small.safetensors")
    again = fpgm.load(tmp_path / "small.safetensors", net)
    assert same(small, again)
    assert type(again) is nn.Sequential
    assert again[0].out_channels == 4
    assert getattr(again, PLANS) == getattr(small, PLANS)
    assert store.read_plans(tmp_path / "small.safetensors") == {"": getattr(small, PLANS)}


def test_adapters_come_back_from_the_plan(tmp_path: Path) -> None:
    model = digits().eval()
    x = torch.randn(2, 1, 8, 8)
    plan = fpgm.plan(model, x, rate=0.5, align=1, residual="independent")
    assert plan.adapters
    small = fpgm.compact(model, plan)
    fpgm.save(small, tmp_path / "small.safetensors")
    assert same(small, fpgm.load(tmp_path / "small.safetensors", lambda: digits().eval()), x)


def test_pruning_twice_gives_two_plans_and_loads(tmp_path: Path) -> None:
    twice = pruned(pruned())
    assert [m.out_channels for m in twice if isinstance(m, nn.Conv2d)] == [2, 2, 4]
    fpgm.save(twice, tmp_path / "twice.safetensors")
    assert len(store.read_plans(tmp_path / "twice.safetensors")[""]) == 2
    assert same(twice, fpgm.load(tmp_path / "twice.safetensors", net))


class Around(nn.Module):
    """A model around a backbone, which is called under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = net()
        self.same_backbone = self.backbone
        self.head = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(x) + self.same_backbone(x))
        return out


@pytest.mark.parametrize("outer", ["never", "before", "after"])
def test_a_pruned_submodule_is_saved_with_its_model(tmp_path: Path, outer: str) -> None:
    model = Around()
    if outer == "before":
        model = fpgm.compact(model, fpgm.plan(model, X, rates={"head.*": 0.5}, align=1))
    model.backbone = model.same_backbone = pruned(model.backbone, rate=0.25)
    if outer == "after":
        model = fpgm.compact(model, fpgm.plan(model, X, rate=0.5, align=1))
    fpgm.save(model, tmp_path / "model.safetensors")
    again = fpgm.load(tmp_path / "model.safetensors", Around)
    assert same(model, again)
    assert again.same_backbone is again.backbone


def test_a_model_without_plans_is_saved_too(tmp_path: Path) -> None:
    model = net()
    fpgm.save(model, tmp_path / "whole.safetensors")
    assert store.read_plans(tmp_path / "whole.safetensors") == {}
    assert same(model, fpgm.load(tmp_path / "whole.safetensors", net))


class Tied(nn.Module):
    """Two names for one parameter, and a buffer that looks into another."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.register_buffer("table", torch.arange(12.0).reshape(3, 4))
        self.register_buffer("rows", self.table[1:])
        self.register_buffer("columns", self.table.t())
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x)) + self.rows.sum() + self.columns.sum()
        return out


def test_tied_overlapping_and_transposed_tensors(tmp_path: Path) -> None:
    model = Tied()
    fpgm.save(model, tmp_path / "tied.safetensors")
    assert "b.weight" not in load_file(tmp_path / "tied.safetensors")
    again = fpgm.load(tmp_path / "tied.safetensors", Tied)
    assert again.a.weight is again.b.weight
    assert same(model, again, torch.randn(2, 4))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_the_model_is_restored_in_the_files_dtype(tmp_path: Path) -> None:
    small = pruned().half()
    fpgm.save(small, tmp_path / "half.safetensors")
    again = fpgm.load(tmp_path / "half.safetensors", net)
    assert {p.dtype for p in again.parameters()} == {torch.float16}
    assert same(small, again, X.half())


def test_mixed_dtypes_stay_mixed(tmp_path: Path) -> None:
    small = pruned()
    small[0].double()
    fpgm.save(small, tmp_path / "mixed.safetensors")
    again = fpgm.load(tmp_path / "mixed.safetensors", net)
    dtypes = [{t.dtype for t in m.state_dict().values()} for m in small]
    assert [{t.dtype for t in m.state_dict().values()} for m in again] == dtypes


def test_memory_format_mode_and_requires_grad_are_the_factorys(tmp_path: Path) -> None:
    def factory() -> nn.Module:
        model = net().to(memory_format=torch.channels_last).train()
        model[0].weight.requires_grad_(False)
        return model

    fpgm.save(pruned().to(memory_format=torch.channels_last), tmp_path / "small.safetensors")
    again = fpgm.load(tmp_path / "small.safetensors", factory)
    assert again[3].weight.is_contiguous(memory_format=torch.channels_last)
    assert again.training
    assert [p.requires_grad for p in again[0].parameters()] == [False, True]


# torch's compiler still uses what torch deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_wrappers_are_taken_off(tmp_path: Path) -> None:
    small = pruned()
    wrapped = nn.DataParallel(torch.compile(small))
    fpgm.save(wrapped, tmp_path / "small.safetensors")
    assert same(small, fpgm.load(tmp_path / "small.safetensors", net))


def test_the_file_is_as_readable_as_any_other(tmp_path: Path, file: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    assert file.stat().st_mode == plain.stat().st_mode


def test_a_link_stays_a_link(tmp_path: Path, file: Path) -> None:
    link = tmp_path / "link.safetensors"
    link.symlink_to(file)
    fpgm.save(net(), link)
    assert link.is_symlink()
    assert store.read_plans(file) == {}


def test_the_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.safetensors"
    waited = []

    def spied(number: int) -> None:
        assert not path.exists()
        waited.append(os.fstat(number))

    monkeypatch.setattr(os, "fsync", spied)
    fpgm.save(net(), path)
    assert [(s.st_ino, s.st_size) for s in waited] == [(path.stat().st_ino, path.stat().st_size)]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "save_file", full)
    with pytest.raises(fpgm.FileError) as caught:
        fpgm.save(net(), file)
    assert str(caught.value) == f"{file} cannot be written: No space left on device."
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "small.safetensors"
    with pytest.raises(fpgm.FileError) as caught:
        fpgm.save(net(), path)
    assert str(caught.value) == f"{path} cannot be written: No such file or directory."


def test_state_that_is_no_tensor_cannot_be_saved(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

    with pytest.raises(fpgm.ModelError) as caught:
        fpgm.save(Counting(2, 2), tmp_path / "x.safetensors")
    assert str(caught.value) == (
        "The model cannot be saved: its state '_extra_state' is a dict, not a tensor."
    )
    assert not list(tmp_path.iterdir())


def test_a_sparse_buffer_cannot_be_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    with pytest.raises(fpgm.ModelError, match="its state 'adjacency' is stored as sparse_coo"):
        fpgm.save(model, tmp_path / "x.safetensors")


def test_files_that_are_not_ours(tmp_path: Path, file: Path) -> None:
    path = tmp_path / "wrong"
    assert refused(path) == "FILE does not exist."
    assert refused(tmp_path) == "FILE is a folder: name the file in it."
    path.touch()
    assert refused(path) == "FILE is empty."
    path.write_text("hello, this is no tensor")
    assert refused(path) == "FILE is not a safetensors file."
    save_file({"x": torch.zeros(2)}, path)
    assert refused(path) == (
        "FILE was not written by fpgm.save: read plain weights with "
        "fpgm.models.checkpoint.load_weights."
    )


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_a_truncated_file(file: Path, share: float) -> None:
    complete = file.read_bytes()
    file.write_bytes(complete[: int(len(complete) * share)])
    assert refused(file).startswith("FILE is truncated or damaged: ")


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    class Trap:
        def __reduce__(self) -> Any:
            return (path.with_name("sprung").touch, ())

    path.write_bytes(pickle.dumps(Trap()))
    assert refused(path) == "FILE is not a safetensors file."
    torch.save({"x": torch.zeros(2)}, path)
    assert refused(path) == "FILE is not a safetensors file."
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


def rewritten(file: Path, **changes: str) -> Path:
    """The same file with other metadata, and a digest to match."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    output = header["__metadata__"]
    output |= changes
    output[store.DIGEST] = store.content_sha256(load_file(file), output)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    return file


def test_a_newer_format(file: Path) -> None:
    assert refused(rewritten(file, fpgm_format="3", fpgm_version="9.1")) == (
        f"FILE was written by fpgm 9.1 in format 3; fpgm {fpgm.__version__} reads format 2: "
        "update fpgm."
    )


def test_plans_that_cannot_be_read(file: Path) -> None:
    assert refused(rewritten(file, fpgm_plans='{"": [{"format": 1}]}')).startswith(
        "FILE holds plans that cannot be read: This is not a plan: "
    )
    assert refused(rewritten(file, fpgm_plans="{")).startswith(
        "FILE holds plans that cannot be read: Expecting property name"
    )
    assert refused(rewritten(file, fpgm_plans="[3]")).startswith(
        "FILE holds plans that cannot be read: "
    )


def test_a_wrong_factory_names_the_first_difference(file: Path) -> None:
    fits = "FILE does not fit the model that factory() returns: "
    assert refused(file, lambda: net(16)) == fits + (
        "its '0.weight' is 16×3×3×3, the file's was 8×3×3×3."
    )
    assert refused(file, lambda: net()[:5]) == fits + "it has no '5.bias'."
    assert refused(file, lambda: net().append(nn.Linear(2, 3))) == fits + (
        "the file has no '6.weight'."
    )
    # Who gives the pruned model instead of the original is told so by its sizes.
    assert refused(file, pruned) == fits + "its '0.weight' is 4×3×3×3, the file's was 8×3×3×3."
    assert refused(file, lambda: nn.Sequential(digits())).startswith(fits)


def test_a_wrong_factory_for_a_file_without_plans(tmp_path: Path) -> None:
    path = tmp_path / "whole.safetensors"
    fpgm.save(nn.Linear(2, 3), path)
    assert refused(path, lambda: nn.Linear(2, 4)) == (
        "FILE does not fit the model that factory() returns: its 'weight' is 4×2, the file's was "
        "3×2."
    )


def test_a_factory_that_makes_no_model(file: Path) -> None:
    assert refused(file, dict) == "factory() returned dict: it must return the original model."

    def meta() -> nn.Module:
        with torch.device("meta"):
            return net()

    assert refused(file, meta) == (
        "factory() returned a model on the meta device: give it real tensors."
    )


def test_a_file_of_the_first_format_is_still_read(tmp_path: Path) -> None:
    """Written by the release that had no other, with what its model answered then."""
    old = Path(__file__).parents[1] / "data" / "format1.safetensors"
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def first() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))

    small = fpgm.load(old, first)
    with torch.no_grad():
        given = small(x).flatten()[:4].tolist()
    assert given == pytest.approx([0.0201672, -0.0503125, 0.0110276, 0.0916065], abs=1e-6)
    fpgm.save(small, tmp_path / "new.safetensors")
    with safe_open(tmp_path / "new.safetensors", "pt") as stream:
        assert stream.metadata()["fpgm_format"] == "2"


def test_a_digest_is_looked_at_in_a_file_of_any_format(file: Path) -> None:
    tensors = load_file(file)
    with safe_open(file, "pt") as stream:
        output = stream.metadata()
    save_file(tensors, file, {**output, "fpgm_format": "1"})
    assert refused(file).startswith("FILE is damaged")


def test_one_changed_bit_is_noticed(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert refused(file) == "FILE is damaged: its contents are not what was saved (sha256 differs)."


def test_a_file_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapping it fails where the address space is limited."""

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("Cannot allocate memory (os error 12)")

    file = tmp_path / "small.safetensors"
    file.write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    monkeypatch.setattr("fpgm.utils.safetensors_io.safe_open", fail)
    with pytest.raises(fpgm.errors.FileError, match=r"Cannot allocate memory \(os error 12\)"):
        fpgm.load(file, lambda: nn.Linear(1, 1))
