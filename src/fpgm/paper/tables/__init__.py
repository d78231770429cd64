"""The paper's tables and figures, made again: at its own scale, or at one that two cores finish."""

from fpgm.paper.tables.paper_tables import TABLES
from fpgm.paper.tables.row_files import Made, Results
from fpgm.paper.tables.table_schema import Row, Table

__all__ = ["TABLES", "Made", "Results", "Row", "Table"]
