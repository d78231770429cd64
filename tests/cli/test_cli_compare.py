"""`fpgm compare`: one table of many methods, kept, gone on with, and shown side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.shell import refused, run

from fpgm.cli.compare import format_table
from fpgm.models.registry import load_model
from fpgm.paper.baselines.registry import METHODS
from fpgm.pruning.serialization import load, save
from fpgm.report.run import read_run

LOOK = ("--data", "synthetic", "--images", 64, "--test", 64, "--input", "1x3x16x16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("net") / "net.py"
    file.write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),\n"
        "        nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),\n"
        "        nn.Flatten(), nn.Linear(8, 10))\n"
    )
    return f"{file}:make"


def compared(model: str, out: Path, *options: Any) -> dict[str, Any]:
    said, _ = run("compare", model, *LOOK, "--macs", 0.4, "--out", out, "--json", *options)
    return dict(json.loads(said))


def test_a_table_and_what_is_behind_it(model: str, tmp_path: Path) -> None:
    out = tmp_path / "a"
    result = compared(model, out, "--methods", "fpgm,taylor,mil", "--steps", 4)
    assert [row["method"] for row in result["rows"]] == ["fpgm", "taylor", "mil"]
    fpgm, taylor, mil = result["rows"]
    for row in (fpgm, taylor):
        assert row["macs_removed"] == pytest.approx(0.4, abs=0.12)
        assert row["steps"] == 4
        assert None not in (row["once"], row["recovered"], row["tuned"])
    assert mil["recovered"] is None
    assert (out / "compare.md").read_text().startswith("| method | MACs removed | one-shot |")
    assert "- Taylor: " in (out / "compare.md").read_text()
    assert result["methods"]["taylor"]["cite"].endswith("arXiv:1906.10771")
    assert (out / "compare.tex").read_text().startswith(r"\begin{tabular}{lrrrrr}")
    assert json.loads((out / "compare.json").read_text())["rows"] == result["rows"]
    assert Path(result["page"]).is_file()
    shown = read_run(out / "taylor")
    assert shown.plan is not None
    assert shown.settings["criterion"] == "taylor"
    small, _ = run("bench", out / "fpgm", "--backend", "eager", "--seconds", 0.05,
                   "--model", model, "--json")  # fmt: skip
    assert json.loads(small)["rows"]


def test_it_resumes_where_it_stopped(model: str, tmp_path: Path) -> None:
    out = tmp_path / "a"
    first = compared(model, out, "--methods", "fpgm,l2")
    results = out / "fpgm" / "results.json"
    changed = json.loads(results.read_text())
    changed["row"]["once"] = 0.123
    results.write_text(json.dumps(changed))
    again = compared(model, out, "--methods", "fpgm,l2,random")
    assert again["rows"][0]["once"] == 0.123  # not made again
    assert again["rows"][1] == first["rows"][1]
    assert len(again["rows"]) == 3


def test_each_seed_is_a_separate_row(model: str, tmp_path: Path) -> None:
    result = compared(model, tmp_path / "a", "--methods", "random", "--seeds", 2)
    assert [row["seed"] for row in result["rows"]] == [0, 1]
    assert "±" in (tmp_path / "a" / "compare.md").read_text()


def test_failures_are_reported_and_the_rest_continues(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),\n"
        "        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))\n"
    )
    said, _ = run(
        "compare", f"{file}:make", *LOOK, "--macs", 0.4, "--out", tmp_path / "a",
        "--methods", "slimming,fpgm", "--steps", 2, code=2,
    )  # fmt: skip
    assert "| Slimming | " in said
    assert "slimming: No layer is followed by a batch norm with a scale" in said
    assert "| FPGM " in said


def test_methods_that_train_need_steps(model: str, tmp_path: Path) -> None:
    """Without them SFP would be the plain norm under another name."""
    given = ("compare", model, *LOOK, "--macs", 0.4, "--images", 16, "--test", 16, "--out")
    said, _ = run(*given, tmp_path / "a", "--methods", "all")
    assert (
        "Skipped because they need training: fpgm-soft, fpgm-mix-soft, sfp, rethinking, mil, "
        "slimming, group-norm; pass --steps 2 or more.\n"
    ) in said
    document = json.loads((tmp_path / "a/compare.json").read_text())
    rows = document["rows"]
    assert set(document["left_out"]) | {row["method"] for row in rows} == set(METHODS)
    assert {METHODS[row["method"]].needs for row in rows} == {"weights", "inputs", "labels"}
    two = ("--methods", "sfp,fpgm", "--steps")
    assert refused(*given, tmp_path / "b", *two, 1) == (
        "sfp trains before pruning: pass --steps 2 or more."
    )
    run(*given, tmp_path / "b", *two, 2)
    sfp, fpgm = json.loads((tmp_path / "b/compare.json").read_text())["rows"]
    assert (sfp["steps"], fpgm["steps"]) == (2, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--methods", "fpgn"), "Unknown method 'fpgn' (did you mean 'fpgm'?)"),
        (("--macs", 1.5), "macs is 1.5"),
        (("--macs", 0), "--macs is 0: nothing would be removed."),
        (("--test", 0), "--test and --images must be at least 1."),
        (("--lr", "nan"), "--lr is nan: give a positive number."),
        (("--residual", "foo"), "residual is 'foo'"),
        (("--align", 0), "align is 0"),
        (("--mean", "0,0,0", "--std", "0,1,1"), "--std is '0,1,1': inputs are divided by it"),
    ],
)
def test_refusals(model: str, tmp_path: Path, options: tuple[Any, ...], message: str) -> None:
    out = tmp_path / "a"
    given = ("--macs", 0.4, *options)
    assert message in refused("compare", model, *LOOK, "--out", out, *given)
    assert not out.exists()


def test_a_folder_of_something_else(model: str, tmp_path: Path) -> None:
    out = tmp_path / "a"
    compared(model, out, "--methods", "fpgm")
    other = ("compare", model, *LOOK, "--macs", 0.3, "--methods", "fpgm", "--out")
    message = "contains a different comparison (different macs): choose another --out."
    assert message in refused(*other, out)
    assert "nodata" in refused(*other, out, "--data", "nodata")  # what is wrong comes first
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").touch()
    assert "is not empty: choose another --out." in refused(*other, tmp_path / "b")


def test_more_classes_than_outputs(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),\n"
        "        nn.Linear(8, 9))\n"
    )
    requested = ("compare", f"{file}:make", *LOOK, "--macs", 0.4, "--out", tmp_path / "a")
    assert refused(*requested, "--methods", "taylor") == (
        f"--data synthetic has 10 classes, but {file}:make has 9 outputs: they must match."
    )
    assert not (tmp_path / "a").exists()


def test_results_are_verified_and_evaluated_on_all_images(model: str, tmp_path: Path) -> None:
    out = tmp_path / "a"
    compared(model, out, "--methods", "l2", "--test", 10**6)
    assert json.loads((out / "l2/results.json").read_text())["test_images"] == 256
    said, _ = run("verify", out / "l2", "--model", model)
    assert said.endswith("The weights are those that fpgm compare saved (same sha256).\n")
    small = out / "l2/small.safetensors"
    net = load(small, lambda: load_model(model))
    with torch.no_grad():
        next(net.parameters()).add_(1)
    save(net, small)
    message = refused("verify", out / "l2", "--model", model, code=1)
    assert "its tensors have changed since" in message


def test_means_and_failures_in_the_table() -> None:
    row = {"method": "random", "macs_removed": 0.5, "recovered": 0.8, "tuned": None, "seconds": 1.0}
    rows = [{**row, "once": 0.2, "seed": 0}, {**row, "once": 0.4, "seed": 1},
            {"method": "cp", "seed": 0, "failed": "no"}]  # fmt: skip
    _, (_, random, cp) = format_table(rows, 0.9)
    assert random == ("random", "50.0%", "30.00% ± 14.14%", "80.00% ± 0.00%", "–", "1 s")
    assert cp == ("CP", "failed", "–", "–", "–", "–")
