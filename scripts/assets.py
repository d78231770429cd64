"""Make the assets of `fpgm.models`: a trained ResNet-20 and the first pictures of CIFAR-10.

    fpgm data cifar10
    fpgm train cifar10-resnet20-baseline --out runs/resnet20
    python scripts/assets.py runs/resnet20

Weights go from float32 to float16, which halves the file; both accuracies are printed and kept,
with the run's figures, in resnet20.json.
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
from fpgm.models.assets import FOLDER, PICTURES, WEIGHTS
from fpgm.utils.atomic_io import write_whole

# -----------------------------------------------------------------------------
train_pictures = 900
test_pictures = 1000  # together just below 4 MB
# -----------------------------------------------------------------------------

run = Path(sys.argv[1])
data = cifar10.read(cifar10.default_root())
train = Images(data.train_images, data.train_labels)
test = Images(data.test_images, data.test_labels)
write_sample(PICTURES, train.first(train_pictures), test.first(test_pictures))


@torch.no_grad()
def accuracy(state: dict[str, Tensor], pictures: Images) -> float:
    model = build("resnet20").eval()
    model.load_state_dict(state)
    right = 0
    for images, labels in zip(pictures.images.split(500), pictures.labels.split(500), strict=True):
        right += int((model(CIFAR10.apply(images)).argmax(1) == labels).sum())
    return right / len(pictures)


full = load_file(run / "weights.safetensors")
half = {k: v.half() if v.is_floating_point() else v for k, v in full.items()}
write_whole(WEIGHTS, lambda stream: stream.write(save(half, metadata={"format": "pt"})))

made_with = json.loads((run / "environment.json").read_text())
told = {
    "recipe": json.loads((run / "recipe.json").read_text()),
    "versions": {key: made_with[key] for key in ("fpgm", "torch", "python", "git", "threads")},
    "epochs": [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()],
    "accuracy": {
        "float32, 10,000 test pictures": accuracy(full, test),
        "float16, 10,000 test pictures": accuracy(half, test),
        f"float16, the {test_pictures:,} that ship": accuracy(half, test.first(test_pictures)),
    },
}
(FOLDER / "resnet20.json").write_text(json.dumps(told, indent=1) + "\n")
for what, share in told["accuracy"].items():
    print(f"{share:.2%}  {what}")
for file in (WEIGHTS, PICTURES):
    print(f"{file.stat().st_size:>9,} bytes  {file.name}")
