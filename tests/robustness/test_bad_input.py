"""Every wrong request is answered in one line that says what to do, and leaves the model alone."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.errors import ForwardError
from fpgm.models import digits, resnet

X = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(1))
DIGITS_FORWARD = inspect.getsourcelines(type(digits()).forward)[1] + 2
"""The first line of its forward."""


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Weights, mode, names and hooks are afterwards what they were."""
    before = copy.deepcopy(model)
    yield
    assert [n for n, _ in model.named_modules()] == [n for n, _ in before.named_modules()]
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not hasattr(model, "fpgm_plans")
    assert list(model.state_dict()) == list(before.state_dict())
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor.nan_to_num(7), model.state_dict()[name].nan_to_num(7)), name


def answer(kind: type[Exception], model: nn.Module, call: Callable[[], Any]) -> str:
    """The whole message of the error a call ends with."""
    with unchanged(model), pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"rate": -0.1}, "rate is -0.1: give a fraction of at least 0 and below 1."),
    ({"rate": 1}, "rate is 1: give a fraction of at least 0 and below 1."),
    ({"rate": 1.5}, "rate is 1.5: give a fraction of at least 0 and below 1."),
    ({"rate": float("nan")}, "rate is nan: give a fraction of at least 0 and below 1."),
    ({"rate": 40}, "rate is 40: give a fraction of at least 0 and below 1 (did you mean 0.4?)."),
    (
        {"macs": 50.5},
        "macs is 50.5: give a fraction of at least 0 and below 1 (did you mean 0.505?).",
    ),
    ({"rate": 100}, "rate is 100: give a fraction of at least 0 and below 1."),
    (
        {"rate": "40%"},
        "rate is '40%': give a fraction of at least 0 and below 1 (did you mean 0.4?).",
    ),
    ({"rate": "much"}, "rate is 'much': give a fraction of at least 0 and below 1."),
    ({"rate": True}, "rate is True: give a fraction of at least 0 and below 1."),
    ({"macs": 1.0}, "macs is 1.0: give a fraction of at least 0 and below 1."),
    ({"params": -1}, "params is -1: give a fraction of at least 0 and below 1."),
    (
        {"rates": {"stem.0": 2}},
        "rates['stem.0'] is 2: give a fraction of at least 0 and below 1 (did you mean 0.02?).",
    ),
    ({"rate": 0.4, "macs": 0.5}, "Give one budget, not 2: rate, macs."),
    ({"rate": 0.4, "macs": 0.5, "params": 0.1}, "Give one budget, not 3: rate, macs, params."),
    ({}, "Say how much to remove: rate=, macs=, params=, latency= or rates=."),
    (
        {"rates": {"stage1.0.conv3": 0.4}},
        (
            "rates: no layer matches 'stage1.0.conv3'. Nearest: stage1.0.conv2, stage1.0.conv1, "
            "stage2.0.conv2."
        ),
    ),
    (
        {"rate": 0.4, "ignore": ["stem"]},
        "ignore: no layer matches 'stem'. Nearest: stem.*.",
    ),
    (
        {"rate": 0.4, "ignore": ["qqq"]},
        "ignore: no layer matches 'qqq'.",
    ),
    (
        {"rate": 0.4, "criterion": "fgpm"},
        (
            "Unknown criterion 'fgpm' (did you mean 'fpgm'?): choose one of fpgm, exact, l1, l2, "
            "bn, random, mix, or give a function."
        ),
    ),
    (
        {"rate": 0.4, "distance": "l3"},
        "Unknown distance 'l3': choose one of l2, l1, cosine.",
    ),
    ({"rate": 0.4, "residual": "none"}, "residual is 'none': give 'coupled' or 'independent'."),
    ({"rate": 0.4, "rounding": "up"}, "rounding is 'up': give 'nearest' or 'paper'."),
    ({"rate": 0.4, "align": 0}, "align is 0: give an integer of at least 1."),
    ({"rate": 0.4, "min_channels": 0}, "min_channels is 0: give an integer of at least 1."),
    ({"rate": 0.4, "ignore": [1]}, "ignore is [1]: give a list of patterns."),
    ({"rate": 0.4, "ignore": None}, "ignore is None: give a list of patterns."),
    ({"rate": 0.4, "criterion": None}, "criterion is None: give a name or a function."),
    ({"rate": 0.4, "seed": "0"}, "seed is '0': give an integer below 2**62."),
    ({"rate": 0.4, "seed": 2**70}, f"seed is {2**70}: give an integer below 2**62."),
    ({"rate": 0.4, "approximate": "no"}, "approximate is 'no': give True or False."),
    ({"rates": [0.4]}, 'rates is [0.4]: give a dict such as {"layer3.*": 0.2}.'),
    ({"rates": {1: 0.4}}, 'rates is {1: 0.4}: give a dict such as {"layer3.*": 0.2}.'),
]


@pytest.mark.parametrize(("options", "message"), REQUESTS, ids=[m for _, m in REQUESTS])
def test_invalid_requests(options: dict[str, Any], message: str) -> None:
    model = digits()
    assert answer(fpgm.RequestError, model, lambda: fpgm.plan(model, X, **options)) == message
    assert answer(fpgm.RequestError, model, lambda: fpgm.prune(model, X, **options)) == message


def test_the_nearest_requests_that_do_make_sense() -> None:
    model = digits()
    for options in (
        {"rate": 0},
        {"rate": 0.999},
        {"rates": {"stage1.0.conv1": 0.4}},
        {"rate": 0.4, "ignore": ["stem*"]},
    ):
        with unchanged(model):
            assert isinstance(fpgm.plan(model, X, **options), fpgm.Plan)


def test_an_unreachable_target_names_the_maximum() -> None:
    model = digits()
    message = answer(fpgm.RequestError, model, lambda: fpgm.plan(model, X, macs=0.9999))
    assert message == (
        "macs=0.9999 cannot be reached: with min_channels=1 and the frozen channels, at most "
        "0.999 can be removed."
    )
    # At 16 channels everywhere 19,322 of 169,834 parameters are left: ten 3×3 or 1×1 convolutions
    # (144 + 8 · 2304 + 256), ten norms (320), the classifier (170).
    message = answer(
        fpgm.RequestError, model, lambda: fpgm.plan(model, X, params=0.9, min_channels=16)
    )
    assert message == (
        "params=0.9 cannot be reached: with min_channels=16 and the frozen channels, at most "
        "0.886 can be removed."
    )


@pytest.mark.parametrize("inputs", ["image.png", 3, None])
def test_example_inputs_of_the_wrong_kind(inputs: Any) -> None:
    model = digits()
    assert answer(fpgm.RequestError, model, lambda: fpgm.plan(model, inputs, rate=0.4)) == (
        f"example_inputs is a {type(inputs).__name__}: give a tensor, a tuple of arguments, "
        "a dict of keyword arguments, or a list of these."
    )


@pytest.mark.parametrize("shape", [(1, 1, 8, 8), [1, 1, 8, 8], X.shape])
def test_a_shape_is_no_example(shape: Any) -> None:
    model = digits()
    assert answer(fpgm.RequestError, model, lambda: fpgm.plan(model, shape, rate=0.4)) == (
        "example_inputs is a shape: give a tensor, torch.randn(1, 1, 8, 8)."
    )


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript() -> None:
    model = digits().eval()
    for frozen in (torch.jit.trace(model, X), torch.jit.script(nn.Sequential(nn.Conv2d(1, 4, 3)))):
        with pytest.raises(fpgm.ModelError) as caught:
            fpgm.plan(frozen, X, rate=0.4)
        assert str(caught.value) == (
            "The model is TorchScript (traced or scripted), which cannot be pruned: give the "
            "nn.Module it was made from."
        )


def test_no_example_at_all() -> None:
    model = digits()
    assert answer(fpgm.RequestError, model, lambda: fpgm.plan(model, [], rate=0.4)) == (
        "example_inputs is an empty list: give at least one example."
    )


def test_an_example_of_the_wrong_shape_ends_with_the_models_own_error() -> None:
    model = digits()
    wrong = torch.randn(1, 3, 8, 8)
    assert answer(ForwardError, model, lambda: fpgm.plan(model, wrong, rate=0.4)) == (
        "The model's own forward fails on the example input: Given groups=1, weight of size "
        "[32, 1, 3, 3], expected input[1, 3, 8, 8] to have 1 channels, but got 3 channels instead "
        f"(RuntimeError in digits_net.py:{DIGITS_FORWARD})."
    )


def test_a_half_precision_model_needs_a_half_precision_example() -> None:
    model = digits().half()
    message = answer(ForwardError, model, lambda: fpgm.plan(model, X, rate=0.4))
    assert message == (
        "The model's own forward fails on the example input: expected scalar type Float but found "
        f"Half (RuntimeError in digits_net.py:{DIGITS_FORWARD}). The example is float32, the "
        "weights are float16: convert one of them."
    )
    with unchanged(model):
        small = fpgm.prune(model, X.half(), rate=0.4)
    assert {p.dtype for p in small.parameters()} == {torch.float16}
    assert small(X.half()).dtype == torch.float16


class OnlyOutputs(nn.Module):
    """One layer, and its channels are the model's output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out


def test_a_model_without_anything_to_prune() -> None:
    model: nn.Module = nn.ReLU()
    assert answer(fpgm.ModelError, model, lambda: fpgm.plan(model, X, rate=0.4)) == (
        "There is nothing to prune: no layer has a unit that can be removed."
    )
    model = OnlyOutputs()
    message = answer(fpgm.ModelError, model, lambda: fpgm.plan(model, X, rate=0.4))
    assert message == (
        "There is nothing to prune: no layer has a unit that can be removed. "
        "The most common reason: the model's output."
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_name_their_layer(bad: float) -> None:
    model = digits()
    with torch.no_grad():
        model.stage1[1].conv1.weight[3, 0, 0, 0] = bad
    assert answer(fpgm.ModelError, model, lambda: fpgm.plan(model, X, rate=0.4)) == (
        "Layer 'stage1.1.conv1' has NaN or infinite weights: fix or reload them before pruning."
    )


def other_models() -> list[tuple[nn.Module, str]]:
    return [
        (resnet(8), "this one has no tensor 'stem.0.weight'."),
        (digits(width=16), "'stem.0.weight' has size 16 along dim 0, the plan expects 32."),
        (
            digits(classes=7),
            "its tensors or their shapes differ from this DigitsNet's beyond what the plan cuts.",
        ),
    ]


@pytest.mark.parametrize("verb", ["compact", "mask_", "verify"])
def test_a_plan_of_another_model(verb: str) -> None:
    plan = fpgm.plan(digits(), X, rate=0.4)
    extra = (X,) if verb == "verify" else ()
    for model, why in other_models():
        message = answer(
            fpgm.PlanError, model, lambda m=model: getattr(fpgm, verb)(m, plan, *extra)
        )
        assert message == f"The plan was made for another model: {why}"


def test_a_criterion_that_returns_nonsense() -> None:
    model = digits()
    message = answer(
        fpgm.RequestError,
        model,
        lambda: fpgm.plan(model, X, rate=0.4, criterion=lambda filters: filters.sum()),
    )
    assert message.startswith("Scores of layer 'stem.0' have shape [] for 32 ")


def test_every_error_is_an_fpgm_error_and_a_familiar_one() -> None:
    for kind in (fpgm.RequestError, fpgm.PlanError):
        assert issubclass(kind, fpgm.FpgmError)
        assert issubclass(kind, ValueError)
    assert issubclass(fpgm.FileError, fpgm.FpgmError)
    assert issubclass(fpgm.FileError, OSError)


def test_an_empty_example_is_refused() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1))
    with pytest.raises(fpgm.RequestError) as error:
        fpgm.plan(net, torch.zeros(0, 3, 8, 8), rate=0.5)
    assert (
        str(error.value)
        == "The example input is empty (0×3×8×8 float32): give one that is not empty."
    )


def test_an_output_keeps_its_width_though_the_example_leaves_it_empty() -> None:
    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.boxes = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            boxes = self.boxes(self.body(x)).flatten(2).transpose(1, 2)
            return [one[: int(photo.mean() > 1)] for one, photo in zip(boxes, x, strict=True)]

    plan = fpgm.plan(Boxes(), torch.zeros(2, 3, 8, 8), rate=0.5, align=1)
    assert [group.name for group in plan.groups] == ["body"]
    small = fpgm.compact(Boxes(), plan)
    assert small(torch.full((1, 3, 8, 8), 2.0))[0].shape == (1, 4)
