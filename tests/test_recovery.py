"""Recovery: what can be replaced exactly is, what cannot comes nearer, and nothing else changes."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.errors import RequestError
from fpgm.recovery import RECOVERY, recover
from fpgm.recovery.normal import Normal, best_change
from fpgm.recovery.rows import Sample, groups_of, matrix_of, set_matrix_

LAYERS = [
    (nn.Conv2d(4, 6, 3, 2, 1, groups=2), (2, 4, 9, 7)),
    (nn.Conv2d(4, 6, (3, 2), 1, "same", dilation=2), (2, 4, 9, 7)),
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 9)),
    (nn.Conv2d(6, 12, 3, 1, 1, groups=6), (2, 6, 5, 5)),
    (nn.Conv2d(4, 6, 1, 2), (2, 4, 9, 9)),
    (nn.Conv1d(4, 6, 5, 3, 2, padding_mode="circular"), (2, 4, 19)),
    (nn.Conv3d(4, 6, 3, 1, (1, 0, 2), dilation=(1, 2, 1)), (2, 4, 6, 7, 5)),
    (nn.ConvTranspose1d(4, 6, 2, 1, 1), (2, 4, 9)),
    (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), (2, 4, 5, 6)),
    (nn.ConvTranspose2d(4, 6, 4, 3, 0, 2, dilation=2), (2, 4, 5, 6)),
    (nn.ConvTranspose3d(2, 4, 3, 2, 1, groups=2), (1, 2, 3, 4, 5)),
    (nn.Linear(7, 3), (5, 7)),
    (nn.Linear(7, 3), (2, 4, 5, 7)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda value: str(value))
@pytest.mark.parametrize("most", [7, 10**9])
def test_every_layer_is_rows_times_a_matrix(layer: Any, shape: tuple[int, ...], most: int) -> None:
    x = torch.randn(shape)
    out = layer(x).detach()
    sample = Sample(layer, x, out, most, seed=0)
    bias = layer.bias.detach().reshape(groups_of(layer), 1, -1)
    found = sample.rows() @ matrix_of(layer) + bias
    torch.testing.assert_close(found, sample.values(out), rtol=1e-4, atol=1e-5)
    other = copy.deepcopy(layer)
    nn.init.zeros_(other.weight)
    set_matrix_(other, matrix_of(layer))
    assert torch.equal(other.weight, layer.weight)


def test_least_squares_against_torch() -> None:
    rows, wanted = torch.randn(2, 50, 6).double(), torch.randn(2, 50, 3).double()
    normal = Normal(2, 6, 3, torch.device("cpu"))
    for part in range(0, 50, 10):
        piece = slice(part, part + 10)
        normal.add(rows[:, piece], wanted[:, piece], wanted[:, piece])
    expected = torch.linalg.lstsq(rows, wanted).solution
    change, _ = normal.solve(1e-14)
    torch.testing.assert_close(change, expected, rtol=1e-6, atol=1e-8)
    assert normal.error(change) == pytest.approx(float((wanted - rows @ expected).square().sum()))
    spread = (wanted - wanted.mean(1, keepdim=True)).square().sum(1)
    torch.testing.assert_close(normal.spread(), spread)
    given = rows @ expected
    varies = (given - given.mean(1, keepdim=True)).square().sum(1)
    torch.testing.assert_close(normal.variance(expected), varies)


def test_what_cannot_be_solved_gets_a_stronger_ridge() -> None:
    normal = Normal(1, 3, 1, torch.device("cpu"))
    rows = torch.tensor([[[1e8, 1e8, 1e8]] * 4]).double()
    normal.add(rows, torch.ones(1, 4, 1).double(), torch.ones(1, 4, 1).double())
    change, ridge = normal.solve(1e-18)
    assert ridge > 1e-18
    assert change.isfinite().all()


def test_a_change_that_serves_nobody_else_is_not_made() -> None:
    """Fitted to noise, of other noise it explains nothing."""
    torch.manual_seed(1)
    fit, held = (Normal(1, 20, 1, torch.device("cpu")) for _ in range(2))
    for part, count in ((fit, 22), (held, 2000)):
        noise = torch.randn(1, count, 1).double()
        part.add(torch.randn(1, count, 20).double(), noise, noise)
    change, ridge = best_change(fit, held, (1e-9, 1e-6))
    assert ridge is None
    assert not change.any()


# Exactness.


def stir(model: nn.Module) -> nn.Module:
    """Norms that do something."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.uniform_(module.bias, -0.3, 0.3)
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.uniform_(-0.3, 0.3)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def chain(*, norm: bool, activation: bool = True) -> nn.Sequential:
    layers = [
        nn.Conv2d(3, 8, 3, padding=1, bias=not norm),
        nn.BatchNorm2d(8) if norm else nn.Identity(),
        nn.ReLU() if activation else nn.Identity(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    ]
    return nn.Sequential(*layers)


def batches(*shape: int, count: int = 8) -> list[Tensor]:
    return [torch.randn(16, *shape) for _ in range(count)]


@torch.no_grad()
def copy_unit(model: nn.Module, source: int, target: int) -> None:
    for module in (model[0], model[1]):
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.ndim:
                tensor[target] = tensor[source]


@pytest.mark.parametrize("norm", [False, True])
def test_a_duplicate_goes_without_a_trace(norm: bool) -> None:
    model = stir(chain(norm=norm))
    copy_unit(model, 2, 5)
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rates={"0": 0.125}, align=1)
    [gone] = {c.removed()[0] for c in plan.cuts if c.tensor == "0.weight"}
    assert gone in (2, 5)
    x = torch.randn(8, 3, 6, 6)
    assert (model(x) - fpgm.compact(model, plan)(x)).abs().max() > 1e-3
    small = recover(model, plan, batches(3, 6, 6))
    assert (model(x) - small(x)).abs().max() < 1e-5


@torch.no_grad()
def test_a_combination_of_others_goes_without_a_trace() -> None:
    """Without an activation between, what a filter sees the others can be made to see."""
    model = stir(chain(norm=False, activation=False))
    for tensor in (model[0].weight, model[0].bias):
        tensor[3] = 0.5 * tensor[0] - 2 * tensor[6]
    order = [3, *(i for i in range(8) if i != 3)]

    def first(filters: Tensor) -> Tensor:
        return torch.tensor([float(order.index(i)) for i in range(len(filters))])

    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rates={"0": 0.125}, align=1, criterion=first)
    assert {c.removed()[0] for c in plan.cuts if c.tensor == "0.weight"} == {3}
    small = recover(model, plan, batches(3, 6, 6))
    x = torch.randn(8, 3, 6, 6)
    assert (model(x) - fpgm.compact(model, plan)(x)).abs().max() > 1e-3
    assert (model(x) - small(x)).abs().max() < 1e-5


# Structures.


class Streams(nn.Module):
    """A residual network with a projection, with or without norms."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()

        def conv(a: int, b: int, k: int = 3, s: int = 1) -> nn.Sequential:
            own = nn.BatchNorm2d(b) if norm else nn.Identity()
            return nn.Sequential(nn.Conv2d(a, b, k, s, k // 2, bias=not norm), own)

        self.stem = conv(3, 16)
        self.one, self.two = conv(16, 16), conv(16, 16)
        self.three, self.four, self.short = conv(16, 24, 3, 2), conv(24, 24), conv(16, 24, 1, 2)
        self.head = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (self.two(self.one(x).relu()) + x).relu()
        x = (self.four(self.three(x).relu()) + self.short(x)).relu()
        return self.head(x.mean((2, 3)))


class Mixed(nn.Module):
    """Depthwise, grouped, transposed, concatenated, shared, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.b = nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.gate = nn.Sequential(nn.Conv2d(16, 8, 1), nn.ReLU(), nn.Conv2d(8, 16, 1), nn.Sigmoid())
        self.up = nn.ConvTranspose2d(16, 12, 4, 2, 1)
        self.twice = nn.Conv2d(12, 12, 3, padding=1)
        self.out = nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.deep(self.a(x).relu()).relu()).relu()
        x = x * self.gate(x.mean((2, 3), keepdim=True))
        x = self.up(x).relu()
        y = self.twice(self.twice(x).relu()).relu()
        return self.out(torch.cat([x, y], 1))


NETS = {
    "chain": lambda: chain(norm=False),
    "norms": lambda: chain(norm=True),
    "streams": Streams,
    "streams without norms": lambda: Streams(norm=False),
    "mixed": Mixed,
}


@pytest.mark.parametrize("residual", ["coupled", "independent"])
@pytest.mark.parametrize("name", NETS)
def test_outputs_come_nearer_on_pictures_never_seen(name: str, residual: Any) -> None:
    torch.manual_seed(3)
    model = stir(NETS[name]())
    size = 6
    plan = fpgm.plan(model, torch.randn(1, 3, size, size), rate=0.3, align=1, residual=residual)
    small = recover(model, plan, batches(3, size, size, count=32))
    x = torch.randn(64, 3, size, size)
    with torch.no_grad():
        wanted = model(x)
        before = float((fpgm.compact(model, plan)(x) - wanted).square().mean())
        after = float((small(x) - wanted).square().mean())
    assert after < 0.7 * before
    told = getattr(small, RECOVERY)
    assert told.after < told.before
    assert all(solved.after <= solved.before * (1 + 1e-9) for solved in told.layers)


# What it leaves alone.


def test_the_model_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stir(Streams()).train()
    before = copy.deepcopy(model.state_dict())
    hooks = sum(len(m._forward_hooks) for m in model.modules())
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1)
    small = recover(model, plan, batches(3, 6, 6))
    assert model.training
    assert small.training
    assert sum(len(m._forward_hooks) for m in model.modules()) == hooks
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad for p in small.parameters())


def test_interrupted_it_leaves_nothing_behind() -> None:
    model = stir(Streams()).train()
    before = copy.deepcopy(model.state_dict())
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1)

    def stop(layer: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recover(model, plan, batches(3, 6, 6), progress=stop)
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_any_loader_will_do() -> None:
    model = stir(Streams())
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1)
    data = batches(3, 6, 6)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for x in data:
            yield x, torch.zeros(len(x))

    loaders: list[Any] = [data, pairs(), [[x, 1] for x in data], [{"x": x} for x in data]]
    found = [recover(model, plan, loader) for loader in loaders]
    x = torch.randn(4, 3, 6, 6)
    for small in found[1:]:
        torch.testing.assert_close(small(x), found[0](x))
    few = recover(model, plan, data, images=32)
    assert getattr(few, RECOVERY).inputs == 32


WANTED = "without a tensor of inputs: give batches of inputs, or pairs of inputs and labels"


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "The loader gives nothing: recovery needs some batches of inputs."),
        (["a"], f"The loader gives str {WANTED}."),
    ],
)
def test_loaders_that_will_not_do(loader: list[Any], message: str) -> None:
    model = stir(chain(norm=False))
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1)
    with pytest.raises(RequestError) as caught:
        recover(model, plan, loader)
    assert str(caught.value) == message


# What reviews broke.


def unseen(model: nn.Module, small: nn.Module, plan: fpgm.Plan, x: Tensor) -> tuple[float, float]:
    """Squared error on pictures never seen: of the compact model, and of the recovered one."""
    with torch.no_grad():
        wanted = model(x)
        nets = (fpgm.compact(model, plan).eval(), small)
        before, after = (float((net(x) - wanted).square().mean()) for net in nets)
    return before, after


@pytest.mark.parametrize("sizes", [[64, 64, 64], [128], [16] * 8 + [1]])
def test_few_batches_are_not_learnt_by_heart(sizes: list[int]) -> None:
    torch.manual_seed(0)
    model = chain(norm=False).eval()
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.4, align=1)
    small = recover(model, plan, [torch.randn(n, 3, 6, 6) for n in sizes])
    before, after = unseen(model, small, plan, torch.randn(256, 3, 6, 6))
    assert after < before


def test_a_depthwise_transposed_convolution() -> None:
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(16, 16, 4, 2, 1, groups=16, bias=False)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), up, nn.Conv2d(16, 4, 1)).eval()
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.5, align=1)
    small = recover(model, plan, batches(3, 6, 6))
    before, after = unseen(model, small, plan, torch.randn(64, 3, 6, 6))
    assert after < before


class Tripled(nn.Conv2d):
    """Computes something else than its weights say."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight * 3, self.bias, padding=1)


def test_layers_with_a_forward_of_their_own_are_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        Tripled(3, 8, 3), nn.ReLU(), Tripled(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)
    )
    plan = fpgm.plan(model.eval(), torch.randn(1, 3, 6, 6), rate=0.5, align=1)
    small = recover(model, plan, batches(3, 6, 6))
    told = getattr(small, RECOVERY)
    assert [solved.layer for solved in told.layers] == ["4"]
    assert told.after < told.before


class Placed(nn.Module):
    """Adds a constant of batch size one, and a branch into a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.where = nn.Parameter(torch.randn(1, 8, 6, 6))
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu() + self.where
        return self.head((self.b(x) + x).relu())


def test_sums_are_known_in_a_last_batch_of_one() -> None:
    torch.manual_seed(0)
    model = Placed().eval()
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.5, align=1, residual="independent")
    small = recover(model, plan, [torch.randn(n, 3, 6, 6) for n in [16] * 8 + [1]])
    before, after = unseen(model, small, plan, torch.randn(64, 3, 6, 6))
    assert after < before


class Tokens(nn.Module):
    """Linear branches on [pictures, tokens, channels]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head((x + self.down(self.up(x).relu())).mean(1))


@pytest.mark.parametrize("residual", ["coupled", "independent"])
def test_branches_of_tokens(residual: Any) -> None:
    torch.manual_seed(0)
    model = Tokens().eval()
    plan = fpgm.plan(model, torch.randn(1, 5, 6), rate=0.3, align=1, residual=residual)
    small = recover(model, plan, batches(5, 6))
    before, after = unseen(model, small, plan, torch.randn(64, 5, 6))
    assert after < before


class Sized(nn.Module):
    """A transposed convolution that is told its output's size, before a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, 2, 1)
        self.up = nn.ConvTranspose2d(8, 8, 3, 2, 1)
        self.side = nn.Conv2d(3, 8, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(self.down(input=x).relu(), output_size=x.shape[2:])
        return self.head((up + self.side(x)).relu())


def test_what_else_a_layer_is_given_is_given_again() -> None:
    torch.manual_seed(0)
    model = Sized().eval()
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.4, align=1)
    small = recover(model, plan, batches(3, 6, 6))
    before, after = unseen(model, small, plan, torch.randn(64, 3, 6, 6))
    assert after < before
    assert fpgm.sensitivity(model, torch.randn(1, 3, 6, 6), batches(3, 6, 6)).groups


@pytest.mark.parametrize("in_memory", [0, 2**30])
def test_no_thread_is_left_behind(monkeypatch: pytest.MonkeyPatch, in_memory: int) -> None:
    monkeypatch.setattr("fpgm.recovery.IN_MEMORY", in_memory)
    monkeypatch.setattr("fpgm.recovery.layer.Sample", _interrupt)
    model = stir(Streams())
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        recover(model, plan, batches(3, 6, 6))
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_passes_that_are_run_again_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = stir(Streams())
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1, residual="independent")
    data, x = batches(3, 6, 6), torch.randn(4, 3, 6, 6)
    waited = recover(model, plan, data)
    monkeypatch.setattr("fpgm.recovery.IN_MEMORY", 0)
    monkeypatch.setattr("fpgm.recovery.batches.IN_MEMORY", 0)
    again = recover(model, plan, data)
    torch.testing.assert_close(again(x), waited(x))


@pytest.mark.parametrize("method", ["solve", "norms", "weights"])
def test_not_a_number_ends_in_a_note(method: Any) -> None:
    model = stir(Streams())
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1)
    data = batches(3, 6, 6)
    data[0][0, 0, 0, 0] = torch.nan
    small = recover(model, plan, data, method=method)
    assert all(tensor.isfinite().all() for tensor in small.state_dict().values())


def test_under_autocast() -> None:
    torch.manual_seed(0)
    model = stir(Streams())
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1)
    with torch.autocast("cpu", torch.bfloat16):
        small = recover(model, plan, batches(3, 6, 6))
    before, after = unseen(model, small, plan, torch.randn(64, 3, 6, 6))
    assert after < before


@pytest.mark.parametrize("residual", ["coupled", "independent"])
def test_from_weights_alone(residual: Any) -> None:
    """A duplicate is found without any data."""
    model = stir(chain(norm=True))
    copy_unit(model, 2, 5)
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rates={"0": 0.125}, align=1, residual=residual)
    small = recover(model, plan, [torch.randn(2, 3, 6, 6)], method="weights")
    before, after = unseen(model, small, plan, torch.randn(64, 3, 6, 6))
    assert after < 0.05 * before


def test_norms_alone() -> None:
    torch.manual_seed(0)
    model = stir(Streams())
    reestimated = recover(
        model,
        fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1),
        batches(3, 6, 6),
        method="norms",
    )
    told = getattr(reestimated, RECOVERY)
    assert told.method == "norms"
    assert told.after <= told.before


def test_a_minute_of_distillation_helps() -> None:
    torch.manual_seed(0)
    model = stir(Streams())
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.5, align=1)
    data = batches(3, 6, 6)
    solved = recover(model, plan, data)
    trained = recover(model, plan, iter(data), distil=2)
    assert getattr(trained, RECOVERY).after < getattr(solved, RECOVERY).after
    assert all(p.grad is None for p in trained.parameters())
