"""HTML reports about runs, charts, and the analysis of a model's weights.

- `page`, `compare`, `serve`: the page of one run, of several, and the local server
- `run`, `records`: read a run folder
- `headline`: the cards at the top of the page
- `layers`: the network diagram and the layer table
- `chart_data`: the charts of the page
- `charts`: charts from plain values, as PNG, SVG or PDF
- `analysis`: `analyze`, statistics of a model's filters before pruning
- `*.html`, `page.css`, `page.js`: templates of the page
"""

from fpgm.report.page import render_comparison, render_page
from fpgm.report.run import Run, read_run

__all__ = ["Run", "read_run", "render_comparison", "render_page"]
