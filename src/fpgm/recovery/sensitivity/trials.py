"""Measure output error and accuracy with part of a group removed and its consumers solved.

Output errors are measured on a few inputs, which every rank has: ranks divide the groups. Accuracy
is measured on all inputs, which ranks divide.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fpgm.planning.plan_builder import EmptyAxisError, UnevenBlocksError, build_plan
from fpgm.planning.selection import Choice
from fpgm.pruning.masking import MASKED_ROLES, zero_removed_
from fpgm.recovery.layer_solver import layer_at, shift_output_
from fpgm.recovery.sensitivity.error_curves import cholesky
from fpgm.recovery.sensitivity.held_out import first_inputs
from fpgm.recovery.sensitivity.probes import ConsumerStatistics, ModelStatistics
from fpgm.recovery.unfold import set_matrix_
from fpgm.tracing.grouping import Structure
from fpgm.utils.accuracy import AccuracyCounter
from fpgm.utils.calibration_data import Inputs
from fpgm.utils.copying import copy_model
from fpgm.utils.example_inputs import (
    Example,
    float_outputs,
    map_tensors,
    squared_error,
    tensors_in,
)

COMPARED_FRACTION = 0.25
"""Of the inputs, the first, are run to compare outputs. No layer is solved with them."""


class Trials:
    """Runs the model without some units, on inputs that no statistics were collected on."""

    @torch.no_grad()
    def __init__(
        self, model: nn.Module, structure: Structure, statistics: ModelStatistics, inputs: Inputs
    ) -> None:
        self._model, self._structure = model, structure
        self._statistics, self._inputs = statistics, inputs
        self.ranks = inputs.ranks
        compared = first_inputs(inputs, count_compared(inputs))
        outputs = [float_outputs(model, example) for example in compared]
        both = _on_all_ranks(list(zip(compared, outputs, strict=True)), inputs)
        self._compared = [example for example, _ in both]
        self._targets = [targets for _, targets in both]

    def accuracy(self) -> float | None:
        """Measure the unpruned model's accuracy; None if it is not a classifier."""
        return _accuracy(self._model, self._inputs)

    def accuracy_without(self, order: Tensor, count: int) -> float | None:
        """Measure accuracy without the first `count` units; None if they cannot be removed."""
        net = self._remove(order, count)
        return None if net is None else _accuracy(net, self._inputs)

    @torch.no_grad()
    def error_without(self, order: Tensor, count: int) -> float | None:
        """Measure the relative squared output error without the first `count` units, on this rank.

        None if they cannot be removed, if the outputs' shapes change, or if a consumer is too wide
        to be solved here.
        """
        consumers = [
            self._statistics.consumers.get(layer) for layer, _ in self._structure.consumers(order)
        ]
        if any(consumer is not None and not consumer.has_full_gram for consumer in consumers):
            return None
        net = self._remove(order, count)
        if net is None:
            return None
        error = size = 0.0
        for example, targets in zip(self._compared, self._targets, strict=True):
            for out, target in zip(float_outputs(net, example), targets, strict=True):
                if out.shape != target.shape:
                    return None
                error += squared_error(out, target)
                size += squared_error(torch.zeros_like(target), target)
        return error / size if size else None

    @torch.no_grad()
    def _remove(self, order: Tensor, count: int) -> nn.Module | None:
        """Return a copy with these units masked and their consumers solved; None if impossible."""
        choice = Choice.from_removed(self._structure, order[:count])
        try:
            plan = build_plan(self._model, self._structure, choice, {})
        except (EmptyAxisError, UnevenBlocksError):
            return None
        net = copy_model(self._model).eval()
        zero_removed_(net, plan, MASKED_ROLES)
        for layer, places in self._structure.consumers(order):
            if layer in self._statistics.consumers:
                removed = (places >= 0) & (places < count)
                _solve_(net, self._statistics.consumers[layer], removed)
        return net


def count_compared(inputs: Inputs) -> int:
    """Return how many inputs outputs are compared on."""
    return math.ceil(COMPARED_FRACTION * inputs.count)


def _on_all_ranks(
    compared: list[tuple[Example, list[Tensor]]], inputs: Inputs
) -> list[tuple[Example, list[Tensor]]]:
    """Return the batches of all ranks, in their order in the data, and the outputs for them."""
    if inputs.ranks.size == 1:
        return compared
    device = tensors_in((inputs.first.args, dict(inputs.first.kwargs)))[0].device
    own = [(map_tensors(x, Tensor.cpu), [t.cpu() for t in outputs]) for x, outputs in compared]
    by_rank = inputs.ranks.gather(own)
    longest = max(map(len, by_rank))
    in_order = [own[place] for place in range(longest) for own in by_rank if place < len(own)]
    return [
        (map_tensors(x, lambda t: t.to(device)), [t.to(device) for t in outputs])
        for x, outputs in in_order
    ]


def _solve_(net: nn.Module, consumer: ConsumerStatistics, removed: Tensor) -> None:
    """Solve for a consumer's weights, to compensate for removed input channels."""
    if not consumer.has_full_gram:
        return
    fan_in = consumer.matrix.shape[1]
    matrix = consumer.matrix.clone()
    constants = []
    by_group = consumer.columns(removed)
    for weights, gram, off in zip(matrix, consumer.gram, by_group, strict=True):
        constant = len(gram) - fan_in
        stays = torch.cat([~off, off.new_ones(constant)])
        system = gram[stays][:, stays]
        missing = gram[stays][:, :fan_in][:, off] @ weights[off]
        change = torch.cholesky_solve(missing, cholesky(system, consumer.ridge))
        weights[~off] += change[: len(change) - constant]
        weights[off] = 0
        if constant:
            constants.append(change[-1])
    layer = layer_at(net, consumer.layer.path)
    set_matrix_(layer, matrix.to(layer.weight))
    if constants:
        shift_output_(net, consumer.layer, torch.cat(constants))


@torch.no_grad()
def _accuracy(net: nn.Module, inputs: Inputs) -> float | None:
    """Measure accuracy on labeled inputs; None if the outputs are not one score for each class."""
    counter = AccuracyCounter()
    is_classifier = True
    for number in range(len(inputs)):
        labels = inputs.labels(number)
        if labels is not None and not counter.add(inputs[number].call(net), labels):
            is_classifier = False
            break
    totals = torch.tensor([counter.correct, counter.total, not is_classifier], dtype=torch.float64)
    inputs.ranks.sum_(totals)
    correct, total, others = totals.tolist()
    return None if others or not total else correct / total
