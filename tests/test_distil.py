"""A short training towards the original: what it learns from, what it is judged by, how fast."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from tests.recoverable import Streams, batches, stir
from torch import Tensor, nn

import fpgm
from fpgm import recovery
from fpgm.recovery import distil
from fpgm.recovery.batches import Inputs, read_inputs, read_unseen


def firsts(inputs: Inputs) -> list[float]:
    """A number by which each batch is known."""
    return [float(inputs[n].args[0].flatten()[0]) for n in range(len(inputs))]


def numbered(count: int) -> list[Tensor]:
    return [torch.full((4, 3, 6, 6), float(n)) for n in range(count)]


class TestUnseen:
    def test_it_comes_after_what_was_read(self) -> None:
        loader = numbered(6)
        seen = read_inputs(loader, 8)
        assert firsts(seen) == [0, 1]
        assert firsts(read_unseen(nn.Linear(1, 1), loader, len(seen), 8)) == [2, 3]

    def test_there_may_be_none(self) -> None:
        loader = numbered(2)
        assert len(read_unseen(nn.Linear(1, 1), loader, 2, 8)) == 0
        assert len(read_unseen(nn.Linear(1, 1), iter(loader), 1, 8)) == 0

    def test_training_passes_it_over(self) -> None:
        loader = numbered(5)
        seen = read_inputs(loader, 8)
        given = islice(distil._endless(nn.Linear(1, 1), loader, seen, spared=2), 6)
        assert [float(e.args[0].flatten()[0]) for e in given] == [0, 1, 4, 0, 1, 4]

    def test_what_can_be_read_once_is_what_was_read(self) -> None:
        loader = iter(numbered(5))
        seen = read_inputs(loader, 8)
        given = islice(distil._endless(nn.Linear(1, 1), loader, seen, spared=0), 4)
        assert [float(e.args[0].flatten()[0]) for e in given] == [0, 1, 0, 1]


class TestJudgement:
    """Weights fit the inputs they were solved with: those cannot tell what else helps."""

    def judged(self, monkeypatch: pytest.MonkeyPatch, loader: Any) -> list[float]:
        found: list[float] = []
        compare = recovery._output_errors

        def spy(model: nn.Module, nets: Any, inputs: Inputs) -> Any:
            found.extend(firsts(inputs))
            return compare(model, nets, inputs)

        monkeypatch.setattr(recovery, "_output_errors", spy)
        model = stir(Streams()).eval()
        plan = fpgm.plan(model, torch.zeros(1, 3, 6, 6), rate=0.5, align=1)
        fpgm.recover(model, plan, loader, images=8, distil=0.05)
        return found

    def test_by_other_inputs_where_there_are_any(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.judged(monkeypatch, numbered(4)) == [2, 3]

    def test_by_the_same_where_there_are_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.judged(monkeypatch, numbered(2)) == [0, 1]

    def test_what_raises_the_error_elsewhere_is_taken_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def ruin(small: nn.Module, *_: Any, **__: Any) -> int:
            for p in small.parameters():
                p.data += 1
            return 7

        monkeypatch.setattr(recovery, "distil_", ruin)
        model = stir(Streams()).eval()
        plan = fpgm.plan(model, torch.zeros(1, 3, 6, 6), rate=0.5, align=1)
        small = fpgm.recover(model, plan, batches(3, 6, 6), images=64, distil=1)
        assert any("taken back" in note for note in small.fpgm_recovery.notes)


@pytest.mark.parametrize(("enough", "reached"), [(1, 1.0), (10**8, 0.05)])
def test_few_steps_are_small_ones(
    enough: int, reached: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW, *args: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    monkeypatch.setattr(distil, "ENOUGH_STEPS", enough)
    model = stir(Streams()).eval()
    data = batches(3, 6, 6)
    plan = fpgm.plan(model, data[0][:1], rate=0.5, align=1)
    fpgm.recover(model, plan, data, distil=0.5)
    assert 0 < max(rates) <= reached * distil.RATE
    assert enough > 1 or max(rates) > 0.5 * distil.RATE


def test_outputs_that_are_not_finite_count_for_nothing() -> None:
    wanted = torch.tensor([1.0, float("inf"), 3.0])
    given = torch.tensor([1.5, 7.0, 3.0], requires_grad=True)
    loss = distil._distance([given], [wanted])
    assert float(loss.detach()) == pytest.approx(0.125 / 5)
    (gradient,) = torch.autograd.grad(loss, given)
    assert gradient.tolist() == pytest.approx([0.1, 0.0, 0.0])
