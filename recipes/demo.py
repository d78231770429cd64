"""Prune a real network on real pictures, prove the result, and bring its accuracy back.

    make demo                    # or: python recipes/demo.py
    python recipes/demo.py 0.5   # prune harder

The trained ResNet-20 and 1,900 pictures of CIFAR-10 come with the package, so nothing is
downloaded. About a minute on two cores.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

import fpgm
from fpgm.data.images import Augment, MemoryBatches
from fpgm.data.sample import read_sample
from fpgm.data.sources import CIFAR10
from fpgm.models import trained_resnet20

# -----------------------------------------------------------------------------
rate = float(sys.argv[1]) if len(sys.argv) > 1 else 0.3  # share of filters that go
seconds = 20.0  # of learning from the original
batch_size = 50
timed_batch = 64
timed_runs = 30  # of each model, taken in turns so that a busy machine slows both alike
# -----------------------------------------------------------------------------

console = Console()
torch.manual_seed(0)
torch.set_num_threads(min(2, torch.get_num_threads()))
started = time.perf_counter()

train, test = read_sample()  # 900 and 1,000 pictures as bytes, with labels
batches = MemoryBatches(train, batch_size, CIFAR10, augment=Augment(crop=4, flip=True), seed=0)
epochs = itertools.count()
images = CIFAR10.apply(test.images)  # (1000, 3, 32, 32)


class Pictures:
    """The training pictures, cropped and mirrored anew each time they are gone through."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in batches.epoch(next(epochs)):
            yield batch.images


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    answers = torch.cat([model(x).argmax(1) for x in images.split(250)])
    return float((answers == test.labels).float().mean())


@torch.no_grad()
def latency_ms(*models: nn.Module) -> list[float]:
    """Median milliseconds of each model, measured in turns."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(timed_runs):
        for model, own in zip(models, times, strict=True):
            start = time.perf_counter()
            model(images[:timed_batch])
            own.append(1000 * (time.perf_counter() - start))
    return [statistics.median(own) for own in times]


# Decide, then act: the plan is a value, compact returns a new module, the model is untouched.
model = trained_resnet20()
plan = fpgm.plan(model, images[:1], rate=rate)
small = fpgm.compact(model, plan)
certificate = fpgm.verify(model, plan, images[:8], compacted=small).check()  # raises unless proved
console.print(str(plan), highlight=False)

# Bring the accuracy back without labels: solve for the weights that stand in for what is gone,
# then let the small model learn the original's answers for a while.
with Progress(console=console, transient=True) as progress:
    task = progress.add_task("recovering")

    def show(what: str, done: int, total: int) -> None:
        progress.update(task, description=f"recovering: {what}", completed=done, total=total)

    solved = fpgm.recover(model, plan, Pictures(), images=len(train.images), progress=show)
    taught = fpgm.recover(
        model, plan, Pictures(), images=len(train.images), distil=seconds, progress=show
    )

# Report.
before_ms, after_ms = latency_ms(model, taught)
table = Table(title=f"ResNet-20 on CIFAR-10, FPGM at rate {rate:g}")
for name in ("", "original", "pruned", "solved", "solved + taught"):
    table.add_column(name, justify="left" if not name else "right")
models = (model, small, solved, taught)
table.add_row("accuracy, 1,000 pictures", *(f"{accuracy(m):.1%}" for m in models))
after = (plan.macs_after, plan.params_after)
table.add_row("MACs per picture", f"{plan.macs_before:,}", *[f"{after[0]:,}"] * 3)
table.add_row("parameters", f"{plan.params_before:,}", *[f"{after[1]:,}"] * 3)
faster = f"{after_ms:.1f} ({before_ms / after_ms:.1f}×)"
table.add_row(f"ms per {timed_batch} pictures", f"{before_ms:.1f}", "", "", faster)
console.print(table)
console.print(
    f"Certified: the pruned model is the original without the removed units, to "
    f"{certificate.max_error:.1e}; silencing those units moves the original by "
    f"{certificate.moved:.2g}. {time.perf_counter() - started:.0f} s in all.",
    highlight=False,
)
