"""Gathers and scatters of channels, as regular modules that wrap a layer.

Where the user's code fixes a width that pruning changed (zero-padded shortcuts, shuffles, residual
streams of full width), a wrapper takes the layer's place: it moves channels before the layer, after
it, or both. Wrapper, layer and adapters are plain modules in the tree, each layer of its own exact
type, so that scripting, tracing, fusing and quantizing find what they look for. (Subclasses of the
layers would keep their names, but tools that match exact types would no longer know them; hooks are
dropped or refused by most of these tools.) The layer's attributes are the wrapper's too, and
state dicts have the names of the original model, as with torch's wrapper for checkpointed
activations; only `named_parameters()` and `named_modules()` show the level `base_layer`. Which
layer gets which adapter is left to `adapter_placement`.

Annotations are evaluated here, not strings, because `torch.jit.script` reads those of classes.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from fpgm.utils.adapter_spec import Adapter, Kind, Side

LAYER_NAME = "base_layer"
"""Name of the wrapped layer in its wrapper."""


def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Pick channels."""
    return x.index_select(dim, index)


def scatter(x: Tensor, dim: int, index: Tensor, size: int) -> Tensor:
    """Place channels among zeros in the same memory format (such as channels last).

    In a different memory format, this and every layer after it would take about twice as long.
    """
    outermost_first: list[int] = []
    for d in range(x.dim()):
        at = 0
        while at < len(outermost_first) and x.stride(outermost_first[at]) >= x.stride(d):
            at += 1
        outermost_first.insert(at, d)
    shape: list[int] = []
    in_order = True
    for place, d in enumerate(outermost_first):
        shape.append(size if d == dim else x.size(d))
        in_order = in_order and place == d
    zeros = x.new_zeros(shape)
    if not in_order:
        zeros = zeros.permute([outermost_first.index(d) for d in range(x.dim())])
    return zeros.index_copy_(dim, index, x)  # out of place, the zeros would be copied too


def scatter_by_gather(x: Tensor, dim: int, origins: Tensor) -> Tensor:
    """Place channels among zeros by their `scatter_sources`.

    The same as `scatter`, in one pass over the output, which compilers and other runtimes fuse with
    the next operator. Its gradient would be more expensive.
    """
    shape = list(x.shape)
    shape[dim] = 1
    return torch.cat([x, x.new_zeros(shape)], dim).index_select(dim, origins)


torch.fx.wrap("scatter")  # its order of dims is read from the tensor, which a symbol has not


def scatter_sources(index: Tensor, size: int) -> Tensor:
    """Return where each place of a scatter gets its channel from; after the last are the zeros."""
    positions = torch.full((size,), len(index), device=index.device)
    positions[index] = torch.arange(len(index), device=index.device)
    return positions


class Gather(nn.Module):
    """Picks channels by position; the positions move with the model and are in no state dict."""

    index: Tensor

    def __init__(self, dim: int, index: Tensor, size: int, number: int = 0) -> None:
        """Pick `index` of `size` channels along `dim`; `number` is kept for `buffer_names`."""
        super().__init__()
        self.dim, self.size, self.number = dim, size, number
        self.register_buffer("index", index, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Pick the channels."""
        return gather(x, self.dim, self.index)

    def extra_repr(self) -> str:
        """Describe the sizes for `print`."""
        return f"{len(self.index)} of {self.size}, dim={self.dim}"


class Scatter(nn.Module):
    """Places channels by position among zeros."""

    index: Tensor
    origins: Tensor

    def __init__(self, dim: int, index: Tensor, size: int, number: int = 0) -> None:
        """Write to `index` of `size` channels along `dim`; `number` is kept for `buffer_names`."""
        super().__init__()
        self.dim, self.size, self.number = dim, size, number
        self.register_buffer("index", index, persistent=False)
        self.register_buffer("origins", scatter_sources(index, size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Place the channels."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return scatter(x, self.dim, self.index, self.size)
        if torch.compiler.is_compiling() and not (torch.is_grad_enabled() and x.requires_grad):
            return scatter_by_gather(x, self.dim, self.origins)
        return scatter(x, self.dim, self.index, self.size)

    def extra_repr(self) -> str:
        """Describe the sizes for `print`."""
        return f"{len(self.index)} into {self.size}, dim={self.dim}"


class Adapted(nn.Module):
    """A layer whose channels are moved before it, after it, or both.

    Attributes of the layer are read from and written to the layer.
    """

    def __init__(
        self,
        layer: nn.Module,
        before: Gather | Scatter | None = None,
        after: Gather | Scatter | None = None,
    ) -> None:
        """Wrap a layer."""
        super().__init__()
        self.before = before
        self.base_layer = layer
        self.after = after
        self.training = layer.training
        self._register_state_dict_hook(_name_as_original)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer with its first argument adapted, and adapt what it returns."""
        if self.before is not None and args:
            args = (self.before(args[0]), *args[1:])
        elif self.before is not None:
            first = next(iter(kwargs))
            kwargs = {**kwargs, first: self.before(kwargs[first])}
        out = self.base_layer(*args, **kwargs)
        return out if self.after is None else self.after(out)

    def __getattr__(self, name: str) -> Any:
        """Read attributes that the wrapper lacks from the layer, except special names."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            layer = self.__dict__.get("_modules", {}).get(LAYER_NAME)
            if layer is None or name.startswith("__"):
                raise
            return getattr(layer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the layer's attributes on the layer."""
        layer = self.__dict__.get("_modules", {}).get(LAYER_NAME)
        is_own = layer is None or name in self.__dict__ or hasattr(type(self), name)
        if is_own or name in ("before", LAYER_NAME, "after") or not hasattr(layer, name):
            super().__setattr__(name, value)
        else:
            setattr(layer, name, value)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Accept the names of the original model, and those with the wrapper's level."""
        inside = f"{prefix}{LAYER_NAME}."
        twice = f"{inside}{LAYER_NAME}." if LAYER_NAME in self.base_layer._modules else inside
        names = [name for name in state_dict if name.startswith(prefix)]
        if not any(name.startswith(twice) for name in names):
            for name in names:
                state_dict[inside + name.removeprefix(prefix)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _name_as_original(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Leave the wrapper's level out of the names in a state dict."""
    inside = f"{prefix}{LAYER_NAME}."
    for name in [name for name in state_dict if name.startswith(inside)]:
        state_dict[prefix + name.removeprefix(inside)] = state_dict.pop(name)


class AdaptedLayer(Adapted):
    """An adapted layer with one argument, `input`, as in torch's own layers."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name torch's layers give it)
        """Adapt, call the layer, adapt."""
        x: Tensor = input if self.before is None else self.before(input)
        x = self.base_layer(x)
        return x if self.after is None else self.after(x)


class AdaptedBlock(Adapted):
    """An adapted block with one argument, `x`, as in most user modules."""

    def forward(self, x: Tensor) -> Tensor:
        """Adapt, call the block, adapt."""
        if self.before is not None:
            x = self.before(x)
        x = self.base_layer(x)
        if self.after is not None:
            x = self.after(x)
        return x


class AdaptedSequential(AdaptedLayer):
    """An adapted `nn.Sequential`, whose parts can still be indexed."""

    def __len__(self) -> int:
        """Count the parts."""
        return len(self.base_layer)  # type: ignore[arg-type]

    def __getitem__(self, number: Any) -> Any:
        """Return a part, or several."""
        return self.base_layer[number]  # type: ignore[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the parts."""
        return iter(self.base_layer)  # type: ignore[call-overload, no-any-return]


_BY_ARGUMENT = {"input": AdaptedLayer, "x": AdaptedBlock}


def wrap(layer: nn.Module) -> Adapted:
    """Return a wrapper with the layer's signature."""
    if type(layer).forward is nn.Sequential.forward:
        return AdaptedSequential(layer)
    parameters = list(inspect.signature(layer.forward).parameters.values())
    plain = len(parameters) == 1 and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return (_BY_ARGUMENT.get(parameters[0].name, Adapted) if plain else Adapted)(layer)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the layer inside a wrapper; other modules are returned unchanged."""
    return module.base_layer if isinstance(module, Adapted) else module


def adapters_of(module: nn.Module, path: str) -> list[tuple[nn.Module, Adapter]]:
    """Return the adapters of a wrapper, each with its description as a plan stores it."""
    adapters: list[tuple[nn.Module, Adapter]] = []
    if isinstance(module, Adapted):
        sides: tuple[tuple[Side, Any], ...] = (("input", module.before), ("output", module.after))
        for side, part in sides:
            if part is not None:
                kind: Kind = "scatter" if isinstance(part, Scatter) else "gather"
                index = tuple(part.index.tolist())
                adapters.append((part, Adapter(path, side, kind, part.dim, index, part.size)))
    return adapters


def buffer_names(wrapper: Adapted) -> Mapping[str, Tensor]:
    """Return the positions under the names they had when they were buffers of the layer itself.

    Fingerprints of models that were pruned more than once use these names.
    """
    named: dict[str, Tensor] = {}
    for side, adapter in (("input", wrapper.before), ("output", wrapper.after)):
        if adapter is not None:
            name = f"fpgm_{side}_{adapter.number}"
            named[name] = adapter.index
            if isinstance(adapter, Scatter):
                named[f"{name}_sources"] = adapter.origins
    return named
