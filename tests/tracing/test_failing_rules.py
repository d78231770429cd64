"""An error in a rule costs the channels it was about, not the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.tracing.ops import registry


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(x).flip(1)).relu())
        return out


def test_a_rule_that_fails_freezes_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setitem(registry.TABLE, "flip", fails)
    monkeypatch.setattr(registry, "_rules_by_func", {})
    net, x = Net(), torch.randn(2, 3, 8, 8)
    small = fpgm.prune(net, x, rate=0.5, align=1)
    (plan,) = small.fpgm_plans
    assert [group.name for group in plan.groups] == ["second"]
    assert "the rule for 'flip' failed (IndexError" in plan.frozen[0].reason


def test_a_model_that_cannot_switch_to_eval_mode_is_refused() -> None:
    class Fixed(Net):
        def eval(self) -> Fixed:
            raise NotImplementedError("Calling eval() is not supported yet.")

    with pytest.raises(fpgm.ModelError) as caught:
        fpgm.plan(Fixed(), torch.randn(2, 3, 8, 8), rate=0.5)
    assert str(caught.value).startswith(
        "The model's own eval() fails: Calling eval() is not supported yet (NotImplementedError"
    )
