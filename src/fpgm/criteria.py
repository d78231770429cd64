"""Pruning criteria: pure functions from filters [n, d] to n scores; the lowest are pruned first.

The paper's criterion (Eq. 7) is `fpgm`; the others are for comparison. Sums of distances are in
`utils.distances`. `planning` decides which filters are removed, and which other slices go with
them.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fpgm.errors import ModelError, RequestError
from fpgm.utils.distances import row_norms, sum_cosine, sum_l1, sum_l2, widen
from fpgm.utils.text import suggest_name

Scorer = Callable[[Tensor, float], Tensor]
"""From filters [n, d] and the pruning rate to n scores."""

NAMES = ("fpgm", "exact", "l1", "l2", "bn", "random", "mix")
DISTANCES = ("l2", "l1", "cosine")

# FPGM-mix prunes 30 % by norm and 10 % by geometric median: three quarters of its rate by norm.
MIX_NORM_FRACTION = 0.75


@torch.no_grad()
def fpgm(filters: Tensor, distance: str = "l2") -> Tensor:
    """Sum each filter's distances to all others; the smallest sum is the most replaceable filter.

    >>> fpgm(torch.tensor([[1.], [-1.], [3.], [-3.]]))
    tensor([ 8.,  8., 12., 12.])

    The cosine distance is 1 - cos, half the squared distance between directions. A filter of zeros
    has no direction: its distance to every other is 1/2.

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
    """Compute the distance from each filter to the exact geometric median of all (Eq. 5).

    >>> exact(torch.tensor([[0., 0.], [2., 0.], [0., 2.], [2., 2.], [1., 1.]]))
    tensor([1.4142, 1.4142, 1.4142, 1.4142, 0.0000])
    """
    rows = _rows(filters)
    median = geometric_median(rows)
    return row_norms(rows - median)


@torch.no_grad()
def geometric_median(points: Tensor, sums: Tensor | None = None) -> Tensor:
    """Find the point with the smallest sum of distances to the given ones (Eq. 3).

    >>> geometric_median(torch.tensor([[0., 0.], [2., 0.], [0., 2.], [2., 2.]]))
    tensor([1., 1.])

    It is unique unless the points lie on one line; there, it is one of the middle points.

    Args:
        points: [n, d].
        sums: what `fpgm` returns for the points, if that is known already.
    """
    rows = _rows(points)
    if len(rows) == 0:
        raise RequestError("A geometric median needs at least one point: points is empty.")
    wide = widen(rows)
    # The best point is the median if any point is; otherwise it is where the iteration starts.
    best = wide[(fpgm(wide) if sums is None else sums).argmin()]
    return (best + _weiszfeld(wide - best)).to(rows)


@torch.no_grad()
def l1(filters: Tensor) -> Tensor:
    """Sum the absolute weights of each filter.

    >>> l1(torch.tensor([[3., -4.], [1., 0.]]))
    tensor([7., 1.])
    """
    return row_norms(_rows(filters), order=1)


@torch.no_grad()
def l2(filters: Tensor) -> Tensor:
    """Compute the Euclidean norm of each filter.

    >>> l2(torch.tensor([[3., -4.], [1., 0.]]))
    tensor([5., 1.])
    """
    return row_norms(_rows(filters))


@torch.no_grad()
def bn_scale(scales: Tensor) -> Tensor:
    """Return the absolute batch-norm scale of each unit, given as [n, 1].

    >>> bn_scale(torch.tensor([[0.5], [-2.]]))
    tensor([0.5000, 2.0000])
    """
    return _rows(scales).abs().sum(1)


def random(filters: Tensor, seed: int = 0) -> Tensor:
    """Score filters in random order: the baseline that every criterion should beat.

    The order depends only on the seed and the number of filters, so layers of the same width get
    the same order unless each has its own seed.

    >>> sorted(random(torch.zeros(4, 2)).tolist())
    [0.0, 1.0, 2.0, 3.0]
    """
    rows = _rows(filters)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return order.to(rows)


@torch.no_grad()
def mix(filters: Tensor, norm_fraction: float, distance: str = "l2") -> Tensor:
    """Rank filters by FPGM-mix: a fraction of them by smallest norm, then the others by `fpgm`.

    Below, the two smallest norms come first; of the other three filters, 5, 6 and 9, the middle one
    is the most replaceable.

    >>> mix(torch.tensor([[5.], [1.], [6.], [2.], [9.]]), norm_fraction=0.4)
    tensor([3., 0., 2., 1., 4.])
    """
    if not 0 <= norm_fraction <= 1:
        raise RequestError(f"norm_fraction is {norm_fraction}: give a fraction from 0 to 1.")
    rows = _rows(filters)
    # 50 * 0.29 is 14.499999999999998 in binary: round the noise away before rounding half up.
    norm_count = math.floor(round(len(rows) * norm_fraction, 9) + 0.5)
    norm_order = ranking(l2(rows))
    others = norm_order[norm_count:].sort().values
    fpgm_order = ranking(fpgm(rows[others.to(rows.device)], distance))
    order = torch.cat([norm_order[:norm_count], others[fpgm_order]])
    ranks = torch.empty(len(rows), dtype=rows.dtype)
    ranks[order] = torch.arange(len(rows), dtype=rows.dtype)
    return ranks.to(rows.device)


def lowest(scores: Tensor, count: int) -> list[int]:
    """Return the sorted indices of the `count` lowest scores; of equal scores the first ones.

    >>> lowest(torch.tensor([3., 1., 2., 1., 1.]), 2)
    [1, 3]
    """
    if not 0 <= count <= len(scores):
        raise RequestError(f"Cannot take the {count} lowest of {len(scores)} scores.")
    return ranking(scores)[:count].sort().values.tolist()


def ranking(scores: Tensor) -> Tensor:
    """Return the indices from the lowest score to the highest; of equal scores the first first."""
    return scores.detach().cpu().double().argsort(stable=True)


def resolve(
    criterion: str | Callable[[Tensor], Tensor], *, distance: str = "l2", seed: int = 0
) -> Scorer:
    """Return the scorer of a criterion, given by name or as a function of the filters.

    `mix=0.5` is FPGM-mix with half of the pruned filters chosen by norm; in the paper, it is three
    quarters.

    >>> resolve("l2")(torch.tensor([[3., 4.]]), 0.4)
    tensor([5.])
    """
    _check_distance(distance)
    if callable(criterion):
        return lambda filters, rate: criterion(filters)
    name, norm_fraction = _parse_mix(criterion)
    scorers: dict[str, Scorer] = {
        "fpgm": lambda filters, rate: fpgm(filters, distance),
        "exact": lambda filters, rate: exact(filters),
        "l1": lambda filters, rate: l1(filters),
        "l2": lambda filters, rate: l2(filters),
        "bn": lambda filters, rate: bn_scale(filters),
        "random": lambda filters, rate: random(filters, seed),
        "mix": lambda filters, rate: mix(filters, norm_fraction * rate, distance),
    }
    if name not in scorers:
        raise RequestError(_unknown_name("criterion", criterion, NAMES, "or give a function"))
    return scorers[name]


def uses_rate(criterion: str) -> bool:
    """Tell whether a criterion's scores depend on the pruning rate, as those of mix do.

    >>> uses_rate("mix=0.5"), uses_rate("fpgm")
    (True, False)
    """
    return _parse_mix(criterion)[0] == "mix"


@torch.no_grad()
def score(scorer: Scorer, filters: Tensor, rate: float, layer_name: str) -> Tensor:
    """Score a layer's filters, and check filters and scores; float64 on the CPU.

    >>> score(resolve("l1"), torch.tensor([[3., -4.], [1., 0.]]), 0.5, "conv1")
    tensor([7., 1.], dtype=torch.float64)
    """
    rows = _rows(filters)
    check_finite(rows, layer_name)
    scores: object = scorer(rows, rate)
    rule = "a criterion returns one finite score per filter"
    if not isinstance(scores, Tensor):
        kind = type(scores).__name__
        raise RequestError(f"Scores of layer '{layer_name}' are a {kind}: {rule}, as a tensor.")
    if scores.shape != (len(rows),):
        raise RequestError(
            f"Scores of layer '{layer_name}' have shape {list(scores.shape)} for {len(rows)} "
            f"filters: {rule}, shape [{len(rows)}]."
        )
    scores = scores.detach().cpu().double()
    if not math.isfinite(float(scores.sum())) and not bool(scores.isfinite().all()):
        raise RequestError(f"Scores of layer '{layer_name}' are not all finite: {rule}.")
    return scores


def check_finite(filters: Tensor, layer_name: str) -> None:
    """Refuse filters with NaN or infinite values."""
    if math.isfinite(float(filters.sum())):
        return
    # A sum may overflow. Minimum and maximum show any NaN or infinity, without a copy.
    if not all(math.isfinite(float(end)) for end in torch.aminmax(filters)):
        raise ModelError(
            f"Layer '{layer_name}' has NaN or infinite weights: fix or reload them before pruning."
        )


def _parse_mix(criterion: str) -> tuple[str, float]:
    """Split `mix=0.5` into name and fraction; other criteria get the default fraction.

    >>> _parse_mix("mix=0.5"), _parse_mix("fpgm")
    (('mix', 0.5), ('fpgm', 0.75))
    """
    name, given, text = criterion.partition("=")
    if name != "mix" or not given:
        return criterion, MIX_NORM_FRACTION
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not 0 <= fraction <= 1:
        raise RequestError(f"criterion is {criterion!r}: mix= takes a fraction from 0 to 1.")
    return name, fraction


def _rows(filters: Tensor) -> Tensor:
    """Flatten filters to rows, in float32 at least; half precision is too coarse to compare.

    A complex number becomes two real ones.
    """
    if filters.ndim < 2:
        raise RequestError(f"Filters have shape {list(filters.shape)}: give [n, d], one row each.")
    if filters.is_complex():
        filters = torch.view_as_real(filters.resolve_conj())
    dtype = torch.float64 if filters.dtype == torch.float64 else torch.float32
    return filters.detach().to(dtype).flatten(1)


def _weiszfeld(points: Tensor, tolerance: float = 1e-10, max_steps: int = 1000) -> Tensor:
    """Run Weiszfeld's iteration from the origin, with Vardi and Zhang's step at a given point."""
    median = torch.zeros_like(points[0])
    for _ in range(max_steps):
        offsets = points - median
        distances = row_norms(offsets)
        weights = torch.where(distances == 0, 0, 1 / distances)
        pull = weights @ offsets  # sum of unit vectors: the descent direction
        pull_norm = float(torch.linalg.vector_norm(pull))
        coinciding = int((distances == 0).sum())  # points at the median, which it may not leave
        if pull_norm <= coinciding + tolerance * len(points):
            break
        median = median + (1 - coinciding / pull_norm) * pull / weights.sum()
    return median


def _check_distance(distance: str) -> None:
    if distance not in DISTANCES:
        raise RequestError(_unknown_name("distance", distance, DISTANCES))


def _unknown_name(what: str, given: object, names: tuple[str, ...], otherwise: str = "") -> str:
    """Build the error for an unknown name, listing the known ones."""
    rest = f", {otherwise}" if otherwise else ""
    known = ", ".join(names)
    return f"Unknown {what} {given!r}{suggest_name(given, names)}: choose one of {known}{rest}."
