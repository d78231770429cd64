"""The paper's tables made again: what is printed, what is missing, and rows that many may fill."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.shell import refused, run
from torch import nn

import fpgm
from fpgm import training as recipes
from fpgm.models import resnet, vgg16
from fpgm.paper import flops as paper
from fpgm.paper.tables import TABLES, RowResult, RowStore
from fpgm.paper.tables import quick_scale as quick
from fpgm.paper.tables import render as page
from fpgm.paper.tables.paper_tables import BASELINES, baseline_row
from fpgm.paper.tables.quick_scale import (
    VGG_WEIGHTS,
    VGG_WIDTH,
    QuickBudget,
    QuickData,
    QuickScale,
    pfec_rates,
    vgg_options,
)
from fpgm.pruning.serialization import save
from fpgm.training import read_recipe
from fpgm.training.recipes import SHIPPED

TABLE1, TABLE3, TABLE4 = TABLES["table1"], TABLES["table3"], TABLES["table4"]


def data(shape: tuple[int, ...] = (3, 32, 32)) -> QuickData:
    random = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(8, *shape, generator=random), torch.randint(0, 10, (8,), generator=random))
        for _ in range(2)
    ]

    @torch.no_grad()
    def accuracy(net: nn.Module) -> float:
        x, labels = batches[0]
        return float((net(x).argmax(1) == labels).double().mean())

    return QuickData(batches, lambda seed: batches, accuracy)


class TestPrinted:
    def test_keys_are_unique_and_columns_known(self) -> None:
        for table in TABLES.values():
            keys = [row.key for row in table.rows]
            assert len(set(keys)) == len(keys)
            for row in table.rows:
                assert set(row.paper) == set(table.keys)
                assert set(row.spread) <= set(table.keys)
                assert len(row.labels) == len(table.labels)

    def test_drops_are_differences(self) -> None:
        """But for the misprints that docs/paper.md lists."""
        wrong = {
            row.key
            for row in TABLE1.rows
            if row.paper["accuracy"] is not None
            and row.paper["baseline"] - row.paper["accuracy"]  # type: ignore[operator]
            != pytest.approx(row.paper["drop"], abs=0.006)
        }
        assert wrong == {
            "resnet56-pfec-scratch", "resnet110-pfec-scratch", "resnet110-pfec-trained",
            "resnet110-fpgm-40-trained",
        }  # fmt: skip

    def test_every_recipe_does_what_its_row_says(self) -> None:
        """Of those that are not quoted: test_cited_rows.py has the others."""
        result = [(t, row) for t in TABLES.values() for row in t.rows if row.recipe is not None
                 and not row.cited]  # fmt: skip
        assert len(result) == 80
        for table, row in result:
            file = SHIPPED / f"{row.recipe}.toml"
            recipe = read_recipe(file, [*row.changes, "data.root=x"] + ["model.weights=x"] * (
                row.start == "trained"))  # fmt: skip
            assert recipe.model.name == row.network
            assert recipe.prune is not None
            if row.prunes and row.rate is not None:
                assert recipe.prune.rate == row.rate
            assert (recipe.model.weights is not None) == (row.start == "trained")
            if row.start == "trained":  # at a tenth of the learning rate, as the paper says
                assert recipe.train.lr == 0.01
            if row.method == "sfp":
                assert (recipe.prune.criterion, recipe.prune.mode) == ("l2", "soft")
            if row.method == "fpgm-mix":
                assert recipe.prune.criterion == "mix"
            short = recipe.train.epochs // 4 if table is TABLE3 else 0
            assert row.epochs == recipe.train.epochs + short

    def test_savings_of_our_rows_follow_from_their_rates(self) -> None:
        for row in TABLE1.rows:
            if row.rate is not None:
                layers = paper.cifar_resnet(int(row.network.removeprefix("resnet")))
                fraction = paper.percent_saved(layers, row.rate, paper.fractional_width)
                assert round(fraction, 1) == row.paper["FLOPs"]

    def test_flops_that_are_left_follow_too(self) -> None:
        """But for 2.43E7, which is 2.34E7 with two digits swapped."""
        for row in TABLE1.rows:
            if row.rate is not None:
                layers = paper.paper_layer_list(
                    paper.cifar_resnet(int(row.network_name.removeprefix("resnet")))
                )
                left = paper.macs(layers, row.rate, paper.fractional_width)
                result = row.paper["FLOPs left"]
                assert f"{left:.2E}" == ("2.34E+07" if result == 2.43e7 else f"{result:.2E}")

    def test_baselines_are_those_of_the_tables(self) -> None:
        for name, before in (("table1", "baseline"), ("table2", "top-1"), ("table4", "baseline")):
            for row in TABLES[name].rows:
                if not row.cited:
                    complete = baseline_row(row.network)
                    assert row.paper[before] == complete.paper["top-1"]
                    assert row.spread.get(before) == complete.spread.get("top-1")


def cells(results: RowStore, key: str, column: str) -> tuple[str, ...]:
    """What a row shows of a column: the paper's, ours, the difference."""
    header, (line,) = page.table_cells(results, [results.table.row(key)])
    place = header.index(f"{column}, paper")
    return line[place : place + 3]


class TestResults:
    key = "resnet20-sfp-scratch"

    def test_what_is_not_there_is_missing(self, tmp_path: Path) -> None:
        results = RowStore(tmp_path, TABLE1, "quick")
        row = TABLE1.row(self.key)
        for seed, accuracy, seconds in ((0, 90.0, 3.0), (1, 91.0, 5.0)):
            ours = {"accuracy": accuracy, "FLOPs": 42.0, "FLOPs left": 2.35e7}
            results.save(row, seed, RowResult(ours, seconds, "so"), "cmd")
        assert cells(results, self.key, "accuracy") == ("90.83 ± 0.31", "90.50 ± 0.71", "-0.33")
        assert cells(results, self.key, "baseline") == ("92.20 ± 0.18", "missing", "")
        assert cells(results, self.key, "FLOPs left") == ("2.43E7", "2.35E7", "-8.00E5")
        assert cells(results, self.key, "FLOPs removed, %") == ("42.2", "42.0", "-0.2")
        assert cells(results, "resnet20-fpgm-30-scratch", "accuracy")[1] == "missing"
        _, lines = page.table_cells(results)
        assert lines[0][-3:] == ("2", "4 s", "so")
        assert lines[1][-3:] == ("0", "", "")
        files = page.write_table(results, lambda row: "make it")
        assert [file.suffix for file in files] == [".md", ".tex", ".json"]
        first, second = json.loads(files[2].read_text())["rows"][:2]
        assert second["made"] == []
        assert set(second["ours"].values()) == {None}
        assert second["command"] == "make it"
        assert [item["seed"] for item in first["made"]] == [0, 1]
        assert first["difference"]["accuracy"] == -0.33
        assert first["ours"]["drop"] is None
        assert r"90.50 $\pm$ 0.71" in files[1].read_text()

    def test_a_drop_is_from_a_baseline_that_was_measured(self, tmp_path: Path) -> None:
        """By hand: 92 and 93 before, 91 and 90 after, so 92.5 - 90.5 is lost."""
        results = RowStore(tmp_path, TABLE1, "full")
        row = TABLE1.row(self.key)
        for seed, (before, after) in enumerate(((92.0, 91.0), (93.0, 90.0))):
            results.save(row, seed, RowResult({"accuracy": after}, 1.0, ""), "")
            assert cells(results, self.key, "drop")[1] == ("missing" if seed == 0 else "1.50")
            RowStore(tmp_path, BASELINES, "full").save(
                BASELINES.row("resnet20"), seed, RowResult({"top-1": before}, 1.0, ""), ""
            )
        assert cells(results, self.key, "baseline") == ("92.20 ± 0.18", "92.50 ± 0.71", "+0.30")
        assert cells(results, self.key, "drop") == ("1.37", "2.00", "+0.63")
        other = cells(results, "resnet20-fpgm-30-scratch", "baseline")
        assert other[1] == "missing"  # nothing is known of a row without a result

    def test_a_row_from_trained_weights_has_a_separate_baseline(self, tmp_path: Path) -> None:
        key = "resnet56-fpgm-40-trained"
        RowStore(tmp_path, BASELINES, "full").save(
            BASELINES.row("resnet56"), 0, RowResult({"top-1": 50.0}, 1.0, ""), ""
        )
        results = RowStore(tmp_path, TABLE1, "full")
        results.save(TABLE1.row(key), 0, RowResult({"accuracy": 93.0}, 1.0, ""), "")
        assert cells(results, key, "baseline")[1] == "missing"
        ours = {"accuracy": 93.0, "baseline": 93.25}
        results.save(TABLE1.row(key), 0, RowResult(ours, 1.0, ""), "")
        assert cells(results, key, "drop")[1] == "0.25"

    def test_a_row_that_is_damaged(self, tmp_path: Path) -> None:
        results = RowStore(tmp_path, TABLE1, "quick")
        results.folder.mkdir()
        row = TABLE1.rows[0]
        nan = '{"ours": {"accuracy": NaN}, "seconds": 1, "how": "", "settings": {}}'
        other = '{"ours": {}, "seconds": 1, "how": "", "settings": 3}'
        for content in ("{", "[]", nan, other):
            (results.folder / f"{row.key}.0.json").write_text(content)
            with pytest.raises(fpgm.FileError, match=r"scratch\.0\.json cannot be read"):
                results.load(row, 0)

    def test_rows_of_other_settings_are_refused(self, tmp_path: Path) -> None:
        row = TABLE1.rows[0]

        def results(**settings: Any) -> RowStore:
            return RowStore(tmp_path, TABLE1, "quick", lambda row, seed: settings)

        results(steps=1, weights="abc").save(row, 0, RowResult({}, 1.0, ""), "")
        results(steps=1, weights="abc").check()
        results(steps=1, weights=None).check()  # a machine without them can show the row
        with pytest.raises(
            fpgm.FileError, match="was computed with a different steps: choose another"
        ):
            results(steps=2, weights="abc").check()
        with pytest.raises(
            fpgm.FileError, match="was computed with a different weights: choose another"
        ):
            results(steps=1, weights="abd").check()

    def test_scales_are_kept_apart(self, tmp_path: Path) -> None:
        row = TABLE1.rows[0]
        RowStore(tmp_path, TABLE1, "quick").save(row, 0, RowResult({}, 1.0, ""), "")
        assert RowStore(tmp_path, TABLE1, "full").load(row, 0) is None

    def test_a_row_is_computed_by_one_process_at_a_time(self, tmp_path: Path) -> None:
        """And a process that is killed holds nothing."""
        results, row = RowStore(tmp_path, TABLE1, "quick"), TABLE1.rows[0]
        code = (
            "import sys; from pathlib import Path; from fpgm.paper.tables import TABLES, RowStore\n"
            "table = TABLES['table1']\n"
            "with RowStore(Path(sys.argv[1]), table, 'quick').claim(table.rows[0], 0) as mine:\n"
            "    print(mine, flush=True); sys.stdin.read()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        ) as other:  # fmt: skip
            assert other.stdout is not None
            assert other.stdout.readline() == "True\n"
            with results.claim(row, 0) as mine:
                assert not mine
            with results.claim(row, 1) as mine:
                assert mine
            other.kill()
        with results.claim(row, 0) as mine:
            assert mine
        assert list(results.folder.iterdir()) == []


class TestQuick:
    def quick(self, weights: Path) -> QuickScale:
        item = data()
        return QuickScale(
            weights, lambda: item, QuickBudget(steps=2, epochs=1, images=8, seconds=0.1), None
        )

    def test_a_row_of_table_1(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        save(resnet(20), tmp_path / "cifar10_resnet20.safetensors")
        result = self.quick(tmp_path).run("table1", TABLE1.row("resnet20-fpgm-40-scratch"), 0)
        assert result is not None
        assert set(result.ours) == set(TABLE1.keys)
        assert result.ours["FLOPs left"] == pytest.approx(19_586_368, rel=0.01)  # docs/paper.md
        complete = paper.percent_saved(paper.cifar_resnet(20), 0.4)
        assert result.ours["FLOPs"] == pytest.approx(complete, abs=0.5)

    def test_without_weights_there_is_no_row(self, tmp_path: Path) -> None:
        quick = self.quick(tmp_path)
        assert quick.run("table1", TABLE1.rows[0], 0) is None
        assert quick.run("table2", TABLES["table2"].rows[0], 0) is None

    def test_weights_that_rows_start_from(self, tmp_path: Path) -> None:
        quick, row = self.quick(tmp_path), TABLE1.row("resnet20-fpgm-40-scratch")
        assert quick.start_weights("table1", row) is None
        checkpoint = tmp_path / "cifar10_resnet20.pth"
        torch.save(resnet(20).state_dict(), checkpoint)
        assert quick.start_weights("table1", row) == checkpoint
        assert (
            QuickScale(checkpoint, data, QuickBudget(), None).start_weights("table1", row)
            == checkpoint
        )
        assert quick.start_weights("ablations", row) is None
        result = quick.run("baselines", BASELINES.row("resnet20"), 0)
        assert result is not None
        assert set(result.ours) == {"top-1"}

    def test_vgg_is_trained_once(self, tmp_path: Path) -> None:
        quick = self.quick(tmp_path)
        first = quick.run("table3", TABLE3.rows[0], 0)
        file = tmp_path / VGG_WEIGHTS
        before = file.read_bytes()
        second = quick.run("table4", TABLE4.rows[0], 0)
        assert file.read_bytes() == before
        assert first is not None
        assert second is not None
        assert set(first.ours) == set(TABLE3.keys)
        assert set(second.ours) == set(TABLE4.keys)
        # A quarter as wide, half of a layer is still half of it.
        assert second.ours["FLOPs"] == pytest.approx(34.2, abs=0.3)

    def test_pfec_prunes_the_layers_it_names(self) -> None:
        rates = pfec_rates()
        assert set(rates.values()) == {0.5}
        assert len(rates) == 7
        plan = fpgm.plan(
            vgg16(width=VGG_WIDTH), torch.zeros(1, 3, 32, 32), **vgg_options(TABLE3.rows[0])
        )
        assert {g.name for g in plan.groups if g.kept < g.units} == set(rates)

    @pytest.mark.parametrize(
        ("key", "low", "high"),
        [("distance-cosine", 20, 80), ("from-trained", 20, 80), ("rate-0", 0, 0)],
    )
    def test_an_ablation(
        self, key: str, low: float, high: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = recipes.read_recipe
        monkeypatch.setattr(
            recipes, "read_recipe", lambda file, given: read(file, [*given, "train.epochs=6"])
        )
        row = TABLES["ablations"].row(key)
        result = self.quick(tmp_path).run("ablations", row, 0)
        assert result is not None
        assert result.ours["accuracy"] > 30  # type: ignore[operator]
        assert low <= result.ours["FLOPs"] <= high  # type: ignore[operator]
        assert result.how.endswith("6 epochs")

    def test_scratch_rows_prune_while_training(self, tmp_path: Path) -> None:
        """As the paper does; rows from trained weights are pruned at once and trained on."""
        save(resnet(20), tmp_path / "cifar10_resnet20.safetensors")
        result = self.quick(tmp_path).run("table1", TABLE1.row("resnet20-fpgm-mix-40-scratch"), 0)
        assert result is not None
        assert result.how.startswith("FPGM-mix, soft from trained weights")

    @pytest.mark.parametrize("crowd", [None, "other processes used 1.2 of 2 cores"])
    def test_times(
        self, crowd: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of a machine that did other work too, a row says so."""
        pytest.importorskip("torchvision")
        time = quick.bench

        def crowded(models: Any, x: Any, **options: Any) -> Any:
            result = time(models, x[:1, :, :32, :32], **options)  # these times are of no interest
            return replace(result, rows=[replace(row, crowd=crowd) for row in result.rows])

        monkeypatch.setattr(quick, "bench", crowded)
        row = TABLES["table5"].row("resnet18")
        row_result = self.quick(tmp_path).run("table5", row, 0)
        assert row_result is not None
        assert row_result.how.endswith(
            "alternating measurements" if crowd is None else f"UNRELIABLE: {crowd}"
        )
        complete = paper.percent_saved(paper.imagenet_resnet(18), 0.3)
        assert row_result.ours["theory"] == pytest.approx(complete, abs=1.5)


class TestCommand:
    def test_a_list(self) -> None:
        out, _ = run("reproduce", "table1", "--list", "--json")
        document = json.loads(out)
        assert len(document) == len(TABLE1.rows)
        quoted = {item["labels"][1] for item in document if item["quoted"]}
        assert quoted == {"MIL", "PFEC", "CP", "NISP"}
        assert "| resnet56-fpgm-40-scratch " in run("reproduce", "table1", "--list")[0]

    def test_missing_rows_are_shown(self, tmp_path: Path) -> None:
        out, _ = run("reproduce", "table2", "--rows", "resnet18-*", "--out", tmp_path)
        assert out.count("| missing ") == out.count("missing |") == 7 * 6
        assert "Missing: resnet18-mil-scratch, " in out
        assert out.count("ImageNet has no quick scale") == 1
        assert (tmp_path / "table2-quick.md").exists()
        requested = ("reproduce", "table1", "--rows", "resnet20-sfp-*", "--out", tmp_path)
        out, _ = run(*requested, "--weights", tmp_path / "none", code=2)
        missing = f"there are no trained weights {tmp_path}/none/cifar10_resnet20.safetensors: "
        assert f"{missing}give their folder with --weights." in out

    def test_another_network_under_the_same_name(self, tmp_path: Path) -> None:
        """A row of weights that were replaced since is not taken for one of the new ones."""
        weights, out = tmp_path / "cifar10_resnet20.safetensors", tmp_path / "out"
        options = ("reproduce", "baselines", "--rows", "resnet20", "--weights", tmp_path, "--out",
                   out, "--data", "cifar10-sample", "--test", "10")  # fmt: skip
        torch.manual_seed(0)
        save(resnet(20), weights)
        kept = out / "baselines-quick" / "resnet20.0.json"
        run(*options)
        before = kept.stat().st_mtime_ns
        run(*options)
        assert kept.stat().st_mtime_ns == before
        save(resnet(20), weights)
        assert "resnet20.0.json was computed with a different weights" in refused(*options)

    def test_a_failing_row_is_reported_and_the_others_are_computed(self, tmp_path: Path) -> None:
        (tmp_path / "cifar10_resnet20.safetensors").write_bytes(b"nothing")
        save(resnet(32), tmp_path / "cifar10_resnet32.safetensors")
        out, _ = run(
            "reproduce", "baselines", "--rows", "resnet[23]*", "--weights", tmp_path, "--out",
            tmp_path, "--data", "cifar10-sample", "--test", 10, code=2,
        )  # fmt: skip
        assert "resnet20, seed 0, failed: " in out
        assert out.count("trained weights, measured") == 1

    def test_an_ablation_and_its_figure(self, tmp_path: Path) -> None:
        pytest.importorskip("altair")
        table = TABLES["ablations"]
        result = RowStore(tmp_path, table, "quick")
        for key, saved in (("interval-1", 40.0), ("interval-5", 40.0), ("rate-0", 0.0),
                           ("rate-20", 20.0), ("rate-40", 40.0)):  # fmt: skip
            for seed in range(2):
                ours = {"accuracy": 98.0 + seed, "FLOPs": saved}
                result.save(table.row(key), seed, RowResult(ours, 1.0, ""), "")
        out, _ = run("reproduce", "fig4", "--out", tmp_path, "--json")
        files = [Path(file) for file in json.loads(out)["files"]]
        assert [file.name for file in files] == ["fig4-interval.svg", "fig4-flops.svg"]
        for file in files:
            text = file.read_text()
            assert text.startswith("<svg")
            assert "mark-area" in text  # the band
            assert "mark-rule" in text  # the network that is not pruned

    def test_metrics_of_trained_weights(self, tmp_path: Path) -> None:
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
            (("table9",), "Unknown table or figure 'table9': give one of table1,"),
            (("table1", "--scale", "tiny"), "--scale is 'tiny': give quick or full."),
            (("table1", "--rows", "x*"), "--rows 'x*' matches no row"),
            (("fig4",), "fig4 needs results of the ablations: run fpgm reproduce ablations first"),
            (("fig3", "--weights", "no"), "no trained weights no/cifar10_resnet56.safetensors."),
            (("fig5", "--scale", "full", "--weights", "no"), "weights no/imagenet_resnet50"),
            (
                ("table1", "--set", "train.epochs=3"),
                "--set changes recipes, which only --scale full uses.",
            ),
            (("table1", "--scale", "full", "--steps", 3), "--steps, --epochs, --images and --test"),
            (
                ("table1", "--scale", "full", "--set", "model.weights=x"),
                "has no effect here: pass --weights.",
            ),
            (("table1", "--scale", "full", "--set", "train.epoch=3"), "no 'train.epoch': did you"),
            (("table2", "--scale", "full", "--rows", "*101*"), "needs ImageNet: give the folder"),
            (("table1", "--mean", "0.5"), "--mean and --std go together"),
            (("ablations", "--epochs", 1), "--epochs has no effect on ablations: leave it out."),
            (("table5", "--mean", "0", "--std", "1"), "--mean has no effect on table5"),
            (("table4", "--steps", 1), "--steps has no effect on table4"),
            (("fig3", "--list"), "fig3 is a figure and has no rows to list."),
            (("fig5", "--weights", "no.pth"), "--weights no.pth does not exist."),
            (("table1", "--out", __file__), "is a file: --out must be a folder."),
            (("table1", "--test", 0), "--test and --images must be at least 1."),
        ],
    )
    def test_refusals(self, tmp_path: Path, options: tuple[Any, ...], message: str) -> None:
        assert message in refused("reproduce", "--out", tmp_path, *options)

    def test_images_of_another_shape(self, tmp_path: Path) -> None:
        save(resnet(20), tmp_path / "cifar10_resnet20.safetensors")
        out, _ = run(
            "reproduce", "table1", "--rows", "resnet20-sfp-*", "--weights", tmp_path, "--data",
            "digits", "--out", tmp_path / "out", code=2,
        )  # fmt: skip
        assert "--data digits has images of 1×8×8, but these networks take 3×32×32." in out

    def test_a_row_knows_only_what_it_depends_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And weights are found where the benchmarks find them."""
        save(resnet(20), tmp_path / "cifar10_resnet20.safetensors")
        monkeypatch.setenv("FPGM_WEIGHTS", str(tmp_path))
        document = json.loads(
            run("reproduce", "baselines", "--data", "cifar10-sample", "--test", 20, "--rows",
                "resnet20", "--out", tmp_path / "out", "--json")[0]
        )  # fmt: skip
        (figures,) = document["figures"]
        assert figures["ours"]["top-1"]["mean"] == figures["made"][0]["ours"]["top-1"]
        kept = json.loads((tmp_path / "out/baselines-quick/resnet20.0.json").read_text())
        assert set(kept["settings"]) == {"test", "data", "mean", "std", "weights"}

    def test_a_list_says_what_quick_rows_need(self) -> None:
        ends = {"table1": "ROW --weights DIR\n", "table4": "--rows ROW\n", "table2": "no quick"}
        for name, end in ends.items():
            assert end in run("reproduce", name, "--list")[0]
