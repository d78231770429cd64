"""A short text names a model; nothing is downloaded; a wrong text is answered in one line."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fpgm.errors import RequestError
from fpgm.models.registry import default_shape, load_model
from fpgm.models.resnet_cifar import ResNet


def refused(spec: str) -> str:
    with pytest.raises(RequestError) as caught:
        load_model(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a download was tried")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)


def test_an_edited_file_is_read_again_whatever_its_time_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python trusts cached bytecode if the second and the size of the source agree."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "net.py"
    for kernel in (3, 5):
        file.write_text(f"from torch import nn\nmake = lambda: nn.Conv2d(3, 4, {kernel})\n")
        os.utime(file, (1, 1))
        model = load_model(f"{file}:make")
        assert isinstance(model, nn.Conv2d)
        assert model.kernel_size == (kernel, kernel)
    assert not (tmp_path / "__pycache__").exists()


def test_a_file_may_import_torchvision_whose_compiled_part_does_not_load(tmp_path: Path) -> None:
    """In a process of its own, where nobody has imported it before."""
    pytest.importorskip("torchvision")
    file = tmp_path / "net.py"
    file.write_text("import torchvision\nmake = torchvision.models.resnet18\n")
    code = f"from fpgm.models.registry import load_model; load_model({f'{file}:make'!r})"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_bare_name_is_a_builtin() -> None:
    model = load_model("resnet20")
    assert isinstance(model, ResNet)
    assert model(torch.zeros(default_shape("resnet20"))).shape == (1, 10)


# FCN's and Faster R-CNN's backbones would be downloaded by default.
@pytest.mark.parametrize("name", ["resnet18", "fcn_resnet50", "fasterrcnn_mobilenet_v3_large_fpn"])
@pytest.mark.usefixtures("offline")
def test_torchvision_models_come_untrained(name: str) -> None:
    pytest.importorskip("torchvision")
    assert isinstance(load_model(f"torchvision:{name}"), nn.Module)


@pytest.mark.usefixtures("offline")
def test_googlenet_loads_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    pytest.importorskip("torchvision")
    with torch.device("meta"):  # its initialisation is slow
        load_model("torchvision:googlenet")
    assert not [w for w in recwarn if "initialization" in str(w.message)]


@pytest.mark.usefixtures("offline")
def test_timm_models_come_untrained_and_know_their_input() -> None:
    pytest.importorskip("timm")
    model = load_model("timm:resnet18.a1_in1k")
    assert isinstance(model, nn.Module)
    assert default_shape("timm:resnet18") == (1, 3, 224, 224)
    assert default_shape("timm:tf_efficientnet_b3") == (1, 3, 300, 300)


def test_default_shapes() -> None:
    assert default_shape("resnet56") == default_shape("vgg16") == (1, 3, 32, 32)
    assert default_shape("digits") == (1, 1, 8, 8)
    assert default_shape("torchvision:resnet50") == (1, 3, 224, 224)
    assert default_shape("net.py:make") == (1, 3, 224, 224)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("WIDTH = 5\n")
    file = tmp_path / "net.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from torch import nn\n"
        "from neighbour import WIDTH\n"
        "@dataclass\n"
        "class Options:\n"
        "    width: int = WIDTH\n"
        "def make():\n"
        "    return nn.Linear(2, Options().width)\n"
        "def make_number():\n"
        "    return 3\n"
        "def broken():\n"
        "    raise KeyError('width')\n"
        "ready = nn.Linear(1, 1)\n"
        "number = 3\n"
    )
    return file


def test_a_factory_may_import_files_next_to_it(net: Path) -> None:
    path = list(sys.path)
    model = load_model(f"{net}:make")
    assert isinstance(model, nn.Linear)
    assert model.out_features == 5
    assert isinstance(load_model(f"{net}:ready"), nn.Linear)
    assert sys.path == path


def test_wrong_files_and_factories(net: Path) -> None:
    folder = net.parent
    (folder / "syntax.py").write_text("def make(:\n")
    (folder / "lost.py").write_text("import a_package_nobody_has\n")
    assert refused(f"{folder}/nowhere.py:make").startswith("There is no file")
    assert refused(f"{net}").endswith(f"does not name a factory: write '{net}:make_model'.")
    assert refused(f"{net}:maek").endswith("did you mean 'make'?")
    assert refused(f"{net}:number").endswith("is not a factory but a int.")
    assert refused(f"{net}:make_number").endswith("returned int, not a torch.nn.Module.")
    assert refused(f"{net}:broken").endswith("failed: KeyError: 'width'.")
    assert "failed to import: SyntaxError" in refused(f"{folder}/syntax.py:make")
    assert "No module named 'a_package_nobody_has'" in refused(f"{folder}/lost.py:make")


def test_wrong_names_are_answered_with_the_nearest() -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("timm")
    assert "did you mean 'resnet56'" in refused("resnet65")
    assert "'resnet50'" in refused("torchvision:resnet5O")
    assert "'convnext_tiny'" in refused("timm:convnext_tny")
    assert "'resnet18.a1_in1k'" in refused("timm:resnet18.a1_in1")
    with pytest.raises(RequestError, match="timm has no 'resnt18': did you mean 'resnet18'"):
        default_shape("timm:resnt18")
    assert refused("torchvision:zzz") == "torchvision has no 'zzz'."
    assert "'torchvision:NAME'" in refused("keras:vgg")


def test_a_package_model_without_its_prefix_is_answered_with_it() -> None:
    assert refused("resnet50").endswith(": did you mean 'torchvision:resnet50' or 'timm:resnet50'?")
    assert refused("convnext_atto").endswith(": did you mean 'timm:convnext_atto'?")


def test_a_wrong_name_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torchvision", "torchvision.models", "timm"):
        monkeypatch.setitem(sys.modules, package, None)
    assert "did you mean 'resnet56'" in refused("resnet50")


def test_a_folder_is_not_a_model(tmp_path: Path) -> None:
    assert refused(str(tmp_path)) == (
        f"{tmp_path} is a folder: give a model, such as the one it was made from."
    )


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_a_missing_package_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    real = importlib.import_module

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=package)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    expected = f'{package}:resnet18 needs {package}: pip install "fpgm[zoo]"'
    assert refused(f"{package}:resnet18") == expected
