"""Points where the features of compact and original model are matched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.recovery.feature_matching import find_matching_points, record_inputs
from fpgm.utils.example_inputs import Example

X = torch.randn(2, 3, 8, 8)


class Residual(nn.Module):
    """Two blocks on a stream; the activation inside a block overwrites what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.a, self.b, self.c, self.d = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.b(self.act(self.a(x))))
        x = torch.relu(x + self.d(self.act(self.c(x))))
        return self.head(x.mean((2, 3)))


def pruned(model: nn.Module, residual: str) -> tuple[nn.Module, fpgm.Plan]:
    plan = fpgm.plan(model, X, rate=0.5, align=1, residual=residual)  # type: ignore[arg-type]
    return fpgm.compact(model, plan).eval(), plan


@pytest.mark.parametrize(("residual", "kept"), [("coupled", 4), ("independent", None)])
def test_streams_are_matched_and_what_one_layer_reads_is_not(
    residual: str, kept: int | None
) -> None:
    model = Residual().eval()
    small, plan = pruned(model, residual)
    places = {p.layer: p for p in find_matching_points(model, small, plan, Example((X,), {}))}
    assert set(places) == {"a", "c", "head"}
    keep = places["c"].keep
    assert (None if keep is None else len(keep)) == kept


def test_both_models_read_the_same_channels_there() -> None:
    """Before anything was pruned in front of it, what is read is the same, number by number."""
    model = Residual().eval()
    small, plan = pruned(model, "coupled")
    places = find_matching_points(model, small, plan, Example((X,), {}))
    with (
        record_inputs(model, places, kept_only=True) as theirs,
        record_inputs(small, places, kept_only=False) as mine,
    ):
        model(X)
        small(X)
        assert torch.allclose(theirs["a"], mine["a"], atol=1e-6)
        assert theirs["c"].shape == mine["c"].shape
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_network_without_branches_is_matched_everywhere() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    small, plan = pruned(model, "coupled")
    places = find_matching_points(model, small, plan, Example((X,), {}))
    assert [p.layer for p in places] == ["0", "2"]


def test_a_layer_that_does_not_always_run() -> None:
    class Sometimes(Residual):
        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x)
            if x.shape[0] > 2:
                y = torch.relu(y + self.b(self.act(self.a(y))))
            y = torch.relu(y + self.d(self.act(self.c(y))))
            return self.head(y.mean((2, 3)))

    model = Sometimes().eval()
    batches = [torch.randn(4, 3, 8, 8), torch.randn(2, 3, 8, 8)]
    plan = fpgm.plan(model, batches[0], rate=0.5, align=1)
    small = fpgm.recover(model, plan, batches, distil=0.5)
    assert small.fpgm_recovery.steps > 1  # of both sizes


def twice() -> nn.Module:
    conv = nn.Conv2d(8, 8, 3, padding=1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), conv, nn.ReLU(), conv, nn.Conv2d(8, 4, 1))


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 4, 1))


@pytest.mark.parametrize(("build", "missing"), [(twice, "1"), (grouped, "1")])
def test_layers_whose_inputs_cannot_be_matched_are_left_out(
    build: Callable[[], nn.Module], missing: str
) -> None:
    model = build().eval()
    small, plan = pruned(model, "coupled")
    places = find_matching_points(model, small, plan, Example((X,), {}))
    assert places
    assert missing not in {p.layer for p in places}


def test_a_layer_called_by_name_and_by_position() -> None:
    class Named(Residual):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(input=x)
            x = torch.relu(x + self.b(self.act(self.a(input=x))))
            x = torch.relu(x + self.d(self.act(self.d(x))))
            return self.head(x.mean((2, 3)))

    model = Named().eval()
    small, plan = pruned(model, "coupled")
    places = find_matching_points(model, small, plan, Example((X,), {}))
    assert {p.layer for p in places} == {"a", "head"}  # d runs twice
    with record_inputs(model, places, kept_only=True) as theirs:
        model(X)
        assert set(theirs) == {"a", "head"}


def test_operators_that_write_into_something_else_than_their_first_argument() -> None:
    class Writes(Residual):
        def forward(self, x: Tensor) -> Tensor:
            steps = torch.empty(3, dtype=torch.int64)
            torch.arange(3, out=steps)
            y = self.stem(x)
            torch._foreach_mul_([y], 2.0)
            y = torch.relu(y + self.b(self.act(self.a(y))))
            return self.head(y.mean((2, 3))) + steps.sum()

    model = Writes().eval()
    small, plan = pruned(model, "coupled")
    places = find_matching_points(model, small, plan, Example((X,), {}))
    assert [p.layer for p in places] == ["a", "head"]
