"""Several processes that make one row: what they agree on, and what they count together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fpgm.data.base import Share
from fpgm.data.registry import Wanted, open_sets
from fpgm.errors import FpgmError
from fpgm.utils.atomic_io import file_sha256, write_whole
from fpgm.utils.distributed import count, is_first

T = TypeVar("T")

PATIENCE = timedelta(days=1)
"""How long processes wait for what the first one does alone: choosing may take it hours."""


def join() -> torch.device:
    """Meet the other processes, if there are any; where this one computes."""
    from fpgm.training.distributed import make_accelerator

    device: torch.device = make_accelerator("no").device
    return device


def leave() -> None:
    """Take leave of them, if any were met."""
    if dist.is_available() and dist.is_initialized():
        from fpgm.training import part

        _patient.cache_clear()
        part()


def first(act: Callable[[], T]) -> T:
    """What the first process finds, told to all: others may not see its disk."""
    if count() == 1:
        return act()
    join()
    sent: list[tuple[T | None, FpgmError | None] | None] = [None]
    if is_first():
        try:
            sent = [(act(), None)]
        except FpgmError as error:
            sent = [(None, error)]
    dist.broadcast_object_list(sent, group=_patient())
    assert sent[0] is not None
    found, problem = sent[0]
    if problem is not None:
        raise problem
    return found  # type: ignore[return-value]


@cache
def _patient() -> dist.ProcessGroup:
    """All processes, for waiting: on the processor, where that keeps no GPU busy."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=PATIENCE)
    return group


def everywhere(file: Path) -> None:
    """See to it that every process has a file of the first one at this place: disks may differ."""
    if count() == 1:
        return
    wanted = first(partial(file_sha256, file))
    lacks = not file.is_file() or file_sha256(file) != wanted
    found: list[bool | None] = [None] * count()
    dist.all_gather_object(found, lacks)
    if any(found):
        content = first(file.read_bytes)
        if lacks:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, lambda handle: handle.write(content))


@torch.no_grad()
def tops(net: nn.Module, data: Wanted, counts: Sequence[int] = (1,)) -> list[float]:
    """In percent, how often the right class is among the first so many, over all processes.

    A net that answers 0 to everything is right about a tenth of the time:

    >>> class Zero(nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.one_hot(torch.zeros(len(x), dtype=torch.int64), 10) * 1.0
    >>> one, ten = tops(Zero(), Wanted("synthetic", 64), (1, 10))
    >>> 5 < one < 15, ten
    (True, 100.0)
    """
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    met = dist.is_available() and dist.is_initialized()
    share = Share(dist.get_rank(), dist.get_world_size()) if met else Share()
    right = torch.zeros(len(counts) + 1, device=device)
    net.eval()
    for batch in open_sets(data, 0, share, device).test.epoch(0):
        if len(batch.labels):  # a process may have no picture of the last batch
            out = net(batch.images)
            order = out.topk(min(max(counts), out.shape[1]), dim=1).indices
            hits = (order == batch.labels[:, None]).float()
            found = [hits[:, :count].sum() for count in counts]
            right += torch.stack([*found, torch.tensor(float(len(hits)), device=device)])
    if met:
        dist.all_reduce(right)
    *found, seen = right.tolist()
    return [100 * own / max(seen, 1) for own in found]
