"""Published networks, as torchvision and timm build them, pruned at 30 % and counted by torch.

At 30 % about half of the multiply-accumulates go (0.7² = 0.49 stay where both sides of a layer
shrink); 35 % is the least to expect where nothing but the output is frozen. `benchmarks/zoo.py`
does the same with hundreds of models.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fpgm
from fpgm.models.torchvision_import import import_torchvision
from fpgm.pruning.plan import Plan
from fpgm.utils.modules import modules_by_path

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torchvision", "timm")),
        reason="needs the zoo extra: torchvision and timm",
    ),
    # What other packages warn about while they build their models is theirs to mend.
    pytest.mark.filterwarnings("ignore"),
]

Make = Callable[[], nn.Module]


def vision(name: str, **options: Any) -> Make:
    def make() -> nn.Module:
        import_torchvision()
        from torchvision import models

        created: nn.Module = models.get_model(name, weights=None, **options)
        return created

    return make


def timm(name: str) -> Make:
    def make() -> nn.Module:
        import_torchvision()
        import timm as library

        created: nn.Module = library.create_model(name, pretrained=False, num_classes=10)
        return created

    return make


MODELS: dict[str, tuple[Make, int]] = {
    "resnet18": (vision("resnet18"), 64),
    "mobilenet_v2": (vision("mobilenet_v2"), 64),
    "shufflenet_v2_x0_5": (vision("shufflenet_v2_x0_5"), 64),
    "densenet121": (vision("densenet121"), 64),
    "res2net50_14w_8s": (timm("res2net50_14w_8s"), 64),
    "ghostnet_050": (timm("ghostnet_050"), 64),
    "skresnet18": (timm("skresnet18"), 64),
    "ecaresnet26t": (timm("ecaresnet26t"), 64),
    "regnetx_002": (timm("regnetx_002"), 64),
    "regnety_002": (timm("regnety_002"), 64),
    "hrnet_w18_small": (timm("hrnet_w18_small"), 96),
}


def macs(model: nn.Module, *args: Any) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*args)
    return counter.get_total_flops() // 2


def prune_and_check(model: nn.Module, x: Tensor) -> tuple[Plan, nn.Module]:
    """Prune at 30 %; the result is certified, and costs what the plan says."""
    model.eval()
    plan = fpgm.plan(model, x, rate=0.3)
    small = fpgm.compact(model, plan)
    fpgm.verify(model, plan, x, compacted=small).check()
    assert plan.macs_before == macs(model, x)
    assert plan.macs_after == macs(small, x)
    assert plan.params_after == sum(p.numel() for p in small.parameters())
    return plan, small


@pytest.mark.parametrize("name", MODELS)
def test_classifiers_lose_more_than_a_third_and_freeze_only_their_output(name: str) -> None:
    make, size = MODELS[name]
    plan, small = prune_and_check(make(), torch.randn(1, 3, size, size))
    assert {frozen.reason for frozen in plan.frozen} == {"the model's output"}
    assert plan.macs_removed > 0.35
    before = dict(make().named_modules())
    assert all(type(m) is type(before[n]) for n, m in modules_by_path(small).items())


def test_googlenet_is_pruned_together_with_the_heads_that_only_training_uses() -> None:
    model = vision("googlenet", init_weights=False, aux_logits=True)()
    plan, small = prune_and_check(model, torch.randn(2, 3, 64, 64))
    assert plan.macs_removed > 0.35
    assert {layer for frozen in plan.frozen for layer in frozen.layers} == {
        "fc", "aux1.fc2", "aux2.fc2",
    }  # fmt: skip
    shapes = [tuple(t.shape) for t in small.train()(torch.randn(2, 3, 64, 64))]
    assert shapes == [(2, 1000)] * 3
    assert small.aux1.conv.conv.out_channels < model.aux1.conv.conv.out_channels
    assert small.aux1.fc1.out_features < model.aux1.fc1.out_features


def test_a_segmentation_model_returns_its_dict_with_its_maps() -> None:
    model = vision(
        "deeplabv3_mobilenet_v3_large", weights_backbone=None, num_classes=5, aux_loss=True
    )()
    x = torch.randn(1, 3, 64, 64)
    plan, small = prune_and_check(model, x)
    assert plan.macs_removed > 0.35
    with torch.no_grad():
        results = small(x)
    assert {name: tuple(t.shape) for name, t in results.items()} == {
        "out": (1, 5, 64, 64), "aux": (1, 5, 64, 64),
    }  # fmt: skip


DETECTORS: dict[str, dict[str, Any]] = {
    "ssdlite320_mobilenet_v3_large": {},
    "fasterrcnn_mobilenet_v3_large_320_fpn": {"min_size": 64, "max_size": 96},
}


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detector_continues_running_with_its_backbone_pruned(name: str) -> None:
    detector = vision(name, weights_backbone=None, num_classes=3, **DETECTORS[name])().eval()
    x = torch.randn(1, 3, 96, 96)
    maps = [tuple(t.shape) for t in detector.backbone(x).values()]
    before = _losses_and_boxes(detector)
    plan, small = prune_and_check(detector.backbone, x)
    assert plan.macs_removed > 0.35
    assert [tuple(t.shape) for t in small(x).values()] == maps
    detector.backbone = small
    assert _losses_and_boxes(detector) == before


def _losses_and_boxes(detector: nn.Module) -> list[list[str] | None]:
    """Names of what the detector returns in training and in use; None where it cannot run.

    torchvision's compiled operators (nms) are missing beside some builds of torch.
    """
    images = [torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    results: list[list[str] | None] = []
    for training in (True, False):
        detector.train(training)
        try:
            out = detector(images, [target, target]) if training else detector(images)[0]
        except RuntimeError as error:
            assert "C++ ops" in str(error)  # noqa: PT017  (anything else is a failure)
            results.append(None)
        else:
            results.append(sorted(out))
    detector.eval()
    return results
