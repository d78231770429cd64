"""What `make demo` runs, from the first step to the page it ends with."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_ends_by_naming_the_report(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    words = ("--distil", "0", "--seconds", "0.1", "--out", out)
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "demo.py", *words],
        check=False,
        capture_output=True,
        text=True,
        env={"OMP_NUM_THREADS": "1", "PATH": "", "HOME": str(tmp_path)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(f"Open {out / 'report.html'} in a browser.")
    assert done.stdout.count("\nCertified: ") == 2
    assert "onnxruntime, batch 64" in done.stdout
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "90.10%" in page  # the original's accuracy, from the first step
    assert "faster" in page or "as fast" in page  # and what the third one measured


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
