"""Fold batch norms, and scatters of adapters, into the layers before them.

The model computes the same with fewer operators.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from fpgm.exporters.output_error import TOLERANCE, relative_difference
from fpgm.exporters.scatter_folding import fold_scatter_
from fpgm.pruning.adapter_placement import adapter_at
from fpgm.recovery.solvable_layers import find_solvable_layers, has_plain_forward, is_plain
from fpgm.utils.channel_adapters import unwrap
from fpgm.utils.copying import copy_model
from fpgm.utils.example_inputs import Example, tensors_in
from fpgm.utils.modules import module_at, replace_module_

_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


@torch.no_grad()
def simplify(model: nn.Module, example: Example) -> nn.Module:
    """Return a copy in eval mode, with batch norms folded if that does not change the outputs.

    Folding changes them if a layer's output is also an output of the model. It fails if the model's
    code reads an attribute of a removed batch norm.
    """
    folded, plain = fold_batch_norms(model, example), copy_model(model).eval()
    expected = tensors_in(example.call(plain))
    try:
        same = relative_difference(tensors_in(example.call(folded)), expected) <= TOLERANCE
    except Exception:  # the model's own code raises errors of any kind
        same = False
    return (folded if same else plain).requires_grad_(False)


@torch.no_grad()
def fold_batch_norms(model: nn.Module, example: Example) -> nn.Module:
    """Return a copy in eval mode, with batch norms folded into the layers before them.

    A batch norm is folded if nothing else uses the layer's output, which one pass shows. A scatter
    of its output into a residual stream is kept, unless it can be folded too.
    """
    copied = copy_model(model).eval()
    for solvable in find_solvable_layers(copied, example).layers:
        if solvable.calls != 1:
            continue
        if solvable.batch_norm is None:
            fold_scatter_(copied, solvable.path, solvable.path)
            continue
        layer, norm = module_at(copied, solvable.path), module_at(copied, solvable.batch_norm)
        if (
            is_plain(layer)
            and _can_fold(norm)
            and _nothing_between(copied, solvable.path, solvable.batch_norm)
        ):
            replace_module_(copied, layer, _fuse(layer, norm))
            replace_module_(copied, norm, _identity_with_hooks(norm))
            fold_scatter_(copied, solvable.path, solvable.batch_norm)
    return copied


def _can_fold(norm: nn.Module) -> bool:
    """Tell whether the norm is a fixed scale and shift, and nothing else."""
    return (
        isinstance(norm, _BatchNorm) and norm.running_mean is not None and has_plain_forward(norm)
    )


def _nothing_between(model: nn.Module, layer: str, norm: str) -> bool:
    """Tell whether no adapter or hook comes between the layer and the norm."""
    modules = model.get_submodule(layer), model.get_submodule(norm)
    return (
        adapter_at(model, layer, "output") is None
        and adapter_at(model, norm, "input") is None
        and not any(module._forward_hooks for module in (modules[0], unwrap(modules[0])))
        and not any(module._forward_pre_hooks for module in (modules[1], unwrap(modules[1])))
    )


def _fuse(layer: nn.Module, norm: nn.Module) -> nn.Module:
    assert isinstance(norm, _BatchNorm)
    if isinstance(layer, nn.Linear):
        return fuse_linear_bn_eval(layer, norm)
    assert isinstance(layer, _ConvNd)
    return fuse_conv_bn_eval(layer, norm, transpose=isinstance(layer, _ConvTransposeNd))


def _identity_with_hooks(norm: nn.Module) -> nn.Module:
    """Return an identity to put in a norm's place, with the user's hooks on its output."""
    identity = nn.Identity().eval()
    for table in _HOOKS:
        getattr(identity, table).update(getattr(norm, table))
    return identity
