"""The paper's residual policy: which modules scatter, what reads the pruned stem, what stays whole.

In the paper the stream keeps its width. So the first convolution of a block reads all of it, except
in the block behind the stem, where nothing has been added to the pruned stem yet.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fpgm
from fpgm.models import resnet
from fpgm.models.torchvision_import import import_torchvision
from fpgm.utils.channel_adapters import scatter, scatter_by_gather
from fpgm.utils.modules import modules_by_path


def paper_plan(model: nn.Module, size: int, rate: float = 0.4) -> fpgm.Plan:
    x = torch.randn(1, 3, size, size)
    return fpgm.plan(model, x, rate=rate, residual="independent", align=1, rounding="paper")


def sites(plan: fpgm.Plan, kind: str) -> list[str]:
    return sorted(a.module for a in plan.adapters if a.kind == kind)


def torchvision_model(name: str) -> nn.Module:
    pytest.importorskip("torchvision")
    import_torchvision()
    from torchvision import models

    result: nn.Module = getattr(models, name)()
    return result


def read_widths(model: nn.Module, plan: fpgm.Plan) -> dict[str, int]:
    """Input channels of each convolution after pruning."""
    small = fpgm.compact(model, plan)
    return {n: m.in_channels for n, m in modules_by_path(small).items() if isinstance(m, nn.Conv2d)}


def test_every_block_of_resnet20_scatters_behind_its_last_norm() -> None:
    model = resnet(20)
    plan = paper_plan(model, 32)
    last = [f"layer{stage}.{i}.bn2" for stage in (1, 2, 3) for i in range(3)]
    # The stem enters the stream through the first block's shortcut, an identity.
    assert sites(plan, "scatter") == sorted([*last, "layer1.0.shortcut"])
    widths = {"layer1": (10, 16), "layer2": (20, 32), "layer3": (39, 64)}
    for adapter in plan.adapters:
        assert (len(adapter.index), adapter.size) == widths[adapter.module[:6]]


def test_resnet20_reads_the_pruned_stem_once_and_the_whole_stream_elsewhere() -> None:
    model = resnet(20)
    reads = read_widths(model, paper_plan(model, 32))
    first = {name: n for name, n in reads.items() if name.endswith("conv1")}
    assert first == {
        "conv1": 3,
        "layer1.0.conv1": 10,  # 16 − int(16 · 0.4) = 10 of the stem
        "layer1.1.conv1": 16, "layer1.2.conv1": 16, "layer2.0.conv1": 16,
        "layer2.1.conv1": 32, "layer2.2.conv1": 32, "layer3.0.conv1": 32,
        "layer3.1.conv1": 64, "layer3.2.conv1": 64,
    }  # fmt: skip


def test_torchvision_resnet18() -> None:
    model = torchvision_model("resnet18")
    plan = paper_plan(model, 64)
    last = [f"layer{stage}.{i}.bn2" for stage in (1, 2, 3, 4) for i in range(2)]
    assert sites(plan, "scatter") == sorted([*last, "maxpool"])
    assert sites(plan, "gather") == ["layer1.0.conv1"]
    reads = read_widths(model, plan)
    assert reads["layer1.0.conv1"] == 64 - 25
    assert reads["layer1.1.conv1"] == reads["layer2.0.downsample.0"] == 64


def test_torchvision_resnet50() -> None:
    model = torchvision_model("resnet50")
    plan = paper_plan(model, 64)
    blocks = {1: 3, 2: 4, 3: 6, 4: 3}
    last = [f"layer{stage}.{i}.bn3" for stage, count in blocks.items() for i in range(count)]
    # The first block has a projection, so the stem enters no stream and is read as it is.
    assert sites(plan, "scatter") == sorted(last)
    assert sites(plan, "gather") == []
    reads = read_widths(model, plan)
    assert reads["layer1.0.conv1"] == reads["layer1.0.downsample.0"] == 64 - 25
    assert reads["layer1.1.conv1"] == 256


@pytest.mark.parametrize(
    ("name", "projections"), [("resnet18", (2, 3, 4)), ("resnet50", (1, 2, 3, 4))]
)
def test_projection_shortcuts_are_not_pruned(name: str, projections: tuple[int, ...]) -> None:
    model = torchvision_model(name)
    plan = paper_plan(model, 64)
    small = fpgm.compact(model, plan)
    for stage in projections:
        layer = f"layer{stage}.0.downsample.0"
        assert any(layer in f.layers for f in plan.frozen)
        complete = model.get_submodule(layer).out_channels
        assert small.get_submodule(layer).out_channels == complete
    assert not any("downsample" in group.name for group in plan.groups)


@pytest.mark.parametrize(
    ("name", "macs"), [("resnet18", 1_063_235_858), ("resnet34", 2_170_202_747)]
)
def test_torchvision_costs_are_the_papers_with_whole_filters(name: str, macs: int) -> None:
    """Counted without any model in benchmarks/paper_flops.md, at 30 %."""
    assert paper_plan(torchvision_model(name), 224, 0.3).macs_after == macs


class Block(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).relu())
        if self.inplace:
            y += x
        else:
            y = y + x
        return y.relu()


@pytest.mark.parametrize("inplace", [False, True], ids=["y = y + x", "y += x"])
def test_what_was_added_to_a_branch_is_not_the_branch_any_more(inplace: bool) -> None:
    stem, head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1)
    net = nn.Sequential(stem, Block(inplace), Block(inplace), head)
    plan = fpgm.plan(net, torch.randn(1, 3, 8, 8), rate=0.5, align=1, residual="independent")
    assert sites(plan, "scatter") == ["0", "1.b", "2.b"]
    assert sites(plan, "gather") == ["1.a"]
    assert read_widths(net, plan) == {"0": 3, "1.a": 4, "1.b": 4, "2.a": 8, "2.b": 4, "3": 8}


@pytest.mark.parametrize("make", [lambda: resnet(20), lambda: torchvision_model("resnet18")])
def test_independent_plans_are_certified(make: Any) -> None:
    model = make()
    x = torch.randn(1, 3, 32, 32)
    plan = fpgm.plan(model, x, rate=0.4, residual="independent")
    assert fpgm.verify(model, plan, x).check().exact


@settings(max_examples=50, deadline=None)
@given(data=st.data(), size=st.integers(1, 9), dim=st.integers(0, 3))
def test_both_ways_of_placing_channels_give_the_same(
    data: st.DataObject, size: int, dim: int
) -> None:
    index = torch.tensor(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))))
    shape = [2, 3, 4, 5]
    shape[dim] = len(index)
    x = torch.randn(shape)
    sources = torch.full((size,), len(index))
    sources[index] = torch.arange(len(index))
    assert torch.equal(scatter_by_gather(x, dim, sources), scatter(x, dim, index, size))


@pytest.mark.slow
def test_a_compiler_gathers_where_eager_code_scatters() -> None:
    small = fpgm.compact(resnet(20), paper_plan(resnet(20), 32)).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        program = torch.export.export(small, (x,))
        assert torch.allclose(program.module()(x), small(x), atol=1e-5)
    used = {str(node.target) for node in program.graph.nodes}
    assert any("index_select" in name for name in used)
    assert not any("index_copy" in name for name in used)


@pytest.mark.slow
def test_training_with_a_compiler_scatters() -> None:
    small = fpgm.compact(resnet(20), paper_plan(resnet(20), 32)).train()
    program = torch.export.export(small, (torch.randn(2, 3, 32, 32),))
    assert any("index_copy" in str(node.target) for node in program.graph.nodes)
