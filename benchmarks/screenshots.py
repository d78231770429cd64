"""Screenshots of a report for the documentation: CIFAR-10, ResNet-56, pruned, recovered, timed.

    python benchmarks/screenshots.py          # five minutes; needs chromium

Trained weights are read from FPGM_WEIGHTS, CIFAR-10 from `fpgm data cifar10`. Every step
is a command of the package; existing folders are reused. Writes
docs/figures/report-*.png.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from trained import add_weights

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
SHOTS = {
    "light": {"viewport": {"width": 1200, "height": 1000}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1200, "height": 1000}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 840}, "color_scheme": "light"},
}


def fpgm(*words: object) -> float:
    """Run a command and print its duration."""
    command = ["fpgm", *map(str, words)]
    print("$", shlex.join(command), flush=True)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", *command], check=True)
    return time.perf_counter() - start


def make_run(folder: Path, weights: Path) -> None:
    fpgm(
        "prune", "resnet56", "--weights", weights / "cifar10_resnet56.safetensors",
        "--macs", 0.526, "--allocate", "sensitivity", "--recover", "solve",
        "--data", "cifar10", "--images", 2048, "--test", 10_000,
        "--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225", "--out", folder,
    )  # fmt: skip
    fpgm("bench", folder, "--batch", 8, "--threads", 1, "--keep")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_weights(parser)
    parser.add_argument("--run", type=Path, default=Path("runs/resnet56"))
    options = parser.parse_args()
    if not (options.run / "bench.json").exists():
        make_run(options.run, options.weights)
    print(f"The report took {fpgm('report', options.run):.1f} s.")
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--headless", "--no-sandbox", "--disable-gpu"],
        )
        for name, how in SHOTS.items():
            page = browser.new_page(**how)
            page.goto((options.run / "report.html").resolve().as_uri())
            page.wait_for_function(
                "[...document.querySelectorAll('.chart')].every(c => c.querySelector('svg'))"
            )
            page.screenshot(path=FIGURES / f"report-{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
