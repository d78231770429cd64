"""How much recovery reduces the output error of other pruned networks, on random images.

    python benchmarks/recovery_outputs.py          # 10 minutes

Weights are randomly initialized; batch norms are estimated on the images. The error is the relative
squared error of the outputs over images that recovery has not seen.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fpgm
from fpgm.models.registry import load_model
from fpgm.recovery.bn_reestimation import reestimate_batch_norms_
from fpgm.utils.calibration_data import read_inputs

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Subject:
    """A network, the size of its images, and their number."""

    name: str
    build: Callable[[], nn.Module]
    side: int
    images: int
    residual: str = "coupled"


def plain() -> nn.Module:
    """Build six convolutions without batch norm."""
    widths = (3, 32, 32, 64, 64, 64, 64)
    layers: list[nn.Module] = []
    for number, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(a, b, 3, stride=1 + (number in (2, 4)), padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


SUBJECTS = (
    Subject("six convolutions, no norm", plain, 32, 512),
    Subject("CIFAR VGG-16, batch norms", lambda: load_model("vgg16"), 32, 512),
    Subject("torchvision ResNet-18", lambda: load_model("torchvision:resnet18"), 96, 128),
    Subject(
        "torchvision ResNet-18", lambda: load_model("torchvision:resnet18"), 96, 128, "independent"
    ),
    Subject("torchvision MobileNetV2", lambda: load_model("torchvision:mobilenet_v2"), 96, 128),
    Subject("torchvision VGG-16, no norm", lambda: load_model("torchvision:vgg16"), 96, 128),
)


def pictures(count: int, side: int, seed: int) -> list[Tensor]:
    """Generate images of random blobs at two scales and in random colors."""
    random = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 6, 6, generator=random)
    images = nn.functional.interpolate(coarse, size=side, mode="bilinear")
    images += 0.3 * torch.randn(count, 3, side, side, generator=random)
    return list(images.split(32))


@torch.no_grad()
def errors(model: nn.Module, nets: Sequence[nn.Module], data: Sequence[Tensor]) -> list[float]:
    wanted = torch.cat([model(x) for x in data]).double()
    size = wanted.square().sum()
    results = (torch.cat([net.eval()(x) for x in data]).double() for net in nets)
    return [float((item - wanted).square().sum() / size) for item in results]


def measure(subject: Subject, rate: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model = subject.build().eval()
    data = pictures(subject.images, subject.side, 1)
    reestimate_batch_norms_(model, read_inputs(data, subject.images))
    plan = fpgm.plan(model, data[0][:1], rate=rate, residual=subject.residual)  # type: ignore[arg-type]
    start = time.perf_counter()
    small = fpgm.recover(model, plan, data)
    seconds = time.perf_counter() - start
    unseen = pictures(128, subject.side, 2)
    before, after = errors(model, [fpgm.compact(model, plan), small], unseen)
    result = small.fpgm_recovery
    return {
        "network": subject.name,
        "residual": subject.residual,
        "images": subject.images,
        "macs_removed": plan.macs_removed,
        "before": before,
        "after": after,
        "seconds": seconds,
        "notes": list(result.notes),  # type: ignore[union-attr]
    }


def markdown(command: str, rate: float, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "# Recovery of other networks, random images"
    yield ""
    yield f"    {command}"
    yield ""
    yield (
        f"{rate:.0%} of the units removed by FPGM. The error is the relative squared error of the "
        f"outputs over 128 images that recovery has not seen. torch {torch.__version__}, "
        f"{platform.machine()}."
    )
    yield ""
    yield "| network | residual | images | MACs removed | before | after | smaller by | seconds |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    for r in rows:
        yield (
            f"| {r['network']} | {r['residual']} | {r['images']} | {r['macs_removed']:.1%} "
            f"| {r['before']:.3g} | {r['after']:.3g} | {r['before'] / r['after']:.1f}x "
            f"| {r['seconds']:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=0.4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    command = shlex.join(["python", "benchmarks/recovery_outputs.py", *sys.argv[1:]])
    for subject in SUBJECTS:
        rows.append(measure(subject, options.rate))
        print(rows[-1], flush=True)
        kept = {"command": command, "rows": rows}
        (HERE / "recovery_outputs.json").write_text(json.dumps(kept, indent=1) + "\n")
        text = "\n".join(markdown(command, options.rate, rows)) + "\n"
        (HERE / "recovery_outputs.md").write_text(text)


if __name__ == "__main__":
    main()
