"""Folders of runs as they are read, compared, served and asked for on the command line."""

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
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.report_pages import Parts, embedded, plan_of
from tests.helpers.shell import refused, run

import fpgm
from fpgm.models import resnet
from fpgm.pruning.plan import Latency
from fpgm.report.headline import cards
from fpgm.report.layers import layer_rows
from fpgm.report.page import compare, render_comparison, render_page
from fpgm.report.records import ResultsRecord, decode
from fpgm.report.run import Run, read_run
from fpgm.report.serve import create_server, folder_version
from fpgm.utils.run_files import REPORTED

EVIL = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"


@pytest.fixture
def folder(real_run: Path) -> Path:
    return real_run


EMPTY = '{"format": 1, "fingerprint": "", "cuts": [], "groups": [], "asked": {}}'
NOTHING = '{"name": "a", "layers": [], "units": 0, "kept": 0}'


class TestFolders:
    @pytest.mark.parametrize("content", ["[]", "{", "\x00", '"a"'])
    def test_files_that_are_something_else(self, content: str, tmp_path: Path) -> None:
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(fpgm.FileError, match=r"results\.json"):
            read_run(tmp_path)

    def test_no_folder_and_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(fpgm.FileError, match="is not a run folder"):
            read_run(tmp_path / "no")
        with pytest.raises(fpgm.FileError, match="has neither results"):
            read_run(tmp_path)

    def test_a_plan_that_is_invalid(self, tmp_path: Path) -> None:
        (tmp_path / "results.json").write_text("{}")
        (tmp_path / "plan.json").write_text("{}")
        with pytest.raises(fpgm.FileError, match=r"plan\.json cannot be read"):
            read_run(tmp_path)

    def test_a_file_too_large_to_be_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fpgm.report.run.MAX_FILE_BYTES", 3)
        (tmp_path / "results.json").write_text("{   }")
        with pytest.raises(fpgm.FileError) as caught:
            read_run(tmp_path)
        assert str(caught.value) == f"{tmp_path / 'results.json'} is larger than 3 bytes."

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

    def test_numbers_that_are_invalid(self, tmp_path: Path) -> None:
        (tmp_path / "results.json").write_text('{"accuracy": {"original": 0.5, "compact": NaN}}')
        (tmp_path / "metrics.jsonl").write_text(
            '{"epoch": 1, "test_accuracy": null}\n{"epoch": 2, "test_accuracy": NaN}\n'
        )
        loaded_run = read_run(tmp_path)
        assert [epoch.test_accuracy for epoch in loaded_run.metrics] == [None, None]
        assert cards(loaded_run)[0].value == "unknown"
        assert cards(loaded_run)[0].detail == "original 50.00%; test data"
        render_page(loaded_run)

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
        loaded_run = read_run(tmp_path)
        rows = [(row.name, row.filters, row.kept) for row in layer_rows(loaded_run)]
        assert rows == [("b", 2 * 10**9, 10**9), ("a", 100_000_000, 1)]
        render_page(loaded_run)
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
    key, item = chance.choice(inside)
    result = copy.copy(value)
    kind = chance.random()
    if kind < 0.1:
        del result[key]
    elif kind < 0.15 and isinstance(result, list):
        result.append(item)
    else:
        result[key] = changed(item, chance)
    return result


class TestChanged:
    """A file with anything changed is refused in one line, or shown."""

    @pytest.fixture
    def files(self, folder: Path) -> dict[str, Any]:
        result = {
            file.name: json.loads(file.read_text())
            for file in folder.glob("*.json")
        }  # fmt: skip
        # Small enough that a change is likely to hit what a page shows.
        result["analysis.json"]["layers"] = result["analysis.json"]["layers"][:2]
        result["plan.json"]["cuts"] = result["plan.json"]["cuts"][:4]
        result["plan.json"]["latency"] = asdict(Latency("eager", 1, 0.5, 0.4, 0.3, 0.01, 0.007))
        result["sensitivity.json"] = {"groups": [{"name": "a", "harm": [0.0, 0.1, 0.2]}]}
        result["metrics.jsonl"] = {"epoch": 1, "test_accuracy": 0.5, "train_accuracy": 0.6}
        result["recipe.json"] = {"model": {"name": "a"}, "train": {"epochs": 3, "lr": 0.1}}
        result["environment.json"] = {"torch": "2", "command": ["fpgm", "train"]}
        return result

    def test_one_line_or_a_page(
        self, files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fpgm.report.page._vega_bundle", str)
        for name, value in files.items():
            (tmp_path / name).write_text(json.dumps(value))
        complete = read_run(tmp_path)
        chance = random.Random(0)
        shown, refusals = 0, []
        for number in range(80):
            name = chance.choice(list(files))
            (tmp_path / name).write_text(json.dumps(changed(files[name], chance)))
            try:
                loaded_run = read_run(tmp_path)
            except fpgm.FileError as error:
                refusals.append((tmp_path / name, str(error)))
            else:
                shown += 1
                render_page(loaded_run)
                if number % 3 == 0:
                    render_comparison([complete, loaded_run])
            (tmp_path / name).write_text(json.dumps(files[name]))
        assert 20 < shown < 60  # both happened
        assert all(str(file) in line and "\n" not in line for file, line in refusals)


class TestComparison:
    def test_two_runs(self, folder: Path, tmp_path: Path) -> None:
        other = tmp_path / "small"
        run("prune", "resnet20", "--rate", 0.3, "--criterion", "l2", "--out", other)
        text = compare([folder, other], tmp_path / "both.html").read_text()
        words = Parts(text).words
        assert "small" in words
        assert "small (2)" in words
        assert {"fpgm", "l2"} <= set(words)

    def point(self, name: str, left: int, accuracy: object, **requested: object) -> Run:
        results = decode(ResultsRecord, {"model": "m", "accuracy": accuracy, "asked": requested})
        return Run(name, results, fpgm.Plan("", {}, (), macs_before=100, macs_after=left))

    def test_a_line_connects_only_runs_of_one_setting(self) -> None:
        runs = [
            self.point("a", 50, {"compact": 0.5}, macs=0.5, criterion="fpgm"),
            self.point("b", 70, {"compact": 0.6}, macs=0.3, criterion="fpgm"),
            self.point("c", 50, {"compact": 0.4}, macs=0.5, criterion="fpgm", recover="solve"),
            self.point("d", 50, {"compact": None}, macs=0.5),
        ]
        (spec,) = embedded(render_comparison(runs))["specs"]
        values = spec["data"]["values"]
        assert [row["run"] for row in values] == ["a", "b", "c"]
        settings = [row["setting"] for row in values]
        assert settings[0] == settings[1] == "model m, criterion fpgm"
        assert settings[2] != settings[0]

    def test_the_request_of_a_training_run(self) -> None:
        recipe = {"model.name": "m", "prune.rate": "0.4", "train.epochs": "3"}
        text = render_comparison([self.point("a", 50, 0.5, rate=0.3), Run("b", recipe=recipe)])
        words = [word.strip() for word in Parts(text).words if word.strip(" ≠\n")]
        row = words.index("rate")
        assert words[row : row + 3] == ["rate", "0.3", "0.4"]
        assert "train.epochs" in words

    def test_groups_by_number_and_networks_apart(self) -> None:
        same = plan_of([("a", ("a",)), ("a", ("a", "b"))])
        narrow = replace(same, groups=(replace(same.groups[0], kept=2), same.groups[1]))
        other = plan_of([("z", ("z",))])
        runs = [Run("one", plan=same), Run("two", plan=narrow), Run("three", plan=other)]
        (chart,) = embedded(render_comparison(runs))["specs"]
        assert {row["group"] for row in chart["data"]["values"]} == {"1. a", "2. a"}
        assert {row["run"] for row in chart["data"]["values"]} == {"one", "two"}
        assert {"color", "shape", "yOffset"} <= set(chart["encoding"])

    def test_a_run_has_one_color_in_all_charts(self) -> None:
        """The first run was not tested, so only the other chart shows it."""
        wide = plan_of([("a", ("a", "b"))])
        narrow = replace(wide, groups=(replace(wide.groups[0], kept=2),))
        runs = [
            replace(self.point(name, 50, accuracy),
                    plan=replace(plan, macs_before=100, macs_after=50))
            for name, accuracy, plan in (("a", None, wide), ("b", 0.5, narrow), ("c", 0.6, wide))
        ]  # fmt: skip
        accuracy, kept = embedded(render_comparison(runs))["specs"]
        colors = [
            dict(zip(scale["domain"], scale["range"], strict=True))
            for scale in (
                accuracy["layer"][1]["encoding"]["color"]["scale"],
                kept["encoding"]["color"]["scale"],
            )
        ]
        assert list(colors[0]) == ["b", "c"]
        assert list(colors[1]) == ["a", "b", "c"]
        assert colors[1].items() > colors[0].items()

    def test_equal_widths_are_said_once(self) -> None:
        same, said = plan_of([("a", ("a", "b"))]), "All runs keep the same number of filters"
        text = render_comparison([Run("one", plan=same), Run("two", plan=same)])
        assert embedded(text)["specs"] == []
        assert said in text
        other = replace(same, groups=(replace(same.groups[0], kept=3),))
        assert said not in render_comparison([Run("one", plan=same), Run("two", plan=other)])
        assert said not in render_comparison([Run("one", plan=same), Run("two")])

    def test_settings_that_differ_are_marked(self) -> None:
        runs = [
            self.point("a", 50, 0.5, macs=0.5, criterion="fpgm", seed=1),
            self.point("b", 50, 0.5, macs=0.5, criterion="l2", seed=1, recover="solve"),
        ]
        text = render_comparison(runs)
        above, _, below = text.partition("Settings in common")
        marked = re.findall(r"≠</span> (\w+)</th>", text)
        assert marked == ["criterion", "recover"]
        assert all(f"</span> {name}</th>" in above for name in marked)
        assert '<th scope="row">macs</th>' in below
        assert "seed" not in Parts(text).words  # the same, and not a common one

    def test_an_alignment_that_only_came_out_differently_is_not_marked(self) -> None:
        group = plan_of([("a", ("a",))]).groups[0]
        runs = [
            replace(self.point("a", 50, 0.5, align=16),
                    plan=fpgm.Plan("", {}, (), groups=(replace(group, kept=kept),)))
            for kept in (2, 4)
        ]  # fmt: skip
        above, _, below = render_comparison(runs).partition("Settings in common")
        assert "≠" not in above
        assert "2 (16 requested" in below
        assert "4 (16 requested" in below

    def test_each_run_in_a_sentence(self) -> None:
        accuracy = {"original": 0.9, "compact": 0.85}
        text = render_comparison([self.point("a", 50, accuracy), self.point("b", 40, None)])
        assert "Half of the work removed, 5.0 points lost." in text
        assert "60% of the work removed." in text

    def test_one_is_not_enough(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(fpgm.RequestError, match="nothing to compare"):
            compare([folder], tmp_path / "a.html")


class TestServer:
    @pytest.fixture
    def address(self, folder: Path) -> Iterator[tuple[str, int]]:
        running = create_server(folder)
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
        assert f'<body data-live="{folder_version(folder)}">' in text
        assert self.ask(address, "/version") == (200, folder_version(folder))

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

    def test_an_invalid_file_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "results.json").write_text("{}")
        running = create_server(tmp_path)
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
        assert text.startswith(f"{tmp_path / 'bench.json'} is not a valid fpgm file: rows has")

    @pytest.mark.parametrize("name", REPORTED)
    def test_every_file_of_the_page_is_watched(self, name: str, tmp_path: Path) -> None:
        before = folder_version(tmp_path)
        (tmp_path / name).write_text("{}")
        assert folder_version(tmp_path) != before

    def test_a_change_is_detected(self, folder: Path) -> None:
        before = folder_version(folder)
        text = (folder / "results.json").read_text()
        (folder / "results.json").write_text(text + " ")
        assert folder_version(folder) != before
        (folder / "results.json").write_text(text)


class TestCommand:
    def test_json(self, folder: Path, tmp_path: Path) -> None:
        out, _ = run("report", folder, "--out", tmp_path / "a.html", "--json")
        document = json.loads(out)
        assert document == {
            "file": str(tmp_path / "a.html"), "bytes": (tmp_path / "a.html").stat().st_size
        }  # fmt: skip

    def test_invalid_values(self, folder: Path, tmp_path: Path) -> None:
        assert "add --compare" in refused("report", folder, folder)
        assert "--serve follows one folder" in refused(
            "report", folder, folder, "--compare", "--serve"
        )
        assert "is not a run folder of fpgm" in refused("report", tmp_path / "no")
        assert "--keep writes into a folder" in refused("bench", "resnet20", "--keep")
        for option in (("--json",), ("--out", tmp_path / "a.html")):
            assert "--serve writes nothing" in refused("report", folder, "--serve", *option)
        message = refused("report", tmp_path / "no", "--serve")
        assert message == f"{tmp_path / 'no'} is not a run folder of fpgm prune or fpgm train."

    def test_prune_keeps_an_analysis_of_its_own_groups(self, tmp_path: Path) -> None:
        """With other choices than the usual ones there are other groups."""
        place = tmp_path / "small"
        run("prune", "resnet20", "--rate", 0.3, "--residual", "independent",
            "--ignore", "layer2.*", "--out", place)  # fmt: skip
        loaded_run = read_run(place)
        assert loaded_run.analysis is not None
        assert loaded_run.plan is not None
        assert loaded_run.analysis.groups == tuple(group.name for group in loaded_run.plan.groups)
        assert (
            loaded_run.analysis.groups != fpgm.analyze(resnet(20), torch.zeros(1, 3, 32, 32)).groups
        )

    def test_a_new_prune_takes_the_old_report_away(self, tmp_path: Path) -> None:
        place = tmp_path / "small"
        run("prune", "resnet20", "--rate", 0.3, "--out", place)
        run("report", place)
        assert (place / "report.html").exists()
        run("prune", "resnet20", "--rate", 0.4, "--out", place, "--force")
        assert not (place / "report.html").exists()
