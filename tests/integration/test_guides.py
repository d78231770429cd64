"""What the guides promise and their pages cannot show: detectors to the end, remembered grids.

torchvision's compiled `nms` does not load beside every build of torch, so a plain one stands in.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.models import digits

needs_zoo = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torchvision", "timm")),
    reason="needs the zoo extra: torchvision and timm",
)


class Gridded(nn.Module):
    """A head that keeps its grid of points until the maps' shape changes, channels included."""

    def __init__(self, widths_are_outputs: bool) -> None:
        super().__init__()
        self.stem, self.maps = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Conv2d(16, 4, 1)
        self.widths_are_outputs = widths_are_outputs
        self.seen: torch.Size | None = None
        self.grid = torch.empty(0)

    def forward(self, x: Tensor) -> Any:
        maps = self.maps(self.stem(x).relu()).relu()
        if self.seen != maps.shape:
            rows, columns = (torch.arange(n).float() for n in maps.shape[2:])
            points = torch.stack(torch.meshgrid(rows, columns, indexing="ij")).view(2, -1)
            self.grid, self.seen = torch.cat([points, points]), maps.shape
        sides = self.head(maps).view(len(x), 4, -1)
        near, far = (self.grid + sides).chunk(2, 1)
        boxes = torch.cat([far - near, torch.ones_like(near), near], 1)
        return (boxes, maps) if self.widths_are_outputs else boxes


@pytest.mark.parametrize("widths_are_outputs", [True, False])
@pytest.mark.parametrize("has_run", [True, False])
def test_a_grid_kept_from_an_earlier_call_freezes_nothing(
    has_run: bool, widths_are_outputs: bool
) -> None:
    net, x = Gridded(widths_are_outputs), torch.randn(1, 3, 8, 8)
    if has_run:
        net.eval()(x)
    small = fpgm.prune(net, x, rate=0.5, align=1)
    assert small.stem.out_channels == 8
    assert small.maps.out_channels == (16 if widths_are_outputs else 8)


class Laid(nn.Module):
    """A vector laid out as maps, right in front of a convolution: how most decoders begin."""

    def __init__(self, how: Callable[[Tensor], Tensor], last: nn.Module) -> None:
        super().__init__()
        self.start, self.last, self.how = nn.Linear(8, 32 * 16), last, how

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.last(self.how(self.start(z)))
        return out


@pytest.mark.parametrize("last", [nn.Conv2d(32, 3, 3), nn.ConvTranspose2d(32, 3, 4, 2, 1)])
def test_the_numbers_of_a_map_go_together(last: nn.Module) -> None:
    net = Laid(lambda x: x.unflatten(1, (-1, 4, 4)), last)
    plan = fpgm.plan(net, torch.randn(2, 8), rate=0.5, align=1)
    assert [(group.units, group.kept) for group in plan.groups] == [(32, 16)]
    (rows,) = [cut.keep for cut in plan.cuts if cut.tensor == "start.weight"]
    assert {row // 16 for row in rows} == {rows[i] // 16 for i in range(0, 256, 16)}
    fpgm.verify(net, plan, torch.randn(2, 8)).check()


def test_a_fixed_number_of_maps_stays_and_reports_it() -> None:
    net = Laid(lambda x: x.view(-1, 32, 4, 4), nn.ConvTranspose2d(32, 16, 4, 2, 1))
    net = nn.Sequential(net, nn.ReLU(), nn.Conv2d(16, 3, 1))
    plan = fpgm.plan(net, torch.randn(2, 8), rate=0.5, align=1)
    assert [group.name for group in plan.groups] == ["0.last"]
    assert plan.frozen[0].layers == ("0.start",)
    assert plan.frozen[0].reason.startswith("a size is fixed in the code")


class Styled(nn.Module):
    """An adaptive instance norm: a style vector scales and shifts normalised channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.InstanceNorm2d(16)
        self.style, self.last = nn.Linear(8, 32), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        scale, shift = self.style(style)[:, :, None, None].chunk(2, 1)
        out: Tensor = self.last(self.norm(self.a(x)) * (1 + scale) + shift)
        return out


def test_a_norm_without_weights_remembers_the_smaller_number() -> None:
    small = fpgm.prune(Styled(), (torch.randn(2, 3, 8, 8), torch.randn(2, 8)), rate=0.5, align=1)
    assert small.norm.num_features == 8  # else torch warns, and warnings are errors here
    assert small.style.out_features == 16


def plain_nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    from torchvision.ops import box_iou

    order, kept = scores.argsort(descending=True), []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        order = order[box_iou(boxes[best][None], boxes[order])[0] <= iou_threshold]
    return torch.stack(kept) if kept else order


@pytest.fixture
def _plain_ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torchvision import ops

    for place in (ops, ops.boxes):
        monkeypatch.setattr(place, "nms", plain_nms)
    # torchvision's own stand-in for roi_align is compiled first, which takes half a minute.
    with torch.compiler.set_stance("force_eager"):
        yield


DETECTORS: dict[str, dict[str, Any]] = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": {
        "min_size": 64,
        "max_size": 96,
        "box_batch_size_per_image": 16,
        **{
            f"rpn_{when}_nms_top_n_{mode}": 20
            for when in ("pre", "post")
            for mode in ("train", "test")
        },
    },
    "ssdlite320_mobilenet_v3_large": {},
}


@needs_zoo
@pytest.mark.usefixtures("_plain_ops")
@pytest.mark.filterwarnings("ignore")  # what torchvision warns about is its own
@pytest.mark.parametrize("name", DETECTORS)
def test_a_detector_with_a_pruned_backbone_trains_detects_and_is_restored(
    name: str, tmp_path: Path
) -> None:
    from torchvision.models import detection

    def make() -> nn.Module:
        result: nn.Module = getattr(detection, name)(
            weights=None, weights_backbone=None, num_classes=3, **DETECTORS[name]
        )
        return result

    detector, x = make(), torch.rand(1, 3, 96, 96)
    plan = fpgm.plan(detector.backbone, x, rate=0.3)
    small = fpgm.compact(detector.backbone, plan)
    fpgm.verify(detector.backbone, plan, x, compacted=small).check()
    before = [t.shape for t in detector.eval().backbone(x).values()]
    detector.backbone = small.eval()
    assert [t.shape for t in detector.backbone(x).values()] == before
    losses = _one_step(detector)
    assert losses
    assert all(loss > 0 for loss in losses.values())
    results = _detect(detector)
    assert [sorted(one) for one in results] == [["boxes", "labels", "scores"]] * 2
    fpgm.save(detector, tmp_path / "detector.safetensors")
    again = fpgm.load(tmp_path / "detector.safetensors", make)
    for one, other in zip(results, _detect(again), strict=True):
        assert torch.equal(one["boxes"], other["boxes"])


def _one_step(detector: nn.Module) -> dict[str, float]:
    target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    optimizer = torch.optim.SGD(detector.parameters(), lr=1e-4)
    losses = detector.train()(_pictures(), [target, target])
    sum(losses.values()).backward()
    optimizer.step()
    return {name: loss.item() for name, loss in losses.items()}


@torch.no_grad()
def _detect(detector: nn.Module) -> list[dict[str, Tensor]]:
    results: list[dict[str, Tensor]] = detector.eval()(_pictures())
    return results


def _pictures() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(3, 64, 80, generator=generator), torch.rand(3, 72, 64, generator=generator)]


@needs_zoo
@pytest.mark.filterwarnings("ignore")
def test_norms_that_a_trained_detector_holds_fixed_are_cut_and_stay_fixed() -> None:
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    net = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=2)
    for norm in (m for m in net.modules() if type(m).__name__ == "FrozenBatchNorm2d"):
        for buffer in norm.buffers():
            buffer.uniform_(0.5, 1.5)
    small = fpgm.prune(net, torch.rand(1, 3, 64, 64), rate=0.3)
    assert len(small.body.layer1[0].bn1.running_mean) == small.body.layer1[0].conv1.out_channels
    fixed = [[n for n, p in m.named_parameters() if not p.requires_grad] for m in (net, small)]
    assert fixed[0] == fixed[1] != []


@pytest.mark.filterwarnings("ignore")
def test_a_pruned_network_of_transformers_is_restored_by_our_file_only(tmp_path: Path) -> None:
    """Why the page says so: the config that `save_pretrained` writes has the original's widths."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic"
    )
    make = partial(transformers.AutoModelForImageClassification.from_config, config)
    x = torch.randn(1, 3, 32, 32)
    small = fpgm.prune(make(), {"pixel_values": x}, rate=0.4).eval()
    small.save_pretrained(tmp_path / "theirs")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(small).from_pretrained(tmp_path / "theirs")
    guessed = type(small).from_pretrained(tmp_path / "theirs", ignore_mismatched_sizes=True)
    assert not torch.allclose(guessed.eval()(x).logits, small(x).logits)
    fpgm.save(small, tmp_path / "ours.safetensors")
    again = fpgm.load(tmp_path / "ours.safetensors", make).eval()
    assert torch.equal(again(x).logits, small(x).logits)


def test_accelerate_saves_and_loads_the_pruner(tmp_path: Path) -> None:
    """What was zero when the state was saved is zero after it was loaded and trained on."""
    pytest.importorskip("accelerate")
    from fpgm.training.distributed import make_accelerator

    x = torch.randn(4, 1, 8, 8)

    def begin() -> tuple[Any, Any, Any, fpgm.SoftPruner]:
        model = digits()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        accelerator = make_accelerator("no")
        net, optimizer = accelerator.prepare(model, optimizer)
        pruner = fpgm.SoftPruner(net, x, rate=0.4, mode="hard", optimizer=optimizer)
        accelerator.register_for_checkpointing(pruner)
        return accelerator, net, optimizer, pruner

    accelerator, net, _, pruner = begin()
    pruner.step()
    accelerator.save_state(str(tmp_path))
    silent = [p == 0 for p in net.parameters()]
    assert any(zero.any() for zero in silent)
    accelerator, again, optimizer, other = begin()
    assert other.plan is None
    accelerator.load_state(str(tmp_path))
    assert (other.plan, other.epoch) == (pruner.plan, 1)
    for parameter in again.parameters():  # a gradient that would move every weight
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    filters = [(zero, p) for zero, p in zip(silent, again.parameters(), strict=True) if p.ndim == 4]
    assert all(torch.equal(p == 0, zero) for zero, p in filters)
    # Plain values: a loader that refuses pickled classes takes them as well.
    state = torch.load(tmp_path / "custom_checkpoint_0.pkl", weights_only=True)
    assert state == pruner.state_dict()


REGISTERED = """
import fpgm, timm

@timm.models.register_model
def pruned_for_a_test(pretrained=False, **options):
    return fpgm.load({file!r}, lambda: timm.create_model("mobilenetv3_small_050", num_classes=10))
"""


@needs_zoo
@pytest.mark.filterwarnings("ignore")
def test_a_pruned_model_has_a_name_in_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    net, x = timm.create_model("mobilenetv3_small_050", num_classes=10), torch.randn(1, 3, 64, 64)
    small = fpgm.prune(net, x, rate=0.4).eval()
    fpgm.save(small, tmp_path / "small.safetensors")
    source = REGISTERED.format(file=str(tmp_path / "small.safetensors"))
    (tmp_path / "own_models.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    importlib.import_module("own_models")
    again = timm.create_model("pruned_for_a_test", num_classes=10).eval()
    assert torch.equal(again(x), small(x))
