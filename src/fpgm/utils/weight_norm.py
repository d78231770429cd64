"""Weight norm, W = g · v / ‖v‖: preserve the remaining W when slices of v are cut or zeroed.

Without a part of v the norm is smaller and the rest of W would grow. Multiplying each gain by the
ratio of the norms after and before keeps W as it was. Both of torch's weight norms are supported:
`torch.nn.utils.weight_norm` and `torch.nn.utils.parametrizations.weight_norm`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.weight_norm import WeightNorm as _Hook

from fpgm.utils.modules import modules_by_path
from fpgm.utils.weight_hooks import weight_hooks

ALL_DIMS = -1
"""What torch takes for `dim=None`: one norm for the whole weight."""


@dataclass(frozen=True)
class WeightNorm:
    """The gain and the direction of one weight, and the dim whose slices are normalized."""

    gain: Tensor
    direction: Tensor
    dim: int

    def norms(self, direction: Tensor | None = None) -> Tensor:
        """Compute the norms of the slices of a direction, in the shape of the gain, in float64."""
        v = (self.direction if direction is None else direction).detach().double()
        dims = [d for d in range(v.ndim) if self.dim == ALL_DIMS or d != self.dim % v.ndim]
        norms: Tensor = torch.linalg.vector_norm(v, dim=dims, keepdim=True)
        return norms.reshape(self.gain.shape) if self.dim == ALL_DIMS else norms


def weight_norms(model: nn.Module) -> list[WeightNorm]:
    """Find every weight norm of a model."""
    norms = []
    for module in modules_by_path(model).values():
        for _, hook in weight_hooks(module):
            if isinstance(hook, _Hook):
                parameters = module._parameters
                pair = parameters.get(f"{hook.name}_g"), parameters.get(f"{hook.name}_v")
                if pair[0] is not None and pair[1] is not None:
                    norms.append(WeightNorm(pair[0], pair[1], hook.dim))
        if isinstance(module, nn.utils.parametrize.ParametrizationList) and len(module):
            first, parameters = module[0], module._parameters
            pair = parameters.get("original0"), parameters.get("original1")
            if isinstance(first, parametrizations._WeightNorm) and pair[0] is not None:
                assert pair[1] is not None
                norms.append(WeightNorm(pair[0], pair[1], first.dim))
    return norms


@contextmanager
def rescale_gains(model: nn.Module, changed: Iterable[Tensor]) -> Iterator[None]:
    """Rescale gains so that the remaining slices of these tensors give the same weights."""
    changed_ids = {id(tensor) for tensor in changed}
    norms = (
        [n for n in weight_norms(model) if id(n.direction) in changed_ids] if changed_ids else []
    )
    before = [n.norms() for n in norms]
    yield
    with torch.no_grad():
        for norm, old in zip(norms, before, strict=True):
            norm.gain.copy_(norm.gain.double() * gain_ratio(norm.norms(), old))


def gain_ratio(after: Tensor, before: Tensor) -> Tensor:
    """Return the factor of each gain; 1 where a slice is unchanged or was zero."""
    return torch.where((after == before) | (before == 0), torch.ones_like(after), after / before)
