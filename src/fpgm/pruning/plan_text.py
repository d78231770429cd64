"""A plan as text and HTML: a table of groups, the savings, and what is frozen and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from fpgm.utils.folded_rows import fold_rows
from fpgm.utils.html_table import html_table
from fpgm.utils.text import escape_text, format_number, shorten

if TYPE_CHECKING:
    from fpgm.pruning.plan import Group, Latency, Plan, StaleSize

MAX_RATE = 0.7
"""A group that loses more of its units gets a warning."""
MUCH = 0.1
"""Fraction of all channels that norms must freeze for a hint."""
NORM_REASON = "statistics over channels would change"
"""How the reason begins if a norm over channels freezes them."""


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
    lines = [_table(("group", "layers", "units", "removed", ""), fold_rows(rows))]
    lines += [
        f"MACs   {plan.macs_before:,} → {plan.macs_after:,}  (−{plan.macs_removed:.1%})",
        f"params {plan.params_before:,} → {plan.params_after:,}  (−{plan.params_removed:.1%})",
    ]
    if plan.latency is not None:
        lines.append(_latency_text(plan.latency))
    if plan.macs_frozen:
        fraction = plan.macs_frozen / plan.macs_before
        lines.append(f"fixed  {fraction:.1%} of the MACs: none of their channels can be removed")
    reasons = [
        (shorten([name for (name,) in fold_rows([(safe_text(n),) for n in f.layers])]),
         f"({f.channels} channels): {safe_text(f.reason)}")
        for f in plan.frozen
    ]  # fmt: skip
    lines += [f"frozen {layers} {why}" for layers, why in fold_rows(reasons)]
    lines += [f"{kind:<6} {advice}" for kind, advice in plan_advice(plan)]
    lines += _stale_lines(plan.stale)
    lines += [f"note   {safe_text(note)}" for note in plan.notes]
    return "\n".join(lines)


def plan_advice(plan: Plan) -> list[tuple[Literal["WARNING", "hint"], str]]:
    """Warn of groups that lose most of their units, and name the option that frees frozen ones."""
    advice: list[tuple[Literal["WARNING", "hint"], str]] = []
    hard = sorted((g for g in plan.groups if g.rate > MAX_RATE), key=lambda g: -g.rate)
    if hard:
        which = shorten([f"{safe_text(g.name)} {g.rate:.0%}" for g in hard])
        text = (
            f"{'A group loses' if len(hard) == 1 else f'{len(hard)} groups lose'} more than "
            f"{MAX_RATE:.0%} of the units ({which}), which few networks recover from: limit the "
            "rates with rates= or ignore= (--rates, --ignore)."
        )
        advice.append(("WARNING", text))
    over = sum(f.channels for f in plan.frozen if f.reason.startswith(NORM_REASON))
    channels = sum(f.channels for f in plan.frozen) + sum(
        g.units * len(g.layers) for g in plan.groups
    )
    if over > MUCH * channels and all(group.exact for group in plan.groups):
        text = (
            f"Norms over channels freeze {over / channels:.0%} of all channels. approximate=True "
            "(--approximate) prunes most of them, and changes the norms' statistics."
        )
        advice.append(("hint", text))
    return advice


def plan_line(plan: Plan) -> str:
    """Summarize in one line what a plan removes."""
    units = sum(group.units for group in plan.groups)
    removed = units - sum(group.kept for group in plan.groups)
    parts = [
        f"MACs {format_change(plan.macs_removed)}",
        f"parameters {format_change(plan.params_removed)}",
        f"{removed} of {units} units in {len(plan.groups)} groups removed",
    ]
    if plan.latency is not None and plan.latency.crowd is None:
        parts.append(
            f"time {format_change(plan.latency.measured)} in {safe_text(plan.latency.backend)}"
        )
    if plan.frozen:
        parts.append(f"{sum(f.channels for f in plan.frozen)} channels frozen")
    return ", ".join(parts)


def plan_html(plan: Plan) -> str:
    """Show a plan as an HTML table of its groups."""
    rows = [
        (safe_text(g.name), str(len(g.layers)), str(g.units), str(g.kept), f"{g.rate:.0%}")
        for g in plan.groups
    ]
    frozen = [f"frozen: {safe_text(shorten(f.layers))}: {safe_text(f.reason)}" for f in plan.frozen]
    notes = [safe_text(note) for note in plan.notes]
    header = ("group", "layers", "units", "kept", "removed")
    return html_table(f"Plan: {plan_line(plan)}", header, rows, [*frozen, *notes])


def format_change(removed: float) -> str:
    """Write a removed fraction as a change.

    >>> format_change(0.5), format_change(-0.034), format_change(0.0)
    ('−50.0%', '+3.4%', '0.0%')
    """
    text = f"{abs(removed):.1%}"
    return text if text == "0.0%" else ("−" if removed > 0 else "+") + text


def safe_text(text: str) -> str:
    """Escape text from a file for a terminal."""
    return escape_text(text, 300)


def _latency_text(latency: Latency) -> str:
    before = format_number(1000 * latency.seconds_before)
    after = format_number(1000 * latency.seconds_after)
    return (
        f"time   {before} ms → {after} ms  (−{latency.measured:.1%}; "
        f"requested {latency.asked:.1%}, predicted {latency.predicted:.1%}; "
        f"{safe_text(latency.backend)}, threads: {latency.threads}"
        f"{f'; unreliable: {safe_text(latency.crowd)}' if latency.crowd else ''})"
    )


def _stale_lines(stale: Iterable[StaleSize]) -> list[str]:
    """Write one line for every attribute and value, with the modules that hold it."""
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
