"""Load damaged saved models: each must give a clear error or a complete model.

    python benchmarks/fuzz.py --files 20000 --forged 20000 --jobs 2

Forged files are changed deliberately and given a matching digest. A file is a failure if it raises
anything but one of the package's own one-line errors, makes Python run or open something else, or
exceeds the limits on time and memory; its seed is recorded.
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
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.helpers.fuzzing import MODELS, MOST_BYTES, MOST_SECONDS, damage, forge  # noqa: E402

HERE = Path(__file__).resolve().parent
CHUNK = 500
VARIANTS = {"damaged": damage, "forged": forge}
ABOUT = {
    "damaged": "flipped bits, truncations, insertions, changed lengths, headers and plans",
    "forged": "changed plans, metadata and tensors with a matching digest: huge or negative "
    "numbers, wrong types, very long text or escape codes, repeated, empty or very long lists, "
    "renamed keys, deep nesting, tensors of other dtypes and shapes",
}


def chunk(variant: str, start: int, count: int) -> tuple[Counter[str], list[str]]:
    """Load the files of some seeds; return counts of the outcomes, and the failures."""
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(start, start + count):
            outcome = one(variant, Path(folder), seed)
            if outcome in ("refused", "loaded"):
                outcomes[outcome] += 1
            else:
                wrong.append(f"{variant}, seed {seed}: {outcome}")
    return outcomes, wrong


def one(variant: str, folder: Path, seed: int) -> str:
    """Load one damaged file; return its outcome, one word if it is as expected."""
    try:
        return VARIANTS[variant](folder, seed)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def sweep(pool: ProcessPoolExecutor, variant: str, files: int) -> dict[str, Any]:
    """Count the outcomes of many files that were damaged in the same way."""
    total: Counter[str] = Counter()
    wrong: list[str] = []
    starts = range(0, files, CHUNK)
    sizes = [min(CHUNK, files - first) for first in starts]
    for number, (outcomes, bad) in enumerate(
        pool.map(chunk, [variant] * len(sizes), starts, sizes)
    ):
        total += outcomes
        wrong += bad
        print(f"\r{variant}: {(number + 1) * CHUNK} of {files}, {len(wrong)} wrong", end="")
    print()
    return {
        "files": files,
        "refused": total["refused"],
        "loaded": total["loaded"],
        "failures": wrong,
    }


def page(command: str, outcomes: dict[str, dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    wrong = [line for item in outcomes.values() for line in item["failures"]]
    bounds = f"{MOST_BYTES >> 20} MB of memory and {MOST_SECONDS:.0f} s of CPU time"
    lines = [
        "# Damaged and forged files",
        "",
        f"    {command}",
        "",
        f"Saved models ({', '.join(MODELS)}), loaded with at most {bounds} each.",
        "",
        *(f"- **{variant}**: {about}." for variant, about in ABOUT.items()),
        "",
        "| | files | refused with a one-line error | loaded completely | anything else |",
        "|---|--:|--:|--:|--:|",
        *(
            f"| {variant} | {item['files']:,} | {item['refused']:,} | {item['loaded']:,} | "
            f"{len(item['failures'])} |"
            for variant, item in outcomes.items()
        ),
        *(f"\n- {line}" for line in wrong[:20]),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--forged", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    start = time.perf_counter()
    with ProcessPoolExecutor(options.jobs) as pool:
        outcomes = {
            "damaged": sweep(pool, "damaged", options.files),
            "forged": sweep(pool, "forged", options.forged),
        }
    given = ["--files", str(options.files), "--forged", str(options.forged)]
    command = shlex.join(["python", "benchmarks/fuzz.py", *given])
    seconds = round(time.perf_counter() - start)
    result = {"command": command, "models": list(MODELS), **outcomes, "seconds": seconds}
    (HERE / "fuzz.json").write_text(json.dumps(result, indent=1) + "\n")
    text = page(command, outcomes)
    (HERE / "fuzz.md").write_text(text)
    print(text)
    sys.exit(any(item["failures"] for item in outcomes.values()))


if __name__ == "__main__":
    main()
