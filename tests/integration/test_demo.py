"""What `make demo` runs, from the first step to the page it ends with."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.shell import run

ROOT = Path(__file__).resolve().parents[2]


def test_it_ends_by_naming_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands run in this process, on few images; the next test runs them as processes."""

    def run_here(command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        assert command[:3] == [sys.executable, "-m", "fpgm"]
        few = ("--images", 64, "--test", 200) if command[3] == "prune" else ()
        sys.stdout.write(run(*command[3:], *few)[0])
        return subprocess.CompletedProcess(command, 0)

    out = tmp_path / "demo"
    monkeypatch.setattr(subprocess, "run", run_here)
    words = ("--distil", "0", "--seconds", "0.1", "--out", str(out))
    monkeypatch.setattr(sys, "argv", ["demo.py", *words])
    runpy.run_path(str(ROOT / "scripts" / "demo.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said.splitlines()[-1].endswith(f"Open {out / 'report.html'} in a browser.")
    assert said.count("\nVerified on ") == 2
    assert "onnxruntime, batch 64" in said
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "91.5% →" in page  # the original's accuracy, from the first step
    assert 'PyTorch</th><td data-label="Batch">64</td>' in page  # what the third one measured


def test_a_step_that_fails_ends_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "demo.py", "--rate", "2", "--out", tmp_path / "demo"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "rate is 2.0" in done.stderr
    assert "$ fpgm verify" not in done.stdout
