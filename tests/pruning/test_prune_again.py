"""Pruning a compact model again: adapters of the first plan move fewer channels after the second.

The reference is written here and not taken from `verify`: in the once pruned model the removed
filters become noise, and what reads them gets weights of zero; where a scatter places them, the
places are set to zero by a hook.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.helpers.recoverable import stir
from tests.pruning.test_channel_adapters import NETWORKS, Shuffle, X, pruned
from torch import Tensor, nn

import fpgm
from fpgm.cli.inspect import macs_by_module
from fpgm.pruning.adapter_placement import adapter_at
from fpgm.tracing.layer_calls import called_layers
from fpgm.utils.channel_adapters import Adapted
from fpgm.utils.example_inputs import Example
from fpgm.utils.modules import modules_by_path, named_tensors


def reference(model: nn.Module, plan: fpgm.Plan) -> nn.Module:
    """The model in full, with removed filters of noise that nothing reads."""
    full = copy.deepcopy(model).eval()
    tensors = named_tensors(full)
    with torch.no_grad():
        for cut in plan.cuts:
            dropped = torch.tensor(cut.removed())
            item = tensors[cut.tensor].movedim(cut.dim, 0)
            if cut.role == "filter":
                item[dropped] = torch.randn_like(item[dropped])
            elif cut.role == "reads":
                item[dropped] = 0
    for adapter in plan.adapters:
        if adapter.kind == "scatter":
            wrapper = full.get_submodule(adapter.module)
            assert isinstance(wrapper, Adapted)
            places = sorted(set(range(adapter.size)) - set(adapter.index))

            part = wrapper.before if adapter.side == "input" else wrapper.after
            assert part is not None
            part.register_forward_hook(_clearing(adapter.dim, places))
    return full


def _clearing(dim: int, places: list[int]) -> Callable[[nn.Module, object, Tensor], Tensor]:
    return lambda _, args, out: out.index_fill(dim, torch.tensor(places), 0)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_compact_model_is_pruned_again_exactly(name: str, tmp_path: Path) -> None:
    _, small = pruned(name)
    plan = fpgm.plan(small, X, rate=0.4, align=1)
    assert plan.macs_removed > 0.2
    again = fpgm.compact(small, plan).eval()
    x = torch.randn(3, 3, 20, 20)
    with torch.no_grad():
        wanted = reference(small, plan)(x)
        assert torch.allclose(again(x), wanted, atol=1e-4 * float(wanted.abs().max()))
    assert fpgm.verify(small, plan, X).check().exact
    fpgm.save(again, tmp_path / "twice.safetensors")
    loaded = fpgm.load(tmp_path / "twice.safetensors", NETWORKS[name][0]).eval()
    assert torch.equal(loaded(x), again(x))


@pytest.mark.parametrize("residual", ["coupled", "independent"])
def test_inner_layers_and_branches_of_a_block_shrink(
    residual: fpgm.tracing.residual.Residual,
) -> None:
    _, small = pruned("basic")
    plan = fpgm.plan(small, X, rate=0.4, align=1, residual=residual)
    again = modules_by_path(fpgm.compact(small, plan))
    before = modules_by_path(small)
    for number in range(3):
        for layer in ("conv1", "conv2"):
            path = f"blocks.{number}.{layer}"
            assert again[path].out_channels < before[path].out_channels
    # The stream is as wide as it was, and the projection with it.
    assert again["blocks.1.downsample.0"].out_channels == 32
    reasons = [f.reason for f in plan.frozen if "blocks.1.downsample.0" in f.layers]
    assert len(reasons) == 1
    assert "earlier plan" in reasons[0]


def test_a_scatter_places_fewer_channels_in_the_same_width() -> None:
    _, small = pruned("basic")
    plan = fpgm.plan(small, X, rate=0.4, align=1)
    first = adapter_at(small, "blocks.0.bn2", "output")
    second = adapter_at(fpgm.compact(small, plan), "blocks.0.bn2", "output")
    assert first is not None
    assert second is not None
    assert second.size == first.size == 16
    assert set(second.index) < set(first.index)


def test_a_gather_follows_the_channels_it_picks_from() -> None:
    torch.manual_seed(0)
    model = stir(Shuffle()).eval()
    once = fpgm.compact(model, fpgm.plan(model, X, rate=0.25, align=1)).eval()
    plan = fpgm.plan(once, X, rate=0.4, align=1)
    picks = [a for a in plan.adapters if a.kind == "gather"]
    assert picks
    for adapter in picks:
        before = adapter_at(once, adapter.module, adapter.side)
        assert before is None or adapter.size < before.size


def test_three_times() -> None:
    _, small = pruned("basic")
    for _ in range(2):
        plan = fpgm.plan(small, X, rate=0.25, align=1)
        assert fpgm.verify(small, plan, X).check().exact
        small = fpgm.compact(small, plan)
    assert len(small.fpgm_plans) == 3
    assert small.train()(X).sum().backward() is None


def test_masking_gives_the_same_model() -> None:
    _, small = pruned("bottleneck")
    plan = fpgm.plan(small, X, rate=0.4, align=1)
    masked = copy.deepcopy(small)
    fpgm.mask_(masked, plan)
    with torch.no_grad():
        assert torch.allclose(masked(X), fpgm.compact(small, plan)(X), atol=1e-4)


@pytest.mark.parametrize("name", NETWORKS)
def test_inspect_counts_what_wrapped_layers_spend(name: str) -> None:
    model, small = pruned(name)
    assert any(isinstance(m, Adapted) for m in small.modules())
    macs = macs_by_module(small, X)
    assert macs.keys() == macs_by_module(model, X).keys()
    counted = {c.path: c.macs for c in called_layers(small, Example((X,), {}))}
    assert {path: n for path, n in macs.items() if n} == counted
