"""Recovery: exact where that is possible, smaller errors elsewhere, and no side effects."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.helpers.recoverable import NETS, Streams, batches, chain, copy_unit, stir, unseen
from torch import Tensor

import fpgm
from fpgm.errors import RequestError
from fpgm.recovery.api import RECOVERY, recover


@pytest.mark.parametrize("norm", [False, True])
def test_a_duplicate_is_replaced_exactly(norm: bool) -> None:
    model = stir(chain(norm=norm))
    copy_unit(model, 2, 5)
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rates={"0": 0.125}, align=1)
    [removed] = {c.removed()[0] for c in plan.cuts if c.tensor == "0.weight"}
    assert removed in (2, 5)
    x = torch.randn(8, 3, 6, 6)
    assert (model(x) - fpgm.compact(model, plan)(x)).abs().max() > 1e-3
    small = recover(model, plan, batches(3, 6, 6))
    assert (model(x) - small(x)).abs().max() < 1e-5


@torch.no_grad()
def test_a_linear_combination_of_others_is_replaced_exactly() -> None:
    """Without an activation in between, the other filters can compute it."""
    model = stir(chain(norm=False, activation=False))
    for tensor in (model[0].weight, model[0].bias):
        tensor[3] = 0.5 * tensor[0] - 2 * tensor[6]
    order = [3, *(i for i in range(8) if i != 3)]

    def first(filters: Tensor) -> Tensor:
        return torch.tensor([float(order.index(i)) for i in range(len(filters))])

    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rates={"0": 0.125}, align=1, criterion=first)
    assert {c.removed()[0] for c in plan.cuts if c.tensor == "0.weight"} == {3}
    small = recover(model, plan, batches(3, 6, 6))
    x = torch.randn(8, 3, 6, 6)
    assert (model(x) - fpgm.compact(model, plan)(x)).abs().max() > 1e-3
    assert (model(x) - small(x)).abs().max() < 1e-5


@pytest.mark.parametrize("residual", ["coupled", "independent"])
@pytest.mark.parametrize("name", NETS)
def test_the_error_on_other_images_falls(name: str, residual: Any) -> None:
    torch.manual_seed(3)
    model = stir(NETS[name]())
    size = 6
    plan = fpgm.plan(model, torch.randn(1, 3, size, size), rate=0.3, align=1, residual=residual)
    small = recover(model, plan, batches(3, size, size, count=32))
    x = torch.randn(64, 3, size, size)
    with torch.no_grad():
        wanted = model(x)
        before = float((fpgm.compact(model, plan)(x) - wanted).square().mean())
        after = float((small(x) - wanted).square().mean())
    assert after < 0.7 * before
    recovery = getattr(small, RECOVERY)
    assert recovery.after < recovery.before
    assert all(solved.after <= solved.before * (1 + 1e-9) for solved in recovery.layers)


@pytest.mark.parametrize("residual", ["coupled", "independent"])
def test_from_weights_only(residual: Any) -> None:
    """A duplicate is replaced without any data."""
    model = stir(chain(norm=True))
    copy_unit(model, 2, 5)
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rates={"0": 0.125}, align=1, residual=residual)
    small = recover(model, plan, [torch.randn(2, 3, 6, 6)], method="weights")
    before, after = unseen(model, small, plan, torch.randn(64, 3, 6, 6))
    assert after < 0.05 * before


def test_batch_norm_reestimation_only() -> None:
    torch.manual_seed(0)
    model, data = stir(Streams()), batches(3, 6, 6)
    for x in 5 * data:  # statistics of the data, as training leaves them
        model.train()(x)
    plan = fpgm.plan(model.eval(), data[0], rate=0.3, align=1)
    reestimated = recover(model, plan, data, method="norms")
    recovery = getattr(reestimated, RECOVERY)
    assert recovery.method == "norms"
    assert recovery.after < recovery.before


def test_seconds_of_distillation_help() -> None:
    torch.manual_seed(0)
    model = stir(Streams())
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.5, align=1)
    data = batches(3, 6, 6)
    solved = recover(model, plan, data)
    trained = recover(model, plan, data, distil=2)
    assert getattr(trained, RECOVERY).steps > 0
    x = torch.randn(256, 3, 6, 6)
    assert unseen(model, trained, plan, x)[1] < unseen(model, solved, plan, x)[1]
    assert all(p.grad is None for p in trained.parameters())


# Side effects.


def test_the_model_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stir(Streams()).train()
    before = copy.deepcopy(model.state_dict())
    hooks = sum(len(m._forward_hooks) for m in model.modules())
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1)
    small = recover(model, plan, batches(3, 6, 6))
    assert model.training
    assert small.training
    assert sum(len(m._forward_hooks) for m in model.modules()) == hooks
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad for p in small.parameters())


def test_an_interruption_leaves_nothing_behind() -> None:
    model = stir(Streams()).train()
    before = copy.deepcopy(model.state_dict())
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1)

    def stop(layer: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recover(model, plan, batches(3, 6, 6), progress=stop)
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_kinds_of_loaders() -> None:
    model = stir(Streams())
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1)
    data = batches(3, 6, 6)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for x in data:
            yield x, torch.zeros(len(x))

    loaders: list[Any] = [data, pairs(), [[x, 1] for x in data], [{"x": x} for x in data]]
    results = [recover(model, plan, loader) for loader in loaders]
    x = torch.randn(4, 3, 6, 6)
    for small in results[1:]:
        torch.testing.assert_close(small(x), results[0](x))
    few = recover(model, plan, data, images=32)
    assert getattr(few, RECOVERY).inputs == 32


WANTED = "without a tensor of inputs: give batches of inputs, or pairs of inputs and labels"


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "The loader is empty: recovery needs some batches of inputs."),
        (["a"], f"The loader gives str {WANTED}."),
        ([()], f"The loader gives tuple {WANTED}."),
        (
            torch.zeros(8, 3, 6, 6),
            "The loader is a tensor: give batches of inputs, such as x.split(100).",
        ),
        (5, "The loader is a int: give batches of inputs, as a list or a DataLoader."),
    ],
)
def test_unusable_loaders(loader: Any, message: str) -> None:
    model = stir(chain(norm=False))
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1)
    with pytest.raises(RequestError) as caught:
        recover(model, plan, loader)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("batch", "shape", "why"),
    [
        (torch.zeros(8, 1, 6, 6), "8×1×6×6 float32", "Given groups=1"),
        (torch.zeros(8, 3, 6, 6, dtype=torch.uint8), "8×3×6×6 uint8", "expected scalar type"),
    ],
)
@pytest.mark.parametrize("method", ["solve", "norms", "weights"])
def test_a_batch_that_the_model_cannot_take(
    batch: Tensor, shape: str, why: str, method: Any
) -> None:
    model = stir(chain(norm=True))
    x = torch.randn(8, 3, 6, 6)
    plan = fpgm.plan(model, x[:1], rate=0.3, align=1)
    start = f"The model's own forward fails on a batch of the loader ({shape}): {why}"
    loader = [batch] if method == "weights" else [x, batch]  # of which that reads one batch
    for call in (
        lambda: recover(model, plan, loader, method=method),
        lambda: fpgm.sensitivity(model, x, [batch]),
    ):
        with pytest.raises(fpgm.ModelError) as caught:
            call()
        assert str(caught.value).startswith(start)


def test_other_errors_are_not_attributed_to_the_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("fpgm.recovery.api._solve_", fail)
    model, x = stir(chain(norm=True)), torch.randn(8, 3, 6, 6)
    with pytest.raises(RuntimeError, match=r"^a fault of ours$"):
        recover(model, fpgm.plan(model, x, rate=0.3, align=1), [x])
