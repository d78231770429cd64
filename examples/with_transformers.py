"""Prune a ResNet of Hugging Face Transformers in its Trainer: one callback.

    pip install "fpgm[hf]"
    python examples/with_transformers.py

Nothing is downloaded: the network is small and starts from scratch, the 1,900 pictures of CIFAR-10
come with the package. So few pictures teach it little; what to look at is that the compact network
is as good as the masked one. Half a minute on two cores. Writes small.safetensors.
"""

import argparse

import rich
import torch
import transformers
from torch import Tensor, nn

import fpgm
from fpgm.data.cifar10_sample import read_sample
from fpgm.data.registry import CIFAR10
from fpgm.training.callbacks.huggingface import PruneCallback

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--rate", type=float, default=0.4, help="share of filters that go")
parser.add_argument("--epochs", type=int, default=12, help="before the filters are removed")
parser.add_argument("--more", type=int, default=4, help="epochs of the small model")
parser.add_argument("--images", type=int, default=1000, help="of each part, at most")
parser.add_argument("--out", default="small.safetensors")
options = parser.parse_args()

transformers.set_seed(0)
train, test = (part.first(options.images) for part in read_sample())
pictures = CIFAR10.apply(test.images)  # (1000, 3, 32, 32)
data = [
    {"pixel_values": x, "labels": y}
    for x, y in zip(CIFAR10.apply(train.images), train.labels, strict=True)
]


def make_model() -> nn.Module:
    """Stages of 32, 64 and 128 channels; the stem leaves 8×8 of a picture's 32×32."""
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
    """Share of test pictures the network names rightly."""
    net.eval()
    answers: list[Tensor] = [net(x).logits.argmax(1) for x in pictures.split(250)]
    return float((torch.cat(answers) == test.labels).float().mean())


def fit(
    net: nn.Module, epochs: int, optimizer: torch.optim.Optimizer, *callbacks: PruneCallback
) -> None:
    """Train; no checkpoints."""
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

# The example is a dict: the names are arguments of the network's forward. Pruning starts halfway,
# because a network has to learn something before its filters are worth choosing among.
callback = PruneCallback(
    {"pixel_values": pictures[:1]},
    rate=options.rate,
    mode="hard",
    start=options.epochs // 2 + 1,
)
fit(model, options.epochs, optimizer, callback)
for step in callback.steps:
    rich.print(str(step))

# The callback's last act was to choose once more, compact and verify; its plan also cuts the
# optimizer, Adam's moments and all.
plan, certificate = callback.pruner.plan, callback.pruner.certificate
small = fpgm.compact(model, plan, optimizer=optimizer)
rich.print(f"verified: compact and masked model differ by {certificate.max_error:.0e}")
rich.print(f"MACs: {plan.macs_before:,} to {plan.macs_after:,} ({plan.macs_removed:.0%} removed)")
rich.print(f"masked: {accuracy(model):.1%}, compact: {accuracy(small):.1%}")

fit(small, options.more, optimizer)
rich.print(f"compact, trained on: {accuracy(small):.1%}")
fpgm.save(small, options.out)
again = fpgm.load(options.out, make_model)
rich.print(f"written to {options.out}; read back: {accuracy(again):.1%}")
