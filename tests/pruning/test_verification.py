"""Certificates: what is certified, what is not, and every message whole."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.pruning.verification import Certificate

X = torch.linspace(-1, 1, 4 * 6).reshape(4, 6)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def complaint(certificate: Certificate) -> str:
    with pytest.raises(fpgm.VerificationError) as error:
        certificate.check()
    return str(error.value)


# The verdict, from the numbers alone.


def test_equal_to_rounding_and_far_from_the_original_is_ok() -> None:
    good = Certificate(1e-6, 0.3, 2, 1e-4, "float32")
    assert good.ok
    assert good.check() is good


def test_a_difference_above_rounding_is_not_ok() -> None:
    assert complaint(Certificate(0.25, 0.5, 2, 1e-4, "float32")) == (
        "The compact model differs from the masked original by 2.5e-01 (tolerance 1e-04). Do not "
        "use it: plan again with ignore= for the layers before that output."
    )


@pytest.mark.parametrize("moved", [0.0, 1e-5, 9e-5])
def test_tiny_changes_verify_nothing(moved: float) -> None:
    """A wrong compact model could hide in an error of a hundredth of what was to be seen."""
    assert complaint(Certificate(1e-6, moved, 2, 1e-4, "float32")) == (
        f"Nothing was verified: masking the removed units changes the outputs by only {moved:.1e}, "
        "with these weights and with modified ones. Verify with an example input that reaches "
        "those units."
    )
    assert Certificate(1e-6, 1.1e-4, 2, 1e-4, "float32").ok


def test_not_a_number_is_not_ok() -> None:
    model = network()
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    small = fpgm.compact(model, plan)
    with torch.no_grad():
        small[2].bias[0] = float("nan")
    certificate = fpgm.verify(model, plan, X, compacted=small)
    assert certificate.max_error == float("inf")
    assert not certificate.ok


# Whole models.


def test_a_certificate_says_what_was_compared() -> None:
    model = network()
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    certificate = fpgm.verify(model, plan, X, inputs=3).check()
    assert (certificate.inputs, certificate.precision) == (3, "float64")
    assert certificate.exact
    assert certificate.max_error < 1e-6 < 1e-3 < certificate.moved


def test_moved_is_the_change_by_masking() -> None:
    """y = a + b with a kept and b removed: from 1 + 3 to 3 is a third of the reference's 3."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Identity(), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [3.0]]))
        model[2].weight.fill_(1)
    x = torch.ones(1, 1)
    plan = fpgm.plan(model, x, rate=0.5, align=1, criterion="l2")
    assert fpgm.verify(model, plan, x, inputs=1).moved == pytest.approx(1 / 3)


@pytest.mark.parametrize("tensor", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_one_tampered_weight_is_detected(tensor: str) -> None:
    model = network()
    plan = fpgm.plan(model, X, rate=0.25, align=1)
    small = fpgm.compact(model, plan)
    fpgm.verify(model, plan, X, compacted=small).check()
    with torch.no_grad():
        small.get_parameter(tensor).view(-1)[0] += 10
    certificate = fpgm.verify(model, plan, X, compacted=small)
    assert not certificate.ok
    assert re.fullmatch(
        r"The compact model differs from the masked original by \d\.\de[+-]\d\d at out, channel "
        r"\d of dim 1 \(at \[\d, \d\]\) \(tolerance 1e-08\)\. Do not use it: plan again with "
        r"ignore= for the layers before that output\.",
        complaint(certificate),
    )


class Branch(nn.Module):
    """A residual branch behind a gain; initialised to zero, as is usual, it does nothing yet."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.stem, self.up = nn.Linear(6, 4), nn.Linear(4, 16)
        self.down, self.head = nn.Linear(16, 4), nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.full((4,), gain))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out: Tensor = self.head(x + self.gain * self.down(self.up(x).relu()))
        return out


def test_a_branch_with_zero_gain_is_checked_with_another_gain() -> None:
    for model in (Branch(gain=1.0), Branch(gain=0.0)):
        gain = model.gain.clone()
        plan = fpgm.plan(model, X, rate=0.5, align=1, ignore=["stem", "down"])
        certificate = fpgm.verify(model, plan, X).check()
        assert certificate.moved > 1e-3
        assert torch.equal(model.gain, gain)


def test_a_tampered_model_cannot_hide_behind_zero_gain() -> None:
    """It computes the right outputs for now, with a weight that is not the original's."""
    model = Branch(gain=0.0)
    plan = fpgm.plan(model, X, rate=0.5, align=1, ignore=["stem", "down"])
    small = fpgm.compact(model, plan)
    assert fpgm.verify(model, plan, X, compacted=small).ok
    with torch.no_grad():
        small.up.weight[0, 0] += 1
    certificate = fpgm.verify(model, plan, X, compacted=small)
    assert complaint(certificate) == (
        "The compact model's parameter 'up.weight' does not contain the original values that "
        "the plan keeps: compact the model again."
    )


def test_a_dead_branch_is_seen_even_when_another_group_moves_the_output() -> None:
    model = Branch(gain=0.0)
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    wrong = tuple(
        replace(c, keep=c.keep[::-1]) if (c.tensor, c.dim) == ("down.weight", 1) else c
        for c in plan.cuts
    )
    assert wrong != plan.cuts
    assert not fpgm.verify(model, replace(plan, cuts=wrong), X).ok


def test_another_activation_in_the_compact_model_is_detected() -> None:
    model = network()
    plan = fpgm.plan(model, X, rate=0.25, align=1)
    small = fpgm.compact(model, plan)
    small[1] = nn.Tanh()
    assert not fpgm.verify(model, plan, X, compacted=small).ok


class Complex(nn.Module):
    """Two heads, one of which returns complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.real, self.imag = nn.Linear(6, 16), nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x).relu()
        return self.real(x), torch.complex(self.real(x), self.imag(x))


class ComplexWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 12, 3, dtype=torch.complex64)
        self.b = nn.Conv2d(12, 8, 3, dtype=torch.complex64)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(torch.complex(x, x.flip(-1)))
        y = self.b(torch.complex(y.real.relu(), y.imag.relu()))
        out: Tensor = self.head(y.abs().mean((2, 3)))
        return out


def test_complex_weights_are_certified_in_double_precision() -> None:
    net, x = ComplexWeights(), torch.randn(2, 3, 8, 8)
    plan = fpgm.plan(net, x, rate=0.5, align=1)
    certificate = fpgm.verify(net, plan, x)
    assert certificate.ok
    assert certificate.precision == "float64"
    assert [cut.kept for cut in plan.cuts if cut.role == "filter"] == [6, 4]


def test_complex_outputs_are_compared_too() -> None:
    model = Complex()
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    assert fpgm.verify(model, plan, X).ok
    small = fpgm.compact(model, plan)
    with torch.no_grad():
        small.imag.weight[0, 0] += 1
    assert not fpgm.verify(model, plan, X, compacted=small).ok


class Greedy(nn.Module):
    """Writes into its input, and takes a square root, so negative inputs are no use to it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        out: Tensor = self.head(self.body(x.sqrt()).relu())
        return out


def test_inputs_stay_as_they_are_and_in_their_domain() -> None:
    example = X.abs()
    before = example.clone()
    fpgm.prune(Greedy(), example, rate=0.5, align=1)
    assert torch.equal(example, before)


def test_outputs_may_shrink_on_request() -> None:
    model = network()
    small = fpgm.prune(model, X, rate=0.5, align=1, keep_outputs=False)
    assert small(X).shape[1] == model(X).shape[1] // 2


def test_units_that_never_fire_are_checked_with_another_bias() -> None:
    model = network()
    with torch.no_grad():
        model[0].bias.fill_(-1000)
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    assert fpgm.verify(model, plan, X).ok
    wrong = tuple(replace(c, keep=c.keep[::-1]) if c.tensor == "2.weight" else c for c in plan.cuts)
    assert not fpgm.verify(model, replace(plan, cuts=wrong), X).ok


class Dead(nn.Module):
    """Its own code keeps its units from firing, whatever their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head((self.body(x) - 1000).relu())
        return out


def test_inactive_units_verify_nothing() -> None:
    model = Dead()
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    certificate = fpgm.verify(model, plan, X)
    assert (certificate.max_error, certificate.moved) == (0, 0)
    assert complaint(certificate).startswith(
        "Nothing was verified: masking the removed units changes the outputs by only 0.0e+00, "
    )


def test_another_output_shape_is_refused() -> None:
    model = network()
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    other = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(fpgm.VerificationError) as error:
        fpgm.verify(model, plan, X, compacted=other)
    assert str(error.value) == (
        "The compact model returns 4×3 float64 instead of 4×2 float64 at out."
    )


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = super().forward(x)
        return out, out


def test_another_number_of_outputs_is_refused() -> None:
    model = network()
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    other = Twice(*fpgm.compact(model, plan))
    with pytest.raises(fpgm.VerificationError) as error:
        fpgm.verify(model, plan, X, compacted=other)
    assert str(error.value) == ("The compact model returns 2 values instead of 1: out is missing.")


def test_neither_model_is_changed() -> None:
    model = network().train()
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    small = fpgm.compact(model, plan)
    before = [t.clone() for m in (model, small) for t in m.state_dict().values()]
    fpgm.verify(model, plan, X, compacted=small)
    after = [t for m in (model, small) for t in m.state_dict().values()]
    assert all(map(torch.equal, before, after))
    assert model.training
    assert small.training


class Routed(nn.Module):
    """Samples go to one of two experts; nobody goes to the second."""

    def __init__(self, accepts: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(network() for _ in range(2))
        self.scale, self.accepts = nn.Parameter(torch.ones(2)), accepts

    def forward(self, x: Tensor) -> Tensor:
        if not (self.accepts or self.training or bool((self.scale == 1).all())):
            raise RuntimeError("other weights are not accepted")
        out = x.new_zeros(len(x), 2)
        for i, expert in enumerate(self.experts):
            chosen = torch.full((len(x),), i == 0).nonzero().squeeze(1)
            out = out.index_add(0, chosen, expert(x[chosen]))
        return out * self.scale


@pytest.mark.parametrize("accepts", [True, False])
def test_an_expert_without_samples_and_code_that_depends_on_weights(accepts: bool) -> None:
    """A pass with varied weights that breaks off leaves all copies with the same weights."""
    model = Routed(accepts).eval()
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    assert fpgm.verify(model, plan, X).check().ok
    assert fpgm.prune(model, X, rate=0.5, align=1)(X).shape == (4, 2)


# Norms over channels.


def normed() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 2))
    with torch.no_grad():
        model[1].weight.uniform_(0.5, 1.5)
        model[1].bias.uniform_(-0.5, 0.5)
    return model


def test_an_approximate_plan_is_certified_as_such() -> None:
    model = normed()
    plan = fpgm.plan(model, X, rate=0.5, approximate=True)
    certificate = fpgm.verify(model, plan, X).check()
    assert (plan.exact, certificate.exact, certificate.ok) == (False, False, True)


def test_approximate_means_that_statistics_are_over_what_is_kept() -> None:
    """By hand: slice, normalise over eight channels, and only then apply scale and shift."""
    model = normed()
    plan = fpgm.plan(model, X, rate=0.5, approximate=True)
    keep = next(torch.tensor(c.keep) for c in plan.cuts if c.tensor == "1.weight")
    hidden = model[0](X)[:, keep]
    centred = hidden - hidden.mean(1, keepdim=True)
    normal = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
    expected = (normal * model[1].weight[keep] + model[1].bias[keep]) @ model[2].weight[:, keep].T
    small = fpgm.compact(model, plan)
    assert torch.allclose(small(X), expected + model[2].bias, atol=1e-5)
    fpgm.mask_(model, plan)  # statistics over all sixteen, half of them zero
    assert not torch.allclose(small(X), model(X), atol=1e-2)


def test_a_tampered_approximate_model_is_detected() -> None:
    model = normed()
    plan = fpgm.plan(model, X, rate=0.5, approximate=True)
    small = fpgm.compact(model, plan)
    with torch.no_grad():
        small[1].bias[0] += 10
    assert not fpgm.verify(model, plan, X, compacted=small).ok


def test_asking_for_approximate_where_nothing_needs_it_stays_exact() -> None:
    model = network()
    plan = fpgm.plan(model, X, rate=0.5, approximate=True)
    assert plan.exact
    assert fpgm.verify(model, plan, X).check().exact
    assert plan.cuts == fpgm.plan(model, X, rate=0.5).cuts


def test_prune_accepts_an_approximate_model() -> None:
    small = fpgm.prune(normed(), X, rate=0.5, approximate=True)
    assert small[1].normalized_shape == (8,)


def test_a_masked_model_can_still_be_verified() -> None:
    model = network()
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    fpgm.mask_(model, plan)
    certificate = fpgm.verify(model, plan, X)
    assert certificate.ok
    assert certificate.moved > 1e-3
    wrong = fpgm.compact(model, plan)
    with torch.no_grad():
        wrong[0].weight[0] += 1
    assert not fpgm.verify(model, plan, X, compacted=wrong).ok


class Amplifies(nn.Module):
    """Outputs that depend on the last digits of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(6, 64), nn.Linear(64, 4)
        self.shift = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.hidden(x).relu())
        return torch.sin(3e8 * (y + self.shift))


def test_a_model_that_amplifies_rounding_is_verified_with_a_larger_tolerance() -> None:
    model = Amplifies().double()
    plan = fpgm.plan(model, X.double(), rate=0.5, align=1)
    small = fpgm.compact(model, plan)
    small.shift = 1e-16  # one digit of rounding: some processors sum both models alike
    certificate = fpgm.verify(model, plan, X.double(), compacted=small)
    assert certificate.ok, certificate
    assert 1e-8 < certificate.max_error < certificate.tolerance <= 1e-5
    assert "amplifies rounding" in certificate.notes[0]


def test_a_real_difference_in_such_a_model_is_not_taken_for_rounding() -> None:
    model = Amplifies().double()
    plan = fpgm.plan(model, X.double(), rate=0.5, align=1)
    small = fpgm.compact(model, plan)
    small.shift = 1e-13
    assert fpgm.verify(model, plan, X.double(), compacted=small).differs


def test_a_buffer_with_two_names_stays_one_in_float64() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
            self.register_buffer("gain", torch.rand(8) + 0.5)
            self.register_buffer("gate", self.gain, persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.first(x) * self.gain).relu() * self.gate)

    small = fpgm.prune(net := Gated(), X, rate=0.5, align=1)
    assert small.gain is small.gate
    assert fpgm.verify(net, fpgm.plan(net, X, rate=0.5, align=1), X).ok
