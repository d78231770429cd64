"""Random small networks made of every structure pruning has to understand.

A network is first a *description*, a frozen value that prints as something one can paste:

    Net(B("residual", shortcut="pad"), B("glu"), head=B("flatten_linear"), stem=6)

and `build` makes the same model and the same inputs from it every time. Options that are not
written take the first value of their list in `BLOCKS` or `HEADS`, so a small failure prints small.
`draw_net` draws a description from anything that can pick from a sequence: hypothesis, which
shrinks towards first values and fewer blocks, or a seeded `random.Random`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

T = TypeVar("T")
Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]

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


class Pick(Protocol):
    """Anything that picks one of several values."""

    def __call__(self, options: Sequence[T], /) -> T: ...


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


def build(net: Net, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Inputs]:
    """The model and inputs a description stands for; the same ones every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(net.seed)
        model = Network(net)
        _randomise(model)
        image = torch.randn(2, 3, *SPACE[net.dims], dtype=dtype)
        extra = torch.randn(2, 2, *SPACE[net.dims], dtype=dtype)
    inputs: dict[str, Inputs] = {
        "tensor": image,
        "tuple": (image,),
        "dict": {"image": image},
        "two_tuple": (image, extra),
        "two_dict": {"image": image, "extra": extra},
    }
    return model.to(dtype).train(net.training), inputs[net.inputs]


def call(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output on inputs of any of the three kinds."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def leaves(output: Any) -> list[Tensor]:
    """Every tensor in an output, in a fixed order.

    >>> len(leaves({"a": torch.ones(1), "b": (torch.ones(1), torch.ones(1))}))
    3
    """
    if isinstance(output, Tensor):
        return [output]
    if is_dataclass(output):
        return [t for f in fields(output) for t in leaves(getattr(output, f.name))]
    parts = output.values() if isinstance(output, dict) else output
    return [tensor for part in parts for tensor in leaves(part)]


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


def _names(blocks: Sequence[B]) -> Iterator[str]:
    for item in blocks:
        yield item.name
        yield from _names(item.body)


def _draw_blocks(pick: Pick, dims: int, depth: int, more: Sequence[bool]) -> tuple[B, ...]:
    drawn = [_draw_one(pick, BLOCKS, dims, depth)]
    while len(drawn) < 5 and pick(more):
        drawn.append(_draw_one(pick, BLOCKS, dims, depth))
    return tuple(drawn)


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


def _register(
    table: dict[str, Entry],
    name: str,
    dims: tuple[int, ...],
    private: bool,
    options: Mapping[str, Sequence[Any]],
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def add(made: type[nn.Module]) -> type[nn.Module]:
        nests = "body" in made.__init__.__code__.co_varnames  # type: ignore[misc]
        table[name] = Entry(made, options, dims, private, nests)
        return made

    return add


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


# Parts the blocks share.

ANY = (2, 1, 3)
CONV: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, type[nn.Module]] = {
    1: nn.ConvTranspose1d,
    2: nn.ConvTranspose2d,
    3: nn.ConvTranspose3d,
}
BATCH: dict[int, type[nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE: dict[int, type[nn.Module]] = {
    1: nn.InstanceNorm1d,
    2: nn.InstanceNorm2d,
    3: nn.InstanceNorm3d,
}
MAXPOOL: dict[int, type[nn.Module]] = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVGPOOL: dict[int, type[nn.Module]] = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
TO_AVG: dict[int, type[nn.Module]] = {
    1: nn.AdaptiveAvgPool1d,
    2: nn.AdaptiveAvgPool2d,
    3: nn.AdaptiveAvgPool3d,
}
TO_MAX: dict[int, type[nn.Module]] = {
    1: nn.AdaptiveMaxPool1d,
    2: nn.AdaptiveMaxPool2d,
    3: nn.AdaptiveMaxPool3d,
}
POOL_TO: dict[int, Callable[..., Tensor]] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}
CONVOLVE: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
Shape = tuple[int, ...]


def conv(
    shape: Shape, before: int, after: int, kernel: int = 3, stride: int = 1, groups: int = 1
) -> nn.Module:
    """Same-padded convolution of the shape's dimension."""
    made = CONV[len(shape) - 1]
    return made(before, after, kernel, stride, kernel // 2, groups=groups)


def norm_layer(shape: Shape, channels: int, kind: str = "batch") -> nn.Module:
    """Norm of the shape's dimension that treats each channel on its own."""
    dims = len(shape) - 1
    if kind == "none":
        return nn.Identity()
    if kind == "instance":
        return INSTANCE[dims](channels, affine=True)
    return BATCH[dims](channels, affine=kind != "batch_plain")


def activation(name: str, channels: int = 1) -> nn.Module:
    """Activation by name; PReLU learns one slope a channel."""
    made: dict[str, Callable[[], nn.Module]] = {
        "relu": nn.ReLU,
        "none": nn.Identity,
        "gelu": nn.GELU,
        "silu": nn.SiLU,
        "sigmoid": nn.Sigmoid,
        "tanh": nn.Tanh,
        "hardswish": nn.Hardswish,
        "leaky": lambda: nn.LeakyReLU(0.1),
        "prelu": lambda: nn.PReLU(channels),
        "softplus": nn.Softplus,
        "relu_inplace": lambda: nn.ReLU(inplace=True),
    }
    return made[name]()


def unit(
    shape: Shape,
    before: int,
    after: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    act: str = "relu",
    kind: str = "batch",
) -> nn.Sequential:
    """Convolution, norm, activation."""
    return nn.Sequential(
        conv(shape, before, after, kernel, stride, groups),
        norm_layer(shape, after, kind),
        activation(act, after),
    )


def fit(shape: Shape, multiple: int) -> tuple[nn.Module, int]:
    """A 1×1 convolution to the next multiple of channels, or nothing where it already is one."""
    channels = math.ceil(shape[0] / multiple) * multiple
    if channels == shape[0]:
        return nn.Identity(), channels
    return conv(shape, shape[0], channels, 1), channels


def halving(shape: Shape) -> int:
    """Stride 2 while the image is large enough, else 1."""
    return 2 if min(shape[1:]) >= 4 else 1


def chain(shape: Shape, blocks: Sequence[B]) -> tuple[nn.Sequential, Shape]:
    """Blocks one after another, and the shape that comes out."""
    made = nn.Sequential()
    for item in blocks:
        entry = BLOCKS[item.name]
        module = _make(entry, shape, item)
        made.append(module)
        shape = _shape_after(module, shape)
    return made, shape


def _make(entry: Entry, shape: Shape, item: B) -> nn.Module:
    plain = {option: values[0] for option, values in entry.options.items()}
    if entry.nests:
        plain["body"] = (B("conv"),)
    return entry.make(shape, **plain | dict(item.options))


@torch.no_grad()
def _shape_after(module: nn.Module, shape: Shape) -> Shape:
    module.eval()
    return tuple(module(torch.zeros(2, *shape)).shape[1:])


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Make nothing degenerate: no norm is the identity, no bias zero, no signal dies with depth."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(2)
    for module in model.modules():
        if getattr(module, "weight", None) is None and not hasattr(module, "running_mean"):
            continue
        if isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)):
            if module.weight is not None:
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(0.1, 0.5).mul_(torch.randn_like(module.bias).sign())
            if getattr(module, "running_mean", None) is not None:
                module.running_mean.uniform_(0.1, 0.5)
                module.running_mean.mul_(torch.randn_like(module.running_mean).sign())
                module.running_var.uniform_(0.5, 2)
        elif isinstance(module, nn.PReLU):
            module.weight.uniform_(0.1, 0.4)


class Network(nn.Module):
    """Stem, blocks and head; a second input, where there is one, has a stem of its own."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        shape: Shape = (net.stem, *SPACE[net.dims])
        self.stem = unit(shape, 3, net.stem)
        self.side = unit(shape, 2, net.stem) if net.inputs.startswith("two") else None
        self.concatenates = net.inputs == "two_dict"
        if self.concatenates:
            shape = (2 * net.stem, *shape[1:])
        self.blocks, shape = chain(shape, net.blocks)
        self.head = _make(HEADS[net.head.name], shape, net.head)

    def forward(self, image: Tensor, extra: Tensor | None = None) -> Any:
        x = self.stem(image)
        if self.side is not None:
            y = self.side(extra)
            x = torch.cat([x, y], 1) if self.concatenates else x + y
        return self.head(self.blocks(x))


# Plain convolutions and norms.


@block("conv", ANY, out=WIDTHS, kernel=(3, 1), stride=(1, 2), norm=NORMS, act=ACTIVATIONS)
class Plain(nn.Module):
    """Convolution with bias, norm, activation."""

    def __init__(
        self, shape: Shape, out: int, kernel: int, stride: int, norm: str, act: str
    ) -> None:
        super().__init__()
        stride = min(stride, halving(shape))
        self.layers = unit(shape, shape[0], out, kernel, stride, act=act, kind=norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@block("functional", ANY, out=WIDTHS, act=ACTIVATIONS)
class Functional(nn.Module):
    """A convolution that is a parameter and a function call, not a module."""

    def __init__(self, shape: Shape, out: int, act: str) -> None:
        super().__init__()
        dims = len(shape) - 1
        self.convolve = CONVOLVE[dims]
        self.kernel = nn.Parameter(
            torch.randn(out, shape[0], *[3] * dims) / (shape[0] * 3**dims) ** 0.5
        )
        self.shift = nn.Parameter(torch.randn(out) / 4)
        self.act = activation(act, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.convolve(x, self.kernel, self.shift, padding=1))


@block("weight_norm", ANY, out=WIDTHS, act=ACTIVATIONS)
class WeightNormed(nn.Module):
    """A convolution whose weight is a direction times a length."""

    def __init__(self, shape: Shape, out: int, act: str) -> None:
        super().__init__()
        self.conv = parametrizations.weight_norm(conv(shape, shape[0], out))
        self.act = activation(act, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


@block("shared", ANY, where=("sequence", "branches"), act=ACTIVATIONS)
class Shared(nn.Module):
    """One convolution that runs twice: on its own output, or on two views of its input."""

    def __init__(self, shape: Shape, where: str, act: str) -> None:
        super().__init__()
        self.conv = conv(shape, shape[0], shape[0])
        self.act = activation(act, shape[0])
        self.sequence = where == "sequence"

    def forward(self, x: Tensor) -> Tensor:
        once = self.act(self.conv(x))
        return self.act(self.conv(once)) if self.sequence else once + self.conv(x.flip(-1))


@block("tied", ANY, where=("twice", "autoencoder"), hidden=WIDTHS, act=ACTIVATIONS)
class Tied(nn.Module):
    """Two layers with one weight: two convolutions, or a convolution and its transpose."""

    def __init__(self, shape: Shape, where: str, hidden: int, act: str) -> None:
        super().__init__()
        if where == "twice":
            self.first = conv(shape, shape[0], shape[0])
            self.second = conv(shape, shape[0], shape[0])
            self.act = activation(act, shape[0])
        else:
            self.first = conv(shape, shape[0], hidden)
            self.second = TRANSPOSED[len(shape) - 1](hidden, shape[0], 3, 1, 1)
            self.act = activation(act, hidden)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


@block("transposed", ANY, out=(8, 12, 16, 24), groups=(1, 2, 4), norm=NORMS, act=ACTIVATIONS)
class Transposed(nn.Module):
    """Transposed convolution, upsampling where there is room."""

    def __init__(self, shape: Shape, out: int, groups: int, norm: str, act: str) -> None:
        super().__init__()
        self.fit, channels = fit(shape, groups)
        size = (2, 2, 0) if max(shape[1:]) * 2 <= LARGEST else (3, 1, 1)
        self.up = TRANSPOSED[len(shape) - 1](channels, out, *size, groups=groups)
        self.norm = norm_layer(shape, out, norm)
        self.act = activation(act, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.up(self.fit(x))))


@block("norm", ANY, norm=("batch", "batch_plain", "instance"))
class NormAlone(nn.Module):
    """A per-channel norm with no convolution next to it."""

    def __init__(self, shape: Shape, norm: str) -> None:
        super().__init__()
        self.norm = norm_layer(shape, shape[0], norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@block("group_norm", ANY, groups=(2, 4, "each"))
class GroupNormed(nn.Module):
    """Norm over groups of channels; with a group for each it is exact."""

    def __init__(self, shape: Shape, groups: int | str) -> None:
        super().__init__()
        self.fit, channels = fit(shape, groups if isinstance(groups, int) else 1)
        self.norm = nn.GroupNorm(groups if isinstance(groups, int) else channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fit(x))


@block("layer_norm")
class LayerNormed(nn.Module):
    """Norm over all channels, channels last."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@block("act", ANY, act=tuple(a for a in ACTIVATIONS if a != "none"))
class ActAlone(nn.Module):
    """An activation with nothing next to it."""

    def __init__(self, shape: Shape, act: str) -> None:
        super().__init__()
        self.act = activation(act, shape[0])

    def forward(self, x: Tensor) -> Tensor:
        # An in-place activation must not change what a neighbour still holds.
        return self.act(x.clone())


@block("scale", ANY, shift=(False, True), buffer=(False, True))
class Scale(nn.Module):
    """Layer scale: a factor a channel, learnt or fixed, and perhaps a shift."""

    def __init__(self, shape: Shape, shift: bool, buffer: bool) -> None:
        super().__init__()
        gamma = torch.rand(shape[0], *[1] * (len(shape) - 1)) + 0.5
        if buffer:
            self.register_buffer("gamma", gamma)
        else:
            self.gamma = nn.Parameter(gamma)
        self.beta = nn.Parameter(torch.randn(gamma.shape)) if shift else None

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gamma
        return x if self.beta is None else x + self.beta


@block("pool", ANY, kind=("max", "avg"))
class Pool(nn.Module):
    """Spatial pooling, by two where there is room."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        made = MAXPOOL if kind == "max" else AVGPOOL
        self.pool = made[len(shape) - 1](halving(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x)


@block("interpolate", mode=("nearest", "bilinear"))
class Interpolate(nn.Module):
    """Resizing: up by two where there is room, else down by two."""

    def __init__(self, shape: Shape, mode: str) -> None:
        super().__init__()
        self.factor = 2.0 if max(shape[1:]) * 2 <= LARGEST else 0.5
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=self.factor, mode=self.mode)


# Residual streams.


class PadShortcut(nn.Module):
    """Option A as a module: every second pixel, zeros for the new channels."""

    def __init__(self, stride: int, before: int, after: int) -> None:
        super().__init__()
        self.stride, self.before, self.after = stride, before, after

    def forward(self, x: Tensor) -> Tensor:
        return _pad_channels(_every(x, self.stride), self.before, self.after)


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _every(x: Tensor, stride: int) -> Tensor:
    return x[(..., *[slice(None, None, stride)] * (x.dim() - 2))]


def _pad_channels(x: Tensor, before: int, after: int) -> Tensor:
    return F.pad(x, (0, 0) * (x.dim() - 2) + (before, after))


@block(
    "residual",
    ANY,
    private=True,
    shortcut=(
        "identity",
        "projection",
        "pad",
        "pad_lambda",
        "pad_inline",
        "pad_derived",
        "cat_zero",
    ),
    hidden=WIDTHS,
    out=WIDTHS,
    norm=NORMS,
    act=ACTIVATIONS,
    last=("relu", "none", "silu"),
    inplace=(False, True),
)
class Residual(nn.Module):
    """Two convolutions beside a shortcut of any kind."""

    def __init__(
        self,
        shape: Shape,
        shortcut: str,
        hidden: int,
        out: int,
        norm: str,
        act: str,
        last: str,
        inplace: bool,
    ) -> None:
        super().__init__()
        channels = shape[0]
        widens = shortcut not in ("identity", "projection")
        if widens and channels > 24:
            shortcut, widens = "identity", False
        out = {"identity": channels, "projection": out}.get(shortcut, 2 * channels)
        stride = 1 if shortcut == "identity" else halving(shape)
        before, after = channels // 2, channels - channels // 2
        self.kind, self.stride, self.inplace = shortcut, stride, inplace
        self.conv1 = conv(shape, channels, hidden, stride=stride)
        self.norm1 = norm_layer(shape, hidden, norm)
        self.act = activation(act, hidden)
        self.conv2 = conv(shape, hidden, out)
        self.norm2 = norm_layer(shape, out, norm)
        self.last = activation(last, out)
        if shortcut == "projection":
            self.shortcut: nn.Module = nn.Sequential(
                conv(shape, channels, out, 1, stride), norm_layer(shape, out, norm)
            )
        elif shortcut == "pad":
            self.shortcut = PadShortcut(stride, before, after)
        elif shortcut == "pad_lambda":
            self.shortcut = Lambda(lambda x: _pad_channels(_every(x, stride), before, after))
        elif shortcut == "pad_inline":
            self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        if self.kind == "identity":
            short = x
        elif self.kind == "pad_inline":
            short = _pad_channels(_every(x, self.stride), self.before, self.after)
        elif self.kind == "pad_derived":
            extra = y.shape[1] - x.shape[1]
            short = _pad_channels(_every(x, self.stride), extra // 2, extra - extra // 2)
        elif self.kind == "cat_zero":
            short = _every(x, self.stride)
            short = torch.cat([short, short * 0], 1)
        else:
            short = self.shortcut(x)
        if self.inplace:
            y += short
        else:
            y = y + short
        return self.last(y)


@block("preact", ANY, private=True, hidden=WIDTHS, act=ACTIVATIONS)
class PreActivation(nn.Module):
    """Norm and activation before each convolution; the stream itself is never activated."""

    def __init__(self, shape: Shape, hidden: int, act: str) -> None:
        super().__init__()
        # In-place activation is safe only behind the norms here.
        self.norm1, self.act1 = norm_layer(shape, shape[0]), activation(act, shape[0])
        self.conv1 = conv(shape, shape[0], hidden)
        self.norm2, self.act2 = norm_layer(shape, hidden), activation(act, hidden)
        self.conv2 = conv(shape, hidden, shape[0])

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.act1(self.norm1(x)))
        return x + self.conv2(self.act2(self.norm2(y)))


@block("resnext", private=True, hidden=(8, 16, 12), groups=(2, 4), act=ACTIVATIONS)
class ResNeXt(nn.Module):
    """Bottleneck around a grouped convolution."""

    def __init__(self, shape: Shape, hidden: int, groups: int, act: str) -> None:
        super().__init__()
        self.reduce = unit(shape, shape[0], hidden, 1, act=act)
        self.grouped = unit(shape, hidden, hidden, groups=groups, act=act)
        self.expand = unit(shape, hidden, shape[0], 1, act="none")

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.expand(self.grouped(self.reduce(x))))


@block("res2net", private=True, width=(4, 3, 6), scales=(4, 2), how=("split_attr", "chunk"))
class Res2Net(nn.Module):
    """Splits that feed each other, joined again."""

    def __init__(self, shape: Shape, width: int, scales: int, how: str) -> None:
        super().__init__()
        self.scales, self.chunks = scales, how == "chunk"
        if not self.chunks:
            self.width = width
        self.reduce = unit(shape, shape[0], width * scales, 1)
        self.steps = nn.ModuleList(unit(shape, width, width) for _ in range(scales - 1))
        self.expand = unit(shape, width * scales, shape[0], 1, act="none")

    def forward(self, x: Tensor) -> Tensor:
        y = self.reduce(x)
        parts = y.chunk(self.scales, 1) if self.chunks else torch.split(y, self.width, 1)
        outs: list[Tensor] = []
        for i, step in enumerate(self.steps):
            outs.append(step(parts[i] if i == 0 else outs[-1] + parts[i]))
        return F.relu(x + self.expand(torch.cat([*outs, parts[-1]], 1)))


@block("join", ANY, kind=("add", "cat", "max", "mul", "stack", "min"))
class Join(nn.Module):
    """Any blocks beside the input, both brought to one shape and put together."""

    def __init__(self, shape: Shape, kind: str, body: tuple[B, ...]) -> None:
        super().__init__()
        self.kind = kind
        self.body, after = chain(shape, body)
        matches = after[0] == shape[0] or kind == "cat"
        self.match = nn.Identity() if matches else conv(shape, after[0], shape[0], 1)
        self.pool = None if after[1:] == shape[1:] else POOL_TO[len(shape) - 1]

    def forward(self, x: Tensor) -> Tensor:
        y = self.match(self.body(x))
        if self.pool is not None:
            y = self.pool(y, x.shape[2:])
        if self.kind == "cat":
            return torch.cat([x, y], 1)
        if self.kind == "mul":
            return x * y
        if self.kind == "stack":
            return torch.stack([x, y]).sum(0)
        return {"add": torch.add, "max": torch.maximum, "min": torch.minimum}[self.kind](x, y)


# Concatenation.


@block("dense", ANY, growth=(4, 6, 8), layers=(2, 1, 3), act=ACTIVATIONS)
class Dense(nn.Module):
    """Every layer reads all before it."""

    def __init__(self, shape: Shape, growth: int, layers: int, act: str) -> None:
        super().__init__()
        self.steps = nn.ModuleList()
        for i in range(layers):
            width = shape[0] + i * growth
            self.steps.append(
                nn.Sequential(
                    norm_layer(shape, width), activation(act, width), conv(shape, width, growth)
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for step in self.steps:
            seen.append(step(torch.cat(seen, 1)))
        return torch.cat(seen, 1)


@block("inception", private=True, hidden=WIDTHS, act=ACTIVATIONS)
class Inception(nn.Module):
    """Parallel branches, concatenated."""

    def __init__(self, shape: Shape, hidden: int, act: str) -> None:
        super().__init__()
        self.one = unit(shape, shape[0], 6, 1, act=act)
        self.three = nn.Sequential(
            unit(shape, shape[0], hidden, 1, act=act), unit(shape, hidden, 8, act=act)
        )
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), unit(shape, shape[0], 4, 1, act=act))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.pooled(x)], 1)


@block("unet", out=WIDTHS, up=("interpolate", "transposed"))
class UNet(nn.Module):
    """Down, any blocks, up again, and the skipped input beside it."""

    def __init__(self, shape: Shape, out: int, up: str, body: tuple[B, ...]) -> None:
        super().__init__()
        self.down = unit(shape, shape[0], 12, stride=halving(shape))
        self.body, inner = chain(_shape_after(self.down, shape), body)
        self.up = nn.ConvTranspose2d(inner[0], 8, 2, 2) if up == "transposed" else nn.Identity()
        self.join = unit(shape, shape[0] + (8 if up == "transposed" else inner[0]), out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.body(self.down(x)))
        y = F.interpolate(y, size=x.shape[2:])
        return self.join(torch.cat([y, x], 1))


@block("ghost", hidden=(8, 6, 12), how=("whole", "attr", "sliced"), act=ACTIVATIONS)
class Ghost(nn.Module):
    """Features and their cheap copies, perhaps cut to a width the module remembers."""

    def __init__(self, shape: Shape, hidden: int, how: str, act: str) -> None:
        super().__init__()
        self.primary = unit(shape, shape[0], hidden, 1, act=act)
        self.cheap = unit(shape, hidden, hidden, groups=hidden, act=act)
        self.out = {"whole": None, "attr": 2 * hidden, "sliced": 2 * hidden - 1}[how]

    def forward(self, x: Tensor) -> Tensor:
        y = self.primary(x)
        y = torch.cat([y, self.cheap(y)], 1)
        return y if self.out is None else y[:, : self.out]


@block("global_cat", out=WIDTHS)
class GlobalCat(nn.Module):
    """The image's mean, spread over space, beside the image (as in ASPP)."""

    def __init__(self, shape: Shape, out: int) -> None:
        super().__init__()
        self.join = unit(shape, 2 * shape[0], out, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((2, 3), keepdim=True).expand(-1, -1, *x.shape[2:])
        return self.join(torch.cat([x, mean], 1))


@block("coordinates", out=WIDTHS)
class Coordinates(nn.Module):
    """Two constant channels, the pixel's place, beside the others."""

    def __init__(self, shape: Shape, out: int) -> None:
        super().__init__()
        self.join = unit(shape, shape[0] + 2, out)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        rows = torch.linspace(-1, 1, height, dtype=x.dtype).view(1, 1, -1, 1)
        columns = torch.linspace(-1, 1, width, dtype=x.dtype).view(1, 1, 1, -1)
        places = [p.expand(x.shape[0], 1, height, width) for p in (rows, columns)]
        return self.join(torch.cat([x, *places], 1))


# Depthwise and grouped.


@block("separable", ANY, multiplier=(1, 2), out=WIDTHS, norm=NORMS, act=ACTIVATIONS)
class Separable(nn.Module):
    """Depthwise convolution, then a pointwise one."""

    def __init__(self, shape: Shape, multiplier: int, out: int, norm: str, act: str) -> None:
        super().__init__()
        c, wide = shape[0], multiplier * shape[0]
        self.depth = unit(shape, c, wide, groups=c, act=act, kind=norm)
        self.point = unit(shape, wide, out, 1, act=act, kind=norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.point(self.depth(x))


@block("inverted", private=True, hidden=(16, 12, 24), gate=(False, True), act=ACTIVATIONS)
class Inverted(nn.Module):
    """Expand, depthwise, perhaps a gate, project, add: MobileNet's block."""

    def __init__(self, shape: Shape, hidden: int, gate: bool, act: str) -> None:
        super().__init__()
        self.expand = unit(shape, shape[0], hidden, 1, act=act)
        self.depth = unit(shape, hidden, hidden, groups=hidden, act=act)
        inner = (hidden, *shape[1:])
        self.gate = SqueezeExcite(inner, "conv", 4, "sigmoid") if gate else nn.Identity()
        self.project = unit(shape, hidden, shape[0], 1, act="none")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.gate(self.depth(self.expand(x))))


@block("grouped", ANY, groups=(2, 4), out=(8, 12, 16, 24), norm=NORMS, act=ACTIVATIONS)
class Grouped(nn.Module):
    """Grouped convolution, as many channels in as come, others out."""

    def __init__(self, shape: Shape, groups: int, out: int, norm: str, act: str) -> None:
        super().__init__()
        self.fit, channels = fit(shape, groups)
        self.layers = unit(shape, channels, out, groups=groups, act=act, kind=norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.fit(x))


# Gates.


@block("se", private=True, how=("conv", "linear"), hidden=(4, 6), gate=("sigmoid", "hardsigmoid"))
class SqueezeExcite(nn.Module):
    """A factor a channel, computed from all channels' means."""

    def __init__(self, shape: Shape, how: str, hidden: int, gate: str) -> None:
        super().__init__()
        self.convolves = how == "conv"
        if self.convolves:
            self.pool = nn.AdaptiveAvgPool2d(1)
            self.reduce: nn.Module = nn.Conv2d(shape[0], hidden, 1)
            self.expand: nn.Module = nn.Conv2d(hidden, shape[0], 1)
        else:
            self.reduce, self.expand = nn.Linear(shape[0], hidden), nn.Linear(hidden, shape[0])
        self.gate = nn.Sigmoid() if gate == "sigmoid" else nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        if self.convolves:
            return x * self.gate(self.expand(F.relu(self.reduce(self.pool(x)))))
        batch, channels = x.shape[:2]
        factor = self.gate(self.expand(F.relu(self.reduce(x.mean((2, 3))))))
        return x * factor.view(batch, channels, 1, 1)


@block("eca", kernel=(3, 5))
class ChannelConv(nn.Module):
    """A factor a channel, computed from its neighbours' means by a convolution over channels."""

    def __init__(self, shape: Shape, kernel: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.conv = nn.Conv1d(1, 1, kernel, padding=kernel // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.pool(x).squeeze(-1).transpose(-1, -2)
        return x * torch.sigmoid(self.conv(mean).transpose(-1, -2).unsqueeze(-1))


@block("spatial_gate", ANY)
class SpatialGate(nn.Module):
    """One factor a pixel."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.conv = conv(shape, shape[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.conv(x))


@block("self_gate", ANY)
class SelfGate(nn.Module):
    """A factor a channel from its own mean, without parameters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.space = tuple(range(2, len(shape) + 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x.mean(self.space, keepdim=True))


@block("channel_mean")
class ChannelMean(nn.Module):
    """Spatial attention from the mean and maximum over channels, which no channel can leave."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return x * torch.sigmoid(self.conv(seen))


@block("channel_softmax", ANY)
class ChannelSoftmax(nn.Module):
    """Softmax over channels, which no channel can leave."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(1)


@block("selective", private=True, out=(8, 6, 12), how=("view", "layers"))
class SelectiveKernel(nn.Module):
    """Two kernels, mixed channel by channel with a softmax over the two."""

    def __init__(self, shape: Shape, out: int, how: str) -> None:
        super().__init__()
        self.near = unit(shape, shape[0], out)
        self.far = unit(shape, shape[0], out, 5)
        self.reduce = nn.Linear(out, 6)
        self.views = how == "view"
        if self.views:
            self.expand: nn.Module = nn.Linear(6, 2 * out)
        else:
            self.expands = nn.ModuleList(nn.Linear(6, out) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([self.near(x), self.far(x)], 1)
        code = F.relu(self.reduce(both.sum(1).mean((2, 3))))
        if self.views:
            weights = self.expand(code).view(x.shape[0], 2, -1)
        else:
            weights = torch.stack([expand(code) for expand in self.expands], 1)
        return (both * weights.softmax(1)[..., None, None]).sum(1)


@block("split_attention", private=True, out=(8, 4, 12), act=ACTIVATIONS)
class SplitAttention(nn.Module):
    """ResNeSt's: two halves of the channels, mixed with a softmax over the two."""

    def __init__(self, shape: Shape, out: int, act: str) -> None:
        super().__init__()
        self.fit, channels = fit(shape, 2)
        self.radix = 2
        self.conv = unit(shape, channels, 2 * out, groups=2, act=act)
        self.reduce = nn.Conv2d(out, 6, 1)
        self.expand = nn.Conv2d(6, 2 * out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.fit(x))
        batch, wide, height, width = y.shape
        halves = y.view(batch, self.radix, wide // self.radix, height, width)
        gap = halves.sum(1).mean((2, 3), keepdim=True)
        weights = self.expand(F.relu(self.reduce(gap)))
        weights = weights.view(batch, self.radix, -1, 1, 1).softmax(1)
        return (halves * weights).sum(1)


@block("non_local", hidden=(8, 4, 6), how=("matmul", "einsum"))
class NonLocal(nn.Module):
    """Attention between pixels: queries and keys share their units."""

    def __init__(self, shape: Shape, hidden: int, how: str) -> None:
        super().__init__()
        self.query = conv(shape, shape[0], hidden, 1)
        self.key = conv(shape, shape[0], hidden, 1)
        self.value = conv(shape, shape[0], hidden, 1)
        self.project = conv(shape, hidden, shape[0], 1)
        self.einsum = how == "einsum"

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        query, key, value = (f(x).flatten(2) for f in (self.query, self.key, self.value))
        if self.einsum:
            mix = torch.einsum("bcn,bcm->bnm", query, key).softmax(-1)
            y = torch.einsum("bnm,bcm->bcn", mix, value)
        else:
            mix = (query.transpose(1, 2) @ key).softmax(-1)
            y = value @ mix.transpose(1, 2)
        return x + self.project(y.view(batch, -1, height, width))


# Splitting and moving channels.


@block(
    "split",
    ANY,
    how=(
        "chunk",
        "split_derived",
        "split_attr",
        "sizes_attr",
        "slice_derived",
        "slice_const",
        "narrow",
        "stride",
        "tensor_split",
    ),
    join=("cat", "swap", "add", "convs"),
    act=ACTIVATIONS,
)
class Split(nn.Module):
    """Two parts of the channels, by every spelling, of which one or both go through layers."""

    def __init__(self, shape: Shape, how: str, join: str, act: str) -> None:
        super().__init__()
        self.fit, channels = fit(shape, 2)
        self.how, self.join = how, join
        first = channels // 2
        if how == "split_attr":
            self.width = first
        elif how == "sizes_attr":
            first = max(1, channels // 4)
            self.sizes = (first, channels - first)
        elif how == "slice_const":
            first = 3
        if join == "add" and 2 * first != channels:
            self.join = "convs"
        out = 8 if self.join == "convs" else first
        self.one = nn.Sequential(conv(shape, first, out), activation(act, out))
        if self.join == "convs":
            self.two = conv(shape, channels - first, out)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.parts(self.fit(x))
        if self.join == "cat":
            return torch.cat([self.one(a), b], 1)
        if self.join == "swap":
            return torch.cat([b, self.one(a)], 1)
        return self.one(a) + (b if self.join == "add" else self.two(b))

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        """Both parts of the channels."""
        half = x.shape[1] // 2
        if self.how == "chunk":
            return x.chunk(2, 1)
        if self.how == "tensor_split":
            return x.tensor_split(2, 1)
        if self.how == "split_derived":
            return x.split(half, 1)
        if self.how == "split_attr":
            return x.split(self.width, 1)
        if self.how == "sizes_attr":
            return torch.split(x, self.sizes, 1)
        if self.how == "slice_derived":
            return x[:, :half], x[:, half:]
        if self.how == "slice_const":
            return x[:, :3], x[:, 3:]
        if self.how == "stride":
            return x[:, 0::2], x[:, 1::2]
        return x.narrow(1, 0, half), x.narrow(1, half, x.shape[1] - half)


@block("glu", ANY, private=True, how=("chunk", "function", "split"), hidden=WIDTHS, out=WIDTHS)
class Gated(nn.Module):
    """Gated linear unit: one half of the channels opens or shuts the other."""

    def __init__(self, shape: Shape, how: str, hidden: int, out: int) -> None:
        super().__init__()
        self.how = how
        self.widen = conv(shape, shape[0], 2 * hidden)
        self.narrow = conv(shape, hidden, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.widen(x)
        if self.how == "function":
            return self.narrow(F.glu(y, 1))
        a, b = y.chunk(2, 1) if self.how == "chunk" else y.split(y.shape[1] // 2, 1)
        return self.narrow(a * torch.sigmoid(b))


def _shuffle(x: Tensor, groups: int) -> Tensor:
    batch, channels, *space = x.shape
    x = x.view(batch, groups, channels // groups, *space).transpose(1, 2)
    return x.reshape(batch, channels, *space)


@block("shuffle", how=("view", "module"), groups=(2, 4), grouped=(False, True))
class Shuffle(nn.Module):
    """Channel shuffle, alone or between grouped convolutions as in ShuffleNet."""

    def __init__(self, shape: Shape, how: str, groups: int, grouped: bool) -> None:
        super().__init__()
        self.fit, channels = fit(shape, groups)
        self.before = unit(shape, channels, channels, 1, 1, groups) if grouped else None
        self.shuffle = nn.ChannelShuffle(groups) if how == "module" else None
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        x = self.fit(x)
        if self.before is not None:
            x = self.before(x)
        return _shuffle(x, self.groups) if self.shuffle is None else self.shuffle(x)


@block("shufflenet", down=(False, True), act=ACTIVATIONS)
class ShuffleNet(nn.Module):
    """ShuffleNetV2's block: split, branch, concat, shuffle."""

    def __init__(self, shape: Shape, down: bool, act: str) -> None:
        super().__init__()
        self.fit, channels = fit(shape, 2)
        self.down = down and channels <= 24
        c = channels if self.down else channels // 2
        stride = halving(shape) if self.down else 1
        if self.down:
            self.side = nn.Sequential(
                unit(shape, c, c, 3, stride, c, "none"), unit(shape, c, c, 1, act=act)
            )
        self.branch = nn.Sequential(
            unit(shape, c, c, 1, act=act),
            unit(shape, c, c, 3, stride, c, "none"),
            unit(shape, c, c, 1, act=act),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.fit(x)
        if self.down:
            return _shuffle(torch.cat([self.side(x), self.branch(x)], 1), 2)
        a, b = x.chunk(2, 1)
        return _shuffle(torch.cat([a, self.branch(b)], 1), 2)


@block("pixel_shuffle", private=True, hidden=(4, 3, 6), how=("module", "function"), out=WIDTHS)
class PixelShuffle(nn.Module):
    """Channels become pixels: four of them are one unit for the next layer."""

    def __init__(self, shape: Shape, hidden: int, how: str, out: int) -> None:
        super().__init__()
        self.widen = unit(shape, shape[0], 4 * hidden)
        self.shuffle = nn.PixelShuffle(2) if how == "module" else None
        self.narrow = conv(shape, hidden, out, stride=1 if max(shape[1:]) * 2 <= LARGEST else 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.widen(x)
        y = F.pixel_shuffle(y, 2) if self.shuffle is None else self.shuffle(y)
        return self.narrow(y)


@block("pixel_unshuffle", how=("module", "function"), out=WIDTHS)
class PixelUnshuffle(nn.Module):
    """Pixels become channels: one unit is four channels for the next layer."""

    def __init__(self, shape: Shape, how: str, out: int) -> None:
        super().__init__()
        self.factor = halving(shape) if all(size % 2 == 0 for size in shape[1:]) else 1
        self.shuffle = nn.PixelUnshuffle(self.factor) if how == "module" else None
        self.narrow = unit(shape, shape[0] * self.factor**2, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.pixel_unshuffle(x, self.factor) if self.shuffle is None else self.shuffle(x)
        return self.narrow(y)


@block("flip", ANY)
class Flip(nn.Module):
    """The channels in reverse."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1)


@block("roll", ANY, by=(1, 3))
class Roll(nn.Module):
    """The channels moved round."""

    def __init__(self, shape: Shape, by: int) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(self.by, 1)


@block("slice_write")
class SliceWrite(nn.Module):
    """Halves swapped by writing into slices of an empty tensor."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fit, _ = fit(shape, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fit(x)
        half = x.shape[1] // 2
        y = torch.zeros_like(x)
        y[:, :half] = x[:, half:]
        y[:, half:] = x[:, :half]
        return y


@block("fold_batch", hidden=(4, 6))
class FoldBatch(nn.Module):
    """Halves of the channels as further images of the batch, so one weight reads both."""

    def __init__(self, shape: Shape, hidden: int) -> None:
        super().__init__()
        self.fit, channels = fit(shape, 2)
        self.conv = conv(shape, channels // 2, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fit(x)
        batch, channels, *space = x.shape
        y = F.relu(self.conv(x.reshape(batch * 2, channels // 2, *space)))
        return y.reshape(batch, 2 * y.shape[1], *space)


# Linear layers.


@block("mlp", private=True, hidden=(12, 8, 24), act=ACTIVATIONS, adds=(False, True), out=WIDTHS)
class ChannelsLast(nn.Module):
    """Channels last, two linear layers, channels first again."""

    def __init__(self, shape: Shape, hidden: int, act: str, adds: bool, out: int) -> None:
        super().__init__()
        self.adds = adds
        self.first = nn.Linear(shape[0], hidden)
        self.act = activation("gelu" if act == "prelu" else act)
        self.second = nn.Linear(hidden, shape[0] if adds else out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.act(self.first(x.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
        return x + y if self.adds else y


@block("convnext", private=True, hidden=(16, 24), scale=(True, False))
class ConvNeXt(nn.Module):
    """Depthwise convolution, layer norm, MLP, layer scale, add."""

    def __init__(self, shape: Shape, hidden: int, scale: bool) -> None:
        super().__init__()
        self.depth = conv(shape, shape[0], shape[0], groups=shape[0])
        self.norm = nn.LayerNorm(shape[0])
        self.first = nn.Linear(shape[0], hidden)
        self.second = nn.Linear(hidden, shape[0])
        self.gamma = nn.Parameter(torch.rand(shape[0]) + 0.5) if scale else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.second(F.gelu(self.first(y)))
        if self.gamma is not None:
            y = self.gamma * y
        return x + y.permute(0, 3, 1, 2)


@block("token_mix", ANY)
class TokenMix(nn.Module):
    """A linear layer over pixels, the same for every channel."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        pixels = math.prod(shape[1:])
        self.mix = nn.Linear(pixels, pixels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x.flatten(2)).view_as(x)


# Heads.

CLASSES = 5


@dataclass
class Result:
    """An output that is neither tensor, tuple nor dict."""

    logits: Tensor
    map: Tensor


@head("pool_linear", how=("avg", "mean", "max"))
class PoolLinear(nn.Module):
    """Global pooling and a classifier."""

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__()
        dims = len(shape) - 1
        self.pool = {"avg": TO_AVG, "max": TO_MAX}[how][dims](1) if how != "mean" else None
        self.classifier = nn.Linear(shape[0], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).mean(2) if self.pool is None else self.pool(x).flatten(1)
        return self.classifier(x)


@head("flatten_linear", how=("flatten", "view", "module"))
class FlattenLinear(nn.Module):
    """A classifier that sees every pixel of every channel."""

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__()
        self.flatten = nn.Flatten() if how == "module" else None
        self.views = how == "view"
        self.classifier = nn.Linear(math.prod(shape), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.flatten is not None:
            return self.classifier(self.flatten(x))
        if self.views:
            return self.classifier(x.contiguous().view(x.shape[0], -1))
        return self.classifier(torch.flatten(x, 1))


@head("pool_flatten")
class PoolFlatten(nn.Module):
    """Pooling to 2 pixels a side, then a classifier over all of them, as VGG has."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dims = len(shape) - 1
        self.pool = TO_AVG[dims](2)
        self.classifier = nn.Linear(shape[0] * 2**dims, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(x).flatten(1))


@head("mlp_head", private=True, hidden=(12, 8, 16), act=ACTIVATIONS)
class MLPHead(nn.Module):
    """A classifier with hidden units."""

    def __init__(self, shape: Shape, hidden: int, act: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(shape[0], hidden),
            activation(act, hidden),
            nn.Dropout(0.2),
            nn.Linear(hidden, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(2).mean(2))


@head("map", resize=(False, True))
class Map(nn.Module):
    """A class for every pixel, perhaps of a larger image."""

    def __init__(self, shape: Shape, resize: bool) -> None:
        super().__init__()
        self.classifier = conv(shape, shape[0], CLASSES, 1)
        self.resize = resize

    def forward(self, x: Tensor) -> Tensor:
        y = self.classifier(x)
        return F.interpolate(y, scale_factor=2.0) if self.resize else y


@head("several", kind=("tuple", "dict", "dataclass", "nested"))
class Several(nn.Module):
    """Two outputs, in any container."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.features = unit(shape, shape[0], 8)
        self.classifier = nn.Linear(8, CLASSES)
        self.map = conv(shape, 8, 3, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.features(x)
        logits, image = self.classifier(y.flatten(2).mean(2)), self.map(y)
        if self.kind == "dict":
            return {"logits": logits, "map": image}
        if self.kind == "dataclass":
            return Result(logits, image)
        return (logits, image) if self.kind == "tuple" else [{"logits": logits}, (image,)]


@head("auxiliary", hidden=(8, 6, 12))
class Auxiliary(nn.Module):
    """A classifier, and in training a second one with layers of its own."""

    def __init__(self, shape: Shape, hidden: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(shape[0], CLASSES)
        self.extra = unit(shape, shape[0], hidden)
        self.extra_classifier = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Any:
        logits = self.classifier(x.flatten(2).mean(2))
        if not self.training:
            return logits
        return logits, self.extra_classifier(self.extra(x).flatten(2).mean(2))


@head("features")
class Features(nn.Module):
    """The last block's channels as they are, which therefore all stay."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x
