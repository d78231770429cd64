"""Recovery without data: estimate the covariance of units from the weights only.

The output of a batch norm has the norm's shift as mean and its scale as standard deviation, and the
correlation of two filters with the same input is the cosine of the angle between them. This gives
the covariance of the activations after a ReLU, and with it the linear combination of kept units
that best approximates a removed one. Its weights are added to those of the kept units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fpgm.pruning.plan import Plan
from fpgm.pruning.slicing import by_tensor
from fpgm.recovery.layer_solver import MIN_VARIANCE_RATIO, batch_norm_at, layer_at, shift_output_
from fpgm.recovery.rectified_gaussian import hermite_coefficients, rectified_covariance
from fpgm.recovery.solvable_layers import SolvableLayer, find_solvable_layers
from fpgm.recovery.unfold import groups_of, input_of, matrix_of, set_matrix_
from fpgm.tracing.grouping import ChannelGroup, Structure, group_channels
from fpgm.tracing.producers import Producer
from fpgm.tracing.recorder import record_trace
from fpgm.tracing.residual import make_recorder
from fpgm.utils.copying import copy_model, copy_sharing_weights
from fpgm.utils.example_inputs import Example
from fpgm.utils.modules import module_at, named_tensors

RIDGE = 1e-3
"""In units of the mean variance: the covariance is an estimate, not exact to the last digit."""


@dataclass(frozen=True)
class UnitStatistics:
    """Estimated mean and covariance of the units of a group."""

    mean: Tensor
    covariance: Tensor
    single_producer: bool
    """Whether one layer produces them: for several that add up the estimate is less reliable."""


@torch.no_grad()
def compensate(model: nn.Module, plan: Plan, example: Example) -> tuple[nn.Module, list[str]]:
    """Return a full-size copy whose kept units compensate for removed ones, and changed layers.

    The removed units are still there, unchanged; compacting the copy removes them.
    """
    residual = plan.asked.get("residual", "coupled")
    structure = group_channels(
        record_trace(make_recorder(model, [example], residual), [example]), approximate=True
    )
    removed_units = find_removed_units(structure, plan)
    copy = copy_model(model)
    layers = {layer.path: layer for layer in find_solvable_layers(model, example).layers}
    nonnegative = _find_nonnegative_inputs(model, list(layers), example)
    changed: list[str] = []
    for group in structure.groups:
        removed = torch.isin(group.units, removed_units)
        if not bool(removed.any()) or bool(removed.all()):
            continue
        for path, places in structure.consumers(group.units):
            layer = layers.get(path)
            if layer is not None and layer.calls == 1 and groups_of(layer_at(model, path)) == 1:
                statistics = _estimate_statistics(model, group, layers, path in nonnegative)
                _compensate_layer_(copy, layer, places, removed, statistics)
                changed.append(path)
    return copy, list(dict.fromkeys(changed))


def find_removed_units(structure: Structure, plan: Plan) -> Tensor:
    """Look up in a plan's cuts which units it removes."""
    removed = [torch.zeros(0, dtype=torch.int64)]
    cuts = by_tensor(plan.cuts)
    for info in structure.trace.parameter_infos.values():
        for c in cuts.get(info.name, []):
            for f, role in zip(info.fields, info.roles, strict=True):
                labels = f.reshape(-1)
                if role == c.role and c.blocks == 1 and len(labels) == c.size:
                    stays = torch.zeros(c.size, dtype=torch.bool)
                    stays[list(c.keep)] = True
                    removed.append(structure.classes_of(labels[~stays]))
    units: Tensor = torch.cat(removed).unique()
    return units


def _estimate_statistics(
    model: nn.Module, group: ChannelGroup, layers: Mapping[str, SolvableLayer], nonnegative: bool
) -> UnitStatistics:
    """Add up the statistics of all layers that produce a group, as if they were independent."""
    count = len(group.units)
    mean = torch.zeros(count, dtype=torch.float64)
    total = torch.zeros(count, count, dtype=torch.float64)
    producers = [producer for producer in group.producers if not producer.carries]
    for producer in producers:
        layer_mean, layer_covariance = _output_statistics(
            model, producer, layers.get(producer.layer)
        )
        rows = (producer.classes[:, None] == group.units[None]).double()
        mean += rows.T @ layer_mean
        total += rows.T @ layer_covariance @ rows
    single_producer = len(producers) == 1
    if not nonnegative:
        return UnitStatistics(mean, total, single_producer)
    std = total.diagonal().clamp(min=1e-24).sqrt()
    coefficients = hermite_coefficients(mean, std)
    covariance = rectified_covariance(coefficients, total / std.outer(std))
    return UnitStatistics(coefficients[0], covariance, single_producer)


def _output_statistics(
    model: nn.Module, producer: Producer, layer: SolvableLayer | None
) -> tuple[Tensor, Tensor]:
    """Estimate mean and covariance of one layer's output, after its batch norm if it has one."""
    weight = named_tensors(model)[producer.info.name].detach().cpu().double()
    filters = producer.filters(weight)
    gram = filters @ filters.T
    norm = None
    if layer is not None and layer.batch_norm is not None:
        norm = module_at(model, layer.batch_norm)
    if isinstance(norm, _BatchNorm) and norm.affine:
        size = gram.diagonal().clamp(min=1e-24).sqrt()
        scale = norm.weight.detach().cpu().double() / size
        return norm.bias.detach().cpu().double(), gram * scale.outer(scale)
    bias = getattr(module_at(model, producer.layer), "bias", None)
    mean = torch.zeros(len(filters), dtype=torch.float64)
    return (bias.detach().cpu().double() if isinstance(bias, Tensor) else mean), gram


def _compensate_layer_(
    copy: nn.Module,
    solvable: SolvableLayer,
    places: Tensor,
    removed: Tensor,
    statistics: UnitStatistics,
) -> None:
    """Add to a consumer's weights for kept units what best reproduces the removed ones.

    Args:
        copy: the model to change.
        solvable: a layer that consumes the group.
        places: for each channel the layer reads, the index of its unit in the group; −1: none.
        removed: for each unit of the group, whether it is removed.
        statistics: of the group's units.
    """
    layer = layer_at(copy, solvable.path)
    matrix = matrix_of(layer)[0].cpu().double().unflatten(0, (len(places), -1))
    covariance = statistics.covariance
    system = covariance[~removed][:, ~removed]
    system.diagonal().add_(RIDGE * covariance.diagonal().mean().clamp(min=1e-24))
    mixture = torch.linalg.solve(system, covariance[~removed][:, removed])
    constant = statistics.mean[removed] - statistics.mean[~removed] @ mixture
    inside = places >= 0
    # A unit's weights, summed over its channels, are distributed to all channels of kept units.
    weights = torch.zeros(len(removed), *matrix.shape[1:], dtype=torch.float64)
    weights.index_add_(0, places[inside], matrix[inside])
    times = places[inside].bincount(minlength=len(removed)).clamp(min=1).double()[:, None, None]
    change = torch.zeros_like(weights)
    change[~removed] = torch.einsum("kl,ltw->ktw", mixture, weights[removed]) / times[~removed]
    before = torch.einsum("utw,uv,vtw->w", weights, covariance, weights)
    kept = (weights + change * times)[~removed]
    after = torch.einsum("utw,uv,vtw->w", kept, covariance[~removed][:, ~removed], kept)
    matrix[inside] += change[places[inside]]
    norm = None if solvable.batch_norm is None else batch_norm_at(copy, solvable.batch_norm)
    if statistics.single_producer and norm is not None and norm.running_var is not None:
        ratio = (after / before.clamp(min=1e-24)).clamp(MIN_VARIANCE_RATIO, 1.0)
        norm.running_var.mul_(ratio.to(norm.running_var))
    set_matrix_(layer, matrix.flatten(0, 1)[None].to(layer.weight))
    shift_output_(copy, solvable, torch.einsum("l,ltw->w", constant, weights[removed]))


def _find_nonnegative_inputs(model: nn.Module, layers: Sequence[str], example: Example) -> set[str]:
    """Find layers whose input has no negative value, as after a ReLU."""
    nonnegative: set[str] = set()
    net = copy_sharing_weights(model).eval()
    for path in layers:

        def hook(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            if bool((input_of(args, kwargs) >= 0).all()):
                nonnegative.add(path)

        # Never removed, for the model is our own copy and runs only once.
        module_at(net, path).register_forward_pre_hook(hook, with_kwargs=True)
    example.call(net)
    return nonnegative
