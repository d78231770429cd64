"""What really happens with a share of one group gone, its readers solved anew, nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fpgm.planning.plan_builder import EmptiedError, UnevenError, draft
from fpgm.planning.selection import Choice
from fpgm.pruning.masking import HELD, silence_
from fpgm.recovery.layer_solver import layer_at, shift_
from fpgm.recovery.sensitivity.error_curves import factor
from fpgm.recovery.sensitivity.probes import Measured, Reader
from fpgm.recovery.unfold import set_matrix_
from fpgm.tracing.grouping import Structure
from fpgm.utils.calibration_data import Inputs
from fpgm.utils.copying import copy_model
from fpgm.utils.example_inputs import Example, float_outputs, squared, tensors_in

CHECKED = 4
"""Of so many inputs one is run again and again to compare outputs."""


class Trials:
    """Tries what was measured: the model without some units, on the inputs it was measured on."""

    @torch.no_grad()
    def __init__(
        self, model: nn.Module, structure: Structure, measured: Measured, inputs: Inputs
    ) -> None:
        self._model, self._structure = model, structure
        self._measured, self._inputs = measured, inputs
        self._checked = _first(inputs, -(-inputs.count // CHECKED))
        self._wanted = [float_outputs(model, example) for example in self._checked]

    def accuracy(self) -> float | None:
        """Of the model as it is; None if its answers are not one score a class."""
        return _accuracy(self._model, self._inputs)

    def accuracy_without(self, order: Tensor, count: int) -> float | None:
        """Accuracy without the first so many units; None if the model cannot be without them."""
        net = self._without(order, count)
        return None if net is None else _accuracy(net, self._inputs)

    @torch.no_grad()
    def error_without(self, order: Tensor, count: int) -> float | None:
        """Squared error of the outputs without the first so many units, as a share of theirs.

        None if the model cannot be without them, if its outputs then have other shapes, or if a
        reader is too wide to be solved here.
        """
        readers = [self._measured.readers.get(layer) for layer, _ in self._structure.readers(order)]
        if any(reader is not None and not reader.whole for reader in readers):
            return None
        net = self._without(order, count)
        if net is None:
            return None
        missed = size = 0.0
        for example, wanted in zip(self._checked, self._wanted, strict=True):
            for own, out in zip(float_outputs(net, example), wanted, strict=True):
                if own.shape != out.shape:
                    return None
                missed += squared(own, out)
                size += squared(torch.zeros_like(out), out)
        return missed / size if size else None

    @torch.no_grad()
    def _without(self, order: Tensor, count: int) -> nn.Module | None:
        """The model with these units silent and their readers solved anew."""
        choice = Choice.of(self._structure, order[:count])
        try:
            plan = draft(self._model, self._structure, choice, {})
        except (EmptiedError, UnevenError):
            return None
        net = copy_model(self._model).eval()
        silence_(net, plan, HELD)
        for layer, places in self._structure.readers(order):
            if layer in self._measured.readers:
                _solve_(net, self._measured.readers[layer], (places >= 0) & (places < count))
        return net


def _first(inputs: Inputs, count: int) -> list[Example]:
    """The first batches until they hold so many inputs, the last of them in part if it can be."""
    found: list[Example] = []
    for number in range(len(inputs)):
        example = inputs[number]
        sizes = [t.shape[:1] for t in tensors_in((example.args, dict(example.kwargs)))]
        size = sizes[0][0]
        if size > count and set(sizes) == {sizes[0]}:
            example = _part(example, count)
        found.append(example)
        count -= size
        if count <= 0:
            break
    return found


def _part(example: Example, count: int) -> Example:
    """The first so many inputs of a batch."""

    def part(leaf: Any) -> Any:
        return leaf[:count] if isinstance(leaf, Tensor) else leaf

    return Example(tree_map(part, example.args), tree_map(part, dict(example.kwargs)))


def _solve_(net: nn.Module, reader: Reader, gone: Tensor) -> None:
    """Let a reader make up for channels it can no longer read."""
    if not reader.whole:
        return
    reads = reader.matrix.shape[1]
    matrix = reader.matrix.clone()
    constants = []
    for own, gram, off in zip(matrix, reader.gram, reader.columns(gone), strict=True):
        constant = len(gram) - reads
        stays = torch.cat([~off, off.new_ones(constant)])
        system = gram[stays][:, stays]
        missing = gram[stays][:, :reads][:, off] @ own[off]
        change = torch.cholesky_solve(missing, factor(system))
        own[~off] += change[: len(change) - constant]
        own[off] = 0
        if constant:
            constants.append(change[-1])
    layer = layer_at(net, reader.site.layer)
    set_matrix_(layer, matrix.to(layer.weight))
    if constants:
        shift_(net, reader.site, torch.cat(constants))


@torch.no_grad()
def _accuracy(net: nn.Module, inputs: Inputs) -> float | None:
    """Share of labelled inputs that a classifier gets right."""
    right = seen = 0
    for number in range(len(inputs)):
        labels = inputs.labels(number)
        if labels is None:
            continue
        out = inputs[number].call(net)
        if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != len(labels):
            return None
        right += int((out.argmax(1) == labels.to(out.device)).sum())
        seen += len(labels)
    return right / seen if seen else None
