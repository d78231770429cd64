"""The core works with six dependencies; what needs more says in one line what to install."""

from pathlib import Path

import pytest
from tests.helpers.faults import Ended, python

EXTRAS = {
    "train": ("accelerate", "PIL", "sklearn", "tensorboard"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("openvino",),
    "report": ("altair", "jinja2", "vl_convert"),
    "zoo": ("torchvision", "timm"),
    "lightning": ("lightning",),
    "hf": ("transformers",),
}
WITHOUT = """
import sys
from importlib.machinery import PathFinder
assert not [name for name in sys.modules if name.partition('.')[0] in {absent!r}]
real = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition('.')[0] in {absent!r} else real(name, path, target)
PathFinder.find_spec = find_spec
"""


def without(extras: tuple[str, ...], code: str, folder: Path) -> Ended:
    """Run code in a process in which some packages are not there."""
    absent = tuple(name for extra in extras for name in EXTRAS[extra])
    return python(WITHOUT.format(absent=absent) + code, folder)


COMMAND = "from fpgm.cli import app; app({!r}.split(), prog_name='fpgm')"


def test_the_core_needs_no_extra(tmp_path: Path) -> None:
    code = """
import fpgm, torch
from fpgm.models import resnet
model, x = resnet(20), torch.randn(2, 3, 32, 32)
plan = fpgm.plan(model, x, rate=0.4)
small = fpgm.recover(model, plan, [x])
fpgm.verify(model, plan, x).check()
fpgm.save(small, 'small.safetensors')
fpgm.load('small.safetensors', lambda: resnet(20))
print(fpgm.bench([model, small], x, backends=['eager'], seconds=0.1))
"""
    done = without(tuple(EXTRAS), code, tmp_path)
    assert done.code == 0, done.err
    assert "; theory 2.5×" in done.out


def test_so_do_these_commands(tmp_path: Path) -> None:
    for words in (
        "prune digits --rate 0.4 --recover weights --out small",
        "verify small",
        "inspect digits",
        "bench small --backend eager --seconds 0.1",
        "analyze digits",
    ):
        done = without(tuple(EXTRAS), COMMAND.format(words), tmp_path)
        assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("extra", "words", "what"),
    [
        ("train", "train digits-quick --out run", "fpgm train needs accelerate"),
        ("export", "export small --to onnx", "Export to ONNX needs more packages"),
        ("report", "report small", "The report needs more packages"),
        ("report", "analyze digits --figures figures", "Charts need additional packages"),
        ("zoo", "inspect torchvision:resnet18", "torchvision:resnet18 needs torchvision"),
        ("zoo", "inspect timm:resnet18", "timm:resnet18 needs torchvision"),
    ],
)
def test_a_command_says_what_it_needs(extra: str, words: str, what: str, tmp_path: Path) -> None:
    if "small" in words:
        result = "prune digits --rate 0.4 --out small"
        assert without((), COMMAND.format(result), tmp_path).code == 0
    done = without((extra,), COMMAND.format(words), tmp_path)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert line == f'fpgm: {what}: pip install "fpgm[{extra}]"'


@pytest.mark.parametrize(("extra", "module"), [("lightning", "lightning"), ("hf", "huggingface")])
def test_an_integration_says_what_it_needs(extra: str, module: str, tmp_path: Path) -> None:
    done = without((extra,), f"import fpgm.training.callbacks.{module}", tmp_path)
    assert done.err.splitlines()[-1].endswith(f'pip install "fpgm[{extra}]"')


def test_a_runtime_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    words = "bench digits --backend openvino --backend eager --seconds 0.1"
    done = without(("openvino",), COMMAND.format(words), tmp_path)
    assert done.code == 0, done.err
    assert 'Not measured: openvino (pip install "fpgm[openvino]")' in done.out
