"""Write the zoo's report from the cache.

`zoo.json` holds every row; `zoo.md` begins with a summary and explains what each number counts.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zoo_cache import HERE, Record, read_cache
from zoo_models import Case


def write_report(cases: Sequence[Case], rate: float, name: str = "zoo") -> None:
    """Write `zoo.json` and `zoo.md` from the cache."""
    import fpgm

    cache = read_cache()
    rows = [
        {
            "model": case.name,
            "suite": case.suite,
            "kind": case.kind,
            "family": case.family,
            "input": "x".join(map(str, case.shape)),
            "ours": _public(cache.get((case.key, "ours"))),
            "peer": _public(cache.get((case.key, "peer"))),
            "ratio": _ratio(cache.get((case.key, "ours")), cache.get((case.key, "peer"))),
            "ratio_at_least": _floor(cache.get((case.key, "ours")), cache.get((case.key, "peer"))),
        }
        for case in cases
        if (case.key, "ours") in cache or (case.key, "peer") in cache
    ]
    about = {
        "commands": Counter(record["command"] for record in _first_of_each(cache)),
        "rate": rate,
        "align": 1,
        "threads": 1,
        "versions": {
            "python": platform.python_version(),
            "fpgm": fpgm.__version__,
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    text = json.dumps({"about": about, "rows": rows}, indent=1)
    (HERE / f"{name}.json").write_text(text + "\n")
    title = _TITLES.get(name, name)
    (HERE / f"{name}.md").write_text("\n".join(_markdown(title, about, rows)) + "\n")


_TITLES = {
    "zoo": "The zoo: every model pruned and verified",
    "planning_time": "Time to plan and compact, with Torch-Pruning for comparison",
}
_PRIVATE = {"key", "tool", "run", "source", "time", "command"}
_PACKAGES = ("torch", "torchvision", "timm", "torch-pruning")


def _first_of_each(cache: Mapping[tuple[str, str], Record]) -> Iterator[Record]:
    """Return one record per model, ours, in the order they were measured."""
    ours = (record for (_, tool), record in cache.items() if tool == "ours")
    return iter(sorted(ours, key=lambda record: str(record["time"])))


def _public(record: Record | None) -> Record | None:
    if record is None:
        return None
    shown = {k: v for k, v in record.items() if k not in _PRIVATE}
    return {k: _rounded(v) for k, v in shown.items()}


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _ratio(ours: Record | None, peer: Record | None) -> float | None:
    """Compute how many times faster ours is, where both prune the model in the same process."""
    if ours is None or peer is None or ours["run"] != peer["run"]:
        return None
    if ours["status"] != "ok" or peer["status"] not in {"ok", "mismatch"}:
        return None
    return round(float(peer["seconds"] / ours["seconds"]), 2)


def _floor(ours: Record | None, peer: Record | None) -> float | None:
    """Compute a lower bound of the ratio where Torch-Pruning hit its time limit.

    >>> ours = {"run": "a", "status": "ok", "seconds": 0.5}
    >>> _floor(ours, {"run": "a", "status": "timeout in prune (40 s)"})
    80.0
    """
    if ours is None or peer is None or ours["run"] != peer["run"] or ours["status"] != "ok":
        return None
    stopped = re.match(r"timeout in prune \((\d+) s\)", peer["status"])
    return round(int(stopped[1]) / float(ours["seconds"]), 2) if stopped else None


def _markdown(title: str, about: Record, rows: Sequence[Record]) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    yield f"# {title}"
    yield ""
    commands = [f"`{name}` ({count} models)" for name, count in about["commands"].items()]
    yield f"Made by {', then '.join(commands)} with {versions} on {about['machine']}."
    if any(row["peer"] is None for row in rows):
        yield "A dash under *TP* means that it was not run."
    yield (
        f"Rate {about['rate']}, align {about['align']}, one thread, random weights with randomized "
        "batch-norm statistics and layer scales. TP is Torch-Pruning with its "
        "`FPGMImportance(p=2)` and `BasePruner`, output layers ignored, same seed, same process. "
        "Seconds: CPU time of plan + compact for ours, of build + step for TP, the best of "
        "up to three runs of each in one process. MACs are counted by `torch.utils.flop_counter` "
        "on the pruned models. Frozen: fraction of channels not pruned for a reason other than "
        "being a model's output. `mismatch` means that the model runs but does not compute the "
        "original without the removed units; this cannot be checked for TP where units pass "
        "through a norm over channels."
    )
    yield ""
    yield "## Summary"
    yield ""
    yield from _summary(rows)
    yield "## Every model"
    yield ""
    yield (
        "| model | kind | input | ours | MACs − | params − | frozen | s | error | moved "
        "| TP | MACs − | s | TP s ÷ ours |"
    )
    yield "|" + "---|" * 14
    yield from (_row(row) for row in rows)


def _summary(rows: Sequence[Record]) -> Iterator[str]:
    yield "| | models | ours ok | mismatch | fails | TP ok | mismatch | times out | fails |"
    yield "|---|" + "--:|" * 8
    for suite, kind in dict.fromkeys((row["suite"], row["kind"]) for row in rows):
        part = [row for row in rows if (row["suite"], row["kind"]) == (suite, kind)]
        yield _counts(f"{suite} {kind}", part)
    yield _counts("**all**", rows)
    yield ""
    ratios = sorted((row["ratio"], row["model"]) for row in rows if row["ratio"] is not None)
    if ratios:
        values = [ratio for ratio, _ in ratios]
        yield (
            f"Speed (models both prune: {len(values)}): Torch-Pruning takes a median of "
            f"**{statistics.median(values):.1f}×** our time (least {values[0]:.1f}×: "
            f"{ratios[0][1]}; most {values[-1]:.1f}×: {ratios[-1][1]})."
        )
        floors = [row["ratio_at_least"] for row in rows if row["ratio_at_least"] is not None]
        if floors:
            yield (
                "Including the models on which Torch-Pruning exceeded its time limit "
                f"({len(floors)}), each counted as limit ÷ our seconds, the median rises from "
                f"{statistics.median(values):.1f}× to at least "
                f"**{statistics.median(values + floors):.1f}×** (the limit is wall time, our "
                "seconds are CPU time)."
            )
        slower = [f"{name} ({ratio:.2f}×)" for ratio, name in ratios if ratio < 1]
        yield f"Models where we are slower: {', '.join(slower) or 'none'}."
        yield ""
    good = [row for row in rows if (row["ours"] or {}).get("status") == "ok"]
    complete = [row for row in good if row["kind"] in _CNN and not row["ours"]["frozen_channels"]]
    light = [row for row in complete if row["ours"]["macs_removed"] < 0.35]
    if good:
        names = [f"{row['model']} ({row['ours']['macs_removed']:.1%})" for row in light]
        yield (
            f"CNNs with nothing frozen: {len(complete)}. Of these, with less than 35 % of MACs "
            f"removed: {', '.join(names) or 'none'}."
        )
        worst = max(good, key=lambda row: row["ours"]["max_error"])
        least = min(good, key=lambda row: row["ours"]["moved"])
        yield (
            f"Largest error among verified models: {worst['ours']['max_error']:.1e} "
            f"({worst['model']}); smallest change by masking: {least['ours']['moved']:.1e} "
            f"({least['model']})."
        )
        yield ""
    loose = [row["model"] for row in good if row["ours"].get("approximate")]
    if loose:
        yield (
            f"No exact pruning possible, so pruned with norms over fewer channels "
            f"(`approximate=True`) and verified against that: {', '.join(loose)}."
        )
        yield ""
    failed = [row for row in rows if row["ours"] and row["ours"]["status"] != "ok"]
    yield from (f"- {row['suite']}:{row['model']}: {row['ours']['status']}" for row in failed)
    if failed:
        yield ""


_CNN = {"classification CNNs", "segmentation", "detection backbones", "video", "CNNs"}


def _counts(name: str, rows: Sequence[Record]) -> str:
    ours = [row["ours"]["status"] for row in rows if row["ours"]]
    peer = [row["peer"]["status"] for row in rows if row["peer"]]
    late = sum(status.startswith("timeout") for status in peer)
    cells = [
        len(rows),
        ours.count("ok"),
        ours.count("mismatch"),
        len(ours) - ours.count("ok") - ours.count("mismatch"),
        peer.count("ok"),
        peer.count("mismatch"),
        late,
        len(peer) - peer.count("ok") - peer.count("mismatch") - late,
    ]
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"


def _row(row: Record) -> str:
    ours, peer = row["ours"] or {}, row["peer"] or {}
    cells = [
        row["model"],
        f"{row['suite']} {row['kind']}",
        row["input"],
        cell(ours.get("status"), "{} (approximate)" if ours.get("approximate") else "{}"),
        cell(ours.get("macs_removed"), "{:.1%}"),
        cell(ours.get("params_removed"), "{:.1%}"),
        cell(ours.get("frozen_share"), "{:.0%}"),
        cell(ours.get("seconds"), "{:.2f}"),
        cell(ours.get("max_error"), "{:.0e}"),
        cell(ours.get("moved"), "{:.1g}"),
        cell(peer.get("status"), "{}"),
        cell(peer.get("macs_removed"), "{:.1%}"),
        cell(peer.get("seconds"), "{:.2f}"),
        cell(row["ratio"], "{:.1f}"),
    ]
    return "| " + " | ".join(cells) + " |"


def cell(value: Any, style: str) -> str:
    return "–" if value is None else style.format(value).replace("|", "\\|")[:120]
