"""A model's parameters and buffers by name."""

from __future__ import annotations

from torch import Tensor, nn


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their first name; tied ones appear once."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    tables = [(f"{path}." if path else "", module) for path, module in model.named_modules()]
    for table in ("_parameters", "_buffers"):
        for prefix, module in tables:
            for name, tensor in getattr(module, table).items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    named[prefix + name] = tensor
    return named
