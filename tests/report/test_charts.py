"""Figures: what they are made of, and that they become files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.shell import run
from torch import nn

import fpgm
from fpgm.report import charts as figures
from fpgm.report.analysis.api import analyze

NET = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
LAYER = analyze(NET, torch.zeros(1, 3, 8, 8)).layers[0]


def rows_of(chart: Any) -> list[dict[str, Any]]:
    """All rows of data in a figure."""
    result = []
    todo = [chart.to_dict()]
    while todo:
        part = todo.pop()
        result += part.get("data", {}).get("values", [])
        todo += part.get("layer", [])
    return result


def every_figure() -> dict[str, Any]:
    plan = fpgm.plan(NET, torch.zeros(1, 3, 8, 8), rate=0.5)
    lines = {"fpgm": [(0.3, 0.9), (0.5, 0.8)], "l2": [(0.3, 0.89), (0.5, 0.79)]}
    maps = np.random.default_rng(0).normal(size=(6, 5, 5))
    timed = [{"runtime": "eager", "model": "a", "theory": 0.4, "realised": 0.3}]
    return {
        "norms": figures.norm_distribution(LAYER),
        "log": figures.norm_distribution(LAYER, log=True),
        "map": figures.filter_map(LAYER, {1, 2}),
        "maps": figures.feature_maps(maps, {2}),
        "replaced": figures.similar_maps(maps, [(2, 0, 0.5)]),
        "macs": figures.accuracy_by_macs(lines, original=0.93),
        "interval": figures.accuracy_by_interval(lines),
        "epoch": figures.accuracy_by_epoch(lines),
        "runs": figures.runs_by_macs(
            [{"run": n, "setting": "a", "macs": 0.1 * n, "accuracy": 0.9} for n in (1, 2)]
        ),
        "kept": figures.kept_by_group(["1. a", "2. b"], {"one": [0.5, 1.0], "two": [0.25, 0.5]}),
        "sensitivity": figures.sensitivity_curves({"a": [0.0, 0.1, 0.5], "b": [0.0, 0.2]}),
        "widths": figures.group_widths(plan.groups),
        "savings": figures.time_savings(timed),
    }


@pytest.mark.parametrize(
    ("kind", "starts"), [("svg", b"<svg"), ("png", b"\x89PNG"), ("pdf", b"%PDF")]
)
def test_every_figure_becomes_a_file(kind: str, starts: bytes, tmp_path: Path) -> None:
    for name, figure in every_figure().items():
        file = tmp_path / f"{name}.{kind}"
        figures.save(figure, file)
        content = file.read_bytes()
        assert content.startswith(starts), name
        assert len(content) > 1500, name


def test_an_svg_has_its_letters_and_every_mark(tmp_path: Path) -> None:
    figures.save(figures.filter_map(LAYER, {1, 2}), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for word in ("kept", "removed", "geometric median", "first direction"):
        assert word in text
    assert text.count('aria-roledescription="point"') == 16 + 1


def test_no_kind_of_file_we_write(tmp_path: Path) -> None:
    with pytest.raises(fpgm.RequestError, match="format 'gif'"):
        figures.save(figures.norm_distribution(LAYER), tmp_path / "a.gif")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(fpgm.FileError, match=r"a\.svg cannot be written"):
        figures.save(figures.norm_distribution(LAYER), tmp_path / "no" / "a.svg")


def test_norms_are_drawn_where_they_are() -> None:
    plotted = [row["norm"] for row in rows_of(figures.norm_distribution(LAYER))]
    assert plotted[:16] == list(LAYER.norms)


def test_a_norm_of_zero_on_a_logarithmic_scale(tmp_path: Path) -> None:
    with torch.no_grad():
        net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1))
        net[0].weight[0] = 0
    layer = analyze(net, torch.zeros(1, 3, 2, 2)).layers[0]
    figures.save(figures.norm_distribution(layer, log=True), tmp_path / "a.svg")
    assert "NaN" not in (tmp_path / "a.svg").read_text()


def test_removed_units_are_marked() -> None:
    kinds = [row["kind"] for row in rows_of(figures.filter_map(LAYER, {1, 2}))]
    assert kinds.count("removed") == 2
    assert kinds[1] == kinds[2] == "removed"
    assert kinds[-1] == "geometric median"


def test_frames_around_what_goes() -> None:
    rows = rows_of(figures.feature_maps(np.zeros((5, 2, 2)), {3}))
    assert [row["channel"] for row in rows if row["removed"]] == [3]


def test_bars_add_up_to_all_units() -> None:
    plan = fpgm.plan(NET, torch.zeros(1, 3, 8, 8), rate=0.5)
    assert sum(row["units"] for row in rows_of(figures.group_widths(plan.groups))) == 16


def test_more_lines_than_colours() -> None:
    lines = {str(n): [(0.0, n / 10), (1.0, n / 10)] for n in range(9)}
    document = json.loads(figures.accuracy_by_macs(lines).to_json())
    assert len(rows_of(figures.accuracy_by_macs(lines))) == 18
    assert len(document["encoding"]["color"]["scale"]["range"]) == 9


def test_the_command_draws(tmp_path: Path) -> None:
    model = tmp_path / "net.py"
    model.write_text(
        "from torch import nn\n"
        "def net(): return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))\n"
    )
    out, _ = run("analyze", f"{model}:net", "--input", "1x3x8x8", "--figures", tmp_path / "drawn")
    assert "Figures are in" in out
    plotted = sorted(file.name for file in (tmp_path / "drawn").iterdir())
    assert plotted == [
        "0.map.svg", "0.norms-log.svg", "0.norms.svg", "1.map.svg", "1.norms-log.svg",
        "1.norms.svg",
    ]  # fmt: skip
