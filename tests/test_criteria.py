"""Criteria other than Eq. 7, their names, the choice by score, and bad requests."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from tests.helpers.filters import normal
from torch import Tensor

from fpgm import criteria
from fpgm.errors import ModelError, RequestError


def message(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


# Norms, batch-norm scales, chance


def test_norms_are_worked_out_by_hand() -> None:
    filters = torch.tensor([[3.0, -4.0], [0.0, 0.0], [-1.0, 1.0]])
    assert criteria.l1(filters).tolist() == [7, 0, 2]
    torch.testing.assert_close(criteria.l2(filters), torch.tensor([5, 0, math.sqrt(2)]))


def test_a_norm_scale_counts_by_size_not_sign() -> None:
    assert criteria.bn_scale(torch.tensor([[-2.0], [0.5], [0.0]])).tolist() == [2, 0.5, 0]


def test_random_is_repeatable_and_depends_on_its_seed_only() -> None:
    first = criteria.random(normal(50, 3), seed=7)
    assert torch.equal(first, criteria.random(normal(50, 8, seed=1), seed=7))
    assert not torch.equal(first, criteria.random(normal(50, 3), seed=8))
    assert sorted(first.tolist()) == list(range(50))


def test_random_does_not_use_the_global_generator() -> None:
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


def test_mix_is_all_norm_at_1_and_all_median_at_0() -> None:
    filters = normal(30, 5)
    norms, sums = criteria.l2(filters), criteria.fpgm(filters)
    assert torch.equal(criteria.mix(filters, 1.0).argsort(), norms.argsort())
    assert torch.equal(criteria.mix(filters, 0.0).argsort(), sums.argsort())


def test_the_fraction_of_a_mix_is_part_of_its_name() -> None:
    filters = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    for ratio in (0.0, 0.5, 1.0):
        given = criteria.resolve(f"mix={ratio}")(filters, 0.4)
        assert torch.equal(given, criteria.mix(filters, ratio * 0.4))
    assert torch.equal(criteria.resolve("mix")(filters, 0.4), criteria.mix(filters, 0.3))
    for bad in ("mix=2", "mix=x", "mix=nan"):
        with pytest.raises(RequestError, match="mix= takes a fraction from 0 to 1"):
            criteria.resolve(bad)
    with pytest.raises(RequestError, match="Unknown criterion 'fpgm=1'"):
        criteria.resolve("fpgm=1")


@pytest.mark.parametrize(
    ("fraction", "norm_count"), [(0.29, 15), (0.288, 14), (0.3, 15), (0.01, 1), (0.009, 0)]
)
def test_mix_rounds_half_up(fraction: float, norm_count: int) -> None:
    norms = torch.arange(1.0, 51.0)[:, None]  # 50 * 0.29 is 14.5
    scores = criteria.mix(norms, fraction)
    assert scores[:norm_count].tolist() == list(range(norm_count))
    assert scores[norm_count] != norm_count


def test_mix_refuses_what_is_no_fraction() -> None:
    with pytest.raises(RequestError) as error:
        criteria.mix(torch.ones(2, 2), 30)
    assert message(error) == "norm_fraction is 30: give a fraction from 0 to 1."


# Choosing


def test_of_equal_scores_the_first_are_removed() -> None:
    assert criteria.lowest(torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]), 3) == [0, 1, 4]
    assert criteria.lowest(torch.zeros(5000), 3) == [0, 1, 2]
    assert criteria.lowest(torch.zeros(4), 0) == []


def test_half_precision_scores_are_ranked_exactly() -> None:
    assert criteria.lowest(torch.tensor([2.0, 1.0, 3.0], dtype=torch.bfloat16), 2) == [0, 1]


@pytest.mark.parametrize("count", [-1, 4])
def test_lowest_refuses_counts_out_of_range(count: int) -> None:
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
def test_names_resolve_to_their_functions(name: str, function: Callable[[Tensor], Tensor]) -> None:
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
            "Filters have shape [4]: give [n, d], one row each.",
        ),
    ],
)
def test_bad_requests(call: Callable[[], object], expected: str) -> None:
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
def test_a_users_criterion_has_to_return_one_finite_score_per_filter(
    criterion: Callable[[Tensor], Tensor], expected: str
) -> None:
    with pytest.raises(RequestError) as error:
        criteria.score(criteria.resolve(criterion), torch.zeros(4, 3), 0.4, "conv1")
    assert message(error) == expected


def test_a_users_criterion_gets_float32_and_may_return_integers() -> None:
    recorded: list[torch.dtype] = []

    def largest_weight(filters: Tensor) -> Tensor:
        recorded.append(filters.dtype)
        return filters.argmax(1)

    filters = torch.eye(3, dtype=torch.bfloat16)
    scores = criteria.score(criteria.resolve(largest_weight), filters, 0.4, "conv1")
    assert scores.tolist() == [0, 1, 2]
    assert recorded == [torch.float32]


@pytest.mark.parametrize("name", criteria.NAMES)
def test_scores_come_as_float64_on_the_cpu(name: str) -> None:
    scores = criteria.score(criteria.resolve(name), normal(10, 1).half(), 0.4, "conv1")
    assert scores.dtype == torch.float64
    assert scores.device.type == "cpu"
    assert scores.shape == (10,)


def test_imaginary_parts_of_filters_count() -> None:
    filters = torch.tensor([[1 + 4j, 2.0], [1 - 4j, 2.0], [0.0, 3j]])
    parts = torch.view_as_real(filters).flatten(1)
    for criterion in (criteria.fpgm, criteria.l1, criteria.l2):
        assert torch.equal(criterion(filters), criterion(parts))
