"""CP (channel pruning): keep the channels that a LASSO selects to reconstruct the next layer.

He, Zhang and Sun give each input channel of a layer a coefficient, penalize the l1 norm of the
coefficients, and raise the penalty until few enough are nonzero. Then they solve the layer's
weights by least squares, layer by layer, with inputs from the pruned network and targets from the
original. The second half is what `fpgm.recover` does.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fpgm.paper.baselines.base import Method, MethodResult, Task, num_unit_classes, prune_and_verify
from fpgm.paper.baselines.unit_contributions import contribution_products
from fpgm.planning.precomputed_scores import PrecomputedScores
from fpgm.recovery.api import recover

PENALTY_STEPS = 60
"""Steps of the penalty, from the value at which all coefficients are zero to the smallest."""
MIN_PENALTY = 1e-4
"""Smallest penalty, as a fraction of the largest."""
MAX_SWEEPS = 50
"""Maximum sweeps over all channels at one penalty."""


def cp(task: Task) -> MethodResult:
    """Select channels by LASSO, then solve the weights by least squares."""
    planner = task.planner()
    scores = torch.zeros(num_unit_classes(planner), dtype=torch.float64)
    for units, gram in contribution_products(task, planner):
        scores[units] = lasso_scores(gram)
    planner.score_by(PrecomputedScores.of_units("cp", planner.structure, scores))
    pruned = prune_and_verify(planner)
    assert pruned.plan is not None
    recovered = recover(task.model, pruned.plan, task.loader, images=task.images)
    return replace(pruned, model=recovered)


def lasso_scores(gram: Tensor) -> Tensor:
    """Score channels by the penalty at which their coefficient becomes nonzero on the LASSO path.

    Ties are broken by the coefficient at that penalty. In this example the second channel is twice
    the first, so the first enters last:

    >>> x = torch.tensor([[1., 2., 0.], [1., 2., 0.], [0., 0., 1.]])
    >>> lasso_scores(x.T @ x).argsort().tolist()
    [0, 2, 1]
    """
    normalized = gram.double()
    scale = float(normalized.diagonal().max()) or 1.0
    normalized = normalized / scale
    target = normalized.sum(1)  # inner products with the sum of all channels
    weights = torch.zeros(len(normalized), dtype=torch.float64)
    scores = torch.zeros(len(normalized), dtype=torch.float64)
    largest = float(target.abs().max()) or 1.0
    for step in range(1, PENALTY_STEPS + 1):
        penalty = largest * MIN_PENALTY ** (step / PENALTY_STEPS)
        weights = _coordinate_descent(normalized, target, weights, penalty)
        entered = (weights != 0) & (scores == 0)
        scores[entered] = 1 + PENALTY_STEPS - step + weights[entered].abs().clamp(max=1e3) / 2e3
    never = scores == 0
    scores[never] = normalized.diagonal()[never] / (
        2 * normalized.diagonal().max().clamp(min=1e-30)
    )
    return scores


def _coordinate_descent(
    normalized: Tensor, target: Tensor, weights: Tensor, penalty: float
) -> Tensor:
    """Solve the LASSO at one penalty by coordinate descent, starting from the given weights."""
    weights = weights.clone()
    residual = target - normalized @ weights
    sizes = normalized.diagonal().clamp(min=1e-12)
    for _ in range(MAX_SWEEPS):
        largest_step = 0.0
        for i in range(len(weights)):
            old = weights[i]
            correlation = residual[i] + sizes[i] * old
            new = torch.sign(correlation) * (correlation.abs() - penalty).clamp(min=0) / sizes[i]
            if new != old:
                residual -= normalized[:, i] * (new - old)
                weights[i] = new
                largest_step = max(largest_step, float((new - old).abs()))
        if largest_step < 1e-6:
            break
    return weights


METHOD = Method(
    "cp",
    "CP",
    "He, Zhang, Sun: Channel Pruning for Accelerating Very Deep Neural Networks (ICCV 2017), "
    "arXiv:1707.06168",
    "Selects the channels that reconstruct the next layer's output by LASSO, then least squares.",
    "inputs",
    cp,
)
