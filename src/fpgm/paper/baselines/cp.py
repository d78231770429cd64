"""CP: channels stay whose summands a LASSO needs to make up the next layer's output.

He, Zhang and Sun weigh the summands of a layer's input channels, penalise the sum of the weights'
sizes, and raise the penalty until few enough are not zero; then the layer's weights are solved for
by least squares, layer after layer, the input from the pruned network and the target from the
original. That second half is what `fpgm.recover` does.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fpgm.paper.baselines.base import Method, Pruned, Task, classes_of, cut
from fpgm.paper.baselines.unit_contributions import known_products
from fpgm.planning.precomputed_scores import Scored
from fpgm.recovery.recover import recover

PENALTIES = 60
"""Steps from the penalty at which all weights are zero down to the smallest."""
SMALLEST = 1e-4
"""Of them, as a share of the largest."""
SWEEPS = 50
"""Rounds over all channels at one penalty, at most."""


def cp(task: Task) -> Pruned:
    """Choose by LASSO, then solve."""
    planner = task.planner()
    scores = torch.zeros(classes_of(planner), dtype=torch.float64)
    for units, together in known_products(task, planner):
        scores[units] = path(together)
    planner.score_by(Scored.of_units("cp", planner.structure, scores))
    pruned = cut(planner)
    assert pruned.plan is not None
    solved = recover(task.model, pruned.plan, task.loader, images=task.images)
    return replace(pruned, model=solved)


def path(together: Tensor) -> Tensor:
    """A score for every channel: the penalty at which the LASSO lets it in, then its weight there.

    Of three channels of which the second says what the first says, only louder, the first is let
    in last:

    >>> x = torch.tensor([[1., 2., 0.], [1., 2., 0.], [0., 0., 1.]])
    >>> path(x.T @ x).argsort().tolist()
    [0, 2, 1]
    """
    wide = together.double()
    scale = float(wide.diagonal().max()) or 1.0
    wide = wide / scale
    target = wide.sum(1)  # of every summand with the sum of all
    weights = torch.zeros(len(wide), dtype=torch.float64)
    scores = torch.zeros(len(wide), dtype=torch.float64)
    largest = float(target.abs().max()) or 1.0
    for step in range(1, PENALTIES + 1):
        penalty = largest * SMALLEST ** (step / PENALTIES)
        weights = _descend(wide, target, weights, penalty)
        entered = (weights != 0) & (scores == 0)
        scores[entered] = 1 + PENALTIES - step + weights[entered].abs().clamp(max=1e3) / 2e3
    never = scores == 0
    scores[never] = wide.diagonal()[never] / (2 * wide.diagonal().max().clamp(min=1e-30))
    return scores


def _descend(wide: Tensor, target: Tensor, weights: Tensor, penalty: float) -> Tensor:
    """The LASSO's weights at a penalty: one coordinate after the other, from where they were."""
    weights = weights.clone()
    rest = target - wide @ weights
    sizes = wide.diagonal().clamp(min=1e-12)
    for _ in range(SWEEPS):
        moved = 0.0
        for i in range(len(weights)):
            old = weights[i]
            pull = rest[i] + sizes[i] * old
            new = torch.sign(pull) * (pull.abs() - penalty).clamp(min=0) / sizes[i]
            if new != old:
                rest -= wide[:, i] * (new - old)
                weights[i] = new
                moved = max(moved, float((new - old).abs()))
        if moved < 1e-6:
            break
    return weights


METHOD = Method(
    "cp",
    "CP",
    "He, Zhang, Sun: Channel Pruning for Accelerating Very Deep Neural Networks (ICCV 2017), "
    "arXiv:1707.06168",
    "LASSO choice of the channels that make up the next layer's output, then least squares.",
    "inputs",
    cp,
)
