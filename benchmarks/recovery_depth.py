"""Time and memory of recovery against depth: ResNet-50, 101 and 152.

    python benchmarks/recovery_depth.py               # writes recovery_depth.json and .md

Twice the depth should take about twice the time. One thread, and CPU time, so that other work on
the machine matters little; each network has its own process, whose peak memory is shown. Weights
and inputs are random: only the time is of interest.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import fpgm
from fpgm.models.registry import load_model

HERE = Path(__file__).resolve().parent
DEPTHS = (50, 101, 152)
LAYERS = {50: 54, 101: 105, 152: 156}
"""Convolutions and the linear layer, downsampling included."""

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--macs", type=float, default=0.42)
    parser.add_argument("--depth", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.depth is not None:
        print(json.dumps(measure(options.depth, options.images, options.size, options.macs)))
        return
    rows = []
    for depth in DEPTHS:
        command = [sys.executable, *sys.argv, "--depth", str(depth)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    about = {
        "command": shlex.join(["python", "benchmarks/recovery_depth.py", *sys.argv[1:]]),
        "images": options.images,
        "size": options.size,
        "macs": options.macs,
        "versions": f"fpgm {fpgm.__version__}, torch {torch.__version__}, {platform.machine()}",
    }
    text = json.dumps({"about": about, "rows": rows}, indent=1)
    (HERE / "recovery_depth.json").write_text(text + "\n")
    (HERE / "recovery_depth.md").write_text("\n".join(_markdown(about, rows)) + "\n")
    print("\n".join(_markdown(about, rows)))


def measure(depth: int, images: int, size: int, macs: float) -> Row:
    """Recover a ResNet of this depth; return its time and peak memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = load_model(f"torchvision:resnet{depth}").eval()
    loader = list(torch.randn(images, 3, size, size).split(16))
    plan = fpgm.plan(model, loader[0][:1], macs=macs)
    start = time.process_time()
    small = fpgm.recover(model, plan, loader, images=images)
    return {
        "depth": depth,
        "layers": LAYERS[depth],
        "solved": len(small.fpgm_recovery.layers),
        "macs": plan.macs_before,
        "cpu_seconds": round(time.process_time() - start, 1),
        "peak_gigabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def _markdown(about: Row, rows: Sequence[Row]) -> Iterator[str]:
    yield "# Recovery against depth"
    yield ""
    yield f"    {about['command']}"
    yield ""
    yield (
        f"{about['images']} random inputs of {about['size']}×{about['size']}, {about['macs']:.0%} "
        f"of the MACs removed, one thread. {about['versions']}."
    )
    yield ""
    columns = ("network", "layers", "solved", "MACs", "CPU seconds", "relative")
    yield f"| {' | '.join(columns)} | layers, relative | peak GB |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    first = rows[0]
    for row in rows:
        yield (
            f"| ResNet-{row['depth']} | {row['layers']} | {row['solved']} "
            f"| {row['macs'] / 1e9:.1f} G | {row['cpu_seconds']:.0f} "
            f"| {row['cpu_seconds'] / first['cpu_seconds']:.2f} "
            f"| {row['layers'] / first['layers']:.2f} | {row['peak_gigabytes']:.1f} |"
        )


if __name__ == "__main__":
    main()
