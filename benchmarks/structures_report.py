"""Write the page of `structures.py`: a table by family, and a line for everything inexact."""

from __future__ import annotations

import json
import platform
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Record = dict[str, Any]
WORDS = ("exact", "frozen in part", "refused", "silent", "crash", "untrainable")
PEER_WORDS = ("exact", "refused", "not checkable", "silent", "crash", "timeout", "untrainable")
FAULTS = ("silent", "crash", "untrainable")


@dataclass(frozen=True)
class Report:
    """The text to write, and the number of faults it lists."""

    json: str
    page: str
    faults: int


def report(records: list[Record], command: str, seconds: float) -> Report:
    """Write the page and the raw results."""
    versions = {name: _version(name) for name in ("fpgm", "torch", "torch-pruning")}
    versions["python"] = platform.python_version()
    raw = {"command": command, "seconds": round(seconds, 1), "versions": versions}
    text = json.dumps({**raw, "networks": records}, indent=1) + "\n"
    text = re.sub(r"/[^\s`\"]*/site-packages/", "", text)  # where packages lie differs by machine
    ours = _verdicts(records, "ours")
    faults = sum(v["word"] in FAULTS for _, _, v in ours)
    page = [
        "# Structures",
        "",
        f"    {command}",
        "",
        f"{summary(records)} In {seconds:,.0f} s ({_spelled(versions)}).",
        "",
        "Every network is pruned in four settings. The model returned by `fpgm.prune` is compared",
        "with a copy of the original in which removed filters are noise and their consumers are",
        "zero: in float64 where the network supports it, on new inputs (of other sizes where the",
        "network accepts them), each output channel relative to its own scale. Torch-Pruning (TP)",
        "is told which layers produce the output. `not checkable` means that its record of what it",
        "removed cannot be replayed, `timeout` that a pruning exceeded its time limit. Its",
        "settings: ratio 0.3, ratio 0.5, ratio 0.3 over all layers together, ratio 0.5 with widths",
        "rounded to even numbers. Both tools have a time limit for each pruning; if one of them",
        "exceeds it, the result of the other is still measured.",
        "",
        *_table(records),
        *_timing(records),
        *_locks(records),
        *_section("Wrong, crashed or untrainable", ours, FAULTS),
        *_late_peer(records),
        *_section("Refused", ours, ("refused",)),
        *_frozen(records),
        *_blind(records),
    ]
    return Report(text, "\n".join(page) + "\n", faults)


def summary(records: list[Record]) -> str:
    """Summarize in one sentence: the number of networks, and the outcomes."""
    counts = Counter(v["word"] for _, _, v in _verdicts(records, "ours"))
    counted = ", ".join(f"{word} {counts[word]}" for word in WORDS)
    return f"{len(records)} networks, {counts.total()} prunings: {counted}."


def _verdicts(records: Iterable[Record], tool: str) -> list[tuple[str, str, Record]]:
    return [(r["network"], s, v) for r in records for s, v in r[tool].items()]


def _table(records: list[Record]) -> list[str]:
    """Count outcomes by family, ours and Torch-Pruning's."""
    heads = [f"{w}" for w in WORDS] + [f"TP {w}" for w in PEER_WORDS]
    lines = [
        f"| family | networks | {' | '.join(heads)} |",
        "|---|---:|" + "---:|" * len(heads),
    ]
    families = list(dict.fromkeys(r["family"] for r in records))
    for family in [*families, None]:
        item = [r for r in records if family in (None, r["family"])]
        ours = Counter(v["word"] for _, _, v in _verdicts(item, "ours"))
        peer = Counter(v["word"] for _, _, v in _verdicts(item, "peer"))
        cells = [ours[w] for w in WORDS] + [peer[w] for w in PEER_WORDS]
        name = family.replace("_", " ") if family else "**all**"
        lines.append(f"| {name} | {len(item)} | {' | '.join(map(str, cells))} |")
    return lines


def _timing(records: list[Record]) -> list[str]:
    """Compare the CPU time of plan and compact where both tools have a result."""
    times = [
        (v["seconds"], r["peer"][s]["seconds"], r["network"])
        for r in records
        for s, v in r["ours"].items()
        if v["seconds"] and r["peer"].get(s, {}).get("seconds")
    ]
    if not times:
        return []
    ours, theirs = (1000 * statistics.median(t[i] for t in times) for i in (0, 1))
    ratios = sorted((theirs / ours, name) for ours, theirs, name in times)
    ratio = statistics.median(r for r, _ in ratios)
    return [
        "",
        "## Time",
        "",
        f"CPU time of plan and compact, median of {len(times)} prunings that both tools",
        f"finish in the same run: {ours:.1f} ms, Torch-Pruning's {theirs:.1f} ms. Torch-Pruning's",
        f"time is {ratio:.2f} times ours in the median, {ratios[0][0]:.2f} times in the worst case",
        f"({ratios[0][1]}). These networks have three to ten layers, so fixed costs dominate;",
        "[zoo.md](zoo.md) has times of real models.",
    ]


def _locks(records: list[Record]) -> list[str]:
    """Summarize what plan and compact return without verification."""
    locked = [(n, s, v) for n, s, v in _verdicts(records, "ours") if v["first_lock"]]
    words = Counter(v["first_lock"].partition(":")[0] for _, _, v in locked)
    lines = [
        "",
        "## Without verification",
        "",
        "`plan` and `compact` alone: "
        + ", ".join(f"{word} {count}" for word, count in sorted(words.items()))
        + ".",
    ]
    wrong = [
        f"- {n} ({s}): {v['first_lock']}"
        for n, s, v in locked
        if v["first_lock"].startswith(("wrong", "crash"))
    ]
    return [*lines, *([""] if wrong else []), *wrong]


def _section(
    title: str, verdicts: list[tuple[str, str, Record]], words: tuple[str, ...]
) -> list[str]:
    """List the reasons of a network, each with its settings."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, setting, v in verdicts:
        if v["word"] in words:
            rows.setdefault((name, v["word"], v["reason"]), []).append(setting)
    lines = ["", f"## {title}", ""]
    if not rows:
        return [*lines, "None."]
    for (name, word, reason), settings in rows.items():
        kind = f"{word}, " if len(words) > 1 else ""
        lines.append(f"- {name} ({kind}{', '.join(settings)}): {reason}")
    return lines


def _late_peer(records: list[Record]) -> list[str]:
    """Count prunings that Torch-Pruning did not finish within its time limit."""
    theirs = _verdicts(records, "peer")
    return _section("Torch-Pruning: no result in time", theirs, ("timeout",)) if theirs else []


def _frozen(records: list[Record]) -> list[str]:
    rows: dict[str, set[str]] = {}
    for name, _, v in _verdicts(records, "ours"):
        for reason in v["frozen"] if v["word"] == "frozen in part" else ():
            rows.setdefault(reason, set()).add(name)
    lines = ["", "## Frozen in part", ""]
    return lines + [f"- {reason}: {', '.join(sorted(names))}" for reason, names in rows.items()]


def _blind(records: list[Record]) -> list[str]:
    """Count prunings that no test can judge: the outputs do not depend on the removed units."""
    rows = sorted(
        {
            n
            for n, _, v in _verdicts(records, "ours")
            if v["word"] in ("exact", "frozen in part") and v["moved"] < 1e-6
        }
    )
    if not rows:
        return []
    return ["", "## Outputs that do not depend on what was removed", "", ", ".join(rows)]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _spelled(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items())
