"""The paper's tables made again: what is printed, what is missing, and rows that many may fill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.shell import refused, run
from torch import nn

import fpgm
from fpgm import paper
from fpgm import train as recipes
from fpgm.models import resnet, vgg16
from fpgm.recipes import SHIPPED
from fpgm.reproduce import TABLES, Made, Results, full
from fpgm.reproduce.quick import WIDTH, Data, Effort, Quick, pfec_rates, vgg_options
from fpgm.store import save
from fpgm.train import read_recipe

TABLE1, TABLE3, TABLE4 = TABLES["table1"], TABLES["table3"], TABLES["table4"]


def data(shape: tuple[int, ...] = (3, 32, 32)) -> Data:
    random = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(8, *shape, generator=random), torch.randint(0, 10, (8,), generator=random))
        for _ in range(2)
    ]

    @torch.no_grad()
    def accuracy(net: nn.Module) -> float:
        x, labels = batches[0]
        return float((net(x).argmax(1) == labels).double().mean())

    return Data(batches, lambda seed: batches, accuracy)


class TestPrinted:
    def test_keys_are_unique_and_columns_known(self) -> None:
        for table in TABLES.values():
            keys = [row.key for row in table.rows]
            assert len(set(keys)) == len(keys)
            for row in table.rows:
                assert set(row.printed) == set(table.columns)
                assert len(row.labels) == len(table.labels)

    def test_drops_are_differences(self) -> None:
        """But for the misprints that docs/paper.md lists."""
        wrong = {
            row.key
            for row in TABLE1.rows
            if row.printed["accuracy"] is not None
            and row.printed["baseline"] - row.printed["accuracy"]  # type: ignore[operator]
            != pytest.approx(row.printed["drop"], abs=0.006)
        }
        assert wrong == {
            "resnet56-pfec-scratch", "resnet110-pfec-scratch", "resnet110-pfec-trained",
            "resnet110-fpgm-40-trained",
        }  # fmt: skip

    def test_every_recipe_is_there(self) -> None:
        for table in TABLES.values():
            for row in table.rows:
                if row.recipe is not None:
                    file = SHIPPED / f"{row.recipe}.toml"
                    recipe = read_recipe(file, [*row.changes, "model.weights=x", "data.root=x"])
                    assert recipe.prune is not None
                    if row.rate is not None and table.name != "ablations":
                        assert recipe.prune.rate == row.rate

    def test_savings_of_our_rows_follow_from_their_rates(self) -> None:
        for row in TABLE1.rows:
            if row.rate is not None:
                layers = paper.cifar_resnet(int(row.network.removeprefix("resnet")))
                share = paper.saving(layers, row.rate, paper.fractional)
                assert round(share, 1) == row.printed["FLOPs"]


class TestResults:
    def test_what_is_not_there_is_missing(self, tmp_path: Path) -> None:
        results = Results(tmp_path, TABLE1, "quick")
        row = TABLE1.rows[0]
        results.keep(row, 0, Made({"accuracy": 90.0, "FLOPs": 42.0}, 3.0, "so"), "cmd")
        results.keep(row, 1, Made({"accuracy": 91.0, "FLOPs": 42.0}, 5.0, "so"), "cmd")
        header, lines = results.shown()
        assert header[:3] == ("network", "method", "from")
        assert lines[0][6:9] == ("90.83", "90.50 ± 0.71", "-0.33")
        assert lines[0][3:6] == ("92.2", "missing", "")
        assert lines[0][-3:] == ("2", "4", "so")
        assert lines[1][6:9] == ("91.09", "missing", "")
        files = results.write()
        assert [file.suffix for file in files] == [".md", ".tex", ".json"]
        told = json.loads(files[2].read_text())
        assert told["rows"][1]["made"] is None
        assert [own["seed"] for own in told["rows"][0]["made"]] == [0, 1]
        assert told["rows"][0]["made"][1]["difference"] == {"accuracy": 0.17, "FLOPs": -0.2}
        assert r"90.50 $\pm$ 0.71" in files[1].read_text()

    def test_a_row_that_is_damaged(self, tmp_path: Path) -> None:
        results = Results(tmp_path, TABLE1, "quick")
        results.folder.mkdir()
        row = TABLE1.rows[0]
        nan = '{"ours": {"accuracy": NaN}, "seconds": 1, "how": "", "settings": {}}'
        for content in ("{", "[]", nan):
            (results.folder / f"{row.key}.0.json").write_text(content)
            with pytest.raises(fpgm.FileError, match=r"scratch\.0\.json cannot be read"):
                results.made(row, 0)

    def test_rows_of_other_settings_are_refused(self, tmp_path: Path) -> None:
        row = TABLE1.rows[0]
        Results(tmp_path, TABLE1, "quick", {"steps": 1}).keep(row, 0, Made({}, 1.0, ""), "")
        assert Results(tmp_path, TABLE1, "quick", {"steps": 1}).made(row, 0) is not None
        with pytest.raises(fpgm.FileError, match="was made with another steps: choose another"):
            Results(tmp_path, TABLE1, "quick", {"steps": 2}).made(row, 0)

    def test_scales_are_kept_apart(self, tmp_path: Path) -> None:
        row = TABLE1.rows[0]
        Results(tmp_path, TABLE1, "quick").keep(row, 0, Made({}, 1.0, ""), "")
        assert Results(tmp_path, TABLE1, "full").made(row, 0) is None


class TestQuick:
    def quick(self, weights: Path) -> Quick:
        own = data()
        return Quick(weights, lambda: own, Effort(steps=2, epochs=1, images=8, seconds=0.1), None)

    def test_a_row_of_table_1(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        save(resnet(20), tmp_path / "cifar10_resnet20.safetensors")
        made = self.quick(tmp_path).make("table1", TABLE1.row("resnet20-fpgm-40-scratch"), 0)
        assert made is not None
        assert set(made.ours) == {"baseline", "accuracy", "drop", "FLOPs"}
        whole = paper.saving(paper.cifar_resnet(20), 0.4)
        assert made.ours["FLOPs"] == pytest.approx(whole, abs=0.5)

    def test_without_weights_there_is_no_row(self, tmp_path: Path) -> None:
        quick = self.quick(tmp_path)
        assert quick.make("table1", TABLE1.rows[0], 0) is None
        assert quick.make("table2", TABLES["table2"].rows[0], 0) is None

    def test_vgg_is_trained_once(self, tmp_path: Path) -> None:
        quick = self.quick(tmp_path)
        first = quick.make("table3", TABLE3.rows[0], 0)
        file = tmp_path / "vgg16_quarter.safetensors"
        before = file.read_bytes()
        second = quick.make("table4", TABLE4.rows[0], 0)
        assert file.read_bytes() == before
        assert first is not None
        assert second is not None
        assert set(first.ours) == set(TABLE3.columns)
        assert set(second.ours) == set(TABLE4.columns)
        # A quarter as wide, half of a layer is still half of it.
        assert second.ours["FLOPs"] == pytest.approx(34.2, abs=0.3)

    def test_pfec_prunes_the_layers_it_names(self) -> None:
        rates = pfec_rates()
        assert set(rates.values()) == {0.5}
        assert len(rates) == 7
        plan = fpgm.plan(
            vgg16(width=WIDTH), torch.zeros(1, 3, 32, 32), **vgg_options(TABLE3.rows[0])
        )
        assert {g.name for g in plan.groups if g.kept < g.units} == set(rates)

    @pytest.mark.parametrize("key", ["distance-cosine", "from-trained"])
    def test_an_ablation(self, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read = recipes.read_recipe
        monkeypatch.setattr(
            recipes, "read_recipe", lambda file, given: read(file, [*given, "train.epochs=6"])
        )
        row = TABLES["ablations"].row(key)
        made = self.quick(tmp_path).make("ablations", row, 0)
        assert made is not None
        assert made.ours["accuracy"] > 30  # type: ignore[operator]
        assert 20 < made.ours["FLOPs"] < 80  # type: ignore[operator]
        assert made.how.endswith("6 epochs")

    def test_scratch_rows_prune_while_training(self, tmp_path: Path) -> None:
        """As the paper does; rows from trained weights are pruned at once and trained on."""
        save(resnet(20), tmp_path / "cifar10_resnet20.safetensors")
        made = self.quick(tmp_path).make("table1", TABLE1.row("resnet20-fpgm-mix-40-scratch"), 0)
        assert made is not None
        assert made.how.startswith("FPGM-mix, soft from trained weights")

    def test_times(self, tmp_path: Path) -> None:
        pytest.importorskip("torchvision")
        row = TABLES["table5"].row("resnet18")
        made = self.quick(tmp_path).make("table5", row, 0)
        assert made is not None
        whole = paper.saving(paper.imagenet_resnet(18), 0.3)
        assert made.ours["theory"] == pytest.approx(whole, abs=1.5)


class TestFull:
    def test_every_row_of_ours_has_a_command_and_hours(self) -> None:
        for table in TABLES.values():
            for row in table.rows:
                command = full.command(table, row, Path("out"))
                assert (command is None) == (row.recipe is None) == (full.hours(row) is None)
        row = TABLE1.row("resnet56-fpgm-40-scratch")
        assert full.command(TABLE1, row, Path("out")) == (
            "accelerate launch -m fpgm reproduce table1 --scale full --rows "
            "resnet56-fpgm-40-scratch --out out"
        )

    def test_hours_are_what_they_are_said_to_be(self) -> None:
        row = TABLES["table2"].row("resnet50-fpgm-30-scratch")
        macs = paper.macs(paper.imagenet_resnet(50))
        seconds = 3 * macs * 1_281_167 * 100 / full.SPEED
        assert full.hours(row) == pytest.approx(seconds / 3600)

    def test_a_row_is_trained_by_its_recipe(self, tmp_path: Path) -> None:
        """The same code as at full scale, on another network and data."""
        row = TABLE4.row("fpgm")
        tiny = tmp_path / "tiny.py"
        tiny.write_text(
            "from torch import nn\n"
            "def make():\n"
            "    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3),\n"
            "        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))\n"
        )
        changes = [
            f"model.name={tiny}:make", "data.name=synthetic", "data.crop=0", "data.flip=false",
            "train.epochs=1", "train.schedule=cosine", "prune.ignore=[]",
        ]  # fmt: skip
        made = full.make(row, 0, tmp_path / "runs", tmp_path, changes)
        assert made is not None
        assert 0 < made.ours["FLOPs"] < 60  # type: ignore[operator]
        assert made.how == "cifar10-vgg16-scratch, 1 epochs"

    def test_a_row_without_a_recipe(self, tmp_path: Path) -> None:
        assert full.make(TABLE1.row("resnet56-cp-scratch"), 0, tmp_path, tmp_path, []) is None

    def test_trained_weights_are_found_by_name(self, tmp_path: Path) -> None:
        row = TABLE1.row("resnet56-fpgm-40-trained")
        with pytest.raises(fpgm.FileError, match=r"cifar10_resnet56\.safetensors"):
            full.make(row, 0, tmp_path / "runs", tmp_path, ["data.name=synthetic"])


class TestCommand:
    def test_a_list(self) -> None:
        out, _ = run("reproduce", "table1", "--list", "--json")
        told = json.loads(out)
        assert len(told) == len(TABLE1.rows)
        assert "| resnet56-fpgm-40-scratch " in run("reproduce", "table1", "--list")[0]

    def test_missing_rows_are_shown(self, tmp_path: Path) -> None:
        out, _ = run("reproduce", "table2", "--rows", "resnet18-*", "--out", tmp_path)
        assert out.count("missing") >= 7 * 25
        assert "resnet18-mil-scratch is missing: ImageNet takes days on two cores" in out
        assert (tmp_path / "table2-quick.md").exists()

    def test_an_ablation_and_its_figure(self, tmp_path: Path) -> None:
        pytest.importorskip("altair")
        made = Results(tmp_path, TABLES["ablations"], "quick")
        for key, saved in (("interval-1", 40.0), ("interval-5", 40.0), ("rate-20", 20.0),
                           ("rate-40", 40.0)):  # fmt: skip
            made.keep(TABLES["ablations"].row(key), 0,
                      Made({"accuracy": 98.0, "FLOPs": saved}, 1.0, ""), "")  # fmt: skip
        out, _ = run("reproduce", "fig4", "--out", tmp_path, "--json")
        files = [Path(file) for file in json.loads(out)["files"]]
        assert [file.name for file in files] == ["fig4-interval.svg", "fig4-flops.svg"]
        assert all(file.read_text().startswith("<svg") for file in files)

    def test_figures_of_trained_weights(self, tmp_path: Path) -> None:
        pytest.importorskip("altair")
        save(resnet(56), tmp_path / "cifar10_resnet56.safetensors")
        for name, count in (("fig3", 4), ("fig5", 2)):
            out, _ = run("reproduce", name, "--weights", tmp_path, "--out", tmp_path / "out",
                         "--data", "cifar10-sample", "--json")  # fmt: skip
            files = json.loads(out)["files"]
            assert len(files) == count
            assert all(Path(file).stat().st_size > 1000 for file in files)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("table9",), "There is no 'table9': give one of table1,"),
            (("table1", "--scale", "tiny"), "--scale is 'tiny': give quick or full."),
            (("table1", "--rows", "x*"), "--rows 'x*' matches none"),
            (("fig4",), "fig4 is drawn from ablations: run fpgm reproduce ablations first."),
            (("fig3", "--weights", "no"), "no/cifar10_resnet56.safetensors is not there"),
        ],
    )
    def test_refusals(self, tmp_path: Path, options: tuple[Any, ...], message: str) -> None:
        assert message in refused("reproduce", *options, "--out", tmp_path)
