"""Prune the whole zoo at rate 0.3, verify every result, and run Torch-Pruning for comparison.

    python benchmarks/zoo.py                          # everything, resumes where it stopped
    python benchmarks/zoo.py --only 'resnet*'         # a part of it
    python benchmarks/zoo.py --suite timm --no-peer   # ours alone
    python benchmarks/zoo.py --both                   # planning_time.md: models both tools prune
    python benchmarks/zoo.py --list --check           # does every model build and run?

Each model runs in its own process with one thread, both tools one after the other on new models
from the same seed. Results are appended to `benchmarks/.cache/zoo.jsonl`; at the end `zoo.json`
and `zoo.md` are written from it. This file is the command; the rest, in the order of a run:

    zoo_models.py    which models, and how they are built
    zoo_cache.py     what has been run already
    zoo_run.py       a process for each model, with limits
    zoo_worker.py    inside that process: both tools on one model
    zoo_peer.py      Torch-Pruning, and a check of its result
    zoo_measure.py   seconds, MACs and parameters, the same for both
    zoo_report.py    zoo.json and zoo.md
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from zoo_cache import HERE, Record, append_cache, is_pending, read_cache
from zoo_models import SUITES, Case, all_cases
from zoo_report import cell, write_report
from zoo_run import Limits, run_case
from zoo_worker import work


def main() -> None:
    options = _options()
    if options.worker:
        case = json.loads(options.worker)
        case["shape"] = tuple(case["shape"])
        work(Case(**case), options.tools.split(","), options.rate)
        return
    cases = [
        case
        for case in all_cases()
        if options.suite in {"all", case.suite} and fnmatch.fnmatch(case.name, options.only)
    ]
    if options.both:
        both = pruned_by_both()
        cases = [case for case in cases if case.key in both]
    if options.list:
        show_list(cases, options)
    else:
        run_all(cases, options)
        name = "planning_time" if options.both else "zoo"
        write_report(cases if options.both else all_cases(), options.rate, name)
        print(f"Written: {HERE.name}/{name}.md, {HERE.name}/{name}.json")


def pruned_by_both() -> set[str]:
    """Return the keys of models that both tools pruned, from the latest zoo.json."""
    rows = json.loads((HERE / "zoo.json").read_text())["rows"]
    return {f"{row['suite']}:{row['model']}" for row in rows if row["ratio"] is not None}


def run_all(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Run all models that are not in the cache, with a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    tools = [tool for tool in options.tools.split(",") if tool != "peer" or not options.no_peer]
    limits = Limits(options.timeout, options.rate)
    cache = read_cache()
    todo = [case for case in cases if is_pending(case, tools, cache, options)]
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress, ThreadPoolExecutor(options.jobs) as pool:
        bar = progress.add_task("zoo", total=len(cases), completed=len(cases) - len(todo))
        futures = {pool.submit(run_case, case, tools, limits): case for case in todo}
        try:
            for future in as_completed(futures):
                records = future.result()
                append_cache({**record, "command": command()} for record in records)
                news = _news(futures[future], records)
                progress.console.print(news, markup=False, highlight=False, soft_wrap=True)
                progress.advance(bar)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def command() -> str:
    """Return the command line, for the report."""
    return shlex.join(["python", "benchmarks/zoo.py", *sys.argv[1:]])


def _news(case: Case, records: Sequence[Record]) -> str:
    parts = []
    for record in records:
        removed = cell(record.get("macs_removed"), "{:.1%}")
        seconds = cell(record.get("seconds"), "{:.2f}")
        parts.append(f"{record['tool']} {record['status']} −{removed} {seconds} s")
    return f"{case.key}: " + "; ".join(parts)


def show_list(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Print the models; with --check, build and run each in a separate process."""
    broken = 0
    for case in cases:
        note = ""
        if options.check:
            start = time.monotonic()
            [record] = run_case(case, ["nothing"], Limits(options.timeout, options.rate))
            broken += record["status"] != "ok"
            note = f"  {record['status']}  {time.monotonic() - start:.1f} s"
        print(f"{case.key:<50} {case.kind:<22} {'x'.join(map(str, case.shape))}{note}", flush=True)
    print(f"{len(cases)} models" + (f", {broken} broken" if options.check else ""))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=[*SUITES, "all"], default="all")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="models by wildcard")
    parser.add_argument(
        "--both", action="store_true", help="models that both tools pruned in the last results"
    )
    parser.add_argument("--rate", type=float, default=0.3)
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for a tool on a model")
    parser.add_argument("--no-peer", action="store_true", help="leave Torch-Pruning out")
    parser.add_argument("--redo-failed", action="store_true", help="run again what is not ok")
    parser.add_argument(
        "--accept-stale",
        action="store_true",
        help="keep results made by another state of src/fpgm instead of running those models again",
    )
    parser.add_argument("--list", action="store_true", help="list the models and stop")
    parser.add_argument("--check", action="store_true", help="with --list: build and run each once")
    parser.add_argument("--tools", default="ours,peer", help=argparse.SUPPRESS)
    parser.add_argument("--worker", metavar="CASE", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
