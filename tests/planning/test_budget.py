"""How many units go: rounding by hand, and targets met to within one step of one group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.models import digits, resnet, vgg16
from fpgm.models.torchvision_import import import_torchvision
from fpgm.planning.width_rounding import Rounder
from fpgm.tracing.grouping import Structure, group_channels
from fpgm.tracing.recorder import TraceRecorder, record_trace
from fpgm.utils.example_inputs import as_examples


@pytest.mark.parametrize(
    ("units", "rate", "kept"),
    [
        (64, 0.4, 40),  # 38.4, nearest multiple of 8
        (64, 0.45, 32),  # 35.2: 32 is 3.2 away, 40 is 4.8
        (256, 0.3, 176),  # 179.2
        (512, 0.5, 256),
        (32, 0.4, 20),  # 19.2, multiple of 4: 8 would be a quarter of the width
        (16, 0.4, 10),  # 9.6, multiple of 2
        (8, 0.4, 5),  # 4.8, every count
        (64, 0.0, 64),
        (24, 0.99, 1),  # 0 would be nearest; one stays
    ],
)
def test_nearest_aligned_width(units: int, rate: float, kept: int) -> None:
    assert Rounder(align=8).kept_units(units, rate) == kept


@pytest.mark.parametrize(
    ("units", "step"), [(512, 8), (64, 8), (63, 4), (32, 4), (31, 2), (16, 2), (15, 1), (3, 1)]
)
def test_the_step_is_at_most_an_eighth_of_the_width(units: int, step: int) -> None:
    assert Rounder(align=8).step(units) == step


def test_fewer_steps_align_narrow_layers_too() -> None:
    assert [Rounder(align=8, steps=2).step(n) for n in (64, 16, 15, 8, 3)] == [8, 8, 4, 4, 1]


def test_a_unit_of_several_channels_steps_in_channels() -> None:
    assert Rounder(align=8).step(32, channels_per_unit=2) == 4
    assert Rounder(align=8).step(8, channels_per_unit=16) == 1


@pytest.mark.parametrize(("units", "gone"), [(16, 6), (32, 12), (64, 25)])
def test_the_paper_removes_the_whole_part_of_n_times_p(units: int, gone: int) -> None:
    assert units - Rounder(rounding="paper").kept_units(units, 0.4) == gone
    assert units - Rounder(align=8, rounding="paper").kept_units(units, 0.4) == gone


def test_rounding_below_an_integer_counts_as_that_integer() -> None:
    assert 100 * 0.29 < 29  # in floating point
    assert Rounder(rounding="paper").kept_units(100, 0.29) == 71


def test_paper_counts_in_a_network() -> None:
    plan = fpgm.plan(
        resnet(20), torch.randn(1, 3, 32, 32), rate=0.4, residual="independent",
        align=1, rounding="paper",
    )  # fmt: skip
    assert {(g.units, g.units - g.kept) for g in plan.groups} == {(16, 6), (32, 12), (64, 25)}


def zoo(name: str) -> nn.Module:
    pytest.importorskip("torchvision")
    import_torchvision()
    from torchvision import models

    result: nn.Module = getattr(models, name)()
    return result


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "digits": (digits, (1, 1, 8, 8)),
    "resnet20": (lambda: resnet(20), (1, 3, 32, 32)),
    "vgg16": (vgg16, (1, 3, 32, 32)),
    "torchvision resnet18": (lambda: zoo("resnet18"), (1, 3, 64, 64)),
    "torchvision mobilenet_v2": (lambda: zoo("mobilenet_v2"), (1, 3, 64, 64)),
}


def one_step(model: nn.Module, x: Tensor, plan: fpgm.Plan, measure: str) -> float:
    """The most that one alignment step of one group of a plan changes, as a share of the whole."""
    structure = group_channels(record_trace(TraceRecorder(model), as_examples(x)))
    cost: Callable[..., int] = getattr(structure, measure)
    kept = {group.name: group.kept for group in plan.groups}
    now = cost(_kept_labels(structure, kept))
    most = 0
    for pool in structure.groups:
        step = Rounder(align=plan.asked["align"]).step(len(pool.units), pool.channels_per_unit)
        for count in (kept[pool.name] - step, kept[pool.name] + step):
            if 0 < count <= len(pool.units):
                changed = cost(_kept_labels(structure, {**kept, pool.name: count}))
                most = max(most, abs(changed - now))
    return most / cost()


def _kept_labels(structure: Structure, kept: dict[str, int]) -> Tensor:
    return structure.kept_labels(torch.cat([p.units[kept[p.name] :] for p in structure.groups]))


@pytest.mark.parametrize("align", [8, 1])
@pytest.mark.parametrize("name", MODELS)
def test_half_the_macs_to_within_one_step(name: str, align: int) -> None:
    make, shape = MODELS[name]
    model, x = make().eval(), torch.randn(shape)
    plan = fpgm.plan(model, x, macs=0.5, align=align)
    assert abs(plan.macs_removed - 0.5) <= one_step(model, x, plan, "macs")
    assert abs(plan.macs_removed - 0.5) < 0.03


@pytest.mark.parametrize("name", MODELS)
def test_half_the_parameters_to_within_one_step(name: str) -> None:
    make, shape = MODELS[name]
    model, x = make().eval(), torch.randn(shape)
    plan = fpgm.plan(model, x, params=0.5)
    assert abs(plan.params_removed - 0.5) <= one_step(model, x, plan, "params")
    assert plan.params_after == sum(p.numel() for p in fpgm.compact(model, plan).parameters())


# Exceptions to one rate, on the digits network: stem 32, stage1 32, stage2 64.

DIGITS = torch.randn(1, 1, 8, 8)


def kept_of(plan: fpgm.Plan) -> dict[str, int]:
    return {group.name: group.kept for group in plan.groups}


def test_rates_by_pattern_hold_for_their_layers_and_rate_for_the_rest() -> None:
    plan = fpgm.plan(
        digits(), DIGITS, rate=0.5, rates={"stage1.*.conv1": 0.25, "stage2.0.conv1": 0.0}
    )
    assert kept_of(plan) == {
        "stem.0": 16, "stage1.0.conv1": 24, "stage1.1.conv1": 24,
        "stage2.0.conv1": 64, "stage2.0.conv2": 32, "stage2.1.conv1": 32,
    }  # fmt: skip


def test_only_rates_leaves_other_layers_unpruned() -> None:
    plan = fpgm.plan(digits(), DIGITS, rates={"stage1.0.conv1": 0.5})
    assert {name for name, kept in kept_of(plan).items() if kept not in (32, 64)} == {
        "stage1.0.conv1"
    }


def test_layers_of_one_stream_go_by_the_most_careful_rate() -> None:
    """stem.0 and stage1.*.conv2 add into one stream, and can only keep the same units."""
    plan = fpgm.plan(digits(), DIGITS, rates={"stem.0": 0.75, "stage1.1.conv2": 0.25})
    assert kept_of(plan)["stem.0"] == 24


def test_what_is_ignored_keeps_its_width() -> None:
    model = digits()
    plan = fpgm.plan(model, DIGITS, rate=0.5, ignore=["stage1.*.conv1", "stem.0"])
    small = fpgm.compact(model, plan)
    assert small.stem[0].out_channels == 32
    assert small.stage1[0].conv1.weight.shape == (32, 32, 3, 3)
    assert small.stage2[1].conv1.out_channels == 32  # of 64, not ignored
    assert "stage1.0.conv1" not in kept_of(plan)
    frozen = {f.reason: f.layers for f in plan.frozen}
    assert frozen["ignored on request ('stage1.*.conv1')"] == ("stage1.0.conv1", "stage1.1.conv1")


def test_a_stream_is_ignored_through_any_of_its_layers() -> None:
    plan = fpgm.plan(digits(), DIGITS, rate=0.5, ignore=["stage1.1.conv2"])
    assert "stem.0" not in kept_of(plan)


def test_a_target_is_met_around_what_is_ignored_and_what_has_its_own_rate() -> None:
    plan = fpgm.plan(
        digits(), DIGITS, macs=0.4, align=1, ignore=["stage1.0.conv1"], rates={"stage2.1.*": 0.1}
    )
    assert abs(plan.macs_removed - 0.4) < 0.02
    assert "stage1.0.conv1" not in kept_of(plan)
    assert kept_of(plan)["stage2.1.conv1"] == 58  # 64 · 0.9 = 57.6


@pytest.mark.parametrize("least", [1, 8, 24])
def test_min_channels_holds_at_any_rate(least: int) -> None:
    plan = fpgm.plan(digits(), DIGITS, rate=0.99, align=1, min_channels=least)
    assert set(kept_of(plan).values()) == {least}


def test_a_layer_narrower_than_min_channels_is_not_pruned() -> None:
    plan = fpgm.plan(digits(), DIGITS, rate=0.5, min_channels=48)
    assert kept_of(plan)["stem.0"] == 32
    assert kept_of(plan)["stage2.0.conv1"] == 48


def test_an_unreachable_target_is_refused_with_the_maximum() -> None:
    with pytest.raises(fpgm.RequestError, match=r"^macs=0\.9 cannot be reached"):
        fpgm.plan(digits(), DIGITS, macs=0.9, min_channels=24)
