"""Prune a trained ResNet-20 with Hugging Face Accelerate, in one process or many.

    pip install ".[train]"    # from the clone
    python examples/with_accelerate.py
    accelerate launch --multi_gpu --num_processes 2 examples/with_accelerate.py

On a machine without a GPU the second command starts two processes on the CPU; with --cpu in place
of --multi_gpu Accelerate would start one. Nothing is downloaded: the trained network and 3,500
CIFAR-10 images come with the package. Takes about a minute on two cores. Writes small.safetensors.
"""

import argparse
import os
import sys

import rich
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fpgm
from fpgm.data.cifar10_sample import read_sample
from fpgm.data.registry import CIFAR10
from fpgm.models import trained_resnet20
from fpgm.utils.modules import tensors_sha256

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--rate", type=float, default=0.3, help="fraction of filters to remove")
parser.add_argument("--epochs", type=int, default=4, help="epochs before the filters are removed")
parser.add_argument("--more", type=int, default=2, help="epochs of training the compact model")
parser.add_argument("--images", type=int, default=1000, help="maximum images per split")
parser.add_argument("--out", default="small.safetensors")
options = parser.parse_args()

# Without a GPU, Accelerate connects processes only with cpu=True.
accelerator = Accelerator(cpu=not torch.cuda.is_available())
set_seed(0)
train, test = (part.take_first(options.images) for part in read_sample())
test_images = CIFAR10.apply(test.images).to(accelerator.device)  # (1000, 3, 32, 32)
labels = test.labels.to(accelerator.device)


def say(text: str) -> None:
    """Print from the main process only."""
    if accelerator.is_main_process:
        rich.print(text)


def agree(net: nn.Module) -> None:
    """Use the batch norm statistics of rank 0; each process has seen different images."""
    for buffer in net.buffers():
        broadcast(buffer)


@torch.no_grad()
def accuracy(net: nn.Module) -> float:
    """Return the accuracy on the test images."""
    net.eval()
    predictions = torch.cat([net(x).argmax(1) for x in test_images.split(250)])
    return float((predictions == labels).float().mean())


def train_one_epoch(net: nn.Module) -> None:
    """Train for one epoch; the loader gives every process its part of each batch of 32."""
    net.train()
    for x, y in loader:
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()


model = trained_resnet20()
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=5e-4)
loader = DataLoader(
    TensorDataset(CIFAR10.apply(train.images), train.labels),
    batch_size=32 // accelerator.num_processes,
    shuffle=True,
)
net, optimizer, loader = accelerator.prepare(model, optimizer, loader)
say(f"processes: {accelerator.num_processes}, original: {accuracy(model):.1%}")

# Every process calls step() and compact(); all use the selection of rank 0.
pruner = fpgm.SoftPruner(net, test_images[:1], rate=options.rate, mode="hard", optimizer=optimizer)
for _ in range(options.epochs):
    train_one_epoch(net)
    agree(model)
    before = accuracy(model)
    step = pruner.step()
    say(f"{step}\n  accuracy: {before:.1%} before pruning, {accuracy(model):.1%} after")

# The optimizer now holds the parameters of the verified compact model, with their momentum. The
# model is wrapped again because the old wrapper refers to the old weights.
small = pruner.compact(optimizer=optimizer)
plan, certificate = pruner.plan, pruner.certificate
assert plan is not None
assert certificate is not None
say(f"verified: compact and masked model differ by {certificate.max_error:.0e}")
say(f"MACs: {plan.macs_before:,} to {plan.macs_after:,} ({plan.macs_removed:.0%} removed)")
say(f"masked: {accuracy(model):.1%}, compact: {accuracy(small):.1%}")

net = accelerator.prepare(small)
for _ in range(options.more):
    train_one_epoch(net)
agree(small)
say(f"compact, trained further: {accuracy(small):.1%}")

digests = gather_object([tensors_sha256(small)])
say(f"the same model in all processes: {'yes' if len(set(digests)) == 1 else 'no'}")
if accelerator.is_main_process:
    fpgm.save(small, options.out)
say(f"written to {options.out}")
accelerator.end_training()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive their group and may abort the process while Python exits
