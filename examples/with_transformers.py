"""Prune a Hugging Face Transformers ResNet in the Trainer with one callback.

    pip install ".[hf]"    # from the clone
    python examples/with_transformers.py

Nothing is downloaded: the network is small and starts from scratch, and 3,500 CIFAR-10 images
come with the package. So few images do not train it well, but the compact network is as accurate
as the masked one. Takes half a minute on two cores. Writes small.safetensors.
"""

import argparse

import rich
import torch
import transformers
from torch import Tensor, nn

import fpgm
from fpgm.data.cifar10_sample import read_sample
from fpgm.data.registry import CIFAR10
from fpgm.training.callbacks.huggingface import TrainerPruneCallback

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--rate", type=float, default=0.4, help="fraction of filters to remove")
parser.add_argument("--epochs", type=int, default=12, help="epochs before the filters are removed")
parser.add_argument("--more", type=int, default=4, help="epochs of training the compact model")
parser.add_argument("--images", type=int, default=1000, help="maximum images per split")
parser.add_argument("--out", default="small.safetensors")
options = parser.parse_args()

transformers.set_seed(0)
train, test = (part.take_first(options.images) for part in read_sample())
test_images = CIFAR10.apply(test.images)  # (1000, 3, 32, 32)
data = [
    {"pixel_values": x, "labels": y}
    for x, y in zip(CIFAR10.apply(train.images), train.labels, strict=True)
]


def make_model() -> nn.Module:
    """Build stages of 32, 64 and 128 channels; the stem reduces 32×32 images to 8×8."""
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=32,
            hidden_sizes=[32, 64, 128],
            depths=[1, 1, 1],
            layer_type="basic",
            num_labels=10,
        )
    )


@torch.no_grad()
def accuracy(net: nn.Module) -> float:
    """Return the accuracy on the test images."""
    net.eval()
    predictions: list[Tensor] = [net(x).logits.argmax(1) for x in test_images.split(250)]
    return float((torch.cat(predictions) == test.labels).float().mean())


def fit(
    net: nn.Module, epochs: int, optimizer: torch.optim.Optimizer, *callbacks: TrainerPruneCallback
) -> None:
    """Train without checkpoints."""
    arguments = transformers.TrainingArguments(
        output_dir="trainer",
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    transformers.Trainer(
        net, arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=[*callbacks]
    ).train()


model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
rich.print(f"untrained: {accuracy(model):.1%}")

# The example is a dict of arguments of the network's forward. Pruning starts halfway, because
# the filters of an untrained network say little.
callback = TrainerPruneCallback(
    {"pixel_values": test_images[:1]},
    rate=options.rate,
    mode="hard",
    start=options.epochs // 2 + 1,
)
fit(model, options.epochs, optimizer, callback)
for step in callback.steps:
    rich.print(str(step))

# After training, the callback selected once more, compacted and verified. Its plan is also used
# to compact the optimizer with Adam's moments.
plan, certificate = callback.pruner.plan, callback.pruner.certificate
small = fpgm.compact(model, plan, optimizer=optimizer)
rich.print(f"verified: compact and masked model differ by {certificate.max_error:.0e}")
rich.print(f"MACs: {plan.macs_before:,} to {plan.macs_after:,} ({plan.macs_removed:.0%} removed)")
rich.print(f"masked: {accuracy(model):.1%}, compact: {accuracy(small):.1%}")

fit(small, options.more, optimizer)
rich.print(f"compact, trained further: {accuracy(small):.1%}")
fpgm.save(small, options.out)
again = fpgm.load(options.out, make_model)
rich.print(f"written to {options.out}; loaded again: {accuracy(again):.1%}")
