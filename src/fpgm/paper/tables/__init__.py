"""Reproduction of the paper's tables and figures, at full scale or at a quick scale for CPUs."""

from fpgm.paper.tables.paper_tables import TABLES
from fpgm.paper.tables.row_files import RowResult, RowStore
from fpgm.paper.tables.table_schema import PaperTable, TableRow

__all__ = ["TABLES", "PaperTable", "RowResult", "RowStore", "TableRow"]
