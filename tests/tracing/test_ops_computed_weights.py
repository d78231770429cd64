"""Weights that are shared, summed or normed on their way to a layer, each pruned exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.independent import Layers, assert_exact, conv, kept, plan_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import fpgm
from fpgm.errors import ModelError

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LARGE = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(5, 12, generator=torch.Generator().manual_seed(2))

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


# Tied weights.


def deep_autoencoder(net: Any, x: Tensor) -> Tensor:
    code = net.b(net.a(x).relu()).relu()
    return F.linear(F.linear(code, net.b.weight.t(), net.shift).relu(), net.a.weight.t())


TIED: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, int]]] = {
    "linear": (
        lambda: Layers(
            lambda net, x: F.linear(net.a(x).relu(), net.a.weight.t()), a=nn.Linear(12, 8)
        ),
        ROWS,
        {"a": 4},
    ),
    "matmul": (
        lambda: Layers(lambda net, x: net.a(x).relu() @ net.a.weight, a=nn.Linear(12, 8)),
        ROWS,
        {"a": 4},
    ),
    "matmul of three dims": (
        lambda: Layers(lambda net, x: net.a(x).relu() @ net.a.weight, a=nn.Linear(12, 8)),
        ROWS[:, None].expand(-1, 4, -1),
        {"a": 4},
    ),
    "a parameter of the model": (
        lambda: Layers(lambda net, x: (x @ net.w).relu() @ net.w.t(), w=parameter(12, 8)),
        ROWS,
        {"w": 4},
    ),
    "two layers and a shift": (
        lambda: Layers(deep_autoencoder, a=nn.Linear(12, 8), b=nn.Linear(8, 6), shift=parameter(8)),
        ROWS,
        {"a": 4, "b": 3},
    ),
    "a transposed convolution": (
        lambda: Layers(
            lambda net, x: F.conv_transpose2d(net.a(x).relu(), net.a.weight, padding=1),
            a=conv(3, 8, 3),
        ),
        X,
        {"a": 4},
    ),
    "a kernel turned around": (
        lambda: Layers(
            lambda net, x: F.conv2d(
                net.a(x).relu(), net.a.weight.transpose(0, 1).flip(2, 3), padding=1
            ),
            a=conv(3, 8, 3),
        ),
        X,
        {"a": 4},
    ),
}


@pytest.mark.parametrize("name", TIED)
def test_a_tied_weight_loses_a_unit_where_it_writes_and_where_it_reads(name: str) -> None:
    make, x, expected = TIED[name]
    net = make()
    plan = plan_of(net, x)
    assert kept(plan) == expected
    assert {cut.role for cut in plan.cuts if cut.tensor.endswith(("weight", "w"))} == {"both"}
    assert_exact(net, plan, x)


def test_a_second_reader_of_a_tied_encoder_does_not_write() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.p(x).relu()
        code = net.a(y).relu()
        back = F.conv2d(code, net.a.weight.transpose(0, 1))
        out: Tensor = net.q(y) + net.head(back)
        return out

    net = Layers(forward, p=conv(3, 8, 3), a=conv(8, 6), q=conv(8, 4), head=conv(8, 4))
    plan = plan_of(net, X)
    roles = {(cut.tensor, cut.dim): cut.role for cut in plan.cuts}
    assert roles["a.weight", 1] == "both"
    assert roles["q.weight", 1] == "reads"
    assert_exact(net, plan, X, LARGE)


# Weights that are sums.


class Plus(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.randn(shape) / 4)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.flip(3)


def with_parametrization(added: nn.Module) -> nn.Module:
    layer = conv(8, 8, 3)
    parametrize.register_parametrization(layer, "weight", added)
    return layer


def norm(channels: int) -> nn.BatchNorm2d:
    result = nn.BatchNorm2d(channels)
    nn.init.uniform_(result.weight, 0.5, 1.5)
    nn.init.uniform_(result.bias)
    assert result.running_mean is not None
    assert result.running_var is not None
    result.running_mean.uniform_(-1, 1)
    result.running_var.uniform_(0.5, 2)
    return result


def fuse(layer: Any, bn: Any) -> tuple[Tensor, Tensor]:
    scale = bn.weight / (bn.running_var + bn.eps).sqrt()
    return layer.weight * scale[:, None, None, None], bn.bias - bn.running_mean * scale


def repvgg(net: Any, x: Tensor) -> Tensor:
    (wide, shift), (small, other) = fuse(net.three, net.n3), fuse(net.one, net.n1)
    return F.conv2d(x, wide + F.pad(small, (1, 1, 1, 1)), shift + other, padding=1)


def two_kernels(net: Any, x: Tensor) -> Tensor:
    weight = net.three.weight + F.pad(net.one.weight, (1, 1, 1, 1))
    return F.conv2d(x, weight, net.three.bias + net.one.bias, padding=1)


def lora(net: Any, x: Tensor) -> Tensor:
    weight = net.base.weight + (net.up @ net.down)[..., None, None] * 0.5
    return F.conv2d(x, weight, net.base.bias, padding=1)


def masked(net: Any, x: Tensor) -> Tensor:
    return F.conv2d(x, net.mask * net.base.weight, net.base.bias, padding=1)


@torch.no_grad()  # torch does not copy a weight with a graph
def pruned_by_torch() -> nn.Module:
    layer: nn.Module = prune.l1_unstructured(conv(8, 8, 3), "weight", 0.3)
    return layer


SUMS: dict[str, tuple[Callable[..., Tensor], Callable[[], dict[str, Any]], str]] = {
    "LoRA": (
        lora,
        lambda: {"base": conv(8, 8, 3), "down": parameter(2, 8), "up": parameter(8, 2)},
        "up",
    ),
    "3x3 and padded 1x1": (
        two_kernels,
        lambda: {"three": conv(8, 8, 3), "one": conv(8, 8)},
        "three",
    ),
    "RepVGG fused on the fly": (
        repvgg,
        lambda: {
            "three": conv(8, 8, 3, bias=False),
            "one": conv(8, 8, bias=False),
            "n3": norm(8),
            "n1": norm(8),
        },
        "three",
    ),
    "a parametrization that adds": (
        lambda net, x: net.p(x),
        lambda: {"p": with_parametrization(Plus(8, 8, 3, 3))},
        "p",
    ),
    "a parametrization of the weight itself": (
        lambda net, x: net.p(x),
        lambda: {"p": with_parametrization(Symmetric())},
        "p",
    ),
    "two weights, stacked and averaged": (
        lambda net, x: F.conv2d(x, torch.stack([net.v, net.w]).mean(0)),
        lambda: {"v": parameter(8, 8, 1, 1), "w": parameter(8, 8, 1, 1)},
        "v",
    ),
    "addcmul": (
        lambda net, x: F.conv2d(x, torch.addcmul(net.v, net.w, net.w)),
        lambda: {"v": parameter(8, 8, 1, 1), "w": parameter(8, 8, 1, 1)},
        "v",
    ),
    "addmm": (
        lambda net, x: F.conv2d(x, torch.addmm(net.v, net.up, net.down)[..., None, None]),
        lambda: {"v": parameter(8, 8), "up": parameter(8, 2), "down": parameter(2, 8)},
        "v",
    ),
    "a mask of ones and zeros": (
        masked,
        lambda: {
            "base": conv(8, 8, 3),
            "mask": nn.Buffer((torch.rand(8, 8, 3, 3) > 0.3).float()),
        },
        "base",
    ),
    "torch.nn.utils.prune": (lambda net, x: net.p(x), lambda: {"p": pruned_by_torch()}, "p"),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_weight_computed_from_several_is_pruned_on_both_sides(name: str) -> None:
    forward, layers, group = SUMS[name]
    net = Layers(
        lambda net, x: net.head(forward(net, net.first(x).relu()).relu()),
        first=conv(3, 8, 3),
        head=conv(8, 4),
        **layers(),
    )
    plan = plan_of(net, X)
    assert kept(plan) == {"first": 4, group: 4}
    small = assert_exact(net, plan, X, LARGE)
    assert small.first.out_channels == 4  # type: ignore[union-attr]


def test_each_part_of_a_concatenated_weight_reads() -> None:
    net = Layers(
        lambda net, x: net.head(F.conv2d(net.first(x).relu(), torch.cat([net.v, net.w]))),
        first=conv(3, 8, 3),
        v=parameter(4, 8, 1, 1),
        w=parameter(6, 8, 1, 1),
        head=conv(10, 4),
    )
    plan = plan_of(net, X)
    assert kept(plan) == {"first": 4, "v": 2, "w": 3}
    assert_exact(net, plan, X, LARGE)


# Weight norm.

APIS = {"hook": nn.utils.weight_norm, "parametrization": parametrizations.weight_norm}


@torch.no_grad()  # torch does not copy a weight with a graph
def normed(api: str, layer: nn.Module, dim: int | None) -> nn.Module:
    result: nn.Module = APIS[api](layer, dim=dim)  # type: ignore[arg-type]
    for name, tensor in result.named_parameters():
        if name.endswith(("weight_g", "original0")):
            # A gain that is the norm would hide which of the two is used.
            tensor.mul_(torch.rand_like(tensor) + 0.5)
    return result


def three(api: str, kind: str, dim: int | None) -> tuple[nn.Module, Tensor]:
    if kind == "linear":
        layers = [nn.Linear(12, 8), nn.Linear(8, 6), nn.Linear(6, 4)]
    else:
        inner = {
            "conv": lambda: conv(8, 6, 3),
            "transposed": lambda: nn.ConvTranspose2d(8, 6, 2, 2),
            "grouped": lambda: conv(8, 6, 3, groups=2),
            "depthwise": lambda: conv(8, 8, 3, groups=8),
        }[kind]()
        layers = [conv(3, 8, 3), inner, conv(8 if kind == "depthwise" else 6, 4)]
    first, second, last = (normed(api, layer, dim) for layer in layers)
    net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
    return net, ROWS if kind == "linear" else X


WEIGHT_NORMS = [
    ("conv", (0, 1, 2, None)),
    ("transposed", (0, 1, 3, None)),
    ("linear", (0, 1, None)),
    ("grouped", (0,)),
    ("depthwise", (0,)),
]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("kind", "dim"), [(kind, dim) for kind, dims in WEIGHT_NORMS for dim in dims]
)
def test_weight_norm_leaves_the_weights_that_stay_what_they_were(
    api: str, kind: str, dim: int | None
) -> None:
    net, x = three(api, kind, dim)
    plan = plan_of(net, x)
    assert plan.macs_removed > 0.3
    small = assert_exact(net, plan, x)
    assert fpgm.verify(net, plan, x).check().ok
    again = copy.deepcopy(net)
    fpgm.mask_(again, plan)
    before = {name: tensor.clone() for name, tensor in again.state_dict().items()}
    fpgm.mask_(again, plan)
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=1e-6, atol=0)
    assert all(bool(p.isfinite().all()) for p in small.parameters())


class OwnConv2d(nn.Conv2d):
    """A layer of the user's own."""


def doubled(module: Any, _: Any) -> None:
    module.weight = module.base * 2.0


@torch.no_grad()
def computed_by_hook(kind: str, layer: Any) -> nn.Module:
    if kind == "weight norm":
        nn.utils.weight_norm(layer)
    elif kind == "torch.nn.utils.prune":
        prune.l1_unstructured(layer, "weight", 5)
    else:
        layer.base = nn.Parameter(layer.weight / 2)
        del layer.weight
        layer.register_forward_pre_hook(doubled)
    assert isinstance(layer, nn.Module)
    return layer


@pytest.mark.parametrize("own", [nn.Conv2d, OwnConv2d])
@pytest.mark.parametrize("kind", ["weight norm", "torch.nn.utils.prune"])
def test_a_weight_that_a_hook_computes_has_its_new_size_at_once(
    kind: str, own: type[nn.Conv2d]
) -> None:
    layers = [computed_by_hook(kind, own(8 if i else 3, 8, 3)) for i in range(2)]
    net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    plan = plan_of(net, X)
    assert not plan.cached
    small: Any = assert_exact(net, plan, X)
    fresh: Any = fpgm.compact(net, plan)
    for i in (0, 2):
        assert fresh[i].weight.shape == (4, 4 if i else 3, 3, 3)
        torch.testing.assert_close(fresh[i].weight, small[i].weight.float())
    copy.deepcopy(fresh)  # which torch refuses for a tensor with a graph


@pytest.mark.parametrize("used", [False, True])
def test_a_weight_that_a_hook_of_the_users_computes_is_dropped(used: bool) -> None:
    net = nn.Sequential(
        conv(3, 8, 3), nn.ReLU(), computed_by_hook("own", OwnConv2d(8, 8, 3)), nn.Conv2d(8, 4, 1)
    )
    if used:
        with torch.no_grad():
            net(X)
    plan = plan_of(net.eval(), X)
    fresh: Any = fpgm.compact(net, plan)
    assert getattr(fresh[2], "weight", None) is None
    assert_exact(net, plan, X)


def decoder(api: str) -> nn.Module:
    """The shape of a HiFi-GAN generator: transposed convolutions and residual blocks."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.one = normed(api, nn.Conv1d(width, width, 3, padding=1), 0)
            self.two = normed(api, nn.Conv1d(width, width, 3, padding=2, dilation=2), 0)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.two(F.leaky_relu(self.one(F.leaky_relu(x, 0.1)), 0.1))
            return out

    return nn.Sequential(
        normed(api, nn.Conv1d(20, 16, 7, padding=3), 0),
        nn.LeakyReLU(0.1),
        normed(api, nn.ConvTranspose1d(16, 12, 4, 2, 1), 0),
        Block(12),
        nn.LeakyReLU(0.1),
        normed(api, nn.ConvTranspose1d(12, 8, 4, 2, 1), 0),
        Block(8),
        nn.LeakyReLU(0.1),
        normed(api, nn.Conv1d(8, 1, 7, padding=3), 0),
        nn.Tanh(),
    )


@pytest.mark.parametrize("api", APIS)
def test_a_vocoder_is_pruned_and_its_file_loads(api: str, tmp_path: Path) -> None:
    net = decoder(api).eval()
    x = torch.randn(1, 20, 16)
    plan = plan_of(net, x)
    assert plan.macs_removed > 0.6
    small = assert_exact(net, plan, x, torch.randn(2, 20, 9))
    assert small[2].in_channels == 8
    assert small[2].out_channels == 6
    fpgm.save(fpgm.compact(net, plan), tmp_path / "small.safetensors")
    again = fpgm.load(tmp_path / "small.safetensors", lambda: decoder(api)).eval()
    torch.testing.assert_close(again(x), fpgm.compact(net, plan)(x))


def test_soft_pruning_of_a_transposed_weight_norm_stays_finite() -> None:
    net = three("parametrization", "transposed", 1)[0]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    pruner = fpgm.SoftPruner(net, X, rate=0.5, align=1, optimizer=optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        net(X).square().mean().backward()
        optimizer.step()
        pruner.step()
        assert bool(net(X).isfinite().all())
    small = pruner.compact()
    torch.testing.assert_close(small(X), net(X), rtol=1e-4, atol=1e-5)


def test_a_weight_norm_called_by_hand_keeps_the_axes_its_norm_sums_over() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        weight = torch._weight_norm(net.v, net.g, 0)
        out: Tensor = net.head(F.conv2d(net.first(x).relu(), weight).relu())
        return out

    net = Layers(
        forward,
        first=conv(3, 8, 3),
        v=parameter(8, 8, 1, 1),
        g=parameter(8, 1, 1, 1),
        head=conv(8, 4),
    )
    plan = plan_of(net, X)
    assert kept(plan) == {"v": 4}
    small, zeroed = fpgm.compact(net, plan), copy.deepcopy(net)
    fpgm.mask_(zeroed, plan)
    torch.testing.assert_close(small(X), zeroed(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("epsilon", [0.0, 1e-5])
def test_a_weight_over_its_own_norm_is_pruned_where_masking_leaves_no_zero_over_zero(
    epsilon: float,
) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        norms = net.v.flatten(1).norm(dim=1)[:, None, None, None]
        weight = net.g * net.v / (norms + epsilon if epsilon else norms)
        out: Tensor = net.head(F.conv2d(net.first(x).relu(), weight).relu())
        return out

    layers = {"v": parameter(8, 8, 1, 1), "g": parameter(8, 1, 1, 1), "head": conv(8, 4)}
    net = Layers(forward, first=conv(3, 8, 3), **layers)
    if not epsilon:
        with pytest.raises(ModelError, match=r"channels mixes them|divided by its own norm"):
            plan_of(net, X)
        return
    plan = plan_of(net, X)
    assert kept(plan) == {"v": 4}
    assert_exact(net, plan, X, LARGE)


@pytest.mark.parametrize(
    ("wrap", "reason"),
    [
        (nn.utils.spectral_norm, "spectral norm"),
        (parametrizations.spectral_norm, "spectral norm"),
        (parametrizations.orthogonal, "parametrizations"),
    ],
)
def test_a_norm_over_the_whole_weight_keeps_its_channels(
    wrap: Callable[[nn.Module], nn.Module], reason: str
) -> None:
    inner = wrap(conv(8, 8))
    net = nn.Sequential(conv(3, 8, 3), nn.ReLU(), inner, nn.ReLU(), conv(8, 6), conv(6, 4))
    plan = plan_of(net, X)
    assert kept(plan) == {"4": 3}
    assert any("2" in frozen.layers and reason in frozen.reason for frozen in plan.frozen)
    assert_exact(net, plan, X)


def test_nothing_is_left_where_every_layer_has_such_a_norm() -> None:
    net = nn.Sequential(nn.utils.spectral_norm(conv(3, 8, 3)), nn.utils.spectral_norm(conv(8, 4)))
    with pytest.raises(ModelError, match="spectral norm"):
        plan_of(net, X)
