"""Layers as rows times a matrix, and ridge least squares for that matrix."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fpgm.recovery.least_squares import Equations, NormalEquations, RowEquations, best_change
from fpgm.recovery.unfold import OutputSample, groups_of, matrix_of, set_matrix_

LAYERS = [
    (nn.Conv2d(4, 6, 3, 2, 1, groups=2), (2, 4, 9, 7)),
    (nn.Conv2d(4, 6, (3, 2), 1, "same", dilation=2), (2, 4, 9, 7)),
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 9)),
    (nn.Conv2d(6, 12, 3, 1, 1, groups=6), (2, 6, 5, 5)),
    (nn.Conv2d(4, 6, 1, 2), (2, 4, 9, 9)),
    (nn.Conv1d(4, 6, 5, 3, 2, padding_mode="circular"), (2, 4, 19)),
    (nn.Conv3d(4, 6, 3, 1, (1, 0, 2), dilation=(1, 2, 1)), (2, 4, 6, 7, 5)),
    (nn.ConvTranspose1d(4, 6, 2, 1, 1), (2, 4, 9)),
    (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), (2, 4, 5, 6)),
    (nn.ConvTranspose2d(4, 6, 4, 3, 0, 2, dilation=2), (2, 4, 5, 6)),
    (nn.ConvTranspose3d(2, 4, 3, 2, 1, groups=2), (1, 2, 3, 4, 5)),
    (nn.Linear(7, 3), (5, 7)),
    (nn.Linear(7, 3), (2, 4, 5, 7)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda value: str(value))
@pytest.mark.parametrize("most", [7, 10**9])
def test_every_layer_is_rows_times_a_matrix(layer: Any, shape: tuple[int, ...], most: int) -> None:
    x = torch.randn(shape)
    out = layer(x).detach()
    sample = OutputSample(layer, x, out, most, seed=0)
    bias = layer.bias.detach().reshape(groups_of(layer), 1, -1)
    results = sample.rows() @ matrix_of(layer) + bias
    torch.testing.assert_close(results, sample.by_group(sample.take(out)), rtol=1e-4, atol=1e-5)
    other = copy.deepcopy(layer)
    nn.init.zeros_(other.weight)
    set_matrix_(other, matrix_of(layer))
    assert torch.equal(other.weight, layer.weight)


def test_least_squares_against_torch() -> None:
    rows, wanted = torch.randn(2, 50, 6).double(), torch.randn(2, 50, 3).double()
    normal = NormalEquations(2, 6, 3, torch.device("cpu"))
    for part in range(0, 50, 10):
        piece = slice(part, part + 10)
        normal.add(rows[:, piece], wanted[:, piece], wanted[:, piece])
    expected = torch.linalg.lstsq(rows, wanted).solution
    change, _ = normal.solve(1e-14)
    torch.testing.assert_close(change, expected, rtol=1e-6, atol=1e-8)
    assert normal.error(change) == pytest.approx(float((wanted - rows @ expected).square().sum()))
    spread = (wanted - wanted.mean(1, keepdim=True)).square().sum(1)
    torch.testing.assert_close(normal.target_variation(), spread)
    given = rows @ expected
    varies = (given - given.mean(1, keepdim=True)).square().sum(1)
    torch.testing.assert_close(normal.output_variation(expected), varies)


def test_a_singular_system_gets_a_larger_ridge() -> None:
    normal = NormalEquations(1, 3, 1, torch.device("cpu"))
    rows = torch.tensor([[[1e8, 1e8, 1e8]] * 4]).double()
    normal.add(rows, torch.ones(1, 4, 1).double(), torch.ones(1, 4, 1).double())
    change, ridge = normal.solve(1e-18)
    assert ridge > 1e-18
    assert change.isfinite().all()


def test_a_change_that_does_not_generalize_is_rejected() -> None:
    """A fit to noise explains nothing of other noise."""
    torch.manual_seed(1)
    fit, held = (NormalEquations(1, 20, 1, torch.device("cpu")) for _ in range(2))
    for part, count in ((fit, 22), (held, 2000)):
        noise = torch.randn(1, count, 1).double()
        part.add(torch.randn(1, count, 20).double(), noise, noise)
    change, ridge = best_change(fit, held, fit.merge(held), (1e-9, 1e-6))
    assert ridge is None
    assert not change.any()


@pytest.mark.parametrize("constant", [False, True])
def test_rows_and_normal_equations_give_the_same_change(constant: bool) -> None:
    """With fewer rows than columns, and with more."""
    for count in (5, 40):
        rows, wanted = torch.randn(2, count, 12).double(), torch.randn(2, count, 3).double()
        missing = wanted - torch.randn(2, 1, 3).double()
        kept: list[Equations] = []
        for kind in (NormalEquations, RowEquations):
            one, other = (kind(2, 12, 3, torch.device("cpu"), constant=constant) for _ in range(2))
            one.add(rows[:, :3], wanted[:, :3], missing[:, :3])
            other.add(rows[:, 3:], wanted[:, 3:], missing[:, 3:])
            kept.append(one.merge(other))
        normal, few = kept
        expected, _ = normal.solve(1e-3)
        change, _ = few.solve(1e-3)
        torch.testing.assert_close(change, expected)
        assert few.error(change) == pytest.approx(normal.error(change))
        assert few.squared_residual == pytest.approx(normal.squared_residual)
        matrix = torch.randn(2, 12, 3).double()
        torch.testing.assert_close(few.output_variation(matrix), normal.output_variation(matrix))
        torch.testing.assert_close(few.target_variation(), normal.target_variation())


def test_inputs_that_vary_little_around_a_large_mean() -> None:
    """Wide layers are multiplied in float32, which must not round off what varies."""
    torch.manual_seed(0)
    rows = 1e-3 * torch.randn(1, 6000, 400) + torch.rand(400)
    targets = (rows.double() - rows.double().mean(1)) @ torch.randn(400, 4).double()
    targets = targets / targets.std() + 0.05 * torch.randn_like(targets) + 3
    parts: list[NormalEquations] = []
    for part in (slice(0, 4500), slice(4500, None)):
        equations = NormalEquations(1, 400, 4, torch.device("cpu"), constant=True)
        equations.add(rows[:, part], targets[:, part], targets[:, part])
        parts.append(equations)
    both = parts[0].merge(parts[1])
    change, _ = best_change(*parts, both, [1e-9, 1e-6, 1e-3])
    columns = torch.cat([rows, torch.ones(1, 6000, 1)], 2).double()
    left = float((targets - columns @ change).square().mean())
    assert left < 0.05**2
    assert both.error(change) == pytest.approx(left * targets.numel(), rel=1e-3)


def test_rows_that_are_not_finite_change_nothing() -> None:
    for kind in (NormalEquations, RowEquations):
        equations: Equations = kind(1, 4, 2, torch.device("cpu"))
        rows = torch.randn(1, 9, 4).double()
        rows[0, 3, 2] = torch.inf
        equations.add(rows, torch.randn(1, 9, 2).double(), torch.randn(1, 9, 2).double())
        change, ridge = equations.solve(1e-6)
        assert ridge == float("inf")
        assert change.shape == (1, 4, 2)
        assert not change.any()
