"""How a zeroed filter regrows: the first steps after pruning, ResNet-20 on CIFAR-10.

    FPGM_WEIGHTS=DIR python benchmarks/regrowth.py      # two minutes

Trained weights, 40 % zeroed by FPGM, `independent`; then training continues, at the learning rate
of `cifar10-resnet20-quick` and at the last one of the paper's schedule. Values are means over all
convolutions that add into the stream, where the shortcut passes a gradient to zeroed units.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fpgm
from fpgm.data import cifar10
from fpgm.models import resnet
from fpgm.models.checkpoint import load_weights
from trained import add_weights

HERE = Path(__file__).resolve().parent
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RATES = (0.02, 0.0008)
SHOWN = (1, 2, 3, 6, 11, 21, 41)
BATCH = 128


def batches(root: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Return training images in a random order."""
    data = cifar10.read(root)
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))
    order = torch.randperm(len(data.train_labels), generator=torch.Generator().manual_seed(0))
    for chosen in order.split(BATCH):
        yield (data.train_images[chosen].float() / 255 - mean) / std, data.train_labels[chosen]


def sizes(filters: Tensor) -> Tensor:
    """Return each filter's norm."""
    return filters.detach().flatten(1).norm(dim=1)


class Volume:
    """Records the outputs of the following batch norms, relative to each channel's scale."""

    def __init__(self, norms: Sequence[nn.Module]) -> None:
        self.said: dict[nn.Module, Tensor] = {}
        for norm in norms:
            norm.register_forward_hook(self._hook)

    def _hook(self, norm: Any, args: Any, out: Tensor) -> None:
        self.said[norm] = out.detach().std((0, 2, 3)) / norm.weight.detach().abs()

    def now(self) -> Tensor:
        return torch.cat(list(self.said.values()))


def measure(weights: Path, root: Path, lr: float) -> list[dict[str, float]]:
    net = load_weights(resnet(20), weights / "cifar10_resnet20.safetensors").train()
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.9, nesterov=True)
    example = torch.randn(1, 3, 32, 32)
    options: dict[str, Any] = {"rate": 0.4, "residual": "independent", "rounding": "paper"}
    fpgm.SoftPruner(net, example, optimizer=optimizer, **options).step()
    layers = [m for name, m in net.named_modules() if name.endswith("conv2")]
    volume = Volume([m for name, m in net.named_modules() if name.endswith("bn2")])
    removed = torch.cat([sizes(layer.weight) == 0 for layer in layers])
    rows = []
    for step, (x, y) in enumerate(batches(root), 1):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        if step in SHOWN:
            norms = torch.cat([sizes(layer.weight) for layer in layers])
            slopes = torch.cat([sizes(layer.weight.grad) for layer in layers])
            rows.append(
                {
                    "learning_rate": lr,
                    "step": step,
                    "loss": loss.item(),
                    "gradient_zeroed": slopes[removed].mean().item(),
                    "gradient_kept": slopes[~removed].mean().item(),
                    "norm_zeroed": norms[removed].mean().item(),
                    "norm_kept": norms[~removed].mean().item(),
                    "volume_zeroed": volume.now()[removed].mean().item(),
                    "volume_kept": volume.now()[~removed].mean().item(),
                }
            )
        if step == max(SHOWN):
            break
        optimizer.step()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_weights(parser)
    parser.add_argument("--data", type=Path, default=cifar10.default_root())
    options = parser.parse_args()
    rows = [row for lr in RATES for row in measure(options.weights, options.data, lr)]
    command = shlex.join(["python", "benchmarks/regrowth.py", *sys.argv[1:]])
    record = {"command": command, "torch": torch.__version__, "rows": rows}
    (HERE / "regrowth.json").write_text(json.dumps(record, indent=1) + "\n")
    lines = [
        "# How a zeroed filter regrows",
        "",
        f"    {command}",
        "",
        (
            "ResNet-20 on CIFAR-10, trained weights, 40 % zeroed by FPGM, `independent`, batch "
            f"{BATCH}, SGD with momentum. Means over the filters of all convolutions that add into "
            "the stream, before each step. Amplitude: the standard deviation of the following "
            f"batch norm's output, divided by the norm's scale. torch {torch.__version__}."
        ),
        "",
        (
            "| learning rate | step | loss | gradient, zeroed | gradient, kept | norm, zeroed "
            "| norm, kept | amplitude, zeroed | amplitude, kept |"
        ),
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['learning_rate']:g} | {row['step']} | {row['loss']:.2f} "
        f"| {row['gradient_zeroed']:.3f} | {row['gradient_kept']:.3f} "
        f"| {row['norm_zeroed']:.2f} | {row['norm_kept']:.2f} "
        f"| {row['volume_zeroed']:.2f} | {row['volume_kept']:.2f} |"
        for row in rows
    ]
    (HERE / "regrowth.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
