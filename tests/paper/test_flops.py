"""The paper's FLOPs figures follow from its architectures, and our plans from the same counts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fpgm
from fpgm.models import resnet, vgg16
from fpgm.models.torchvision_import import import_torchvision
from fpgm.paper.flops import (
    FlopsRow,
    LayerShape,
    cifar_resnet,
    cifar_vgg16,
    flops_rows,
    fractional_width,
    imagenet_resnet,
    integer_width,
    macs,
    paper_layer_list,
    percent_saved,
)

ROOT = Path(__file__).resolve().parents[2]
ROWS = flops_rows()


def name(row: FlopsRow) -> str:
    return f"{row.model} {row.rate_label}"


def measured_macs(model: torch.nn.Module, *shape: int) -> int:
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model.to("meta").eval()(torch.empty(*shape))
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("depth", [20, 32, 56, 110])
def test_layer_list_costs_what_the_cifar_network_costs(depth: int) -> None:
    assert macs(cifar_resnet(depth)) == measured_macs(resnet(depth), 1, 3, 32, 32)


def test_layer_list_costs_what_vgg_costs() -> None:
    assert macs(cifar_vgg16()) == measured_macs(vgg16(), 1, 3, 32, 32)


@pytest.mark.parametrize("depth", [18, 34, 50, 101])
def test_layer_list_costs_what_torchvisions_network_costs(depth: int) -> None:
    pytest.importorskip("torchvision")
    model = import_torchvision().models.get_model(f"resnet{depth}", weights=None)
    layers = imagenet_resnet(depth, stride_in_3x3=True)
    assert macs(layers) == measured_macs(model, 1, 3, 224, 224)


@pytest.mark.parametrize("row", [r for r in ROWS if r.paper_percent is not None], ids=name)
def test_printed_percentages_follow_except_resnet101s(row: FlopsRow) -> None:
    assert row.matches_paper == (row.model != "ResNet-101")


@pytest.mark.parametrize("row", [r for r in ROWS if r.paper_flops is not None], ids=name)
def test_printed_flops_follow_except_the_swapped_digits(row: FlopsRow) -> None:
    counted = macs(paper_layer_list(row.layers), row.rate, fractional_width)
    right = 2.34e7 if row.paper_flops == 2.43e7 else row.paper_flops
    assert f"{counted:.2E}" == f"{right:.2E}"


def test_resnet20_by_hand() -> None:
    # stem 442,368; a convolution of equal width costs 2,359,296 in every stage, a widening one half
    r, stem, conv = 0.6, 442_368, 2_359_296
    by_hand = stem * r + conv * (
        2 * r**2  # the first block, behind the pruned stem
        + 2 * (r + r**2)  # the rest of stage one
        + 2 * (r / 2 + r**2)  # the widening block of stages two and three
        + 4 * (r + r**2)  # their other two blocks
    )
    assert macs(cifar_resnet(20)[:-1], 0.4, fractional_width) == pytest.approx(by_hand)


def test_whole_filters_save_less_than_fractional_ones_unless_they_divide() -> None:
    even = [LayerShape("a", 3, 10, 9, 4), LayerShape("b", 10, 10, 9, 4, source="a")]
    odd = [LayerShape("a", 3, 16, 9, 4), LayerShape("b", 16, 16, 9, 4, source="a")]
    assert percent_saved(even, 0.4, integer_width) == pytest.approx(
        percent_saved(even, 0.4, fractional_width)
    )
    assert percent_saved(odd, 0.4, integer_width) < percent_saved(odd, 0.4, fractional_width)


@pytest.mark.parametrize(("depth", "percent"), [(20, 51.7), (32, 50.9), (56, 50.4), (110, 50.1)])
def test_what_40_percent_really_removes(depth: int, percent: float) -> None:
    assert round(percent_saved(cifar_resnet(depth), 0.4), 1) == percent


@pytest.mark.parametrize("rate", [0.3, 0.4])
@pytest.mark.parametrize("depth", [20, 56])
def test_the_papers_plan_costs_the_papers_whole_filter_count(depth: int, rate: float) -> None:
    plan = fpgm.plan(
        resnet(depth),
        torch.randn(1, 3, 32, 32),
        rate=rate,
        residual="independent",
        align=1,
        rounding="paper",
    )
    assert plan.macs_before == macs(cifar_resnet(depth))
    assert plan.macs_after == macs(cifar_resnet(depth), rate)


def test_committed_table_is_what_the_command_prints(tmp_path: Path) -> None:
    script = tmp_path / "paper_flops.py"  # it writes beside itself
    script.write_bytes((ROOT / "benchmarks" / "paper_flops.py").read_bytes())
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert run.stdout == (ROOT / "benchmarks" / "paper_flops.md").read_text(encoding="utf-8")
    assert run.stdout in (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    committed = (ROOT / "benchmarks" / "paper_flops.json").read_text(encoding="utf-8")
    assert (tmp_path / "paper_flops.json").read_text(encoding="utf-8") == committed
    assert len(re.findall(r"^\| \d", run.stdout, flags=re.M)) == len(ROWS)
