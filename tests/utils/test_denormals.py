"""Weights too small to be normal numbers are found, told, and set to zero."""

import torch
from torch import nn

import fpgm
from fpgm.utils.denormals import count_denormals, flush_denormals_

X = torch.randn(1, 3, 8, 8)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(dtype)
    tiny = torch.finfo(dtype).tiny
    with torch.no_grad():
        model[0].weight.view(-1)[:5] = torch.tensor([tiny / 2, -tiny / 4, tiny, 0, -1])
    return model


def test_they_are_counted_and_flushed() -> None:
    model = net()
    assert count_denormals(model) == 2
    flush_denormals_(model)
    assert count_denormals(model) == 0
    first = model[0].weight.view(-1)[:5]
    assert (first == torch.tensor([0, 0, torch.finfo(torch.float32).tiny, 0, -1])).all()


def test_in_half_precision_they_are_numbers_like_others() -> None:
    assert count_denormals(net(torch.float16)) == 0


def test_a_compact_model_has_none_and_the_plan_reports_it() -> None:
    model = net()
    plan = fpgm.plan(model, X, rate=0.5, align=1)
    assert plan.notes == (
        "2 weights are denormal (too small for full precision); compact zeroes them.",
    )
    small = fpgm.compact(model, plan)
    assert count_denormals(small) == 0
    assert count_denormals(model) == 2
    assert fpgm.verify(model, plan, X, compacted=small).ok
