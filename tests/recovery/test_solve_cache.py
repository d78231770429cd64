"""An interrupted recovery continues from the last layer it solved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.recoverable import Streams, batches, stir
from torch import Tensor, nn

import fpgm
from fpgm.recovery import api, solve_cache


class Stop(Exception):  # noqa: N818  (an interruption, not an error)
    """Stands for Ctrl-C."""


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(solve_cache, "WRITE_EVERY", 0.0)
    torch.manual_seed(0)
    return stir(Streams()).eval()


def interrupted(model: nn.Module, plan: fpgm.Plan, data: list[Tensor], file: Path, at: int) -> None:
    def stop(title: str, done: int, total: int) -> None:
        if done == at:
            raise Stop

    with pytest.raises(Stop):
        fpgm.recover(model, plan, data, cache=file, progress=stop)


@pytest.mark.parametrize("residual", ["coupled", "independent"])
def test_it_continues_and_ends_with_the_same_weights(
    model: nn.Module, residual: Any, tmp_path: Path
) -> None:
    data, file = batches(3, 6, 6), tmp_path / "solved.safetensors"
    plan = fpgm.plan(model, data[0], rate=0.5, align=1, residual=residual)
    expected = fpgm.recover(model, plan, data)
    interrupted(model, plan, data, file, at=4)
    started: list[int] = []
    small = fpgm.recover(
        model, plan, data, cache=file, progress=lambda _, done, total: started.append(done)
    )
    assert started[0] == 4
    for one, other in zip(small.state_dict().values(), expected.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert small.fpgm_recovery.layers == expected.fpgm_recovery.layers
    assert not file.exists()


@pytest.mark.parametrize("change", ["data", "plan", "weights", "code", "damage"])
def test_what_another_recovery_left_is_not_used(
    model: nn.Module, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, file = batches(3, 6, 6), tmp_path / "solved.safetensors"
    plan = fpgm.plan(model, data[0], rate=0.5, align=1)
    interrupted(model, plan, data, file, at=3)
    if change == "data":
        data = batches(3, 6, 6)
    elif change == "plan":
        plan = fpgm.plan(model, data[0], rate=0.25, align=1)
    elif change == "weights":
        with torch.no_grad():
            next(model.parameters()).mul_(2)
    elif change == "code":
        find = api._find_layers
        monkeypatch.setattr(api, "_find_layers", lambda *args: (find(*args)[0][1:], 0, {}))
    else:
        file.write_bytes(file.read_bytes()[:-40])
    started: list[int] = []
    fpgm.recover(
        model, plan, data, cache=file, progress=lambda _, done, total: started.append(done)
    )
    assert started[0] == 0


def test_the_command_continues_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.helpers.shell import run

    from fpgm.recovery.layer_solver import LayerSolver

    monkeypatch.setattr(solve_cache, "WRITE_EVERY", 0.0)
    out = tmp_path / "out"
    run("prune", "digits", "--rate", 0.4, "--out", out)
    shown = ("--data", "digits", "--images", 64, "--test", 32)
    solve, numbers = LayerSolver.solve_, []

    def solve_some(self: LayerSolver) -> Any:
        numbers.append(self.number)
        if len(numbers) == 3:
            raise KeyboardInterrupt
        return solve(self)

    monkeypatch.setattr(api.LayerSolver, "solve_", solve_some)
    run("recover", out, *shown, code=130)
    assert (out / "solved.safetensors").exists()
    run("recover", out, *shown)
    assert numbers[:4] == [0, 1, 2, 2]
    assert not (out / "solved.safetensors").exists()
