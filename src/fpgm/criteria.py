"""How replaceable is each filter? Pure functions from filters [n, d] to n scores, low goes first.

The paper's criterion (Eq. 7) is `fpgm`; the others are what it is compared with. Which filters
then really go, and what goes with them, is decided elsewhere.
"""

import difflib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fpgm.errors import ModelError, RequestError

Scorer = Callable[[Tensor, float], Tensor]
"""Filters [n, d] and the rate at which they will be pruned, to n scores."""

NAMES = ("fpgm", "exact", "l1", "l2", "bn", "random", "mix")
DISTANCES = ("l2", "l1", "cosine")

# FPGM-mix prunes 30 % by norm and 10 % by geometric median: three quarters of its rate by norm.
MIX_NORM_SHARE = 0.75


@torch.no_grad()
def fpgm(filters: Tensor, distance: str = "l2") -> Tensor:
    """Sum of distances from each filter to all the others; the smallest is the most replaceable.

    >>> fpgm(torch.tensor([[1.], [-1.], [3.], [-3.]]))
    tensor([ 8.,  8., 12., 12.])

    The cosine distance is half the squared distance between directions, that is 1 - cos. A filter
    of zeros has no direction: it stays at the origin, 1/2 away from every other.

    >>> fpgm(torch.tensor([[1., 0.], [2., 0.], [0., 5.]]), distance="cosine")
    tensor([1., 1., 2.])
    """
    _check_distance(distance)
    rows = _rows(filters)
    if rows.numel() == 0:
        return rows.new_zeros(len(rows))
    return {"l2": _sum_l2, "l1": _sum_l1, "cosine": _sum_cosine}[distance](rows)


@torch.no_grad()
def exact(filters: Tensor) -> Tensor:
    """Distance from each filter to the exact geometric median of them all (Eq. 5).

    >>> exact(torch.tensor([[0., 0.], [2., 0.], [0., 2.], [2., 2.], [1., 1.]]))
    tensor([1.4142, 1.4142, 1.4142, 1.4142, 0.0000])
    """
    rows = _rows(filters)
    median = geometric_median(rows)
    return _norms(rows - median)


@torch.no_grad()
def geometric_median(points: Tensor, sums: Tensor | None = None) -> Tensor:
    """The point whose distances to all the given ones add up to the least (Eq. 3).

    `sums` is what `fpgm` says of the points, if that is known already.

    >>> geometric_median(torch.tensor([[0., 0.], [2., 0.], [0., 2.], [2., 2.]]))
    tensor([1., 1.])

    It is unique unless the points lie on one line; there, it is one of the middle points.
    """
    rows = _rows(points)
    if len(rows) == 0:
        raise RequestError("No points have no geometric median: give at least one.")
    wide = _widen(rows)
    # The best of the points is the median if any point is, and else a start below all others.
    best = wide[(fpgm(wide) if sums is None else sums).argmin()]
    return (best + _weiszfeld(wide - best)).to(rows)


@torch.no_grad()
def l1(filters: Tensor) -> Tensor:
    """Sum of absolute weights.

    >>> l1(torch.tensor([[3., -4.], [1., 0.]]))
    tensor([7., 1.])
    """
    return _norms(_rows(filters), order=1)


@torch.no_grad()
def l2(filters: Tensor) -> Tensor:
    """Euclidean norm.

    >>> l2(torch.tensor([[3., -4.], [1., 0.]]))
    tensor([5., 1.])
    """
    return _norms(_rows(filters))


@torch.no_grad()
def bn_scale(scales: Tensor) -> Tensor:
    """Size of each unit's batch-norm scale, given as [n, 1].

    >>> bn_scale(torch.tensor([[0.5], [-2.]]))
    tensor([0.5000, 2.0000])
    """
    return _rows(scales).abs().sum(1)


def random(filters: Tensor, seed: int = 0) -> Tensor:
    """A shuffled order: the control every criterion should beat.

    It depends on the seed and the number of filters only, never on the device, so layers of one
    width share an order unless each is given its own seed.

    >>> sorted(random(torch.zeros(4, 2)).tolist())
    [0.0, 1.0, 2.0, 3.0]
    """
    rows = _rows(filters)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return order.to(rows)


@torch.no_grad()
def mix(filters: Tensor, norm_share: float, distance: str = "l2") -> Tensor:
    """FPGM-mix: a share of the filters goes by smallest norm, then the survivors by `fpgm`.

    Scores are ranks. Below, the two smallest norms go first; of the three survivors 5, 6 and 9,
    the middle one is the most replaceable.

    >>> mix(torch.tensor([[5.], [1.], [6.], [2.], [9.]]), norm_share=0.4)
    tensor([3., 0., 2., 1., 4.])
    """
    if not 0 <= norm_share <= 1:
        raise RequestError(f"norm_share is a share between 0 and 1; got {norm_share}.")
    rows = _rows(filters)
    # 50 * 0.29 is 14.499999999999998 in binary: round the noise away before rounding half up.
    by_norm = math.floor(round(len(rows) * norm_share, 9) + 0.5)
    norm_order = ranking(l2(rows))
    survivors = norm_order[by_norm:].sort().values
    fpgm_order = ranking(fpgm(rows[survivors.to(rows.device)], distance))
    order = torch.cat([norm_order[:by_norm], survivors[fpgm_order]])
    ranks = torch.empty(len(rows), dtype=rows.dtype)
    ranks[order] = torch.arange(len(rows), dtype=rows.dtype)
    return ranks.to(rows.device)


def lowest(scores: Tensor, count: int) -> list[int]:
    """Indices of the `count` lowest scores, in increasing order; of equals the first goes first.

    >>> lowest(torch.tensor([3., 1., 2., 1., 1.]), 2)
    [1, 3]
    """
    if not 0 <= count <= len(scores):
        raise RequestError(f"Cannot take the {count} lowest of {len(scores)} scores.")
    return ranking(scores)[:count].sort().values.tolist()


def resolve(
    criterion: str | Callable[[Tensor], Tensor], *, distance: str = "l2", seed: int = 0
) -> Scorer:
    """The scorer behind a criterion's name, or behind a function of the filters alone.

    `mix=0.5` is FPGM-mix with half of what goes chosen by the norm, not the paper's three quarters.

    >>> resolve("l2")(torch.tensor([[3., 4.]]), 0.4)
    tensor([5.])
    """
    _check_distance(distance)
    if callable(criterion):
        return lambda filters, rate: criterion(filters)
    name, share = _mix_share(criterion)
    scorers: dict[str, Scorer] = {
        "fpgm": lambda filters, rate: fpgm(filters, distance),
        "exact": lambda filters, rate: exact(filters),
        "l1": lambda filters, rate: l1(filters),
        "l2": lambda filters, rate: l2(filters),
        "bn": lambda filters, rate: bn_scale(filters),
        "random": lambda filters, rate: random(filters, seed),
        "mix": lambda filters, rate: mix(filters, share * rate, distance),
    }
    if name not in scorers:
        raise RequestError(_unknown("criterion", criterion, NAMES, "or give a function"))
    return scorers[name]


def _mix_share(criterion: str) -> tuple[str, float]:
    """A name without its share, and the share.

    >>> _mix_share("mix=0.5"), _mix_share("fpgm")
    (('mix', 0.5), ('fpgm', 0.75))
    """
    name, given, text = criterion.partition("=")
    if name != "mix" or not given:
        return criterion, MIX_NORM_SHARE
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise RequestError(f"criterion is {criterion!r}: mix= takes a share from 0 to 1.")
    return name, share


@torch.no_grad()
def score(scorer: Scorer, filters: Tensor, rate: float, layer_name: str) -> Tensor:
    """One layer's scores, float64 on the CPU, with its filters and its scorer's answer checked.

    >>> score(resolve("l1"), torch.tensor([[3., -4.], [1., 0.]]), 0.5, "conv1")
    tensor([7., 1.], dtype=torch.float64)
    """
    rows = _rows(filters)
    check_finite(rows, layer_name)
    scores: object = scorer(rows, rate)
    wanted = "a criterion returns one finite score per filter"
    if not isinstance(scores, Tensor):
        kind = type(scores).__name__
        raise RequestError(f"Scores of layer '{layer_name}' are a {kind}: {wanted}, as a tensor.")
    if scores.shape != (len(rows),):
        raise RequestError(
            f"Scores of layer '{layer_name}' have shape {list(scores.shape)} for {len(rows)} "
            f"filters: {wanted}, shape [{len(rows)}]."
        )
    if not bool(scores.isfinite().all()):
        raise RequestError(f"Scores of layer '{layer_name}' are not all finite: {wanted}.")
    return scores.detach().cpu().double()


def check_finite(filters: Tensor, layer_name: str) -> None:
    """Refuse filters that cannot be compared."""
    # The extremes carry any NaN or infinity, and take one pass without a copy.
    if filters.numel() and not all(bool(end.isfinite()) for end in torch.aminmax(filters)):
        raise ModelError(
            f"Layer '{layer_name}' has NaN or infinite weights: fix or reload them before pruning."
        )


def _rows(filters: Tensor) -> Tensor:
    """Filters as rows, in float32 at least: half precision is for storing, not for comparing."""
    if filters.ndim < 2:
        raise RequestError(f"Filters come as [n, d], one row each; got {list(filters.shape)}.")
    dtype = torch.float64 if filters.dtype == torch.float64 else torch.float32
    return filters.detach().to(dtype).flatten(1)


def _widen(rows: Tensor) -> Tensor:
    """Rows in float64, on the CPU where the device has none."""
    return (rows.cpu() if rows.device.type == "mps" else rows).double()


def ranking(scores: Tensor) -> Tensor:
    """Indices from the lowest score to the highest; of equals the first comes first."""
    return scores.detach().cpu().double().argsort(stable=True)


def _check_distance(distance: str) -> None:
    if distance not in DISTANCES:
        raise RequestError(_unknown("distance", distance, DISTANCES))


def _unknown(what: str, given: object, names: tuple[str, ...], otherwise: str = "") -> str:
    close = difflib.get_close_matches(str(given), names, n=1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    rest = f", {otherwise}" if otherwise else ""
    return f"Unknown {what} {given!r}{hint}: choose one of {', '.join(names)}{rest}."


def _norms(rows: Tensor, order: float = 2) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, ord=order, dim=1)
    return norms


# Sums of distances. The l2 one is the only one that needs all pairs.

# A squared distance read off a Gram matrix is off by some 1e-7 of the squared norms it is the
# difference of. Below this share of them the pair is measured again, directly.
NEAR = 1 / 64

# Sides of the tiles the Gram matrix is computed in: on the diagonal smaller ones repeat less work
# but call more often, off it larger ones would leave the caches.
DIAGONAL_TILE = 192
LARGEST_TILE = 1024

# Measured on one core: a pair costs eight times more when gathered than inside `pdist`.
GATHERING_COST = 8


def _sum_l2(rows: Tensor) -> Tensor:
    """Sums of Euclidean distances, once what a Gram matrix is bad at is out of the way."""
    norms = _norms(rows)
    if not 2.0**-40 < float(norms.max()) < 2.0**40:  # squares vanish or overflow
        largest = float(rows.abs().max())
        if largest == 0:
            return norms
        if not math.isfinite(largest):
            return torch.full_like(norms, math.nan)
        power = 2.0 ** max(-100, min(100, math.frexp(largest)[1]))
        return _sum_l2(rows / power) * power
    if bool((norms == 0).any()):  # soft pruning leaves many: each adds the others' norm
        alive = norms.nonzero().squeeze(1)
        sums = norms.sum().expand(len(rows)).clone()
        sums[alive] = _sum_l2(rows[alive]) + (len(rows) - len(alive)) * norms[alive]
        return sums
    # Only a common offset that dominates is worth a second copy of the filters.
    centre = rows.mean(0)
    if float(centre.square().sum()) > float(norms.square().mean()) / 2:
        centred = rows - centre
        centred -= centred.mean(0)  # the first mean carries the offset's rounding error
        return _sum_l2_by_gram(rows, centred, _norms(centred))
    return _sum_l2_by_gram(rows, rows, norms)


def _sum_l2_by_gram(rows: Tensor, centred: Tensor, norms: Tensor) -> Tensor:
    """Half of the Gram matrix, since the other half is its mirror image.

    Pairs much closer to each other than to the origin would be all rounding error there: they are
    counted as 0, set aside, and measured one by one afterwards.
    """
    squares = norms.square()
    sums = torch.zeros_like(squares)
    near_pairs = []
    surely_far = 2 * NEAR * float(squares.max())
    with _full_precision(rows.device):
        for here, there in _tiles(0, len(rows)):
            squared = squares[here, None] + squares[there]
            squared.addmm_(centred[here], centred[there].T, alpha=-2)
            if here == there:
                squared.fill_diagonal_(math.inf)  # a filter is no neighbour of itself
            if float(squared.min()) < surely_far:
                near = squared < (squares[here, None] + squares[there]).mul_(NEAR)
                if here == there:
                    near |= near.T.clone()  # products are not symmetric to the last bit
                squared.masked_fill_(near, 0)
                pairs = (near.triu_(1) if here == there else near).nonzero()
                near_pairs.append(pairs + pairs.new_tensor([here.start, there.start]))
            if here == there:
                squared.fill_diagonal_(0)
            distances = squared.sqrt_()
            sums[here] += distances.sum(1)
            if here != there:
                sums[there] += distances.sum(0)
    if near_pairs:
        first, second = torch.cat(near_pairs).T.contiguous()
        distances = _distances_of_pairs(rows, first, second)
        sums.index_add_(0, first, distances).index_add_(0, second, distances)
    return sums


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


def _sum_l1(rows: Tensor) -> Tensor:
    """Sums of l1 distances in n log n steps: each weight is sorted over the filters.

    The way from one filter to another is made of the gaps between, so a gap counts once for every
    filter on its other side. All terms are positive: nothing cancels.
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


def _sum_cosine(rows: Tensor) -> Tensor:
    """Sums of cosine distances in n steps: no pair is ever looked at.

    Squared distances to all directions add up to n times the one to their mean, plus a constant.
    In float64, because filters that share a large offset differ in the last digits of their
    directions only; a few rows at once, so that no float64 copy of the filters is made.
    """
    at_once = max(1, 2**17 // rows.shape[1])
    blocks = [rows[start : start + at_once] for start in range(0, len(rows), at_once)]
    mean = torch.stack([_directions(block).sum(0) for block in blocks]).sum(0) / len(rows)
    squares = torch.cat([_norms(_directions(block) - mean).square() for block in blocks])
    return ((len(rows) * squares + squares.sum()) / 2).to(rows)


def _directions(rows: Tensor) -> Tensor:
    """Rows at length 1 in float64; zeros stay zeros."""
    wide = _widen(rows)
    norms = _norms(wide)[:, None]
    return wide / torch.where(norms == 0, 1, norms)


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Matrix products in the tensors' own precision, whatever the caller allows for training.

    Autocast, TF32 or bfloat16 products would turn close filters into equal ones.
    """
    backends = [torch.backends.cuda, torch.backends.mkldnn]
    products: list[Any] = [backend.matmul for backend in backends if hasattr(backend, "matmul")]
    modern = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # torch 2.9 and later
    name, full = ("fp32_precision", "ieee") if modern else ("allow_tf32", False)
    saved = [(product, getattr(product, name)) for product in products]
    reduced = [(product, was) for product, was in saved if was in ("tf32", "bf16", True)]
    try:
        for product, _ in reduced:
            setattr(product, name, full)
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for product, was in reduced:
            setattr(product, name, was)


def _distances_of_pairs(rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Distances by direct difference, a few pairs at once."""
    met = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    met[first] = met[second] = True
    members = int(met.sum())
    if rows.device.type == "cpu" and members * (members - 1) // 2 <= GATHERING_COST * len(first):
        place = met.cumsum(0) - 1
        i, j = place[first], place[second]
        # Condensed order: the pairs (0, 1), (0, 2), ..., (1, 2), ...
        return torch.nn.functional.pdist(rows[met])[i * (2 * members - i - 1) // 2 + j - i - 1]
    distances = rows.new_empty(len(first))
    at_once = min(len(rows), max(1, 2**18 // rows.shape[1]))
    for start in range(0, len(first), at_once):
        here = slice(start, start + at_once)
        pairs = rows.index_select(0, first[here]).sub_(rows.index_select(0, second[here]))
        distances[here] = _norms(pairs)
    return distances


def _weiszfeld(points: Tensor, tolerance: float = 1e-10, max_steps: int = 1000) -> Tensor:
    """Weiszfeld's iteration from the origin, with Vardi and Zhang's step where it meets a point."""
    median = torch.zeros_like(points[0])
    for _ in range(max_steps):
        offsets = points - median
        distances = _norms(offsets)
        weights = torch.where(distances == 0, 0, 1 / distances)
        pull = weights @ offsets  # sum of unit vectors: the descent direction
        strength = float(torch.linalg.vector_norm(pull))
        resistance = int((distances == 0).sum())  # points that hold the median where it is
        if strength <= resistance + tolerance * len(points):
            break
        median = median + (1 - resistance / strength) * pull / weights.sum()
    return median
