"""Prune every network of `tests/structures` in four settings, with fpgm and with Torch-Pruning.

    python benchmarks/structures.py --workers 2
    python benchmarks/structures.py --only interleaving --no-peer --out structures

What is handed over is compared with a reference written apart from the package's own verification
(`tests/helpers/independent_reference.py`), on new inputs. Writes structures.json and structures.md
beside this file and ends with status 1 if a wrong model was handed over, something crashed, or a
compact model does not train. Torch-Pruning must be importable, or give --no-peer.
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

LIMIT_SECONDS = 120
"""A network that takes longer in all its settings counts as a crash."""


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
    """Judge networks in processes of their own, each with a time limit."""
    waiting = list(reversed(names))
    running: dict[Connection, tuple[Any, str, float]] = {}
    context = multiprocessing.get_context("fork")
    import tests.structures.judge  # noqa: F401  (once, before the processes fork)

    if peer:
        import torch_pruning  # noqa: F401
    while waiting or running:
        while waiting and len(running) < workers:
            receiver, sender = context.Pipe(duplex=False)
            name = waiting.pop()
            process = context.Process(target=_work, args=(name, peer, sender))
            process.start()
            sender.close()
            running[receiver] = (process, name, time.perf_counter() + LIMIT_SECONDS)
        first = min(limit for _, _, limit in running.values())
        ready = wait(list(running), timeout=max(0.0, first - time.perf_counter()))
        for receiver in [*ready, *_late(running, ready)]:
            process, name, limit = running.pop(receiver)
            yield _received(receiver, process, name, limit)


def _late(running: dict[Connection, tuple[Any, str, float]], ready: list[Any]) -> list[Connection]:
    now = time.perf_counter()
    return [r for r, (_, _, limit) in running.items() if limit < now and r not in ready]


def _received(receiver: Connection, process: Any, name: str, limit: float) -> Record:
    late = time.perf_counter() > limit and not receiver.poll()
    try:
        record: Record = {} if late else receiver.recv()
    except EOFError:
        record = {}
    if not record:
        from tests.structures import NETWORKS
        from tests.structures.judge import SETTINGS, Verdict

        reason = "no result in time" if late else "the process died"
        lost = {setting: asdict(Verdict("crash", reason)) for setting in SETTINGS}
        record = {"network": name, "family": NETWORKS[name].family, "ours": lost, "peer": {}}
        process.kill()
    process.join()
    receiver.close()
    return record


def _work(name: str, peer: bool, sender: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        record = judge_network(name, peer)
    sender.send(record)
    sender.close()


def judge_network(name: str, peer: bool) -> Record:
    """Judge one network in all settings, ours and the peer's."""
    from tests.structures import NETWORKS
    from tests.structures.judge import SETTINGS, first_lock, judge

    network = NETWORKS[name]
    record: Record = {"network": name, "family": network.family, "ours": {}, "peer": {}}
    for setting, options in SETTINGS.items():
        verdict = judge(network, options)
        verdict.first_lock, verdict.seconds = first_lock(network, options)
        record["ours"][setting] = asdict(verdict)
    if peer:
        from structures_peer import SETTINGS as PEER_SETTINGS
        from structures_peer import judge_peer

        for setting, options in PEER_SETTINGS.items():
            record["peer"][setting] = asdict(judge_peer(network, options))
    return record


def _progress(record: Record, done: int, total: int) -> None:
    words = [verdict["word"] for verdict in record["ours"].values()]
    print(f"{done}/{total} {record['network']}: {', '.join(words)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
