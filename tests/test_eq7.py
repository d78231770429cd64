"""Eq. 7: sums of distances against values worked out by hand and a float64 brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.filters import brute, normal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fpgm import criteria
from fpgm.utils import distances
from fpgm.utils.precision import full_precision


@pytest.fixture(params=["directly", "by a Gram matrix"], autouse=True)
def every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers are measured directly, large ones by a Gram matrix: test both on the same."""
    if request.param != "directly":
        monkeypatch.setattr(distances, "MAX_DIRECT_PRODUCTS", 0)


def assert_close(scores: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    torch.testing.assert_close(scores.double(), expected, rtol=relative, atol=1e-30)


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
def test_scores_equal_float64_brute_force(name: str, distance: str) -> None:
    filters = layers()[name]
    before = filters.clone()
    assert_close(criteria.fpgm(filters, distance), brute(filters, distance))
    assert torch.equal(filters, before)


def test_distances_from_only_a_gram_matrix_would_be_wrong() -> None:
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
def test_scores_equal_brute_force_for_any_spread(
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
def test_a_float64_model_is_unchanged(distance: str) -> None:
    filters = normal(9, 4).double()
    before = filters.clone()
    criteria.fpgm(filters, distance)
    criteria.exact(filters)
    assert torch.equal(filters, before)


def test_parameters_are_scored_without_a_graph() -> None:
    parameter = torch.nn.Parameter(normal(5, 4))
    for name in criteria.NAMES:
        assert not criteria.resolve(name)(parameter, 0.4).requires_grad


PRODUCT = torch.ops.mkldnn._linear_pointwise.default


def test_reduced_precision_does_not_change_scores() -> None:
    filters = normal(160, 128)  # large enough for a product
    expected = criteria.fpgm(filters)
    recorded: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func in (PRODUCT, torch.ops.aten.addmm.default):
                recorded.append(torch.backends.mkldnn.matmul.fp32_precision)
            return func(*args, **(kwargs or {}))

    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), Watch():
            scores = criteria.fpgm(filters)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert recorded == ["ieee"]
    assert torch.equal(scores, expected)


def test_inherited_precision_settings_stay_inherited() -> None:
    backends = torch.backends
    if not hasattr(backends, "fp32_precision"):
        pytest.skip("this torch has one setting for all")
    before, item = backends.fp32_precision, backends.cuda.matmul.fp32_precision
    backends.fp32_precision = "tf32"
    backends.cuda.matmul.fp32_precision = "none"  # another test may have pinned it
    try:
        with full_precision():
            assert backends.cuda.matmul.fp32_precision == "ieee"
        assert backends.cuda.matmul.fp32_precision == "tf32"
        backends.fp32_precision = "ieee"
        assert backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        backends.fp32_precision, backends.cuda.matmul.fp32_precision = before, item


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

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


def test_pairs_at_the_threshold_of_a_second_look_count_once_on_both_sides() -> None:
    """Products of a tile with itself are not symmetric to the last bit.

    Two filters are moved across the distance below which a pair is measured again, in steps of a
    last bit: at some of them the two sides would disagree whether that is so.
    """
    for seed in range(24):
        rows = normal(7, 9, seed=seed)
        direction = torch.nn.functional.normalize(normal(1, 9, seed=seed + 1000)[0], dim=0)

        def moved(step: float, rows: Tensor = rows, direction: Tensor = direction) -> Tensor:
            return torch.cat([rows[:6], (rows[0] + step * direction * rows[0].norm())[None]])

        low, high = 0.05, 0.5
        for _ in range(40):
            middle = (low + high) / 2
            first, last = moved(middle).double()[[0, 6]]
            near = (first - last).square().sum() < distances.NEAR_FRACTION * (
                first @ first + last @ last
            )
            low, high = (middle, high) if near else (low, middle)
        for bits in range(-60, 61):
            filters = moved(low * (1 + bits * 3e-8))
            assert_close(criteria.fpgm(filters), brute(filters))


def test_memory_stays_in_tiles() -> None:
    sides = [(a.stop - a.start, b.stop - b.start) for a, b in distances._tiles(0, 5000)]
    assert max(max(pair) for pair in sides) <= distances.LARGEST_TILE
    counted = torch.zeros(300, 300)
    for a, b in distances._tiles(0, 300):
        counted[a, b] += 1
        if a != b:
            counted[b, a] += 1
    assert bool((counted == 1).all())
