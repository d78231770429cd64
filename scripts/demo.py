"""Halve the work of a trained network on real images: prune, recover, verify, time and report.

    make demo                           # or: python scripts/demo.py
    python scripts/demo.py --macs 0.6   # prune harder

The wide ResNet and 3,500 CIFAR-10 images come with the package, so nothing is downloaded. Every
step is a command that you can run yourself. Takes about a minute on two cores.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RUNTIMES = {"eager": "PyTorch", "onnxruntime": "ONNX Runtime"}

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--macs", type=float, default=0.5, help="fraction of MACs to remove")
parser.add_argument("--images", type=int, default=2000, help="calibration images, without labels")
parser.add_argument("--test", type=int, default=1000, help="test images")
parser.add_argument("--seconds", type=float, default=2, help="seconds of timing per runtime")
parser.add_argument("--out", type=Path, default=Path("runs/demo"))


def run_steps(wanted: argparse.Namespace) -> None:
    """Run one command after the other; the first that fails ends the demo."""
    backends = " ".join(f"--backend {name}" for name in RUNTIMES)
    steps = {
        "Prune, verify, and recover accuracy without labels": (
            f"prune resnet11_wide --weights shipped --macs {wanted.macs:g} --allocate sensitivity "
            f"--recover solve --data cifar10-sample --images {wanted.images} "
            f"--test {wanted.test} --force --out"
        ),
        "Verify again, from the files alone": "verify",
        "Time it against the original": (
            f"bench {backends} --batch 64 --seconds {wanted.seconds:g} --keep"
        ),
        "Write the report": "report",
    }
    for title, words in steps.items():
        command = ["fpgm", *words.split(), str(wanted.out)]
        print(f"\n# {title}\n$ {shlex.join(command)}\n", flush=True)
        done = subprocess.run([sys.executable, "-m", "fpgm", *command[1:]], check=False)
        if done.returncode:
            sys.exit(done.returncode)


def describe_outcome(folder: Path, seconds: float) -> str:
    """Say what the demo cost and gained, from the files that it wrote."""
    results, bench = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("results.json", "bench.json")
    )
    costs, accuracy = results["achieved"], results["accuracy"]
    place = shlex.quote(str(folder))
    lines = [
        f"Done in {seconds:.0f} seconds, without labels or downloads.",
        (
            f"Accuracy: {accuracy['original']:.1%} before, {accuracy['recovered']:.1%} after, "
            f"on {results['test_images']:,} test images."
        ),
        (
            f"Work: {costs['macs_before'] / 1e6:.0f} million MACs before, "
            f"{costs['macs_after'] / 1e6:.0f} million after ({-costs['macs_removed']:.0%})."
        ),
        (
            f"Size: {costs['params_before'] * 4 / 1e6:.1f} MB before, "
            f"{costs['params_after'] * 4 / 1e6:.1f} MB after."
        ),
        *(f"Speed: {describe_speed(row)}." for row in bench["rows"]),
        (
            f"Files: the model is {folder / 'small.safetensors'}; open {folder / 'report.html'} "
            "in a browser."
        ),
        f"Next: fpgm export {place} --to onnx --data cifar10-sample",
    ]
    return "\n".join(lines)


def describe_speed(row: dict[str, Any]) -> str:
    """Say how much faster the pruned model is in one runtime."""
    pruned = row["figures"][1]
    text = f"{pruned['faster']:.2f} times as fast in {RUNTIMES[row['backend']]}"
    return text if row["crowd"] is None else f"{text}, but the machine was busy"


def main() -> None:
    wanted = parser.parse_args()
    started = time.perf_counter()
    run_steps(wanted)
    print(f"\n{describe_outcome(wanted.out, time.perf_counter() - started)}")


if __name__ == "__main__":
    main()
