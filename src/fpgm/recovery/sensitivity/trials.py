"""Measure output error and accuracy with part of a group removed and its consumers solved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fpgm.planning.plan_builder import EmptyAxisError, UnevenBlocksError, build_plan
from fpgm.planning.selection import Choice
from fpgm.pruning.masking import MASKED_ROLES, zero_removed_
from fpgm.recovery.layer_solver import layer_at, shift_output_
from fpgm.recovery.sensitivity.error_curves import cholesky
from fpgm.recovery.sensitivity.probes import ConsumerStatistics, ModelStatistics
from fpgm.recovery.unfold import set_matrix_
from fpgm.tracing.grouping import Structure
from fpgm.utils.accuracy import AccuracyCounter
from fpgm.utils.calibration_data import Inputs
from fpgm.utils.copying import copy_model
from fpgm.utils.example_inputs import Example, float_outputs, squared_error, tensors_in

COMPARED_EVERY = 4
"""One input in so many is run to compare outputs."""


class Trials:
    """Runs the model without some units, on the inputs its statistics were collected on."""

    @torch.no_grad()
    def __init__(
        self, model: nn.Module, structure: Structure, statistics: ModelStatistics, inputs: Inputs
    ) -> None:
        self._model, self._structure = model, structure
        self._statistics, self._inputs = statistics, inputs
        self._compared = _first_inputs(inputs, -(-inputs.count // COMPARED_EVERY))
        self._targets = [float_outputs(model, example) for example in self._compared]

    def accuracy(self) -> float | None:
        """Measure the unpruned model's accuracy; None if it is not a classifier."""
        return _accuracy(self._model, self._inputs)

    def accuracy_without(self, order: Tensor, count: int) -> float | None:
        """Measure accuracy without the first `count` units; None if they cannot be removed."""
        net = self._remove(order, count)
        return None if net is None else _accuracy(net, self._inputs)

    @torch.no_grad()
    def error_without(self, order: Tensor, count: int) -> float | None:
        """Measure the relative squared output error without the first `count` units.

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


def _first_inputs(inputs: Inputs, count: int) -> list[Example]:
    """Return the first batches with `count` inputs; the last one is cut if its shapes allow it."""
    examples: list[Example] = []
    for number in range(len(inputs)):
        example = inputs[number]
        sizes = [t.shape[:1] for t in tensors_in((example.args, dict(example.kwargs)))]
        size = sizes[0][0]
        if size > count and set(sizes) == {sizes[0]}:
            example = _cut(example, count)
        examples.append(example)
        count -= size
        if count <= 0:
            break
    return examples


def _cut(example: Example, count: int) -> Example:
    """Keep the first `count` inputs of a batch."""

    def cut(leaf: Any) -> Any:
        return leaf[:count] if isinstance(leaf, Tensor) else leaf

    return Example(tree_map(cut, example.args), tree_map(cut, dict(example.kwargs)))


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
        change = torch.cholesky_solve(missing, cholesky(system))
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
    for number in range(len(inputs)):
        labels = inputs.labels(number)
        if labels is not None and not counter.add(inputs[number].call(net), labels):
            return None
    return counter.accuracy
