"""One look at a model over some data: how layers' inputs vary together, and what their errors do.

What an error at a layer does to the outputs is measured by random probes: the gradient of a random
sum of outputs, squared, is on average how much a small error there moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fpgm.recovery.layer_solver import FEW, MOST_READS, layer_at, shiftable
from fpgm.recovery.solvable_layers import Site, find_sites
from fpgm.recovery.unfold import Sample, matrix_of, read
from fpgm.utils.calibration_data import Inputs
from fpgm.utils.copying import shadow
from fpgm.utils.example_inputs import Example, tensors_in
from fpgm.utils.modules import module_at
from fpgm.utils.progress import Progress

ROWS_PER_WEIGHT = 16
"""So many positions are drawn for every weight of a filter."""
LEAST_ROWS = 8_000


@dataclass
class Reader:
    """A layer's weights, and over all inputs how what it reads varies together."""

    matrix: Tensor
    """[groups, reads, writes]"""
    gram: Tensor
    """[groups, reads, reads], summed over an input's positions; with one more, of a constant, if
    the layer can add one to what it writes.

    Of a layer too wide for that only the diagonal, freed of the mean: [groups, reads].
    """
    gain: Tensor
    """[writes]: what a squared error in a channel adds to that of the outputs."""
    channels: int
    """How many it reads, all groups together."""
    site: Site
    """Which layer it is, and the norm behind it."""

    def columns(self, channels: Tensor) -> Tensor:
        """What is said of each channel, said of each column of every group: [groups, reads]."""
        groups, reads, _ = self.matrix.shape
        apart = len(channels) == self.channels
        by_group = channels.reshape(groups, -1) if apart else channels.expand(groups, -1)
        return by_group.repeat_interleave(reads // by_group.shape[1], 1)

    @property
    def whole(self) -> bool:
        """Whether it is known how what it reads varies together."""
        return self.gram.ndim == 3


@dataclass
class Branch:
    """What a module hands to a stream."""

    variance: Tensor
    gain: Tensor


@dataclass
class Measured:
    """Everything that was seen; per input, and as a share of the outputs' own squares."""

    readers: dict[str, Reader]
    branches: dict[str, Branch]


@dataclass
class _Sums:
    """What was summed up about one layer or branch."""

    gram: Tensor | None = None
    squares: Tensor | None = None
    sums: Tensor | None = None
    gain: Tensor | None = None
    positions: int = 0
    probed: int = 0

    def together(self, inputs: int, *, constant: bool) -> Tensor | None:
        """How what was read varies together, an input's positions summed up."""
        if self.gram is None:
            return self.spread(inputs)
        return (self.gram if constant else self.gram[:, :-1, :-1]) / inputs

    def spread(self, inputs: int) -> Tensor | None:
        """How much each channel varies, an input's positions summed up."""
        if self.sums is None or self.squares is None:
            return None
        return (self.squares - self.sums.square() / self.positions).clamp(min=0) / inputs

    def add(self, name: str, value: Tensor) -> None:
        held = getattr(self, name)
        setattr(self, name, value if held is None else held + value)


@dataclass
class _Look:
    """Hooks on a copy of the model that shares its weights."""

    model: nn.Module
    readers: Sequence[str]
    branches: Sequence[tuple[str, int]]
    batches: int
    read: dict[str, _Sums] = field(default_factory=dict)
    handed: dict[str, _Sums] = field(default_factory=dict)
    seed: int = 0

    def hook_(self) -> None:
        for path in self.readers:
            layer = module_at(self.model, path)
            layer.register_forward_hook(self._reader(path), with_kwargs=True)
        for path, dim in self.branches:
            self.model.get_submodule(path).register_forward_hook(self._branch(path, dim))

    def _reader(self, path: str) -> Callable[..., None]:
        def hook(layer: Any, args: Any, kwargs: Any, out: Tensor) -> None:
            x = read(args, kwargs)
            sums = self.read.setdefault(path, _Sums())
            reads = matrix_of(layer).shape[1]
            wanted = FEW if reads > MOST_READS else max(ROWS_PER_WEIGHT * reads, LEAST_ROWS)
            most = -(-wanted // self.batches)
            sample = Sample(layer, x.detach(), out.detach(), most, self.seed)
            rows = sample.rows()
            dim = -1 if isinstance(layer, nn.Linear) else 1
            there = out.numel() // out.shape[dim]
            times = there / rows.shape[1]
            if reads > MOST_READS:
                sums.add("sums", rows.double().sum(1) * times)
                sums.add("squares", rows.double().square().sum(1) * times)
                sums.positions += there
            else:
                sums.add("gram", _products(rows) * times)
            self._probe(sums, out, dim)

        return hook

    def _branch(self, path: str, dim: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            sums = self.handed.setdefault(path, _Sums())
            values = _channels(out.detach(), dim)
            sums.add("sums", values.sum(1))
            sums.add("squares", values.square().sum(1))
            sums.positions += values.shape[1]
            self._probe(sums, out, dim)

        return hook

    def _probe(self, sums: _Sums, out: Tensor, dim: int) -> None:
        def hook(grad: Tensor) -> None:
            squares = _channels(grad, dim).square()
            sums.add("gain", squares.sum(1))
            sums.probed += squares.shape[1]

        if out.requires_grad:
            out.register_hook(hook)


def measure(
    model: nn.Module,
    branches: Iterable[tuple[str, int]],
    inputs: Inputs,
    progress: Progress | None = None,
) -> Measured:
    """Look at all inputs once. `branches` are modules that hand on to a stream, and their dim."""
    net = shadow(model).eval()
    sites = {site.layer: site for site in find_sites(net, inputs[0]).sites}
    look = _Look(net, list(sites), list(branches), len(inputs))
    look.hook_()
    size = 0.0
    random = torch.Generator().manual_seed(0)
    for number in range(len(inputs)):
        if progress is not None:
            progress("measuring", number, len(inputs))
        look.seed = number
        outputs = _probe(net, inputs[number], random)
        size += sum(float(out[out.isfinite()].double().square().sum()) for out in outputs)
    scale = inputs.count / (size or 1.0)
    found = Measured({}, {})
    for path, sums in look.read.items():
        layer = layer_at(net, path)
        gram = sums.together(inputs.count, constant=shiftable(net, sites[path]))
        if sums.gain is not None and gram is not None:  # a way leads from here to an output
            width = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
            gain = sums.gain / sums.probed * scale
            found.readers[path] = Reader(matrix_of(layer).double(), gram, gain, width, sites[path])
    for path, sums in look.handed.items():
        spread = sums.spread(inputs.count)
        if sums.gain is not None and spread is not None:
            found.branches[path] = Branch(spread, sums.gain / sums.probed * scale)
    return found


@torch.enable_grad()
def _probe(net: nn.Module, example: Example, random: torch.Generator) -> list[Tensor]:
    """One pass forward, and one back with random weights on the outputs."""
    args, kwargs = example.args, dict(example.kwargs)
    given = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
    leaves = [t.detach().clone().requires_grad_() for t in given]
    swap = {id(old): new for old, new in zip(given, leaves, strict=True)}
    result = Example(_swapped(args, swap), _swapped(kwargs, swap)).call(net)
    outputs = [t for t in tensors_in(result) if t.is_floating_point() and t.requires_grad]
    if outputs:
        total = torch.zeros((), device=outputs[0].device)
        for out in outputs:
            weights = torch.randn(out.shape, generator=random).to(out)
            finite = out.isfinite()
            total = total + (out[finite] * weights[finite]).sum()
        given_whole = len(leaves) == len(tensors_in((args, kwargs)))
        own = [] if given_whole else [p for p in net.parameters() if p.requires_grad]
        if leaves or own:  # every way back from the outputs ends in one of them
            torch.autograd.grad(total, [*leaves, *own], allow_unused=True)
    return [out.detach() for out in outputs]


def _swapped(value: Any, swap: dict[int, Tensor]) -> Any:
    return tree_map(lambda leaf: swap.get(id(leaf), leaf), value)


def _products(rows: Tensor) -> Tensor:
    """Sums of products of columns and a constant."""
    rows = rows if rows.dtype == torch.float64 else rows.float()
    rows = torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], 2)
    return (rows.transpose(1, 2) @ rows).double()


def _channels(x: Tensor, dim: int) -> Tensor:
    """[channels, everything else], in float64."""
    return x.movedim(dim, 0).flatten(1).double()
