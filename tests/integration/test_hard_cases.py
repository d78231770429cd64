"""Models a careless analysis would get wrong: each is pruned right or left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpgm

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Between(nn.Module):
    """Two convolutions with something in between."""

    def __init__(self, middle: Callable[[Tensor], Tensor], read: int = 16) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(read, 16, 3, padding=1)
        self.head = nn.Conv2d(16, 4, 1)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.a(x).relu())
        out: Tensor = self.head(self.b(x).relu())
        return out


class ClassToken(nn.Module):
    """A parameter laid out for every sample, joined with tokens, before attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        t = self.patches(x).flatten(2).transpose(1, 2)
        t = torch.cat([self.token.expand(len(t), -1, -1), t], 1)
        n, length, _ = t.shape
        q, k, v = self.qkv(t).view(n, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        t = t + self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(n, length, -1))
        return self.mlp(t)[:, 0]


def test_copies_for_every_sample_are_no_channels_once_joined_with_others() -> None:
    model = ClassToken().eval()
    small = fpgm.prune(model, X, rate=0.5, align=1)
    assert small.mlp[0].out_features == 8


def unpool(x: Tensor) -> Tensor:
    y, where = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(y, where, 2)


def masked(x: Tensor) -> Tensor:
    rows = x.permute(0, 2, 3, 1)
    chosen = torch.ones(rows.shape[:3], dtype=torch.bool)
    return rows[chosen].reshape(rows.shape).permute(0, 3, 1, 2)


def set_last(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, -1] = 0
    return x


MIDDLES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "first channel": (lambda x: x[:, 0][:, None], 1),
    "fourth of unbind": (lambda x: x.unbind(1)[3][:, None], 1),
    "slice of one": (lambda x: x[:, :1], 1),
    "last set to zero": (set_last, 16),
    "unpooling": (unpool, 16),
    "boolean mask": (masked, 16),
    "divided by its width": (lambda x: x * 1.0, 16),
    "fixed view": (lambda x: x.view(2, 16, 64).view(2, 16, 8, 8), 16),
    "fixed split": (lambda x: sum(torch.split(x, 8, 1)[:2]), 8),
    "fixed unsafe split": (lambda x: sum(torch.unsafe_split(x, 8, 1)[:2]), 8),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_what_lies_between_two_layers(name: str) -> None:
    small = fpgm.prune(Between(*MIDDLES[name]), X, rate=0.4, align=1)
    assert small(X).shape == (2, 4, 8, 8)


class Sampler(nn.Module):
    """A predicted sampling grid is not made of channels that may go."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.grid, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(3, 2, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        where = self.grid(x).permute(0, 2, 3, 1).tanh()
        out: Tensor = self.head(F.grid_sample(self.a(x), where, align_corners=False))
        return out


def test_a_sampling_grid_keeps_its_two_coordinates() -> None:
    small = fpgm.prune(Sampler(), X, rate=0.5, align=1)
    assert (small.a.out_channels, small.grid.out_channels) == (8, 2)


class LooseNorm(nn.Module):
    """Batch norm with tensors nobody registered: they cannot be sliced, so their channels stay."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1)
        self.mean, self.var = torch.zeros(16), torch.ones(16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(self.a(x), self.mean, self.var)
        out: Tensor = self.head(self.b(x).relu())
        return out


def test_channels_that_meet_an_unregistered_tensor_stay() -> None:
    small = fpgm.prune(LooseNorm(), X, rate=0.5, align=1)
    assert (small.a.out_channels, small.b.out_channels) == (16, 8)


class Attends(nn.Module):
    """A convolution, then attention over its pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.hidden, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.b(self.a(x).relu()).flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens)[0]
        out: Tensor = self.head(self.hidden(tokens).relu().mean(1))
        return out


def test_attention_keeps_its_width_and_the_rest_shrinks() -> None:
    small = fpgm.prune(Attends(), X, rate=0.5, align=1)
    assert small.attention.embed_dim == 16
    assert (small.a.out_channels, small.hidden.out_features) == (8, 16)


class TrainsAside(nn.Module):
    """A head that exists only in training, and fixes a size."""

    def __init__(self, needs_batch: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Conv2d(16, 4, 1)
        self.aside = nn.Linear(16 * 64, 8)
        self.norm = nn.BatchNorm1d(8) if needs_batch else nn.Identity()
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        x = self.a(x).relu()
        out: Tensor = self.head(self.b(x).relu())
        if self.training:
            return out, self.last(self.norm(self.aside(x.view(-1, 16 * 64))))
        return out


@pytest.mark.parametrize("needs_batch", [False, True])
def test_the_compact_model_trains_where_training_takes_another_path(needs_batch: bool) -> None:
    small = fpgm.prune(TrainsAside(needs_batch), X[:1], rate=0.5, align=1)
    assert small.b.out_channels == 8
    small.train()
    assert [t.shape for t in small(X)] == [(2, 4, 8, 8), (2, 2)]


def test_the_same_example_twice_changes_nothing() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 4, 1)
    )
    once, twice = (fpgm.plan(net, example, rate=0.5, align=1) for example in (X, [X, X]))
    assert once.cuts == twice.cuts


class Shares(nn.Module):
    """Two layers write to one dict, as code with a common registry does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Notes(nn.Conv2d(3, 16, 1)), Notes(nn.Conv2d(16, 4, 1))
        self.b.notes = self.a.notes

    def forward(self, x: Tensor) -> Tensor:
        self.a.notes.clear()
        out: Tensor = self.b(self.a(x))
        return out * len(self.a.notes)


class Notes(nn.Module):
    """Counts its calls in a plain dict."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.notes: dict[int, bool] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.notes[len(self.notes)] = True
        out: Tensor = self.layer(x)
        return out


def test_what_two_modules_share_they_share_in_the_compact_model() -> None:
    small = fpgm.prune(Shares(), X, rate=0.5, align=1)
    assert small.a.notes is small.b.notes


@pytest.mark.parametrize(("least", "kept"), [(3, 4), (5, 6), (7, 8)])
def test_the_least_width_holds_where_groups_must_match(least: int, kept: int) -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1, groups=2), nn.Conv2d(16, 4, 1))
    small = fpgm.prune(net, X, rate=0.9, align=1, min_channels=least)
    assert small[0].out_channels >= least
    assert small[0].out_channels <= kept


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_is_not_pruned_and_no_hook_is_left_behind() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1)
            self.script = torch.jit.script(nn.Conv2d(16, 16, 1))
            self.head = nn.Conv2d(16, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.script(self.b(self.a(x).relu())))
            return out

    net = Scripted()
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    assert {group.name: group.kept for group in plan.groups} == {"a": 8}
    assert not any(module._forward_hooks for module in (net, net.a, net.b))
    assert not any(module._forward_pre_hooks for module in (net, net.a, net.b))


def test_a_buffer_that_forward_replaces_is_put_back() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            out: Tensor = self.head(self.a(x))
            return out

    net = Counter()
    fpgm.plan(net, X, rate=0.5)
    assert float(net.calls) == 0


def test_many_fixed_sizes_are_all_frozen() -> None:
    blocks = [Between(lambda x: x.view(2, 16, 64).view(2, 16, 8, 8)) for _ in range(3)]
    for block in blocks[:-1]:
        block.head = nn.Conv2d(16, 3, 1)
    small = fpgm.prune(nn.Sequential(*blocks), X, rate=0.5, align=1)
    assert [block.a.out_channels for block in small] == [16, 16, 16]
    assert [block.b.out_channels for block in small] == [8, 8, 8]


def test_inference_mode_around_the_call_does_not_matter() -> None:
    net = Between(lambda x: x)
    with torch.inference_mode():
        assert fpgm.plan(net, X, rate=0.5, align=1).cuts


@pytest.mark.parametrize("model", [nn.LazyConv2d(8, 3), nn.Conv2d(3, 8, 3, device="meta")])
def test_a_model_without_values_is_refused(model: nn.Module) -> None:
    with pytest.raises(fpgm.ModelError) as error:
        fpgm.plan(model, X, rate=0.5)
    assert str(error.value) == (
        "'weight' has no values yet: run the model once (lazy modules) or load its weights "
        "(meta device) before pruning."
    )


def test_ignore_needs_a_list() -> None:
    with pytest.raises(fpgm.RequestError) as error:
        fpgm.plan(Between(lambda x: x), X, rate=0.5, ignore="ab")
    assert str(error.value) == "ignore is the text 'ab': give a list of patterns."


def test_a_norm_over_each_group_of_a_grouped_convolution_takes_the_group_on_both_sides() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 1),
        nn.GroupNorm(2, 16),
        nn.Conv2d(16, 16, 1, groups=2),
        nn.Conv2d(16, 4, 1),
    )
    small = fpgm.prune(net, X, rate=0.5, align=1)
    assert (small[1].num_groups, small[2].groups) == (1, 1)
    assert (small[0].out_channels, small[2].out_channels) == (8, 8)


def test_a_size_fixed_for_channels_that_shrink_to_one_freezes_those_and_no_others() -> None:
    class Bias(nn.Module):
        """Two numbers a position, viewed by a number in the code, as relative positions are."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Conv2d(3, 12, 1)
            self.pair = nn.Conv2d(12, 2, 1)
            self.head = nn.Linear(2, 5)

        def forward(self, x: Tensor) -> Tensor:
            pair = self.pair(self.body(x)).permute(0, 2, 3, 1)
            return self.head(pair.reshape(-1, 2))  # type: ignore[no-any-return]

    odd = torch.randn(1, 3, 5, 5)  # an even number of positions would still fit the view
    plan = fpgm.plan(Bias(), odd, rate=0.5, align=1)
    assert [group.layers for group in plan.groups] == [("body",)]
    assert next((f.layers, f.channels) for f in plan.frozen) == (("pair",), 2)


class Conditional(nn.Module):
    """`torch.cond`, which torch compiles even in eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y = torch.cond(y.mean() > 0, lambda t: t * 2.0, lambda t: t * 0.5, (y,))
        return self.head(self.b(y).relu())


def test_a_model_with_a_conditional_operator_still_runs_after_pruning() -> None:
    model = Conditional().eval()
    small = fpgm.prune(model, X, rate=0.5, align=1)
    assert small.b.out_channels == 4
    assert small(X).shape == model(X).shape == Conditional()(X).shape
