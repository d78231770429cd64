"""Norms and placing taken over by the layers before them: the same function with fewer steps."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from fpgm.exporters.output_error import TOLERANCE, difference
from fpgm.exporters.scatter_folding import place_within_
from fpgm.pruning.adapter_placement import adapter_at
from fpgm.recovery.solvable_layers import find_sites
from fpgm.utils.channel_adapters import unwrap
from fpgm.utils.copying import copy_model
from fpgm.utils.example_inputs import Example, tensors_in
from fpgm.utils.modules import module_at, replace_module_

_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


@torch.no_grad()
def simplified(model: nn.Module, example: Example) -> nn.Module:
    """A model in eval mode as runtimes are given it: `folded`, if that is the same model.

    It is not where what a layer gives is also an output of the model's own, or where its code asks
    a norm for what is no longer there.
    """
    small, plain = folded(model, example), copy_model(model).eval()
    wanted = tensors_in(example.call(plain))
    try:
        same = difference(tensors_in(example.call(small)), wanted) <= TOLERANCE
    except Exception:  # of the model's own code, of any kind
        same = False
    return (small if same else plain).requires_grad_(False)


@torch.no_grad()
def folded(model: nn.Module, example: Example) -> nn.Module:
    """A copy in eval mode whose batch norms are part of the layers whose outputs they alone read.

    One pass shows which those are. Where the norm's output is placed in a stream, it still is,
    unless the layer can do that.
    """
    copied = copy_model(model).eval()
    for site in find_sites(copied, example).sites:
        if site.calls != 1:
            continue
        if site.norm is None:
            place_within_(copied, site.layer, site.layer)
            continue
        layer, norm = module_at(copied, site.layer), module_at(copied, site.norm)
        if _can_fold(norm) and _nothing_between(copied, site.layer, site.norm):
            replace_module_(copied, layer, _fused(layer, norm))
            replace_module_(copied, norm, _passing(norm))
            place_within_(copied, site.layer, site.norm)
    return copied


def _can_fold(norm: nn.Module) -> bool:
    """Tell whether what the norm does is fixed."""
    return isinstance(norm, _BatchNorm) and norm.running_mean is not None


def _nothing_between(model: nn.Module, layer: str, norm: str) -> bool:
    """Tell whether nothing but the norm sees what the layer returns."""
    called = model.get_submodule(layer), model.get_submodule(norm)
    return (
        adapter_at(model, layer, "output") is None
        and adapter_at(model, norm, "input") is None
        and not any(module._forward_hooks for module in (called[0], unwrap(called[0])))
        and not any(module._forward_pre_hooks for module in (called[1], unwrap(called[1])))
    )


def _fused(layer: nn.Module, norm: nn.Module) -> nn.Module:
    assert isinstance(norm, _BatchNorm)
    if isinstance(layer, nn.Linear):
        return fuse_linear_bn_eval(layer, norm)
    assert isinstance(layer, _ConvNd)
    return fuse_conv_bn_eval(layer, norm, transpose=isinstance(layer, _ConvTransposeNd))


def _passing(norm: nn.Module) -> nn.Module:
    """Return nothing, in the place of a norm, with the user's hooks on its output."""
    empty = nn.Identity().eval()
    for table in _HOOKS:
        getattr(empty, table).update(getattr(norm, table))
    return empty
