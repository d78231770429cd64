"""The paper's tables and figures, made again: at its own scale, or at one that two cores finish."""

from fpgm.reproduce.printed import TABLES, Row, Table
from fpgm.reproduce.results import Made, Results

__all__ = ["TABLES", "Made", "Results", "Row", "Table"]
