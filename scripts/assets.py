"""Make the assets of `fpgm.models`: trained networks and the first CIFAR-10 images.

    fpgm data cifar10
    fpgm train cifar10-resnet20-baseline --out runs/resnet20
    fpgm train cifar10-resnet11_wide-baseline --out runs/wide
    python scripts/assets.py                          # the images
    python scripts/assets.py runs/resnet20 runs/wide  # the images and the networks of these runs

Weights are converted from float32 to float16, which halves the file. Both accuracies are printed
and saved, with the metrics of the run, in a JSON file beside the weights.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from fpgm.data import cifar10
from fpgm.data.cifar10_sample import write_sample
from fpgm.data.in_memory import Images
from fpgm.data.registry import CIFAR10
from fpgm.models import build
from fpgm.models.assets import SAMPLE_IMAGES, SHIPPED_WEIGHTS
from fpgm.utils.atomic_io import atomic_write_stream

# -----------------------------------------------------------------------------
train_images = 2500
test_images = 1000  # together below 4 MB
# -----------------------------------------------------------------------------

data = cifar10.read(cifar10.default_root())
train = Images(data.train_images, data.train_labels)
test = Images(data.test_images, data.test_labels)


@torch.no_grad()
def accuracy(name: str, state: dict[str, Tensor], data: Images) -> float:
    model = build(name).eval()
    model.load_state_dict(state)
    right = 0
    for images, labels in zip(data.images.split(500), data.labels.split(500), strict=True):
        right += int((model(CIFAR10.apply(images)).argmax(1) == labels).sum())
    return right / len(data)


def write_network(run: Path) -> Path:
    recipe = json.loads((run / "recipe.json").read_text())
    name = recipe["model"]["name"]
    full = load_file(run / "weights.safetensors")
    half = {k: v.half() if v.is_floating_point() else v for k, v in full.items()}
    file = SHIPPED_WEIGHTS[name]
    atomic_write_stream(file, lambda stream: stream.write(save(half, metadata={"format": "pt"})))
    made_with = json.loads((run / "environment.json").read_text())
    record = {
        "recipe": recipe,
        "versions": {key: made_with[key] for key in ("fpgm", "torch", "python", "git", "threads")},
        "epochs": [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()],
        "accuracy": {
            "float32, 10,000 test pictures": accuracy(name, full, test),
            "float16, 10,000 test pictures": accuracy(name, half, test),
            f"float16, the {test_images:,} that ship": accuracy(
                name, half, test.take_first(test_images)
            ),
        },
    }
    file.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    for what, value in record["accuracy"].items():
        print(f"{value:.2%}  {name}, {what}")
    return file


write_sample(SAMPLE_IMAGES, train.take_first(train_images), test.take_first(test_images))
for written in (SAMPLE_IMAGES, *(write_network(Path(run)) for run in sys.argv[1:])):
    print(f"{written.stat().st_size:>9,} bytes  {written.name}")
