"""Collect statistics of all layers in one run over the data: input covariance, and error gains.

The gain says how much a small error in a layer's output changes the model's outputs. It is
estimated with random probes: on average, it is the squared gradient of a random weighted sum of the
outputs. Ranks that divide the inputs add up their sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fpgm.recovery.layer_solver import MAX_FAN_IN, WIDE_LAYER_ROWS, can_shift_output, layer_at
from fpgm.recovery.sensitivity.held_out import first_batches, other_inputs
from fpgm.recovery.solvable_layers import (
    ConvolutionCalls,
    SolvableLayer,
    custom_forwards,
    find_solvable_layers,
)
from fpgm.recovery.unfold import OutputSample, input_of, matrix_of
from fpgm.utils.calibration_data import Inputs
from fpgm.utils.copying import copy_sharing_weights
from fpgm.utils.distributed import Ranks
from fpgm.utils.example_inputs import Example, tensors_in
from fpgm.utils.modules import module_at
from fpgm.utils.progress import Progress

ROWS_PER_WEIGHT = 16
"""Positions sampled for each weight of a filter."""
MIN_ROWS = 8_000
RIDGE, MAX_RIDGE = 1e-4, 1e-1
"""In units of the mean square of a layer's inputs, as in recovery."""
RIDGE_OF_FEW_ROWS = 1e-2
"""The ridge of a layer that has as many rows as weights."""


@dataclass
class ConsumerStatistics:
    """Weights of a layer that consumes channels, and the second moments of its inputs."""

    matrix: Tensor
    """[groups, fan-in, outputs]"""
    gram: Tensor
    """[groups, fan-in, fan-in], summed over an input's positions; with one more row and column, of
    a constant, if the layer can add one to its output.

    For a layer too wide for that, only the variances: [groups, fan-in].
    """
    gain: Tensor
    """[outputs]: what a squared error in a channel adds to the model's squared output error."""
    channels: int
    """Input channels, of all groups together."""
    layer: SolvableLayer
    """The layer's path, and the batch norm behind it."""
    rows: float
    """Positions that were sampled for `gram`."""

    @property
    def ridge(self) -> float:
        """The ridge to solve with, larger if there are few rows for the number of weights.

        With fewer rows than weights, a solution without one fits these rows and no others.
        """
        return min(max(RIDGE, RIDGE_OF_FEW_ROWS * len(self.gram[0]) / self.rows), MAX_RIDGE)

    def columns(self, channels: Tensor) -> Tensor:
        """Repeat a value of each channel for each column of every group: [groups, fan-in]."""
        groups, fan_in, _ = self.matrix.shape
        of_all_groups = len(channels) == self.channels
        by_group = channels.reshape(groups, -1) if of_all_groups else channels.expand(groups, -1)
        return by_group.repeat_interleave(fan_in // by_group.shape[1], 1)

    @property
    def has_full_gram(self) -> bool:
        """Whether `gram` has covariances, not only variances."""
        return self.gram.ndim == 3


@dataclass
class BranchStatistics:
    """Variance and gain of the channels that a module adds to a residual stream."""

    variance: Tensor
    gain: Tensor


@dataclass
class ModelStatistics:
    """Statistics of all layers, by path; for one input, and relative to the outputs' squares."""

    consumers: dict[str, ConsumerStatistics]
    branches: dict[str, BranchStatistics]


@dataclass
class _RunningSums:
    """Sums over the data for one layer or branch."""

    gram: Tensor | None = None
    squares: Tensor | None = None
    sums: Tensor | None = None
    gain: Tensor | None = None
    positions: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    probed: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    rows: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def mean_gram(self, inputs: float, *, constant: bool) -> Tensor | None:
        """Average the Gram matrix over inputs; only variances if that is all there is."""
        if self.gram is None:
            return self.mean_variance(inputs)
        return (self.gram if constant else self.gram[:, :-1, :-1]) / inputs

    def mean_variance(self, inputs: float) -> Tensor | None:
        """Average each channel's variance over inputs, summed over an input's positions."""
        if self.sums is None or self.squares is None:
            return None
        return (self.squares - self.sums.square() / self.positions).clamp(min=0) / inputs

    def tensors(self) -> list[Tensor]:
        """Return the sums that there are."""
        values = (
            self.gram,
            self.squares,
            self.sums,
            self.gain,
            self.positions,
            self.probed,
            self.rows,
        )
        return [value for value in values if value is not None]

    def shapes(self) -> dict[str, torch.Size]:
        """Return their shapes by name."""
        return {name: t.shape for name, t in vars(self).items() if t is not None}

    def make_room(self, shapes: Mapping[str, torch.Size], device: torch.device) -> None:
        """Add zeros for sums that there are not."""
        for name, shape in shapes.items():
            if getattr(self, name) is None:
                setattr(self, name, torch.zeros(shape, dtype=torch.float64, device=device))

    def add(self, name: str, value: Tensor) -> None:
        total = getattr(self, name)
        setattr(self, name, value if total is None else total + value)


@dataclass
class _StatisticsHooks:
    """Hooks on a copy of the model that shares its weights."""

    model: nn.Module
    consumers: Mapping[str, SolvableLayer]
    branches: Sequence[tuple[str, int]]
    batches: int
    consumer_sums: dict[str, _RunningSums] = field(default_factory=dict)
    branch_sums: dict[str, _RunningSums] = field(default_factory=dict)
    seed: int = 0

    def register_(self) -> None:
        """Add the hooks. They are never removed: the copy is not used for anything else."""
        for path, layer in self.consumers.items():
            if layer.arguments is None:
                module = module_at(self.model, path)
                module.register_forward_hook(self._consumer_hook(path), with_kwargs=True)
        for path, dim in self.branches:
            self.model.get_submodule(path).register_forward_hook(self._branch_hook(path, dim))

    def _consumer_hook(self, path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
            self._add_call(path, input_of(args, kwargs), out)

        return hook

    def add_convolution(self, path: str, args: tuple[Any, ...], out: Tensor) -> None:
        """Collect statistics of a layer that has a forward of its own."""
        self._add_call(path, args[0], out)

    def _add_call(self, path: str, x: Tensor, out: Tensor) -> None:
        """Collect statistics of a layer's call."""
        layer = layer_at(self.model, path)
        sums = self.consumer_sums.setdefault(path, _RunningSums())
        fan_in = matrix_of(layer).shape[1]
        wide = fan_in > MAX_FAN_IN
        rows_in_all = WIDE_LAYER_ROWS if wide else max(ROWS_PER_WEIGHT * fan_in, MIN_ROWS)
        max_positions = -(-rows_in_all // self.batches)
        arguments = self.consumers[path].arguments
        sample = OutputSample(layer, x.detach(), out.detach(), max_positions, self.seed, arguments)
        rows = sample.rows()
        if not rows.shape[1]:  # a batch without inputs for this layer, as of a mixture of experts
            return
        dim = -1 if isinstance(layer, nn.Linear) else 1
        positions = out.numel() // out.shape[dim]
        times = positions / rows.shape[1]
        if wide:
            sums.add("sums", rows.double().sum(1) * times)
            sums.add("squares", rows.double().square().sum(1) * times)
            sums.positions += positions
        else:
            sums.add("gram", _gram_with_constant(rows) * times)
        sums.rows += rows.shape[1]
        self._probe(sums, out, dim)

    def _branch_hook(self, path: str, dim: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            sums = self.branch_sums.setdefault(path, _RunningSums())
            values = _channels_first(out.detach(), dim)
            sums.add("sums", values.sum(1))
            sums.add("squares", values.square().sum(1))
            sums.positions += values.shape[1]
            self._probe(sums, out, dim)

        return hook

    def _probe(self, sums: _RunningSums, out: Tensor, dim: int) -> None:
        """Sum the squares of the gradient, once the backward pass gets here."""

        def hook(grad: Tensor) -> None:
            squares = _channels_first(grad, dim).square()
            sums.add("gain", squares.sum(1))
            sums.probed += squares.shape[1]

        if out.requires_grad:  # an activation of this pass, which the hook ends with
            out.register_hook(hook)


def collect_statistics(
    model: nn.Module,
    branches: Iterable[tuple[str, int]],
    inputs: Inputs,
    progress: Progress | None = None,
    *,
    skip: int = 0,
) -> ModelStatistics:
    """Run inputs once, forward and backward, and collect statistics of all layers.

    Args:
        model: unchanged.
        branches: modules that add to a residual stream, with the dimension of their channels.
        inputs: all batches.
        progress: called before each batch.
        skip: how many of the first inputs are left out, to measure errors on.
    """
    net = copy_sharing_weights(model).eval()
    layers = {layer.path: layer for layer in find_solvable_layers(net, inputs.first).layers}
    batches = max(inputs.batches - first_batches(inputs, skip), 1)
    hooks = _StatisticsHooks(net, layers, list(branches), batches)
    hooks.register_()
    convolutions = ConvolutionCalls(custom_forwards(net, layers.values()), hooks.add_convolution)
    totals = torch.zeros(2, dtype=torch.float64)  # the outputs' squares, and how many inputs
    for number, example, count in other_inputs(inputs, skip):
        if progress is not None:
            progress("measuring", number, len(inputs))
        hooks.seed = inputs.number_of(number)  # probes do not depend on who takes which batch
        random = torch.Generator().manual_seed(hooks.seed)
        with convolutions:
            outputs = _run_probe(net, example, random)
        squares = sum(float(out[out.isfinite()].double().square().sum()) for out in outputs)
        totals += torch.tensor([squares, count], dtype=torch.float64)
    device = next((p.device for p in net.parameters()), totals.device)
    tables = (hooks.consumer_sums, hooks.branch_sums)
    _add_over_ranks_(tables, totals, device, inputs.ranks)
    size, count = totals.tolist()
    scale = count / (size or 1.0)
    statistics = ModelStatistics({}, {})
    for path, sums in hooks.consumer_sums.items():
        layer = layer_at(net, path)
        gram = sums.mean_gram(count, constant=can_shift_output(net, layers[path]))
        if sums.gain is not None and gram is not None:  # gradients of an output reach the layer
            width = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
            gain = sums.gain / sums.probed * scale
            statistics.consumers[path] = ConsumerStatistics(
                matrix_of(layer).double(), gram, gain, width, layers[path], float(sums.rows)
            )
    for path, sums in hooks.branch_sums.items():
        variance = sums.mean_variance(count)
        if sums.gain is not None and variance is not None:
            gain = sums.gain / sums.probed * scale
            statistics.branches[path] = BranchStatistics(variance, gain)
    return statistics


def _add_over_ranks_(
    tables: Sequence[dict[str, _RunningSums]], totals: Tensor, device: torch.device, ranks: Ranks
) -> None:
    """Turn the sums of each rank's inputs into those of all inputs, with one all-reduce."""
    if ranks.size == 1:
        return
    everyone = ranks.gather([{p: sums.shapes() for p, sums in t.items()} for t in tables])
    for number, table in enumerate(tables):
        # A rank may have no batch that reaches a layer, and may have met them in another order.
        paths = dict.fromkeys(path for own in everyone for path in own[number])
        in_order = {path: table.get(path, _RunningSums()) for path in paths}
        for path, sums in in_order.items():
            for own in everyone:
                sums.make_room(own[number].get(path, {}), device)
        table.clear()
        table.update(in_order)
    ranks.sum_(totals, *(t for table in tables for sums in table.values() for t in sums.tensors()))


@torch.enable_grad()
def _run_probe(net: nn.Module, example: Example, random: torch.Generator) -> list[Tensor]:
    """Run forward, then backward from a random weighted sum of the outputs; return the outputs."""
    args, kwargs = example.args, dict(example.kwargs)
    inputs = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    leaf_of = {id(old): new for old, new in zip(inputs, leaves, strict=True)}
    result = Example(_replace(args, leaf_of), _replace(kwargs, leaf_of)).call(net)
    outputs = [t for t in tensors_in(result) if t.is_floating_point() and t.requires_grad]
    if outputs:
        total = torch.zeros((), device=outputs[0].device)
        for out in outputs:
            weights = torch.randn(out.shape, generator=random).to(out)
            finite = out.isfinite()
            total = total + (out[finite] * weights[finite]).sum()
        all_float = len(leaves) == len(tensors_in((args, kwargs)))
        parameters = [] if all_float else [p for p in net.parameters() if p.requires_grad]
        if leaves or parameters:  # the backward pass ends in these
            torch.autograd.grad(total, [*leaves, *parameters], allow_unused=True)
    return [out.detach() for out in outputs]


def _replace(value: Any, leaf_of: dict[int, Tensor]) -> Any:
    return tree_map(lambda leaf: leaf_of.get(id(leaf), leaf), value)


def _gram_with_constant(rows: Tensor) -> Tensor:
    """Compute the Gram matrix of the columns and a constant one."""
    rows = rows if rows.dtype == torch.float64 else rows.float()
    rows = torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], 2)
    return (rows.transpose(1, 2) @ rows).double()


def _channels_first(x: Tensor, dim: int) -> Tensor:
    """Reshape to [channels, everything else], in float64."""
    return x.movedim(dim, 0).flatten(1).double()
