"""A compact model trains if the original does, wherever it was made."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import fpgm

X = torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("where", [torch.inference_mode(), torch.no_grad()])
def test_a_model_pruned_without_gradients_can_be_trained(
    where: AbstractContextManager[None],
) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    with where:
        small = fpgm.prune(net, X, rate=0.5, align=1)
    assert not any(t.is_inference() for t in small.state_dict().values())
    small.train()(X).sum().backward()
    assert all(p.grad is not None for p in small.parameters())
