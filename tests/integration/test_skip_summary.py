"""What a test run says at its end about tests it left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.helpers.skips import PACKAGES, command_for, skip_summary

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("reason", "command"),
    [
        ("no chromium: apt-get install chromium", "apt-get install chromium"),
        ("needs the zoo extra: torchvision and timm", PACKAGES["timm"]),
        ("could not import 'torchvision': No module named 'torchvision'", PACKAGES["timm"]),
        ("could not import 'scipy.optimize': No module named", ".venv/bin/pip install scipy"),
        ("no trained weights in a: set FPGM_WEIGHTS to it", "FPGM_WEIGHTS=FOLDER make test"),
        ("CIFAR-10 is not here: fpgm data cifar10", ".venv/bin/fpgm data cifar10"),
        ("onnx is missing: pip install 'fpgm[export]'.", ".venv/bin/pip install 'fpgm[export]'"),
        ("needs Ultralytics: pip install --no-deps a b", ".venv/bin/pip install --no-deps a b"),
        ("torch.compile needs a C++ compiler (g++ or clang++)", "apt-get install g++"),
    ],
)  # fmt: skip
def test_the_command_for_a_reason(reason: str, command: str) -> None:
    assert command_for(reason) == command


def test_every_reason_in_the_tests_has_a_command() -> None:
    """Reasons that are put together when a test runs are covered above."""
    source = "\n".join(
        file.read_text() for file in TESTS.rglob("test_*.py") if file != Path(__file__)
    )
    written = re.findall(r'(?:reason=|pytest\.skip\()f?"([^"]+)"', source)
    written = [reason for reason in written if "{" not in reason]
    assert len(written) > 8
    assert [reason for reason in written if "no command" in command_for(reason)] == []


def test_one_entry_for_each_reason_most_tests_first() -> None:
    assert skip_summary(["no bash", "no chromium", "no chromium"], swept=72) == [
        "    2 skipped: no chromium\n        apt-get install chromium",
        "    1 skipped: no bash\n        apt-get install bash",
        "   72 not selected: marked `sweep`\n        make zoo",
    ]
    assert skip_summary([], swept=0) == []
