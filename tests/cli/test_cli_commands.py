"""The command line: whole outputs, one JSON document, one-line errors, and nothing half written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.shell import refused, run, without_numbers

import fpgm
from fpgm.models import digits
from fpgm.models.registry import load_model
from fpgm.pruning import serialization as store

INSPECT = """\
digits on 1x1x8x8: 4,475,520 MACs, 169,834 parameters

| group          | layers | units |  MACs | exact |
|----------------|--------|-------|-------|-------|
| stem.0         |      3 |    32 | 26.8% |   yes |
| stage1.0.conv1 |      1 |    32 | 13.2% |   yes |
| stage1.1.conv1 |      1 |    32 | 13.2% |   yes |
| stage2.0.conv1 |      1 |    64 |  6.6% |   yes |
| stage2.0.conv2 |      3 |    64 | 27.1% |   yes |
| stage2.1.conv1 |      1 |    64 | 13.2% |   yes |

Not pruned:

| layers | reason             | channels |
|--------|--------------------|----------|
| head   | the model's output |       10 |
"""

PRUNE = """\
MACs        4,475,520 → 1,752,720 (−60.8%)
Parameters  169,834 → 66,790 (−60.7%)
File        DIR/small.safetensors
Next        fpgm bench DIR
UNTRAINED: digits has random weights, so its outputs mean nothing, pruned or not. \
Give trained ones with --weights FILE.

Verified on 2 inputs in float64: the compact model differs from the masked original by # \
(tolerance 1e-08); masking changes the outputs by #.
Input: 1x1x8x8.

| group          | layers | units | kept | removed | exact |
|----------------|--------|-------|------|---------|-------|
| stem.0         |      3 |    32 |   20 |   37.5% |   yes |
| stage1.0.conv1 |      1 |    32 |   20 |   37.5% |   yes |
| stage1.1.conv1 |      1 |    32 |   20 |   37.5% |   yes |
| stage2.0.conv1 |      1 |    64 |   40 |   37.5% |   yes |
| stage2.0.conv2 |      3 |    64 |   40 |   37.5% |   yes |
| stage2.1.conv1 |      1 |    64 |   40 |   37.5% |   yes |

Not pruned:

| layers | reason             | channels |
|--------|--------------------|----------|
| head   | the model's output |       10 |

Written to DIR: small.safetensors, plan.json, results.json, analysis.json
"""


GREY = """
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
"""


@pytest.mark.parametrize("command", ["prune", "inspect"])
def test_a_shape_that_was_only_supposed_is_named_when_the_model_cannot_take_it(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "grey.py").write_text(GREY)
    rest = ["--rate", "0.5", "--out", tmp_path / "out"] if command == "prune" else []
    message = refused(command, f"{tmp_path}/grey.py:make", *rest)
    assert message.startswith("The model's own forward fails on the example input: Given groups=1")
    assert message.endswith(
        "instead. The input shape was assumed to be 1x3x224x224: set it with --input."
    )
    assert "--input" not in refused(
        command, f"{tmp_path}/grey.py:make", *rest, "--input", "1x3x8x8"
    )
    run(command, f"{tmp_path}/grey.py:make", *rest, "--input", "1x1x8x8")


def test_a_shape_that_was_only_supposed_is_named_when_the_model_takes_it(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(GREY.replace("Conv2d(1,", "Conv2d(3,"))
    given = ("prune", f"{tmp_path}/net.py:make", "--rate", 0.5)
    out, _ = run(*given, "--out", tmp_path / "a")
    assert "\nInput: 1x3x224x224 (assumed; change it with --input).\n" in out
    out, _ = run(*given, "--input", "1x3x8x8", "--out", tmp_path / "b")
    assert "\nInput: 1x3x8x8.\n" in out


def test_version_and_help() -> None:
    assert run("--version") == (f"fpgm {fpgm.__version__}\n", "")
    out, _ = run("--help")
    assert run() == (out, "")
    for command in ("inspect", "prune", "verify"):
        assert command in out
        assert "--json" in run(command, "--help")[0]


def test_inspect() -> None:
    assert run("inspect", "digits") == (INSPECT, "")


def test_inspect_as_json() -> None:
    out, err = run("inspect", "digits", "--input", "2x1x8x8", "--json")
    assert err == ""
    result = json.loads(out)
    assert result["input"] == [2, 1, 8, 8]
    assert result["macs"] == 2 * 4_475_520
    assert result["params"] == 169_834
    assert result["groups"][1] == {
        "name": "stage1.0.conv1",
        "layers": ["stage1.0.conv1"],
        "units": 32,
        "macs_share": round(32 * 32 * 9 * 64 / 4_475_520, 6),
        "exact": True,
    }
    assert result["frozen"] == [
        {"layers": ["head"], "channels": 10, "reason": "the model's output"}
    ]


def test_prune(tmp_path: Path) -> None:
    out, err = run("prune", "digits", "--rate", 0.4, "--out", tmp_path / "out")
    assert err == ""
    assert without_numbers(out).replace(str(tmp_path / "out"), "DIR") == PRUNE
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "analysis.json", "plan.json", "results.json", "small.safetensors",
    ]  # fmt: skip


def test_what_prune_writes_is_what_the_library_makes(folder: Path) -> None:
    plan = fpgm.Plan.from_json((folder / "plan.json").read_text())
    torch.manual_seed(0)
    model = digits()
    assert plan == fpgm.plan(model, torch.randn(1, 1, 8, 8), rate=0.4)
    assert store.read_plans(folder / "small.safetensors") == {"": (plan,)}
    small = fpgm.load(folder / "small.safetensors", digits)
    for name, tensor in fpgm.compact(model, plan).state_dict().items():
        assert torch.equal(tensor, small.state_dict()[name])


def test_prune_as_json_prints_what_it_writes(tmp_path: Path) -> None:
    arguments = ["prune", "digits", "--macs", "0.5", "--rates", "stage2.*=0.25", "--ignore",
                 "stem.*", "--align", "1", "--out", str(tmp_path / "out"), "--json"]  # fmt: skip
    out, err = run(*arguments)
    assert err == ""
    result = json.loads(out)
    assert result == json.loads((tmp_path / "out" / "results.json").read_text())
    seconds = result.pop("seconds")
    assert list(seconds) == ["build", "trace and plan", "compact and verify", "analyze filters"]
    certificate = result.pop("certificate")
    assert certificate.pop("ok")
    assert certificate.pop("max_error") < 1e-5 < certificate.pop("moved")
    assert certificate.pop("worst").startswith("out, channel ")
    assert certificate == {
        "inputs": 2, "tolerance": 1e-8, "precision": "float64", "exact": True, "problem": "",
        "notes": [],
    }  # fmt: skip
    achieved = result.pop("achieved")
    assert abs(achieved["macs_removed"] - 0.5) < 0.02
    assert len(result.pop("original_sha256")) == 64
    assert set(result.pop("versions")) == {"fpgm", "torch", "python"}
    assert result == {
        "format": 1,
        "model": "digits",
        "weights": None,
        "untrained": True,
        "input": [1, 1, 8, 8],
        "asked": {
            "macs": 0.5,
            "rates": {"stage2.*": 0.25},
            "criterion": "fpgm",
            "distance": "l2",
            "residual": "coupled",
            "ignore": ["stem.*"],
            "align": 1,
            "rounding": "nearest",
            "min_channels": 1,
            "approximate": False,
        },
        "command": " ".join(["fpgm", *arguments]).replace("stage2.*=0.25", "'stage2.*=0.25'")
        .replace("stem.*", "'stem.*'"),
    }  # fmt: skip


def test_every_option_reaches_the_plan(tmp_path: Path) -> None:
    run(
        "prune", "digits", "--params", 0.4, "--criterion", "l1", "--residual", "independent",
        "--rounding", "paper", "--min-channels", 12, "--approximate", "--input", "1x1x16x16",
        "--out", tmp_path / "out",
    )  # fmt: skip
    plan = fpgm.Plan.from_json((tmp_path / "out" / "plan.json").read_text())
    assert plan.asked["params"] == 0.4
    assert plan.asked["criterion"] == "l1"
    assert plan.asked["residual"] == "independent"
    assert plan.asked["rounding"] == "paper"
    assert plan.macs_before == 4 * 4_475_520 - 3 * 640
    assert min(group.kept for group in plan.groups) >= 12


def test_a_model_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3))\n"
    )
    spec = f"{tmp_path}/net.py:make"
    run("prune", spec, "--rate", 0.5, "--input", "1x3x8x8", "--out", tmp_path / "out")
    for command in ("verify", "bench", "export"):
        assert refused(command, tmp_path / "out") == (
            f"{tmp_path}/out was made from {spec}, which is code that would be run: if you trust "
            f"it, pass --model {spec}."
        )
    run("verify", tmp_path / "out", "--model", spec)
    run("export", tmp_path / "out", "--model", spec, "--to", "pt2")
    weights = tmp_path / "mine.pt"
    torch.save(load_model(spec).state_dict(), weights)
    both = ("--weights", weights, "--input", "1x3x8x8", "--out", tmp_path / "both")
    run("prune", spec, "--rate", 0.5, *both)
    assert refused("verify", tmp_path / "both") == (
        f"{tmp_path}/both was made from {spec}, which is code that would be run: if you trust it, "
        f"pass --model {spec}; {tmp_path}/both was made from mine.pt: pass that file with "
        "--weights."
    )
    run("prune", spec, "--rate", 0.5, "--input", "1x3x8x8", "--out", tmp_path / "out", "--force")
    assert not (tmp_path / "out" / "small.pt2").exists()  # it was the old model's


BAD: list[tuple[list[str], str]] = [
    (["inspect"], "Missing argument 'MODEL'. See fpgm inspect --help."),
    (["inspct"], "No such command 'inspct'. Did you mean 'inspect'? See fpgm --help."),
    (["--nonsense"], "No such option: --nonsense. See fpgm --help."),
    (["inspect", "digits", "--input", "1x1x8xX"],
     "--input is '1x1x8xX': write sizes like 1x3x224x224."),
    (["inspect", "digits", "--input", "0x1x8x8"],
     "--input is '0x1x8x8': write sizes like 1x3x224x224."),
    (["inspect", "digits", "--residual", "no"],
     "residual is 'no': give 'coupled' or 'independent'."),
    (["prune", "digits", "--rate", "0.4"], "Missing option '--out'. See fpgm prune --help."),
    (["prune", "digits", "--out", "DIR"],
     "Say how much to remove: --rate, --macs, --params, --latency or --rates."),
    (["prune", "digits", "--rate", "1.5", "--out", "DIR"],
     "rate is 1.5: give a fraction of at least 0 and below 1."),
    (["prune", "digits", "--rate", "0.4", "--macs", "0.4", "--out", "DIR"],
     "Give one budget, not 2: rate, macs."),
    (["prune", "digits", "--rate", "0", "--out", "DIR"],
     "This would remove no unit: request more, or use align=1."),
    (["prune", "digits", "--rates", "stem.0", "--out", "DIR"],
     "--rates is 'stem.0': write a pattern and a rate, layer3.*=0.2."),
    (["prune", "digits", "--rates", "stem.0=many", "--out", "DIR"],
     "--rates is 'stem.0=many': write a pattern and a rate, layer3.*=0.2."),
    (["prune", "digits", "--rate", "0.4", "--weights", "nowhere.pt", "--out", "DIR"],
     "nowhere.pt does not exist."),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_requests_are_one_line_and_write_nothing(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    given = [str(tmp_path / "DIR") if a == "DIR" else a for a in arguments]
    assert refused(*given) == message
    assert not list(tmp_path.iterdir())


def test_results_are_not_overwritten_unasked(folder: Path) -> None:
    again = ["prune", "digits", "--rate", "0.5", "--out", str(folder)]
    before = (folder / "results.json").read_text()
    assert refused(*again) == (
        f"{folder} is not empty: choose another --out, or --force to replace it."
    )
    assert (folder / "results.json").read_text() == before
    run(*again, "--force")
    assert json.loads((folder / "results.json").read_text())["asked"]["rate"] == 0.5
    assert [p.name for p in folder.parent.iterdir()] == ["out"]
    (folder / "thesis.tex").touch()
    assert refused(*again, "--force") == (
        f"{folder} also contains 'thesis.tex': --force replaces only results of prune."
    )
    assert (folder / "thesis.tex").exists()


def test_an_empty_folder_will_do_and_a_file_will_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run("prune", "digits", "--rate", 0.4, "--out", tmp_path / "empty")
    (tmp_path / "file").touch()
    assert refused("prune", "digits", "--rate", 0.4, "--out", tmp_path / "file") == (
        f"{tmp_path}/file is a file: --out must be a folder."
    )


def test_a_failed_write_leaves_the_old_results(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "save_file", full)
    assert refused("prune", "digits", "--rate", 0.5, "--out", folder, "--force") == (
        f"{folder} cannot be written: No space left on device."
    )
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert list(folder.parent.iterdir()) == [folder]


def test_a_failed_certificate_ends_with_1_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = fpgm.Certificate(0.25, 0.5, 2, 1e-4, "float32")
    monkeypatch.setattr("fpgm.workflow.api.certify", lambda *_, **__: bad)
    assert refused("prune", "digits", "--rate", 0.4, "--out", tmp_path / "out", code=1) == (
        "The compact model differs from the masked original by 2.5e-01 (tolerance 1e-04). Do not "
        "use it: plan again with ignore= for the layers before that output."
    )
    assert not list(tmp_path.iterdir())


def test_an_approximate_model_is_certified_as_approximate(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 2))\n"
    )
    given = ["prune", f"{tmp_path}/net.py:make", "--rate", "0.5", "--input", "2x4"]
    assert refused(*given, "--out", tmp_path / "exact").startswith("There is nothing to prune")
    out, err = run(*given, "--approximate", "--out", tmp_path / "out")
    assert err == ""
    line = (
        "Verified on 2 inputs in float64: the compact model differs from the masked original by # "
        "(tolerance 1e-08); masking changes the outputs by # (approximate: norms over fewer "
        "channels).\n"
    )
    assert line in without_numbers(out)
    result = json.loads((tmp_path / "out" / "results.json").read_text())["certificate"]
    assert (result["ok"], result["exact"]) == (True, False)
    out, err = run("verify", tmp_path / "out", "--model", given[1])
    assert err == ""
    assert without_numbers(out).endswith(line)


def test_json_has_no_number_that_json_does_not_know() -> None:
    from fpgm.cli._common import to_json

    assert json.loads(to_json({"a": [float("inf"), 1.5], "b": float("nan")})) == {
        "a": [None, 1.5], "b": None,
    }  # fmt: skip


def test_as_a_real_process(tmp_path: Path) -> None:
    def fpgm_process(*args: str) -> subprocess.CompletedProcess[str]:
        program = "import torch; torch.set_num_threads(1); from fpgm.cli import app; app()"
        return subprocess.run(
            [sys.executable, "-c", program, *args], capture_output=True, text=True, check=False
        )

    out = str(tmp_path / "out")
    done = fpgm_process("prune", "digits", "--rate", "0.4", "--out", out, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["command"] == f"fpgm prune digits --rate 0.4 --out {out} --json"
    failed = fpgm_process("verify", "nowhere")
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert failed.stderr == "fpgm: There is no folder nowhere: give one that fpgm prune wrote.\n"


DIGITS = ("prune", "digits", "--rate", "0.4", "--out")


@pytest.mark.parametrize("name", [".", "link", "made"])
def test_results_go_into_a_folder_that_is_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one a shell stands in, one behind a link, and an empty one: none can be renamed away."""
    (tmp_path / "made").mkdir()
    (tmp_path / "link").symlink_to("made")
    monkeypatch.chdir(tmp_path / "made" if name == "." else tmp_path)
    run(*DIGITS, name)
    assert (tmp_path / "link").is_symlink()
    assert sorted(file.name for file in (tmp_path / "made").iterdir()) == [
        "analysis.json",
        "plan.json",
        "results.json",
        "small.safetensors",
    ]
    assert "Verified" in run("verify", name)[0]
    run(*DIGITS, name, "--force")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "made"]


def test_a_plan_that_is_no_text(tmp_path: Path) -> None:
    run(*DIGITS, tmp_path / "out")
    (tmp_path / "out" / "plan.json").write_bytes(b"\xff\xfe")
    message = refused("verify", tmp_path / "out")
    assert message.startswith(f"{tmp_path}/out/plan.json cannot be read: invalid start byte")


def test_fresh_weights_are_the_same_whatever_they_are_drawn_from(tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(
        "import random\nimport numpy as np\nimport torch\nfrom torch import nn\n"
        "def make():\n"
        "    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))\n"
        "    nn.init.constant_(net[0].bias, random.random() + np.random.rand())\n"
        "    return net\n"
    )
    spec = f"{tmp_path}/drawn.py:make"
    run("prune", spec, "--rate", "0.5", "--input", "1x3x8x8", "--out", tmp_path / "out")
    assert "Verified" in run("verify", tmp_path / "out", "--model", spec)[0]
