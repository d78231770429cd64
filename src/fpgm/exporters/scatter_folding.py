"""Fold scatters into a residual stream into the convolution before them.

If streams keep their full width, a layer's output is scattered among zero channels before it is
added. In other runtimes that is a concatenated zero channel and a gather: two passes over memory,
and the addition is a third instead of being fused with the convolution. A convolution with a small
fan-in is faster if it computes the zero channels itself, with filters of zeros.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fpgm.pruning.adapter_placement import attach_, detach_, output_scatter
from fpgm.utils.channel_adapters import scatter_sources
from fpgm.utils.modules import module_at, replace_module_

MACS_PER_SCATTER = 20
"""MACs that cost as much as scattering one channel at one position, in ONNX Runtime.

Measured on ResNet-50: filters of zeros for all of a stream's channels pay up to about 15, and no
longer at 31. A single zero filter, as a source for the gather, pays as long as the fan-in is not
larger than the number of filters: it costs a block of eight filters, whereas a concatenated zero
channel costs a copy of all.
"""


@torch.no_grad()
def fold_scatter_(model: nn.Module, layer: str, host: str) -> None:
    """Fold all or part of the scatter after `host` into a layer, if that is faster.

    Args:
        model: changed in place.
        layer: path of the convolution.
        host: path of the module with the scatter: the convolution or its batch norm.
    """
    conv, adapter = module_at(model, layer), output_scatter(model, host)
    if adapter is None or adapter.dim != 1 or not _is_plain_conv(conv):
        return
    assert isinstance(conv, _ConvNd)
    fan_in, kept = conv.weight[0].numel(), conv.out_channels
    if fan_in * (adapter.size - kept) <= MACS_PER_SCATTER * adapter.size:
        detach_(model, host)
        replace_module_(model, conv, _widen(conv, adapter.size, torch.tensor(adapter.index)))
    elif fan_in <= kept:
        detach_(model, host)
        replace_module_(model, conv, _widen(conv, kept + 1, torch.arange(kept)))
        index = tuple(scatter_sources(torch.tensor(adapter.index), adapter.size).tolist())
        attach_(model, replace(adapter, kind="gather", index=index, size=kept + 1))


def _is_plain_conv(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.groups == 1


def _widen(conv: _ConvNd, size: int, places: Tensor) -> _ConvNd:
    """Return the convolution with its filters at these places and zero filters at the others."""
    widened = copy.deepcopy(conv)
    widened.out_channels = size
    for name, parameter in conv.named_parameters():
        values = parameter.new_zeros((size, *parameter.shape[1:]))
        values[places] = parameter
        setattr(widened, name, nn.Parameter(values, requires_grad=parameter.requires_grad))
    return widened
