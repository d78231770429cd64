"""What `make demo` runs, from the first step to the outcome it ends with."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.shell import run

ROOT = Path(__file__).resolve().parents[2]


def test_it_ends_with_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands run in this process, on few images; the next test runs them as processes."""

    real_run = subprocess.run

    def run_here(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        if command[1:3] != ["-m", "fpgm"]:  # as timing asks the system about the machine
            return real_run(command, **options)
        sys.stdout.write(run(*command[3:])[0])
        return subprocess.CompletedProcess(command, 0)

    out = tmp_path / "demo"
    monkeypatch.setattr(subprocess, "run", run_here)
    few = ("--images", "64", "--test", "100", "--seconds", "0.1")
    words = (*few, "--out", str(out))
    monkeypatch.setattr(sys, "argv", ["demo.py", *words])
    runpy.run_path(str(ROOT / "scripts" / "demo.py"), run_name="__main__")
    said = capsys.readouterr().out
    *_, accuracy, work, size, eager, onnx, files, follow = said.splitlines()
    results = json.loads((out / "results.json").read_text())
    before, recovered = (results["accuracy"][name] for name in ("original", "recovered"))
    assert accuracy == f"Accuracy: {before:.1%} before, {recovered:.1%} after, on 100 test images."
    assert before > 0.9
    assert work == "Work: 172 million MACs before, 86 million after (-50%)."
    after = results["achieved"]["params_after"] * 4 / 1e6
    assert size == f"Size: 9.4 MB before, {after:.1f} MB after."
    assert re.match(r"Speed: \d\.\d\d times as fast in PyTorch[.,]", eager)
    assert re.match(r"Speed: \d\.\d\d times as fast in ONNX Runtime[.,]", onnx)
    assert str(out / "report.html") in files
    assert follow == f"Next: fpgm export {out} --to onnx --data cifar10-sample"
    assert said.count("\nVerified on ") == 2
    page = (out / "report.html").read_text(encoding="utf-8")
    assert f"{before:.1%} →" in page  # the original's accuracy, from the first step
    assert 'PyTorch</th><td data-label="Batch">64</td>' in page  # what the third one measured


def test_a_step_that_fails_ends_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "demo.py", "--macs", "2", "--out", tmp_path / "demo"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "macs is 2.0" in done.stderr
    assert "$ fpgm verify" not in done.stdout
