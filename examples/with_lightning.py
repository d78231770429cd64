"""Prune a trained ResNet-20 in PyTorch Lightning with one callback.

    pip install ".[lightning]"    # from the clone
    python examples/with_lightning.py

The trained network and 3,500 CIFAR-10 images come with the package, so nothing is downloaded.
Takes about a minute on two cores. Writes small.safetensors.
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
parser.add_argument("--rate", type=float, default=0.3, help="fraction of filters to remove")
parser.add_argument("--epochs", type=int, default=4, help="epochs before the filters are removed")
parser.add_argument("--more", type=int, default=2, help="epochs of training the compact model")
parser.add_argument("--images", type=int, default=1000, help="maximum images per split")
parser.add_argument("--out", default="small.safetensors")
options = parser.parse_args()

pl.seed_everything(0, verbose=False)
train, test = (part.take_first(options.images) for part in read_sample())
test_images = CIFAR10.apply(test.images)  # (1000, 3, 32, 32)
loader = DataLoader(
    TensorDataset(CIFAR10.apply(train.images), train.labels), batch_size=32, shuffle=True
)


@torch.no_grad()
def accuracy(net: nn.Module) -> float:
    """Return the accuracy on the test images."""
    net.eval()
    predictions = torch.cat([net(x).argmax(1) for x in test_images.split(250)])
    return float((predictions == test.labels).float().mean())


class Classifier(pl.LightningModule):
    """A regular Lightning module; the network to prune is its attribute `net`."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.net, self.optimizer = net, optimizer

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Return the loss of one batch."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer, created outside so that the compact model can keep it."""
        return self.optimizer


def fit(module: pl.LightningModule, epochs: int, *callbacks: pl.Callback) -> None:
    """Train without checkpoints."""
    module.train()  # Lightning does not change the mode, and accuracy() has set eval mode
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

callback = PruneCallback(test_images[:1], attribute="net", rate=options.rate, mode="hard")
fit(Classifier(model, optimizer), options.epochs, callback)
for step in callback.steps:
    rich.print(str(step))

# After training, the callback selected once more, compacted and verified. Its plan is also used
# to compact the optimizer with its momentum.
plan, certificate = callback.pruner.plan, callback.pruner.certificate
small = fpgm.compact(model, plan, optimizer=optimizer)
rich.print(f"verified: compact and masked model differ by {certificate.max_error:.0e}")
rich.print(f"MACs: {plan.macs_before:,} to {plan.macs_after:,} ({plan.macs_removed:.0%} removed)")
rich.print(f"masked: {accuracy(model):.1%}, compact: {accuracy(small):.1%}")

fit(Classifier(small, optimizer), options.more)
rich.print(f"compact, trained further: {accuracy(small):.1%}")
fpgm.save(small, options.out)
rich.print(f"written to {options.out}")
