"""The README's first screen: short, and with no figure that was not measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIGURE = re.compile(r"\d[\d.,]*(?= ?(?:%|×|s\b|seconds\b))")


def first_screen() -> str:
    """Everything before the results."""
    return (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]


def measured() -> dict[str, str]:
    """The figures of benchmarks/demo.json, rounded as the README rounds them."""
    demo = json.loads((ROOT / "benchmarks" / "demo.json").read_text(encoding="utf-8"))
    accuracy = demo["accuracy"]
    return {
        "MACs": f"{100 * demo['macs_removed']:.0f}",
        "before": f"{100 * accuracy['original']:.1f}",
        "after": f"{100 * accuracy['recovered']:.1f}",
        **{name: f"{factor:.1f}" for name, factor in demo["speedup"].items()},
    }


def test_every_figure_on_the_first_screen_was_measured() -> None:
    figures = re.findall(FIGURE, first_screen())
    assert figures == list(measured().values())


def test_the_results_repeat_them() -> None:
    expected = measured()
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| wide ResNet"))
    assert f"{expected['before']} → {expected['after']} %" in row
    assert f"−{expected['MACs']} %" in row
    assert f"{expected['PyTorch']}× (PyTorch)" in row
    assert f"{expected['ONNX Runtime']}× (ONNX Runtime)" in row


def test_the_original_is_the_network_that_ships() -> None:
    file = ROOT / "src" / "fpgm" / "models" / "assets" / "resnet11_wide.json"
    shipped = json.loads(file.read_text(encoding="utf-8"))["accuracy"]
    assert measured()["before"] == f"{100 * shipped['float16, the 1,000 that ship']:.1f}"


def test_it_is_short() -> None:
    screen = first_screen()
    python = re.findall(r"^```python\n(.*?)^```$", screen, re.M | re.S)
    assert len(python) == 1
    assert len(python[0].splitlines()) <= 12
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    results = page.partition("## Results")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!model|---).*\|$", results, re.M)
    assert 1 <= len(rows) <= 6
    assert all(re.search(r"`(?:python|make|fpgm) [^`]+` \|$", row) for row in rows)
