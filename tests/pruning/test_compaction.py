"""The compact model: the user's own class with everything but the removed units as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fpgm
from fpgm.models import digits
from fpgm.pruning.compaction import PLANS
from fpgm.utils.modules import modules_by_path

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    )


def halved(model: nn.Module, x: Any = X, **options: Any) -> nn.Module:
    return fpgm.compact(model, fpgm.plan(model, x, rate=0.5, align=1, **options))


@pytest.mark.parametrize(
    "wrap",
    [lambda net: torch.compile(net, backend="eager"), nn.DataParallel],
    ids=["compile", "dp"],
)
def test_a_wrapped_model_is_the_model_inside(wrap: Any, tmp_path: Path) -> None:
    model = network().eval()
    plan = fpgm.plan(wrap(model), X, rate=0.5, align=1)
    assert plan == fpgm.plan(model, X, rate=0.5, align=1)
    small = fpgm.compact(wrap(model), plan)
    assert type(small) is nn.Sequential
    assert fpgm.verify(wrap(model), plan, X, compacted=wrap(small)).ok
    assert type(fpgm.recover(wrap(model), plan, [X])) is nn.Sequential
    fpgm.save(wrap(small), tmp_path / "small.safetensors")
    again = fpgm.load(tmp_path / "small.safetensors", network).eval()
    assert torch.equal(again(X), small(X))
    fpgm.mask_(wrap(model), plan)
    assert torch.allclose(model(X), small(X), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_and_device_are_kept(dtype: torch.dtype) -> None:
    small = halved(network().to(dtype), X.to(dtype))
    floating = [t for t in small.state_dict().values() if t.is_floating_point()]
    assert {t.dtype for t in floating} == {dtype}
    assert {t.device.type for t in small.state_dict().values()} == {"cpu"}
    assert small(X.to(dtype)).dtype == dtype


def test_a_mixture_of_dtypes_is_kept_tensor_by_tensor() -> None:
    model = network()
    model[3].double()
    model.insert(3, _ToDouble())
    small = halved(model)
    assert small[0].weight.dtype == torch.float32
    assert small[4].weight.dtype == torch.float64


class _ToDouble(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_memory_format_is_kept(layout: torch.memory_format) -> None:
    small = halved(network().to(memory_format=layout))
    for conv in (small[0], small[3]):
        other = {torch.channels_last, torch.contiguous_format} - {layout}
        assert conv.weight.is_contiguous(memory_format=layout)
        assert not conv.weight.is_contiguous(memory_format=other.pop())


def test_training_mode_is_kept_module_by_module() -> None:
    model = network().train()
    model[1].eval()  # a frozen norm
    assert [m.training for m in halved(model)] == [True, False, True, True]
    assert [m.training for m in model] == [True, False, True, True]


def test_requires_grad_is_kept_parameter_by_parameter() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    small = halved(model)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name: p.requires_grad for name, p in small.named_parameters()} == flags
    small(X).sum().backward()
    assert small[0].weight.grad is None
    assert small[3].weight.grad.shape == (4, 4, 3, 3)


def test_new_parameters_are_leaves_without_a_share_in_the_old_ones() -> None:
    model = network()
    small = halved(model)
    assert all(p.is_leaf and isinstance(p, nn.Parameter) for p in small.parameters())
    old = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert old.isdisjoint(p.untyped_storage().data_ptr() for p in small.parameters())


def test_forward_hooks_are_kept_and_run() -> None:
    recorded: list[tuple[str, int]] = []

    def note(module: nn.Module, args: Any, out: Tensor) -> None:
        recorded.append(("after", out.shape[1]))

    def announce(module: nn.Module, args: Any) -> None:
        recorded.append(("before", args[0].shape[1]))

    model = network()
    model[0].register_forward_hook(note)
    model[3].register_forward_pre_hook(announce)
    small = halved(model)
    recorded.clear()
    small(X)
    assert recorded == [("after", 4), ("before", 4)]


class Tied(nn.Module):
    """One weight used by two convolutions in a row, known by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.second.weight = self.first.weight
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(self.stem(x)).relu()).relu())
        return out


def test_tied_parameters_stay_one_parameter() -> None:
    small = halved(Tied())
    assert small.second.weight is small.first.weight
    assert small.first.weight.shape == (4, 4, 3, 3)
    assert len(list(small.parameters())) == 7


def test_references_elsewhere_point_into_the_copy() -> None:
    model = network()
    model.shortlist = [model[0].weight, model[3]]
    small = halved(model)
    assert small.shortlist[0] is small[0].weight
    assert small.shortlist[1] is small[3]


def test_sizes_that_modules_remember() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.PReLU(8), nn.Conv2d(8, 16, 1, groups=2), nn.GroupNorm(4, 16),
        nn.ConvTranspose2d(16, 8, 2, 2), nn.InstanceNorm2d(8, affine=True), nn.Flatten(),
        nn.Linear(8 * 16 * 16, 12), nn.Linear(12, 2),
    )  # fmt: skip
    small = halved(model)
    assert (small[0].in_channels, small[0].out_channels) == (3, 4)
    assert small[1].num_features == 4
    depthwise = small[2]
    assert (depthwise.in_channels, depthwise.out_channels, depthwise.groups) == (4, 4, 4)
    assert small[3].num_parameters == 4
    assert (small[4].in_channels, small[4].out_channels, small[4].groups) == (4, 8, 2)
    assert (small[5].num_groups, small[5].num_channels) == (2, 8)
    assert (small[6].in_channels, small[6].out_channels) == (8, 4)
    assert small[7].num_features == 4
    assert (small[9].in_features, small[9].out_features) == (4 * 16 * 16, 6)
    assert (small[10].in_features, small[10].out_features) == (6, 2)
    assert small(X).shape == (2, 2)
    assert eval_repr_sizes(small)


def eval_repr_sizes(model: nn.Module) -> bool:
    """What a module prints about itself is what its weight has."""
    return all(
        str(m.weight.shape[0]) in m.extra_repr()
        for m in model.modules()
        if isinstance(m, nn.Linear | nn.Conv2d)
    )


def test_normalized_shape_follows_under_approximate() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 2))
    small = halved(model, torch.randn(8, 4), approximate=True)
    assert small[1].normalized_shape == (8,)
    assert small[1].weight.shape == (8,)
    assert model[1].normalized_shape == (16,)


def test_the_input_model_is_untouched_bit_for_bit() -> None:
    model = digits().train()
    before = copy.deepcopy(model)
    x = torch.randn(2, 1, 8, 8)
    small = halved(model, x)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.zero_()
    small(x)
    assert str(model) == str(before)
    assert all(map(torch.equal, model.state_dict().values(), before.state_dict().values()))
    assert not hasattr(model, PLANS)
    assert vars(model).keys() == vars(before).keys()


class Counting(nn.Conv2d):
    """Copies itself in its own way."""

    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Counting:
        result = object.__new__(type(self))
        memo[id(self)] = result
        result.__dict__ = copy.deepcopy(self.__dict__, memo)
        result.copies = self.copies + 1
        return result


def test_a_modules_own_deepcopy_is_respected() -> None:
    model = nn.Sequential(Counting(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1))
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    small = fpgm.compact(model, plan)
    assert (model[0].copies, small[0].copies) == (0, 1)
    assert small[0].weight.shape == (4, 3, 3, 3)
    fpgm.verify(model, plan, X, compacted=small).check()


def test_class_and_extra_attributes_come_along() -> None:
    model = digits()
    model.note = {"trained": "2019"}
    small = halved(model, torch.randn(1, 1, 8, 8))
    assert type(small) is type(model)
    assert small.note == {"trained": "2019"}
    assert small.note is not model.note


@pytest.mark.parametrize("residual", ["coupled", "independent"])
def test_the_compact_model_can_be_copied_and_its_copy_computes_the_same(residual: str) -> None:
    x = torch.randn(2, 1, 8, 8)
    small = halved(digits(), x, residual=residual).eval()
    assert torch.equal(copy.deepcopy(small)(x), small(x))


def test_the_compact_model_can_be_pruned_again() -> None:
    model, x = digits(), torch.randn(2, 1, 8, 8)
    first = fpgm.plan(model, x, rate=0.5)
    once = fpgm.compact(model, first)
    second = fpgm.plan(once, x, rate=0.5)
    twice = fpgm.compact(once, second)
    fpgm.verify(once, second, x, compacted=twice).check()
    assert second.macs_before == first.macs_after
    with FlopCounterMode(display=False) as counter:
        twice(x)
    assert counter.get_total_flops() // 2 == second.macs_after
    assert getattr(twice, PLANS) == (first, second)
    assert [m.stem[0].out_channels for m in (model, once, twice)] == [32, 16, 8]


def test_modules_are_detected_under_the_paths_torch_gives_them() -> None:
    shared = nn.Conv2d(3, 3, 1)
    net = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared), nn.ModuleDict({"a": nn.ReLU()}))
    net.register_module("none", None)
    results = modules_by_path(net)
    assert list(results.items()) == list(net.named_modules())


@pytest.mark.parametrize(("ignored", "sizes"), [("0", (8, 4)), ("none", (4, 4))])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_distinguishes_inputs_and_outputs(
    ignored: str, sizes: tuple[int, int], groups: int
) -> None:
    """Both are eight, and the bias counts outputs only."""
    up = nn.ConvTranspose2d(8, 8, 2, 2, groups=groups)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), up, nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    small: Any = halved(net, ignore=[ignored] if ignored != "none" else [])
    assert (small[2].in_channels, small[2].out_channels) == sizes
    assert small[2].weight.shape[:2] == (sizes[0], sizes[1] // groups)


class AnswersEverything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x).relu())
        return out

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return 7


def test_a_model_that_has_every_attribute_is_compacted() -> None:
    model = AnswersEverything()
    plan = fpgm.plan(model, torch.randn(4, 6), rate=0.5, align=1)
    assert fpgm.compact(model, plan).body.out_features == 4
