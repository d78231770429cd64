"""Eq. 7 at full size: our sums of distances against torch's and scipy's pairwise distances.

Run: python benchmarks/criteria.py            (five to ten minutes; `--threads 8` for more threads)
Out: benchmarks/criteria.json, benchmarks/criteria.md

Each round times every implementation once, so that other load on the machine affects all of them
equally. Peak memory is measured in fresh processes, accuracy against a float64 brute force.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import scipy
import torch
from scipy.spatial.distance import cdist as scipy_cdist
from torch import Tensor
from torch.nn.functional import normalize

from fpgm import criteria

SIZES = {512: 7, 2048: 5}  # filters: rounds
ACCURACY_FILTERS = 256
SLOW_S = 5.0  # what takes longer is timed once
WEIGHTS = 512 * 3 * 3
RATE = 0.4
HERE = Path(__file__).parent
COMMAND = "python benchmarks/criteria.py"

SCIPY_NAMES = {"l2": "euclidean", "l1": "cityblock", "cosine": "cosine"}


def ours(filters: Tensor, distance: str) -> Tensor:
    return criteria.fpgm(filters, distance)


def by_torch(filters: Tensor, distance: str) -> Tensor:
    if distance == "cosine":  # torch.cdist has none; this is how one writes it
        directions = normalize(filters, dim=1)
        return (1 - directions @ directions.T).sum(1)
    return torch.cdist(filters, filters, p={"l2": 2, "l1": 1}[distance]).sum(1)


def by_scipy(filters: Tensor, distance: str) -> Tensor:
    array = filters.numpy()
    return torch.from_numpy(scipy_cdist(array, array, SCIPY_NAMES[distance]).sum(1))


CONTENDERS: dict[str, Callable[[Tensor, str], Tensor]] = {
    "fpgm": ours,
    "torch": by_torch,
    "scipy": by_scipy,
}


def diverse(count: int) -> Tensor:
    return torch.randn(count, WEIGHTS, generator=torch.Generator().manual_seed(0))


def layers(count: int) -> dict[str, Tensor]:
    base = diverse(count)
    noise = torch.randn(count, WEIGHTS, generator=torch.Generator().manual_seed(1))
    twins = torch.cat([base[: count // 2], base[: count // 2] + 1e-4 * noise[: count // 2]])
    clusters = base[:8].repeat(count // 8, 1) + 1e-3 * noise
    dead = base.clone()
    dead[torch.randperm(count, generator=torch.Generator().manual_seed(2))[: int(RATE * count)]] = 0
    return {
        "diverse": base,
        "near-duplicate pairs": twins,
        "eight tight clusters": clusters,
        "common offset": 100 + 0.01 * base,
        "soft-pruned, 40 % zero": dead,
    }


def brute(filters: Tensor, distance: str) -> Tensor:
    rows = filters.double()
    if distance == "cosine":
        norms = rows.norm(dim=1, keepdim=True)
        rows = rows / torch.where(norms == 0, 1, norms)
        return torch.stack([(rows - row).square().sum() / 2 for row in rows])
    order = {"l2": 2, "l1": 1}[distance]
    return torch.stack([(rows - row).norm(p=order, dim=1).sum() for row in rows])


def seconds(function: Callable[[Tensor, str], Tensor], filters: Tensor, distance: str) -> float:
    start = time.perf_counter()
    function(filters, distance)
    return time.perf_counter() - start


def speed() -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for count, rounds in SIZES.items():
        filters = diverse(count)
        for distance in criteria.DISTANCES:
            times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
            for function in CONTENDERS.values():
                function(filters[:64], distance)  # load libraries, start threads
            for _ in range(rounds):
                for name, function in CONTENDERS.items():
                    if not times[name] or times[name][0] < SLOW_S:
                        times[name].append(seconds(function, filters, distance))
            medians = {name: statistics.median(values) for name, values in times.items()}
            rival = min(("torch", "scipy"), key=lambda name: medians[name])
            results.append(
                {
                    "filters": count,
                    "weights": WEIGHTS,
                    "distance": distance,
                    "rounds": rounds,
                    "median_s": medians,
                    "faster_rival": rival,
                    "speedup": medians[rival] / medians["fpgm"],
                    "peak_mb": {name: peak_mb(name, count, distance) for name in CONTENDERS},
                }
            )
            print(json.dumps(results[-1]))
    return results


def hard_layers_speed() -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for name, filters in layers(512).items():
        times: dict[str, list[float]] = {"fpgm": [], "torch": []}
        for _ in range(SIZES[512]):
            for contender, values in times.items():
                values.append(seconds(CONTENDERS[contender], filters, "l2"))
        medians = {contender: statistics.median(values) for contender, values in times.items()}
        results.append({"layer": name, "filters": 512, "distance": "l2", "median_s": medians})
        print(json.dumps(results[-1]))
    return results


def accuracy() -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    count = ACCURACY_FILTERS
    for name, filters in layers(count).items():
        for distance in criteria.DISTANCES:
            truth = brute(filters, distance)
            chosen = set(criteria.lowest(truth, int(RATE * count)))
            row: dict[str, object] = {"layer": name, "distance": distance}
            for contender in ("fpgm", "torch"):
                scores = CONTENDERS[contender](filters, distance).double()
                row[contender] = {
                    "worst_relative_error": float(((scores - truth) / truth).abs().max()),
                    "wrongly_chosen": len(set(criteria.lowest(scores, len(chosen))) - chosen),
                }
            results.append(row)
            print(json.dumps(row))
    return results


def peak_mb(contender: str, count: int, distance: str) -> float:
    command = [sys.executable, __file__, "--peak", contender, str(count), distance]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(contender: str, count: int, distance: str) -> None:
    """Print what one call adds to the peak memory of this process, in MB."""
    filters = diverse(count)
    CONTENDERS[contender](filters[:64], distance)
    before = high_water_mb()
    CONTENDERS[contender](filters, distance)
    print(high_water_mb() - before)


def high_water_mb() -> float:
    # Not getrusage: its mark is inherited from the process that started this one. Linux only.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def page(results: dict[str, list[dict[str, object]]], machine: dict[str, object]) -> str:
    lines = [
        "# Sums of distances: speed, memory, accuracy",
        "",
        f"    {COMMAND} --threads {machine['threads']}",
        "",
        (
            f"torch {machine['torch']}, scipy {machine['scipy']}, threads: {machine['threads']}, "
            f"{machine['architecture']}. Filters of {WEIGHTS} float32 weights. Medians of "
            f"interleaved rounds; a single run if it takes over {SLOW_S:.0f} s. Memory is the "
            "increase in the peak of a fresh process by one call."
        ),
        "",
        (
            "| filters | distance | fpgm s | torch s | scipy s | faster of the two ÷ fpgm "
            "| fpgm MB | torch MB | scipy MB |"
        ),
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["speed"]:
        median, peak = row["median_s"], row["peak_mb"]
        lines.append(
            f"| {row['filters']} | {row['distance']} | {median['fpgm']:.3f} "
            f"| {median['torch']:.3f} | {median['scipy']:.3f} | {row['speedup']:.1f}× "
            f"| {peak['fpgm']:.0f} | {peak['torch']:.0f} | {peak['scipy']:.0f} |"
        )
    lines += [
        "",
        (
            "torch is `torch.cdist(x, x).sum(1)` in its default mode, for cosine a product of unit "
            "vectors. scipy is `cdist(x, x).sum(1)`, which works in float64."
        ),
        "",
        "## Numerically difficult layers",
        "",
        (
            "Time on 512 filters, l2. Distances of pairs too close for a Gram matrix are "
            "recomputed directly, which takes time if there are many."
        ),
        "",
        "| layer | fpgm s | torch.cdist s |",
        "|---|--:|--:|",
    ]
    for row in results["hard_layers"]:
        median = row["median_s"]
        lines.append(f"| {row['layer']} | {median['fpgm']:.3f} | {median['torch']:.3f} |")
    lines += [
        "",
        (
            f"Accuracy on {ACCURACY_FILTERS} such filters, against a float64 brute force: the "
            f"worst relative error of a score, and how many of the {int(RATE * ACCURACY_FILTERS)} "
            f"filters selected at rate {RATE} differ from the float64 selection. If filters are "
            "equal or nearly equal, scores tie to the last digit and either selection is correct. "
            "The distance of zero filters under cosine is a convention: ours is 1/2 to all "
            "others, torch's is 1."
        ),
        "",
        "| layer | distance | fpgm error | torch error | fpgm wrong | torch wrong |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in results["accuracy"]:
        mine, theirs = row["fpgm"], row["torch"]
        lines.append(
            f"| {row['layer']} | {row['distance']} | {mine['worst_relative_error']:.1e} "
            f"| {theirs['worst_relative_error']:.1e} | {mine['wrongly_chosen']} "
            f"| {theirs['wrongly_chosen']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time, memory and accuracy of Eq. 7.")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help="one by default: least disturbed")
    requested = parser.parse_args()
    torch.set_num_threads(requested.threads)
    if requested.peak:
        contender, count, distance = requested.peak
        print_peak(contender, int(count), distance)
        return
    machine = {
        "torch": torch.__version__,
        "scipy": scipy.__version__,
        "threads": torch.get_num_threads(),
        "architecture": platform.machine(),
    }
    results = {"speed": speed(), "hard_layers": hard_layers_speed(), "accuracy": accuracy()}
    command = f"{COMMAND} --threads {requested.threads}"
    record = {"command": command, "machine": machine, **results}
    (HERE / "criteria.json").write_text(json.dumps(record, indent=2) + "\n")
    (HERE / "criteria.md").write_text(page(results, machine), encoding="utf-8")


if __name__ == "__main__":
    main()
