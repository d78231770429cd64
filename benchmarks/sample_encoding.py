"""Compare encodings of the calibration images that come with the package.

    fpgm data cifar10
    python benchmarks/sample_encoding.py

The wide ResNet is pruned by half of its MACs and recovered by least squares on the first training
images, once for every encoding. Error and accuracy are those on the last 2,000 training images,
which are not calibration images. JPEG is written through Pillow, which the package does not need.
"""

import argparse
import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fpgm
from fpgm.data import cifar10
from fpgm.data.cifar10_sample import Bytes, pack, pack_lossy, unpack_lossy
from fpgm.data.registry import CIFAR10
from fpgm.models import build
from fpgm.models.checkpoint import load_weights
from fpgm.utils.tables import markdown_table

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--weights", default="shipped", help="of resnet11_wide")
parser.add_argument("--images", type=int, default=2000, help="to recover with")
options = parser.parse_args()

Encoding = Callable[[Bytes], tuple[int, Bytes]]
"""Returns the compressed size, and the images as they are read back."""


def lossless(images: Bytes) -> tuple[int, Bytes]:
    return compressed(pack(images)), images


def differences(step: int) -> Encoding:
    def encode(images: Bytes) -> tuple[int, Bytes]:
        levels = ((images.astype(np.int16) + step // 2) // step).astype(np.uint8)
        return compressed(pack(levels)), (levels.astype(np.int16) * step).clip(0, 255).astype("u1")

    return encode


def cosines(step: int) -> Encoding:
    def encode(images: Bytes) -> tuple[int, Bytes]:
        packed = pack_lossy(images, steps := (step, 2 * step, 2 * step))
        return compressed(packed), unpack_lossy(packed, steps)

    return encode


def jpeg(quality: int) -> Encoding:
    def encode(images: Bytes) -> tuple[int, Bytes]:
        from PIL import Image

        count = len(images)  # one tall picture, so that headers do not count
        file = io.BytesIO()
        tall = np.ascontiguousarray(images.transpose(0, 2, 3, 1)).reshape(count * 32, 32, 3)
        Image.fromarray(tall).save(file, "JPEG", quality=quality, subsampling=0, optimize=True)
        back = np.asarray(Image.open(file)).reshape(count, 32, 32, 3).transpose(0, 3, 1, 2)
        return len(file.getvalue()), np.ascontiguousarray(back)

    return encode


def compressed(array: Bytes | np.ndarray) -> int:
    return len(zlib.compress(array.tobytes()))


@torch.no_grad()
def outputs(model: nn.Module) -> Tensor:
    return torch.cat([model(CIFAR10.apply(images)) for images in held_out.split(250)])


def accuracy(logits: Tensor) -> float:
    return float((logits.argmax(1) == held_out_labels).double().mean())


data = cifar10.read(cifar10.default_root())
calibration = data.train_images[: options.images]
held_out, held_out_labels = data.train_images[-2000:], data.train_labels[-2000:]
model = load_weights(build("resnet11_wide"), options.weights).eval()
plan = fpgm.plan(model, torch.zeros(1, 3, 32, 32), macs=0.5)

encodings: dict[str, tuple[int, Encoding]] = {
    "none: differences of neighbors": (options.images, lossless),
    "differences, quantized by 8": (options.images, differences(8)),
    "cosine coefficients, quantized by 8 and 16 (shipped)": (options.images, cosines(8)),
    "cosine coefficients, quantized by 16 and 32": (options.images, cosines(16)),
    "JPEG of quality 90": (options.images, jpeg(90)),
}
original = outputs(model)
rows = []
for name, (count, encode) in encodings.items():
    images = calibration[:count].numpy()
    size, back = encode(images)
    batches = CIFAR10.apply(torch.from_numpy(back)).split(100)
    logits = outputs(fpgm.recover(model, plan, batches, images=count))
    rows.append({
        "encoding": name,
        "images": count,
        "bytes_per_image": size / count,
        "rms_error": float(np.sqrt(np.mean((back.astype(float) - images) ** 2))),
        "output_error": float((logits - original).square().sum() / original.square().sum()),
        "accuracy": accuracy(logits),
    })  # fmt: skip
    print(rows[-1], flush=True)

result = {
    "model": "resnet11_wide",
    "macs_removed": plan.macs_removed,
    "original_accuracy": accuracy(original),
    "held_out_images": len(held_out),
    "rows": rows,
}
here = Path(__file__).with_suffix(".json")
here.write_text(json.dumps(result, indent=1) + "\n")
lines = [
    "# Encodings of the calibration images",
    "",
    f"resnet11_wide, {plan.macs_removed:.1%} of its MACs removed, recovered by least squares.",
    (f"Measured on {len(held_out):,} other training images: the original has "
    f"{accuracy(original):.2%}."),
    "",
    markdown_table(
        ("encoding", "images", "bytes per image", "total", "RMS error", "output error", "accuracy"),
        [
            (row["encoding"], f"{row['images']:,}", f"{row['bytes_per_image']:,.0f}",
             f"{row['images'] * row['bytes_per_image'] / 1e6:.2f} MB", f"{row['rms_error']:.1f}",
             f"{row['output_error']:.4f}", f"{row['accuracy']:.2%}")
            for row in rows
        ],
    ),
    "",
    "`python benchmarks/sample_encoding.py` wrote this page.",
]  # fmt: skip
here.with_suffix(".md").write_text("\n".join(lines) + "\n")
