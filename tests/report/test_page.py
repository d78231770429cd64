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
from fpgm.report.chart_data import run_charts
from fpgm.report.headline import Card, cards
from fpgm.report.layers import LayerRow, layer_rows, layout_streams
from fpgm.report.page import MAX_PAGE_BYTES, render_comparison, render_page, report
from fpgm.report.records import (
    AnalysisRecord,
    BenchRecord,
    EnvironmentRecord,
    ResultsRecord,
    SensitivityRecord,
    decode,
)
from fpgm.report.run import Run, read_run

EVIL = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"


@pytest.fixture
def folder(real_run: Path) -> Path:
    return real_run


class TestPage:
    def test_what_a_reader_needs_to_know_first(self, folder: Path) -> None:
        cards_by_name = {card.name: card for card in cards(read_run(folder))}
        assert list(cards_by_name) == ["MACs", "Parameters", "Latency", "Accuracy", "Certificate"]
        assert cards_by_name["MACs"].value.startswith("−50.")
        assert cards_by_name["MACs"].detail == "40.6 M → 20.2 M multiply-adds"
        assert re.fullmatch(
            r"original [\d.]+%, compact [\d.]+%, recovered [\d.]+%; 64 test images",
            cards_by_name["Accuracy"].detail,
        )
        assert (cards_by_name["Certificate"].value, cards_by_name["Certificate"].tone) == (
            "certified",
            "good",
        )
        assert cards_by_name["Certificate"].detail.startswith("before recovery: ")
        # On a busy machine there is no headline; in a measurement this short, none is sure.
        start = r"UNRELIABLE: |(than|as) original; [\d.,]+ → [\d.,]+ ms, eager, batch 1"
        assert re.match(start, cards_by_name["Latency"].detail)

    def test_increased_metrics_have_one_sign(self) -> None:
        slower = Latency("eager", 1, 0.5, 0.4, -0.034, 0.01, 0.01034)
        plan = fpgm.Plan("", {}, (), macs_before=100, macs_after=100, latency=slower)
        cards_by_name = {card.name: card for card in cards(Run("a", plan=plan))}
        assert (cards_by_name["MACs"].value, cards_by_name["Latency"].value) == ("0.0%", "+3.4%")
        assert cards_by_name["Latency"].tone == "bad"

    def test_the_best_of_several_measurements_is_called_that(self) -> None:
        row = {"backend": "eager", "batch": 1, "theory": 2.0}
        rows = [
            {**row, "threads": n, "figures": [{"model": "a"}, {"model": "b", "faster": n / 2}]}
            for n in (1, 3, 2)
        ]
        (card,) = cards(Run("a", bench=decode(BenchRecord, {"rows": rows})))
        assert card.value == "1.5× faster"
        assert card.detail.startswith("than a; the best of 3 measurements: eager, batch 1, thre")

    def test_random_weights_are_the_first_thing_said(self) -> None:
        for untrained, first in ((True, ["UNTRAINED"]), (False, []), (None, [])):
            run = Run("a", decode(ResultsRecord, {"model": "digits", "untrained": untrained}))
            assert [card.value for card in cards(run)] == first

    def test_a_crowded_measurement_is_no_headline(self) -> None:
        def latency_card(*crowds: str | None) -> tuple[Card, str]:
            rows = [
                {"backend": "eager", "batch": 1, "threads": n + 1, "theory": 2.0, "crowd": crowd,
                 "figures": [{"model": "a"}, {"model": "b", "faster": 4.0 - 2 * n}]}
                for n, crowd in enumerate(crowds)
            ]  # fmt: skip
            run = Run("a", bench=decode(BenchRecord, {"rows": rows}))
            (card,), (chart,) = cards(run), run_charts(run, [])
            return card, chart.caption

        busy = "other processes used 1.8 of 2 cores"
        card, text = latency_card(busy, None)
        assert (card.value, card.tone) == ("2.0× faster", "good")
        assert text.endswith(f"Some times are unreliable: {busy}.")
        card, _ = latency_card(busy)
        assert (card.value, card.tone) == ("unknown", "plain")
        assert card.detail.startswith(f"UNRELIABLE: {busy}; measure again")
        card, text = latency_card(None, None)
        assert (card.value, card.tone) == ("4.0× faster", "good")
        assert "unreliable" not in (card.detail + text).lower()

    def test_one_file_that_fetches_nothing(self, folder: Path) -> None:
        text = report(folder).read_text()
        assert len(text.encode()) < MAX_PAGE_BYTES
        parts = Parts(text)
        for tag, given in parts.tags:
            assert tag not in ("link", "iframe", "object", "embed")
            for name in ("src", "href", "action"):
                assert (given.get(name) or "#").startswith(("#", "data:"))
        policy = next(g["content"] for t, g in parts.tags if g.get("http-equiv")) or ""
        assert "default-src 'none'" in policy
        assert "connect-src" not in policy

    def test_every_layer_is_shown(self, folder: Path) -> None:
        layers = embedded(report(folder).read_text())["layers"]
        assert len(layers) == 20
        first = {key: layers[0][key] for key in ("name", "filters", "kept")}
        assert first == {"name": "conv1", "filters": 16, "kept": 10}

    def test_nothing_is_embedded_that_the_page_does_not_read(self, folder: Path) -> None:
        script = (resources.files("fpgm.report") / "page.js").read_text()
        data = embedded(report(folder).read_text())
        for key in {*data, *data["streams"][0], *(key for item in data["layers"] for key in item)}:
            assert re.search(rf"\b{key}\b", script), key

    def test_the_command_is_there_to_be_run_again(self, folder: Path) -> None:
        document = json.loads((folder / "results.json").read_text())
        assert document["command"] in "".join(Parts(report(folder).read_text()).words)

    def test_charts_of_what_there_is(self, folder: Path) -> None:
        titles = re.findall(r"<h3>([^<]+)</h3>", report(folder).read_text())
        assert titles[:3] == [
            "Accuracy",
            "Units in each group",
            "Measured and theoretical time saving",
        ]

    def test_layers_without_an_error_are_no_points(self) -> None:
        """What comes before any pruned layer has none, before and after."""
        errors = {"stem": (0.0, 0.0), "body": (0.5, 0.25), "twin": (0.0, 0.125)}
        rows = [LayerRow(name, 8, 4, (), (), "", None, item) for name, item in errors.items()]
        (chart,) = run_charts(Run("a"), rows)
        plotted = {row["layer"] for row in chart.spec["data"]["values"]}
        assert plotted == {"1. body", "2. twin"}

    def test_the_most_sensitive_groups_are_named(self) -> None:
        """Colours alone would not tell which curve is whose."""
        harms = [{"name": n, "harm": [0.0, h]} for n, h in zip("abcd", (1, 4, 2, 3), strict=True)]
        loaded_run = Run("a", sensitivity=decode(SensitivityRecord, {"groups": harms}))
        (chart,) = run_charts(loaded_run, [])
        assert chart.caption.endswith("Most sensitive: 2. b, 4. d, 3. c.")

    def test_no_mention_of_streams_where_there_are_none(self) -> None:
        alone, together = plan_of([("a", ("a",))]), plan_of([("a", ("a", "b"))])
        assert "A line on the left" not in render_page(Run("a", plan=alone))
        assert "A line on the left" in render_page(Run("a", plan=together))

    def test_a_dark_page_is_dark_before_anything_is_drawn(self, folder: Path) -> None:
        head, _, _ = render_page(read_run(folder)).partition("<body")
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
        outcome = fpgm.analyze(net, torch.zeros(1, 3, 2, 2)).to_dict()
        result = {"model": EVIL, "command": EVIL, "asked": {EVIL: EVIL}, "versions": {EVIL: EVIL}}
        text = plan.to_json().replace('a<b>&\\"', json.dumps(EVIL)[1:-1])
        outcome = json.loads(json.dumps(outcome).replace('a<b>&\\"', json.dumps(EVIL)[1:-1]))
        results, analysis = decode(ResultsRecord, result), decode(AnalysisRecord, outcome)
        return Run(EVIL, results, fpgm.Plan.from_json(text), analysis)

    def test_names_are_words_and_never_code(self) -> None:
        text = render_page(self.evil_run())
        parts = Parts(text)
        scripts = [given for tag, given in parts.tags if tag == "script"]
        assert len(scripts) == 4  # the theme, data, the library, ours
        assert not any(tag == "img" for tag, _ in parts.tags)
        assert EVIL in "".join(parts.words)  # shown as it is

    def test_in_a_comparison_too(self) -> None:
        parts = Parts(render_comparison([self.evil_run(), self.evil_run()]))
        assert len([tag for tag, _ in parts.tags if tag == "script"]) == 4
        assert not any(tag == "img" for tag, _ in parts.tags)


class TestComparison:
    def test_accuracies_on_other_data_are_called_that(self) -> None:
        def tested(data: str) -> Run:
            results = decode(ResultsRecord, {"accuracy": {"compact": 0.5}, "asked": {"data": data}})
            return Run(data, results, plan_of([("a", ("a",))]))

        result = "The runs were not all tested on the same data."
        assert result in render_comparison([tested("digits"), tested("cifar10")])
        assert result not in render_comparison([tested("digits"), tested("digits")])


class TestLayers:
    def test_streams_of_a_residual_network(self, folder: Path) -> None:
        loaded_run = read_run(folder)
        rows = layer_rows(loaded_run)
        streams = layout_streams(loaded_run, rows)
        assert [(s.name, s.column) for s in streams] == [
            ("1. conv1", 0), ("6. layer2.0.conv2", 1), ("10. layer3.0.conv2", 2)
        ]  # fmt: skip
        names = [row.name for row in rows]
        assert {names[n] for n in streams[0].producers} >= {"conv1", "layer1.0.conv2"}
        assert names.index("layer1.0.conv1") in streams[0].consumers

    def test_all_groups_of_a_layer(self, folder: Path) -> None:
        by_name = {row.name: row for row in layer_rows(read_run(folder))}
        assert len(by_name["layer3.2.conv2"].groups) == 3
        assert by_name["layer1.0.conv1"].groups == ("2, this layer only",)

    def test_streams_that_do_not_meet_share_a_column(self) -> None:
        loaded_run = Run(
            "a",
            plan=plan_of([("a", ("a", "b")), ("c", ("c", "d"))]),
            analysis=analysis_record("abcd"),
        )
        assert [s.column for s in layout_streams(loaded_run, layer_rows(loaded_run))] == [0, 0]

    def test_more_streams_than_there_is_room_for(self) -> None:
        """Each begins with one layer and ends with one far below: all of them meet."""
        letters = "abcdefghijklmnopqrstuvwxyz"
        groups = [(letters[n], (letters[n], letters[n + 13])) for n in range(13)]
        loaded_run = Run("a", plan=plan_of(groups), analysis=analysis_record(letters))
        streams = layout_streams(loaded_run, layer_rows(loaded_run))
        assert [s.column for s in streams] == [*range(12), -1]
        text = render_page(loaded_run)
        assert len(embedded(text)["streams"]) == 12
        assert "1 of 13 streams, which do not fit" in text

    def test_groups_of_one_name_are_distinguished(self) -> None:
        """Both are called a; only the second is read by d."""
        plan = plan_of([("a", ("a", "b")), ("a", ("a", "c"))])
        layers = [{"layer": name, "norms": [1.0] * 8, "read_groups": [1] * (name == "d")}
                  for name in "abcd"]  # fmt: skip
        analysis = decode(AnalysisRecord, {"layers": layers, "groups": ["a", "a"]})
        first, second = layout_streams(
            loaded_run := Run("a", plan=plan, analysis=analysis), layer_rows(loaded_run)
        )
        assert (first.name, first.consumers) == ("1. a", ())
        assert (second.name, second.consumers) == ("2. a", (3,))
        assert layer_rows(loaded_run)[0].groups == (
            "1. a, with 1 other layer", "2. a, with 1 other layer"
        )  # fmt: skip

    def test_an_analysis_with_other_groups_says_nothing_about_streams(self) -> None:
        layers = [{"layer": name, "norms": [1.0] * 8, "read_groups": [0]} for name in "abc"]
        analysis = decode(AnalysisRecord, {"layers": layers, "groups": ["a", "b"]})
        loaded_run = Run("a", plan=plan_of([("a", ("a", "b"))]), analysis=analysis)
        assert layout_streams(loaded_run, layer_rows(loaded_run))[0].consumers == ()

    def test_why_layers_stay(self, folder: Path) -> None:
        by_name = {row.name: row for row in layer_rows(read_run(folder))}
        assert by_name["linear"].reason == "the model's output"
        assert by_name["linear"].kept == by_name["linear"].filters == 10

    def test_without_an_analysis_there_is_what_the_plan_names(self) -> None:
        plan = plan_of([("a", ("a", "b"))])
        loaded_run = Run("a", plan=replace(plan, frozen=(Frozen(("z",), 3, "on request"),)))
        rows = layer_rows(loaded_run)
        assert [(row.name, row.reason) for row in rows] == [
            ("a", ""),
            ("b", ""),
            ("z", "on request"),
        ]
        assert rows[0].groups == ("1. a, with 1 other layer",)

    @pytest.mark.parametrize("name", list(BUILT))
    @pytest.mark.parametrize("looked_at", [True, False])
    def test_what_is_left_of_every_layer(self, name: str, looked_at: bool) -> None:
        """As wide as in the compact model."""
        net, layers = BUILT[name]()
        x = torch.randn(1, 3, 8, 8)
        plan = fpgm.plan(net, x, rate=0.5, align=1)
        analysis = decode(AnalysisRecord, json.loads(json.dumps(fpgm.analyze(net, x).to_dict())))
        small = fpgm.compact(net, plan)
        loaded_run = Run("a", plan=plan, analysis=analysis if looked_at else None)
        rows = {row.name: row for row in layer_rows(loaded_run)}
        for layer in layers:
            before, after = net.get_submodule(layer), small.get_submodule(layer)
            assert (rows[layer].filters, rows[layer].kept) == (
                before.out_channels, after.out_channels
            )  # fmt: skip
        assert len(rows) == sum(isinstance(item, nn.Conv2d | nn.ConvTranspose2d) for item in net)


def analysis_record(names: str) -> AnalysisRecord:
    layers = [{"layer": name, "norms": [1.0] * 8} for name in names]
    return decode(AnalysisRecord, {"layers": layers})


class TestTraining:
    def test_a_run_that_is_still_going_on(self, tmp_path: Path) -> None:
        (tmp_path / "recipe.json").write_text('{"model": {"name": "digits"}}')
        lines = [{"epoch": n, "test_accuracy": n / 10, "train_accuracy": n / 9} for n in (1, 2)]
        text = "\n".join(map(json.dumps, lines)) + '\n{"epoch": 3, "test'
        (tmp_path / "metrics.jsonl").write_text(text)
        loaded_run = read_run(tmp_path)
        assert len(loaded_run.metrics) == 2
        assert cards(loaded_run)[0].detail == "after epoch 2"
        text = render_page(loaded_run, live="1")
        assert "Accuracy by epoch" in text
        assert "During training." in text
        assert "connect-src 'self'" in text

    def test_one_that_is_done(self, tmp_path: Path) -> None:
        place = tmp_path / "run"
        run("train", "digits-quick", "--out", place, "--set", "train.epochs=1",
            "--set", "prune.start=1", "--set", "data.limit=128")  # fmt: skip
        loaded_run = read_run(place)
        result = {card.name: card for card in cards(loaded_run)}
        assert result["Accuracy"].detail == "of the compact model, on test data"
        assert result["Certificate"].detail.startswith(
            "compact model compared with the masked trained model"
        )
        text = report(place).read_text()
        assert "<title>digits · fpgm</title>" in text
        assert "<dt>train.epochs</dt><dd>1</dd>" in text
        assert "digest" not in text.partition('id="data"')[0]

    def test_the_command_as_words(self) -> None:
        for program, shown in (("/a/bin/fpgm", "fpgm"), ("/a/fpgm/__main__.py", "python -m fpgm")):
            environment = EnvironmentRecord((program, "train", "my recipe.toml"))
            text = render_page(Run("a", environment=environment))
            assert f'id="command">{shown} train &#39;my recipe.toml&#39;<' in text

    def test_without_pruning_nothing_is_called_compact(self) -> None:
        loaded_run = Run(
            "a", decode(ResultsRecord, {"accuracy": 0.5}), recipe={"model.name": "digits"}
        )
        (card,) = cards(loaded_run)
        assert card.detail == "of the trained model, on test data"


class TestLarge:
    def test_a_large_network_loses_its_maps_first(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded_run = read_run(folder)
        complete = render_page(loaded_run)
        assert "Omitted" not in complete
        monkeypatch.setattr("fpgm.report.page.MAX_PAGE_BYTES", len(complete.encode()) - 1)
        smaller = render_page(loaded_run)
        assert "Omitted to keep this page small: filter maps." in smaller
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
        loaded_run = Run(
            "a",
            plan=fpgm.Plan("", {}, cuts, groups=groups, macs_before=2, macs_after=1),
            analysis=decode(AnalysisRecord, {"layers": layers}),
            sensitivity=decode(SensitivityRecord, {"groups": harms}),
        )
        text = render_page(loaded_run)
        assert len(text.encode()) <= MAX_PAGE_BYTES
        assert "individual filters" in text
        shown = len(embedded(text)["layers"])
        assert shown == count if count == 3_000 else f"all but the first {shown} of" in text
        assert "Shown are the 100 of" in text
        assert len(render_comparison([loaded_run, loaded_run]).encode()) <= MAX_PAGE_BYTES
