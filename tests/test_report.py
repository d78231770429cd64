"""The page about a run: what is in it, what never is, and that it stays within its folder."""

from __future__ import annotations

import copy
import http.client
import json
import math
import random
import re
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict, replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.shell import refused, run
from tests.test_analysis import BUILT
from torch import nn

import fpgm
from fpgm.models import resnet
from fpgm.plan import Cut, Frozen, Group, Latency
from fpgm.report import LARGEST, compare, compare_page, page, report
from fpgm.report.headline import cards
from fpgm.report.layers import layer_rows, streams
from fpgm.report.records import (
    AnalysisTold,
    BenchTold,
    Environment,
    Results,
    SensitivityTold,
    decode,
)
from fpgm.report.run import Run, read_run
from fpgm.report.serve import WATCHED, server, version

EVIL = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, recovered and timed."""
    place = tmp_path_factory.mktemp("run") / "small"
    run(
        "prune", "resnet20", "--weights", "shipped", "--macs", 0.5, "--recover", "norms",
        "--data", "cifar10-sample", "--images", 64, "--test", 64, "--out", place,
    )  # fmt: skip
    run("bench", place, "--backend", "eager", "--seconds", 0.1, "--keep")
    return place


class Parts(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def embedded(text: str) -> Any:
    """The data inside a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


class TestPage:
    def test_what_a_reader_wants_to_know_first(self, folder: Path) -> None:
        told = {card.name: card for card in cards(read_run(folder))}
        assert list(told) == ["MACs", "Parameters", "Latency", "Accuracy", "Certificate"]
        assert told["MACs"].value.startswith("−50.")
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
        assert len(scripts) == 3  # of data, the library, ours
        assert not any(tag == "img" for tag, _ in parts.tags)
        assert EVIL in "".join(parts.words)  # shown as it is

    def test_in_a_comparison_too(self) -> None:
        parts = Parts(compare_page([self.evil_run(), self.evil_run()]))
        assert len([tag for tag, _ in parts.tags if tag == "script"]) == 3
        assert not any(tag == "img" for tag, _ in parts.tags)


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
        assert by_name["layer1.0.conv1"].groups == ("2, of its own",)

    def test_streams_that_do_not_meet_share_a_column(self) -> None:
        told = Run("a", plan=_plan([("a", ("a", "b")), ("c", ("c", "d"))]), analysis=_told("abcd"))
        assert [s.column for s in streams(told, layer_rows(told))] == [0, 0]

    def test_more_streams_than_there_is_room_for(self) -> None:
        """Each begins with one layer and ends with one far below: all of them meet."""
        letters = "abcdefghijklmnopqrstuvwxyz"
        groups = [(letters[n], (letters[n], letters[n + 13])) for n in range(13)]
        told = Run("a", plan=_plan(groups), analysis=_told(letters))
        found = streams(told, layer_rows(told))
        assert [s.column for s in found] == [*range(12), -1]
        text = page(told)
        assert len(embedded(text)["streams"]) == 12
        assert "1 of 13 streams, for which there is no room" in text

    def test_groups_of_one_name_are_told_apart(self) -> None:
        """Both are called a; only the second is read by d."""
        plan = _plan([("a", ("a", "b")), ("a", ("a", "c"))])
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
        told = Run("a", plan=_plan([("a", ("a", "b"))]), analysis=analysis)
        assert streams(told, layer_rows(told))[0].reads == ()

    def test_why_layers_stay(self, folder: Path) -> None:
        by_name = {row.name: row for row in layer_rows(read_run(folder))}
        assert by_name["linear"].why == "the model's output"
        assert by_name["linear"].kept == by_name["linear"].filters == 10

    def test_without_an_analysis_there_is_what_the_plan_names(self) -> None:
        plan = _plan([("a", ("a", "b"))])
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


def _plan(groups: list[tuple[str, tuple[str, ...]]]) -> fpgm.Plan:
    return fpgm.Plan("", {}, (), groups=tuple(Group(n, own, 8, 4) for n, own in groups))


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
        assert found["Certificate"].detail.startswith("compact and masked model differ by ")
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


EMPTY = '{"format": 1, "fingerprint": "", "cuts": [], "groups": [], "asked": {}}'
NOTHING = '{"name": "a", "layers": [], "units": 0, "kept": 0}'


class TestFolders:
    @pytest.mark.parametrize("content", ["[]", "{", "\x00", '"a"'])
    def test_files_that_are_something_else(self, content: str, tmp_path: Path) -> None:
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(fpgm.FileError, match=r"results\.json"):
            read_run(tmp_path)

    def test_no_folder_and_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(fpgm.FileError, match="is no folder"):
            read_run(tmp_path / "no")
        with pytest.raises(fpgm.FileError, match="holds no results"):
            read_run(tmp_path)

    def test_a_plan_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "results.json").write_text("{}")
        (tmp_path / "plan.json").write_text("{}")
        with pytest.raises(fpgm.FileError, match=r"plan\.json cannot be read"):
            read_run(tmp_path)

    def test_a_file_too_large_to_be_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fpgm.report.run.LARGEST", 3)
        (tmp_path / "results.json").write_text("{   }")
        with pytest.raises(fpgm.FileError) as caught:
            read_run(tmp_path)
        assert str(caught.value) == f"{tmp_path / 'results.json'} is too large for a report."

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("results.json", '{"accuracy": "good"}'),
            ("results.json", '{"certificate": {"max_error": 1}}'),
            ("results.json", '{"asked": []}'),
            ("results.json", '{"model": 3}'),
            ("analysis.json", '{"layers": [{"layer": "a", "norms": [1], "places": [[1]]}]}'),
            ("analysis.json", '{"layers": {}}'),
            ("bench.json", '{"rows": [{}]}'),
            ("sensitivity.json", '{"groups": [{"name": "a", "harm": ["b"]}]}'),
            ("metrics.jsonl", "[" * 100_000),
            ("metrics.jsonl", '{"epoch": "one"}'),
            ("metrics.jsonl", "[]"),
            ("recipe.json", "[]"),
            ("recipe.json", '{"a":' * 50 + "1" + "}" * 50),
            ("environment.json", '{"command": "fpgm"}'),
            ("plan.json", '{"format": 1, "fingerprint": "", "asked": {}, "cuts": 3}'),
            ("plan.json", EMPTY[:-1] + ', "macs_after": -1}'),
            ("plan.json", EMPTY.replace('"groups": []', f'"groups": [{NOTHING}]')),
        ],
    )  # fmt: skip
    def test_values_of_another_kind(self, name: str, content: str, tmp_path: Path) -> None:
        (tmp_path / "results.json").write_text("{}")
        (tmp_path / name).write_text(content)
        with pytest.raises(fpgm.FileError, match=re.escape(str(tmp_path / name))) as caught:
            read_run(tmp_path)
        assert "\n" not in str(caught.value)

    def test_numbers_that_are_none(self, tmp_path: Path) -> None:
        (tmp_path / "results.json").write_text('{"accuracy": {"original": 0.5, "compact": NaN}}')
        (tmp_path / "metrics.jsonl").write_text(
            '{"epoch": 1, "test_accuracy": null}\n{"epoch": 2, "test_accuracy": NaN}\n'
        )
        told = read_run(tmp_path)
        assert [epoch.test_accuracy for epoch in told.metrics] == [None, None]
        assert cards(told)[0].value == "unknown"
        page(told)

    def test_a_plan_that_claims_a_hundred_million_filters(self, tmp_path: Path) -> None:
        cut = {"tensor": "a.weight", "dim": 0, "size": 100_000_000, "keep": [0], "role": "filter"}
        sizes = [
            {"module": "b", "name": "groups", "before": 2, "after": 1},
            {"module": "b", "name": "out_channels", "before": 2 * 10**9, "after": 10**9},
        ]
        reads = {"tensor": "b.weight", "dim": 0, "size": 2, "keep": [0], "role": "reads"}
        plan = {"format": 1, "fingerprint": "", "asked": {}, "cuts": [cut, reads],
                "attributes": sizes}  # fmt: skip
        (tmp_path / "results.json").write_text("{}")
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        tracemalloc.start()
        told = read_run(tmp_path)
        rows = [(row.name, row.filters, row.kept) for row in layer_rows(told)]
        assert rows == [("b", 2 * 10**9, 10**9), ("a", 100_000_000, 1)]
        page(told)
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
        tracemalloc.stop()


VALUES: list[Any] = [
    None, True, -1, 0, 10**30, 1e308, -1e308, 5e-324, math.nan, math.inf, "", "a", "\ud800", [], {},
    [None], [[]], {"a": None}, [1, "b"], {"original": 0.5}, "x" * 5000,
]  # fmt: skip


def changed(value: Any, chance: random.Random) -> Any:
    """The same with one thing inside it replaced, removed or doubled."""
    inside = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) \
        if isinstance(value, list) else []  # fmt: skip
    if not inside or chance.random() < 0.15:
        return chance.choice(VALUES)
    key, own = chance.choice(inside)
    made = copy.copy(value)
    kind = chance.random()
    if kind < 0.1:
        del made[key]
    elif kind < 0.15 and isinstance(made, list):
        made.append(own)
    else:
        made[key] = changed(own, chance)
    return made


class TestChanged:
    """A file with anything changed is refused in one line, or shown."""

    @pytest.fixture
    def files(self, folder: Path) -> dict[str, Any]:
        found = {
            file.name: json.loads(file.read_text())
            for file in folder.glob("*.json")
        }  # fmt: skip
        # Small enough that a change is likely to hit what a page shows.
        found["analysis.json"]["layers"] = found["analysis.json"]["layers"][:2]
        found["plan.json"]["cuts"] = found["plan.json"]["cuts"][:4]
        found["plan.json"]["latency"] = asdict(Latency("eager", 1, 0.5, 0.4, 0.3, 0.01, 0.007))
        found["sensitivity.json"] = {"groups": [{"name": "a", "harm": [0.0, 0.1, 0.2]}]}
        found["metrics.jsonl"] = {"epoch": 1, "test_accuracy": 0.5, "train_accuracy": 0.6}
        found["recipe.json"] = {"model": {"name": "a"}, "train": {"epochs": 3, "lr": 0.1}}
        found["environment.json"] = {"torch": "2", "command": ["fpgm", "train"]}
        return found

    def test_one_line_or_a_page(
        self, files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fpgm.report._vega", str)
        for name, value in files.items():
            (tmp_path / name).write_text(json.dumps(value))
        whole = read_run(tmp_path)
        chance = random.Random(0)
        shown, refusals = 0, []
        for number in range(200):
            name = chance.choice(list(files))
            (tmp_path / name).write_text(json.dumps(changed(files[name], chance)))
            try:
                told = read_run(tmp_path)
            except fpgm.FileError as error:
                refusals.append((tmp_path / name, str(error)))
            else:
                shown += 1
                page(told)
                if number % 3 == 0:
                    compare_page([whole, told])
            (tmp_path / name).write_text(json.dumps(files[name]))
        assert 50 < shown < 150  # both happened
        assert all(str(file) in line and "\n" not in line for file, line in refusals)


class TestLarge:
    def test_a_large_network_loses_its_maps_first(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = read_run(folder)
        whole = page(told)
        assert "Left out" not in whole
        monkeypatch.setattr("fpgm.report.LARGEST", len(whole.encode()) - 1)
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


class TestComparison:
    def test_two_runs(self, folder: Path, tmp_path: Path) -> None:
        other = tmp_path / "small"
        run("prune", "resnet20", "--rate", 0.3, "--criterion", "l2", "--out", other)
        text = compare([folder, other], tmp_path / "both.html").read_text()
        words = Parts(text).words
        assert "small" in words
        assert "small (2)" in words
        assert {"fpgm", "l2"} <= set(words)

    def point(self, name: str, left: int, accuracy: object, **asked: object) -> Run:
        results = decode(Results, {"model": "m", "accuracy": accuracy, "asked": asked})
        return Run(name, results, fpgm.Plan("", {}, (), macs_before=100, macs_after=left))

    def test_only_runs_of_one_setting_stand_on_a_line(self) -> None:
        runs = [
            self.point("a", 50, {"compact": 0.5}, macs=0.5, criterion="fpgm"),
            self.point("b", 70, {"compact": 0.6}, macs=0.3, criterion="fpgm"),
            self.point("c", 50, {"compact": 0.4}, macs=0.5, criterion="fpgm", recover="solve"),
            self.point("d", 50, {"compact": None}, macs=0.5),
        ]
        (spec,) = embedded(compare_page(runs))["specs"]
        values = spec["data"]["values"]
        assert [row["run"] for row in values] == ["a", "b", "c"]
        settings = [row["setting"] for row in values]
        assert settings[0] == settings[1] == "model m, criterion fpgm"
        assert settings[2] != settings[0]

    def test_what_was_asked_of_a_training(self) -> None:
        recipe = {"model.name": "m", "prune.rate": "0.4", "train.epochs": "3"}
        text = compare_page([self.point("a", 50, 0.5, rate=0.3), Run("b", recipe=recipe)])
        words = [word.strip() for word in Parts(text).words if word.strip()]
        row = words.index("rate")
        assert words[row : row + 3] == ["rate", "0.3", "0.4"]
        assert "train.epochs" in words

    def test_groups_by_number_and_networks_apart(self) -> None:
        same = _plan([("a", ("a",)), ("a", ("a", "b"))])
        other = _plan([("z", ("z",))])
        runs = [Run("one", plan=same), Run("two", plan=same), Run("three", plan=other)]
        first, second = embedded(compare_page(runs))["specs"]
        assert {row["group"] for row in first["data"]["values"]} == {"1. a", "2. a"}
        assert len(first["data"]["values"]) == 4
        assert [row["run"] for row in second["data"]["values"]] == ["three"]
        assert {"color", "shape", "strokeDash"} <= set(first["encoding"])

    def test_one_is_not_enough(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(fpgm.RequestError, match="nothing to compare"):
            compare([folder], tmp_path / "a.html")


class TestServer:
    @pytest.fixture
    def address(self, folder: Path) -> Iterator[tuple[str, int]]:
        running = server(folder)
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield "127.0.0.1", running.server_address[1]
        running.shutdown()
        thread.join()
        running.server_close()

    def ask(self, address: tuple[str, int], path: str, host: str = "") -> tuple[int, str]:
        connection = http.client.HTTPConnection(*address, timeout=30)
        connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{address[1]}"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def test_the_page_and_its_version(self, address: tuple[str, int], folder: Path) -> None:
        code, text = self.ask(address, "/")
        assert code == 200
        assert f'<body data-live="{version(folder)}">' in text
        assert self.ask(address, "/version") == (200, version(folder))

    def test_nothing_else_is_served(self, address: tuple[str, int]) -> None:
        for path in ("/results.json", "/../../etc/passwd", "/small.safetensors"):
            assert self.ask(address, path)[0] == 404

    def test_only_by_its_own_name(self, address: tuple[str, int]) -> None:
        port = address[1]
        for host in ("evil.example:80", f"evil.example:{port}", "127.0.0.1.evil.example"):
            assert self.ask(address, "/version", host)[0] == 403
        assert self.ask(address, "/version", f"127.0.0.1:{port + 1}")[0] == 403
        for host in ("localhost", f"LocalHost:{port}", "127.0.0.1"):
            assert self.ask(address, "/version", host)[0] == 200

    def test_a_file_that_went_wrong_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "results.json").write_text("{}")
        running = server(tmp_path)
        (tmp_path / "bench.json").write_text('{"rows": 1}')
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            code, text = self.ask(("127.0.0.1", running.server_address[1]), "/")
        finally:
            running.shutdown()
            thread.join()
            running.server_close()
        assert code == 500
        assert text.startswith(f"{tmp_path / 'bench.json'} was not written by fpgm: rows is of")

    @pytest.mark.parametrize("name", WATCHED)
    def test_every_file_of_the_page_is_watched(self, name: str, tmp_path: Path) -> None:
        before = version(tmp_path)
        (tmp_path / name).write_text("{}")
        assert version(tmp_path) != before

    def test_a_change_is_told(self, folder: Path) -> None:
        before = version(folder)
        text = (folder / "results.json").read_text()
        (folder / "results.json").write_text(text + " ")
        assert version(folder) != before
        (folder / "results.json").write_text(text)


class TestCommand:
    def test_json(self, folder: Path, tmp_path: Path) -> None:
        out, _ = run("report", folder, "--out", tmp_path / "a.html", "--json")
        told = json.loads(out)
        assert told == {
            "file": str(tmp_path / "a.html"), "bytes": (tmp_path / "a.html").stat().st_size
        }  # fmt: skip

    def test_what_makes_no_sense(self, folder: Path, tmp_path: Path) -> None:
        assert "add --compare" in refused("report", folder, folder)
        assert "--serve follows one folder" in refused(
            "report", folder, folder, "--compare", "--serve"
        )
        assert "is no folder of fpgm" in refused("report", tmp_path / "no")
        assert "--keep writes into a folder" in refused("bench", "resnet20", "--keep")
        for option in (("--json",), ("--out", tmp_path / "a.html")):
            assert "--serve writes nothing" in refused("report", folder, "--serve", *option)
        told = refused("report", tmp_path / "no", "--serve")
        assert told == f"{tmp_path / 'no'} is no folder of fpgm prune or fpgm train."

    def test_prune_keeps_an_analysis_of_its_own_groups(self, tmp_path: Path) -> None:
        """With other choices than the usual ones there are other groups."""
        place = tmp_path / "small"
        run("prune", "resnet20", "--rate", 0.3, "--residual", "independent",
            "--ignore", "layer2.*", "--out", place)  # fmt: skip
        told = read_run(place)
        assert told.analysis is not None
        assert told.plan is not None
        assert told.analysis.groups == tuple(group.name for group in told.plan.groups)
        assert told.analysis.groups != fpgm.analyze(resnet(20), torch.zeros(1, 3, 32, 32)).groups

    def test_a_new_prune_takes_the_old_report_away(self, tmp_path: Path) -> None:
        place = tmp_path / "small"
        run("prune", "resnet20", "--rate", 0.3, "--out", place)
        run("report", place)
        assert (place / "report.html").exists()
        run("prune", "resnet20", "--rate", 0.4, "--out", place, "--force")
        assert not (place / "report.html").exists()
