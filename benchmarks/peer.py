"""Prune with Torch-Pruning's FPGM at the rate closest to a given fraction of MACs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

TRIALS = 7


def peer_pruned(
    model: nn.Module,
    x: Tensor,
    wanted: float,
    round_to: int | None = None,
    ignored: Callable[[str], bool] = lambda path: False,
) -> tuple[nn.Module, float]:
    """Return the result whose fraction of MACs removed is closest to the target, and that fraction.

    Linear layers stay, and those `ignored` by their paths.
    """
    import torch_pruning as tp

    complete = macs_of(model, x)
    results: list[tuple[float, nn.Module, float]] = []
    low, high = 0.0, 1.0
    for _ in range(TRIALS):
        rate = (low + high) / 2
        net = copy.deepcopy(model)
        tp.pruner.BasePruner(
            net, x,
            importance=tp.importance.FPGMImportance(p=2),
            pruning_ratio=rate,
            ignored_layers=[
                module
                for path, module in net.named_modules()
                if isinstance(module, nn.Linear) or ignored(path)
            ],
            round_to=round_to,
        ).step()  # fmt: skip
        removed = 1 - macs_of(net, x) / complete
        results.append((abs(removed - wanted), net, removed))
        low, high = (rate, high) if removed < wanted else (low, rate)
    _, net, removed = min(results, key=lambda trial: trial[0])
    return net, removed


def macs_of(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return int(counter.get_total_flops()) // 2
