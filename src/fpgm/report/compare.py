"""Data for the page that compares several runs: their cards, their settings and two charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fpgm.report import charts
from fpgm.report.chart_data import MAX_GROUPS, Chart, page_spec
from fpgm.report.headline import cards, final_accuracy, summary
from fpgm.report.layers import group_label, truncate_middle
from fpgm.report.run import Run
from fpgm.report.settings import used_settings

_BUDGET_SETTINGS = ("rate", "macs", "params", "latency", "rates")
_COMMON_SETTINGS = ("model", *_BUDGET_SETTINGS, "criterion", "distance", "residual", "allocate",
                    "recover", "distil", "align", "data", "train.epochs",
                    "train.lr")  # fmt: skip
_RESULTS = ("align", "recover")
"""Settings that are listed with a result, which also depends on the network."""
_MAX_SETTINGS = 40
"""Rows of settings in the table."""


def comparison_values(runs: Sequence[Run]) -> dict[str, Any]:
    """Collect the values that the template of the comparison page needs."""
    names = _make_unique([truncate_middle(run.name, 60) for run in runs])
    cards_by_run = [{card.name: card for card in cards(run)} for run in runs]
    card_names = list(dict.fromkeys(name for entry in cards_by_run for name in entry))
    settings = [_settings(run, used_settings(run)) for run in runs]
    different, same = _setting_names([_compared_settings(run) for run in runs])
    return {
        "names": names,
        "summaries": [truncate_middle(summary(run)) for run in runs],
        "card_names": card_names,
        "cards_by_run": cards_by_run,
        "different_settings": different,
        "same_settings": same,
        "settings": [
            {key: truncate_middle(entry.get(key, "")) for key in (*different, *same)}
            for entry in settings
        ],
        "same_widths": _same_widths(runs),
        "charts": [*_accuracy_chart(names, runs), *_kept_charts(names, runs)],
    }


def _setting_names(settings: Sequence[Mapping[str, str]]) -> tuple[list[str], list[str]]:
    """Choose the settings to show: those in which the runs differ, and common ones that agree."""
    present = dict.fromkeys([*_COMMON_SETTINGS, *(key for entry in settings for key in entry)])
    values = {key: {entry.get(key, "") for entry in settings} for key in present}
    different = [key for key in present if len(values[key]) > 1][:_MAX_SETTINGS]
    same = [key for key in _COMMON_SETTINGS if len(values[key]) == 1 and values[key] != {""}]
    return different, same


def _compared_settings(run: Run) -> dict[str, str]:
    """Return settings as used, without results that follow from equal requests."""
    requested = _settings(run, run.settings)
    used = _settings(run, used_settings(run))
    return {key: requested.get(key, "") if key in _RESULTS else used[key] for key in used}


def _settings(run: Run, values: Mapping[str, str]) -> dict[str, str]:
    """Return settings under the names of `fpgm prune`'s options, whatever the command."""
    settings = {"model": run.model} if run.model else {}
    for key, value in values.items():
        name = "data" if key == "data.name" else key.removeprefix("prune.")
        if name != "model.name":
            settings[name] = value
    return settings


def _settings_without_budget(run: Run) -> str:
    """Describe all settings but the budget: a chart's line joins runs in which they are equal."""
    other = {
        key: value
        for key, value in _settings(run, run.settings).items()
        if key not in _BUDGET_SETTINGS and not key.startswith("rates.")
    }
    return truncate_middle(", ".join(f"{key} {value}" for key, value in other.items()), 400)


def _accuracy_chart(names: Sequence[str], runs: Sequence[Run]) -> Iterator[Chart]:
    """Plot accuracy against MACs removed, if two runs or more have both."""
    rows = []
    for name, run in zip(names, runs, strict=True):
        accuracy = final_accuracy(run)
        if run.plan is not None and accuracy is not None:
            rows.append(
                {
                    "run": name,
                    "setting": _settings_without_budget(run),
                    "macs": run.plan.macs_removed,
                    "accuracy": accuracy,
                }
            )
    if len(rows) > 1:
        datasets = {
            (_settings(run, run.settings).get("data"), run.results.test_images)
            for run in runs
            if final_accuracy(run) is not None
        }
        warning = " The runs were not all tested on the same images." if len(datasets) > 1 else ""
        yield Chart(
            "Accuracy by MACs removed",
            "Each point is a run. Lines join runs that differ only in their pruning budget."
            f"{warning}",
            page_spec(charts.runs_by_macs(rows, among=names)),
        )


def _kept_charts(names: Sequence[str], runs: Sequence[Run]) -> Iterator[Chart]:
    """Plot the fraction of each group that runs keep; one chart per network that runs share.

    A network that all runs leave the same widths gets none.
    """
    for same in _runs_by_network(names, runs):
        if _differ_in_width(same.values()):
            others = len(same) < len(names)
            yield _kept_chart(same, ", ".join(same) if others else "", names)


def _same_widths(runs: Sequence[Run]) -> bool:
    """Tell whether all runs keep the same number of units in every group of the same network."""
    networks = _runs_by_network([str(number) for number in range(len(runs))], runs)
    return [len(same) for same in networks] == [len(runs)] and not any(
        _differ_in_width(same.values()) for same in networks
    )


def _differ_in_width(runs: Iterable[Run]) -> bool:
    return len({tuple(g.kept for g in run.plan.groups) for run in runs if run.plan}) > 1


def _runs_by_network(names: Sequence[str], runs: Sequence[Run]) -> list[dict[str, Run]]:
    """Divide the runs by the groups of their networks."""
    runs_by_structure: dict[tuple[Any, ...], dict[str, Run]] = {}
    for name, run in zip(names, runs, strict=True):
        if run.plan is not None and run.plan.groups:
            key = tuple((group.name, group.units, group.layers) for group in run.plan.groups)
            runs_by_structure.setdefault(key, {})[name] = run
    return list(runs_by_structure.values())


def _kept_chart(runs: Mapping[str, Run], names: str, all_names: Sequence[str]) -> Chart:
    fractions: dict[str, list[float]] = {}
    labels: list[str] = []
    total = 0
    for name, run in runs.items():
        assert run.plan is not None
        groups = run.plan.groups
        total = len(groups)
        labels = [group_label(n, group) for n, group in enumerate(groups[:MAX_GROUPS])]
        fractions[name] = [group.kept / group.units for group in groups[:MAX_GROUPS]]
    note = f" The first {MAX_GROUPS} of {total} groups." if total > MAX_GROUPS else ""
    return Chart(
        "Units kept in each group" + (f": {names}" if names else ""),
        f"Fraction of each group's units that a run keeps.{note}",
        page_spec(charts.kept_by_group(labels, fractions, among=all_names)),
    )


def _make_unique(names: Sequence[str]) -> list[str]:
    """Make all names differ by numbering folders of the same name.

    >>> _make_unique(["a", "b", "a", "a (2)"])
    ['a', 'b', 'a (2)', 'a (2) (2)']
    """
    unique: list[str] = []
    for name in names:
        candidate, count = name, 1
        while candidate in unique:
            count += 1
            candidate = f"{name} ({count})"
        unique.append(candidate)
    return unique
