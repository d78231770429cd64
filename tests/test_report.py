"""The page about a run: what is in it, what never is, and that it stays within its folder."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.shell import refused, run
from torch import nn

import fpgm
from fpgm.report import LARGEST, compare, page, report
from fpgm.report.headline import cards
from fpgm.report.layers import layer_rows, streams
from fpgm.report.run import Run, read_run
from fpgm.report.serve import server, version

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


class TestPage:
    def test_what_a_reader_wants_to_know_first(self, folder: Path) -> None:
        told = {card.name: card for card in cards(read_run(folder))}
        assert list(told) == ["MACs", "Parameters", "Latency", "Accuracy", "Certificate"]
        assert told["MACs"].value.startswith("−50.")
        assert "original, compact, recovered" in told["Accuracy"].detail
        assert (told["Certificate"].value, told["Certificate"].tone) == ("certified", "good")

    def test_one_file_that_fetches_nothing(self, folder: Path) -> None:
        text = report(folder).read_text()
        assert len(text.encode()) < LARGEST
        parts = Parts(text)
        for tag, given in parts.tags:
            assert tag not in ("link", "iframe", "object", "embed")
            for name in ("src", "href", "action"):
                assert (given.get(name) or "#").startswith(("#", "data:"))
        policy = next(g["content"] for t, g in parts.tags if g.get("http-equiv"))
        assert "default-src 'none'" in (policy or "")

    def test_every_layer_has_its_row_twice(self, folder: Path) -> None:
        parts = Parts(report(folder).read_text())
        buttons = [g for t, g in parts.tags if t == "button" and "data-layer" in g]
        assert len(buttons) == 2 * 20
        assert "conv1: 10 of 16 filters stay" in {g.get("aria-label") for g in buttons}

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
        results = {"model": EVIL, "command": EVIL, "asked": {EVIL: EVIL}, "versions": {EVIL: EVIL}}
        text = plan.to_json().replace('a<b>&\\"', json.dumps(EVIL)[1:-1])
        found = json.loads(json.dumps(found).replace('a<b>&\\"', json.dumps(EVIL)[1:-1]))
        return Run(EVIL, results, fpgm.Plan.from_json(text), found)

    def test_names_are_words_and_never_code(self) -> None:
        text = page(self.evil_run())
        parts = Parts(text)
        scripts = [given for tag, given in parts.tags if tag == "script"]
        assert len(scripts) == 4  # two of data, the library, ours
        assert not any(tag == "img" for tag, _ in parts.tags)
        assert EVIL in "".join(parts.words)  # shown as it is

    def test_in_a_comparison_too(self) -> None:
        from fpgm.report import compare_page

        parts = Parts(compare_page([self.evil_run(), self.evil_run()]))
        assert len([tag for tag, _ in parts.tags if tag == "script"]) == 4
        assert not any(tag == "img" for tag, _ in parts.tags)


class TestLayers:
    def test_streams_of_a_residual_network(self, folder: Path) -> None:
        told = read_run(folder)
        rows = layer_rows(told)
        assert told.plan is not None
        found = streams(told.plan, rows)
        assert [(s.name, s.column) for s in found] == [
            ("conv1", 0), ("layer2.0.conv2", 1), ("layer3.0.conv2", 2)
        ]  # fmt: skip
        by_name = {row.name: row for row in rows}
        assert [lane["writes"] for lane in by_name["conv1"].lanes] == [True]
        (lane,) = by_name["layer1.0.conv1"].lanes
        assert (lane["writes"], lane["reads"]) == (False, True)

    def test_streams_that_do_not_meet_share_a_column(self) -> None:
        told = Run("a", {}, _plan([("a", ("a", "b")), ("c", ("c", "d"))]), _analysis("abcd"))
        rows = layer_rows(told)
        assert told.plan is not None
        assert [s.column for s in streams(told.plan, rows)] == [0, 0]

    def test_why_layers_stay(self, folder: Path) -> None:
        by_name = {row.name: row for row in layer_rows(read_run(folder))}
        assert by_name["linear"].why == "the model's output"
        assert by_name["linear"].kept == by_name["linear"].filters == 10

    def test_without_an_analysis_there_are_the_groups(self) -> None:
        told = Run("a", {}, _plan([("a", ("a", "b"))]))
        assert [row.name for row in layer_rows(told)] == ["a", "b"]
        assert "a, with 1 other layers" in page(told)


def _plan(groups: list[tuple[str, tuple[str, ...]]]) -> fpgm.Plan:
    from fpgm.plan import Group

    return fpgm.Plan("", {}, (), groups=tuple(Group(n, own, 8, 4) for n, own in groups))


def _analysis(names: str) -> dict[str, Any]:
    return {"layers": [{"layer": name, "norms": [1.0] * 8, "reads": []} for name in names]}


class TestTraining:
    def test_a_run_that_is_still_going_on(self, tmp_path: Path) -> None:
        (tmp_path / "recipe.json").write_text('{"name": "quick"}')
        lines = [{"epoch": n, "test_accuracy": n / 10, "train_accuracy": n / 9} for n in (1, 2)]
        text = "\n".join(map(json.dumps, lines)) + '\n{"epoch": 3, "test'
        (tmp_path / "metrics.jsonl").write_text(text)
        told = read_run(tmp_path)
        assert len(told.metrics) == 2
        assert cards(told)[0].detail == "after epoch 2"
        assert "Accuracy by epoch" in page(told, live=True)


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
        with pytest.raises(fpgm.FileError, match="too large"):
            read_run(tmp_path)


class TestLarge:
    def test_a_large_network_loses_its_filters_first(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = len(page(read_run(folder)))
        monkeypatch.setattr("fpgm.report.LARGEST", whole - 1)
        assert len(page(read_run(folder))) < whole - 10_000


class TestComparison:
    def test_two_runs(self, folder: Path, tmp_path: Path) -> None:
        other = tmp_path / "small"
        run("prune", "resnet20", "--rate", 0.3, "--criterion", "l2", "--out", other)
        text = compare([folder, other], tmp_path / "both.html").read_text()
        words = Parts(text).words
        assert "small" in words
        assert "small (2)" in words
        assert {"fpgm", "l2"} <= set(words)

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
        assert "<body data-live>" in text
        assert self.ask(address, "/version") == (200, version(folder))

    def test_nothing_else_is_served(self, address: tuple[str, int]) -> None:
        for path in ("/results.json", "/../../etc/passwd", "/small.safetensors"):
            assert self.ask(address, path)[0] == 404

    def test_only_by_its_own_name(self, address: tuple[str, int]) -> None:
        assert self.ask(address, "/", "evil.example:80")[0] == 403

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

    def test_a_new_prune_takes_the_old_report_away(self, tmp_path: Path) -> None:
        place = tmp_path / "small"
        run("prune", "resnet20", "--rate", 0.3, "--out", place)
        run("report", place)
        assert (place / "report.html").exists()
        run("prune", "resnet20", "--rate", 0.4, "--out", place, "--force")
        assert not (place / "report.html").exists()
