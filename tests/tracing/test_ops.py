"""Operators between two layers: channels pass through exactly, or stay for a stated reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.independent import Layers, assert_exact, conv, kept, plan_of
from torch import Tensor, nn

import fpgm
from fpgm.errors import ModelError

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LARGE = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(1))
WORDS = torch.randint(0, 20, (3, 10), generator=torch.Generator().manual_seed(2))
KERNEL = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]])[None, None] / 16
Middle = Callable[[Any, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def between(middle: Middle, read: int = 8, **layers: Any) -> nn.Module:
    """Two convolutions with something in between."""
    return Layers(
        lambda net, x: net.head(middle(net, net.a(x))),
        a=conv(3, 8, 3),
        head=conv(read, 4),
        **layers,
    )


def pooled(middle: Middle, read: int = 8, **layers: Any) -> nn.Module:
    """A convolution and a linear layer with something in between."""
    return Layers(
        lambda net, x: net.head(middle(net, net.a(x))),
        a=conv(3, 8, 3),
        head=nn.Linear(read, 4),
        **layers,
    )


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def largest(x: Tensor) -> Tensor:
    return x.flatten(2).topk(5, 2)[0]


def involution(net: Any, x: Tensor) -> Tensor:
    n, _, h, w = x.shape
    windows = F.unfold(x, 3, padding=1).view(n, -1, 9, h, w)
    return (windows * net.k(x).view(n, 1, 9, h, w)).sum(2)


def spectral(net: Any, x: Tensor) -> Tensor:
    """FFC: real and imaginary parts side by side as channels."""
    f = torch.fft.rfft2(x)
    both = net.m(torch.cat([f.real, f.imag], 1)).relu()
    return torch.fft.irfft2(torch.complex(*both.chunk(2, 1)), s=x.shape[2:])


def neural_operator(net: Any, x: Tensor) -> Tensor:
    """FNO: a complex matrix for each of a few frequencies."""
    low = torch.fft.rfft2(x)[:, :, :3, :3]
    mixed = torch.einsum("bixy,ioxy->boxy", low, torch.view_as_complex(net.w))
    return torch.fft.irfft2(mixed, s=x.shape[2:])


def swapped_phase(net: Any, x: Tensor) -> Tensor:
    f = torch.fft.fft2(x)
    return torch.fft.ifft2(torch.polar(f.abs(), -f.angle())).real


def blur(lay_out: Callable[[Tensor, int], Tensor]) -> Middle:
    return lambda net, x: F.conv2d(x, lay_out(net.k, x.shape[1]), padding=1, groups=x.shape[1])


def graph(net: Any, x: Tensor) -> Tensor:
    """A graph convolution: messages are added up at their targets."""
    nodes = net.l(x.flatten(2).transpose(1, 2)[0])
    count = len(nodes)
    source = torch.arange(count)
    sums = torch.zeros_like(nodes).index_add_(0, (source * 7 + 1) % count, nodes[source])
    return sums.mean(0, keepdim=True)


def graph_by_scatter(net: Any, x: Tensor) -> Tensor:
    nodes = net.l(x.flatten(2).transpose(1, 2)[0])
    target = ((torch.arange(len(nodes)) * 7 + 1) % len(nodes))[:, None].expand_as(nodes)
    sums = torch.zeros(len(nodes), nodes.shape[1], dtype=x.dtype).scatter_add(0, target, nodes)
    return sums.mean(0, keepdim=True)


def skeleton(net: Any, x: Tensor) -> Tensor:
    """ST-GCN: three partitions of a graph, summed."""
    y = net.g(x)
    y = y.view(y.shape[0], 3, -1, *y.shape[2:])
    return torch.einsum("nkctv,kvw->nctw", y, net.A)


def groups_by_einsum(net: Any, x: Tensor) -> Tensor:
    y = x.view(x.shape[0], 2, -1, *x.shape[2:])
    return torch.einsum("bgchw,gco->bgohw", y, net.w).flatten(1, 2)


def written(place: Callable[[Tensor], Any]) -> Middle:
    """Set some of the values to a number, in place."""

    def middle(net: Any, x: Tensor) -> Tensor:
        x = x.clone()
        x[place(x)] = 0.5
        return x

    return middle


def sampled_points(net: Any, x: Tensor) -> Tensor:
    points = torch.arange(0, 64, 2)[None, None].expand(x.shape[0], x.shape[1], -1)
    return x.flatten(2).gather(2, points).view(x.shape[0], -1, 4, 8)


PASS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "topk over space": (lambda: pooled(lambda net, x: largest(x).mean(2)), {"a": 4}),
    "topk over space, flattened": (
        lambda: pooled(lambda net, x: largest(x).flatten(1), 40),
        {"a": 4},
    ),
    "what topk points at": (
        lambda: pooled(lambda net, x: x.flatten(2).gather(2, x.flatten(2).topk(5, 2)[1]).mean(2)),
        {"a": 4},
    ),
    "sort": (lambda: between(lambda net, x: x.sort(3)[0] * x), {"a": 4}),
    "argsort and gather": (lambda: between(lambda net, x: x.gather(3, x.argsort(3))), {"a": 4}),
    "scatter": (
        lambda: between(lambda net, x: torch.zeros_like(x).scatter(3, x.argsort(3), x)),
        {"a": 4},
    ),
    "scatter_reduce": (
        lambda: between(
            lambda net, x: torch.zeros_like(x).scatter_reduce(3, x.argsort(3) // 2, x, "amax")
        ),
        {"a": 4},
    ),
    "kthvalue": (lambda: pooled(lambda net, x: x.flatten(2).kthvalue(3)[0]), {"a": 4}),
    "mode": (lambda: pooled(lambda net, x: x.flatten(2).mode()[0]), {"a": 4}),
    "cummax": (lambda: between(lambda net, x: x.cummax(2)[0]), {"a": 4}),
    "cummin": (lambda: between(lambda net, x: x.cummin(3)[0]), {"a": 4}),
    "logcumsumexp": (lambda: between(lambda net, x: x.logcumsumexp(3)), {"a": 4}),
    "quantile": (lambda: pooled(lambda net, x: x.flatten(2).quantile(0.3, 2)), {"a": 4}),
    "nanquantile": (lambda: pooled(lambda net, x: x.flatten(2).nanquantile(0.3, 2)), {"a": 4}),
    "gelu_ and abs_": (
        lambda: between(lambda net, x: torch.ops.aten.gelu_(x.clone()).abs_()),
        {"a": 4},
    ),
    "rows filled": (
        lambda: between(lambda net, x: x.clone().index_fill_(2, torch.tensor([0, 3]), 0.5)),
        {"a": 4},
    ),
    "values written under a mask": (lambda: between(written(lambda x: x < 0.1)), {"a": 4}),
    "values written under a mask of images": (
        lambda: between(written(lambda x: torch.arange(len(x)) > 0)),
        {"a": 4},
    ),
    "bucketize": (
        lambda: between(
            lambda net, x: x * torch.bucketize(x, torch.linspace(-1, 1, 5, dtype=x.dtype))
        ),
        {"a": 4},
    ),
    "a diagonal of space": (
        lambda: pooled(lambda net, x: x.diagonal(dim1=2, dim2=3).mean(2)),
        {"a": 4},
    ),
    "a triangle of space": (lambda: between(lambda net, x: x.tril()), {"a": 4}),
    "turned space": (lambda: between(lambda net, x: x.rot90(1, (2, 3))), {"a": 4}),
    "unfold": (lambda: pooled(lambda net, x: F.unfold(x, 3).mean(2), 72), {"a": 4}),
    "unfold and fold": (
        lambda: between(
            lambda net, x: F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1)
        ),
        {"a": 4},
    ),
    "windows along an axis": (
        lambda: between(lambda net, x: x.unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5))),
        {"a": 4},
    ),
    "involution": (lambda: between(involution, k=conv(8, 9)), {"a": 4}),
    "squeeze_ of dims": (
        lambda: between(
            lambda net, x: (
                x * net.l(x.mean((2, 3), keepdim=True).squeeze_(3).squeeze_(2))[..., None, None]
            ),
            l=nn.Linear(8, 8),
        ),
        {"a": 4},
    ),
    "squeeze_": (
        lambda: between(
            lambda net, x: x * x.mean((2, 3), keepdim=True).squeeze_()[..., None, None]
        ),
        {"a": 4},
    ),
    "other views in place": (
        lambda: between(
            lambda net, x: (
                x.clone().transpose_(2, 3).swapaxes_(2, 3) * x.mean((2, 3)).unsqueeze_(2)[..., None]
            )
        ),
        {"a": 4},
    ),
    "bytes and back": (
        lambda: between(lambda net, x: x.view(torch.uint8).view(x.dtype)),
        {"a": 4},
    ),
    "vmap": (
        lambda: between(
            lambda net, x: torch.func.vmap(lambda one: one * one.mean((1, 2))[:, None, None])(x)
        ),
        {"a": 4},
    ),
    "complex there and back": (
        lambda: between(lambda net, x: torch.fft.ifft2(torch.fft.fft2(x) * 2).real * x),
        {"a": 4},
    ),
    "polar": (lambda: between(swapped_phase), {"a": 4}),
    "FFC": (lambda: between(spectral, m=conv(16, 16)), {"a": 4, "m": 4}),
    "FNO": (lambda: between(neural_operator, w=parameter(8, 8, 3, 3, 2)), {"a": 4, "w": 4}),
    "an expanded kernel": (
        lambda: between(blur(lambda k, c: k.expand(c, 1, 3, 3)), k=nn.Buffer(KERNEL)),
        {"a": 4},
    ),
    "a repeated kernel": (
        lambda: between(blur(lambda k, c: k.repeat(c, 1, 1, 1)), k=nn.Buffer(KERNEL)),
        {"a": 4},
    ),
    "a graph convolution": (lambda: pooled(graph, l=nn.Linear(8, 8)), {"a": 4, "l": 4}),
    "a graph convolution by scatter_add": (
        lambda: pooled(graph_by_scatter, l=nn.Linear(8, 8)),
        {"a": 4, "l": 4},
    ),
    "grouped einsum": (lambda: between(groups_by_einsum, w=parameter(2, 4, 4)), {"a": 2, "w": 2}),
    "gather at points": (lambda: between(sampled_points), {"a": 4}),
}
"""What is kept of each group."""


@pytest.mark.parametrize("name", PASS)
def test_channels_pass(name: str) -> None:
    make, expected = PASS[name]
    net = make()
    plan = plan_of(net, X)
    assert kept(plan) == expected
    assert_exact(net, plan, X, LARGE)


def test_partitions_of_a_graph_go_together() -> None:
    net = between(skeleton, g=conv(8, 24), A=nn.Buffer(torch.rand(3, 8, 8)))
    plan = plan_of(net, X)
    assert kept(plan) == {"a": 4, "g": 4}
    assert plan.filters()["g"].kept == 12
    assert_exact(net, plan, X)


class Blur(nn.Module):
    """A blur that remembers how many channels it has."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.kernel = nn.Buffer(KERNEL)

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.kernel.repeat(self.channels, 1, 1, 1)
        return F.conv2d(x, kernel, padding=1, groups=self.channels)


def test_a_remembered_number_of_kernels_follows_and_a_fixed_one_freezes() -> None:
    net = between(lambda net, x: net.blur(x), blur=Blur(8))
    plan = plan_of(net, X)
    small = assert_exact(net, plan, X, LARGE)
    assert small.blur.channels == 4  # type: ignore[union-attr]
    fixed = between(blur(lambda k, c: k.expand(8, 1, 3, 3)), k=nn.Buffer(KERNEL))
    with pytest.raises(ModelError, match="fixed in the code"):
        plan_of(fixed, X)


STAY: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "topk over channels": (
        lambda: between(lambda net, x: x.topk(8, 1)[0]),
        "'topk' over channels mixes them",
    ),
    "gather over channels": (
        lambda: between(lambda net, x: x.gather(1, torch.arange(8)[None, :, None, None])),
        "'gather' runs along the channels",
    ),
    "unfold over channels": (
        lambda: between(lambda net, x: x.unfold(1, 2, 2).mean(4).repeat(1, 2, 1, 1)),
        "'unfold' runs along the channels",
    ),
    "Fourier over channels": (
        lambda: between(lambda net, x: torch.fft.fft(x, dim=1).real),
        "a Fourier transform over channels mixes them",
    ),
    "positions by argmax": (
        lambda: between(lambda net, x: x * net.table[x.flatten(2).argmax(2) % 5][..., None, None],
                        table=torch.rand(5)),
        "'index' does not pass them on",
    ),
    "index_select by argmax": (
        lambda: between(
            lambda net, x: x * net.table.index_select(0, x[0].flatten(1).argmax(1) % 5).mean(),
            table=torch.rand(5),
        ),
        "'index_select' does not pass them on",
    ),
    "torch.equal": (
        lambda: between(lambda net, x: x if torch.equal(x, x) else x * 2),
        "their values leave torch by 'equal'",
    ),
    "frexp": (lambda: between(lambda net, x: torch.frexp(x)[0]), "'frexp' does not pass them on"),
    "torch.cond": (
        lambda: between(
            lambda net, x: torch.cond(net.flag.sum() > 0, torch.sin, torch.cos, (x,)),
            flag=nn.Buffer(torch.ones(2)),
        ),
        "'torch.cond' has no pruning rule",
    ),
    "vmap over a mean of channels": (
        lambda: between(lambda net, x: torch.func.vmap(lambda one: one * one.mean())(x)),
        "'mean' over channels mixes them",
    ),
    "quantile of everything": (
        lambda: between(lambda net, x: x * x.quantile(0.5)),
        "'sort' over channels mixes them",
    ),
    "gradients by vmap": (
        lambda: between(lambda net, x: torch.func.vmap(torch.func.grad(lambda v: (v**3).sum()))(x)),
        "'sum' over channels mixes them",
    ),
    "values written at fixed channels": (
        lambda: between(written(lambda x: (slice(None), torch.tensor([1, 5])))),
        "values are written to fixed positions",
    ),
    "values written under a mask of channels": (
        lambda: between(written(lambda x: (slice(None), torch.arange(8) > 4))),
        "values are written to fixed positions",
    ),
    "as_strided": (
        lambda: between(lambda net, x: x.as_strided((2, 8, 8, 8), (512, 64, 1, 8))),
        "'as_strided' uses fixed sizes or strides",
    ),
    "distances": (
        lambda: between(lambda net, x: x * torch.cdist(x.flatten(2), x.flatten(2)).mean()),
        "has no pruning rule",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
def test_channels_that_something_depends_on_stay(name: str) -> None:
    make, reason = STAY[name]
    with pytest.raises(ModelError) as caught:
        plan_of(make(), X)
    assert reason in str(caught.value)
    assert "0x" not in str(caught.value)
    assert "\n" not in str(caught.value)


# Words.


def text_model(table: nn.Module, **layers: Any) -> nn.Module:
    return Layers(
        lambda net, words: net.head(net.c(net.e(words).transpose(1, 2)).relu().amax(2)),
        e=table,
        c=nn.Conv1d(8, 6, 3),
        head=nn.Linear(6, 4),
        **layers,
    )


def test_the_width_of_an_embedding_is_pruned() -> None:
    net = text_model(nn.Embedding(20, 8, padding_idx=0))
    plan = plan_of(net, WORDS)
    assert kept(plan) == {"e": 4, "c": 3}
    small = assert_exact(net, plan, WORDS, WORDS[:2, :7])
    assert small.e.weight.shape == (20, 4)  # type: ignore[union-attr]
    assert small.e.embedding_dim == 4  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_the_width_of_an_embedding_bag_is_pruned(mode: str) -> None:
    net = nn.Sequential(nn.EmbeddingBag(20, 8, mode=mode), nn.Linear(8, 4))
    plan = plan_of(net, WORDS)
    assert kept(plan) == {"0": 4}
    assert_exact(net, plan, WORDS)


def test_an_embedding_that_is_also_the_last_layer_loses_its_width_and_keeps_its_words() -> None:
    net = Layers(
        lambda net, words: F.linear(net.l(net.e(words)).relu() + net.e(words), net.e.weight),
        e=nn.Embedding(20, 8),
        l=nn.Linear(8, 8),
    )
    plan = plan_of(net, WORDS)
    assert_exact(net, plan, WORDS)
    assert {(c.tensor, c.dim, c.role) for c in plan.cuts} >= {("e.weight", 1, "both")}


def test_two_embeddings_that_are_added_lose_the_same_channels() -> None:
    net = Layers(
        lambda net, words: net.head((net.e(words) + net.p(torch.arange(words.shape[1]))).relu()),
        e=nn.Embedding(20, 8),
        p=nn.Embedding(16, 8),
        head=nn.Linear(8, 4),
    )
    plan = plan_of(net, WORDS)
    keep = {c.tensor: c.keep for c in plan.cuts}
    assert keep["e.weight"] == keep["p.weight"]
    assert_exact(net, plan, WORDS, WORDS[:, :6])


def recurrent(layer: nn.Module, wide: int) -> nn.Module:
    return Layers(
        lambda net, words: net.head(
            net.r(net.c(net.e(words).transpose(1, 2)).relu().transpose(1, 2))[0].mean(1)
        ),
        e=nn.Embedding(20, 8),
        c=nn.Conv1d(8, 8, 3),
        r=layer,
        head=nn.Linear(wide, 4),
    )


def test_inputs_of_an_lstm_are_pruned_and_its_units_kept() -> None:
    net = recurrent(nn.LSTM(8, 6, batch_first=True, bidirectional=True, num_layers=2), 12)
    plan = plan_of(net, WORDS)
    assert kept(plan) == {"e": 4, "c": 4}
    assert any(
        "r" in f.layers and "the units of an LSTM are not pruned" in f.reason for f in plan.frozen
    )
    small = fpgm.compact(net, plan)
    assert small.r.input_size == 4  # type: ignore[union-attr]
    small(WORDS).sum().backward()
    assert_exact(net, plan, WORDS, dtype=torch.float32)


def test_inputs_of_a_gru_are_pruned() -> None:
    net = recurrent(nn.GRU(8, 6, batch_first=True), 6)
    plan = plan_of(net, WORDS)
    assert kept(plan)["e"] == kept(plan)["c"] == 4
    fpgm.compact(net, plan)(WORDS).sum().backward()
    assert_exact(net, plan, WORDS, WORDS[:, :7])


# Quantisation-aware training.


def qat(how: str) -> nn.Module:
    from torch.ao import quantization as q

    layers = [conv(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 8, 3), nn.BatchNorm2d(8),
              nn.ReLU(), conv(8, 4)]  # fmt: skip
    net = nn.Sequential(q.QuantStub(), *layers, q.DeQuantStub()).train()
    if how == "fused":
        net = q.fuse_modules_qat(net, [["1", "2", "3"], ["4", "5", "6"]])
    net.qconfig = {  # type: ignore[assignment]
        "per tensor": q.default_qat_qconfig,
        "per channel": q.QConfig(
            activation=q.default_fake_quant, weight=q.default_per_channel_weight_fake_quant
        ),
    }.get(how, q.get_default_qat_qconfig("x86"))
    result: nn.Module = q.prepare_qat(net)
    result(X)
    return result.eval()


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*", "ignore:.*reduce_range.*")
@pytest.mark.parametrize("how", ["per tensor", "per channel", "fused", "fast"])
def test_fake_quantisation_passes_channels_once_its_observers_are_off(how: str) -> None:
    net = qat(how)
    with pytest.raises(ModelError, match="disable_observer"):
        plan_of(net, X)
    net.apply(torch.ao.quantization.disable_observer)
    plan = plan_of(net, X)
    assert kept(plan) == {"1": 4, "4": 4}
    assert_exact(net, plan, X, dtype=torch.float32)


@pytest.mark.parametrize(
    "draw",
    [
        lambda y: torch.normal(0.0, y.exp()),
        lambda y: torch.normal(y, 1.0),
        lambda y: torch.normal(y, y.exp()),
    ],
    ids=["spread", "mean", "both"],
)
def test_noise_drawn_around_channels_passes_them_on(draw: Callable[[Tensor], Tensor]) -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3)
            self.last = nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(draw(self.first(x)))
            return out

    torch.manual_seed(0)
    small = fpgm.prune(Draws(), torch.randn(2, 3, 8, 8), rate=0.5, align=1)
    assert small.first.out_channels == 4


def test_a_layer_that_runs_inside_vmap_and_grad_does_not_stop_planning() -> None:
    def push(net: Any, x: Tensor) -> Tensor:
        energy = torch.func.grad(lambda one: net.inner(one).pow(2).sum())
        return x - 0.1 * torch.func.vmap(energy)(x.mean((2, 3)))[..., None, None]

    torch.manual_seed(0)
    net = Layers(
        lambda net, x: net.head(push(net, net.b(net.a(x).relu())).mean((2, 3))),
        a=conv(3, 8, 3), b=conv(8, 8), inner=nn.Linear(8, 8), head=nn.Linear(8, 4),
    )  # fmt: skip
    small = fpgm.prune(net, torch.randn(2, 3, 8, 8), rate=0.5, align=1)
    assert small.a.out_channels == 4
