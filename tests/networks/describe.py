"""Descriptions of networks, and the tables of blocks and heads they are made of.

A description is a frozen value that prints as something one can paste. Options that are not written
take the first value of their list in `BLOCKS` or `HEADS`, so a small failure prints small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

WIDTHS = (8, 4, 5, 6, 10, 12, 16, 20, 24)
ACTIVATIONS = (
    "relu",
    "none",
    "gelu",
    "silu",
    "sigmoid",
    "tanh",
    "hardswish",
    "leaky",
    "prelu",
    "softplus",
    "relu_inplace",
)
NORMS = ("batch", "none", "batch_plain", "instance")
INPUTS = ("tensor", "tuple", "dict", "two_tuple", "two_dict")
SPACE = {1: (16,), 2: (8, 8), 3: (4, 4, 4)}
LARGEST = 16  # blocks that enlarge the image stop here, or a chain of them would get slow
DEEPEST = 2  # bodies within bodies

ANY = (2, 1, 3)


class B:
    """Description of one block or head: its name and the options that differ from the first.

    >>> B("conv", act="gelu", out=12)
    B('conv', act='gelu', out=12)
    """

    __slots__ = ("name", "options")

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self.options = tuple(sorted(options.items()))

    def __repr__(self) -> str:
        return f"B({', '.join([repr(self.name), *(f'{k}={v!r}' for k, v in self.options)])})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, B) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def body(self) -> tuple[B, ...]:
        """Blocks inside this one."""
        return dict(self.options).get("body", ())


@dataclass(frozen=True, init=False, repr=False)
class Net:
    """Description of a network: stem, blocks, head, and how it is called.

    >>> Net(B("glu"), dims=1)
    Net(B('glu'), dims=1)
    """

    blocks: tuple[B, ...]
    head: B
    stem: int
    dims: int
    inputs: str
    training: bool
    seed: int

    def __init__(
        self,
        *blocks: B,
        head: B | None = None,
        stem: int = 8,
        dims: int = 2,
        inputs: str = "tensor",
        training: bool = False,
        seed: int = 0,
    ) -> None:
        values = (blocks, head or B("pool_linear"), stem, dims, inputs, training, seed)
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    def __repr__(self) -> str:
        plain = Net()
        names = [field.name for field in fields(self)][1:]
        rest = [(name, getattr(self, name)) for name in names]
        shown = [f"{k}={v!r}" for k, v in rest if v != getattr(plain, k)]
        return f"Net({', '.join([*map(repr, self.blocks), *shown])})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # or hypothesis prints fields that cannot be pasted

    def names(self) -> Iterator[str]:
        """Every block and head in it, nested ones included."""
        yield from _names(self.blocks)
        yield self.head.name

    def with_blocks(self, *blocks: B) -> Net:
        """The same network around other blocks."""
        rest = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return Net(*blocks, **rest)


@dataclass(frozen=True)
class Case:
    """A network and one way to prune it."""

    net: Net
    rate: float = 0.5
    align: int = 1
    residual: str = "coupled"
    dtype: str = "float64"


@dataclass(frozen=True)
class Entry:
    """What the generator knows about a block or head.

    `private` says that it always has units of its own, that no neighbour can freeze.
    """

    make: Callable[..., nn.Module]
    options: Mapping[str, Sequence[Any]]
    dims: tuple[int, ...]
    private: bool
    nests: bool


BLOCKS: dict[str, Entry] = {}
HEADS: dict[str, Entry] = {}


def block(
    name: str, dims: tuple[int, ...] = (2,), private: bool = False, **options: Sequence[Any]
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Enter a class, called with the input's shape (channels, *space) and options, as a block."""
    return _register(BLOCKS, name, dims, private, options)


def head(
    name: str, dims: tuple[int, ...] = (2, 1, 3), private: bool = False, **options: Sequence[Any]
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Enter a class as a head."""
    return _register(HEADS, name, dims, private, options)


def _register(
    table: dict[str, Entry],
    name: str,
    dims: tuple[int, ...],
    private: bool,
    options: Mapping[str, Sequence[Any]],
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def add(result: type[nn.Module]) -> type[nn.Module]:
        nests = "body" in result.__init__.__code__.co_varnames  # type: ignore[misc]
        table[name] = Entry(result, options, dims, private, nests)
        return result

    return add


def _names(blocks: Sequence[B]) -> Iterator[str]:
    for item in blocks:
        yield item.name
        yield from _names(item.body)
