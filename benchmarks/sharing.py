"""Time of recovery and sensitivity in one process, and divided between two.

    python benchmarks/sharing.py                      # writes sharing.json and sharing.md

Every process has one thread. Runs alternate, and the best of each is taken. Besides the time on the
clock, the CPU time of the busiest process is shown, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import interpolate

import fpgm
from fpgm.data.cifar10_sample import read_sample
from fpgm.data.registry import CIFAR10
from fpgm.utils.distributed import current_ranks
from fpgm.workflow.original_model import build_model

HERE = Path(__file__).resolve().parent
WHAT = ("recover", "sensitivity")

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--weights", type=Path, help="trained weights; without, random ones")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--macs", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    runs = [run for _ in range(options.repeats) for run in measure(options)]
    rows = [_row(what, [run for run in runs if run["what"] == what]) for what in WHAT]
    about = {
        "command": shlex.join(
            ["python", "benchmarks/sharing.py", *(Path(word).name for word in sys.argv[1:])]
        ),
        "model": options.model,
        "weights": "trained" if options.weights else "random",
        "images": options.images,
        "batch": options.batch,
        "size": options.size,
        "macs": options.macs,
        "repeats": options.repeats,
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "fpgm": fpgm.__version__,
        },
    }
    text = json.dumps({"about": about, "rows": rows}, indent=1)
    (HERE / "sharing.json").write_text(text + "\n")
    (HERE / "sharing.md").write_text("\n".join(_markdown(about, rows)) + "\n")
    print("\n".join(_markdown(about, rows)))


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Run both tasks in one process, then in two."""
    for processes in (1, 2):
        with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            torch.multiprocessing.spawn(
                worker, (processes, port, folder, options), nprocs=processes
            )
            for what in WHAT:
                yield {"what": what, "processes": processes, **torch.load(Path(folder) / what)}


def worker(rank: int, processes: int, port: int, folder: str, options: Any) -> None:
    """Measure in one of the processes; the first one writes the result."""
    torch.set_num_threads(1)
    if processes > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=processes)
    ranks = current_ranks()
    model = build_model(options.model, options.weights)
    data = sample_batches(options)
    if options.weights is None:
        with torch.no_grad():  # statistics of the data, as training leaves them
            model.train()(data[0])
            model.eval()
    plan = fpgm.plan(model, data[0][:2], macs=options.macs)
    for what in WHAT:
        ranks.gather(what)  # all begin together
        clock, cpu = time.perf_counter(), time.process_time()
        values = recovered(model, plan, data) if what == "recover" else curves(model, data)
        seconds, used = time.perf_counter() - clock, time.process_time() - cpu
        used = max(ranks.gather(used))
        if rank == 0:
            torch.save(
                {"seconds": seconds, "cpu_seconds": used, "values": values}, Path(folder) / what
            )
    ranks.gather("done")
    if processes > 1:
        os._exit(0)  # gloo's threads outlive their group, and may abort what Python takes down


def sample_batches(options: argparse.Namespace) -> list[Tensor]:
    """Return batches of the images that come with the package, enlarged to this size."""
    images = CIFAR10.apply(read_sample()[0].images[: options.images])
    if images.shape[-1] != options.size:
        images = interpolate(images, size=options.size, mode="bilinear")
    return list(images.split(options.batch))


def recovered(model: torch.nn.Module, plan: fpgm.Plan, data: list[Tensor]) -> dict[str, Tensor]:
    """Recover with all inputs; return the weights."""
    images = sum(len(batch) for batch in data)
    return dict(fpgm.recover(model, plan, data, images=images).state_dict())


def curves(model: torch.nn.Module, data: list[Tensor]) -> dict[str, Tensor]:
    """Measure sensitivity on all inputs; return the errors."""
    images = sum(len(batch) for batch in data)
    measured = fpgm.sensitivity(model, data[0][:2], data, images=images, rates=())
    return {str(group.place): torch.tensor(group.harm) for group in measured.groups}


def _row(what: str, runs: Sequence[Row]) -> Row:
    one, two = ([run for run in runs if run["processes"] == count] for count in (1, 2))
    alone, shared = one[0]["values"], two[0]["values"]
    gaps = [
        float((alone[name].double() - shared[name].double()).abs().max())
        / max(float(alone[name].double().abs().max()), 1e-12)
        for name in alone
    ]
    row: Row = {"what": what}
    for key in ("seconds", "cpu_seconds"):
        times = [min(run[key] for run in item) for item in (one, two)]
        row[f"{key}_one"], row[f"{key}_two"] = (round(value, 2) for value in times)
        row[f"{key}_ratio"] = round(times[1] / times[0], 3)
    return row | {"largest_difference": max(gaps)}


def _markdown(about: Row, rows: Sequence[Row]) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    yield "# One process and two"
    yield ""
    yield f"Made by `{about['command']}` with {versions}."
    yield (
        f"{about['model']} ({about['weights']} weights), {about['macs']:.0%} of MACs removed, "
        f"{about['images']} CIFAR-10 images of {about['size']}×{about['size']} in batches of "
        f"{about['batch']}; one thread per process, "
        f"{about['cores']} cores, load average before the start {about['load_before']}, best of "
        f"{about['repeats']}. *Difference* is the largest one of any tensor, relative to its "
        "largest value."
    )
    if about["load_before"] > about["cores"] / 2:
        yield ""
        yield (
            "Other work ran on the machine at the same time, so the wall times are not reliable."
        )
    yield ""
    yield "| | one process s | two s | ratio | CPU s | busiest of two | ratio | difference |"
    yield "|:--|--:|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        yield (
            f"| {row['what']} | {row['seconds_one']:.1f} | {row['seconds_two']:.1f} "
            f"| {row['seconds_ratio']:.2f} | {row['cpu_seconds_one']:.1f} "
            f"| {row['cpu_seconds_two']:.1f} | {row['cpu_seconds_ratio']:.2f} "
            f"| {row['largest_difference']:.1e} |"
        )


if __name__ == "__main__":
    main()
