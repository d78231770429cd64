"""Which candidate recovery returns, and layers with a forward of their own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.recoverable import batches, stir, unseen
from torch import Tensor, nn

import fpgm
from fpgm.recovery.api import NORMS, PRUNED, SOLVED, SOLVED_NORMS
from fpgm.recovery.candidates import Candidate, choose_candidate, compare_candidates
from fpgm.utils.calibration_data import read_inputs


def candidate(name: str, error: float, agreement: float | None, divergence: float | None) -> Any:
    return Candidate(name, error, agreement, divergence)


@pytest.mark.parametrize(
    ("candidates", "best"),
    [
        # The smaller squared error, but hardly ever the original's class.
        ([("pruned", 9.0, 0.0, 11.0), ("norms", 1.0, 0.28, 3.3), ("solved", 0.7, 0.01, 6.0)], 1),
        # Equally good within half a standard error: the divergence decides.
        ([("pruned", 9.0, 0.1, 9.0), ("norms", 0.5, 0.66, 1.9), ("solved", 0.5, 0.65, 1.5)], 2),
        # No class scores: the squared error decides, and NaN is never best.
        ([("pruned", 0.5, None, None), ("solved", 0.3, None, None)], 1),
        ([("pruned", 0.5, None, None), ("solved", math.nan, None, None)], 0),
        ([("pruned", 0.5, 0.9, 1.0), ("solved", 0.4, 0.9, math.nan)], 0),
        # Outputs that are not finite are chosen only if all have some.
        ([("pruned", 0.5, 0.1, 3.0), ("solved", math.nan, 0.9, math.nan)], 0),
        ([("pruned", 0.5, 0.1, 3.0), ("solved", math.inf, 0.9, 0.1)], 0),
        ([("pruned", math.nan, 0.1, 3.0), ("solved", math.nan, 0.9, 0.1)], 1),
        # One output is always the largest, as in a regression: the squared error decides.
        ([("pruned", 0.5, 1.0, 0.0), ("solved", 0.3, 1.0, 0.0)], 1),
        # A tie leaves the weights as they are.
        ([("pruned", 0.5, 0.9, 1.0), ("solved", 0.5, 0.9, 1.0)], 0),
    ],
)
def test_the_class_that_is_chosen_decides(candidates: list[Any], best: int) -> None:
    assert choose_candidate([candidate(*c) for c in candidates], 500) == best


def test_a_single_input_has_no_variance_but_is_solved_with() -> None:
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12)]
    model = nn.Sequential(*layers).eval()
    x = torch.randn(1, 6)
    recovery = fpgm.recover(model, fpgm.plan(model, x, rate=0.5, align=1), [x]).fpgm_recovery
    assert recovery.kept == SOLVED
    assert any(note.startswith("Batch norms were not re-estimated: ") for note in recovery.notes)


def test_batches_of_single_images_have_a_variance() -> None:
    model = stir(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)))
    data = list(torch.randn(64, 3, 6, 6).split(1))
    plan = fpgm.plan(model, data[0], rate=0.5, align=1)
    small = fpgm.recover(model, plan, data, method="norms")
    one = fpgm.recover(model, plan, [torch.cat(data)], method="norms")
    errors = [net.fpgm_recovery.candidates[1].error for net in (small, one)]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)


class Scores(nn.Module):
    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = nn.Parameter(scores)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.scores


def test_agreement_divergence_and_error_by_hand() -> None:
    """Two inputs, three classes; the candidate swaps the largest score of the second."""
    x = torch.eye(2)
    model = Scores(torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]]))
    other = Scores(torch.tensor([[2.0, 0.0, 0.0], [2.0, 0.0, 0.0]]))
    inputs = read_inputs([(x, torch.tensor([0, 1]))], 2)
    results = compare_candidates(model, {"same": model, "other": other}, inputs)
    inputs.close()
    assert results is not None
    same, swapped = results
    assert (same.error, same.agreement, same.divergence) == (0.0, 1.0, 0.0)
    assert swapped.agreement == 0.5
    assert swapped.error == pytest.approx(8 / 8)
    p = torch.tensor([0.0, 2.0, 0.0]).softmax(0)
    q = torch.tensor([2.0, 0.0, 0.0]).softmax(0)
    assert swapped.divergence == pytest.approx(float((p * (p / q).log()).sum()) / 2, rel=1e-6)


def test_short_rows_are_scores_only_if_the_data_has_classes() -> None:
    model = Scores(torch.randn(2, 3))
    for batch, scored in ((torch.eye(2), False), ((torch.eye(2), torch.tensor([0, 1])), True)):
        inputs = read_inputs([batch], 2)
        results = compare_candidates(model, {"same": model}, inputs)
        inputs.close()
        assert results is not None
        assert (results[0].agreement is not None) == scored


class SamePadding(nn.Conv2d):
    """Pads as TensorFlow does."""

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride, size = self.kernel_size[0], self.stride[0], x.shape[-1]
        missing = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        pad = (missing // 2, missing - missing // 2)
        return F.conv2d(F.pad(x, pad * 2), self.weight, self.bias, self.stride, 0, 1, self.groups)


class NormThenReLU(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class Inverted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.one = SamePadding(8, 24, 3, bias=False), NormThenReLU(24)
        self.depthwise = SamePadding(24, 24, 3, groups=24, bias=False)
        self.two, self.project = NormThenReLU(24), SamePadding(24, 8, 1, bias=False)
        self.three = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.depthwise(self.one(self.expand(x))))
        return x + self.three(self.project(y))


class Tripled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * 3, self.bias, padding=1)


def mobile() -> nn.Module:
    torch.manual_seed(0)
    stem = SamePadding(3, 8, 3, 2, bias=False)
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    net = nn.Sequential(stem, NormThenReLU(8), Inverted(), Inverted(), *pool, nn.Linear(8, 10))
    return stir(net)


@pytest.mark.parametrize("residual", ["coupled", "independent"])
def test_subclasses_with_custom_forwards_are_solved(residual: Any) -> None:
    model = mobile()
    plan = fpgm.plan(model, torch.zeros(1, 3, 9, 9), rate=0.3, align=1, residual=residual)
    small = fpgm.recover(model, plan, batches(3, 9, 9))
    recovery = small.fpgm_recovery
    layers = {solved.layer for solved in recovery.layers}
    assert {"2.expand", "2.depthwise", "2.project", "3.project", "6"} <= layers
    assert not recovery.unsolved
    assert [c.name for c in recovery.candidates] == [PRUNED, NORMS, SOLVED, SOLVED_NORMS]
    before, after = unseen(model, small, plan, torch.randn(64, 3, 9, 9))
    assert after < before


def test_inputs_are_those_of_the_convolution() -> None:
    """A unit that another one equals is made up for exactly, padding and stride included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), SamePadding(8, 4, 3, 2), nn.Flatten()).eval()
    with torch.no_grad():
        for tensor in model[0].parameters():
            tensor[5] = tensor[2]
    plan = fpgm.plan(model, torch.zeros(1, 3, 8, 8), rate=1 / 8, align=1)
    small = fpgm.recover(model, plan, batches(3, 8, 8))
    before, after = unseen(model, small, plan, torch.randn(64, 3, 8, 8))
    assert after < 1e-6 * before


def test_what_is_not_solved_is_counted_and_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), Tripled(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)
    ).eval()
    plan = fpgm.plan(model, torch.zeros(1, 3, 6, 6), rate=0.5, align=1)
    recovery = fpgm.recover(model, plan, batches(3, 6, 6)).fpgm_recovery
    assert recovery.unsolved == (("2", "its forward does not convolve with its weights"),)
    assert any(note.startswith("2 of 3 layers solved; not solved: 2 (") for note in recovery.notes)


def test_sensitivity_of_subclasses_with_custom_forwards() -> None:
    model = mobile()
    data = batches(3, 9, 9)
    groups = fpgm.sensitivity(model, data[0], data, rates=()).groups
    assert len(groups) == 3
    assert all(0 <= group.at(0.25) <= group.at(0.5) for group in groups)
