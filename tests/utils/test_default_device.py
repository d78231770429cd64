"""Pruning works whatever the default device is, and the user's own code still gets that device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fpgm

X = torch.randn(4, 3, 8, 8)


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4),
    )  # fmt: skip


@contextmanager
def _set_for_all(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


Default = Callable[[str], AbstractContextManager[object]]
every_way = pytest.mark.parametrize("default", [_set_for_all, torch.device])


@every_way
@pytest.mark.parametrize("residual", ["coupled", "independent"])
def test_a_model_is_pruned_recovered_and_saved_under_a_meta_default(
    default: Default, residual: str, tmp_path: Path
) -> None:
    model = build()
    expected = fpgm.plan(model, X, rate=0.5, align=1, residual=residual)
    with default("meta"):
        plan = fpgm.plan(model, X, rate=0.5, align=1, residual=residual)
        small = fpgm.compact(model, plan)
        assert fpgm.verify(model, plan, X).ok
        recovered = fpgm.recover(model, plan, [X])
        fpgm.save(recovered, tmp_path / "small.safetensors")
        loaded = fpgm.load(tmp_path / "small.safetensors", build)
        fpgm.mask_(model, plan)
    assert plan == expected
    assert {t.device.type for net in (small, loaded) for t in net.state_dict().values()} == {"cpu"}
    assert torch.equal(loaded.eval()(X), recovered.eval()(X))


@every_way
def test_prune_soft_pruning_and_export_work_under_a_meta_default(
    default: Default, tmp_path: Path
) -> None:
    with default("meta"):
        small = fpgm.prune(build_on_cpu(), X, rate=0.5, align=1)
        pruner = fpgm.SoftPruner(build_on_cpu(), X, rate=0.5, align=1)
        pruner.step()
        fpgm.analyze(build_on_cpu(), X)
        fpgm.export(small, X, tmp_path / "small.pt2")
        assert small(X).shape == pruner.compact()(X).shape


def build_on_cpu() -> nn.Module:
    with torch.device("cpu"):
        return build()


seen: set[str] = set()
"""Default devices that the user's own code has seen."""


class RecordsDefault(nn.Module):
    """A model that notes the default device of every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build()

    def forward(self, x: Tensor) -> Tensor:
        seen.add(torch.get_default_device().type)
        out: Tensor = self.net(x)
        return out


def test_forward_and_loader_see_the_users_own_default() -> None:
    model = RecordsDefault()

    def batches() -> Iterator[Tensor]:
        seen.add(torch.get_default_device().type)
        yield X

    seen.clear()
    with torch.device("cuda:0"):  # needs no such hardware, as long as nothing is created there
        plan = fpgm.plan(model, X, rate=0.5, align=1)
        fpgm.recover(model, plan, batches())
        assert torch.get_default_device().type == "cuda"
    assert seen == {"cuda"}
    assert torch.get_default_device().type == "cpu"


def test_the_default_is_restored_after_an_error() -> None:
    with torch.device("meta"):
        with pytest.raises(fpgm.RequestError):
            fpgm.plan(build_on_cpu(), X, rate=2.0)
        assert torch.get_default_device().type == "meta"
