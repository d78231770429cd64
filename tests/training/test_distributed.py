"""Two processes prune as one: the same masks, and the result of one with the whole batch."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fpgm

X = torch.randn(2, 3, 8, 8, dtype=torch.float64)
MODES = ("soft", "hard")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 4),
    ).double()


def run(rank: int, processes: int, mode: Any) -> tuple[dict[str, Tensor], list[Any], str]:
    net = network()
    model = nn.parallel.DistributedDataParallel(net) if processes > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    # Ranks that decided alone would choose differently: the seed is part of the choice.
    pruner = fpgm.SoftPruner(
        model, X, rate=0.5, align=1, criterion="random", seed=rank, mode=mode, optimizer=optimizer
    )
    generator = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(3):
        for _ in range(4):
            x = torch.randn(8, 3, 8, 8, generator=generator, dtype=torch.float64)
            y = torch.randint(4, (8,), generator=generator)
            fraction = slice(rank * 8 // processes, (rank + 1) * 8 // processes)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[fraction]), y[fraction]).backward()
            optimizer.step()
        steps.append(pruner.step())
    assert pruner.plan is not None
    return net.state_dict(), steps, pruner.plan.to_json()


def worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for mode in MODES:
        weights, steps, plan = run(rank, 2, mode)
        torch.save((weights, [str(step) for step in steps], plan), Path(folder) / f"{mode}{rank}")
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads outlive their group, and may abort what Python still takes down


def test_two_processes_prune_as_one(tmp_path: Path) -> None:
    """Both modes in the same two processes, which take seconds to start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, str(tmp_path)), nprocs=2)
    for mode in MODES:
        check(mode, tmp_path)


def check(mode: str, folder: Path) -> None:
    first, second = (torch.load(folder / f"{mode}{rank}", weights_only=True) for rank in (0, 1))
    assert first[1:] == second[1:]
    alone, steps, plan = run(0, 1, mode)
    assert first[1] == [str(step) for step in steps]
    assert first[2] == plan
    for name, weight in alone.items():
        assert torch.equal(first[0][name], second[0][name])
        assert torch.allclose(first[0][name], weight, rtol=1e-9, atol=1e-12), name
