"""Sums of distances from each row to all the others, in three metrics.

Only the l2 sums need all pairs. Those of small layers are computed directly. Those of large layers
come from a Gram matrix, one tile at a time, and pairs that are too close for that are computed
again. Rows are finite floats [n, d]; `criteria` uses the sums as scores.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache, lru_cache

import torch
from torch import Tensor

from fpgm.utils.precision import full_precision

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From rows a, rows b and a bias per row of b to a · bᵀ + bias."""

# A squared distance read off a Gram matrix is off by some 1e-7 of the squared norms it is the
# difference of. Below this share of them the pair is measured again, directly.
NEAR_FRACTION = 1 / 64

# Sides of the tiles the Gram matrix is computed in: on the diagonal smaller ones repeat less work
# but call more often, off it larger ones would leave the caches.
DIAGONAL_TILE = 192
LARGEST_TILE = 1024

# Up to this many multiplications (n · n · d), direct differences are faster than a Gram matrix.
MAX_DIRECT_PRODUCTS = 2**21

# Measured on one core: a pair costs eight times more when gathered than inside `pdist`.
GATHERING_COST = 8


def sum_l2(rows: Tensor) -> Tensor:
    """Sum Euclidean distances; cases that a Gram matrix computes badly are handled first."""
    norms = row_norms(rows)
    smallest, greatest = map(float, norms.aminmax())
    if not 2.0**-40 < greatest < 2.0**40:  # squares vanish or overflow
        largest = float(rows.abs().max())
        if largest == 0:
            return norms
        if not math.isfinite(largest):
            return torch.full_like(norms, math.nan)
        power = 2.0 ** max(-100, min(100, math.frexp(largest)[1]))
        return sum_l2(rows / power) * power
    if rows.device.type == "cpu" and len(rows) ** 2 * rows.shape[1] <= MAX_DIRECT_PRODUCTS:
        return _sum_l2_directly(rows)
    if smallest == 0:  # soft pruning leaves many: each adds the others' norm
        alive = norms.nonzero().squeeze(1)
        sums = norms.sum().expand(len(rows)).clone()
        sums[alive] = sum_l2(rows[alive]) + (len(rows) - len(alive)) * norms[alive]
        return sums
    # Only a common offset that dominates is worth a second copy of the filters.
    centre = rows.mean(0)
    if float(centre.square().sum()) > float(norms.square().mean()) / 2:
        centred = rows - centre
        centred -= centred.mean(0)  # the first mean carries the offset's rounding error
        return _sum_l2_by_gram(rows, centred, row_norms(centred))
    return _sum_l2_by_gram(rows, rows, norms)


def sum_l1(rows: Tensor) -> Tensor:
    """Sum l1 distances in n log n steps: each weight is sorted over the filters.

    The distance between two filters is the sum of the gaps between them, so a gap counts once for
    every filter on its other side. All terms are positive: nothing cancels.
    """
    n = len(rows)
    below = torch.arange(1, n, dtype=rows.dtype, device=rows.device)  # filters left of each gap
    sums = rows.new_zeros(n)
    at_once = max(1, 2**20 // n)
    for start in range(0, rows.shape[1], at_once):
        values, order = rows[:, start : start + at_once].T.contiguous().sort(dim=1)  # [weights, n]
        gaps = values.diff(dim=1)
        to_lower, to_higher = values.new_zeros(2, *values.shape)
        torch.cumsum(gaps * below, dim=1, out=to_lower[:, 1:])
        to_higher[:, :-1] = (gaps * below.flip(0)).flip(1).cumsum(dim=1).flip(1)
        sums += torch.empty_like(values).scatter_(1, order, to_lower + to_higher).sum(0)
    return sums


def sum_cosine(rows: Tensor) -> Tensor:
    """Sum cosine distances in n steps, without computing any pair.

    Squared distances to all directions add up to n times the one to their mean, plus a constant.
    In float64, because filters that share a large offset differ in the last digits of their
    directions only; a few rows at once, so that no float64 copy of the filters is made.
    """
    at_once = max(1, 2**17 // rows.shape[1])
    blocks = [rows[start : start + at_once] for start in range(0, len(rows), at_once)]
    mean = torch.stack([_directions(block).sum(0) for block in blocks]).sum(0) / len(rows)
    squares = torch.cat([row_norms(_directions(block) - mean).square() for block in blocks])
    return ((len(rows) * squares + squares.sum()) / 2).to(rows)


def row_norms(rows: Tensor, order: float = 2) -> Tensor:
    """Compute the norm of every row.

    >>> row_norms(torch.tensor([[3., -4.], [1., 0.]]))
    tensor([5., 1.])
    """
    norms: Tensor = torch.linalg.vector_norm(rows, ord=order, dim=1)
    return norms


def widen(rows: Tensor) -> Tensor:
    """Rows in float64, on the CPU where the device has none."""
    return (rows.cpu() if rows.device.type == "mps" else rows).double()


def _sum_l2_directly(rows: Tensor) -> Tensor:
    """Sum distances from direct differences; equal rows get bitwise equal sums."""
    n = len(rows)
    distances = rows.new_zeros(n * n)
    distances[_upper_triangle(n)] = torch.nn.functional.pdist(rows)
    square = distances.view(n, n)
    return (square + square.T).sum(1)


@lru_cache(maxsize=256)
def _upper_triangle(n: int) -> Tensor:
    """Return the positions above the diagonal of an n × n matrix, in the order of `pdist`."""
    row, column = torch.triu_indices(n, n, 1).unbind()
    return row * n + column


def _sum_l2_by_gram(rows: Tensor, centred: Tensor, norms: Tensor) -> Tensor:
    """Sum distances from half of the Gram matrix, since the other half is its mirror image.

    For pairs much closer to each other than to the origin, the result would be mostly rounding
    error: they are counted as 0 and computed one by one afterwards.
    """
    rows, centred = rows.detach(), centred.detach()  # oneDNN's product has no gradient
    squares = norms.detach().square()
    sums = torch.zeros_like(squares)
    near_pairs = []
    surely_far = 2 * NEAR_FRACTION * float(squares.max())
    centred = centred.contiguous()
    multiply = _fast_product() if _suits_fast_product(centred) else torch.nn.functional.linear
    with full_precision():
        for rows_here, rows_there in _tiles(0, len(rows)):
            squared = multiply(centred[rows_here] * -2, centred[rows_there], squares[rows_there])
            squared += squares[rows_here, None]
            if rows_here == rows_there:
                squared.fill_diagonal_(math.inf)  # a filter is not its own neighbor
            if float(squared.min()) < surely_far:
                near = squared < (squares[rows_here, None] + squares[rows_there]).mul_(
                    NEAR_FRACTION
                )
                if rows_here == rows_there:
                    near |= near.T.clone()  # products are not symmetric to the last bit
                squared.masked_fill_(near, 0)
                pairs = (near.triu_(1) if rows_here == rows_there else near).nonzero()
                near_pairs.append(pairs + pairs.new_tensor([rows_here.start, rows_there.start]))
            if rows_here == rows_there:
                squared.fill_diagonal_(0)
            distances = squared.sqrt_()
            sums[rows_here].add_(distances.sum(1))
            if rows_here != rows_there:
                sums[rows_there].add_(distances.sum(0))
    if near_pairs:
        first, second = torch.cat(near_pairs).T.contiguous()
        distances = _distances_of_pairs(rows, first, second)
        sums.index_add_(0, first, distances).index_add_(0, second, distances)
    return sums


def _suits_fast_product(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and rows.dtype == torch.float32


@cache
def _fast_product() -> Product:
    """Return oneDNN's product of matrices, or torch's own where this build has none.

    oneDNN chooses kernels by what a processor can do. MKL, which torch's own product uses, chooses
    by who made it, and on AMD's takes twice the time.
    """
    try:
        product = torch.ops.mkldnn._linear_pointwise
        product(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1), "none", [], "")
    except (AttributeError, RuntimeError, TypeError):  # it is no public function of torch
        return torch.nn.functional.linear
    return lambda a, b, bias: product(a, b, bias, "none", [], "")


def _tiles(start: int, stop: int) -> Iterator[tuple[slice, slice]]:
    """Cover all pairs once: half against half, then each half; the diagonal holds pairs twice."""
    if stop - start <= DIAGONAL_TILE:
        yield slice(start, stop), slice(start, stop)
        return
    middle = (start + stop) // 2
    for row in range(start, middle, LARGEST_TILE):
        for column in range(middle, stop, LARGEST_TILE):
            yield (
                slice(row, min(middle, row + LARGEST_TILE)),
                slice(column, min(stop, column + LARGEST_TILE)),
            )
    yield from _tiles(start, middle)
    yield from _tiles(middle, stop)


def _distances_of_pairs(rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Compute distances by direct difference, a few pairs at a time."""
    in_pair = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    in_pair[first] = in_pair[second] = True
    members = int(in_pair.sum())
    if rows.device.type == "cpu" and members * (members - 1) // 2 <= GATHERING_COST * len(first):
        place = in_pair.cumsum(0) - 1
        i, j = place[first], place[second]
        # Condensed order: the pairs (0, 1), (0, 2), ..., (1, 2), ...
        return torch.nn.functional.pdist(rows[in_pair])[i * (2 * members - i - 1) // 2 + j - i - 1]
    distances = rows.new_empty(len(first))
    at_once = min(len(rows), max(1, 2**18 // rows.shape[1]))
    for start in range(0, len(first), at_once):
        here = slice(start, start + at_once)
        pairs = rows.index_select(0, first[here]).sub_(rows.index_select(0, second[here]))
        distances[here] = row_norms(pairs)
    return distances


def _directions(rows: Tensor) -> Tensor:
    """Normalize rows to length 1 in float64; zeros stay zeros."""
    wide = widen(rows)
    norms = row_norms(wide)[:, None]
    return wide / torch.where(norms == 0, 1, norms)
