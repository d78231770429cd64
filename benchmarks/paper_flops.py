"""Print the paper's FLOPs columns next to our counts, and write them as JSON and Markdown.

    python benchmarks/paper_flops.py

Only arithmetic, under a second. The files are written to this folder.
"""

from __future__ import annotations

import json
from pathlib import Path

from fpgm.paper.flops import (
    FlopsRow,
    flops_rows,
    fractional_width,
    integer_width,
    macs,
    paper_layer_list,
)

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
    table = flops_rows()
    lines = [HEADER, ("---",) * len(HEADER), *(cells(row) for row in table)]
    markdown = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    (here / "paper_flops.md").write_text(markdown, encoding="utf-8")
    records = [record(row) for row in table]
    text = json.dumps(records, indent=2, ensure_ascii=False) + "\n"
    (here / "paper_flops.json").write_text(text, encoding="utf-8")
    print(markdown, end="")


def cells(row: FlopsRow) -> tuple[str, ...]:
    printed = "–" if row.paper_percent is None else f"{row.paper_percent:.1f}"
    if row.paper_flops is not None:
        printed += f" ({row.paper_flops:.2E})".replace("E+0", "E")
    agrees = {True: " ✓", False: " ✗", None: ""}[row.matches_paper]
    return (
        str(row.table),
        row.model,
        row.rate_label,
        printed,
        f"{row.paper_count_percent:.1f}{agrees}",
        f"{row.fractional_percent:.1f}",
        f"{row.integer_percent:.1f}",
        f"{macs(row.layers):,.0f}",
        f"{macs(row.layers, row.rate, integer_width):,.0f}",
        row.note,
    )


def record(row: FlopsRow) -> dict[str, object]:
    return {
        "table": row.table,
        "model": row.model,
        "rate": row.rate_label,
        "printed_percent": row.paper_percent,
        "printed_flops": row.paper_flops,
        "counted_as_printed_percent": round(row.paper_count_percent, 3),
        "counted_as_printed_macs": round(
            macs(paper_layer_list(row.layers), row.rate, fractional_width)
        ),
        "fractional_percent": round(row.fractional_percent, 3),
        "whole_percent": round(row.integer_percent, 3),
        "macs": round(macs(row.layers)),
        "macs_after_whole": round(macs(row.layers, row.rate, integer_width)),
        "reproduced": row.matches_paper,
        "note": row.note,
    }


if __name__ == "__main__":
    main()
