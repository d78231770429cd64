"""Prune every network of `tests/structures` in four settings, with fpgm and with Torch-Pruning.

    python benchmarks/structures.py --workers 2
    python benchmarks/structures.py --only interleaving --no-peer --out structures

The returned model is compared with a reference that is independent of the package's verification
(`tests/helpers/independent_reference.py`), on new inputs. Writes structures.json and structures.md
to this folder and exits with status 1 if a wrong model was returned, something crashed, or a
compact model does not train. Torch-Pruning must be importable, or pass --no-peer.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from structures_report import Record, report, summary  # noqa: E402

LIMIT_SECONDS = {"ours": 120, "peer": 20}
"""Seconds for one pruning, by tool: a crash if ours takes longer, a timeout if theirs does."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workers", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--only", default="", help="networks whose name or family contains this")
    parser.add_argument("--no-peer", action="store_true", help="leave Torch-Pruning out")
    parser.add_argument("--out", type=Path, default=HERE, help="directory of the two files")
    options = parser.parse_args()

    from tests.structures import NETWORKS

    chosen = [
        n.name for n in NETWORKS.values() if options.only in n.name or options.only in n.family
    ]
    start = time.perf_counter()
    records: list[Record] = []
    for record in run_all(chosen, options.workers, not options.no_peer):
        records.append(record)
        _progress(record, len(records), len(chosen))
    records.sort(key=lambda r: chosen.index(r["network"]))
    command = shlex.join(["python", "benchmarks/structures.py", *sys.argv[1:]])
    result = report(records, command, time.perf_counter() - start)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "structures.json").write_text(result.json, encoding="utf-8")
    (options.out / "structures.md").write_text(result.page, encoding="utf-8")
    print(summary(records))
    return 1 if result.faults else 0


def run_all(names: list[str], workers: int, peer: bool) -> Iterator[Record]:
    """Test networks in separate processes, with a time limit for each pruning."""
    context = multiprocessing.get_context("fork")
    import tests.structures.judge  # noqa: F401  (once, before the processes fork)

    if peer:
        import torch_pruning  # noqa: F401
    waiting = [Job(name, prunings(peer)) for name in reversed(names)]
    running: dict[Connection, tuple[Any, Job]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            receiver, sender = context.Pipe(duplex=False)
            job = waiting.pop()
            process = context.Process(target=_work, args=(job.name, job.left, sender))
            process.start()
            sender.close()
            job.start_clock()
            running[receiver] = (process, job)
        first = min(job.limit for _, job in running.values())
        ready = wait(list(running), timeout=max(0.0, first - time.perf_counter()))
        now = time.perf_counter()
        late = [r for r, (_, job) in running.items() if job.limit < now and r not in ready]
        for receiver in [*ready, *late]:
            process, job = running[receiver]
            if receiver in late:
                job.lose("timeout")
            elif not _receive(receiver, job):
                job.lose("the process died")
            elif job.left:
                continue
            del running[receiver]
            process.kill()
            process.join()
            receiver.close()
            if job.left:
                waiting.append(job)
            else:
                yield job.record


def prunings(peer: bool) -> list[tuple[str, str]]:
    """List tools and settings to measure on one network, ours first."""
    from tests.structures.judge import SETTINGS

    from structures_peer import SETTINGS as PEER_SETTINGS

    theirs = [("peer", setting) for setting in PEER_SETTINGS] if peer else []
    return [*(("ours", setting) for setting in SETTINGS), *theirs]


class Job:
    """One network: the results so far, and what is left to measure."""

    def __init__(self, name: str, left: list[tuple[str, str]]) -> None:
        from tests.structures import NETWORKS

        self.name = name
        self.left = left
        self.limit = 0.0
        self.record: Record = {
            "network": name, "family": NETWORKS[name].family, "ours": {}, "peer": {},
        }  # fmt: skip

    def start_clock(self) -> None:
        """Start the time limit of the next pruning."""
        if self.left:
            self.limit = time.perf_counter() + LIMIT_SECONDS[self.left[0][0]]

    def take(self, verdict: Record) -> None:
        """Record the result of the next pruning."""
        tool, setting = self.left.pop(0)
        self.record[tool][setting] = verdict
        self.start_clock()

    def lose(self, reason: str) -> None:
        """Record that the current tool gave no result; the other tools still run."""
        from tests.structures.judge import Verdict

        tool = self.left[0][0]
        late = reason == "timeout"
        if late:
            reason = f"no result in {LIMIT_SECONDS[tool]} s"
        word = "timeout" if late and tool == "peer" else "crash"
        self.take(asdict(Verdict(word, reason)))


def _receive(receiver: Connection, job: Job) -> bool:
    """Receive one result; return False if the process ended without it."""
    try:
        job.take(receiver.recv())
    except EOFError:
        return False
    return True


def _work(name: str, left: list[tuple[str, str]], sender: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for tool, setting in left:
            sender.send(judge_pruning(name, tool, setting))
    sender.close()


def judge_pruning(name: str, tool: str, setting: str) -> Record:
    """Test one network in one setting with one tool."""
    from tests.structures import NETWORKS
    from tests.structures.judge import SETTINGS, first_lock, judge

    from structures_peer import SETTINGS as PEER_SETTINGS
    from structures_peer import judge_peer

    network = NETWORKS[name]
    if tool == "peer":
        return asdict(judge_peer(network, PEER_SETTINGS[setting]))
    verdict = judge(network, SETTINGS[setting])
    verdict.first_lock, verdict.seconds = first_lock(network, SETTINGS[setting])
    return asdict(verdict)


def _progress(record: Record, done: int, total: int) -> None:
    words = [verdict["word"] for verdict in record["ours"].values()]
    print(f"{done}/{total} {record['network']}: {', '.join(words)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
