"""Run a worker process for each model of the zoo, with time limits.

The messages of a worker, stage by stage, or their absence, become one record for each tool. The
worker is `zoo_worker.py`.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from zoo_cache import HERE, Record, source_digest
from zoo_models import Case
from zoo_worker import MARK

HUGE = 8
"""A model marked huge gets this many times the usual limit, for our own tool only."""


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds for each stage, for a model of the usual size."""

    timeout_seconds: float
    rate: float

    def of(self, case: Case, tool: str, stage: str) -> float:
        """Return the limit of a stage: five times as much if it is not measured."""
        scale = HUGE if case.huge and (tool == "ours" or stage != "prune") else 1
        return self.timeout_seconds * scale * (1 if stage == "prune" else 5)


def run_case(case: Case, tools: Sequence[str], limits: Limits) -> list[Record]:
    """Run both tools on one model; if one hangs or dies, the other still runs."""
    records: list[Record] = []
    rest = list(tools)
    while rest:
        done = _run_worker(case, rest, limits)
        records += done
        rest = rest[len(done) :]
    return records


def _run_worker(case: Case, tools: Sequence[str], limits: Limits) -> list[Record]:
    """Return the records of the tools that were run, at least one."""
    run = uuid.uuid4().hex[:12]
    command = [sys.executable, str(HERE / "zoo.py"), "--worker", json.dumps(asdict(case))]
    command += ["--tools", ",".join(tools), "--rate", str(limits.rate)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    records: dict[str, Record] = {}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **threads, "PYTHONWARNINGS": "ignore"},
        )
        messages = _messages(process)
        tool, stage = tools[0], "build"
        records[tool] = {"key": case.key, "tool": tool, "run": run}
        while True:
            limit = limits.of(case, tool, stage)
            try:
                message = messages.get(timeout=limit)
            except queue.Empty:
                records[tool]["status"] = f"timeout in {stage} ({limit:.0f} s)"
                break
            if message is None:
                break
            tool, stage = message["tool"], message["stage"]
            records.setdefault(tool, {"key": case.key, "tool": tool, "run": run})
            records[tool].update(message["result"])
        process.kill()
        code = process.wait()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or [""])[-1][:200]
    records[tool].setdefault("status", f"died in {stage} (code {code}): {last}")
    return [_stamped(record) for record in records.values()]


def _messages(process: subprocess.Popen[str]) -> queue.Queue[Record | None]:
    """Yield the messages of a worker as they arrive, and None at the end."""
    messages: queue.Queue[Record | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                messages.put(json.loads(line.removeprefix(MARK)))
        messages.put(None)

    threading.Thread(target=read, daemon=True).start()
    return messages


def _stamped(record: Record) -> Record:
    extra = {"source": source_digest()} if record["tool"] == "ours" else {}
    return record | extra | {"time": time.strftime("%Y-%m-%dT%H:%M:%S")}
