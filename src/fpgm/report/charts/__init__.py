"""Figures of filters, plans and results, each a function that returns an Altair chart.

They take plain values and know nothing of torch. `save` writes PNG, SVG or PDF.
"""

from fpgm.report.charts.curves import (
    accuracy_by_epoch,
    accuracy_by_interval,
    accuracy_by_macs,
    kept_by_group,
    runs_by_macs,
    savings,
    sensitivity_curves,
)
from fpgm.report.charts.filters import filter_map, norm_distribution
from fpgm.report.charts.layers import widths
from fpgm.report.charts.maps import feature_maps, replaced_maps
from fpgm.report.charts.save import save

__all__ = [
    "accuracy_by_epoch",
    "accuracy_by_interval",
    "accuracy_by_macs",
    "feature_maps",
    "filter_map",
    "kept_by_group",
    "norm_distribution",
    "replaced_maps",
    "runs_by_macs",
    "save",
    "savings",
    "sensitivity_curves",
    "widths",
]
