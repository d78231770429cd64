"""Names that shells and file systems allow, and users without a home."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
from tests.helpers.faults import command, mostly_swept
from tests.helpers.runs import write_net, write_recipe
from tests.helpers.shell import refused, run
from tests.helpers.simulated_backends import CONV, Ideal

import fpgm
from fpgm.cli.main import _shorten_warnings
from fpgm.data import cifar10
from fpgm.errors import FileError
from fpgm.latency.lookup_table import LatencyTable, default_cache

LOOK = ("--data", "digits", "--images", 32)
NAMES = {
    "spaces": "a b  c",
    "quotes": """it's "it" `x` $(y)""",
    "letters": "Größe·模型·🦊",
    "pattern": "[a]*?{b}",
    "markup": "[bold]x %s {0} \\n",
    "line": "two\nlines",
    "dot": ".hidden",
    "long": "x" * 250,
}
BYTES = os.fsdecode(b"\xff\xfe")
"""A name that is no text."""


@pytest.mark.parametrize("kind", mostly_swept(NAMES, ("quotes", "letters", "long")))
def test_odd_file_names_work(kind: str, tmp_path: Path) -> None:
    name = NAMES[kind]
    place = tmp_path / name
    place.mkdir()
    net = write_net(place, "", 0.0)
    run("prune", net, "--rate", 0.4, "--input", "1x3x16x16", "--out", place / name)
    output = json.loads((place / name / "results.json").read_text())
    assert shlex.split(output["command"])[-1] == str(place / name)
    assert output["model"] == net
    run("verify", place / name, "--model", net)
    run("bench", place / name, "--model", net, "--backend", "eager", "--seconds", 0.01, "--keep")
    run("export", place / name, "--model", net, "--to", "torchscript", "--out", place / "it.pt")
    run("report", place / name, "--out", place / f"{name[:240]}.html")
    run("report", "--compare", place / name, place / name, "--out", place / "two.html")
    run("inspect", net, "--input", "1x3x16x16")
    weights = place / name / "small.safetensors"
    assert "does not fit" in refused("analyze", "digits", "--weights", weights)
    assert not list(tmp_path.rglob("*.part"))


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """It is written by its escapes, and read where libraries take names in UTF-8 only."""
    place = tmp_path / BYTES
    place.mkdir()
    net = write_net(place, "", 0.0)
    run("prune", net, "--rate", 0.4, "--input", "1x3x16x16", "--out", place / "it")
    output = json.loads((place / "it" / "results.json").read_text(encoding="utf-8"))
    assert shlex.split(output["command"])[-1] == str(place / "it")
    run("report", place / "it")
    run("verify", place / "it", "--model", net)
    run("export", place / "it", "--model", net, "--to", "torchscript")
    weights = place / "it" / "small.safetensors"
    assert "does not fit" in refused("analyze", "digits", "--weights", weights)
    weights.write_bytes(weights.read_bytes()[:-1])
    line = refused("verify", place / "it", "--model", net)
    assert line.startswith(f"{tmp_path}/\\udcff\\udcfe/it/small.safetensors is truncated")


@pytest.mark.parametrize(
    "name", [pytest.param(NAMES["quotes"], marks=pytest.mark.sweep), BYTES], ids=ascii
)
def test_names_of_what_is_measured_and_trained(name: str, tmp_path: Path) -> None:
    place = tmp_path / name
    place.mkdir()
    out = place / "it.json"
    run("sensitivity", "digits", *LOOK, "--no-trials", "--no-accuracy", "--out", out)
    run("prune", "digits", "--rate", 0.4, "--allocate", out, "--out", place / "small")
    (tmp_path / "net").mkdir()
    recipe = write_recipe(tmp_path / "net", write_net(tmp_path / "net", "", 0.0), epochs=1)
    shutil.copy(recipe, place / "recipe.toml")
    run("train", place / "recipe.toml", "--allow-code", "--out", place / "run")
    run("report", place / "run")


def test_what_the_tool_advises_can_be_pasted(tmp_path: Path) -> None:
    place = tmp_path / "it's here"
    place.mkdir()
    net = write_net(place, "", 0.0)
    run("prune", net, "--rate", 0.4, "--input", "1x3x16x16", "--out", place / "out")
    advice = refused("verify", place / "out").rpartition("pass ")[2].rstrip(".")
    run("verify", place / "out", *shlex.split(advice))
    output = shlex.split(cifar10.fetch_command(place))
    assert output == ["fpgm", "data", "cifar10", "--root", str(place)]


def test_a_name_that_begins_with_a_dash(tmp_path: Path) -> None:
    ended = command("prune", "digits", "--rate", 0.4, "--out", "-x", cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    output = json.loads((tmp_path / "-x" / "results.json").read_text())
    assert output["command"] == "fpgm prune digits --rate 0.4 --out -x"
    for args in (("verify", "--", "-x"), ("report", "--", "-x"), ("verify", "./-x")):
        assert command(*args, cwd=tmp_path).code == 0
    assert command("verify", "-x", cwd=tmp_path).line().startswith("No such option: -x")


@pytest.mark.parametrize(
    "args",
    [
        ("inspect", "{}.py:make"), ("prune", "digits", "--rate", 0.4, "--out", "{}"),
        ("prune", "digits", "--rate", 0.4, "--out", "out", "--weights", "{}"),
        ("prune", "digits", "--rate", 0.4, "--out", "out", "--allocate", "{}"),
        ("analyze", "digits", "--figures", "{}"), ("sensitivity", "digits", "--data", "{}"),
        ("compare", "digits", *LOOK, "--macs", 0.5, "--out", "{}"), ("verify", "{}"),
        ("bench", "{}"), ("report", "{}"), ("export", "{}"), ("train", "{}"),
        ("train", "{}.toml"), ("train", "digits-quick", "--out", "{}"),
        ("data", "cifar10", "--root", "{}"),
    ],
    ids=str,
)  # fmt: skip
def test_a_name_longer_than_any(
    args: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(*(str(item).format("x" * 300) for item in args))
    assert "x" * 300 in line
    assert not list(tmp_path.iterdir())


HOMES = {
    "none": ("", None),
    "not there": ("/nonexistent/home", None),
    "a file": ("/dev/null", None),
    "of nobody": (None, "os.setuid(54321)"),
}


def own_parents(path: Path) -> list[Path]:
    """The folders above a test's own, up to those of everybody."""
    everybodys = Path(tempfile.gettempdir())
    return [above for above in path.parents if everybodys in above.parents]


@pytest.mark.parametrize("home", mostly_swept(HOMES, ("of nobody",)))
def test_a_latency_cache_is_optional(home: str, tmp_path: Path) -> None:
    """Times of layers are kept elsewhere, or not, and one line says so: the plan is made."""
    place, before = HOMES[home]
    if before and os.geteuid():
        pytest.skip("only root can become somebody without a home")
    tmp_path.chmod(0o777)
    env = {key: item for key, item in os.environ.items() if key not in ("HOME", "FPGM_CACHE")}
    env |= {"TMPDIR": str(tmp_path), **({} if place is None else {"HOME": place})}
    alone = "from fpgm.utils import machine_load; machine_load._busy_seconds = lambda: None"
    code = f"import os; {alone}; {before or ''}"
    if before:  # folders above that belong to the tests alone
        for above in own_parents(tmp_path):
            above.chmod(0o755)
    ended = command(
        "prune", "digits", "--latency", 0.1, "--out", "out", cwd=tmp_path, env=env, before=code
    )
    output = "" if home != "a file" else (
        "fpgm: /dev/null/.cache/fpgm/latency cannot be written: Not a directory. The next plan "
        "will measure all layers again: set FPGM_CACHE to a folder that can be written.\n"
    )  # fmt: skip
    assert (ended.code, ended.err) == (0, output)
    ended = command("verify", "out", cwd=tmp_path, env=env, before=code)
    assert (ended.code, ended.err) == (0, "")
    if before:
        assert list((tmp_path / "fpgm-54321" / "latency").glob("*.json"))


def test_a_cache_that_cannot_be_written_warns_once(ideal: Ideal, own_cache: Path) -> None:
    """A warning for whoever uses the library; the command line makes a line of it."""
    own_cache.write_text("no folder")
    table = LatencyTable(ideal, 1)
    table.seconds(CONV)
    with pytest.warns(UserWarning, match="latency cannot be written: "):
        table.save()
    table.save()  # a second warning would be an error here
    own_cache.unlink()
    table.save()
    assert LatencyTable(ideal, 1).seconds(CONV) == table.seconds(CONV)
    assert len(ideal.asked) == 1


def test_only_warnings_of_this_package_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def warn() -> None:
        with _shorten_warnings():
            warnings.warn_explicit("ours\nand more", UserWarning, fpgm.__file__, 1)
            warnings.warn_explicit("theirs", UserWarning, __file__, 1)

    with pytest.warns(UserWarning, match="theirs"):
        warn()
    assert capsys.readouterr().err == "fpgm: ours and more\n"


def test_a_latency_cache_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FPGM_CACHE", "~nobody-at-all/x")
    with pytest.raises(FileError, match=r"^~nobody-at-all/x does not exist: "):
        default_cache()
