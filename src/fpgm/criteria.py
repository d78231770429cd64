"""How replaceable is each filter? Pure functions from filters [n, d] to n scores, low goes first.

The paper's criterion (Eq. 7) is `fpgm`, made of sums from `distances`; the others are what it is
compared with. Which filters then really go, and what goes with them, is decided elsewhere.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fpgm.errors import ModelError, RequestError
from fpgm.utils.distances import row_norms, sum_cosine, sum_l1, sum_l2, widen
from fpgm.utils.text import meant

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
    return {"l2": sum_l2, "l1": sum_l1, "cosine": sum_cosine}[distance](rows)


@torch.no_grad()
def exact(filters: Tensor) -> Tensor:
    """Distance from each filter to the exact geometric median of them all (Eq. 5).

    >>> exact(torch.tensor([[0., 0.], [2., 0.], [0., 2.], [2., 2.], [1., 1.]]))
    tensor([1.4142, 1.4142, 1.4142, 1.4142, 0.0000])
    """
    rows = _rows(filters)
    median = geometric_median(rows)
    return row_norms(rows - median)


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
    wide = widen(rows)
    # The best of the points is the median if any point is, and else a start below all others.
    best = wide[(fpgm(wide) if sums is None else sums).argmin()]
    return (best + _weiszfeld(wide - best)).to(rows)


@torch.no_grad()
def l1(filters: Tensor) -> Tensor:
    """Sum of absolute weights.

    >>> l1(torch.tensor([[3., -4.], [1., 0.]]))
    tensor([7., 1.])
    """
    return row_norms(_rows(filters), order=1)


@torch.no_grad()
def l2(filters: Tensor) -> Tensor:
    """Euclidean norm.

    >>> l2(torch.tensor([[3., -4.], [1., 0.]]))
    tensor([5., 1.])
    """
    return row_norms(_rows(filters))


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


def ranking(scores: Tensor) -> Tensor:
    """Indices from the lowest score to the highest; of equals the first comes first."""
    return scores.detach().cpu().double().argsort(stable=True)


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


def _rows(filters: Tensor) -> Tensor:
    """Filters as rows, in float32 at least: half precision is for storing, not for comparing.

    A complex number is two real ones.
    """
    if filters.ndim < 2:
        raise RequestError(f"Filters come as [n, d], one row each; got {list(filters.shape)}.")
    if filters.is_complex():
        filters = torch.view_as_real(filters.resolve_conj())
    dtype = torch.float64 if filters.dtype == torch.float64 else torch.float32
    return filters.detach().to(dtype).flatten(1)


def _weiszfeld(points: Tensor, tolerance: float = 1e-10, max_steps: int = 1000) -> Tensor:
    """Weiszfeld's iteration from the origin, with Vardi and Zhang's step where it meets a point."""
    median = torch.zeros_like(points[0])
    for _ in range(max_steps):
        offsets = points - median
        distances = row_norms(offsets)
        weights = torch.where(distances == 0, 0, 1 / distances)
        pull = weights @ offsets  # sum of unit vectors: the descent direction
        strength = float(torch.linalg.vector_norm(pull))
        resistance = int((distances == 0).sum())  # points that hold the median where it is
        if strength <= resistance + tolerance * len(points):
            break
        median = median + (1 - resistance / strength) * pull / weights.sum()
    return median


def _check_distance(distance: str) -> None:
    if distance not in DISTANCES:
        raise RequestError(_unknown("distance", distance, DISTANCES))


def _unknown(what: str, given: object, names: tuple[str, ...], otherwise: str = "") -> str:
    rest = f", {otherwise}" if otherwise else ""
    return f"Unknown {what} {given!r}{meant(given, names)}: choose one of {', '.join(names)}{rest}."
