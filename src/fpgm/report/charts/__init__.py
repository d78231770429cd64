"""Charts of filters, plans and results: each function takes plain values and returns Altair charts.

Nothing here needs torch. `save` writes a chart as PNG, SVG or PDF.
"""

from fpgm.report.charts.curves import (
    accuracy_by_epoch,
    accuracy_by_interval,
    accuracy_by_macs,
    kept_by_group,
    runs_by_macs,
    sensitivity_curves,
    time_savings,
)
from fpgm.report.charts.filters import filter_map, norm_distribution
from fpgm.report.charts.image_files import save
from fpgm.report.charts.layers import group_widths
from fpgm.report.charts.maps import feature_maps, similar_maps

__all__ = [
    "accuracy_by_epoch",
    "accuracy_by_interval",
    "accuracy_by_macs",
    "feature_maps",
    "filter_map",
    "group_widths",
    "kept_by_group",
    "norm_distribution",
    "runs_by_macs",
    "save",
    "sensitivity_curves",
    "similar_maps",
    "time_savings",
]
