"""The terminal: the outcome before details, short tables, colour, threads, help, busy machines."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.helpers.shell import refused, run
from typer.main import get_command
from typer.testing import CliRunner

import fpgm
from fpgm.cli import _common as common
from fpgm.cli import app, main
from fpgm.cli._outcome import cost_changes
from fpgm.models import assets
from fpgm.pruning.plan import Latency

ANSI = "\x1b["
SAMPLE = ("--data", "cifar10-sample", "--images", 64, "--test", 100)
SHIPPED = ("prune", "resnet20", "--weights", "shipped", "--rate", 0.3)


def outcome(text: str) -> dict[str, str]:
    """The entries at the top of a command's output."""
    head = text.split("\n\n")[0].splitlines()
    return dict(line.split(maxsplit=1) for line in head if not line.startswith("UNTRAINED"))


def test_the_outcome_of_prune_comes_first(tmp_path: Path) -> None:
    out, _ = run(*SHIPPED, *SAMPLE, "--recover", "norms", "--out", tmp_path / "a")
    results = json.loads((tmp_path / "a" / "results.json").read_text())
    shares, achieved = results["accuracy"], results["achieved"]
    assert outcome(out) == {
        "Accuracy": f"{shares['original']:.2%} → {shares['recovered']:.2%} (100 test images)",
        "MACs": f"{achieved['macs_before']:,} → {achieved['macs_after']:,} "
        f"(−{achieved['macs_removed']:.1%})",
        "Parameters": f"{achieved['params_before']:,} → {achieved['params_after']:,} "
        f"(−{achieved['params_removed']:.1%})",
        "File": f"{tmp_path}/a/small.safetensors",
        "Next": f"fpgm bench {tmp_path}/a",
    }
    assert "UNTRAINED" not in out
    assert results["untrained"] is False


def test_the_next_command_recovers_what_was_only_pruned(tmp_path: Path) -> None:
    out, _ = run(*SHIPPED, *SAMPLE, "--out", tmp_path / "a")
    follow = outcome(out)["Next"]
    assert follow == f"fpgm recover {tmp_path}/a --data cifar10-sample"
    out, _ = run(*shlex.split(follow)[1:], "--images", 64, "--test", 100)
    assert out.startswith("Recovered: ")
    assert outcome(out.split("\n", 1)[1])["Next"] == f"fpgm bench {tmp_path}/a"


def test_weights_and_code_are_part_of_the_next_command(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from fpgm.models.registry import load_model\n"
        "def make():\n    return load_model('resnet20')\n"
    )
    own = tmp_path / "own.safetensors"
    own.write_bytes(assets.SHIPPED_WEIGHTS["resnet20"].read_bytes())
    spec = f"{tmp_path}/net.py:make"
    out, _ = run("prune", spec, "--weights", own, "--rate", 0.3, "--input", "1x3x32x32",
                 "--out", tmp_path / "a")  # fmt: skip
    assert outcome(out)["Next"] == (
        f"fpgm recover {tmp_path}/a --data NAME --weights {own} --model {spec}"
    )


def test_a_measured_latency_is_part_of_the_outcome() -> None:
    plan = fpgm.Plan("", {}, (), latency=Latency("eager", 1, 0.5, 0.4, 0.45, 0.02, 0.011))
    assert cost_changes(plan)["Latency"] == "20 ms → 11 ms (−45.0%, eager)"
    grown = replace(plan, latency=Latency("eager", 1, 0.5, 0.4, -0.03, 0.02, 0.0206))
    assert cost_changes(grown)["Latency"] == "20 ms → 20.6 ms (+3.0%, eager)"


@pytest.mark.parametrize("command", ["prune", "verify", "recover"])
def test_random_weights_are_said_in_every_command(command: str, tmp_path: Path) -> None:
    out, _ = run("prune", "digits", "--rate", 0.4, "--out", tmp_path / "a")
    if command == "verify":
        out, _ = run("verify", tmp_path / "a")
    elif command == "recover":
        out, _ = run("recover", tmp_path / "a", "--method", "weights")
    assert "UNTRAINED: digits has random weights" in out
    assert json.loads((tmp_path / "a" / "results.json").read_text())["untrained"] is True


def test_of_code_nobody_knows_whether_it_loads_weights(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from fpgm.models import digits as make\n")
    out, _ = run("prune", f"{tmp_path}/net.py:make", "--rate", 0.4, "--input", "1x1x8x8",
                 "--out", tmp_path / "a")  # fmt: skip
    assert "UNTRAINED" not in out
    assert json.loads((tmp_path / "a" / "results.json").read_text())["untrained"] is None


def test_long_tables_are_shortened() -> None:
    out, _ = run("inspect", "resnet56")
    groups = 3 * 9 + 3  # every block's inner width, and one per residual stream
    more = groups - common.ROWS
    assert f"\n… and {more} more (--all)\n" in out
    full, _ = run("inspect", "resnet56", "--all")
    assert full.count("\n| ") - out.count("\n| ") == more
    assert "(--all)" not in full


def test_colour_is_for_terminals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["prune", "digits", "--rate", "0.4", "--out"]

    def printed(folder: str, color: bool) -> str:
        return CliRunner().invoke(app, [*arguments, str(tmp_path / folder)], color=color).stdout

    assert ANSI not in printed("a", color=False)
    assert f"{ANSI}1mMACs " in printed("b", color=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert ANSI not in printed("c", color=True)


@pytest.fixture
def _same_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_same_threads")
@pytest.mark.parametrize(
    "arguments",
    [
        ("--threads", 3, "inspect", "digits"),
        ("inspect", "--threads", 3, "digits"),
        ("inspect", "digits", "--threads=3"),
        ("prune", "digits", "--rate", 0.4, "--out", "OUT", "--threads", 3),
    ],
)
def test_threads_before_and_after_the_command(
    arguments: tuple[object, ...], tmp_path: Path
) -> None:
    run(*(tmp_path / "out" if own == "OUT" else own for own in arguments))
    assert torch.get_num_threads() == 3
    assert os.environ["OMP_NUM_THREADS"] == "3"  # of processes it starts


@pytest.mark.usefixtures("_same_threads")
def test_threads_are_at_least_one() -> None:
    for arguments in (("--threads", 0, "inspect", "digits"), ("inspect", "digits", "--threads", 0)):
        _, err = run(*arguments, code=2)
        assert err == "fpgm: --threads is 0: give a whole number from 1 up.\n"


class Busy:
    """Stands in for MachineLoad on a machine where others use all cores."""

    def describe_contention(self, threads: int) -> str:
        return "other processes used 2.0 of 2 cores"


@pytest.mark.usefixtures("_same_threads")
@pytest.mark.parametrize(
    ("threads", "hint"),
    [(1, ""), (2, " This one uses 2 threads; fewer are often faster: --threads 1.")],
)
def test_a_busy_machine_is_said_once(
    threads: int, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "MachineLoad", Busy)
    monkeypatch.setattr(common, "LOG_SECONDS", 0.0)
    _, err = run("inspect", "digits", "--threads", threads)
    line = f"The machine is busy: other processes used 2.0 of 2 cores.{hint}"
    assert err.splitlines().count(line) == 1
    assert err.count("busy") == 1


def test_a_short_command_does_not_look() -> None:
    assert run("inspect", "digits", "--json")[1] == ""


COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


def test_commands_are_grouped_in_the_help() -> None:
    text, _ = run("--help")
    panels = [text.index(f"─ {name} ─") for name in (main.START, main.MEASURE, main.RESEARCH)]
    places = [text.index(f"│ {name} ") for name in ("prune", "bench", "reproduce")]
    assert panels[0] < places[0] < panels[1] < places[1] < panels[2] < places[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_it_takes(name: str) -> None:
    text, _ = run(name, "--help")
    assert "<bool>" not in text
    example = COMMANDS[name].epilog.removeprefix("Example: ")
    assert f"Example: fpgm {name}" in text
    program, command, *arguments = shlex.split(example)
    assert (program, command) == ("fpgm", name)
    COMMANDS[name].make_context(name, arguments)  # raises for what it does not take


def test_a_fraction_that_is_no_number_is_answered_with_one(tmp_path: Path) -> None:
    assert refused("prune", "digits", "--macs", "50%", "--out", tmp_path / "a").startswith(
        "Invalid value for '--macs': '50%' is not a number. Give a fraction such as 0.5 for 50 %."
    )
    data = ("--data", "digits", "--out", tmp_path / "a")
    assert "'half' is not a number" in refused("compare", "digits", "--macs", "half", *data)


def test_sensitivity_says_where_its_result_is(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    few = ("--data", "digits", "--images", 32, "--no-accuracy", "--no-trials")
    out, _ = run("sensitivity", "digits", *few, "--out", file)
    assert out.endswith(f"\nWritten to {file}: give it to fpgm prune as --allocate {file}.\n")
    assert "e+" not in out


def test_a_report_names_its_page_if_there_is_no_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a"
    run("prune", "digits", "--rate", 0.4, "--out", folder)
    monkeypatch.setattr("webbrowser.open", lambda _: False)
    _, err = run("report", folder, "--open")
    page = (folder / "report.html").as_uri()
    assert err == f"fpgm: No browser was found: open {page} yourself.\n"
    monkeypatch.setattr("webbrowser.open", lambda _: True)
    assert run("report", folder, "--open")[1] == ""


def test_fixed_macs_that_round_to_nothing_are_not_mentioned(tmp_path: Path) -> None:
    out, _ = run("prune", "resnet56", "--rate", 0.4, "--residual", "independent",
                 "--out", tmp_path / "a")  # fmt: skip
    assert "MACs are fixed" not in out
    out, _ = run("prune", "resnet56", "--rate", 0.4, "--ignore", "conv1", "--out", tmp_path / "b")
    assert "0.4% of the MACs are fixed" in out


def test_data_with_other_classes_than_the_model_is_mentioned(tmp_path: Path) -> None:
    net = tmp_path / "net.py"
    net.write_text(
        "from fpgm.models import resnet\ndef other(): return resnet(20, classes=12)\n"
        "def same(): return resnet(20)\n"
    )
    few = ("--input", "1x3x32x32", "--rate", 0.3, *SAMPLE)
    _, err = run("prune", f"{net}:other", *few, "--out", tmp_path / "a")
    assert err == (
        f"fpgm: {net}:other has 12 classes and --data cifar10-sample has 10: accuracy means little "
        "unless they are numbered alike.\n"
    )
    assert run("prune", f"{net}:same", *few, "--out", tmp_path / "b")[1] == ""
