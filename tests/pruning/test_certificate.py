"""Trying to fool the certificate: compact models that are wrong in one place, and right ones."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.helpers.independent_reference import SameRandomNumbers
from torch import Tensor, nn

import fpgm
from fpgm.errors import ForwardError
from fpgm.pruning.plan import Plan

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Detector(nn.Module):
    """Boxes in pixels and class scores in one tensor, [N, 4 + classes, anchors]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU())
        self.boxes, self.scores = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        boxes = self.boxes(x).flatten(2).sigmoid() * 1280
        return torch.cat([boxes, self.scores(x).flatten(2).sigmoid() * 1e-3], 1)


def planned(model: nn.Module, x: Tensor = X, **options: Any) -> tuple[Plan, nn.Module]:
    plan = fpgm.plan(model, x, rate=0.5, align=1, **options)
    return plan, fpgm.compact(model, plan)


class Wrong(nn.Module):
    """A compact model with something done to what it returns."""

    def __init__(self, inner: nn.Module, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.change = inner, [change]

    def forward(self, x: Tensor) -> Any:
        return self.change[0](self.inner(x))


def judged(model: nn.Module, change: Callable[[Any], Any], x: Tensor = X) -> fpgm.Certificate:
    """What is found of a compact model whose outputs are changed; without change it is right."""
    plan, small = planned(model, x)
    assert fpgm.verify(model, plan, x, compacted=small).ok
    assert fpgm.verify(model, plan, x, compacted=Wrong(small, lambda y: y)).ok
    return fpgm.verify(model, plan, x, compacted=Wrong(small, change))


def times(channel: int, factor: float) -> Callable[[Tensor], Tensor]:
    def change(y: Tensor) -> Tensor:
        scale = torch.ones(y.shape[1], dtype=y.dtype)
        scale[channel] = factor
        return y * scale[:, None]

    return change


@pytest.mark.parametrize("factor", [1.3, 1.01, 1 + 1e-5])
def test_class_scores_next_to_boxes_are_compared_on_their_scale(factor: float) -> None:
    certificate = judged(Detector(), times(6, factor))
    assert not certificate.ok
    assert certificate.max_error == pytest.approx(factor - 1, rel=0.1)
    assert certificate.worst.startswith("out, channel 6 of dim 1 ")


def test_a_swap_of_two_channels_is_detected() -> None:
    order = [0, 1, 2, 3, 5, 4, 6, 7, 8]
    assert not judged(Detector(), lambda y: y[:, order]).ok


def test_one_anchor_of_one_class_is_enough() -> None:
    def change(y: Tensor) -> Tensor:
        y = y.clone()
        y[1, 7, 3] += 1e-8
        return y

    certificate = judged(Detector(), change)
    assert not certificate.ok
    assert certificate.worst.endswith("(at [1, 7, 3])")


def test_a_channel_of_rounding_noise_is_no_difference() -> None:
    """x + y - x - y is zero up to rounding, which differs from model to model."""

    class Cancels(Detector):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return torch.cat([y, ((y + y.roll(1, 2)) - y - y.roll(1, 2))], 1)

    model = Cancels()
    plan, small = planned(model)
    assert fpgm.verify(model, plan, X, compacted=small).check()


class Norms(nn.Module):
    """Fresh batch norms: all their channels are alike, so that a mix-up would not show."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.conv(x)).relu())
        return out


@pytest.mark.parametrize(
    "name", ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]
)
def test_a_plan_that_takes_the_wrong_channels_of_a_fresh_norm_is_detected(name: str) -> None:
    model = Norms()
    plan, _ = planned(model)
    assert fpgm.verify(model, plan, X).ok
    wrong = tuple(
        replace(c, keep=tuple(reversed(c.keep))) if c.tensor == name else c for c in plan.cuts
    )
    assert wrong != plan.cuts
    assert not fpgm.verify(model, replace(plan, cuts=wrong), X).ok


def test_an_example_of_zeros_proves_as_much() -> None:
    model, zeros = Norms(), torch.zeros_like(X)
    plan, small = planned(model, zeros)
    assert fpgm.verify(model, plan, zeros, compacted=small).ok
    wrong = tuple(
        replace(c, keep=c.keep[::-1]) if (c.tensor, c.dim) == ("conv.weight", 0) else c
        for c in plan.cuts
    )
    assert not fpgm.verify(model, replace(plan, cuts=wrong), zeros).ok


class Deep(nn.Sequential):
    """Activations shrink from layer to layer until masking the first hardly shows."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for _ in range(12):
            layers += [nn.Linear(8, 8), nn.ReLU()]
        super().__init__(*layers, nn.Linear(8, 2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.1)


def test_vanishing_activations_hide_nothing() -> None:
    model, x = Deep(), torch.randn(16, 8)
    plan, small = planned(model, x)
    assert fpgm.verify(model, plan, x, compacted=small).check().moved > 1e-3
    wrong = tuple(
        replace(c, keep=c.keep[::-1]) if (c.tensor, c.dim) == ("2.weight", 1) else c
        for c in plan.cuts
    )
    assert not fpgm.verify(model, replace(plan, cuts=wrong), x).ok


class Ends(nn.Module):
    """A small network with some last step of its own."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 4)
        self.end = [end]

    def forward(self, x: Tensor) -> Any:
        return self.end[0](self.head(self.body(x).relu()))


ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def tampered(end: Callable[[Tensor], Any], after: Callable[[Any], Any]) -> fpgm.Certificate:
    return judged(Ends(end), after, ROWS)


def test_integers_are_compared() -> None:
    certificate = tampered(lambda y: (y.argmax(1), y > 0), lambda y: (y[0].roll(1), y[1]))
    assert not certificate.ok
    assert "of 8 differ" in certificate.worst
    assert not tampered(lambda y: (y.argmax(1), y > 0), lambda y: (y[0], ~y[1])).ok


def masked_logits(value: float) -> Callable[[Tensor], Tensor]:
    hole = torch.tensor([[True, False, False, True]] * 7 + [[True] * 4])
    return lambda y: y.masked_fill(hole, value)


@pytest.mark.parametrize("value", [-torch.inf, torch.nan, -1e9, -65504.0, torch.finfo().min])
def test_masked_logits_in_equal_places_are_equal_and_set_no_scale(value: float) -> None:
    def change(y: Tensor) -> Tensor:
        y = y.clone()
        y[0, 1] *= 1 + 1e-6
        return y

    certificate = tampered(masked_logits(value), change)
    assert not certificate.ok
    assert certificate.max_error < 1e-4


def test_a_mask_that_is_added_sets_no_scale() -> None:
    mask = torch.tensor([[0.0, 0, -1e9, -1e9]])
    assert not tampered(lambda y: y + mask, lambda y: y * torch.tensor([1 + 1e-4, 1, 1, 1])).ok


def test_infinity_in_another_place_is_a_difference() -> None:
    certificate = tampered(masked_logits(-torch.inf), lambda y: y.roll(1, 1))
    assert certificate.max_error == torch.inf


def test_half_of_a_complex_output_is_enough() -> None:
    def change(y: Tensor) -> Tensor:
        return torch.complex(y.real, y.imag * 1.001)

    assert not tampered(lambda y: torch.complex(y, y.exp()), change).ok


# Integers, and the numbers behind them.

INTEGERS: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda y: y.argmax(1),
    "topk": lambda y: y.topk(2, 1).indices,
    "sort": lambda y: y.argsort(1),
    "comparison": lambda y: y > 0,
    "cast": lambda y: y.long(),
    "rounding": lambda y: (y * 2).round().long(),
    "list": lambda y: y.argmax(1).tolist(),
}


@pytest.mark.parametrize("kind", INTEGERS)
def test_logits_behind_integers_are_compared(kind: str) -> None:
    model = Ends(INTEGERS[kind])
    plan, small = planned(model, ROWS)
    assert fpgm.verify(model, plan, ROWS, compacted=small).check()
    scale = torch.tensor([1.0, 1.05, 1.0, 1.0])
    small.head.register_forward_hook(lambda module, args, out: out * scale)
    certificate = fpgm.verify(model, plan, ROWS, compacted=small)
    assert not certificate.ok
    assert certificate.max_error == pytest.approx(0.05) or certificate.worst.startswith("out, ")


# Outputs that prove nothing.

IDLE: dict[str, Callable[[Tensor], Tensor]] = {
    "undefined": lambda y: (-y.square() - 1).log(),
    "saturated": lambda y: (y + 100).sigmoid(),
    "cut off": lambda y: (y - 1e3).clamp(min=0),
    "vanishing": lambda y: y * 1e-20,
}


class TwoHeads(nn.Module):
    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.end = [end]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x).relu()
        return self.one(x), self.end[0](self.two(x))


@pytest.mark.parametrize("kind", IDLE)
def test_an_output_that_never_moves_is_named(kind: str) -> None:
    model = TwoHeads(IDLE[kind])
    certificate = fpgm.verify(model, planned(model, ROWS)[0], ROWS).check()
    assert certificate.notes == (
        "out[1]: not verified, because masking the removed units does not change it.",
    )
    model = TwoHeads(torch.tanh)
    assert fpgm.verify(model, planned(model, ROWS)[0], ROWS).check().notes == ()


def test_a_module_that_no_example_reaches_is_named() -> None:
    class Branches(TwoHeads):
        def forward(self, x: Tensor) -> Any:
            wide = len(x) > 100
            x = self.body(x).relu()
            return self.two(x) if wide else self.one(x)

    model = Branches(torch.tanh)
    certificate = fpgm.verify(model, planned(model, ROWS)[0], ROWS).check()
    assert certificate.notes == (
        "'two': not used by the examples, so its outputs were not checked.",
    )


def test_weights_that_cannot_be_varied_are_noted() -> None:
    class Fixed(TwoHeads):
        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.bias = [self.one.bias.tolist()]

        def forward(self, x: Tensor) -> Any:
            if (self.one.bias - torch.tensor(self.bias[0])).abs().max() > 1e-3:
                raise RuntimeError("these are not my weights")
            return super().forward(x)

    model = Fixed()
    (note,) = fpgm.verify(model, planned(model, ROWS)[0], ROWS).check().notes
    assert note.startswith(
        "The check with modified weights was skipped: The masked model does not run"
    )


# State across calls.


class Averages(Ends):
    """Returns a moving average, and counts its calls in a buffer and an attribute."""

    def __init__(self) -> None:
        super().__init__(lambda y: y)
        self.average: Tensor | None = None
        self.calls = 0
        self.register_buffer("step", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        self.average = out if self.average is None else 0.9 * self.average + 0.1 * out
        self.calls += 1
        self.step += 1
        return self.average * self.step * (1 + self.calls % 3)


def test_a_model_with_state_across_calls_is_certified_from_its_state() -> None:
    model = Averages()
    small = fpgm.prune(model, ROWS, rate=0.5, align=1)
    assert small.body.out_features == 8
    (plan,) = small.fpgm_plans
    assert fpgm.verify(model, plan, ROWS, compacted=small, inputs=4).ok
    small.head.register_forward_hook(lambda module, args, out: out * 1.01)
    assert not fpgm.verify(model, plan, ROWS, compacted=small).ok


# Random numbers.


class Sampler(nn.Module):
    """Draws in eval mode, over channels that shrink, and again over some that do not."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 4)
        self.draw = [draw]

    def forward(self, x: Tensor) -> Tensor:
        x = self.draw[0](self.body(x).relu())
        return self.draw[0](self.head(x))


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda y: F.dropout(y, 0.5, training=True),
    "noise": lambda y: y + torch.randn_like(y),
    "uniform": lambda y: y * torch.rand_like(y),
    "normal": lambda y: torch.distributions.Normal(y, y.exp(), validate_args=False).rsample(),
    "sample": lambda y: torch.normal(y, y.abs() + 1),
    "in place": lambda y: y + torch.empty_like(y).uniform_(),
    "bernoulli": lambda y: y * torch.bernoulli(torch.full_like(y, 0.5)),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_random_numbers_over_pruned_channels_become_constants(kind: str) -> None:
    model = Sampler(DRAWS[kind])
    plan, small = planned(model, ROWS, ignore=["head"])
    certificate = fpgm.verify(model, plan, ROWS, compacted=small).check()
    assert certificate.notes == ("The model draws random numbers; constants were used instead.",)
    with torch.no_grad():
        small.head.weight[0] *= 1.01
    assert not fpgm.verify(model, plan, ROWS, compacted=small).ok


DRAWN_AROUND: dict[str, Callable[[Tensor], Tensor]] = {
    "poisson": lambda y: torch.poisson(y.exp()),
    "bernoulli": lambda y: torch.bernoulli(y.sigmoid()),
    "bernoulli in place": lambda y: torch.empty_like(y).bernoulli_(y.sigmoid()),
    "gamma": lambda y: torch._standard_gamma(y.exp()),
    "dirichlet": lambda y: torch._sample_dirichlet(y.exp()),
    "binomial": lambda y: torch.binomial(torch.full_like(y, 5.0), y.sigmoid()),
    "normal": lambda y: torch.normal(y, y.exp()),
    "rrelu": lambda y: F.rrelu(y, training=True),
    "rrelu in place": lambda y: F.rrelu_(y.clone(), training=True),
}


@pytest.mark.parametrize("kind", DRAWN_AROUND)
def test_numbers_that_noise_is_drawn_around_stay_visible(kind: str) -> None:
    class Draws(Sampler):
        def forward(self, x: Tensor) -> Any:
            x = self.body(x).relu()
            return DRAWN_AROUND[kind](self.head(x)), self.other(x)

    model = Draws(lambda y: y)
    model.other = nn.Linear(16, 4)
    plan, small = planned(model, ROWS)
    assert fpgm.verify(model, plan, ROWS, compacted=small).check()
    small.head.register_forward_hook(lambda module, args, out: out * -1.1)
    certificate = fpgm.verify(model, plan, ROWS, compacted=small)
    assert not certificate.ok
    assert certificate.worst.startswith("out[0], ")


def test_the_independent_reference_sees_what_noise_is_drawn_around() -> None:
    for draw in DRAWN_AROUND.values():
        with SameRandomNumbers(0):
            one, other = (draw(torch.full((3, 4), value)) for value in (0.5, 1.0))
        assert not torch.equal(one, other)


@pytest.mark.parametrize(
    "draw",
    [
        lambda y: y + torch.randn(4),
        lambda y: y + random.random(),
        lambda y: y + np.random.rand(),  # noqa: NPY002
    ],
    ids=["torch", "python", "numpy"],
)
def test_random_numbers_behind_the_head_follow_the_seed(draw: Callable[[Tensor], Tensor]) -> None:
    model = Ends(draw)
    plan, small = planned(model, ROWS)
    states = random.getstate(), torch.get_rng_state()
    numbers = np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]  # noqa: NPY002
    assert fpgm.verify(model, plan, ROWS, compacted=small).check().notes == ()
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.random.get_state()[1].tolist() == numbers  # type: ignore[index,union-attr]  # noqa: NPY002


def test_unseeded_random_numbers_are_reported() -> None:
    model = Ends(lambda y: y + int.from_bytes(os.urandom(4), "big") / 2**32)
    plan, _ = planned(model, ROWS)
    with pytest.raises(fpgm.VerificationError) as error:
        fpgm.verify(model, plan, ROWS).check()
    assert str(error.value).endswith(
        "Its outputs differ from one run to the next, even with the same seed: switch that off "
        "for verification."
    )


# Precision.


@pytest.mark.parametrize(
    "end",
    [
        lambda y: y.float(),
        lambda y: F.linear(y.float(), torch.eye(4)),
        lambda y: (y @ torch.ones(4, 4)).half().float(),
        lambda y: y.to(torch.float32) + torch.tensor([0.1, 0.2, 0.3, 0.4]),
        lambda y: torch.from_numpy(y.numpy()) @ torch.from_numpy(np.eye(4, dtype=np.float32)),
    ],
    ids=["float", "constant", "half", "tensor", "numpy"],
)
def test_casts_to_less_precision_are_compared_in_double(end: Callable[[Tensor], Tensor]) -> None:
    model = Ends(end)
    plan, _ = planned(model, ROWS, ignore=["head"])
    certificate = fpgm.verify(model, plan, ROWS).check()
    assert (certificate.precision, certificate.tolerance) == ("float64", 1e-8)


def test_a_model_that_insists_on_its_precision_is_compared_in_it() -> None:
    def end(y: Tensor) -> Tensor:
        if y.dtype != torch.float32:
            raise TypeError("float32 only")
        return y

    model = Ends(end)
    plan, small = planned(model, ROWS)
    certificate = fpgm.verify(model, plan, ROWS, compacted=small).check()
    assert (certificate.precision, certificate.tolerance) == ("float32", 1e-4)
    with torch.no_grad():
        small.head.weight[2] *= 1.01
    assert not fpgm.verify(model, plan, ROWS, compacted=small).ok


def test_scores_of_a_float32_detector_are_compared_on_their_scale() -> None:
    class Single(Detector):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("float32 only")
            x = self.body(x)
            boxes = self.boxes(x).flatten(2).sigmoid() * 1280
            return torch.cat([boxes, self.scores(x).flatten(2).sigmoid()], 1)

    model = Single()
    plan, small = planned(model)
    certificate = fpgm.verify(model, plan, X, compacted=small).check()
    assert certificate.precision == "float32"
    small.scores.register_forward_hook(lambda module, args, out: out * 1.05)
    assert not fpgm.verify(model, plan, X, compacted=small).ok


def test_a_model_that_refuses_to_be_cast_is_compared_as_it_is() -> None:
    class Uncast(Norms):
        def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
            raise RuntimeError("no casts")

    model = Uncast()
    plan, small = planned(model)
    assert fpgm.verify(model, plan, X, compacted=small).check().precision == "float32"


def test_a_compact_model_in_another_precision_is_refused() -> None:
    model = Ends(lambda y: y)
    plan, small = planned(model, ROWS)
    assert not fpgm.verify(model, plan, ROWS, compacted=small.half()).ok


# Outputs that may shrink.


def test_it_is_enough_that_outputs_shrink() -> None:
    model = nn.Sequential(nn.Linear(6, 8))
    plan = fpgm.plan(model, ROWS, rate=0.5, align=1, keep_outputs=False)
    certificate = fpgm.verify(model, plan, ROWS).check()
    assert (certificate.moved, len(plan.outputs)) == (1.0, 1)
    (kept,) = plan.outputs
    assert torch.allclose(fpgm.compact(model, plan)(ROWS), model(ROWS)[:, list(kept.keep)])
    wrong = replace(plan, outputs=(replace(kept, keep=kept.keep[::-1]),))
    assert not fpgm.verify(model, wrong, ROWS).ok


# Training.


class Noisy(nn.Module):
    """Adds noise of a size its constructor remembers, in train mode only."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.training:
            x = x + (torch.randn(1, 8, 1, 1) if self.fixed else torch.randn_like(x))
        out: Tensor = self.head(x.relu())
        return out


def by_hand(model: Noisy) -> tuple[Plan, nn.Module]:
    """A plan as it would be if only eval mode had been watched."""
    free = Noisy(fixed=False)
    free.load_state_dict(model.state_dict())
    plan = fpgm.plan(free, X, rate=0.5, align=1)
    return plan, fpgm.compact(model, plan)


def test_a_compact_model_that_does_not_train_is_not_certified() -> None:
    right = Noisy(fixed=False)
    assert fpgm.verify(right, *by_hand(right)[:1], X).ok
    wrong = Noisy(fixed=True)
    plan, small = by_hand(wrong)
    with pytest.raises(fpgm.VerificationError) as error:
        fpgm.verify(wrong, plan, X, compacted=small)
    assert str(error.value).startswith("In train mode: The compact model does not run on the ex")
    assert "test_certificate.py:" in str(error.value)


class Auxiliary(nn.Module):
    """A head that only train mode runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)
        self.extra = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1))

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        return (self.head(x), self.extra(x)) if self.training else self.head(x)


def test_a_head_that_only_training_runs_is_compared_too() -> None:
    model = Auxiliary()
    plan, _ = planned(model, ignore=["body"])
    assert fpgm.verify(model, plan, X).ok
    for name in ("extra.1.weight", "extra.2.weight"):
        wrong = tuple(
            replace(c, keep=c.keep[::-1]) if c.tensor == name and c.size == 8 else c
            for c in plan.cuts
        )
        certificate = fpgm.verify(model, replace(plan, cuts=wrong), X)
        assert not certificate.ok
        assert certificate.worst.startswith("out[1], ")
        assert certificate.worst.endswith(", in train mode")


def test_a_model_that_never_trains_is_certified() -> None:
    class Never(Norms):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise NotImplementedError
            return super().forward(x)

    model = Never()
    assert fpgm.verify(model, planned(model)[0], X).ok


def test_a_batch_of_one_is_repeated_for_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    one = ROWS[:1]
    plan, small = planned(model, one)
    assert fpgm.verify(model, plan, one, compacted=small).ok


# Whose fault it is.


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = {"a": self.layer(x)}["b"]
        return out


def test_an_error_in_the_models_own_code_names_its_line() -> None:
    line = Fails.forward.__code__.co_firstlineno + 1
    with pytest.raises(ForwardError) as error:
        fpgm.plan(Fails(), ROWS, rate=0.5)
    assert str(error.value) == (
        "The model's own forward fails on the example input: 'b' "
        f"(KeyError in test_certificate.py:{line})."
    )
    model = Ends(lambda y: y)
    plan, _ = planned(model, ROWS)
    model.end = [lambda y: y.no_such_thing]
    with pytest.raises(fpgm.VerificationError) as error:
        fpgm.verify(model, plan, ROWS)
    assert str(error.value).startswith("The original model does not run on the example: 'Tensor'")
    assert "(AttributeError in test_certificate.py:" in str(error.value)
