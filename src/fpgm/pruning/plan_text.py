"""A plan as people read it: a table of groups, what is saved, and what stays whole and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fpgm.utils.text import figure, printable, shorten

if TYPE_CHECKING:
    from fpgm.pruning.plan import Group, Latency, Plan, StaleSize


def plan_text(plan: Plan) -> str:
    """Print a plan as a table and a few lines below it."""
    rows = [
        (
            safe_text(g.name),
            str(len(g.layers)),
            f"{g.units} → {g.kept}",
            f"{g.rate:.0%}",
            _exactness(g),
        )
        for g in plan.groups
    ]
    lines = [_table(("group", "layers", "units", "removed", ""), rows)]
    lines += [
        f"MACs   {plan.macs_before:,} → {plan.macs_after:,}  (−{plan.macs_removed:.1%})",
        f"params {plan.params_before:,} → {plan.params_after:,}  (−{plan.params_removed:.1%})",
    ]
    if plan.latency is not None:
        lines.append(_timed(plan.latency))
    lines += [
        f"frozen {safe_text(shorten(f.layers))} ({f.channels} channels): {safe_text(f.reason)}"
        for f in plan.frozen
    ]
    lines += _still_saying(plan.stale)
    lines += [f"note   {safe_text(note)}" for note in plan.notes]
    return "\n".join(lines)


def safe_text(text: str) -> str:
    """Return text from a file as a terminal may have it."""
    return printable(text, 300)


def _timed(found: Latency) -> str:
    before, after = 1000 * found.seconds_before, 1000 * found.seconds_after
    return (
        f"time   {figure(before)} ms → {figure(after)} ms  (−{found.measured:.1%}; asked "
        f"{found.asked:.1%}, predicted {found.predicted:.1%}; {safe_text(found.backend)}, threads: "
        f"{found.threads})"
    )


def _still_saying(stale: Iterable[StaleSize]) -> list[str]:
    """One line for every attribute and value, with the modules that hold it."""
    holders: dict[tuple[str, int | tuple[int, ...]], list[str]] = {}
    for one in stale:
        holders.setdefault((one.name, one.value), []).append(one.module or "the model")
    return [
        f"stale  {safe_text(name)} of {safe_text(shorten(tuple(modules)))} still says {value}"
        for (name, value), modules in holders.items()
    ]


def _exactness(group: Group) -> str:
    return "" if group.exact else "approximate"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
