"""Recovery in corner cases: few or odd batches, unusual layers, little memory."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from tests.helpers.recoverable import Streams, batches, chain, stir, unseen
from torch import Tensor, nn

import fpgm
from fpgm.recovery.api import RECOVERY, recover


@pytest.mark.parametrize("sizes", [[64, 64, 64], [128], [16] * 8 + [1]])
def test_few_batches_are_not_overfitted(sizes: list[int]) -> None:
    torch.manual_seed(0)
    model = chain(norm=False).eval()
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.4, align=1)
    small = recover(model, plan, [torch.randn(n, 3, 6, 6) for n in sizes])
    before, after = unseen(model, small, plan, torch.randn(256, 3, 6, 6))
    assert after < before


def test_a_depthwise_transposed_convolution() -> None:
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(16, 16, 4, 2, 1, groups=16, bias=False)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), up, nn.Conv2d(16, 4, 1)).eval()
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.5, align=1)
    small = recover(model, plan, batches(3, 6, 6))
    before, after = unseen(model, small, plan, torch.randn(64, 3, 6, 6))
    assert after < before


class Tripled(nn.Conv2d):
    """Computes with other weights than its own."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight * 3, self.bias, padding=1)


def test_layers_with_their_own_forward_are_not_solved() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        Tripled(3, 8, 3), nn.ReLU(), Tripled(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)
    )
    plan = fpgm.plan(model.eval(), torch.randn(1, 3, 6, 6), rate=0.5, align=1)
    small = recover(model, plan, batches(3, 6, 6))
    recovery = getattr(small, RECOVERY)
    assert [solved.layer for solved in recovery.layers] == ["4"]
    assert recovery.after < recovery.before


class Placed(nn.Module):
    """Adds a constant of batch size one, and a branch into a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.where = nn.Parameter(torch.randn(1, 8, 6, 6))
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu() + self.where
        return self.head((self.b(x) + x).relu())


def test_sums_are_known_in_a_last_batch_of_one() -> None:
    torch.manual_seed(0)
    model = Placed().eval()
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.5, align=1, residual="independent")
    small = recover(model, plan, [torch.randn(n, 3, 6, 6) for n in [16] * 8 + [1]])
    before, after = unseen(model, small, plan, torch.randn(64, 3, 6, 6))
    assert after < before


class Tokens(nn.Module):
    """Linear branches on [batch, tokens, channels]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head((x + self.down(self.up(x).relu())).mean(1))


@pytest.mark.parametrize("residual", ["coupled", "independent"])
def test_branches_of_tokens(residual: Any) -> None:
    torch.manual_seed(0)
    model = Tokens().eval()
    plan = fpgm.plan(model, torch.randn(1, 5, 6), rate=0.3, align=1, residual=residual)
    small = recover(model, plan, batches(5, 6))
    before, after = unseen(model, small, plan, torch.randn(64, 5, 6))
    assert after < before


class Sized(nn.Module):
    """A transposed convolution with an explicit output size, before a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, 2, 1)
        self.up = nn.ConvTranspose2d(8, 8, 3, 2, 1)
        self.side = nn.Conv2d(3, 8, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(self.down(input=x).relu(), output_size=x.shape[2:])
        return self.head((up + self.side(x)).relu())


def test_other_arguments_of_a_layer_are_passed_again() -> None:
    torch.manual_seed(0)
    model = Sized().eval()
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.4, align=1)
    small = recover(model, plan, batches(3, 6, 6))
    before, after = unseen(model, small, plan, torch.randn(64, 3, 6, 6))
    assert after < before
    assert fpgm.sensitivity(model, torch.randn(1, 3, 6, 6), batches(3, 6, 6)).groups


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_no_thread_is_left_behind(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    monkeypatch.setattr("fpgm.recovery.api.MEMORY_FRACTION", share)
    monkeypatch.setattr("fpgm.recovery.layer_solver.OutputSample", _interrupt)
    model = stir(Streams())
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        recover(model, plan, batches(3, 6, 6))
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_passes_that_run_again_give_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = stir(Streams())
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1, residual="independent")
    data, x = batches(3, 6, 6), torch.randn(4, 3, 6, 6)
    waited = recover(model, plan, data)
    monkeypatch.setattr("fpgm.recovery.api.MEMORY_FRACTION", 0.0)
    monkeypatch.setattr("fpgm.utils.calibration_data.MAX_BYTES_IN_MEMORY", 0)
    again = recover(model, plan, data)
    torch.testing.assert_close(again(x), waited(x))


@pytest.mark.parametrize("method", ["solve", "norms", "weights"])
def test_one_nan_image_spoils_no_weight(method: Any) -> None:
    model = stir(Streams())
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1)
    data = batches(3, 6, 6)
    data[0][0, 0, 0, 0] = torch.nan
    small = recover(model, plan, data, method=method)
    assert all(tensor.isfinite().all() for tensor in small.state_dict().values())


def test_settings_of_reduced_precision_do_not_change_the_result() -> None:
    torch.manual_seed(0)
    model, data = stir(Streams()), batches(3, 6, 6)
    plan = fpgm.plan(model, torch.randn(1, 3, 6, 6), rate=0.3, align=1)
    usual = recover(model, plan, data)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            small = recover(model, plan, data)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    before, after = unseen(model, small, plan, torch.randn(64, 3, 6, 6))
    assert after < before
    for item, same in zip(small.parameters(), usual.parameters(), strict=True):
        assert torch.equal(item, same)


def test_layers_too_wide_for_normal_equations_are_solved_from_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fpgm.recovery.layer_solver.MAX_FAN_IN", 20)
    torch.manual_seed(0)
    net = stir(chain(norm=True))
    data = batches(3, 6, 6, count=16)
    plan = fpgm.plan(net, data[0], rate=0.4, align=1)
    small = fpgm.recover(net, plan, data)
    before, after = unseen(net, small, plan, torch.randn(64, 3, 6, 6))
    assert after < 0.5 * before
    assert not small.fpgm_recovery.notes


def test_batches_in_files_may_hold_a_tensor_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(Streams):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward((x + y) / 2)

    monkeypatch.setattr("fpgm.utils.calibration_data.MAX_BYTES_IN_MEMORY", 0)
    model = stir(Two())
    x = torch.randn(1, 3, 6, 6)
    plan = fpgm.plan(model, {"x": x, "y": x}, rate=0.3, align=1)
    small = recover(model, plan, [{"x": x, "y": x} for x in batches(3, 6, 6)])
    assert getattr(small, RECOVERY).after < getattr(small, RECOVERY).before
