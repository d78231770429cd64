"""Weights come from tensor files only, wholly or not at all, and every failure is one line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fpgm
from fpgm.errors import FileError
from fpgm.models.checkpoint import load_weights, read_weights, weights_file


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def state() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return small().state_dict()


def fails(file: Path, message: str) -> str:
    model = small()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(FileError, match=re.escape(message)) as caught:
        load_weights(model, file)
    text = str(caught.value)
    assert "\n" not in text
    assert str(file) in text
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    return text


WRAPPED: dict[str, Any] = {
    "plain": lambda s: s,
    "from DistributedDataParallel": lambda s: {f"module.{k}": v for k, v in s.items()},
    "under state_dict": lambda s: {"epoch": 3, "state_dict": s},
    "under model": lambda s: {"model": s, "optimizer": {"lr": 0.1}},
    "both": lambda s: {"state_dict": {f"module.{k}": v for k, v in s.items()}, "best": 93.4},
    "without batch counters": lambda s: {k: v for k, v in s.items() if "num_batches" not in k},
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED.keys())
@pytest.mark.parametrize("suffix", ["pt", "th", "tar"])
def test_torch_checkpoints_load_however_they_are_wrapped(
    tmp_path: Path, wrap: Any, suffix: str
) -> None:
    file = tmp_path / f"weights.{suffix}"
    torch.save(wrap(state()), file)
    model = load_weights(small(), file)
    assert torch.equal(model[0].weight, state()["0.weight"])
    assert torch.equal(model[3].bias, state()["3.bias"])


def test_the_older_torch_format_loads_too(tmp_path: Path) -> None:
    file = tmp_path / "old.pth"
    torch.save(state(), file, _use_new_zipfile_serialization=False)
    assert torch.equal(load_weights(small(), file)[0].weight, state()["0.weight"])


def test_safetensors_load_whatever_the_suffix(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    save_file(state(), file)
    assert torch.equal(load_weights(small(), str(file))[0].weight, state()["0.weight"])


def test_a_model_with_a_part_called_module_keeps_its_names(tmp_path: Path) -> None:
    file = tmp_path / "part.pt"
    torch.save({"module.weight": torch.ones(1), "head.weight": torch.ones(1)}, file)
    assert set(read_weights(file)) == {"module.weight", "head.weight"}


def test_a_url_is_not_downloaded() -> None:
    with pytest.raises(FileError) as caught:
        load_weights(small(), "https://host/resnet50.pth")
    assert str(caught.value) == (
        "https://host/resnet50.pth is a URL: download the file and give its path."
    )


def test_missing_file_folder_and_empty_file(tmp_path: Path) -> None:
    fails(tmp_path / "nowhere.pt", "nowhere.pt does not exist.")
    fails(tmp_path, "is a folder")
    (tmp_path / "empty.pt").touch()
    fails(tmp_path / "empty.pt", "empty.pt is empty.")


@pytest.mark.parametrize("content", [b"GIF89a and some pixels", b"hello\n", b"\x00" * 64])
def test_foreign_files(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "picture.pt"
    file.write_bytes(content)
    fails(file, "is neither a safetensors file nor a torch checkpoint.")


@pytest.mark.parametrize("kept", [0.05, 0.5, 0.99])
@pytest.mark.parametrize("form", ["safetensors", "zip", "old"])
def test_truncated_files(tmp_path: Path, form: str, kept: float) -> None:
    file = tmp_path / f"cut.{form}"
    if form == "safetensors":
        save_file(state(), file)
    else:
        torch.save(state(), file, _use_new_zipfile_serialization=form == "zip")
    file.write_bytes(file.read_bytes()[: max(16, int(kept * file.stat().st_size))])
    fails(file, "cut.")


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["HARMFUL_FOLDER"],)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    result = tmp_path / "made by the pickle"
    monkeypatch.setenv("HARMFUL_FOLDER", str(result))
    file = tmp_path / "harmful.pt"
    torch.save({"state_dict": Harmful()}, file, _use_new_zipfile_serialization=zipped)
    fails(file, "could run code")
    assert not result.exists()


def test_a_pickled_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "whole.pt"
    torch.save(small(), file)
    fails(file, "save `model.state_dict()` instead")


def test_checkpoints_without_a_state_dict(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "lr": 0.1}, tmp_path / "numbers.pt")
    fails(tmp_path / "numbers.pt", "does not contain a state dict: epoch, lr are not tensors.")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    fails(tmp_path / "tensor.pt", "contains a Tensor, not a state dict.")


def test_a_mismatch_is_reported_with_counts_and_first_names(tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    other = state()
    del other["3.weight"], other["3.bias"]
    other |= {f"extra{i}": torch.ones(1) for i in range(5)}
    other["0.weight"] = torch.ones(8, 3, 1, 1)
    save_file(other, file)
    text = fails(file, "does not fit Sequential: ")
    assert text.endswith(
        "2 missing (3.weight, 3.bias), 5 unexpected (extra0, extra1, extra2 and 2 more), "
        "1 with a different shape (0.weight is 8×3×1×1, not 4×3×1×1)."
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight


def test_weights_that_two_layers_share_are_read_for_both(tmp_path: Path) -> None:
    saved, read = Tied(), Tied()
    fpgm.save(saved, tmp_path / "tied.safetensors")
    load_weights(read, tmp_path / "tied.safetensors")
    assert torch.equal(read.b.weight, saved.a.weight)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({0: torch.zeros(1)}, "does not fit Linear: 2 missing (weight, bias), 1 unexpected (0)."),
        ({0: "a"}, "does not contain a state dict: 0 is not a tensor."),
    ],
)
def test_names_that_are_numbers(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "odd.pt"
    torch.save(content, file)
    with pytest.raises(FileError) as caught:
        load_weights(nn.Linear(3, 3), file)
    assert str(caught.value) == f"{file} {message}"


def test_an_unknown_home_folder() -> None:
    with pytest.raises(FileError, match=r"^~nobody-at-all/w\.pt does not exist: "):
        weights_file("~nobody-at-all/w.pt")
