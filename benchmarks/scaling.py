"""Time of plan + compact against depth: CIFAR ResNets from 110 to 1202 layers.

    python benchmarks/scaling.py                      # writes scaling.json and scaling.md

Ten times as many layers should take about ten times as long. One thread; each value is CPU time,
the best of several runs, so that other load on the machine does not matter. Runs of the depths
alternate for the same reason.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

import fpgm
from fpgm.models.resnet_cifar import resnet

HERE = Path(__file__).resolve().parent
DEPTHS = (110, 218, 434, 866, 1202)

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [(depth, run) for run in range(options.repeats) for depth in options.depths]
    times: dict[int, list[tuple[float, float]]] = {depth: [] for depth in options.depths}
    measure(20, options.rate)  # warm-up
    for depth, _ in track(runs, "scaling"):
        times[depth].append(measure(depth, options.rate))
    rows = [_row(depth, min(pairs, key=sum)) for depth, pairs in times.items()]
    about = {
        "command": shlex.join(["python", "benchmarks/scaling.py", *sys.argv[1:]]),
        "rate": options.rate,
        "repeats": options.repeats,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "fpgm": fpgm.__version__,
        },
        "exponent": round(exponent(rows), 3),
    }
    text = json.dumps({"about": about, "rows": rows}, indent=1)
    (HERE / "scaling.json").write_text(text + "\n")
    (HERE / "scaling.md").write_text("\n".join(_markdown(about, rows)) + "\n")
    print("\n".join(_markdown(about, rows)))


def measure(depth: int, rate: float) -> tuple[float, float]:
    """Measure the seconds of plan and of compact on a new network."""
    torch.manual_seed(0)
    model = resnet(depth).eval()
    example = torch.randn(1, 3, 32, 32)
    start = time.process_time()
    plan = fpgm.plan(model, example, rate=rate, align=1)
    planned = time.process_time()
    fpgm.compact(model, plan)
    return planned - start, time.process_time() - planned


def exponent(rows: Sequence[Row]) -> float:
    """Fit the slope of log seconds over log depth by least squares: 1 is linear.

    >>> round(exponent([{"depth": 10, "seconds": 3.0}, {"depth": 100, "seconds": 30.0}]), 6)
    1.0
    """
    points = [(math.log(row["depth"]), math.log(row["seconds"])) for row in rows]
    x_mean = sum(x for x, _ in points) / len(points)
    y_mean = sum(y for _, y in points) / len(points)
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / spread if spread else math.nan


def _row(depth: int, seconds: tuple[float, float]) -> Row:
    plan, compact = seconds
    return {
        "depth": depth,
        "plan_seconds": round(plan, 4),
        "compact_seconds": round(compact, 4),
        "seconds": round(plan + compact, 4),
        "ms_per_layer": round(1000 * (plan + compact) / depth, 4),
    }


def _markdown(about: Row, rows: Sequence[Row]) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    yield "# Time against depth"
    yield ""
    yield f"Made by `{about['command']}` with {versions}."
    yield (
        f"CIFAR ResNets, rate {about['rate']}, one thread, CPU time, best of "
        f"{about['repeats']}. Time grows as depth to the power {about['exponent']:.2f} "
        "(1 is linear)."
    )
    yield ""
    yield "| depth | plan s | compact s | both s | ms per layer |"
    yield "|--:|--:|--:|--:|--:|"
    for row in rows:
        yield (
            f"| {row['depth']} | {row['plan_seconds']:.2f} | {row['compact_seconds']:.2f} "
            f"| {row['seconds']:.2f} | {row['ms_per_layer']:.2f} |"
        )


if __name__ == "__main__":
    main()
