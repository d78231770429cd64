"""Measurements of the zoo: the same clocks and the same counts for every tool.

Nothing here depends on the tool that pruned a model; the tools are in `zoo_worker.py` and
`zoo_peer.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from zoo_cache import Record
from zoo_models import Subject


def repeats() -> Iterator[tuple[tuple[float, float], list[Record]]]:
    """Run up to three times if it is quick: the first run in a process also warms caches."""
    times: list[Record] = []
    while len(times) < 3 and sum(t["wall_seconds"] for t in times) < 2:
        yield clocks(), times


def clocks() -> tuple[float, float]:
    """Return CPU time, which other processes hardly change, and wall time."""
    return time.process_time(), time.perf_counter()


def since(start: tuple[float, float]) -> Record:
    now = clocks()
    return {"seconds": now[0] - start[0], "wall_seconds": now[1] - start[1]}


def best(times: Sequence[Record]) -> Record:
    return min(times, key=lambda t: t["seconds"])


def measure(subject: Subject, before: Any, after: Any) -> Record:
    """Check that the pruned model has the same output shapes; return its MACs and parameters."""
    shapes, macs = _shapes_and_macs(before, subject.inputs)
    new_shapes, new_macs = _shapes_and_macs(after, subject.inputs)
    result: Record = {
        "status": "ok",
        "macs": macs,
        "macs_removed": 1 - new_macs / macs,
        "params_removed": 1 - _parameters(after) / _parameters(before),
    }
    if shapes != new_shapes:
        result["status"] = "output shape changed"
    elif not result["params_removed"] > 0:
        result["status"] = "nothing removed"
    elif subject.run_inside is not None:
        subject.run_inside(after)
    return result


def _shapes_and_macs(model: Any, inputs: tuple[Any, ...]) -> tuple[list[Any], int]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model.requires_grad_(False)  # the counter's hooks expect gradients of parameters passed on
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        output = model(*inputs)
    return [tuple(t.shape) for t in tensors(output)], counter.get_total_flops() // 2


def tensors(output: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())
