"""Equal shares on components small enough to solve by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from fpgm.planning.equal_split import Component, components
from fpgm.tracing.grouping import ChannelGroup


def pool(*units: int) -> ChannelGroup:
    return ChannelGroup(f"pool{units[0]}", torch.tensor(units), ())


def solve(
    pools: list[ChannelGroup], blocks: list[list[list[int]]], goals: tuple[int, ...]
) -> list[int]:
    """How many units of each pool go."""
    (part,) = components(pools, [torch.tensor(rows) for rows in blocks])
    removed = set(part.first(part.solve(goals, [len(p.units) - 1 for p in pools])).tolist())
    return [len(removed & set(p.units.tolist())) for p in pools]


def only(pools: list[ChannelGroup], *blocks: list[list[int]]) -> Component:
    (part,) = components(pools, [torch.tensor(rows) for rows in blocks])
    return part


def test_without_balances_every_group_is_decided_separately() -> None:
    parts = components([pool(0, 1, 2), pool(3, 4, 5, 6)], [])
    assert [len(part.groups) for part in parts] == [1, 1]
    assert [part.solve((2,), (7,)) for part in parts] == [(2,), (2,)]


def test_a_balance_links_the_pools_it_touches_and_no_others() -> None:
    a, b, c = pool(0, 1), pool(2, 3), pool(4, 5)
    parts = components([a, b, c], [torch.tensor([[0, 1], [4, 5]])])
    assert sorted([p.name for p in part.groups] for part in parts) == [
        ["pool0", "pool4"],
        ["pool2"],
    ]


def test_both_halves_of_a_chunk_lose_equally_many() -> None:
    """chunk(2) of eight channels: four and four, so an even number goes, half from each."""
    halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
    part = only([pool(*range(8))], halves)
    assert sorted(map(len, part.members)) == [4, 4]
    assert part.solve((4,), (7,)) == (2, 2)
    three = part.solve((3,), (7,))  # cannot be: two or four, both as near
    assert three in ((1, 1), (2, 2))


def test_two_layers_that_feed_the_halves_lose_equally_many() -> None:
    layers = [pool(0, 1, 2, 3), pool(4, 5, 6, 7)]
    halves = [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert solve(layers, halves, (2, 2)) == [2, 2]
    uneven = solve(layers, halves, (1, 3))
    assert uneven[0] == uneven[1]
    assert 1 <= uneven[0] <= 3


def test_a_unit_that_counts_twice_goes_against_two() -> None:
    """Three units of two channels each beside six of one: 2a = b."""
    pools = [pool(0, 1, 2), pool(3, 4, 5, 6, 7, 8)]
    blocks = [[[0, 0, 1, 1, 2, 2], [3, 4, 5, 6, 7, 8]]]
    assert solve(pools, blocks, (1, 2)) == [1, 2]
    removed = solve(pools, blocks, (1, 3))
    assert removed == [1, 2]


def test_what_would_empty_a_layer_falls_back_to_fewer() -> None:
    """Two units of two channels beside four of one: (2, 4) is nearest but leaves nothing."""
    pools = [pool(0, 1), pool(2, 3, 4, 5)]
    assert solve(pools, [[[0, 0, 1, 1], [2, 3, 4, 5]]], (1, 3)) == [1, 2]
    assert solve(pools, [[[0, 0, 1, 1], [2, 3, 4, 5]]], (2, 4)) == [1, 2]


def test_unsolvable_counts_are_not_pruned() -> None:
    """One unit of two channels beside two of one: all of them or none."""
    assert solve([pool(0), pool(1, 2)], [[[0, 0], [1, 2]]], (0, 1)) == [0, 0]


def test_channels_that_are_frozen_do_not_count() -> None:
    """Labels of no pool (here 8 and 9) stay whatever is chosen: the equation is about the rest."""
    blocks = [[[0, 1, 2, 3, 8], [4, 5, 6, 7, 9]]]
    assert solve([pool(*range(8))], blocks, (4,)) == [4]


def test_equal_numbers_but_each_half_its_own_lowest() -> None:
    part = only([pool(*range(8))], [[0, 1, 2, 3], [4, 5, 6, 7]])
    scores: Tensor = torch.tensor([9.0, 1, 2, 8, 3, 4, 7, 6])
    # The four lowest of all would be 1, 2, 4, 5: the same here, two of each half.
    assert sorted(part.lowest((2, 2), scores).tolist()) == [1, 2, 4, 5]
    # The two lowest of all are 1 and 2, both of the first half; one of each goes instead.
    assert sorted(part.lowest((1, 1), scores).tolist()) == [1, 4]
