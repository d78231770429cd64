"""Images per second from our CIFAR-10 batches and from torchvision's loader, same augmentation.

    python benchmarks/loader.py

Crops after padding by 4, flips, normalization, batches of 128. The loaders are timed alternately,
so that other load on the machine affects all of them; the ratio is what matters.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from fpgm.data import cifar10
from fpgm.data.cifar10_fetch import fetch
from fpgm.data.in_memory import Augment, Images, MemoryBatches
from fpgm.data.registry import CIFAR10
from fpgm.models.torchvision_import import import_torchvision

HERE = Path(__file__).resolve().parent
BATCH = 128


def ways(root: Path) -> dict[str, Callable[[int], Iterable[Any]]]:
    """Return sources of one epoch of batches, by name."""
    import_torchvision()
    from torchvision import transforms

    shown = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(CIFAR10.mean, CIFAR10.std),
        ]
    )
    data = cifar10.read(root)
    ours = MemoryBatches(
        Images(data.train_images, data.train_labels),
        BATCH,
        CIFAR10,
        augment=Augment(4, True),
        seed=0,
    )
    theirs = cifar10.torchvision_dataset(root, train=True, transform=shown)

    def loader(workers: int) -> Callable[[int], Iterable[Any]]:
        return lambda _: DataLoader(theirs, BATCH, shuffle=True, num_workers=workers)

    return {
        "fpgm, in memory": ours.epoch,
        "torchvision, no workers": loader(0),
        "torchvision, 2 workers": loader(2),
    }


def measure(source: Callable[[int], Iterable[Any]], batches: int, number: int) -> float:
    """Measure images per second over the first batches of an epoch, without the very first."""
    stream = iter(source(number))
    next(stream)  # workers start here
    start = time.perf_counter()
    for _ in range(batches):
        next(stream)
    return batches * BATCH / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=cifar10.default_root())
    parser.add_argument("--batches", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fetch(options.root)
    sources = ways(options.root)
    rates: dict[str, list[float]] = {name: [] for name in sources}
    for number in range(options.rounds):
        for name, source in sources.items():
            rates[name].append(measure(source, options.batches, number))
    ours = rates["fpgm, in memory"]
    rows = [
        {
            "way": name,
            "images_per_second": round(statistics.median(item)),
            "ours_is_faster": round(
                statistics.median(a / b for a, b in zip(ours, item, strict=True)), 1
            ),
        }
        for name, item in rates.items()
    ]
    command = shlex.join(["python", "benchmarks/loader.py", *sys.argv[1:]])
    about = {"command": command, "torch": torch.__version__, "cores": os.cpu_count()}
    (HERE / "loader.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    lines = [
        "# Loading CIFAR-10",
        "",
        f"    {command}",
        "",
        (
            f"Batches of {BATCH} with random crops, flips and normalization; median of "
            f"{options.rounds} alternating rounds, one torch thread, {os.cpu_count()} cores, torch "
            f"{torch.__version__}, {platform.machine()}."
        ),
        "",
        "| | images/s | fpgm's speedup |",
        "|---|--:|--:|",
        *(f"| {r['way']} | {r['images_per_second']:,} | {r['ours_is_faster']:g}× |" for r in rows),
    ]
    (HERE / "loader.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
