"""Prune a trained ResNet-20 in a plain PyTorch loop: train for an epoch, prune, repeat.

    python examples/plain_loop.py
    python examples/plain_loop.py --rate 0.4 --mode soft --epochs 8

The trained network and 3,500 CIFAR-10 images come with the package, so nothing is downloaded.
Takes about a minute on two cores. Writes small.safetensors.
"""

import argparse

import rich
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fpgm
from fpgm.data.cifar10_sample import read_sample
from fpgm.data.registry import CIFAR10
from fpgm.models import resnet, trained_resnet20

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--rate", type=float, default=0.3, help="fraction of filters to remove")
parser.add_argument("--mode", choices=["soft", "hard"], default="hard")
parser.add_argument("--epochs", type=int, default=4, help="epochs before the filters are removed")
parser.add_argument("--more", type=int, default=2, help="epochs of training the compact model")
parser.add_argument("--images", type=int, default=1000, help="maximum images per split")
parser.add_argument("--out", default="small.safetensors")
options = parser.parse_args()

torch.manual_seed(0)
train, test = (part.take_first(options.images) for part in read_sample())
loader = DataLoader(
    TensorDataset(CIFAR10.apply(train.images), train.labels), batch_size=32, shuffle=True
)
test_images = CIFAR10.apply(test.images)  # (1000, 3, 32, 32)


@torch.no_grad()
def accuracy(net: nn.Module) -> float:
    """Return the accuracy on the test images."""
    net.eval()
    predictions = torch.cat([net(x).argmax(1) for x in test_images.split(250)])
    return float((predictions == test.labels).float().mean())


def train_one_epoch(net: nn.Module) -> None:
    """Train for one epoch: a regular loop, without any pruning code."""
    net.train()
    for x, y in loader:
        loss: Tensor = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


model = trained_resnet20()
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs + options.more)
rich.print(f"original: {accuracy(model):.1%}")

# Training and pruning alternate. The pruner needs the optimizer because momentum would move
# zeroed filters; in hard mode it also keeps them at zero between its steps.
pruner = fpgm.SoftPruner(
    model, test_images[:1], rate=options.rate, mode=options.mode, optimizer=optimizer
)
for _ in range(options.epochs):
    train_one_epoch(model)
    schedule.step()
    before = accuracy(model)
    step = pruner.step()
    rich.print(f"{step}\n  accuracy: {before:.1%} before pruning, {accuracy(model):.1%} after")

# Remove the zeroed filters. The compact model is verified against the masked one. The optimizer
# now holds its parameters, with their momentum, and the schedule keeps working.
small = pruner.compact(optimizer=optimizer)
plan, certificate = pruner.plan, pruner.certificate
assert plan is not None
assert certificate is not None
rich.print(f"verified: compact and masked model differ by {certificate.max_error:.0e}")
rich.print(f"MACs: {plan.macs_before:,} to {plan.macs_after:,} ({plan.macs_removed:.0%} removed)")
rich.print(f"parameters: {plan.params_before:,} to {plan.params_after:,}")
rich.print(f"masked: {accuracy(model):.1%}, compact: {accuracy(small):.1%}")

for _ in range(options.more):
    train_one_epoch(small)
    schedule.step()
rich.print(f"compact, trained further: {accuracy(small):.1%}")

fpgm.save(small, options.out)
again = fpgm.load(options.out, lambda: resnet(20))
rich.print(f"written to {options.out}; loaded again: {accuracy(again):.1%}")
