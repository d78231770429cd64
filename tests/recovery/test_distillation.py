"""Distillation: training and validation inputs, steps, learning rate, and what is discarded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.recoverable import Streams, batches, stir
from torch import Tensor, nn

import fpgm
from fpgm.recovery import api as recovery
from fpgm.recovery import distillation as distil
from fpgm.utils import calibration_data as batches_module
from fpgm.utils.calibration_data import Inputs, read_held_out, read_inputs
from fpgm.utils.example_inputs import Example


def firsts(inputs: Inputs) -> list[float]:
    """Return the first value of each batch, which identifies it."""
    return [float(inputs[n].args[0].flatten()[0]) for n in range(len(inputs))]


def numbered(count: int) -> list[Tensor]:
    return [torch.full((4, 3, 6, 6), float(n)) for n in range(count)]


def batches_seen(loader: Any, inputs: Inputs, validation: Inputs, count: int) -> list[list[float]]:
    """Return the first batches of training, input by input."""
    examples = islice(distil.training_batches(nn.Linear(1, 1), loader, inputs, validation), count)
    return [[float(row.flatten()[0]) for row in example.args[0]] for example in examples]


class TestTrainingBatches:
    def test_validation_inputs_come_after_those_that_are_solved_with(self) -> None:
        inputs, validation = read_held_out(numbered(6), 8, 8)
        assert firsts(inputs) == [0, 1]
        assert firsts(validation) == [2, 4]

    def test_there_may_be_no_validation_inputs(self) -> None:
        inputs, validation = read_held_out(numbered(2), 8, 8)
        assert (len(inputs), len(validation)) == (2, 0)

    def test_one_reading_serves_both(self) -> None:
        """A loader with workers starts them all at every reading."""

        class Counted:
            started = 0

            def __iter__(self) -> Iterator[Tensor]:
                Counted.started += 1
                return iter(numbered(5))

        loader = Counted()
        inputs, validation = read_held_out(loader, 8, 8)
        assert Counted.started == 1
        batches_seen(loader, inputs, validation, 3)
        assert Counted.started == 2

    def test_training_leaves_validation_inputs_out(self) -> None:
        loader = numbered(5)
        inputs, validation = read_held_out(loader, 8, 8)
        assert batches_seen(loader, inputs, validation, 4) == [[0] * 4, [1] * 4, [3] * 4, [0] * 4]

    def test_also_if_the_loader_shuffles(self) -> None:
        rows = torch.arange(20.0).reshape(20, 1)
        data = torch.utils.data.TensorDataset(rows)
        loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
        inputs, validation = read_held_out(loader, 8, 4)
        held = set(validation[0].args[0].flatten().tolist())
        recorded = batches_seen(loader, inputs, validation, 40)
        assert {value for batch in recorded for value in batch} == set(range(20)) - held

    def test_every_argument_of_a_batch_loses_the_same_inputs(self) -> None:
        batch = {"x": torch.arange(4.0), "scale": torch.tensor([3.0]), "y": torch.arange(4)}
        validation = read_inputs([{"x": torch.tensor([1.0, 2.0])}], 2)
        (left,) = islice(distil.training_batches(nn.Linear(1, 1), [batch], Inputs(), validation), 1)
        assert {name: t.tolist() for name, t in left.kwargs.items()} == {
            "x": [0, 3], "scale": [3], "y": [0, 3],
        }  # fmt: skip

    def test_a_loader_that_can_be_read_once_is_replaced_by_what_was_read(self) -> None:
        loader = iter(numbered(5))
        inputs, validation = read_held_out(loader, 8, 4)
        assert batches_seen(loader, inputs, validation, 3) == [[0] * 4, [1] * 4, [0] * 4]

    def test_if_all_inputs_are_held_out_training_uses_those_that_were_solved_with(self) -> None:
        loader = numbered(1) * 2
        inputs, validation = read_held_out(loader, 4, 4)
        assert batches_seen(loader, inputs, validation, 2) == [[0] * 4, [0] * 4]


class TestValidation:
    """Solved weights fit their own inputs: only others show whether distillation helps."""

    def validation_batches(self, monkeypatch: pytest.MonkeyPatch, loader: Any) -> Any:
        recorded: list[list[float]] = []
        compare = recovery.compare_candidates

        def spy(model: nn.Module, nets: Any, inputs: Inputs) -> Any:
            recorded.append(firsts(inputs))
            return compare(model, nets, inputs)

        monkeypatch.setattr(recovery, "compare_candidates", spy)
        model = stir(Streams()).eval()
        plan = fpgm.plan(model, torch.zeros(1, 3, 6, 6), rate=0.5, align=1)
        fpgm.recover(model, plan, loader, images=8, distil=0.05)
        return recorded

    def test_on_other_inputs_if_there_are_any(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.validation_batches(monkeypatch, numbered(5)) == [[2, 4]] * 2

    def test_on_the_same_inputs_otherwise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.validation_batches(monkeypatch, numbered(2)) == [[0, 1]] * 2

    def test_what_raises_the_validation_error_is_discarded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A change that only affects inputs that were not solved with."""

        def ruin(small: nn.Module, *_: Any, **__: Any) -> distil.DistillationResult:
            last = small.get_submodule("head")
            last.register_forward_hook(lambda m, x, y: y + 100 * (y.abs() > 50))
            return distil.DistillationResult(steps=700)

        class Loud(Streams):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) + x.mean((1, 2, 3)).reshape(-1, 1)

        monkeypatch.setattr(recovery, "distil_", ruin)
        model = stir(Loud()).eval()
        loader = [*batches(3, 6, 6, count=2), *(x + 1e4 for x in batches(3, 6, 6, count=4))]
        plan = fpgm.plan(model, torch.zeros(1, 3, 6, 6), rate=0.5, align=1)
        small = fpgm.recover(model, plan, loader, images=32, distil=1)
        recovery_done = small.fpgm_recovery
        assert recovery_done.notes == (
            "700 steps of distillation in 1 s; it did not help and was discarded.",
        )
        assert (recovery_done.steps, recovery_done.judges) == (0, 32)
        assert not small.get_submodule("head")._forward_hooks

    def test_what_cannot_be_compared_is_discarded(self) -> None:
        class Chosen(Streams):
            """Returns as many numbers as are large enough."""

            def forward(self, x: Tensor) -> Tensor:
                y = super().forward(x)
                return y[y > 0.1]

        model = stir(Chosen()).eval()
        data = batches(3, 6, 6)
        plan = fpgm.plan(model, data[0][:1], rate=0.5, align=1)
        small = fpgm.recover(model, plan, data, images=32, distil=0.3)
        assert small.fpgm_recovery.steps == 0
        assert small.fpgm_recovery.notes[0].endswith("were not compared.")
        assert "discarded" in small.fpgm_recovery.notes[1]
        plain = fpgm.recover(model, plan, data, images=32)
        assert torch.equal(plain.head.weight, small.head.weight)


@pytest.fixture
def setting() -> tuple[nn.Module, fpgm.Plan, list[Tensor]]:
    model = stir(Streams()).eval()
    data = batches(3, 6, 6)
    return model, fpgm.plan(model, data[0][:1], rate=0.5, align=1), data


Setting = tuple[nn.Module, fpgm.Plan, list[Tensor]]


class TestSteps:
    def test_one_image_that_is_not_finite_is_skipped(self, setting: Setting) -> None:
        model, plan, data = setting
        data[-1][3, 1, 2, 2] = float("nan")
        small = fpgm.recover(model, plan, data, images=32, distil=1)
        (note,) = small.fpgm_recovery.notes
        assert "more skipped because of gradients that are not finite" in note
        assert small.fpgm_recovery.steps > 0
        assert all(p.isfinite().all() for p in small.parameters())

    @pytest.mark.parametrize("bfloat16", [False, True])
    def test_it_learns_with_and_without_bfloat16(
        self, setting: Setting, monkeypatch: pytest.MonkeyPatch, bfloat16: bool
    ) -> None:
        """Whatever this processor has: products in bfloat16 must follow the weights' changes."""
        monkeypatch.setattr(distil, "has_fast_bfloat16", lambda _: bfloat16)
        model, plan, data = setting
        small = fpgm.recover(model, plan, data, images=64, distil=2)
        errors = {c.name: c.error for c in small.fpgm_recovery.candidates}
        assert errors["distilled"] < errors["least squares"]

    def test_frozen_weights_learn_and_stay_frozen(self, setting: Setting) -> None:
        model, plan, data = setting
        model.requires_grad_(False)
        small = fpgm.recover(model, plan, data, images=32, distil=1)
        assert small.fpgm_recovery.steps > 0
        assert not any(p.requires_grad for p in small.parameters())

    def test_half_precision_is_not_trained(self, setting: Setting) -> None:
        model, plan, data = setting
        model.half()
        small = fpgm.recover(model, plan, [x.half() for x in data], images=32, distil=60)
        assert small.fpgm_recovery.notes[-1].startswith("Distillation was skipped: the weights")

    def test_outputs_without_gradients(self, setting: Setting) -> None:
        _, plan, data = setting

        class Closed(Streams):
            @torch.no_grad()
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x)

        model = stir(Closed()).eval()
        plan = fpgm.plan(model, data[0][:1], rate=0.5, align=1)
        small = fpgm.recover(model, plan, data, images=32, distil=60)
        assert small.fpgm_recovery.notes[-1].startswith("Distillation was skipped: autograd")

    def test_inference_mode_is_refused(self, setting: Setting) -> None:
        with (
            torch.inference_mode(),
            pytest.raises(fpgm.RequestError, match=r"outside of torch\.inference_mode"),
        ):
            fpgm.recover(*setting, distil=1)

    def test_a_network_that_fails_halfway(self, setting: Setting) -> None:
        model, plan, data = setting
        data += [data[0], torch.randn(2, 5, 6, 6)]
        with pytest.raises(fpgm.ModelError, match=r"^Distillation fails at step \d+: "):
            fpgm.recover(model, plan, data, images=32, distil=60)

    def test_it_takes_the_time_it_is_given(
        self, setting: Setting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With a clock that advances a second at every call."""
        ticks = count()
        monkeypatch.setattr(distil.time, "perf_counter", lambda: float(next(ticks)))
        model, plan, data = setting
        small = fpgm.compact(model, plan)
        done = distil.distil_(small, model, plan, repeat(Example((data[0],), {})), 20.0)
        assert done == distil.DistillationResult(steps=19)

    def test_features_are_matched_too(self, setting: Setting) -> None:
        """With outputs of zero, only feature matching can change weights."""
        model, _, data = setting
        with torch.no_grad():
            model.head.weight.zero_()
        plan = fpgm.plan(model, data[0][:1], rate=0.5, align=1)
        small = fpgm.compact(model, plan)
        before = small.one[0].weight.detach().clone()
        distil.distil_(small, model, plan, repeat(Example((data[0],), {})), 0.5)
        assert not torch.equal(before, small.one[0].weight)

    def test_the_rate_rises_and_falls(
        self, setting: Setting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ticks = count()
        monkeypatch.setattr(distil.time, "perf_counter", lambda: float(next(ticks)))
        rates = rates_of(monkeypatch)
        model, plan, data = setting
        small = fpgm.compact(model, plan)
        distil.distil_(small, model, plan, repeat(Example((data[0],), {})), 100.0)
        top = rates.index(max(rates))
        assert rates[0] < 0.3 * max(rates)
        assert rates[-1] < 0.01 * max(rates)
        assert rates[top:] == sorted(rates[top:], reverse=True)

    def test_an_interruption_leaves_nothing_behind(
        self, setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(batches_module, "MAX_BYTES_IN_MEMORY", 0)
        model, plan, data = setting
        before = {name: t.clone() for name, t in model.state_dict().items()}

        def stop(title: str, *_: Any) -> None:
            if title == "distilling":
                assert held(tmp_path)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fpgm.recover(model, plan, data, images=64, distil=5, progress=stop)
        assert not held(tmp_path)
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
        assert not any(m._forward_pre_hooks for m in model.modules())


def held(folder: Path) -> list[str]:
    """List files in a folder, and deleted ones there that this process has open."""
    opened = []
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # that of the listing itself is closed
            opened.append(str(link.readlink()))
    named = [str(path) for path in folder.iterdir()]
    return [*named, *(name for name in opened if name.startswith(str(folder)))]


def rates_of(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the learning rates of the steps that follow."""
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW, *args: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    return rates


@pytest.mark.parametrize(("enough", "reached"), [(1, 1.0), (10**8, 0.05)])
def test_few_steps_are_small_ones(
    enough: int, reached: float, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = rates_of(monkeypatch)
    monkeypatch.setattr(distil, "FULL_RATE_STEPS", enough)
    model, plan, data = setting
    fpgm.recover(model, plan, data, distil=0.5)
    assert 0 < max(rates) <= reached * distil.LEARNING_RATE
    assert enough > 1 or max(rates) > 0.5 * distil.LEARNING_RATE


def test_outputs_that_are_not_finite_are_left_out_of_the_loss() -> None:
    wanted = torch.tensor([1.0, float("inf"), 3.0])
    given = torch.tensor([1.5, 7.0, 3.0], requires_grad=True)
    loss = distil._normalized_mse([given], [wanted])
    assert float(loss.detach()) == pytest.approx(0.125 / 5)
    (gradient,) = torch.autograd.grad(loss, given)
    assert gradient.tolist() == pytest.approx([0.1, 0.0, 0.0])
