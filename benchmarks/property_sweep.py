"""Prune tens of thousands of random networks and check that each is exact.

    python benchmarks/property_sweep.py --examples 20000
    python benchmarks/property_sweep.py --seconds 600 --seed 7 --workers 2

Draws the networks of `tests/networks` from a seed and checks on each what
`tests/integration/test_random_networks.py` states. Writes property.json and property.md to this
folder and exits with status 1 if anything failed; a failure is printed in its smallest form, ready
to paste. Ctrl-C stops early and keeps the results; `--add FILE` adds the property.json of another
run.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import shlex
import sys
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.integration.test_random_networks import check  # noqa: E402
from tests.networks import BLOCKS, HEADS, Case, draw_case, smaller  # noqa: E402

BATCH = 50
SHRINKING_SECONDS = 120


@dataclass
class Tally:
    """Results of some networks."""

    examples: int = 0
    pruned: int = 0
    without_units: int = 0
    units_removed: int = 0
    unmoved: int = 0
    containing: Counter[str] = field(default_factory=Counter)
    pruned_containing: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    commands: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Tally:
        """Read the results of an earlier run."""
        raw = json.loads(file.read_text(encoding="utf-8"))
        kinds: dict[str, Any] = {"containing": Counter, "pruned_containing": Counter}
        return cls(**{f.name: kinds.get(f.name, lambda x: x)(raw[f.name]) for f in fields(cls)})

    def add(self, other: Tally) -> None:
        """Add the results of another run."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--examples", type=int, default=20_000, help="networks to draw")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=HERE, help="directory of property.json and .md")
    parser.add_argument("--add", type=Path, action="append", default=[], help="another run's JSON")
    options = parser.parse_args()

    start = time.perf_counter()
    total = Tally()
    with suppress(KeyboardInterrupt):
        for tally in _tallies(options.seed, options.examples, options.workers):
            total.add(tally)
            passed = time.perf_counter() - start
            _progress(total, options.examples, passed)
            if passed > options.seconds:
                break
    total.seconds = time.perf_counter() - start
    total.commands = [shlex.join(["python", "benchmarks/property_sweep.py", *sys.argv[1:]])]
    for file in options.add:
        total.add(Tally.read(file))

    smallest = _smallest(total.failures)
    _write(options.out, total, smallest)
    print(_summary(total))
    for case, error in smallest:
        print(f"check({case})\n    {error}")
    return 1 if total.failures else 0


def run(seed: int, start: int, stop: int) -> Tally:
    """Check the networks numbered `start` to `stop` of a seed."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    tally = Tally()
    for number in range(start, stop):
        case = _draw(seed, number)
        names = set(case.net.names())
        tally.examples += 1
        tally.containing.update(names)
        error = _error(case, tally, names)
        if error is not None:
            tally.failures.append({"seed": f"{seed}/{number}", "case": repr(case), "error": error})
    return tally


def _draw(seed: int, number: int) -> Case:
    return draw_case(random.Random(f"{seed}/{number}").choice)


def _error(case: Case, tally: Tally | None = None, names: set[str] | None = None) -> str | None:
    try:
        outcome = check(case)
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        return f"{type(error).__name__}: {line}"
    if tally is not None and names is not None:
        if outcome is None:
            tally.without_units += 1
        elif outcome.removed:
            tally.pruned += 1
            tally.units_removed += outcome.removed
            tally.unmoved += outcome.moved < 1e-6
            tally.pruned_containing.update(names)
    return None


def _tallies(seed: int, examples: int, workers: int) -> Iterator[Tally]:
    starts = range(0, examples, BATCH)
    if workers == 1:
        yield from (run(seed, start, min(start + BATCH, examples)) for start in starts)
        return
    with ProcessPoolExecutor(workers) as pool:
        waiting: deque[Future[Tally]] = deque()
        for start in starts:
            waiting.append(pool.submit(run, seed, start, min(start + BATCH, examples)))
            # Only a little ahead, so that stopping early does not wait for the rest.
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _smallest(failures: list[dict[str, str]]) -> list[tuple[str, str]]:
    """Shrink different failures, a few for each kind of error."""
    kinds: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    for failure in failures:
        kinds[_kind(failure["error"])].append(failure)
    smallest: dict[str, str] = {}
    until = time.perf_counter() + SHRINKING_SECONDS
    for failure in chain.from_iterable(zip_longest(*kinds.values())):
        if failure is not None and time.perf_counter() < until:
            case, error = _shrink(failure)
            smallest[case] = error
    return list(smallest.items())


def _shrink(failure: dict[str, str]) -> tuple[str, str]:
    """Find the smallest case that fails with the same kind of error; return it with the error."""
    seed, number = failure["seed"].split("/")
    case, error = _draw(int(seed), int(number)), failure["error"]
    kind = _kind(error)
    improved = True
    while improved:
        improved = False
        for candidate in smaller(case):
            other = _error(candidate)
            if other is not None and _kind(other) == kind:
                case, error, improved = candidate, other, True
                break
    return repr(case), error


def _kind(error: str) -> str:
    return re.sub(r"[\d.]+(e[-+]\d+)?", "#", error)[:60]


def _summary(total: Tally) -> str:
    fraction = total.pruned / max(1, total.examples)
    return (
        f"{total.examples:,} random networks in {total.seconds:,.0f} s: "
        f"{len(total.failures)} failures, {fraction:.1%} lost at least one unit"
    )


def _progress(total: Tally, examples: int, seconds: float) -> None:
    if sys.stderr.isatty():
        line = f"\r{total.examples:,}/{examples:,}  {len(total.failures)} failures  {seconds:.0f} s"
        print(line, end="", file=sys.stderr, flush=True)


def _write(out: Path, total: Tally, smallest: list[tuple[str, str]]) -> None:
    raw = asdict(total) | {
        "seconds": round(total.seconds, 1),
        "share_pruned": round(total.pruned / max(1, total.examples), 4),
        "containing": dict(sorted(total.containing.items())),
        "pruned_containing": dict(sorted(total.pruned_containing.items())),
        "smallest_failures": [{"case": case, "error": error} for case, error in smallest],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "property.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    lines = [
        "# Random networks",
        "",
        *(f"    {command}" for command in total.commands),
        "",
        f"{_summary(total)} (torch {torch.__version__}).",
        f"{total.without_units:,} had nothing to prune. {total.units_removed:,} units were",
        f"removed, in {total.unmoved:,} networks without changing the output.",
        "",
        "Each network is pruned with a random rate, alignment and residual policy. Its compact",
        "model is compared with the masked original by `verify` and independently of it, and on",
        "new inputs with a separate reference (noise in removed filters, zeros in their consumers,",
        "each output channel relative to its own scale). It must also train for one step.",
        "",
        "| structure | networks | pruned |",
        "|---|---:|---:|",
    ]
    lines += [
        f"| {name} | {total.containing[name]:,} | {total.pruned_containing[name]:,} |"
        for name in (*BLOCKS, *HEADS)
    ]
    if smallest:
        lines += ["", "## Failures", ""]
        lines += [f"- `{case}`: {error}" for case, error in smallest]
    (out / "property.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
