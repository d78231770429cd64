"""`fpgm recover DIR`: a pruned folder recovered, or recovered further, from the shell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.faults import inside
from tests.helpers.shell import refused, run

import fpgm
from fpgm.utils.atomic_io import write_text
from fpgm.workflow import pipeline

LOOK = ("--data", "digits", "--images", 64, "--test", 200)


@pytest.fixture
def pruned(tmp_path: Path) -> Path:
    out = tmp_path / "small"
    run("prune", "digits", "--rate", 0.5, "--out", out)
    return out


def results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


def test_recover_prints_the_outcome_first_and_writes_the_folder_back(pruned: Path) -> None:
    before, old = results(pruned), load_file(pruned / "small.safetensors")
    out, err = run("recover", pruned, *LOOK)
    assert err == ""
    first, *others = out.splitlines()
    result = results(pruned)
    error, accuracy = result["recovery"], result["accuracy"]
    assert first == (
        f"Recovered: output error {error['before']:.3g} → {error['after']:.3g}, accuracy "
        f"{accuracy['compact']:.2%} → {accuracy['recovered']:.2%} (original "
        f"{accuracy['original']:.2%})."
    )
    assert others[-1] == f"Written to {pruned}."
    assert error["after"] < error["before"]
    assert result["asked"] == before["asked"] | {
        "recover": "solve", "data": "digits", "images": 64, "test": 200,
    }  # fmt: skip
    assert result["command"].startswith("fpgm recover ")
    assert result["earlier"][0]["command"] == before["command"]
    assert (result["achieved"], result["certificate"]) == (
        before["achieved"],
        before["certificate"],
    )
    new = load_file(pruned / "small.safetensors")
    assert any(not torch.equal(new[name], old[name]) for name in old)
    assert "Verified" in run("verify", pruned)[0]


def test_it_is_what_prune_would_have_recovered(pruned: Path, tmp_path: Path) -> None:
    at_once = tmp_path / "at-once"
    run("prune", "digits", "--rate", 0.5, "--recover", "solve", *LOOK, "--out", at_once)
    run("recover", pruned, *LOOK)
    one, two = (load_file(folder / "small.safetensors") for folder in (at_once, pruned))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert results(pruned)["accuracy"] == results(at_once)["accuracy"]


def test_recovered_further_from_the_weights_that_are_there(tmp_path: Path) -> None:
    pruned = tmp_path / "small"
    run("prune", "digits", "--rate", 0.5, "--recover", "norms", *LOOK, "--out", pruned)
    once = results(pruned)
    message = refused("recover", pruned, *LOOK)
    assert message == (
        f"{pruned} was recovered before: pass --distil SECONDS to train it further, or a --method "
        "to apply again."
    )
    result = json.loads(run("recover", pruned, "--distil", 3, *LOOK, "--json")[0])
    twice = results(pruned)
    assert result == {"folder": str(pruned), "changed": True, "removed": [], **twice}
    assert twice["recovery"]["method"] is None
    assert twice["recovery"]["steps"] > 0
    assert twice["recovery"]["after"] < twice["recovery"]["before"]
    assert twice["accuracy"]["before"] == once["accuracy"]["recovered"]
    assert [item["command"] for item in twice["earlier"]] == [once["command"]]
    assert twice["asked"]["distil"] == 3
    assert "recover" not in twice["asked"]
    run("verify", pruned)
    run("report", pruned)


def test_another_folder(pruned: Path, tmp_path: Path) -> None:
    before, other = inside(pruned), tmp_path / "other"
    assert f"Written to {other}." in run("recover", pruned, *LOOK, "--out", other)[0]
    assert inside(pruned) == before
    assert set(inside(other)) == set(before)
    run("verify", other)
    assert "is not empty" in refused("recover", pruned, *LOOK, "--out", other)
    run("recover", pruned, *LOOK, "--out", other, "--force")


def test_outdated_files_are_removed_and_foreign_files_kept(
    pruned: Path,
) -> None:
    for name in ("report.html", "small.onnx", "bench.json", "notes.txt"):
        write_text(pruned / name, '{"rows": []}')
    out, _ = run("recover", pruned, *LOOK)
    assert "Removed, as they hold the earlier weights: report.html, small.onnx\n" in out
    assert {file.name for file in pruned.iterdir()} == {
        "small.safetensors", "plan.json", "results.json", "analysis.json", "bench.json",
        "notes.txt",
    }  # fmt: skip


def test_without_data(pruned: Path) -> None:
    out = run("recover", pruned, "--method", "weights")[0]
    assert out.startswith(("Recovered", "Not recovered"))
    assert "accuracy" not in results(pruned)


def test_weights_that_do_not_help_are_not_taken(
    pruned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = inside(pruned)
    monkeypatch.setattr("fpgm.recovery.api._add_candidates", lambda *_: None)
    out = run("recover", pruned, *LOOK)[0].splitlines()
    assert (
        out[0]
        == "Not recovered: no weights were found that bring the outputs closer to the original's."
    )
    assert out[-1] == f"{pruned} is unchanged."
    assert inside(pruned) == before


def damage_plan(folder: Path) -> None:
    (folder / "plan.json").write_text("{")


def damage_model(folder: Path) -> None:
    file = folder / "small.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def damage_analysis(folder: Path) -> None:
    (folder / "analysis.json").write_bytes(b"\xff\xfe")


def damage_asked(folder: Path) -> None:
    (folder / "results.json").write_text(json.dumps({**results(folder), "asked": [[]]}))


def change_weights(folder: Path) -> None:
    small = fpgm.load(folder / "small.safetensors", fpgm.models.digits)
    with torch.no_grad():
        small.head.bias[0] += 1
    fpgm.save(small, folder / "small.safetensors")


@pytest.mark.parametrize(
    ("harm", "code", "message"),
    [
        (damage_plan, 2, "plan.json cannot be read"),
        (damage_model, 2, "small.safetensors"),
        (damage_analysis, 2, "analysis.json cannot be read"),
        (damage_asked, 2, "results.json was not written by fpgm prune: asked has the wrong type"),
        (change_weights, 1, "is not the original without the removed units"),
    ],
)
def test_a_damaged_folder_stays_as_it_is(
    pruned: Path, harm: Callable[[Path], None], code: int, message: str
) -> None:
    harm(pruned)
    before = inside(pruned)
    assert message in refused("recover", pruned, *LOOK, code=code)
    assert inside(pruned) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--method solve needs images: pass --data."),
        (("--method", "norms"), "--method norms needs images: pass --data."),
        (("--method", "weights", "--distil", 1), "--distil needs images: pass --data."),
        (("--method", "x", *LOOK), "--method is 'x': give one of solve, norms, weights."),
        (("--distil", -1, *LOOK), "--distil is -1.0: give a number of seconds, 0 or more."),
        ((*LOOK, "--images", 0), "--images is 0: give an integer of at least 1."),
        (("--data", "cifar10-sample"), "--data cifar10-sample gives images of 3x32x32, which"),
        (("--data", "nowhere"), "nowhere"),
        ((*LOOK, "--weights", "gone.pt"), "was made without a weights file"),
    ],
)
def test_refusals(pruned: Path, options: tuple[Any, ...], message: str) -> None:
    before = inside(pruned)
    assert message in refused("recover", pruned, *options)
    assert inside(pruned) == before


def test_no_folder(tmp_path: Path) -> None:
    assert "contains no results of fpgm prune" in refused("recover", tmp_path, *LOOK)
    gone = tmp_path / "gone"
    assert refused("recover", gone, *LOOK) == (
        f"There is no folder {gone}: give one that fpgm prune wrote."
    )


def test_code_is_run_only_if_it_is_named(tmp_path: Path) -> None:
    net = tmp_path / "net.py"
    net.write_text("from fpgm.models import digits as make\n")
    spec, out = f"{net}:make", tmp_path / "out"
    run("prune", spec, "--input", "1x1x8x8", "--rate", 0.5, "--out", out)
    message = refused("recover", out, *LOOK)
    assert message == (
        f"{out} was made from {spec}, which is code that would be run: if you trust it, pass "
        f"--model {spec}."
    )
    run("recover", out, *LOOK, "--model", spec)


def test_a_row_of_a_comparison_needs_a_separate_folder(pruned: Path, tmp_path: Path) -> None:
    result = results(pruned)
    small = fpgm.load(pruned / "small.safetensors", fpgm.models.digits)
    result |= {"row": {"method": "l2"}, "small_sha256": pipeline.tensors_sha256(small)}
    (pruned / "results.json").write_text(json.dumps(result))
    message = refused("recover", pruned, "--method", "solve", *LOOK)
    assert message == f"{pruned} is a row of fpgm compare: write to another folder with --out."
    run("recover", pruned, "--method", "solve", *LOOK, "--out", tmp_path / "own")
    assert "row" not in results(tmp_path / "own")


def test_a_folder_that_another_process_replaced_meanwhile_is_left_to_it(
    pruned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pipeline.recover

    def while_another_writes(*args: Any, **options: Any) -> Any:
        result = results(pruned) | {"command": "another"}
        (pruned / "results.json").write_text(json.dumps(result))
        return real(*args, **options)

    monkeypatch.setattr(pipeline, "recover", while_another_writes)
    message = refused("recover", pruned, *LOOK)
    assert message == f"{pruned} was changed by another process: recover it again."
    assert results(pruned)["command"] == "another"
    run("verify", pruned)


def test_a_disk_that_is_full_leaves_the_old_model(
    pruned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = inside(pruned)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fpgm.workflow.pruned_folder.save", full)
    assert "No space left on device" in refused("recover", pruned, *LOOK)
    assert inside(pruned) == before
