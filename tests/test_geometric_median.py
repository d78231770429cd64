"""The exact geometric median, Eq. 3 and 5: where it must lie, and that forces cancel there."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.filters import normal
from torch import Tensor

from fpgm import criteria
from fpgm.errors import RequestError


def pull(points: Tensor, median: Tensor) -> float:
    """Compute the gradient norm at the median, less the number of points there; 0 is optimal."""
    offsets = points.double() - median.double()
    distances = offsets.norm(dim=1)
    away = distances > 0
    gradient = (offsets[away] / distances[away, None]).sum(0).norm()
    return max(0.0, float(gradient) - int((~away).sum()))


def test_three_points_on_a_line_have_the_middle_one() -> None:
    points = torch.tensor([[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]])
    assert criteria.geometric_median(points).tolist() == [1, 1]


def test_an_obtuse_triangle_has_its_corner_and_an_equilateral_one_its_centre() -> None:
    obtuse = torch.tensor([[0.0, 0.0], [1.0, 0.2], [-1.0, 0.2]])  # 157 degrees at the origin
    torch.testing.assert_close(criteria.geometric_median(obtuse), torch.zeros(2))
    height = math.sqrt(3)
    equilateral = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, height]])
    centre = torch.tensor([0.0, height / 3])
    torch.testing.assert_close(criteria.geometric_median(equilateral), centre)


def test_a_right_triangle_sees_its_sides_under_120_degrees() -> None:
    points = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]]).double()
    median = criteria.geometric_median(points)
    a, b, c = torch.nn.functional.normalize(points - median, dim=1)
    expected = torch.full((3,), -0.5, dtype=torch.float64)
    torch.testing.assert_close(torch.stack([a @ b, b @ c, c @ a]), expected)


def test_a_majority_of_equal_points_is_the_median() -> None:
    points = torch.tensor([[2.0, 7.0]] * 3 + [[0.0, 0.0], [9.0, 1.0]])
    assert criteria.geometric_median(points).tolist() == [2, 7]
    assert criteria.geometric_median(points[:3]).tolist() == [2, 7]


def test_the_mean_of_a_lopsided_cross_is_a_point_but_not_the_median() -> None:
    # Plain Weiszfeld starts at the mean, here a given point, and would divide by zero.
    points = torch.tensor([[0.0, 0.0], [8.0, 0.0], [-2.0, 1.0], [-3.0, -1.0], [-3.0, 0.0]])
    assert points.mean(0).tolist() == [0, 0]
    median = criteria.geometric_median(points.double())
    assert pull(points, median) < 1e-6
    assert median[0] < -0.1


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 2**16), st.sampled_from([0.0, 1e4]))
@settings(max_examples=60, deadline=None)
def test_the_unit_vectors_cancel_at_the_median(n: int, d: int, seed: int, offset: float) -> None:
    points = offset + normal(n, d, seed=seed).double()
    assert pull(points, criteria.geometric_median(points)) < 1e-4 * n


def test_the_median_of_no_points_is_refused() -> None:
    with pytest.raises(RequestError) as error:
        criteria.geometric_median(torch.ones(0, 2))
    assert str(error.value) == "A geometric median needs at least one point: points is empty."


def test_exact_measures_the_distance_to_the_median() -> None:
    filters = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [4.0, 5.0], [1.0, 1.0]])
    distances = criteria.exact(filters)
    median = criteria.geometric_median(filters)
    torch.testing.assert_close(distances, (filters - median).norm(dim=1))
    assert criteria.lowest(distances, 1) == [5]


def test_the_most_replaceable_filter_is_nearest_to_a_median_that_is_a_filter() -> None:
    filters = torch.cat([normal(20, 6), torch.zeros(1, 6)])
    filters = torch.cat([filters, -filters[:20]])  # symmetric about the zero filter
    assert criteria.lowest(criteria.fpgm(filters), 1) == [20]
    assert criteria.lowest(criteria.exact(filters), 1) == [20]
