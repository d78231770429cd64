"""Weight norm, W = g · v / ‖v‖, kept equal where it is left when slices of v are cut or zeroed.

Without a part of v the norm is smaller and the rest of W would grow. Multiplying each gain by the
ratio of the norms after and before keeps W as it was. Both of torch's weight norms are understood:
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

WHOLE = -1
"""What torch takes for `dim=None`: one norm for the whole weight."""


@dataclass(frozen=True)
class WeightNorm:
    """The gain and the direction of one weight, and the dim of which each slice has its norm."""

    gain: Tensor
    direction: Tensor
    dim: int

    def norms(self, direction: Tensor | None = None) -> Tensor:
        """Norms of the slices of a direction, in the shape of the gain, in float64."""
        v = (self.direction if direction is None else direction).detach().double()
        dims = [d for d in range(v.ndim) if self.dim == WHOLE or d != self.dim % v.ndim]
        norms: Tensor = torch.linalg.vector_norm(v, dim=dims, keepdim=True)
        return norms.reshape(self.gain.shape) if self.dim == WHOLE else norms


def weight_norms(model: nn.Module) -> list[WeightNorm]:
    """Find every weight norm of a model."""
    found = []
    for module in modules_by_path(model).values():
        for _, hook in weight_hooks(module):
            if isinstance(hook, _Hook):
                own = module._parameters
                pair = own.get(f"{hook.name}_g"), own.get(f"{hook.name}_v")
                if pair[0] is not None and pair[1] is not None:
                    found.append(WeightNorm(pair[0], pair[1], hook.dim))
        if isinstance(module, nn.utils.parametrize.ParametrizationList) and len(module):
            first, own = module[0], module._parameters
            pair = own.get("original0"), own.get("original1")
            if isinstance(first, parametrizations._WeightNorm) and pair[0] is not None:
                assert pair[1] is not None
                found.append(WeightNorm(pair[0], pair[1], first.dim))
    return found


@contextmanager
def gains_follow(model: nn.Module, changed: Iterable[Tensor]) -> Iterator[None]:
    """Scale the gains so that what is left of these tensors makes the same weights as before."""
    wanted = {id(tensor) for tensor in changed}
    norms = [n for n in weight_norms(model) if id(n.direction) in wanted] if wanted else []
    before = [n.norms() for n in norms]
    yield
    with torch.no_grad():
        for norm, old in zip(norms, before, strict=True):
            norm.gain.copy_(norm.gain.double() * ratio(norm.norms(), old))


def ratio(after: Tensor, before: Tensor) -> Tensor:
    """Factor of each gain; one where a slice is as it was, or was zero already."""
    return torch.where((after == before) | (before == 0), torch.ones_like(after), after / before)
