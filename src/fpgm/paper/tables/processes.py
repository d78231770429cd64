"""Helpers for reproducing one row with several processes (`accelerate launch`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fpgm.data.base import ProcessShare
from fpgm.data.registry import DataSpec, open_splits
from fpgm.errors import FpgmError
from fpgm.utils.atomic_io import atomic_write_stream, file_sha256
from fpgm.utils.distributed import WAIT_TIMEOUT, is_main_process, work_alone, world_size

T = TypeVar("T")


def init_processes() -> torch.device:
    """Initialize the process group if there are several processes; return this one's device."""
    from fpgm.training.distributed import make_accelerator

    device: torch.device = make_accelerator("no").device
    return device


def destroy_processes() -> None:
    """Destroy the process group, if it was initialized."""
    if dist.is_available() and dist.is_initialized():
        from fpgm.training import destroy_process_group

        _wait_group.cache_clear()
        destroy_process_group()


def run_on_first(function: Callable[[], T]) -> T:
    """Call a function in the first process and broadcast its result, or its error, to all."""
    if world_size() == 1:
        return function()
    init_processes()
    sent: list[tuple[T | None, FpgmError | None] | None] = [None]
    if is_main_process():
        try:
            with work_alone():  # the other processes wait
                sent = [(function(), None)]
        except FpgmError as error:
            sent = [(None, error)]
    dist.broadcast_object_list(sent, group=_wait_group())
    assert sent[0] is not None
    value, failure = sent[0]
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]


@cache
def _wait_group() -> dist.ProcessGroup:
    """Create a gloo group of all processes, in which waiting keeps no GPU busy."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=WAIT_TIMEOUT)
    return group


def copy_to_all(file: Path) -> None:
    """Copy a file of the first process to the same path on machines that do not have it."""
    if world_size() == 1:
        return
    expected = run_on_first(partial(file_sha256, file))
    missing = not file.is_file() or file_sha256(file) != expected
    missing_anywhere: list[bool | None] = [None] * world_size()
    dist.all_gather_object(missing_anywhere, missing)
    if any(missing_anywhere):
        content = run_on_first(file.read_bytes)
        if missing:
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_stream(file, lambda handle: handle.write(content))


@torch.no_grad()
def top_k_accuracy(net: nn.Module, data: DataSpec, counts: Sequence[int] = (1,)) -> list[float]:
    """Measure top-k accuracy in percent over all processes.

    Args:
        net: the classifier, which is left in eval mode.
        data: the data set.
        counts: the values of k.

    A network that always predicts class 0 is right about a tenth of the time:

    >>> class Zero(nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.one_hot(torch.zeros(len(x), dtype=torch.int64), 10) * 1.0
    >>> one, ten = top_k_accuracy(Zero(), DataSpec("synthetic", 64), (1, 10))
    >>> 5 < one < 15, ten
    (True, 100.0)
    """
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    initialized = dist.is_available() and dist.is_initialized()
    share = ProcessShare(dist.get_rank(), dist.get_world_size()) if initialized else ProcessShare()
    correct = torch.zeros(len(counts) + 1, device=device)
    net.eval()
    for batch in open_splits(data, 0, share, device).test.epoch(0):
        if len(batch.labels):  # a process may have no image of the last batch
            out = net(batch.images)
            order = out.topk(min(max(counts), out.shape[1]), dim=1).indices
            hits = (order == batch.labels[:, None]).float()
            hits_per_k = [hits[:, :k].sum() for k in counts]
            correct += torch.stack([*hits_per_k, torch.tensor(float(len(hits)), device=device)])
    if initialized:
        dist.all_reduce(correct)
    *hits_per_k, total = correct.tolist()
    return [100 * world_size / max(total, 1) for world_size in hits_per_k]
