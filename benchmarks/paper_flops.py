"""Print the paper's FLOPs columns beside our counts, and keep them as JSON and Markdown.

    python benchmarks/paper_flops.py

Arithmetic only, under a second. The files written stand beside this one.
"""

from __future__ import annotations

import json
from pathlib import Path

from fpgm.paper.flops import Row, as_printed, fractional, macs, rows, whole

HEADER = (
    "table",
    "network",
    "rate",
    "printed",
    "counted as printed",
    "whole network, fractional filters",
    "whole network, whole filters",
    "MACs",
    "MACs left (whole filters)",
    "note",
)


def main() -> None:
    here = Path(__file__).parent
    table = rows()
    lines = [HEADER, ("---",) * len(HEADER), *(cells(row) for row in table)]
    markdown = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    (here / "paper_flops.md").write_text(markdown, encoding="utf-8")
    records = [record(row) for row in table]
    text = json.dumps(records, indent=2, ensure_ascii=False) + "\n"
    (here / "paper_flops.json").write_text(text, encoding="utf-8")
    print(markdown, end="")


def cells(row: Row) -> tuple[str, ...]:
    printed = "–" if row.printed_percent is None else f"{row.printed_percent:.1f}"
    if row.printed_flops is not None:
        printed += f" ({row.printed_flops:.2E})".replace("E+0", "E")
    agrees = {True: " ✓", False: " ✗", None: ""}[row.reproduced]
    return (
        str(row.table),
        row.model,
        row.asked,
        printed,
        f"{row.counted_their_way:.1f}{agrees}",
        f"{row.fractional:.1f}",
        f"{row.whole:.1f}",
        f"{macs(row.layers):,.0f}",
        f"{macs(row.layers, row.rate, whole):,.0f}",
        row.note,
    )


def record(row: Row) -> dict[str, object]:
    return {
        "table": row.table,
        "model": row.model,
        "rate": row.asked,
        "printed_percent": row.printed_percent,
        "printed_flops": row.printed_flops,
        "counted_as_printed_percent": round(row.counted_their_way, 3),
        "counted_as_printed_macs": round(macs(as_printed(row.layers), row.rate, fractional)),
        "fractional_percent": round(row.fractional, 3),
        "whole_percent": round(row.whole, 3),
        "macs": round(macs(row.layers)),
        "macs_after_whole": round(macs(row.layers, row.rate, whole)),
        "reproduced": row.reproduced,
        "note": row.note,
    }


if __name__ == "__main__":
    main()
