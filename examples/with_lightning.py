"""Prune a trained ResNet-20 in PyTorch Lightning: one callback.

    pip install "fpgm[lightning]"
    python examples/with_lightning.py

The trained network and 1,900 pictures of CIFAR-10 come with the package, so nothing is downloaded.
About a minute on two cores. Writes small.safetensors.
"""

import argparse

import lightning.pytorch as pl
import rich
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fpgm
from fpgm.data.cifar10_sample import read_sample
from fpgm.data.registry import CIFAR10
from fpgm.models import trained_resnet20
from fpgm.training.callbacks.lightning import PruneCallback

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--rate", type=float, default=0.3, help="share of filters that go")
parser.add_argument("--epochs", type=int, default=4, help="before the filters are removed")
parser.add_argument("--more", type=int, default=2, help="epochs of the small model")
parser.add_argument("--images", type=int, default=1000, help="of each part, at most")
parser.add_argument("--out", default="small.safetensors")
options = parser.parse_args()

pl.seed_everything(0, verbose=False)
train, test = (part.first(options.images) for part in read_sample())
pictures = CIFAR10.apply(test.images)  # (1000, 3, 32, 32)
loader = DataLoader(
    TensorDataset(CIFAR10.apply(train.images), train.labels), batch_size=32, shuffle=True
)


@torch.no_grad()
def accuracy(net: nn.Module) -> float:
    """Share of test pictures the network names rightly."""
    net.eval()
    answers = torch.cat([net(x).argmax(1) for x in pictures.split(250)])
    return float((answers == test.labels).float().mean())


class Classifier(pl.LightningModule):
    """Any Lightning module; the network that is pruned is its attribute `net`."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.net, self.optimizer = net, optimizer

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss of one batch."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer, made outside so that it can be handed over to the small network."""
        return self.optimizer


def fit(module: pl.LightningModule, epochs: int, *callbacks: pl.Callback) -> None:
    """Train; no checkpoints."""
    module.train()  # Lightning leaves networks in the mode they are in, and accuracy() was here
    pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    ).fit(module, loader)


model = trained_resnet20()
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=5e-4)
rich.print(f"original: {accuracy(model):.1%}")

callback = PruneCallback(pictures[:1], attribute="net", rate=options.rate, mode="hard")
fit(Classifier(model, optimizer), options.epochs, callback)
for step in callback.steps:
    rich.print(str(step))

# The callback's last act was to choose once more, compact and verify; its plan also cuts the
# optimizer, momentum and all.
plan, certificate = callback.pruner.plan, callback.pruner.certificate
small = fpgm.compact(model, plan, optimizer=optimizer)
rich.print(f"verified: compact and masked model differ by {certificate.max_error:.0e}")
rich.print(f"MACs: {plan.macs_before:,} to {plan.macs_after:,} ({plan.macs_removed:.0%} removed)")
rich.print(f"masked: {accuracy(model):.1%}, compact: {accuracy(small):.1%}")

fit(Classifier(small, optimizer), options.more)
rich.print(f"compact, trained on: {accuracy(small):.1%}")
fpgm.save(small, options.out)
rich.print(f"written to {options.out}")
