"""Pruning again and again in one process keeps nothing: no model, no hook, no memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import fpgm
from fpgm.models import digits

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
PRUNINGS = 30
WARM = 10
ALLOWED = 8 * 2**20
"""Bytes: the allocator's own unrest. Models that stayed would be 3 MB, ten times."""


def resident() -> int:
    """Bytes of this process that are in memory."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        pytest.skip("this system has no /proc that tells how large a process is")
    output = next(line for line in lines if line.startswith("VmRSS:"))
    return 1024 * int(output.split()[1])


def once(folder: Path, number: int) -> list[weakref.ref[nn.Module]]:
    """Plan, compact, verify, recover, mask, save and load; the models are known by weak links."""
    net = digits().eval()
    policy = "independent" if number % 2 else "coupled"
    plan = fpgm.plan(net, X, rate=0.4, residual=policy)
    small = fpgm.compact(net, plan)
    fpgm.verify(net, plan, X, compacted=small).check()
    solved = fpgm.recover(net, plan, [X], method="norms")
    fpgm.save(small, folder / "small.safetensors")
    again = fpgm.load(folder / "small.safetensors", digits)
    pruner = fpgm.SoftPruner(net, X, rate=0.4)
    pruner.step()
    fpgm.mask_(net, plan)
    return [weakref.ref(item) for item in (net, small, solved, again)]


@pytest.fixture
def _only_new() -> Iterator[None]:
    """What was there before need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_only_new")
def test_repeated_pruning_does_not_leak_memory(tmp_path: Path) -> None:
    counts, sizes = [], []
    for number in range(PRUNINGS):
        links = once(tmp_path, number)
        gc.collect()
        assert [link() for link in links] == [None] * 4
        counts.append(len(gc.get_objects()))
        sizes.append(resident())
    half = (PRUNINGS - WARM) // 2
    assert max(counts[-half:]) <= max(counts[WARM : WARM + half]) + 50
    assert max(sizes[-half:]) <= max(sizes[WARM : WARM + half]) + ALLOWED


def test_a_failed_pruning_keeps_nothing_either() -> None:
    """An error holds its traceback, and that the models; once it is gone they are."""
    links = []
    for _ in range(3):
        net = digits()
        links.append(weakref.ref(net))
        with pytest.raises(fpgm.ModelError):
            fpgm.plan(net, torch.zeros(1, 4, 8, 8), rate=0.4)
        with pytest.raises(fpgm.RequestError):
            fpgm.plan(net, X, macs=0.99999)
        del net
    gc.collect()
    assert [link() for link in links] == [None] * 3
