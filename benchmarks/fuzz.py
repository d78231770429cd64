"""Damage saved models in every way and load them: a clear error or a whole model, nothing else.

    python benchmarks/fuzz.py --files 100000 --jobs 2

A file that ends in anything but one of the package's own one-line errors, or makes Python run or
open something else, is a failure; its seed is written down.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.fuzzing import MODELS, damage  # noqa: E402

HERE = Path(__file__).resolve().parent
CHUNK = 500
MORE = "insertions, other lengths, other headers and other plans, also with their digest made right"


def chunk(start: int, count: int) -> tuple[Counter[str], list[str]]:
    """Outcomes of some seeds, and what went wrong."""
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(start, start + count):
            outcome = one(Path(folder), seed)
            if outcome in ("refused", "loaded"):
                found[outcome] += 1
            else:
                wrong.append(f"seed {seed}: {outcome}")
    return found, wrong


def one(folder: Path, seed: int) -> str:
    """What became of a file, in a word if all is well."""
    try:
        return damage(folder, seed)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    start = time.perf_counter()
    total: Counter[str] = Counter()
    wrong: list[str] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        starts = range(0, options.files, CHUNK)
        sizes = [min(CHUNK, options.files - first) for first in starts]
        for number, (found, bad) in enumerate(pool.map(chunk, starts, sizes)):
            total += found
            wrong += bad
            print(f"\r{(number + 1) * CHUNK} of {options.files}, {len(wrong)} wrong", end="")
    print()
    command = shlex.join(["python", "benchmarks/fuzz.py", "--files", str(options.files)])
    result = {
        "command": command,
        "files": options.files,
        "models": list(MODELS),
        "refused": total["refused"],
        "loaded": total["loaded"],
        "failures": wrong,
        "seconds": round(time.perf_counter() - start),
    }
    (HERE / "fuzz.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = [
        "# Damaged files",
        "",
        f"    {command}",
        "",
        f"{options.files:,} saved models ({', '.join(MODELS)}) with flipped bits, cuts, {MORE}.",
        "",
        "| refused with one clear line | loaded whole | anything else |",
        "|--:|--:|--:|",
        f"| {total['refused']:,} | {total['loaded']:,} | {len(wrong)} |",
        *(f"\n- {line}" for line in wrong[:20]),
    ]
    (HERE / "fuzz.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
