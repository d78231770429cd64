"""Channels placed in a stream by the convolution that makes them.

Where streams keep their full width, what a layer gives is placed among zeros before it is added. In
other runtimes that is a zero joined on and a gather, two passes over memory, and the addition stays
a third instead of becoming part of the convolution. A convolution that reads little for each output
does this cheaper itself, with filters of zeros where nothing is to come out.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fpgm.pruning.adapter_placement import attach_, detach_, placing
from fpgm.utils.channel_adapters import sources
from fpgm.utils.modules import module_at, replace_module_

WORTH = 20
"""Products that cost as much as placing one channel, at one place, in ONNX Runtime.

Measured on ResNet-50: filters of zeros for all of a stream's channels pay up to about 15, and no
longer at 31. A single one, for the gather to take its zeros from, pays as long as a filter reads
less than there are filters: its cost is a block of eight filters, a joined zero's is a copy of all.
"""


@torch.no_grad()
def place_within_(model: nn.Module, layer: str, host: str) -> None:
    """Let a layer do all or part of the placing of the output of `host`, if that pays."""
    conv, adapter = module_at(model, layer), placing(model, host)
    if adapter is None or adapter.dim != 1 or not _plain(conv):
        return
    assert isinstance(conv, _ConvNd)
    reads, kept = conv.weight[0].numel(), conv.out_channels
    if reads * (adapter.size - kept) <= WORTH * adapter.size:
        detach_(model, host)
        replace_module_(model, conv, _grown(conv, adapter.size, torch.tensor(adapter.index)))
    elif reads <= kept:
        detach_(model, host)
        replace_module_(model, conv, _grown(conv, kept + 1, torch.arange(kept)))
        picks = tuple(sources(torch.tensor(adapter.index), adapter.size).tolist())
        attach_(model, replace(adapter, kind="gather", index=picks, size=kept + 1))


def _plain(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.groups == 1


def _grown(conv: _ConvNd, size: int, places: Tensor) -> _ConvNd:
    """The convolution with its filters at some places and zeros at the others."""
    grown = copy.deepcopy(conv)
    grown.out_channels = size
    for name, given in conv.named_parameters():
        wide = given.new_zeros((size, *given.shape[1:]))
        wide[places] = given
        setattr(grown, name, nn.Parameter(wide, requires_grad=given.requires_grad))
    return grown
