"""The settings that a run really used, which may differ from those it was started with."""

from __future__ import annotations

from collections.abc import Callable

from fpgm.report.records import Number
from fpgm.report.run import Run
from fpgm.utils.text import format_shape


def used_settings(run: Run) -> dict[str, str]:
    """Return a run's settings; where another value was used, it comes first.

    Options without an effect are left out, such as the distance of a criterion that has none.
    """
    settings = dict(run.settings)
    prune = "" if run.results.asked else "prune."  # recipes have sections
    for name, used in _USED.items():
        requested = settings.get(prune + name)
        if requested is not None and (text := used(run, requested)) is not None:
            settings[prune + name] = text
    if settings.get(f"{prune}criterion", "fpgm") not in _CRITERIA_WITH_DISTANCE:
        settings.pop(f"{prune}distance", None)
    if settings.get(f"{prune}rounding") == "paper":
        settings.pop(f"{prune}align", None)
    source = {"weights": run.results.weights.get("file", ""), "input": _input(run)}
    return {**{name: text for name, text in source.items() if text}, **settings}


_CRITERIA_WITH_DISTANCE = ("fpgm", "mix")


def _input(run: Run) -> str:
    sizes = [int(size) for size in run.results.input if size is not None]
    return format_shape(sizes) if sizes else ""


def _used_images(run: Run, requested: str) -> str | None:
    recovery = run.results.recovery
    return None if recovery is None else _fewer(recovery.inputs, requested)


def _used_test(run: Run, requested: str) -> str | None:
    return _fewer(run.results.test_images, requested)


def _used_recovery(run: Run, requested: str) -> str | None:
    recovery = run.results.recovery
    if recovery is None or not recovery.kept:
        return None
    return f"{requested}; best result: {recovery.kept}"


def _used_alignment(run: Run, requested: str) -> str | None:
    """Return the power of two that all pruned widths are multiples of, if it is smaller."""
    groups = () if run.plan is None else run.plan.groups
    steps = [group.kept & -group.kept for group in groups if 0 < group.kept < group.units]
    if not steps or not requested.isdigit() or min(steps) >= int(requested):
        return None
    return f"{min(steps)} ({requested} requested; narrow layers get smaller steps)"


_USED: dict[str, Callable[[Run, str], str | None]] = {
    "align": _used_alignment,
    "recover": _used_recovery,
    "images": _used_images,
    "test": _used_test,
}


def _fewer(used: Number, requested: str) -> str | None:
    """Name the number that there were, if it is smaller.

    >>> _fewer(900, "1024"), _fewer(1024, "1024")
    ('900 (1024 requested)', None)
    """
    if used is None or f"{used:.0f}" == requested:
        return None
    return f"{used:.0f} ({requested} requested)"
