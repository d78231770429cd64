"""Criteria against values worked out by hand and against a float64 brute force."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fpgm import criteria
from fpgm.errors import ModelError, RequestError


def brute(filters: Tensor, distance: str = "l2") -> Tensor:
    """Eq. 7 spelled out in float64, one filter after the other."""
    rows = filters.double()
    if distance == "cosine":
        norms = rows.norm(dim=1, keepdim=True)
        rows = rows / torch.where(norms == 0, 1, norms)
        return torch.stack([(rows - row).square().sum() / 2 for row in rows])
    order = {"l1": 1, "l2": 2}[distance]
    return torch.stack([(rows - row).norm(p=order, dim=1).sum() for row in rows])


def assert_close(scores: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    torch.testing.assert_close(scores.double(), expected, rtol=relative, atol=1e-30)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def message(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


# Eq. 7


@pytest.mark.parametrize("distance", ["l2", "l1"])
def test_sums_on_a_line_are_worked_out_by_hand(distance: str) -> None:
    filters = torch.tensor([[1.0], [-1.0], [3.0], [-3.0]])
    assert criteria.fpgm(filters, distance).tolist() == [8, 8, 12, 12]


def test_the_three_distances_differ_on_a_right_triangle() -> None:
    filters = torch.tensor([[3.0, 0.0], [0.0, 4.0], [3.0, 4.0]])
    assert criteria.fpgm(filters).tolist() == [9, 8, 7]  # sides 5, 4 and 3
    assert criteria.fpgm(filters, "l1").tolist() == [11, 10, 7]  # sides 7, 4 and 3
    cosine = criteria.fpgm(filters, "cosine")  # cosines 0, 3/5 and 4/5
    assert_close(cosine, torch.tensor([1.4, 1.2, 0.6], dtype=torch.float64), 1e-6)


def test_a_filter_and_its_negative_are_two_norms_apart() -> None:
    pair = torch.tensor([[3.0, 4.0], [-3.0, -4.0]])
    assert criteria.fpgm(pair).tolist() == [10, 10]
    assert criteria.fpgm(pair.abs()).tolist() == [0, 0]


@pytest.mark.parametrize("distance", criteria.DISTANCES)
def test_equal_filters_are_no_distance_apart(distance: str) -> None:
    filters = normal(1, 9).repeat(5, 1)
    scores = criteria.fpgm(filters, distance)
    torch.testing.assert_close(scores, torch.zeros(5), rtol=0, atol=1e-15)


@pytest.mark.parametrize("distance", criteria.DISTANCES)
def test_one_filter_has_no_others_and_none_have_no_scores(distance: str) -> None:
    assert criteria.fpgm(torch.ones(1, 3), distance).tolist() == [0]
    assert criteria.fpgm(torch.ones(0, 3), distance).tolist() == []


def test_convolution_weights_count_as_rows() -> None:
    weights = normal(6, 2, 3, 3)
    torch.testing.assert_close(criteria.fpgm(weights), criteria.fpgm(weights.flatten(1)))


def layers() -> dict[str, Tensor]:
    """300 filters each: more than one block of rows, and every path for close pairs."""
    base, noise = normal(300, 64), normal(300, 64, seed=1)
    twins = base.clone()
    twins[150:] = twins[:150] + 1e-4 * noise[150:]
    dead = base.clone()
    dead[::3] = 0
    nearly_dead = base.clone()
    nearly_dead[::3] *= 1e-12
    return {
        "diverse": base,
        "common offset": 1000 + 0.01 * base,
        "skewed offset": torch.arange(64.0) * 100 + 0.001 * base,
        "near-duplicate pairs": twins,
        "eight clusters": base[:8].repeat(38, 1)[:300] + 1e-3 * noise,
        "clusters under an offset": 500 + base[:4].repeat(75, 1) + 1e-3 * noise,
        "soft-pruned": dead,
        "nearly dead": nearly_dead,
        "huge": base * 1e30,
        "tiny": base * 1e-30,
        "one outlier": torch.cat([base[:-1], 1e4 * base[-1:]]),
        "few weights": base[:, :1].contiguous(),
        "transposed in memory": normal(64, 300).T,
    }


@pytest.mark.parametrize("distance", criteria.DISTANCES)
@pytest.mark.parametrize("name", list(layers()))
def test_scores_are_those_of_float64_brute_force(name: str, distance: str) -> None:
    filters = layers()[name]
    before = filters.clone()
    assert_close(criteria.fpgm(filters, distance), brute(filters, distance))
    assert torch.equal(filters, before)


def test_reading_distances_off_a_gram_matrix_alone_would_have_failed() -> None:
    filters = layers()["common offset"]
    plain = torch.cdist(filters, filters, compute_mode="use_mm_for_euclid_dist").sum(1)
    assert (plain / brute(filters) - 1).abs().max() > 0.1


@given(
    count=st.integers(1, 20),
    size=st.integers(1, 12),
    offset=st.sampled_from([0.0, 1.0, 1e3, 1e6]),
    spread=st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 1e3]),
    clusters=st.integers(1, 20),
    distance=st.sampled_from(criteria.DISTANCES),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150, deadline=None)
def test_scores_are_those_of_brute_force_whatever_the_spread(
    count: int, size: int, offset: float, spread: float, clusters: int, distance: str, seed: int
) -> None:
    centres = normal(clusters, size, seed=seed)[torch.arange(count) % clusters]
    filters = offset + centres + spread * normal(count, size, seed=seed + 1)
    expected = brute(filters, distance)
    scores = criteria.fpgm(filters, distance).double()
    # A cosine distance below 1e-26 is rounding error in float64 too.
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-26)


@given(st.permutations(range(12)), st.sampled_from(criteria.DISTANCES))
@settings(max_examples=30, deadline=None)
def test_shuffled_filters_get_shuffled_scores(order: list[int], distance: str) -> None:
    filters = normal(12, 5)
    shuffled = criteria.fpgm(filters[order], distance)
    torch.testing.assert_close(shuffled, criteria.fpgm(filters, distance)[order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scored_as_float32(dtype: torch.dtype) -> None:
    filters = (100 * normal(40, 30)).to(dtype)  # squares overflow float16
    scores = criteria.fpgm(filters)
    assert scores.dtype == torch.float32
    assert_close(scores, brute(filters))


def test_float64_keeps_its_digits() -> None:
    filters = 1e6 + 1e-6 * normal(40, 30).double()
    scores = criteria.fpgm(filters)
    assert scores.dtype == torch.float64
    assert_close(scores, brute(filters), 1e-10)


@pytest.mark.parametrize("distance", criteria.DISTANCES)
def test_a_float64_model_is_left_as_it_was(distance: str) -> None:
    filters = normal(9, 4).double()
    before = filters.clone()
    criteria.fpgm(filters, distance)
    criteria.exact(filters)
    assert torch.equal(filters, before)


def test_parameters_are_scored_without_a_graph() -> None:
    parameter = torch.nn.Parameter(normal(5, 4))
    for name in criteria.NAMES:
        assert not criteria.resolve(name)(parameter, 0.4).requires_grad


def test_reduced_precision_for_training_does_not_reach_the_scores() -> None:
    filters = normal(40, 64)
    expected = criteria.fpgm(filters)
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten.addmm_.default:
                seen.append(torch.backends.mkldnn.matmul.fp32_precision)
            return func(*args, **(kwargs or {}))

    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), Watch():
            scores = criteria.fpgm(filters)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == ["ieee"]
    assert torch.equal(scores, expected)


class Largest(TorchDispatchMode):
    """Size of the biggest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("distance", criteria.DISTANCES)
@pytest.mark.parametrize("name", ["diverse", "near-duplicate pairs", "eight clusters"])
def test_no_tensor_outgrows_pairs_plus_weights(name: str, distance: str) -> None:
    filters = layers()[name]
    n, d = filters.shape
    with Largest() as largest:
        criteria.fpgm(filters, distance)
    assert n * d <= largest.numel * 4  # it was watching
    assert largest.numel <= 2 * (n * n + n * d) < n * n * d / 20


# The exact geometric median


def pull(points: Tensor, median: Tensor) -> float:
    """Size of the gradient at the median, less what points on the spot can hold; 0 is optimal."""
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


def test_most_points_on_one_spot_hold_the_median_there() -> None:
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


def test_no_points_have_no_median() -> None:
    with pytest.raises(RequestError) as error:
        criteria.geometric_median(torch.ones(0, 2))
    assert message(error) == "No points have no geometric median: give at least one."


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


# Norms, batch-norm scales, chance


def test_norms_are_worked_out_by_hand() -> None:
    filters = torch.tensor([[3.0, -4.0], [0.0, 0.0], [-1.0, 1.0]])
    assert criteria.l1(filters).tolist() == [7, 0, 2]
    torch.testing.assert_close(criteria.l2(filters), torch.tensor([5, 0, math.sqrt(2)]))


def test_a_norm_scale_counts_by_size_not_sign() -> None:
    assert criteria.bn_scale(torch.tensor([[-2.0], [0.5], [0.0]])).tolist() == [2, 0.5, 0]


def test_chance_is_repeatable_and_follows_its_seed_only() -> None:
    first = criteria.random(normal(50, 3), seed=7)
    assert torch.equal(first, criteria.random(normal(50, 8, seed=1), seed=7))
    assert not torch.equal(first, criteria.random(normal(50, 3), seed=8))
    assert sorted(first.tolist()) == list(range(50))


def test_chance_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    criteria.random(torch.zeros(5, 1))
    assert torch.equal(torch.random.get_rng_state(), before)


# FPGM-mix


def test_mix_takes_30_percent_by_norm_then_10_percent_by_median() -> None:
    filters = torch.tensor(
        [[9.0], [1.0], [8.0], [-2.0], [7.0], [3.0], [6.0], [10.0], [20.0], [5.0]]
    )
    # Norms 1, 2 and 3 go: filters 1, 3 and 5. Of 5 6 7 8 9 10 20, in the middle is 8: filter 2.
    scores = criteria.resolve("mix")(filters, 0.4)
    assert [scores[i].item() for i in (1, 3, 5, 2)] == [0, 1, 2, 3]
    assert criteria.lowest(scores, 4) == [1, 2, 3, 5]
    # Among all ten the middle is 6 or 7: FPGM must not see those that left.
    assert criteria.lowest(criteria.fpgm(filters), 2) == [4, 6]


def test_mix_is_all_norm_at_share_1_and_all_median_at_share_0() -> None:
    filters = normal(30, 5)
    norms, sums = criteria.l2(filters), criteria.fpgm(filters)
    assert torch.equal(criteria.mix(filters, 1.0).argsort(), norms.argsort())
    assert torch.equal(criteria.mix(filters, 0.0).argsort(), sums.argsort())


@pytest.mark.parametrize(
    ("share", "by_norm"), [(0.29, 15), (0.288, 14), (0.3, 15), (0.01, 1), (0.009, 0)]
)
def test_mix_rounds_half_up(share: float, by_norm: int) -> None:
    norms = torch.arange(1.0, 51.0)[:, None]  # 50 * 0.29 is 14.5
    scores = criteria.mix(norms, share)
    assert scores[:by_norm].tolist() == list(range(by_norm))
    assert scores[by_norm] != by_norm


def test_mix_refuses_what_is_no_share() -> None:
    with pytest.raises(RequestError) as error:
        criteria.mix(torch.ones(2, 2), 30)
    assert message(error) == "norm_share is a share between 0 and 1; got 30."


# Choosing


def test_of_equal_scores_the_first_go() -> None:
    assert criteria.lowest(torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]), 3) == [0, 1, 4]
    assert criteria.lowest(torch.zeros(5000), 3) == [0, 1, 2]
    assert criteria.lowest(torch.zeros(4), 0) == []


def test_half_precision_scores_are_told_apart_as_they_are() -> None:
    assert criteria.lowest(torch.tensor([2.0, 1.0, 3.0], dtype=torch.bfloat16), 2) == [0, 1]


@pytest.mark.parametrize("count", [-1, 4])
def test_no_more_can_go_than_there_are(count: int) -> None:
    with pytest.raises(RequestError) as error:
        criteria.lowest(torch.zeros(3), count)
    assert message(error) == f"Cannot take the {count} lowest of 3 scores."


# Names and checks


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("fpgm", criteria.fpgm),
        ("exact", criteria.exact),
        ("l1", criteria.l1),
        ("l2", criteria.l2),
        ("bn", criteria.bn_scale),
        ("random", criteria.random),
        ("mix", lambda filters: criteria.mix(filters, 0.3)),
    ],
)
def test_a_name_stands_for_its_function(name: str, function: Callable[[Tensor], Tensor]) -> None:
    filters = normal(10, 1)
    assert torch.equal(criteria.resolve(name)(filters, 0.4), function(filters))
    assert torch.equal(criteria.resolve(function)(filters, 0.4), function(filters))


def test_every_name_resolves() -> None:
    assert all(callable(criteria.resolve(name)) for name in criteria.NAMES)


def test_distance_and_seed_reach_the_criterion() -> None:
    filters = normal(10, 6)
    by_l1 = criteria.resolve("fpgm", distance="l1")(filters, 0.4)
    assert torch.equal(by_l1, criteria.fpgm(filters, "l1"))
    seeded = criteria.resolve("random", seed=3)(filters, 0.4)
    assert torch.equal(seeded, criteria.random(filters, seed=3))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda: criteria.resolve("fpmg"),
            (
                "Unknown criterion 'fpmg' (did you mean 'fpgm'?): choose one of "
                "fpgm, exact, l1, l2, bn, random, mix, or give a function."
            ),
        ),
        (
            lambda: criteria.resolve("taylor"),
            (
                "Unknown criterion 'taylor': choose one of "
                "fpgm, exact, l1, l2, bn, random, mix, or give a function."
            ),
        ),
        (
            lambda: criteria.resolve("fpgm", distance="cosin"),
            "Unknown distance 'cosin' (did you mean 'cosine'?): choose one of l2, l1, cosine.",
        ),
        (
            lambda: criteria.fpgm(torch.ones(2, 2), distance="max"),
            "Unknown distance 'max': choose one of l2, l1, cosine.",
        ),
        (
            lambda: criteria.fpgm(torch.ones(4)),
            "Filters come as [n, d], one row each; got [4].",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    call: Callable[[], object], expected: str
) -> None:
    with pytest.raises(RequestError, match=f"^{re.escape(expected)}$"):
        call()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_broken_weights_are_named(bad: float, dtype: torch.dtype) -> None:
    filters = torch.ones(4, 3, dtype=dtype)
    filters[2, 1] = bad
    with pytest.raises(ModelError) as error:
        criteria.score(criteria.resolve("fpgm"), filters, 0.4, "layer1.0.conv1")
    assert message(error) == (
        "Layer 'layer1.0.conv1' has NaN or infinite weights: fix or reload them before pruning."
    )


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        (
            lambda filters: filters,
            (
                "Scores of layer 'conv1' have shape [4, 3] for 4 filters: "
                "a criterion returns one finite score per filter, shape [4]."
            ),
        ),
        (
            lambda filters: filters.sum(1).log(),
            (
                "Scores of layer 'conv1' are not all finite: "
                "a criterion returns one finite score per filter."
            ),
        ),
        (
            lambda filters: filters.sum(1).tolist(),
            (
                "Scores of layer 'conv1' are a list: "
                "a criterion returns one finite score per filter, as a tensor."
            ),
        ),
    ],
)
def test_a_users_criterion_is_held_to_one_finite_score_a_filter(
    criterion: Callable[[Tensor], Tensor], expected: str
) -> None:
    with pytest.raises(RequestError) as error:
        criteria.score(criteria.resolve(criterion), torch.zeros(4, 3), 0.4, "conv1")
    assert message(error) == expected


def test_a_users_criterion_sees_float32_and_may_answer_in_integers() -> None:
    seen: list[torch.dtype] = []

    def largest_weight(filters: Tensor) -> Tensor:
        seen.append(filters.dtype)
        return filters.argmax(1)

    filters = torch.eye(3, dtype=torch.bfloat16)
    scores = criteria.score(criteria.resolve(largest_weight), filters, 0.4, "conv1")
    assert scores.tolist() == [0, 1, 2]
    assert seen == [torch.float32]


@pytest.mark.parametrize("name", criteria.NAMES)
def test_scores_come_as_float64_on_the_cpu(name: str) -> None:
    scores = criteria.score(criteria.resolve(name), normal(10, 1).half(), 0.4, "conv1")
    assert scores.dtype == torch.float64
    assert scores.device.type == "cpu"
    assert scores.shape == (10,)


def test_pairs_at_the_threshold_of_a_second_look_count_once_on_both_sides() -> None:
    """Products of a tile with itself are not symmetric to the last bit."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        base = torch.randn(1, 64, generator=generator)
        step = torch.randn(96, 64, generator=generator) * float(base.norm()) / 64**0.5
        rows = base + step * (criteria.NEAR**0.5)
        exact = torch.cdist(rows.double(), rows.double()).sum(1)
        assert torch.allclose(criteria.fpgm(rows).double(), exact, rtol=1e-5)


def test_memory_stays_in_tiles() -> None:
    sides = [(a.stop - a.start, b.stop - b.start) for a, b in criteria._tiles(0, 5000)]
    assert max(max(pair) for pair in sides) <= criteria.LARGEST_TILE
    counted = torch.zeros(300, 300)
    for a, b in criteria._tiles(0, 300):
        counted[a, b] += 1
        if a != b:
            counted[b, a] += 1
    assert bool((counted == 1).all())
