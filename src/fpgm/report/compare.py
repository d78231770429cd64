"""Several runs side by side: what was asked of each, what came out, and how they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fpgm.report import charts as figures
from fpgm.report.chart_data import MOST_GROUPS, Chart, spec_of
from fpgm.report.headline import cards, last_accuracy
from fpgm.report.layers import clip, numbered
from fpgm.report.run import Run

_BUDGET = ("rate", "macs", "params", "latency", "rates")
_ASKED = ("model", *_BUDGET, "criterion", "distance", "residual", "allocate", "recover", "distil",
          "align", "data", "train.epochs", "train.lr")  # fmt: skip
_MOST_ROWS = 40
"""Of what was asked."""


def comparison(runs: Sequence[Run]) -> dict[str, Any]:
    """What the page of a comparison is filled with."""
    names = _distinct([clip(run.name, 60) for run in runs])
    figures_of = [{card.name: card for card in cards(run)} for run in runs]
    heads = list(dict.fromkeys(name for own in figures_of for name in own))
    asked = [_asked(run) for run in runs]
    kept = _rows(asked)
    return {
        "names": names,
        "heads": heads,
        "figures": figures_of,
        "asked_keys": kept,
        "asked": [{key: clip(own.get(key, "")) for key in kept} for own in asked],
        "charts": [*_curve(names, runs), *_kept(names, runs)],
    }


def _rows(asked: Sequence[Mapping[str, str]]) -> list[str]:
    """Settings worth a row: those everybody asks about, and others in which runs differ."""
    given: dict[str, list[str]] = {key: [] for key in _ASKED}
    for own in asked:
        for key, value in own.items():
            given.setdefault(key, []).append(value)
    return [
        key for key, values in given.items() if values and (key in _ASKED or len(set(values)) > 1)
    ][:_MOST_ROWS]


def _asked(run: Run) -> dict[str, str]:
    """Settings by the names that `fpgm prune` has for them, whichever command it was."""
    found = {"model": run.model} if run.model else {}
    for key, value in run.asked.items():
        name = "data" if key == "data.name" else key.removeprefix("prune.")
        if name != "model.name":
            found[name] = value
    return found


def _setting(run: Run) -> str:
    """All that was asked but how much was to go: runs that share it may stand on one line."""
    kept = {
        key: value
        for key, value in _asked(run).items()
        if key not in _BUDGET and not key.startswith("rates.")
    }
    return clip(", ".join(f"{key} {value}" for key, value in kept.items()), 400)


def _curve(names: Sequence[str], runs: Sequence[Run]) -> Iterator[Chart]:
    """Accuracy against MACs removed."""
    rows = []
    for name, run in zip(names, runs, strict=True):
        share = last_accuracy(run)
        if run.plan is not None and share is not None:
            rows.append(
                {
                    "run": name,
                    "setting": _setting(run),
                    "macs": run.plan.macs_removed,
                    "accuracy": share,
                }
            )
    if len(rows) > 1:
        tested = {_asked(run).get("data") for run in runs if last_accuracy(run) is not None}
        apart = " They were not all tested on the same data." if len(tested) > 1 else ""
        yield Chart(
            "Accuracy by MACs removed",
            "A point is a run. A line joins runs whose settings are the same but for how much was "
            f"to go.{apart}",
            spec_of(figures.runs_by_macs(rows)),
        )


def _kept(names: Sequence[str], runs: Sequence[Run]) -> Iterator[Chart]:
    """Which share of every group each run keeps; runs whose groups differ are drawn apart."""
    alike: dict[tuple[Any, ...], dict[str, Run]] = {}
    for name, run in zip(names, runs, strict=True):
        if run.plan is not None and run.plan.groups:
            key = tuple((group.name, group.units, group.layers) for group in run.plan.groups)
            alike.setdefault(key, {})[name] = run
    for own in alike.values():
        yield _kept_by(own, ", ".join(own) if len(alike) > 1 else "")


def _kept_by(runs: Mapping[str, Run], which: str) -> Chart:
    shares: dict[str, list[float]] = {}
    labels: list[str] = []
    total = 0
    for name, run in runs.items():
        assert run.plan is not None
        groups = run.plan.groups
        total = len(groups)
        labels = [numbered(n, group) for n, group in enumerate(groups[:MOST_GROUPS])]
        shares[name] = [group.kept / group.units for group in groups[:MOST_GROUPS]]
    only = f" The first {MOST_GROUPS} of {total} groups." if total > MOST_GROUPS else ""
    return Chart(
        "What stays of every group" + (f": {which}" if which else ""),
        f"The share of its units that each run keeps.{only}",
        spec_of(figures.kept_by_group(labels, shares)),
    )


def _distinct(names: Sequence[str]) -> list[str]:
    """Names that differ: folders of the same name get a number.

    >>> _distinct(["a", "b", "a", "a (2)"])
    ['a', 'b', 'a (2)', 'a (2) (2)']
    """
    found: list[str] = []
    for name in names:
        own, count = name, 1
        while own in found:
            count += 1
            own = f"{name} ({count})"
        found.append(own)
    return found
