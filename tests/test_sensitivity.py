"""Sensitivity: the harm it foretells is the harm that least squares leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.harm.result import GroupHarm, Sensitivity

SHAPE = (3, 7, 7)


def batches(count: int = 3) -> list[Tensor]:
    torch.manual_seed(5)
    return [torch.randn(16, *SHAPE) for _ in range(count)]


def chain(groups: int = 1) -> nn.Sequential:
    torch.manual_seed(2)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1, groups=groups)
    )
    return net.eval()


def least_error(net: nn.Sequential, gone: list[int], data: list[Tensor]) -> float:
    """What is left, as a share, when the last layer may use the other channels as it likes."""
    with torch.no_grad():
        inner = torch.cat([net[1](net[0](x)) for x in data])
        wanted = torch.cat([net(x) for x in data]).movedim(1, 0).flatten(1).T.double()
    kept = [i for i in range(inner.shape[1]) if i not in gone]
    rows = nn.functional.unfold(inner[:, kept], 3, padding=1).movedim(1, 0).flatten(1).T.double()
    rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], 1)
    left = wanted - rows @ torch.linalg.lstsq(rows, wanted).solution
    return float(left.square().sum() / wanted.square().sum())


def test_the_curve_is_what_least_squares_leaves() -> None:
    """The outputs are the reader's own, so no probe stands between."""
    net, data = chain(), batches()
    found = fpgm.sensitivity(net, data[0], data, align=1)
    [group] = found.groups
    for count in (1, 3, 6):
        plan = fpgm.plan(net, data[0], rates={"0": count / 8}, align=1)
        [gone] = [c.removed() for c in plan.cuts if c.tensor == "0.weight"]
        assert group.harm[count] == pytest.approx(least_error(net, list(gone), data), rel=0.1)
    assert group.harm[0] == 0
    assert list(group.harm) == sorted(group.harm)


def test_groups_that_can_spare_units_lose_them() -> None:
    """One layer's filters are all the same but for their size: they go, and nothing else does."""
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 4, 3, padding=1),
    ).eval()  # fmt: skip
    with torch.no_grad():
        net[2].weight.copy_(net[2].weight[:1] * torch.linspace(0.5, 2, 16)[:, None, None, None])
        net[2].bias.zero_()
    data = batches()
    plan = fpgm.plan(net, data[0], macs=0.3, align=1, allocate="sensitivity", loader=data)
    gone = {group.name: group.units - group.kept for group in plan.groups}
    assert gone["2"] > 4
    assert gone["0"] == gone["4"] == 0


@pytest.mark.parametrize("groups", [1, 2])
def test_any_reader_is_measured(groups: int) -> None:
    net, data = chain(groups), batches()
    found = fpgm.sensitivity(net, data[0], data, align=1)
    assert found.groups[0].harm[-2] > found.groups[0].harm[2] > 0


def test_the_model_is_as_it_was() -> None:
    net, data = chain().train(), batches()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    fpgm.sensitivity(net, data[0], data)
    assert net.training
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks for m in net.modules())


def test_written_and_read_again() -> None:
    net, data = chain(), batches()
    found = fpgm.sensitivity(net, data[0], data)
    again = Sensitivity.from_json(found.to_json())
    assert again == found
    for text in ("", "[]", '{"format": 2}', '{"format": 1}'):
        with pytest.raises(fpgm.FileError):
            Sensitivity.from_json(text)


def test_curves_of_other_sizes_and_of_what_was_not_measured() -> None:
    found = Sensitivity(
        (GroupHarm("a", 2, (0.0, 1.0, 3.0)), GroupHarm("b", 1, (0.0, 5.0))), {}, inputs=1
    )
    assert found.curve("a", 2) == [0.0, 1.0, 3.0]
    assert found.curve("a", 4) == [0.0, 0.5, 1.0, 2.0, 3.0]
    assert found.curve("c", 1) == [0.0, 4.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allocate": "sensitivity"}, "allocate='sensitivity' is measured on data: give loader=."),
        ({"allocate": "x"}, "allocate is 'x': give 'uniform', 'sensitivity' or a result."),
    ],
)
def test_bad_requests(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fpgm.RequestError) as error:
        fpgm.plan(chain(), torch.randn(1, *SHAPE), rate=0.5, **options)
    assert str(error.value) == message
