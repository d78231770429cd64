"""Prune a trained ResNet-20 without training it: plan, verify, recover, time, export to ONNX.

    pip install ".[export]"    # from the clone
    python examples/prune_recover_export.py
    python examples/prune_recover_export.py --macs 0.6 --distil 60

The trained network and 3,500 CIFAR-10 images come with the package, so nothing is downloaded.
Labels are used only to measure accuracy. Takes half a minute on two cores. Writes
small.safetensors and small.onnx.
"""

import argparse
from pathlib import Path

import rich
import torch
from torch import nn

import fpgm
from fpgm.data.cifar10_sample import read_sample
from fpgm.data.registry import CIFAR10
from fpgm.models import trained_resnet20

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--macs", type=float, default=0.4, help="fraction of MACs to remove")
parser.add_argument("--images", type=int, default=1000, help="maximum images per split")
parser.add_argument("--distil", type=float, default=0.0, help="seconds of distillation afterwards")
parser.add_argument("--backends", nargs="+", default=["eager", "onnxruntime"])
parser.add_argument("--seconds", type=float, default=2.0, help="seconds of timing per runtime")
parser.add_argument("--out", type=Path, default=Path())
options = parser.parse_args()

torch.manual_seed(0)
train, test = (part.take_first(options.images) for part in read_sample())
train_batches = CIFAR10.apply(train.images).split(50)  # 2,500 images
test_images = CIFAR10.apply(test.images)  # (1000, 3, 32, 32)


@torch.no_grad()
def accuracy(net: nn.Module) -> float:
    """Return the accuracy on the test images."""
    predictions = torch.cat([net(x).argmax(1) for x in test_images.split(250)])
    return float((predictions == test.labels).float().mean())


# Plan. The plan is a value: print it, save it, compare it. Nothing has been changed yet.
model = trained_resnet20()
plan = fpgm.plan(model, test_images[:1], macs=options.macs)
rich.print(f"MACs: {plan.macs_before:,} to {plan.macs_after:,} ({plan.macs_removed:.0%} removed)")

# Compact and verify: the compact model must match the original with those filters masked.
small = fpgm.compact(model, plan)
certificate = fpgm.verify(model, plan, test_images[:8], compacted=small).check()
rich.print(f"verified: compact and masked model differ by {certificate.max_error:.0e}")

# Recover: solve, layer by layer, for weights that compensate for the removed filters.
recovered = fpgm.recover(model, plan, train_batches, images=len(train), distil=options.distil)
for name, net in (("original", model), ("pruned", small), ("recovered", recovered)):
    rich.print(f"{name}: {accuracy(net):.1%}")

# Time both models alternately. Runtimes that are not installed are reported and skipped.
result = fpgm.bench(
    [model, recovered], test_images[:16], backends=options.backends, seconds=options.seconds
)
for row in result.rows:
    before, after = (figures.seconds * 1000 for figures in row.figures)
    rich.print(f"{row.where}: {before:.1f} to {after:.1f} ms, {row.figures[1].verdict}")
for place, reason in result.skipped.items():
    rich.print(f"{place} not measured: {reason}")

# Export. The file is compared with PyTorch before it is written.
options.out.mkdir(parents=True, exist_ok=True)
fpgm.save(recovered, options.out / "small.safetensors")
done = fpgm.export(recovered, test_images[:1], options.out / "small.onnx")
rich.print(f"written to {done.path}: {done.bytes:,} bytes, error {done.error:.0e}")
