"""A table as Markdown and as LaTeX."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

_SPECIAL = {"&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "$": r"\$", "{": r"\{", "}": r"\}",
            "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}",
            "±": r"$\pm$", "×": r"$\times$", "→": r"$\to$", "−": "$-$", "–": "--"}  # fmt: skip


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Write a Markdown table; all but the first `left` columns are right-aligned.

    >>> print(markdown_table(("name", "n"), [("a", "1")]))
    | name | n |
    | --- | --: |
    | a | 1 |
    """
    marks = ["---" if place < left else "--:" for place in range(len(header))]
    lines = [header, marks, *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
                     for line in lines)  # fmt: skip


def latex_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    r"""Write a LaTeX tabular with special characters escaped.

    >>> print(latex_table(("name", "acc. %"), [("a_b", "1")]))
    \begin{tabular}{lr}
    \hline
    name & acc. \% \\
    \hline
    a\_b & 1 \\
    \hline
    \end{tabular}
    """
    kinds = "".join("l" if place < left else "r" for place in range(len(header)))
    lines = [" & ".join(escape_latex(cell) for cell in line) + r" \\" for line in (header, *rows)]
    return "\n".join(
        [rf"\begin{{tabular}}{{{kinds}}}", r"\hline", lines[0], r"\hline", *lines[1:], r"\hline",
         r"\end{tabular}"]
    )  # fmt: skip


def format_mean_std(values: Sequence[float], form: str = ".2%") -> str:
    """Format a mean, and the standard deviation if there are several values.

    >>> format_mean_std([0.5]), format_mean_std([0.4, 0.6]), format_mean_std([])
    ('50.00%', '50.00% ± 14.14%', '–')
    """
    if not values:
        return "–"
    mean = format(statistics.mean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {format(statistics.stdev(values), form)}"


def escape_latex(text: str) -> str:
    """Escape LaTeX's special characters."""
    return "".join(_SPECIAL.get(letter, letter) for letter in text)
