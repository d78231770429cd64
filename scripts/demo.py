"""Prune a trained network on real images: verify, recover, time and report it.

    make demo                           # or: python scripts/demo.py
    python scripts/demo.py --rate 0.5   # prune harder

The trained ResNet-20 and 1,900 CIFAR-10 images come with the package, so nothing is
downloaded. Every step is a command that you can run yourself. Takes under two minutes on two cores.
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--rate", type=float, default=0.3, help="fraction of filters to remove")
parser.add_argument(
    "--distil", type=float, default=20, help="seconds of distillation from the original"
)
parser.add_argument("--seconds", type=float, default=2, help="seconds of timing per runtime")
parser.add_argument("--out", type=Path, default=Path("runs/demo"))
wanted = parser.parse_args()

out = str(wanted.out)
steps = {
    "Prune, verify, and recover accuracy without labels": (
        f"prune resnet20 --weights shipped --rate {wanted.rate:g} --recover solve "
        f"--distil {wanted.distil:g} --data cifar10-sample --force --out"
    ),
    "Verify again, from the files alone": "verify",
    "Time it against the original": (
        "bench --backend eager --backend onnxruntime --batch 64 "
        f"--seconds {wanted.seconds:g} --keep"
    ),
    "Write the report": "report",
}

started = time.perf_counter()
for title, words in steps.items():
    command = ["fpgm", *words.split(), out]
    print(f"\n# {title}\n$ {shlex.join(command)}\n", flush=True)
    done = subprocess.run([sys.executable, "-m", "fpgm", *command[1:]], check=False)
    if done.returncode:
        sys.exit(done.returncode)
print(f"\n{time.perf_counter() - started:.0f} s. Open {wanted.out / 'report.html'} in a browser.")
