"""Drawing descriptions: at random, one option at a time, and simpler ones next to a given one.

`draw_net` draws from anything that can pick from a sequence: hypothesis, which shrinks towards
first values and fewer blocks, or a seeded `random.Random`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Protocol, TypeVar

from hypothesis import strategies as st

from .describe import BLOCKS, DEEPEST, HEADS, INPUTS, WIDTHS, B, Case, Entry, Net

T = TypeVar("T")


class Pick(Protocol):
    """Anything that picks one of several values."""

    def __call__(self, options: Sequence[T], /) -> T: ...


def draw_net(pick: Pick) -> Net:
    """A description whose every choice is made by `pick`."""
    dims = pick((2, 2, 2, 2, 1, 3))
    blocks = _draw_blocks(pick, dims, depth=0, more=(False, True, True, True))
    head = _draw_one(pick, HEADS, dims, depth=DEEPEST)
    return Net(
        *blocks,
        head=head,
        stem=pick(WIDTHS),
        dims=dims,
        inputs=pick(INPUTS),
        training=pick((False, True)),
        seed=pick(range(1000)),
    )


def draw_case(pick: Pick) -> Case:
    """A network and a way to prune it, every choice made by `pick`."""
    return Case(
        net=draw_net(pick),
        rate=pick((0.5, 0.3, 0.1, 0.75)),
        align=pick((1, 8)),
        residual=pick(("coupled", "independent")),
        dtype=pick(("float64", "float64", "float32")),
    )


@st.composite
def networks(draw: st.DrawFn) -> Net:
    """Strategy of descriptions."""
    return draw_net(lambda options: draw(st.sampled_from(options)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Strategy of networks with ways to prune them."""
    return draw_case(lambda options: draw(st.sampled_from(options)))


def variants(name: str) -> Iterator[Net]:
    """Networks around one block or head, which differ from the plainest in one option each.

    Widths are left out, and so are most activations where they are not the point.
    """
    entry = BLOCKS.get(name) or HEADS[name]
    described = [B(name)]
    for option, values in entry.options.items():
        if option == "act" and name not in ("conv", "residual", "act"):
            described += [B(name, act=value) for value in ("sigmoid", "prelu")]
        elif option not in ("out", "body"):
            described += [B(name, **{option: value}) for value in values[1:]]
    for item in described:
        for dims in entry.dims if item == described[0] else entry.dims[:1]:
            if name in HEADS:
                yield Net(B("conv"), head=item, dims=dims)
            else:
                yield Net(item, dims=dims)


def smaller(case: Case) -> Iterator[Case]:
    """Simpler cases next to this one: a block less, or one choice plainer.

    >>> next(smaller(Case(Net(B("glu"), B("conv")))))
    Case(net=Net(B('conv')), rate=0.5, align=1, residual='coupled', dtype='float64')
    """
    net = case.net
    for blocks in _smaller_blocks(net.blocks):
        if blocks:
            yield replace(case, net=net.with_blocks(*blocks))
    plain = Net(*net.blocks)
    for field in fields(Net)[1:]:
        if getattr(net, field.name) != getattr(plain, field.name):
            rest = {f.name: getattr(net, f.name) for f in fields(Net)[1:] if f.name != field.name}
            yield replace(case, net=Net(*net.blocks, **rest))
    for field in fields(Case)[1:]:
        if getattr(case, field.name) != field.default:
            yield replace(case, **{field.name: field.default})


def has_private_units(net: Net) -> bool:
    """True when some block has units of its own whatever stands around it.

    Such a network can always be pruned: "nothing to prune" would be a wrong answer.
    """
    return any((BLOCKS.get(name) or HEADS[name]).private for name in net.names())


def _draw_blocks(pick: Pick, dims: int, depth: int, more: Sequence[bool]) -> tuple[B, ...]:
    plotted = [_draw_one(pick, BLOCKS, dims, depth)]
    while len(plotted) < 5 and pick(more):
        plotted.append(_draw_one(pick, BLOCKS, dims, depth))
    return tuple(plotted)


def _draw_one(pick: Pick, table: Mapping[str, Entry], dims: int, depth: int) -> B:
    fitting = [
        name
        for name, entry in table.items()
        if dims in entry.dims and not (entry.nests and depth >= DEEPEST)
    ]
    name = pick(fitting)
    entry = table[name]
    options = {option: pick(values) for option, values in entry.options.items()}
    options = {k: v for k, v in options.items() if v != entry.options[k][0]}
    if entry.nests:
        options["body"] = _draw_blocks(pick, dims, depth + 1, more=(False, True))
    return B(name, **options)


def _smaller_blocks(blocks: tuple[B, ...]) -> Iterator[tuple[B, ...]]:
    for i, item in enumerate(blocks):
        before, after = blocks[:i], blocks[i + 1 :]
        yield (*before, *after)
        if item.body:
            yield (*before, *item.body, *after)
        for option, _ in item.options:
            rest = {k: v for k, v in item.options if k != option}
            yield (*before, B(item.name, **rest), *after)
        for body in _smaller_blocks(item.body):
            rest = dict(item.options) | {"body": body}
            yield (*before, B(item.name, **rest), *after)
