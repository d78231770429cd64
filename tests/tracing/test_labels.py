"""Label fields: what views do to them, and how many elements of a tensor they leave."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fpgm.tracing import labels as lb


def channels(count: int, ndim: int = 4, first: int = 1) -> Tensor:
    """Labels first, first + 1, … along dim 1."""
    return lb.along(torch.arange(first, first + count), ndim, 1)


def test_splitting_channels_into_groups_keeps_batch_and_space() -> None:
    results = lb.reshape(channels(6), (8, 6, 5, 7), (8, 2, 3, 5, 7))
    assert results.shape == (1, 2, 3, 1, 1)
    assert results.reshape(2, 3).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_flattening_repeats_each_channel_once_a_pixel() -> None:
    results = lb.reshape(channels(3), (2, 3, 2, 2), (2, 12))
    assert results.tolist() == [[1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]]


def test_folding_channels_into_the_batch_repeats_the_row_once_a_sample() -> None:
    results = lb.reshape(channels(3, 3), (2, 3, 5), (6, 5))
    assert results.reshape(-1).tolist() == [1, 2, 3, 1, 2, 3]
    assert results.shape == (6, 1)


def test_channel_shuffle_is_a_view_a_transpose_and_a_view() -> None:
    split = lb.reshape(channels(6), (1, 6, 4, 4), (1, 2, 3, 4, 4))
    results = lb.reshape(split.transpose(1, 2), (1, 3, 2, 4, 4), (1, 6, 4, 4))
    assert results.reshape(-1).tolist() == [1, 4, 2, 5, 3, 6]


@pytest.mark.parametrize(
    ("before", "after"),
    [((4, 6, 3, 5), (4, 2, 3, 15)), ((4, 6, 3, 5), (24, 15)), ((4, 6, 1, 1), (4, 6)),
     ((1, 6), (1, 6, 1, 1)), ((2, 6, 5), (3, 4, 5)), ((4, 6, 5), (4, 30))],
)  # fmt: skip
def test_a_reshaped_field_is_the_reshaped_tensor_of_labels(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    """The second path: label every element, reshape the whole tensor."""
    field = channels(6, len(before))
    assert torch.equal(
        lb.reshape(field, before, after).expand(after), field.expand(before).reshape(after)
    )


def test_shrink_gives_up_dims_that_distinguish_nothing() -> None:
    repeated = torch.tensor([[1, 1, 1], [2, 2, 2]])
    assert lb.shrink(repeated).tolist() == [[1], [2]]
    assert lb.shrink(repeated.T).tolist() == [[1, 2]]
    assert lb.shrink(torch.tensor([[1, 2], [2, 1]])).shape == (2, 2)
    assert lb.shrink(torch.full((3, 4), 7)).shape == (1, 1)


def test_tidy_drops_a_field_of_one_label() -> None:
    kept = lb.tidy([torch.full((3, 4), 7), channels(2, 2)])
    assert [f.tolist() for f in kept] == [[[1, 2]]]


def test_of_the_dims_of_a_split_axis_the_larger_follows_the_size() -> None:
    assert lb.varying_dim(torch.zeros(1, 2, 29, 1), (1, 2)) == 2
    assert lb.varying_dim(torch.zeros(1, 29, 2, 1), (1, 2)) == 1


def test_a_weight_keeps_its_rows_times_its_columns() -> None:
    rows = lb.along(torch.tensor([1, 2, 3, 4]), 4, 0)
    columns = lb.along(torch.tensor([5, 6, 7]), 4, 1)
    kept = _all_but(7, 1, 2, 3)  # one row of four stays, and two columns of three without label 6
    assert lb.kept_numel((rows, columns), (4, 3, 3, 3), kept) == 1 * 3 * 9
    kept[6] = False
    assert lb.kept_numel((rows, columns), (4, 3, 3, 3), kept) == 1 * 2 * 9
    assert lb.kept_numel((rows, columns), (4, 3, 3, 3), None) == 4 * 3 * 9


def test_a_grouped_weight_counts_columns_block_by_block() -> None:
    """Four filters in two groups; the first group reads channels 5, 6, the second 7, 8."""
    rows = lb.along(torch.tensor([1, 2, 3, 4]), 4, 0)
    reads = torch.tensor([[5, 6], [5, 6], [7, 8], [7, 8]]).reshape(4, 2, 1, 1)
    shape = (4, 2, 3, 3)
    # Half of each group's filters and half of what it reads: two filters of one channel.
    assert lb.kept_numel((rows, reads), shape, _all_but(8, 2, 4, 6, 7)) == 2 * 1 * 9
    # The second group as a whole: two filters of two channels.
    assert lb.kept_numel((rows, reads), shape, _all_but(8, 3, 4, 7, 8)) == 2 * 2 * 9


def _all_but(last: int, *removed: int) -> Tensor:
    kept = torch.ones(last + 1, dtype=torch.bool)
    kept[list(removed)] = False
    return kept
