"""Cost of pruning while training: a pruning step against an epoch of ResNet-56 on CIFAR-10.

    python benchmarks/soft_cost.py

The epoch is 391 times the median training step at batch 128 on random images, measured in the same
run; a real epoch also loads data, so the fraction is an upper bound. The overhead of hard mode per
training step is timed inside the pruner's hooks: a difference of two steps would be mostly noise.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import fpgm
from fpgm.models import resnet

HERE = Path(__file__).resolve().parent
BATCH, BATCHES = 128, 391
STEPS = 8
"""Training steps measured."""


def seconds(action: Callable[[], Any], times: int) -> float:
    """Measure the median wall time."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


class Clock:
    """Adds up the time spent inside the functions it wraps."""

    def __init__(self) -> None:
        self.spent = 0.0

    def timed(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> None:
            start = time.perf_counter()
            act(*args)
            self.spent += time.perf_counter() - start

        return wrapped


@contextmanager
def timed_hooks(clock: Clock) -> Iterator[None]:
    """Time hooks that are registered in this block whenever they run."""
    gradient = Tensor.register_post_accumulate_grad_hook
    pre = torch.optim.Optimizer.register_step_pre_hook
    post = torch.optim.Optimizer.register_step_post_hook

    def on_gradient(parameter: Tensor, hook: Callable[..., Any]) -> Any:
        return gradient(parameter, clock.timed(hook))

    def before_step(optimizer: torch.optim.Optimizer, hook: Callable[..., Any]) -> Any:
        return pre(optimizer, clock.timed(hook))

    def after_step(optimizer: torch.optim.Optimizer, hook: Callable[..., Any]) -> Any:
        return post(optimizer, clock.timed(hook))

    with (
        patch.object(Tensor, "register_post_accumulate_grad_hook", on_gradient),
        patch.object(torch.optim.Optimizer, "register_step_pre_hook", before_step),
        patch.object(torch.optim.Optimizer, "register_step_post_hook", after_step),
    ):
        yield


def measure(threads: int) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    net = resnet(56)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))

    def train() -> None:
        net.train()
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    train()
    plain = seconds(train, STEPS)
    rows = []
    for mode in ("soft", "hard"):
        options: dict[str, Any] = {"rate": 0.4, "residual": "independent", "mode": mode}
        start = time.perf_counter()
        pruner = fpgm.SoftPruner(net, x[:1], **options, optimizer=optimizer)
        once = time.perf_counter() - start
        clock = Clock()
        with timed_hooks(clock):
            step = seconds(pruner.step, 5)
        for _ in range(STEPS):
            train()
        held = clock.spent / STEPS
        ratio = (step + held * BATCHES) / (plain * BATCHES)
        rows.append(
            {
                "mode": mode,
                "watching_once": once,
                "pruner_step": step,
                "more_per_training_step": held,
                "training_step": plain,
                "share_of_an_epoch": ratio,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    rows = measure(options.threads)
    command = shlex.join(["python", "benchmarks/soft_cost.py", *sys.argv[1:]])
    (HERE / "soft_cost.json").write_text(json.dumps({"command": command, "rows": rows}, indent=1))
    lines = ["# Cost of pruning while training", "", f"    {command}", ""]
    lines += [
        (
            f"CIFAR ResNet-56, batch {BATCH}, rate 0.4, `independent`, {options.threads} threads. "
            f"An epoch is {BATCHES} training steps; hard mode also corrects each of them."
        ),
        "",
        (
            "| mode | tracing, once | pruning step | training step | overhead per training step "
            "| fraction of an epoch |"
        ),
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['mode']} | {row['watching_once']:.2f} s | {row['pruner_step']:.2f} s "
            f"| {row['training_step']:.3f} s | {row['more_per_training_step'] * 1e3:.1f} ms "
            f"| {row['share_of_an_epoch']:.2%} |"
        )
    (HERE / "soft_cost.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
