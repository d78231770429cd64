"""Real Ultralytics detectors: prune, train, validate, predict, export; every output is compared.

Each network is built from its YAML file with random weights, so nothing is downloaded. The work is
done in a process of its own, because the package sets threads, seeds and printing for all of torch.
"""

from __future__ import annotations

import copy
import importlib.util
import multiprocessing
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.test_guides import plain_nms
from torch import Tensor, nn

import fpgm
from fpgm.exporters.onnx import OnnxModule
from fpgm.models.torchvision_import import import_torchvision

NEEDED = ("ultralytics", "cv2", "polars", "torchvision", "onnx", "onnxruntime", "onnxscript", "PIL")
INSTALL = (
    "pip install --no-deps ultralytics ultralytics-thop opencv-python-headless torchvision && "
    'pip install matplotlib pillow polars psutil pyyaml requests "fpgm[export]"'
)
CLASSES, SIZE = 3, 64
SETTINGS = {"imgsz": SIZE, "device": "cpu", "verbose": False}

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "detectors.md"
FAST = {
    "imgsz=640": f"imgsz={SIZE}, device='cpu', plots=False",
    "640, 640": f"{SIZE}, {SIZE}",
    "epochs=100": "epochs=1, batch=2, workers=0, amp=False",
}
"""What the guide's blocks say, and what is run instead."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason=f"needs Ultralytics: {INSTALL}",
    ),
]


@dataclass(frozen=True)
class Run:
    """What happened to one network."""

    certificate: fpgm.Certificate
    macs_removed: float
    halves: dict[str, tuple[int, int]]
    """Of every block that splits its channels in two: the size it remembers, and the real one."""
    train_mode: list[tuple[Tensor, Tensor]]
    """Outputs of the compact network and of the masked original in train mode."""
    parameters: tuple[int, int]
    """By the plan, and after training."""
    largest_update: float
    metrics: dict[str, dict[str, float]]
    """Of validation, by which network."""
    detections: dict[str, Tensor]
    """In one image, by which network."""
    files: dict[str, tuple[Tensor, Tensor]]
    """By exported file: outputs of ONNX Runtime and of PyTorch."""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """A process that has imported Ultralytics: offline, with settings of its own."""
    folder = tmp_path_factory.mktemp("ultralytics")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _import_ultralytics, (folder,)) as process:
        yield process


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("yolov8n", ["one2many"]),
        ("yolo11n", ["one2many"]),
        ("yolov10n", ["one2many", "one2one"]),  # the second needs no NMS
    ],
)
def test_a_pruned_yolo_trains_validates_predicts_and_exports(
    name: str, heads: list[str], process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    run: Run = process.submit(_run, name, heads, tmp_path).result()
    run.certificate.check()
    assert run.macs_removed > 0.35
    assert run.halves
    assert all(remembered == real for remembered, real in run.halves.values())
    for compact, masked in run.train_mode:
        assert_equal(compact, masked)
    assert run.parameters[0] == run.parameters[1]
    assert run.largest_update > 1e-4
    for compact, masked in (("compact", "masked"), ("onnx", "trained")):
        assert run.metrics[compact] == pytest.approx(run.metrics[masked], abs=1e-3)
        assert_equal(run.detections[compact].mT, run.detections[masked].mT)
    assert run.metrics["compact"]["metrics/mAP50(B)"] > 0
    assert len(run.files) == 2 * len(heads)
    for results, wanted in run.files.values():
        assert_equal(results, wanted)


def test_the_blocks_of_the_guide_run(process: ProcessPoolExecutor, tmp_path: Path) -> None:
    pruned, saved, files = process.submit(_run_guide, tmp_path).result()
    assert pruned == pytest.approx(0.4, abs=0.02)
    assert_equal(*saved)
    for results, wanted in files:
        assert_equal(results, wanted)


def assert_equal(results: Tensor, wanted: Tensor) -> None:
    """Compare every channel (boxes in pixels, scores up to one) on its own scale."""
    assert results.shape == wanted.shape
    assert results.numel()
    scale = wanted.abs().amax((0, 2)).clamp(min=1e-6)
    error = (results - wanted).abs().amax((0, 2)) / scale
    assert bool((error < 1e-3).all()), f"relative error by channel: {error.tolist()}"


def _import_ultralytics(folder: Path) -> None:
    torch.set_num_threads(1)
    # Nothing is downloaded, installed or reported.
    os.environ.update(YOLO_OFFLINE="1", YOLO_AUTOINSTALL="0", YOLO_VERBOSE="0")
    os.environ.update(YOLO_CONFIG_DIR=str(folder))
    ops = import_torchvision().ops
    ops.nms = ops.boxes.nms = plain_nms  # the compiled one does not load beside every torch
    from ultralytics import settings

    settings.update(sync=False)


def _run(name: str, heads: list[str], folder: Path) -> Run:
    os.chdir(folder)
    torch.manual_seed(0)
    data, x = write_images(folder), torch.rand(2, 3, SIZE, SIZE)
    masked = build(name)
    masked.model[-1].export = True
    plan = fpgm.plan(masked, x, rate=0.3)
    small = fpgm.compact(masked, plan)
    certificate = fpgm.verify(masked, plan, x, compacted=small)
    masked.model[-1].export = small.model[-1].export = False
    fpgm.mask_(masked, plan)
    label_images(wrap(name, masked), folder)
    train_mode = zip(train_outputs(small, x), train_outputs(masked, x), strict=True)
    networks = {"compact": wrap(name, small), "masked": wrap(name, masked)}
    before = copy.deepcopy(small)
    best = train(name, small, data)
    networks["trained"] = wrap(best)
    trained = copy.deepcopy(networks["trained"].model)
    files = {}
    for head in heads:
        files[f"{head} by Ultralytics"] = run_theirs(best, head, x)
        files[f"{head} by fpgm"] = run_ours(best, head, x)
    networks["onnx"] = wrap(export(best, "one2many"))
    return Run(
        certificate,
        plan.macs_removed,
        dict(halves(small)),
        list(train_mode),
        (plan.params_after, sum(p.numel() for p in trained.parameters())),
        max(
            float((new - old).abs().max())
            for new, old in zip(trained.parameters(), before.parameters(), strict=True)
        ),
        {key: validate(network, data) for key, network in networks.items()},
        {key: detect(network, folder) for key, network in networks.items()},
        files,
    )


def _run_guide(folder: Path) -> Any:
    os.chdir(folder)
    torch.manual_seed(0)
    write_images(folder).rename("coco8.yaml")
    Path("images/val/0.png").rename("image.png")
    wrap("yolov8n", build("yolov8n")).save("yolov8n.pt")
    section = GUIDE.read_text(encoding="utf-8").partition("## Ultralytics\n")[2]
    names: dict[str, Any] = {"__name__": "guide"}
    for block in re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        for said, fast in FAST.items():
            block = block.replace(said, fast)
        exec(compile(block, str(GUIDE), "exec"), names)
    small, x = names["small"], names["x"]
    again = names["again"].eval()
    again.model[-1].export = True
    with torch.no_grad():
        wanted, saved = small(x), again(x)
    files = [names["path"], "yolov8n-small.onnx"]
    results = [OnnxModule(Path(file).read_bytes())(x) for file in files]
    return names["plan"].macs_removed, (saved, wanted), [(one, wanted) for one in results]


def write_images(folder: Path) -> Path:
    """Write small images, boxes for those to train on, and the file that describes them."""
    from PIL import Image

    for part in ("train", "val"):
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True)
        for i in range(4):
            pixels = torch.randint(256, (SIZE, SIZE, 3), dtype=torch.uint8)
            left, top = torch.randint(32, (2,)).tolist()
            pixels[top : top + 24, left : left + 24, i % CLASSES] = 255
            Image.fromarray(pixels.numpy()).save(folder / "images" / part / f"{i}.png")
            box = f"{i % CLASSES} {(left + 12) / SIZE} {(top + 12) / SIZE} {24 / SIZE} {24 / SIZE}"
            (folder / "labels" / part / f"{i}.txt").write_text(box)
    data = folder / "data.yaml"
    data.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [a, b, c]\n")
    return data


def label_images(network: Any, folder: Path) -> None:
    """Label the images for validation with what a network finds, so that its metrics are high."""
    for image in sorted((folder / "images" / "val").iterdir()):
        boxes = network.predict(str(image), conf=0.5, **SETTINGS)[0].boxes
        rows = torch.cat([boxes.cls[:, None], boxes.xywhn], 1)
        rows = rows[(rows[:, 3:] > 0.1).all(1)]
        lines = [" ".join(map(str, [int(kind), *box])) for kind, *box in rows.tolist()]
        (folder / "labels" / "val" / f"{image.stem}.txt").write_text("\n".join(lines))


def build(name: str) -> nn.Module:
    """Build a network from its YAML file, with statistics and heads as different as trained ones.

    A fresh network scores all places alike, and equal outputs would prove little.
    """
    from ultralytics.nn.tasks import DetectionModel

    model: nn.Module = DetectionModel(f"{name}.yaml", nc=CLASSES, verbose=False)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    usual = norms[0].momentum
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model(torch.rand(8, 3, SIZE, SIZE))
        for layer in model.model[-1].modules():
            if type(layer) is nn.Conv2d and layer.bias is not None:
                layer.weight.normal_(0, 0.05)
                layer.bias.normal_()
                if layer.out_channels == 64:  # sides of 0 to 15 strides, four times: short ones
                    layer.bias.copy_(-(torch.arange(64.0) % 16))
    for norm in norms:
        norm.momentum = usual
    return model.eval()


def halves(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    from ultralytics.nn.modules.block import C2f

    for name, block in model.named_modules():
        if isinstance(block, C2f):
            yield name, (block.c, block.cv1.conv.out_channels // 2)


def wrap(source: str | Path, model: nn.Module | None = None) -> Any:
    """Open a file as Ultralytics does; a model, if given, takes the place of what was in it."""
    from ultralytics import YOLO

    network = YOLO(f"{source}.yaml" if model is not None else source, "detect", verbose=False)
    if model is not None:
        network.model = copy.deepcopy(model)
    return network


def train_outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What a model hands to its loss: of every head the boxes and the scores."""
    with torch.no_grad():
        out = copy.deepcopy(model).train()(x)
    heads = out.values() if "one2many" in out else [out]
    return [head[part] for head in heads for part in ("boxes", "scores")]


def train(name: str, model: nn.Module, data: Path) -> Path:
    """Train one epoch in Ultralytics' own trainer; returns its checkpoint."""
    from ultralytics.models.yolo.detect import DetectionTrainer

    class PrunedTrainer(DetectionTrainer):  # type: ignore[misc]
        def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> Any:
            return model

    network = wrap(name, model)
    network.train(
        trainer=PrunedTrainer, data=str(data), epochs=1, batch=2, optimizer="SGD",
        warmup_epochs=0, amp=False, plots=False, workers=0, **SETTINGS,
    )  # fmt: skip
    best: Path = network.trainer.best
    return best


def validate(network: Any, data: Path) -> dict[str, float]:
    metrics = copy.deepcopy(network).val(
        data=str(data), plots=False, workers=0, rect=False, **SETTINGS
    )
    results: dict[str, float] = metrics.results_dict
    return results


def detect(network: Any, folder: Path) -> Tensor:
    image = str(folder / "images" / "val" / "0.png")
    results: Tensor = network.predict([image, image], conf=0.5, **SETTINGS)[:1]
    return torch.stack([result.boxes.data for result in results])


def export(checkpoint: Path, head: str) -> Path:
    nms = False if head == "one2one" else None
    return Path(
        wrap(checkpoint).export(format="onnx", nms=nms, batch=2, simplify=False, **SETTINGS)
    )


def open_head(checkpoint: Path, head: str) -> nn.Module:
    """Open a trained network that returns what its exported file returns."""
    model: nn.Module = wrap(checkpoint).model.float().eval()
    model.end2end = head == "one2one"
    model.model[-1].export = True
    return model


def run_theirs(checkpoint: Path, head: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Run the file that Ultralytics exports, and the network."""
    results = OnnxModule(export(checkpoint, head).read_bytes())(x)
    with torch.no_grad():
        wanted = open_head(checkpoint, head)(x)
    if head == "one2one":
        results, wanted = align_rows(results, wanted).mT, wanted.mT
    return results, wanted


def align_rows(results: Tensor, wanted: Tensor) -> Tensor:
    """Put detections, which are sorted by score, in the other's order: equal scores have none."""
    scale = wanted.abs().amax((0, 1))
    nearest = torch.cdist(wanted / scale, results / scale).argmin(2)
    return results.gather(1, nearest[..., None].expand(-1, -1, results.shape[2]))


def run_ours(checkpoint: Path, head: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Run the file that `fpgm.export` writes, and the network, before detections are sorted."""
    model = open_head(checkpoint, head)
    model.model[-1].postprocess = lambda boxes: boxes
    fpgm.export(model, x, "ours.onnx")
    with torch.no_grad():
        results, wanted = OnnxModule(Path("ours.onnx").read_bytes())(x), model(x)
    return (results.mT, wanted.mT) if head == "one2one" else (results, wanted)
