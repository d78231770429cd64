"""Prune a trained ResNet-20 without training it: plan, verify, recover, time, hand over as ONNX.

    pip install "fpgm[export]"
    python examples/prune_recover_export.py
    python examples/prune_recover_export.py --macs 0.6 --distil 60

The trained network and 1,900 pictures of CIFAR-10 come with the package, so nothing is downloaded.
No label is used but to count accuracy. Half a minute on two cores. Writes small.safetensors and
small.onnx.
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
parser.add_argument("--macs", type=float, default=0.4, help="share of MACs that goes")
parser.add_argument("--images", type=int, default=1000, help="of each part, at most")
parser.add_argument("--distil", type=float, default=0.0, help="seconds of learning afterwards")
parser.add_argument("--backends", nargs="+", default=["eager", "onnxruntime"])
parser.add_argument("--seconds", type=float, default=2.0, help="of timing each runtime")
parser.add_argument("--out", type=Path, default=Path())
options = parser.parse_args()

torch.manual_seed(0)
train, test = (part.first(options.images) for part in read_sample())
looked_at = CIFAR10.apply(train.images).split(50)  # 900 pictures
pictures = CIFAR10.apply(test.images)  # (1000, 3, 32, 32)


@torch.no_grad()
def accuracy(net: nn.Module) -> float:
    """Share of test pictures the network names rightly."""
    answers = torch.cat([net(x).argmax(1) for x in pictures.split(250)])
    return float((answers == test.labels).float().mean())


# Decide. The plan is a value: print it, save it, compare it. Nothing has happened yet.
model = trained_resnet20()
plan = fpgm.plan(model, pictures[:1], macs=options.macs)
rich.print(f"MACs: {plan.macs_before:,} to {plan.macs_after:,} ({plan.macs_removed:.0%} removed)")

# Act, and prove it: the small model is the original without just those filters.
small = fpgm.compact(model, plan)
certificate = fpgm.verify(model, plan, pictures[:8], compacted=small).check()
rich.print(f"verified: compact and silenced model differ by {certificate.max_error:.0e}")

# Solve, layer by layer, for weights with which the filters that stay stand in for those gone.
recovered = fpgm.recover(model, plan, looked_at, images=len(train), distil=options.distil)
for name, net in (("original", model), ("pruned", small), ("recovered", recovered)):
    rich.print(f"{name}: {accuracy(net):.1%}")

# Measure both, in turns. Runtimes that are not installed are named and left out.
found = fpgm.bench(
    [model, recovered], pictures[:16], backends=options.backends, seconds=options.seconds
)
for row in found.rows:
    before, after = (figures.seconds * 1000 for figures in row.figures)
    rich.print(f"{row.where}: {before:.1f} to {after:.1f} ms, {row.figures[1].verdict}")
for place, reason in found.skipped.items():
    rich.print(f"{place} not measured: {reason}")

# Hand over. The file is compared with PyTorch before it is left there.
options.out.mkdir(parents=True, exist_ok=True)
fpgm.save(recovered, options.out / "small.safetensors")
done = fpgm.export(recovered, pictures[:1], options.out / "small.onnx")
rich.print(f"written to {done.path}: {done.bytes:,} bytes, {done.error:.0e} off PyTorch")
