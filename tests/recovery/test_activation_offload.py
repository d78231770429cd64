"""Activations of paused passes leave memory, and come back before they are used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.recoverable import Streams, batches, stir
from torch import Tensor, nn

import fpgm
from fpgm.recovery import activation_offload, api, staged_forward
from fpgm.recovery.activation_offload import ActivationOffload, LiveActivations
from fpgm.recovery.solvable_layers import SolvableLayer
from fpgm.recovery.staged_forward import StagedForward
from fpgm.utils.example_inputs import Example


@pytest.fixture(params=[0, 2**30], ids=["file", "memory"])
def store(request: pytest.FixtureRequest) -> Iterator[ActivationOffload]:
    with closing(ActivationOffload(request.param)) as store:
        yield store


def offloaded(store: ActivationOffload, values: Tensor) -> Tensor:
    activation = values.clone()
    store.offload([activation])
    return activation


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e9, 1e30])
def test_values_come_back_in_half_precision(store: ActivationOffload, scale: float) -> None:
    values = torch.randn(64, 512) * scale
    activation = offloaded(store, values)
    assert activation.untyped_storage().nbytes() == 0
    store.restore(activation)
    largest = float(values.abs().max())
    assert float((activation - values).abs().max()) <= largest * 2**-11
    again = activation.clone()
    store.offload([activation])
    store.restore(activation)
    assert torch.equal(activation, again)  # nothing more is lost the second time


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_restored_as_it_was(store: ActivationOffload, dtype: torch.dtype) -> None:
    values = torch.randn(64, 1024).to(dtype)
    activation = offloaded(store, values)
    assert activation.untyped_storage().nbytes() == 0
    store.restore(activation)
    assert torch.equal(activation, values)


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_what_half_precision_cannot_hold_stays(store: ActivationOffload, odd: float) -> None:
    values = torch.randn(64, 512)
    values[3, 3] = odd
    activation = offloaded(store, values)
    assert torch.equal(activation.nan_to_num(), values.nan_to_num())


def test_views_share_what_is_restored(store: ActivationOffload) -> None:
    values = torch.randn(64, 512)
    activation = values.clone()
    view = activation.t()
    store.offload([activation])
    store.restore(view)
    assert torch.equal(view, activation.t())
    assert torch.allclose(activation, values, atol=1e-2)


def test_unreferenced_values_take_no_memory(store: ActivationOffload) -> None:
    one = 64 * 512 * 2
    for _ in range(20):
        store.offload([torch.randn(64, 512)])
    assert store.bytes <= 2 * one
    assert store.file_bytes <= 3 * one


def test_only_what_a_pass_allocated_is_offloaded(store: ActivationOffload) -> None:
    weight = torch.randn(64, 512)
    live = LiveActivations(store)
    view, item = weight.t(), weight * 2
    bits = item.clone()
    live.add([view], [weight])
    live.add([item, bits], [weight])
    live.add([bits.view(torch.int32)], [bits])
    weight.mul_(1)
    live.add([weight], [weight])
    live.offload()
    assert weight.untyped_storage().nbytes()
    assert not item.untyped_storage().nbytes()
    live.restore(item)
    live.keep(item)
    live.offload()
    assert item.untyped_storage().nbytes()


def test_integers_in_memory_of_other_numbers_stay(store: ActivationOffload) -> None:
    live = LiveActivations(store)
    numbers = torch.randint(2**30, (64, 512), dtype=torch.int32)
    alias = numbers.view(torch.float32)
    live.add([numbers], [])
    live.add([alias], [numbers])
    live.offload()
    assert numbers.untyped_storage().nbytes()


def test_what_others_still_hold_is_restored_at_the_end(store: ActivationOffload) -> None:
    values = torch.randn(64, 512)
    activation = offloaded(store, values)
    store.close()
    assert torch.allclose(activation, values, atol=1e-2)


class ReadsBack(Streams):
    """Reads an early activation late, without an operator."""

    def forward(self, x: Tensor) -> Tensor:
        early = self.stem(x)
        alias = early.data
        out = super().forward(x)
        return out + float(early.numpy().mean()) + float(np.asarray(alias).max())


TABLE = torch.linspace(-1, 1, 16 * 3 * 36).reshape(16, 3, 6, 6)


class ReadsConstant(Streams):
    """Holds a view of a tensor that belongs to no module."""

    def forward(self, x: Tensor) -> Tensor:
        view = TABLE[: len(x)].permute(0, 1, 3, 2)
        return super().forward(x + view) + view.mean()


class SharesMemory(Streams):
    """Holds an activation's memory as an array, and a tensor on an array's memory."""

    def forward(self, x: Tensor) -> Tensor:
        early = self.stem(x)
        array = early.numpy()
        tensor = torch.from_numpy(2 * array).view(-1).mul_(1)
        out = super().forward(x)
        return out + float(array.mean()) + tensor.mean()


class HoldsSparse(Streams):
    """Holds an activation inside a sparse tensor."""

    def forward(self, x: Tensor) -> Tensor:
        values = self.stem(x).mean((1, 2)).flatten()
        places = torch.arange(len(values)).expand(2, -1)
        matrix = torch.sparse_coo_tensor(places, values, (len(values), len(values)))
        out = super().forward(x)
        return out + torch.sparse.mm(matrix, torch.ones(len(values), 1)).mean()


KINDS = [Streams, ReadsBack, ReadsConstant, SharesMemory, HoldsSparse]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("residual", ["coupled", "independent"])
@pytest.mark.parametrize("memory", [0, 2**24], ids=["file", "memory"])
def test_recovery_is_the_same_with_little_memory(
    monkeypatch: pytest.MonkeyPatch, kind: type[Streams], residual: Any, memory: int
) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 64)
    model = stir(kind()).eval()
    plan = fpgm.plan(model, torch.zeros(1, 3, 6, 6), rate=0.5, align=1, residual=residual)
    data = batches(3, 6, 6)
    expected = fpgm.recover(model, plan, data)
    monkeypatch.setattr(api, "device_memory", lambda _: memory)
    monkeypatch.setattr(api, "PASS_MEMORY_FACTOR", 2**30)
    small = fpgm.recover(model, plan, data)
    x = torch.randn(16, 3, 6, 6)
    with torch.no_grad():
        assert torch.allclose(small(x), expected(x), rtol=0.02, atol=0.02)


def test_features_that_hooks_collect_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 64)
    monkeypatch.setattr(api, "device_memory", lambda _: 0)
    model = stir(Streams()).eval()
    plan = fpgm.plan(model, torch.zeros(1, 3, 6, 6), rate=0.5, align=1)
    features: list[Tensor] = []
    model.two.register_forward_hook(lambda module, args, out: features.append(out))
    fpgm.recover(model, plan, batches(3, 6, 6))
    assert features
    assert all(feature.untyped_storage().nbytes() for feature in features)


def test_closing_waits_for_code_that_cleans_up() -> None:
    """An interruption leaves a thread between two layers; nothing is dropped until it ended."""
    began, go_on = threading.Event(), threading.Event()
    ended: list[bool] = []

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            began.set()
            try:
                go_on.wait(60)
                return x
            finally:
                ended.append(True)

    model = nn.Sequential(nn.Conv2d(3, 4, 1), Slow(), nn.Conv2d(4, 2, 1)).eval()
    example = Example((torch.zeros(1, 3, 2, 2),), {})
    layers = [SolvableLayer("0"), SolvableLayer("2")]
    staged = StagedForward(model, layers, example, ActivationOffload(0))
    staged.advance_to(0)
    staged._go_on.release()  # as `advance_to` does before it is interrupted
    assert began.wait(60)
    threading.Timer(0.2, go_on.set).start()
    staged.close()
    assert ended
    assert not staged._thread.is_alive()


SCALE = ContextVar("SCALE", default=0.0)


class Scaled(nn.Module):
    """Reads what its caller has set."""

    def forward(self, x: Tensor) -> Tensor:
        return x * SCALE.get()


def test_passes_see_the_caller_s_context_variables() -> None:
    token = SCALE.set(1.0)
    try:
        layers = [nn.Conv2d(3, 8, 1), Scaled(), nn.ReLU(), nn.Conv2d(8, 4, 1)]
        model, data = nn.Sequential(*layers).eval(), batches(3, 6, 6)
        plan = fpgm.plan(model, data[0], rate=0.5, align=1)
        recovery = fpgm.recover(model, plan, data).fpgm_recovery
    finally:
        SCALE.reset(token)
    assert recovery.layers[1].after > 0


class Counted(nn.Module):
    """Counts its calls, also those of copies."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return x


CALLS = 2 + 4 * (2 + 3)
"""To find the layers of both models; for each of four batches one of each to solve, and one of the
original and of each of two candidates to compare them."""


@pytest.mark.parametrize("depth", [3, 12])
def test_passes_do_not_grow_with_depth(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """However deep the network and however short memory, a batch runs through it once."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(depth)]
    model = nn.Sequential(Counted(), nn.Conv2d(3, 8, 1), *layers, nn.Conv2d(8, 4, 1)).eval()
    plan = fpgm.plan(model, torch.zeros(1, 3, 6, 6), rate=0.5, align=1)
    monkeypatch.setattr(api, "device_memory", lambda _: 0)
    monkeypatch.setattr(Counted, "calls", 0)
    fpgm.recover(model, plan, [torch.randn(8, 3, 6, 6) for _ in range(4)])
    assert Counted.calls == CALLS


def test_few_threads_wait_however_many_batches_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = stir(Streams()).eval(), batches(3, 6, 6)
    plan = fpgm.plan(model, data[0], rate=0.5, align=1)
    expected = fpgm.recover(model, plan, data).fpgm_recovery
    monkeypatch.setattr(staged_forward, "MAX_PAUSED_BATCHES", 2)
    before, threads = threading.active_count(), []
    few = fpgm.recover(
        model, plan, data, progress=lambda *_: threads.append(threading.active_count())
    )
    assert max(threads) <= before + 4
    for one, other in zip(few.fpgm_recovery.layers, expected.layers, strict=True):
        assert one.after == pytest.approx(other.after, rel=1e-4, abs=1e-9)
