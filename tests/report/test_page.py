"""The page about a run: what is in it, what never is, and that it stays within its folder."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from tests.helpers.pages import Parts, embedded, plan_of
from tests.helpers.shell import run
from tests.report.test_analysis import BUILT
from torch import nn

import fpgm
from fpgm.pruning.plan import Cut, Frozen, Group, Latency
from fpgm.report.chart_data import charts
from fpgm.report.headline import Card, cards
from fpgm.report.layers import LayerRow, layer_rows, streams
from fpgm.report.page import LARGEST, compare_page, page, report
from fpgm.report.records import (
    AnalysisTold,
    BenchTold,
    Environment,
    Results,
    SensitivityTold,
    decode,
)
from fpgm.report.run import Run, read_run

EVIL = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"


@pytest.fixture
def folder(real_run: Path) -> Path:
    return real_run


class TestPage:
    def test_what_a_reader_wants_to_know_first(self, folder: Path) -> None:
        told = {card.name: card for card in cards(read_run(folder))}
        assert list(told) == ["MACs", "Parameters", "Latency", "Accuracy", "Certificate"]
        assert told["MACs"].value.startswith("−50.")
        assert told["MACs"].detail == "40.6 M → 20.2 M multiply-adds"
        assert re.fullmatch(
            r"original [\d.]+%, compact [\d.]+%, recovered [\d.]+%; 64 test pictures",
            told["Accuracy"].detail,
        )
        assert (told["Certificate"].value, told["Certificate"].tone) == ("certified", "good")
        assert told["Certificate"].detail.startswith("of the pruning, before recovery: ")
        assert told["Latency"].detail.startswith("than original; eager, batch 1")

    def test_figures_that_grew_have_one_sign(self) -> None:
        slower = Latency("eager", 1, 0.5, 0.4, -0.034, 0.01, 0.01034)
        plan = fpgm.Plan("", {}, (), macs_before=100, macs_after=100, latency=slower)
        told = {card.name: card for card in cards(Run("a", plan=plan))}
        assert (told["MACs"].value, told["Latency"].value) == ("0.0%", "+3.4%")
        assert told["Latency"].tone == "bad"

    def test_the_best_of_several_measurements_is_called_that(self) -> None:
        row = {"backend": "eager", "batch": 1, "theory": 2.0}
        rows = [
            {**row, "threads": n, "figures": [{"model": "a"}, {"model": "b", "faster": n / 2}]}
            for n in (1, 3, 2)
        ]
        (card,) = cards(Run("a", bench=decode(BenchTold, {"rows": rows})))
        assert card.value == "1.50× faster"
        assert card.detail.startswith("than a; the best of 3 measurements: eager, batch 1, thre")

    def test_a_crowded_measurement_is_no_headline(self) -> None:
        def told(*crowds: str | None) -> tuple[Card, str]:
            rows = [
                {"backend": "eager", "batch": 1, "threads": n + 1, "theory": 2.0, "crowd": crowd,
                 "figures": [{"model": "a"}, {"model": "b", "faster": 4.0 - 2 * n}]}
                for n, crowd in enumerate(crowds)
            ]  # fmt: skip
            run = Run("a", bench=decode(BenchTold, {"rows": rows}))
            (card,), (chart,) = cards(run), charts(run, [])
            return card, chart.caption

        busy = "other work took 1.8 of 2 cores"
        card, text = told(busy, None)
        assert (card.value, card.tone) == ("2.00× faster", "good")
        assert text.endswith(f"Not all of it is to be relied on: {busy}.")
        card, _ = told(busy)
        assert (card.value, card.tone) == ("4.00× faster", "plain")
        assert card.detail.endswith(f". NOT to be relied on: {busy}")
        card, text = told(None, None)
        assert (card.value, card.tone) == ("4.00× faster", "good")
        assert "relied" not in card.detail + text

    def test_one_file_that_fetches_nothing(self, folder: Path) -> None:
        text = report(folder).read_text()
        assert len(text.encode()) < LARGEST
        parts = Parts(text)
        for tag, given in parts.tags:
            assert tag not in ("link", "iframe", "object", "embed")
            for name in ("src", "href", "action"):
                assert (given.get(name) or "#").startswith(("#", "data:"))
        policy = next(g["content"] for t, g in parts.tags if g.get("http-equiv")) or ""
        assert "default-src 'none'" in policy
        assert "connect-src" not in policy

    def test_every_layer_is_told(self, folder: Path) -> None:
        layers = embedded(report(folder).read_text())["layers"]
        assert len(layers) == 20
        first = {key: layers[0][key] for key in ("name", "filters", "kept")}
        assert first == {"name": "conv1", "filters": 16, "kept": 10}

    def test_nothing_is_embedded_that_the_page_does_not_read(self, folder: Path) -> None:
        script = (resources.files("fpgm.report") / "page.js").read_text()
        data = embedded(report(folder).read_text())
        for key in {*data, *data["streams"][0], *(key for own in data["layers"] for key in own)}:
            assert re.search(rf"\b{key}\b", script), key

    def test_the_command_is_there_to_be_run_again(self, folder: Path) -> None:
        told = json.loads((folder / "results.json").read_text())
        assert told["command"] in "".join(Parts(report(folder).read_text()).words)

    def test_charts_of_what_there_is(self, folder: Path) -> None:
        titles = re.findall(r"<h3>([^<]+)</h3>", report(folder).read_text())
        assert titles[:3] == ["Accuracy", "Units of every group", "Time against theory"]

    def test_layers_without_an_error_are_no_points(self) -> None:
        """What comes before any pruned layer has none, before and after."""
        errors = {"stem": (0.0, 0.0), "body": (0.5, 0.25), "twin": (0.0, 0.125)}
        rows = [LayerRow(name, 8, 4, (), (), "", None, own) for name, own in errors.items()]
        (chart,) = charts(Run("a"), rows)
        drawn = {row["layer"] for row in chart.spec["data"]["values"]}
        assert drawn == {"1. body", "2. twin"}

    def test_the_dearest_groups_are_named(self) -> None:
        """Colours alone would not tell which curve is whose."""
        harms = [{"name": n, "harm": [0.0, h]} for n, h in zip("abcd", (1, 4, 2, 3), strict=True)]
        told = Run("a", sensitivity=decode(SensitivityTold, {"groups": harms}))
        (chart,) = charts(told, [])
        assert chart.caption.endswith("Dearest: 2. b, 4. d, 3. c.")

    def test_nothing_is_said_of_streams_where_there_are_none(self) -> None:
        alone, together = plan_of([("a", ("a",))]), plan_of([("a", ("a", "b"))])
        assert "A line on the left" not in page(Run("a", plan=alone))
        assert "A line on the left" in page(Run("a", plan=together))

    def test_a_dark_page_is_dark_before_anything_is_drawn(self, folder: Path) -> None:
        head, _, _ = page(read_run(folder)).partition("<body")
        assert "dataset.theme = " in head

    def test_somewhere_else(self, folder: Path, tmp_path: Path) -> None:
        assert report(folder, tmp_path / "a.html") == tmp_path / "a.html"
        with pytest.raises(fpgm.FileError, match="cannot be written"):
            report(folder, tmp_path / "no" / "a.html")


class TestEscapes:
    def evil_run(self) -> Run:
        net = nn.Sequential()
        net.add_module("a<b>&\"'", nn.Conv2d(3, 8, 1))
        net.add_module("out", nn.Conv2d(8, 2, 1))
        plan = fpgm.plan(net, torch.zeros(1, 3, 2, 2), rate=0.5)
        found = fpgm.analyze(net, torch.zeros(1, 3, 2, 2)).to_dict()
        told = {"model": EVIL, "command": EVIL, "asked": {EVIL: EVIL}, "versions": {EVIL: EVIL}}
        text = plan.to_json().replace('a<b>&\\"', json.dumps(EVIL)[1:-1])
        found = json.loads(json.dumps(found).replace('a<b>&\\"', json.dumps(EVIL)[1:-1]))
        results, analysis = decode(Results, told), decode(AnalysisTold, found)
        return Run(EVIL, results, fpgm.Plan.from_json(text), analysis)

    def test_names_are_words_and_never_code(self) -> None:
        text = page(self.evil_run())
        parts = Parts(text)
        scripts = [given for tag, given in parts.tags if tag == "script"]
        assert len(scripts) == 4  # the theme, data, the library, ours
        assert not any(tag == "img" for tag, _ in parts.tags)
        assert EVIL in "".join(parts.words)  # shown as it is

    def test_in_a_comparison_too(self) -> None:
        parts = Parts(compare_page([self.evil_run(), self.evil_run()]))
        assert len([tag for tag, _ in parts.tags if tag == "script"]) == 4
        assert not any(tag == "img" for tag, _ in parts.tags)


class TestComparison:
    def test_accuracies_on_other_data_are_called_that(self) -> None:
        def tested(data: str) -> Run:
            results = decode(Results, {"accuracy": {"compact": 0.5}, "asked": {"data": data}})
            return Run(data, results, plan_of([("a", ("a",))]))

        told = "They were not all tested on the same data."
        assert told in compare_page([tested("digits"), tested("cifar10")])
        assert told not in compare_page([tested("digits"), tested("digits")])


class TestLayers:
    def test_streams_of_a_residual_network(self, folder: Path) -> None:
        told = read_run(folder)
        rows = layer_rows(told)
        found = streams(told, rows)
        assert [(s.name, s.column) for s in found] == [
            ("1. conv1", 0), ("6. layer2.0.conv2", 1), ("10. layer3.0.conv2", 2)
        ]  # fmt: skip
        names = [row.name for row in rows]
        assert {names[n] for n in found[0].writes} >= {"conv1", "layer1.0.conv2"}
        assert names.index("layer1.0.conv1") in found[0].reads

    def test_all_groups_of_a_layer(self, folder: Path) -> None:
        by_name = {row.name: row for row in layer_rows(read_run(folder))}
        assert len(by_name["layer3.2.conv2"].groups) == 3
        assert by_name["layer1.0.conv1"].groups == ("2, this layer alone",)

    def test_streams_that_do_not_meet_share_a_column(self) -> None:
        told = Run(
            "a", plan=plan_of([("a", ("a", "b")), ("c", ("c", "d"))]), analysis=_told("abcd")
        )
        assert [s.column for s in streams(told, layer_rows(told))] == [0, 0]

    def test_more_streams_than_there_is_room_for(self) -> None:
        """Each begins with one layer and ends with one far below: all of them meet."""
        letters = "abcdefghijklmnopqrstuvwxyz"
        groups = [(letters[n], (letters[n], letters[n + 13])) for n in range(13)]
        told = Run("a", plan=plan_of(groups), analysis=_told(letters))
        found = streams(told, layer_rows(told))
        assert [s.column for s in found] == [*range(12), -1]
        text = page(told)
        assert len(embedded(text)["streams"]) == 12
        assert "1 of 13 streams, for which there is no room" in text

    def test_groups_of_one_name_are_told_apart(self) -> None:
        """Both are called a; only the second is read by d."""
        plan = plan_of([("a", ("a", "b")), ("a", ("a", "c"))])
        layers = [{"layer": name, "norms": [1.0] * 8, "read_groups": [1] * (name == "d")}
                  for name in "abcd"]  # fmt: skip
        analysis = decode(AnalysisTold, {"layers": layers, "groups": ["a", "a"]})
        first, second = streams(told := Run("a", plan=plan, analysis=analysis), layer_rows(told))
        assert (first.name, first.reads) == ("1. a", ())
        assert (second.name, second.reads) == ("2. a", (3,))
        assert layer_rows(told)[0].groups == (
            "1. a, with 1 other layer", "2. a, with 1 other layer"
        )  # fmt: skip

    def test_an_analysis_with_other_groups_says_nothing_about_streams(self) -> None:
        layers = [{"layer": name, "norms": [1.0] * 8, "read_groups": [0]} for name in "abc"]
        analysis = decode(AnalysisTold, {"layers": layers, "groups": ["a", "b"]})
        told = Run("a", plan=plan_of([("a", ("a", "b"))]), analysis=analysis)
        assert streams(told, layer_rows(told))[0].reads == ()

    def test_why_layers_stay(self, folder: Path) -> None:
        by_name = {row.name: row for row in layer_rows(read_run(folder))}
        assert by_name["linear"].why == "the model's output"
        assert by_name["linear"].kept == by_name["linear"].filters == 10

    def test_without_an_analysis_there_is_what_the_plan_names(self) -> None:
        plan = plan_of([("a", ("a", "b"))])
        told = Run("a", plan=replace(plan, frozen=(Frozen(("z",), 3, "on request"),)))
        rows = layer_rows(told)
        assert [(row.name, row.why) for row in rows] == [("a", ""), ("b", ""), ("z", "on request")]
        assert rows[0].groups == ("1. a, with 1 other layer",)

    @pytest.mark.parametrize("name", list(BUILT))
    @pytest.mark.parametrize("looked_at", [True, False])
    def test_what_is_left_of_every_layer(self, name: str, looked_at: bool) -> None:
        """As wide as in the compact model."""
        net, layers = BUILT[name]()
        x = torch.randn(1, 3, 8, 8)
        plan = fpgm.plan(net, x, rate=0.5, align=1)
        analysis = decode(AnalysisTold, json.loads(json.dumps(fpgm.analyze(net, x).to_dict())))
        small = fpgm.compact(net, plan)
        told = Run("a", plan=plan, analysis=analysis if looked_at else None)
        rows = {row.name: row for row in layer_rows(told)}
        for layer in layers:
            before, after = net.get_submodule(layer), small.get_submodule(layer)
            assert (rows[layer].filters, rows[layer].kept) == (
                before.out_channels, after.out_channels
            )  # fmt: skip
        assert len(rows) == sum(isinstance(own, nn.Conv2d | nn.ConvTranspose2d) for own in net)


def _told(names: str) -> AnalysisTold:
    layers = [{"layer": name, "norms": [1.0] * 8} for name in names]
    return decode(AnalysisTold, {"layers": layers})


class TestTraining:
    def test_a_run_that_is_still_going_on(self, tmp_path: Path) -> None:
        (tmp_path / "recipe.json").write_text('{"model": {"name": "digits"}}')
        lines = [{"epoch": n, "test_accuracy": n / 10, "train_accuracy": n / 9} for n in (1, 2)]
        text = "\n".join(map(json.dumps, lines)) + '\n{"epoch": 3, "test'
        (tmp_path / "metrics.jsonl").write_text(text)
        told = read_run(tmp_path)
        assert len(told.metrics) == 2
        assert cards(told)[0].detail == "after epoch 2"
        text = page(told, live="1")
        assert "Accuracy by epoch" in text
        assert "While the network was trained." in text
        assert "connect-src 'self'" in text

    def test_one_that_is_done(self, tmp_path: Path) -> None:
        place = tmp_path / "run"
        run("train", "digits-quick", "--out", place, "--set", "train.epochs=1",
            "--set", "prune.start=1", "--set", "data.limit=128")  # fmt: skip
        told = read_run(place)
        found = {card.name: card for card in cards(told)}
        assert found["Accuracy"].detail == "of the compact model, on test data"
        assert found["Certificate"].detail.startswith("the compact model and the trained one with ")
        text = report(place).read_text()
        assert "<title>digits · fpgm</title>" in text
        assert "<dt>train.epochs</dt><dd>1</dd>" in text
        assert "digest" not in text.partition('id="data"')[0]

    def test_the_command_as_words(self) -> None:
        for program, shown in (("/a/bin/fpgm", "fpgm"), ("/a/fpgm/__main__.py", "python -m fpgm")):
            environment = Environment((program, "train", "my recipe.toml"))
            text = page(Run("a", environment=environment))
            assert f'id="command">{shown} train &#39;my recipe.toml&#39;<' in text

    def test_without_pruning_nothing_is_called_compact(self) -> None:
        told = Run("a", decode(Results, {"accuracy": 0.5}), recipe={"model.name": "digits"})
        (card,) = cards(told)
        assert card.detail == "of the trained model, on test data"


class TestLarge:
    def test_a_large_network_loses_its_maps_first(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = read_run(folder)
        whole = page(told)
        assert "Left out" not in whole
        monkeypatch.setattr("fpgm.report.page.LARGEST", len(whole.encode()) - 1)
        smaller = page(told)
        assert "Left out, to keep this page small: the maps of filters." in smaller
        layer = embedded(smaller)["layers"][0]
        assert "places" not in layer
        assert len(layer["norms"]) == 16

    @pytest.mark.parametrize("count", [3_000, 20_000])
    def test_thousands_of_layers_fit(self, count: int, tmp_path: Path) -> None:
        names = [f"backbone.stages.{n // 100}.blocks.{n}.convolution" for n in range(count)]
        groups = tuple(Group(name, (name, names[n - 1]), 64, 32) for n, name in enumerate(names))
        cuts = tuple(Cut(f"{n}.weight", 0, 64, tuple(range(32)), "filter") for n in names)
        norms = [1.2345 + n / 1000 for n in range(64 if count == 3_000 else 2)]
        layers = [
            {"layer": name, "norms": norms, "to_median": norms, "places": [[x, x] for x in norms],
             "macs_share": 0.0001, "deviation": 0.1234, "least": 0.1, "effective_rank": 12.3,
             "verdict": "small deviation: a norm threshold cannot separate these filters"}
            for name in names
        ]  # fmt: skip
        harms = [{"name": name, "harm": norms} for name in names]
        told = Run(
            "a",
            plan=fpgm.Plan("", {}, cuts, groups=groups, macs_before=2, macs_after=1),
            analysis=decode(AnalysisTold, {"layers": layers}),
            sensitivity=decode(SensitivityTold, {"groups": harms}),
        )
        text = page(told)
        assert len(text.encode()) <= LARGEST
        assert "all single filters" in text
        shown = len(embedded(text)["layers"])
        assert shown == count if count == 3_000 else f"all but the first {shown} of" in text
        assert "The 100 of" in text
        assert len(compare_page([told, told]).encode()) <= LARGEST
