"""Masking: which slices become zero, which do not, and that the result is the compact model's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fpgm

X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)


def network(act: nn.Module | None = None) -> nn.Sequential:
    """Eight filters behind a norm that is not the identity, and a reader."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), act or nn.ReLU(), nn.Conv2d(8, 2, 1))
    with torch.no_grad():
        net[1].weight.uniform_(0.5, 1.5)
        net[1].bias.uniform_(0.1, 0.5)
        net[1].running_mean.uniform_(0.1, 0.5)
    return net.eval()


def masked(net: nn.Module, plan: fpgm.Plan, **options: bool) -> nn.Module:
    created = copy.deepcopy(net)
    fpgm.mask_(created, plan, **options)
    return created


def gone_of(plan: fpgm.Plan, tensor: str) -> list[int]:
    (cut,) = (c for c in plan.cuts if c.tensor == tensor)
    return cut.removed()


def zero_slices(tensor: Tensor, dim: int) -> list[int]:
    rows = tensor.movedim(dim, 0).flatten(1) if tensor.ndim > 1 else tensor[:, None]
    return torch.nonzero(~rows.any(1)).reshape(-1).tolist()


def test_filter_shift_mean_and_reader_are_zeroed_and_the_scale_is_not() -> None:
    net = network()
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    dropped = gone_of(plan, "0.weight")
    assert len(dropped) == 4
    created = masked(net, plan)
    assert zero_slices(created[0].weight, 0) == dropped
    assert zero_slices(created[0].bias, 0) == dropped
    assert zero_slices(created[1].bias, 0) == dropped
    assert zero_slices(created[1].running_mean, 0) == dropped
    assert zero_slices(created[3].weight, 1) == dropped
    assert torch.equal(created[1].weight, net[1].weight)
    assert torch.equal(created[1].running_var, net[1].running_var)
    assert torch.equal(created[3].bias, net[3].bias)


def test_what_stays_keeps_its_values() -> None:
    net = network()
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    created = masked(net, plan)
    for cut in plan.cuts:
        before, after = net.state_dict()[cut.tensor], created.state_dict()[cut.tensor]
        keep = torch.tensor(cut.keep)
        assert torch.equal(before.index_select(cut.dim, keep), after.index_select(cut.dim, keep))


def test_without_readers_the_next_layer_keeps_its_columns() -> None:
    net = network()
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    created = masked(net, plan, readers=False)
    assert zero_slices(created[0].weight, 0) == gone_of(plan, "0.weight")
    assert torch.equal(created[3].weight, net[3].weight)


@pytest.mark.parametrize(
    ("act", "same"),
    [(nn.ReLU(), True), (nn.Tanh(), True), (nn.GELU(), True), (nn.Sigmoid(), False),
     (nn.Softplus(), False)],
    ids=repr,
)  # fmt: skip
def test_readers_matter_only_where_the_activation_of_zero_is_not_zero(
    act: nn.Module, same: bool
) -> None:
    net = network(act)
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    compact = fpgm.compact(net, plan)(X)
    assert torch.allclose(masked(net, plan)(X), compact, atol=1e-6)
    assert torch.allclose(masked(net, plan, readers=False)(X), compact, atol=1e-6) is same


def test_a_zeroed_filter_still_gets_a_gradient_without_readers() -> None:
    """Soft pruning: what is zero between epochs may come back."""
    net = network()
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    dropped = gone_of(plan, "0.weight")
    soft, hard = masked(net, plan, readers=False).train(), masked(net, plan).train()
    for created in (soft, hard):
        created[2] = nn.Identity()  # ReLU's slope at zero is zero
        created(X).square().sum().backward()
    assert bool((soft[0].weight.grad[dropped].flatten(1).abs().sum(1) > 0).all())
    assert not bool(hard[0].weight.grad[dropped].any())


def test_masking_twice_is_masking_once() -> None:
    net = network()
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    once = masked(net, plan)
    twice = masked(once, plan)
    assert all(map(torch.equal, once.state_dict().values(), twice.state_dict().values()))


def test_a_grouped_reader_is_zeroed_block_by_block() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Sigmoid(), nn.Conv2d(8, 4, 1, groups=2))
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    dropped = gone_of(plan, "0.weight")
    created = masked(net, plan)
    for row in range(4):
        block = row // 2
        expected = [c - 4 * block for c in dropped if c // 4 == block]
        assert zero_slices(created[2].weight[row].flatten(1), 0) == expected
    assert torch.allclose(created(X), fpgm.compact(net, plan)(X), atol=1e-6)


def test_parameters_stay_the_same_objects_and_trainable() -> None:
    net = network()
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    before = list(net.parameters())
    fpgm.mask_(net, plan)
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    assert all(p.requires_grad and p.grad is None for p in before)


class ChannelGate(nn.Module):
    """A convolution along the channels (ECA): each gate also reads the neighbors' means."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3))
        gates: Tensor = self.conv(means[:, None])[:, 0].sigmoid()
        return x * gates[:, :, None, None]


def test_units_stay_where_zero_weights_do_not_mask_them() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), ChannelGate(), nn.Conv2d(8, 2, 1))
    with pytest.raises(fpgm.ModelError, match="a convolution runs along the channels"):
        fpgm.plan(net, X, rate=0.5, align=1)


def test_masked_equals_compact_where_channels_are_mixed_locally() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), ChannelGate(), nn.Conv2d(8, 2, 1))
    plan = fpgm.plan(net, X, rate=0.5, align=1)
    assert torch.allclose(masked(net, plan)(X), fpgm.compact(net, plan)(X), atol=1e-6)
