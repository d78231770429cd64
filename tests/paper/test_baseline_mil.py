"""MIL: zeros of the cheap layer are zeros of the product, and what they save is counted by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fpgm.data.base import ProcessShare
from fpgm.data.registry import DataSpec, open_splits
from fpgm.models import resnet
from fpgm.paper.baselines.base import SgdSchedule, Task
from fpgm.paper.baselines.mil import (
    METHOD,
    CollaborativeConv,
    attach_cheap_layers_,
    center_padding,
    collaborative_layers,
    macs_saving,
    mil,
    zero_ratios,
)
from fpgm.utils.calibration_data import read_inputs
from fpgm.utils.example_inputs import Example


def call(x: Tensor) -> Example:
    return Example((x,), {})


def exact_(layer: CollaborativeConv, weight: float, shift: float) -> None:
    """Let the cheap layer give relu(weight·x + shift)."""
    with torch.no_grad():
        layer.cheap.weight.fill_(weight)
        layer.norm.weight.fill_((1 + layer.norm.eps) ** 0.5)
        layer.norm.bias.fill_(shift)


class Tiny(nn.Module):
    """With 6×6 images 36·9·2 = 648, 36·9·6 = 1944 and 36·3 = 108 MACs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.second = nn.Conv2d(2, 3, 3, padding=1)
        self.point = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.point(self.second(self.first(x).relu()).relu()).flatten(1)
        return out


def test_where_the_cheap_layer_is_zero_so_is_the_product_and_elsewhere_it_is_the_product() -> None:
    conv = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    nn.init.ones_(conv.weight)
    layer = CollaborativeConv(conv).eval()
    exact_(layer, weight=2.0, shift=-1.0)
    x = torch.tensor([[[[1.0, 0.0], [0.0, 3.0]]]])  # a 3×3 window sees all: the sum is 4
    # the cheap layer gives relu(2x − 1): 1, 0, 0, 5
    torch.testing.assert_close(layer(x), torch.tensor([[[[4.0, 0.0], [0.0, 20.0]]]]))


def test_one_filter_for_all_outputs_guards_the_same_places_in_each() -> None:
    conv = nn.Conv2d(1, 3, 3, padding=1)
    layer = CollaborativeConv(conv, shared=True).eval()
    exact_(layer, weight=1.0, shift=0.0)
    x = torch.tensor([[[[1.0, -1.0], [2.0, -3.0]]]])
    assert layer.cheap.weight.numel() == 1
    torch.testing.assert_close(layer(x), conv(x) * x.relu())


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(1, 1, 3),
        nn.Conv2d(1, 1, 3, padding=1, stride=2),
        nn.Conv2d(1, 1, (5, 3), padding=(0, 1), stride=(2, 1)),
        nn.Conv2d(1, 1, 3, padding=2),
        nn.Conv2d(1, 1, 3, dilation=2, padding="same"),
        nn.Conv2d(1, 1, 2),
        nn.Conv2d(1, 1, 4, padding="same"),
        nn.Conv2d(1, 1, 4, stride=4),
        nn.Conv2d(1, 1, 3, padding="valid"),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [9, 12])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_the_cheap_layer_reads_the_middle_of_every_window(conv: nn.Conv2d, size: int) -> None:
    """A kernel that is one in its middle and zero elsewhere picks the same numbers."""
    x = torch.rand(2, 1, size, size + 3) + 1
    layer = CollaborativeConv(conv).eval()
    exact_(layer, weight=1.0, shift=0.0)
    with torch.no_grad():
        nn.init.zeros_(conv.weight)
        conv.weight[0, 0, (conv.kernel_size[0] - 1) // 2, (conv.kernel_size[1] - 1) // 2] = 1
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        middle = conv(x)
        torch.testing.assert_close(layer(x), middle * middle)


def test_margins_leave_out_what_is_no_middle() -> None:
    assert center_padding(nn.Conv2d(1, 1, 3)) == (-1, -1, -1, -1)
    assert center_padding(nn.Conv2d(1, 1, (1, 3), padding=(2, 0))) == (-1, -1, 2, 2)


def test_zeros_are_counted_exactly_over_all_batches() -> None:
    net = nn.Sequential(CollaborativeConv(nn.Conv2d(1, 1, 3, padding=1)))
    exact_(net[0], weight=1.0, shift=0.0)  # type: ignore[arg-type]
    signs = torch.ones(5, 1, 2, 2)
    signs[0] = -1  # 4 zeros
    signs[4, 0, 0, 0] = 0  # and one in the second batch: relu(0) is zero
    inputs = read_inputs([signs[:3], signs[3:]], images=5)
    net.train()
    assert zero_ratios(net, inputs) == {"0": 5 / 20}
    assert net.training


def test_saved_are_the_zeros_less_the_cheap_layers() -> None:
    net = Tiny()
    x = torch.rand(1, 1, 6, 6)
    added = attach_cheap_layers_(net, call(x))
    assert list(added) == ["second"]  # not the first layer, and not one of 1×1
    # 2 channels to 3 at 36 places: 216 for the cheap one; before it 648 + 1944 + 108 = 2700
    assert macs_saving(net, call(x), {"second": 0.5}) == (972 - 216) / 2700
    assert macs_saving(net, call(x), {"second": 0.0}) == -216 / 2700
    shared = Tiny()
    attach_cheap_layers_(shared, call(x), shared=True)
    assert macs_saving(shared, call(x), {"second": 0.5}) == (972 - 72) / 2700
    # as many images as one likes
    assert macs_saving(net, call(x.expand(4, -1, -1, -1)), {"second": 0.5}) == (972 - 216) / 2700


def test_grouped_pointwise_first_and_uncalled_convolutions_are_left_as_they_are() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 1),
        nn.Sequential(nn.Conv2d(4, 4, (1, 3))),
    )
    net.add_module("idle", nn.Identity())
    net.idle.never = nn.Conv2d(4, 4, 3)  # type: ignore[union-attr]
    assert list(attach_cheap_layers_(net, call(torch.rand(1, 3, 9, 9)))) == ["3.0"]
    assert list(collaborative_layers(net)) == ["3.0"]


def test_a_convolution_held_twice_has_one_cheap_layer_and_both_calls_count() -> None:
    conv = nn.Conv2d(2, 2, 3, padding=1)
    net = nn.Sequential(nn.Conv2d(1, 2, 1), conv, nn.ReLU(), conv)
    x = torch.rand(1, 1, 4, 4)
    attach_cheap_layers_(net, call(x))
    assert net[1] is net[3]
    # 16·2 + 2·(16·4·9) = 1184 before; the cheap one is called twice: 2·(16·4) = 128
    assert macs_saving(net, call(x), {"1": 0.25}) == (1152 / 4 - 128) / 1184


@pytest.mark.parametrize("training", [False, True])
def test_at_first_the_network_computes_nearly_what_it_did(training: bool) -> None:
    torch.manual_seed(0)
    net = resnet(8).train(training)
    x = 20 * torch.randn(16, 3, 32, 32)  # whatever the scale
    guarded = copy.deepcopy(net)
    added = attach_cheap_layers_(guarded, call(x))
    assert len(added) == 6
    assert guarded.training == training
    with torch.no_grad():
        before, after = net(x), guarded(x)
    assert float((after - before).norm() / before.norm()) < 0.1
    assert not torch.equal(before, after)
    zeros = zero_ratios(guarded, read_inputs([x], 16))
    assert max(zeros.values()) < 0.01


def test_without_the_start_near_one_the_output_is_another() -> None:
    """The nearest failing case: a norm's usual start."""
    torch.manual_seed(0)
    net = resnet(8).eval()
    x = torch.randn(16, 3, 32, 32)
    guarded = copy.deepcopy(net)
    for layer in attach_cheap_layers_(guarded, call(x)).values():
        layer.norm.reset_parameters()
        layer.norm.eval()
    with torch.no_grad():
        before, after = net(x), guarded(x)
    assert float((after - before).norm() / before.norm()) > 0.4


def test_both_branches_get_a_gradient() -> None:
    net = Tiny()
    x = torch.rand(2, 1, 6, 6)
    layer = attach_cheap_layers_(net, call(x))["second"]
    net.train()
    net(x).square().sum().backward()
    for weight in (layer.conv.weight, layer.cheap.weight, layer.norm.weight, layer.norm.bias):
        assert weight.grad is not None
        assert weight.grad.abs().sum() > 0


def test_attaching_uses_its_own_seed_and_keeps_the_random_state() -> None:
    x = torch.rand(1, 1, 6, 6)
    net = Tiny()
    before = torch.random.get_rng_state()
    weights = [
        attach_cheap_layers_(copy.deepcopy(net), call(x), seed=seed)["second"].cheap.weight
        for seed in (1, 1, 2)
    ]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_an_example_given_by_name_will_do_and_so_does_another_dtype() -> None:
    net = Tiny().double().eval()
    x = torch.rand(1, 1, 6, 6, dtype=torch.float64)
    layer = attach_cheap_layers_(net, Example((), {"x": x}))["second"]
    assert layer.cheap.weight.dtype == torch.float64
    assert not layer.norm.training
    assert net(x).dtype == torch.float64


def synthetic() -> list[tuple[Tensor, Tensor]]:
    sets = open_splits(DataSpec("synthetic", 64), 0, ProcessShare(), "cpu")
    return [(batch.images, batch.labels) for batch in sets.train.epoch(0)]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def test_a_network_trained_with_cheap_layers_learns_and_the_callers_stays_as_it_was() -> None:
    model = small().eval()
    state = copy.deepcopy(model.state_dict())
    data = synthetic()
    task = Task(
        model, data[0][0][:1], 0.4, data, images=128, before_pruning=SgdSchedule(30, lr=0.1)
    )
    pruned = METHOD.prune(task)
    assert METHOD.name == "mil"
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert not collaborative_layers(model)
    assert pruned.plan is None
    assert not pruned.model.training
    right = [(pruned.model(x).argmax(1) == y).float().mean() for x, y in data]
    assert float(torch.stack(right).mean()) > 0.5  # of ten classes
    # two independent paths to the same saving
    zeros = zero_ratios(pruned.model, task.inputs())["3"]
    macs = {"first": 64 * 8 * 27, "second": 64 * 8 * 72, "linear": 320}
    cheap = 64 * 8  # one filter that all channels share
    by_hand = (macs["second"] * zeros - cheap) / sum(macs.values())
    assert pruned.macs_removed == pytest.approx(by_hand)
    assert pruned.notes[0].startswith(f"zero ratio of 1 layers: {zeros:.1%}")
    assert pruned.notes[1].startswith(f"requested 40.0% of the MACs, saved {by_hand:.1%}")
    assert pruned.notes[2] == "skipping needs a sparse kernel: the model is not faster in PyTorch"


def test_a_network_without_a_place_for_a_cheap_layer_reports_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1), nn.Flatten())
    pruned = mil(Task(model, torch.rand(1, 3, 4, 4), 0.4, [torch.rand(2, 3, 4, 4)]))
    assert pruned.macs_removed == 0
    assert pruned.notes == (
        "no cheap layer: no convolution after the first is larger than 1×1 and ungrouped",
    )
