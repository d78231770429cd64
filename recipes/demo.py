"""Train, prune, verify and fine-tune a small residual network on real handwritten digits.

    make demo                    # or: python recipes/demo.py
    python recipes/demo.py 0.6   # prune harder

The 1,797 images ship with scikit-learn, so nothing is downloaded. Half a minute on one core.
"""

import copy
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import fpgm
from fpgm.models import digits

# -----------------------------------------------------------------------------
rate = (
    float(sys.argv[1]) if len(sys.argv) > 1 else 0.4
)  # share of filters, the paper's main setting
epochs = 12  # enough for about 99 %
tune_epochs = 4  # a third of the training brings back what pruning cost
batch_size = 64
learning_rate = 0.05  # highest of the one-cycle schedule; fine-tuning uses a fifth
timed_batch = 64
timed_runs = 60  # of each model, taken in turns so that a busy machine slows both alike
# -----------------------------------------------------------------------------

console = Console()
torch.manual_seed(0)
torch.set_num_threads(1)  # the network is too small for more to pay

data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16  # (1797, 1, 8, 8) in 0…1
labels = torch.tensor(data.target)  # (1797,)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
test, train = order[:400], order[400:]
example = images[test[:8]]  # (8, 1, 8, 8): what the small model is verified on


def fit(model: nn.Module, epochs: int, learning_rate: float, title: str) -> None:
    """Plain SGD on randomly shifted images; the pruned model trains like any other."""
    steps = epochs * (len(train) // batch_size)
    optimizer = torch.optim.SGD(
        model.parameters(), learning_rate, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    model.train()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(title, total=steps)
        for step in range(steps):
            if step % (len(train) // batch_size) == 0:
                shuffled = train[torch.randperm(len(train))]
            here = shuffled[(step * batch_size) % (len(train) - batch_size) :][:batch_size]
            dx, dy = torch.randint(-1, 2, (2,)).tolist()
            x = torch.roll(images[here], (dx, dy), (2, 3))  # (64, 1, 8, 8)
            loss = F.cross_entropy(model(x), labels[here], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress.advance(task)
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    return float((model(images[test]).argmax(1) == labels[test]).float().mean())


@torch.no_grad()
def latency_ms(*models: nn.Module) -> list[float]:
    """Median milliseconds of each model, measured in turns."""
    x = images[:timed_batch]
    times: list[list[float]] = [[] for _ in models]
    for _ in range(timed_runs):
        for model, own in zip(models, times, strict=True):
            start = time.perf_counter()
            model(x)
            own.append(1000 * (time.perf_counter() - start))
    return [statistics.median(own) for own in times]


# Train.
started = time.perf_counter()
model = digits()
fit(model, epochs, learning_rate, "training")

# Decide, then act: the plan is a value, compact returns a new module, the model is untouched.
plan = fpgm.plan(model, example[:1], rate=rate)  # one image, so that costs are per image
small = fpgm.compact(model, plan)
certificate = fpgm.verify(model, plan, example, compacted=small).check()  # raises unless proved
console.print(str(plan), highlight=False)

# Bring the accuracy back.
tuned = copy.deepcopy(small)
fit(tuned, tune_epochs, learning_rate / 5, "fine-tuning")

# Report.
before_ms, after_ms = latency_ms(model, tuned)
table = Table(title=f"Digits, FPGM at rate {rate:g}")
for name in ("", "original", "pruned", "pruned + tuned"):
    table.add_column(name, justify="left" if not name else "right")
table.add_row("test accuracy", *(f"{accuracy(m):.2%}" for m in (model, small, tuned)))
table.add_row(
    "MACs per image", *(f"{n:,}" for n in (plan.macs_before, plan.macs_after, plan.macs_after))
)
table.add_row(
    "parameters", *(f"{n:,}" for n in (plan.params_before, plan.params_after, plan.params_after))
)
table.add_row(
    f"ms per {timed_batch} images",
    f"{before_ms:.2f}",
    "",
    f"{after_ms:.2f} ({before_ms / after_ms:.1f}×)",
)
console.print(table)
console.print(
    f"Certified: the pruned model is the original without the removed units, to "
    f"{certificate.max_error:.1e}; silencing those units moves the original by "
    f"{certificate.moved:.2g}. {time.perf_counter() - started:.0f} s in all.",
    highlight=False,
)
