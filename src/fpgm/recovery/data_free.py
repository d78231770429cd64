"""Recovery without any data: how units vary together, guessed from the weights alone.

A batch norm says how what it returns is distributed; two filters that look at the same input agree
as much as they point the same way. From that follows how the activations behind a ReLU vary
together, and so which mixture of kept units a removed one is nearest to.
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
from fpgm.recovery.layer_solver import LEAST_SHARE, layer_at, norm_at, shift_
from fpgm.recovery.rectified_gaussian import covariance, rectified
from fpgm.recovery.solvable_layers import Site, find_sites
from fpgm.recovery.unfold import groups_of, matrix_of, read, set_matrix_
from fpgm.tracing.grouping import Pool, Structure, Writer, couple
from fpgm.tracing.recorder import watch
from fpgm.tracing.residual import watcher
from fpgm.utils.copying import copy_model, shadow
from fpgm.utils.example_inputs import Example
from fpgm.utils.modules import module_at, named_tensors

RIDGE = 1e-3
"""In units of the units' mean variance: two guesses should not be trusted to the last digit."""


@dataclass(frozen=True)
class Spread:
    """Means of a pool's units, and how they vary together."""

    mean: Tensor
    covariance: Tensor
    alone: bool
    """Whether one layer writes them: how several that add up vary together is a wilder guess."""


@torch.no_grad()
def stood_in(model: nn.Module, plan: Plan, example: Example) -> tuple[nn.Module, list[str]]:
    """A full-size copy in which kept units also say what the removed ones said; and its readers.

    The removed units are still there, as they were: compacting the copy takes them out.
    """
    residual = plan.asked.get("residual", "coupled")
    structure = couple(watch(watcher(model, [example], residual), [example]), approximate=True)
    gone = removed_classes(structure, plan)
    copy = copy_model(model)
    sites = {site.layer: site for site in find_sites(model, example).sites}
    positive = _nonnegative(model, list(sites), example)
    changed: list[str] = []
    for pool in structure.pools:
        lost = torch.isin(pool.units, gone)
        if not bool(lost.any()) or bool(lost.all()):
            continue
        for path, places in structure.readers(pool.units):
            site = sites.get(path)
            if site is not None and site.calls == 1 and groups_of(layer_at(model, path)) == 1:
                spread = _spread(model, pool, sites, path in positive)
                _stand_in_(copy, site, places, lost, spread)
                changed.append(path)
    return copy, list(dict.fromkeys(changed))


def removed_classes(structure: Structure, plan: Plan) -> Tensor:
    """The classes a plan removes, found from its cuts."""
    gone = [torch.zeros(0, dtype=torch.int64)]
    cuts = by_tensor(plan.cuts)
    for slot in structure.seen.slots.values():
        for c in cuts.get(slot.name, []):
            for f, role in zip(slot.fields, slot.roles, strict=True):
                labels = f.reshape(-1)
                if role == c.role and c.blocks == 1 and len(labels) == c.size:
                    stays = torch.zeros(c.size, dtype=torch.bool)
                    stays[list(c.keep)] = True
                    gone.append(structure.of(labels[~stays]))
    found: Tensor = torch.cat(gone).unique()
    return found


def _spread(model: nn.Module, pool: Pool, sites: Mapping[str, Site], nonnegative: bool) -> Spread:
    """How the pool's units vary: contributions of several layers add up, as if independent."""
    count = len(pool.units)
    mean = torch.zeros(count, dtype=torch.float64)
    total = torch.zeros(count, count, dtype=torch.float64)
    writers = [writer for writer in pool.writers if not writer.carries]
    for writer in writers:
        own_mean, own = _written(model, writer, sites.get(writer.layer))
        rows = (writer.classes[:, None] == pool.units[None]).double()
        mean += rows.T @ own_mean
        total += rows.T @ own @ rows
    alone = len(writers) == 1
    if not nonnegative:
        return Spread(mean, total, alone)
    deviation = total.diagonal().clamp(min=1e-24).sqrt()
    coefficients = rectified(mean, deviation)
    together = covariance(coefficients, total / deviation.outer(deviation))
    return Spread(coefficients[0], together, alone)


def _written(model: nn.Module, writer: Writer, site: Site | None) -> tuple[Tensor, Tensor]:
    """Mean and covariance of what one layer's filters write, through its norm if it has one."""
    weight = named_tensors(model)[writer.slot.name].detach().cpu().double()
    filters = writer.filters(weight)
    gram = filters @ filters.T
    norm = None if site is None or site.norm is None else module_at(model, site.norm)
    if isinstance(norm, _BatchNorm) and norm.affine:
        size = gram.diagonal().clamp(min=1e-24).sqrt()
        scale = norm.weight.detach().cpu().double() / size
        return norm.bias.detach().cpu().double(), gram * scale.outer(scale)
    bias = getattr(module_at(model, writer.layer), "bias", None)
    mean = torch.zeros(len(filters), dtype=torch.float64)
    return (bias.detach().cpu().double() if isinstance(bias, Tensor) else mean), gram


def _stand_in_(copy: nn.Module, site: Site, places: Tensor, lost: Tensor, spread: Spread) -> None:
    """Let the kept units of a pool also say what the lost ones said, as far as they can."""
    layer = layer_at(copy, site.layer)
    matrix = matrix_of(layer)[0].cpu().double().unflatten(0, (len(places), -1))
    system = spread.covariance[~lost][:, ~lost]
    system.diagonal().add_(RIDGE * spread.covariance.diagonal().mean().clamp(min=1e-24))
    mixture = torch.linalg.solve(system, spread.covariance[~lost][:, lost])
    constant = spread.mean[lost] - spread.mean[~lost] @ mixture
    inside = places >= 0
    # What is done with a unit, over all its channels, goes to every channel of those that stay.
    use = torch.zeros(len(lost), *matrix.shape[1:], dtype=torch.float64)
    use.index_add_(0, places[inside], matrix[inside])
    times = places[inside].bincount(minlength=len(lost)).clamp(min=1).double()[:, None, None]
    more = torch.zeros_like(use)
    more[~lost] = torch.einsum("kl,ltw->ktw", mixture, use[lost]) / times[~lost]
    before = torch.einsum("utw,uv,vtw->w", use, spread.covariance, use)
    now = (use + more * times)[~lost]
    after = torch.einsum("utw,uv,vtw->w", now, spread.covariance[~lost][:, ~lost], now)
    matrix[inside] += more[places[inside]]
    norm = None if site.norm is None else norm_at(copy, site.norm)
    if spread.alone and norm is not None and norm.running_var is not None:
        share = (after / before.clamp(min=1e-24)).clamp(LEAST_SHARE, 1.0)
        norm.running_var.mul_(share.to(norm.running_var))
    set_matrix_(layer, matrix.flatten(0, 1)[None].to(layer.weight))
    shift_(copy, site, torch.einsum("l,ltw->w", constant, use[lost]))


def _nonnegative(model: nn.Module, layers: Sequence[str], example: Example) -> set[str]:
    """Layers whose input has no negative value: what comes out of a ReLU."""
    found: set[str] = set()
    net = shadow(model).eval()
    for path in layers:

        def hook(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            if bool((read(args, kwargs) >= 0).all()):
                found.add(path)

        module_at(net, path).register_forward_pre_hook(hook, with_kwargs=True)
    example.call(net)
    return found
