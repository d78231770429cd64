"""Two ranks recover and measure as one: the same weights, errors and accuracies, to rounding."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.recoverable import Mixed, Streams, chain, stir
from torch import Tensor, nn

import fpgm
from fpgm.errors import FpgmError, RankError, RequestError
from fpgm.recovery import layer_solver
from fpgm.recovery.api import recover
from fpgm.recovery.bn_reestimation import reestimate_batch_norms_
from fpgm.utils.calibration_data import read_inputs
from fpgm.utils.distributed import current_ranks, work_alone

Batches = list[Any]


def numbered_batches(count: int, size: int = 12) -> Batches:
    """Return batches with labels, the same in every process."""
    generator = torch.Generator().manual_seed(count)
    return [
        (
            torch.randn(size, 3, 6, 6, generator=generator),
            torch.randint(6, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def recovered(net: Callable[[], nn.Module], data: Batches, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = stir(net())
    for x, _ in 5 * data:  # statistics of the data, as training leaves them
        model.train()(x)
    plan = fpgm.plan(model.eval(), data[0][0], rate=0.4, align=1)
    small = recover(model, plan, data, **options)
    assert torch.isfinite(small(data[0][0])).all()
    recovery = small.fpgm_recovery
    assert recovery.kept != "pruned" or recovery.method == "weights"
    errors = [e for layer in recovery.layers for e in (layer.before, layer.after)]
    errors += [recovery.before, recovery.after]
    inputs = [recovery.inputs, recovery.judges]
    named = {f"error {n}": torch.tensor(e) for n, e in enumerate(errors)}
    return {**small.state_dict(), **named, "inputs": torch.tensor(inputs)}


def wide_layers(data: Batches) -> dict[str, Tensor]:
    """Recover with all layers as if they were too wide for normal equations."""
    before = layer_solver.MAX_FAN_IN
    layer_solver.MAX_FAN_IN = 10
    try:
        return recovered(lambda: chain(norm=True), data)
    finally:
        layer_solver.MAX_FAN_IN = before


def measured(data: Batches) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = stir(Streams())
    result = fpgm.sensitivity(model, data[0][0], data, align=1, rates=(0.5,))
    curves = {f"{g.name} {n}": torch.tensor(g.harm) for n, g in enumerate(result.groups)}
    accuracies = [result.accuracy, *(a for g in result.groups for a in g.accuracy.values())]
    return {**curves, "accuracies": torch.tensor(accuracies), "data": torch.tensor(
        [int(result.data, 16) % 2**31]
    )}  # fmt: skip


class Sometimes(nn.Module):
    """A network with a batch norm that runs twice, and one that few batches reach."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.rare = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x) * 3)
        return self.rare(x + 1) if float(x.flatten()[0]) > 0 else x


def reestimated(data: Batches) -> dict[str, Tensor]:
    net = Sometimes()
    reestimate_batch_norms_(net, read_inputs(data, 1000, current_ranks()))
    return net.state_dict()


CASES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "norms": lambda: recovered(lambda: chain(norm=True), numbered_batches(4)),
    "streams": lambda: recovered(Streams, numbered_batches(3), images=24),
    "uneven": lambda: recovered(Streams, numbered_batches(3), images=36),
    "one batch": lambda: recovered(lambda: chain(norm=True), numbered_batches(1)),
    "mixed": lambda: recovered(Mixed, numbered_batches(5), images=36),
    "wide": lambda: wide_layers(numbered_batches(3)),
    "batch norms": lambda: recovered(Streams, numbered_batches(3), images=36, method="norms"),
    "weights": lambda: recovered(Streams, numbered_batches(3), method="weights"),
    "reestimated": lambda: reestimated(numbered_batches(5)),
    "sensitivity": lambda: measured(numbered_batches(5)),
    "sensitivity of one batch": lambda: measured(numbered_batches(1)),
}


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (FpgmError, OSError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing failed"


def failures() -> dict[str, str]:
    """Let rank 1 fail in different places, and return the messages of this rank."""
    ranks, data = current_ranks(), numbered_batches(4)
    torch.manual_seed(0)
    model = stir(chain(norm=True))
    plan = fpgm.plan(model, data[0][0], rate=0.4, align=1)
    torch.manual_seed(ranks.rank)
    other = stir(chain(norm=True))

    def bad_loader() -> Any:
        yield data[0]
        if not ranks.is_first:
            raise OSError("the disk is gone")
        yield from data[1:]

    def stop(title: str, done: int, total: int) -> None:
        if done == 1 and not ranks.is_first:
            raise KeyboardInterrupt

    calls: dict[str, Callable[[], Any]] = {
        "loader": lambda: recover(model, plan, bad_loader()),
        "layer": lambda: recover(model, plan, data, progress=stop),
        "order": lambda: recover(model, plan, data if ranks.is_first else data[::-1]),
        "model": lambda: recover(other, plan, data),
        "sensitivity": lambda: fpgm.sensitivity(model, data[0][0], bad_loader()),
    }
    messages = {name: message_of(call) for name, call in calls.items()}
    with work_alone():  # rank 0 alone can recover too
        if ranks.is_first:
            recover(model, plan, data)
    return messages


def distilled(data: Batches) -> list[dict[str, Tensor]]:
    """Distil for a second; return the weights of all ranks."""
    weights = recovered(Streams, data, distil=1.0)
    return current_ranks().gather(weights)


def worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    results: dict[str, Any] = {name: case() for name, case in CASES.items()}
    results["distilled"] = distilled(numbered_batches(4))
    file = Path(folder) / "solved.safetensors"
    results["cached"] = recovered(Streams, numbered_batches(3), images=24, cache=file)
    began = time.monotonic()
    results["failures"] = failures()
    results["seconds"] = time.monotonic() - began
    torch.save(results, Path(folder) / f"rank{rank}")
    dist.barrier()
    os._exit(0)  # gloo's threads outlive their group, and may abort what Python still takes down


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run all cases in two processes, which take seconds to start."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, str(folder)), nprocs=2)
    return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_what_one_gives(name: str, by_rank: list[dict[str, Any]]) -> None:
    alone = CASES[name]()
    first, second = (results[name] for results in by_rank)
    assert list(first) == list(second) == list(alone)
    for key, expected in alone.items():
        assert torch.equal(first[key], second[key]), key
        scale = float(expected.double().abs().max().clamp(min=1e-6))
        gap = float((first[key].double() - expected.double()).abs().max())
        assert gap <= 1e-6 * scale, (key, gap / scale)


def test_a_cache_file_is_written_once(by_rank: list[dict[str, Any]]) -> None:
    assert all(
        torch.equal(results["cached"][key], value)
        for results in by_rank
        for key, value in by_rank[0]["streams"].items()
    )


def test_ranks_distil_to_the_same_weights(by_rank: list[dict[str, Any]]) -> None:
    first, second = by_rank[0]["distilled"]
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_an_error_on_one_rank_ends_both(by_rank: list[dict[str, Any]]) -> None:
    first, second = (results["failures"] for results in by_rank)
    assert second["loader"] == "OSError: the disk is gone"
    assert first["loader"] == "RankError: Rank 1 failed: the disk is gone."
    assert second["layer"] == "KeyboardInterrupt: "
    assert first["layer"].startswith("RankError: Rank 1 failed: KeyboardInterrupt")
    assert first["order"] == second["order"]
    assert first["order"].startswith("RequestError: The inputs of rank 1 differ from those of")
    assert first["model"].startswith("RequestError: The weights of rank 1 differ from those of")
    assert first["sensitivity"] == "RankError: Rank 1 failed: the disk is gone."
    assert all(results["seconds"] < 20 for results in by_rank)


def test_one_process_divides_nothing() -> None:
    ranks = current_ranks()
    assert (ranks.rank, ranks.size, ranks.gather(3)) == (0, 1, [3])
    ranks.check_same({"weights": "1"})
    with pytest.raises(RequestError), ranks.fail_together():
        raise RequestError("as it is")
    assert issubclass(RankError, FpgmError)
