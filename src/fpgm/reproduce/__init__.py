"""The paper's tables and figures, made again: at its own scale, or at one that two cores finish."""

from fpgm.reproduce.printed import TABLES
from fpgm.reproduce.results import Made, Results
from fpgm.reproduce.rows import Row, Table

__all__ = ["TABLES", "Made", "Results", "Row", "Table"]
