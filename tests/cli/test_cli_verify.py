"""`fpgm verify`: what it certifies, what it tells apart, and what it refuses to judge."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.helpers.shell import refused, run, without_numbers

import fpgm
from fpgm.models import digits
from fpgm.utils import run_files as results
from fpgm.utils.atomic_io import file_sha256


def test_verify(folder: Path) -> None:
    out, err = run("verify", folder)
    assert err == ""
    assert without_numbers(out) == (
        "digits: MACs −60.8%, parameters −60.7%\n"
        "Verified on 2 inputs in float64: the compact model differs from the masked original by # "
        "(tolerance 1e-08); masking changes the outputs by #.\n"
        "UNTRAINED: digits has random weights, so its outputs mean nothing, pruned or not. "
        "Prune again with trained ones: --weights FILE.\n"
    )
    output = json.loads(run("verify", folder, "--json")[0])
    assert output["certificate"]["ok"] is True
    assert output["achieved"]["macs_after"] == 1_752_720


def test_verify_ends_with_1_when_the_file_is_not_the_pruned_original(folder: Path) -> None:
    small = fpgm.load(folder / results.SMALL, digits)
    with torch.no_grad():
        small.head.bias[0] += 1
    fpgm.save(small, folder / results.SMALL)
    assert refused("verify", folder, code=1) == (
        f"{folder}/small.safetensors is not the original without the removed units: 'head.bias' "
        "holds other values (trained since, or damaged)."
    )


def test_verify_refuses_what_it_cannot_judge(folder: Path, tmp_path: Path) -> None:
    assert refused("verify", tmp_path) == (
        f"{tmp_path} contains no results of fpgm prune: no results.json."
    )
    weights = tmp_path / "weights.safetensors"
    save_file(digits().state_dict(), weights)
    assert refused("verify", folder, "--weights", weights) == (
        f"{folder} was made without a weights file: leave out --weights."
    )
    run("prune", "digits", "--rate", 0.3, "--out", tmp_path / "other")
    (tmp_path / "other" / "plan.json").replace(folder / "plan.json")
    assert refused("verify", folder) == (
        f"{folder}/plan.json is not the plan in {folder}/small.safetensors."
    )
    (folder / "plan.json").unlink()
    assert refused("verify", folder) == (
        f"{folder}/plan.json cannot be read: No such file or directory."
    )
    output = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps(output | {"original_sha256": "0" * 64}))
    assert refused("verify", folder) == (
        f"'digits' is not the model that {folder} was made from: its weights or its code have "
        "changed."
    )
    (folder / "results.json").write_text(json.dumps(output | {"format": 2}))
    assert refused("verify", folder) == (f"{folder}/results.json is not in format 1: update fpgm.")
    (folder / "results.json").write_text("{}")
    assert refused("verify", folder) == f"{folder}/results.json was not written by fpgm prune."


def test_trained_weights_are_required_again_and_recognized(tmp_path: Path) -> None:
    torch.manual_seed(3)
    weights, other, out = (tmp_path / name for name in ("mine.pt", "other.pt", "out"))
    torch.save(digits().state_dict(), weights)
    torch.save(digits().state_dict(), other)
    run("prune", "digits", "--rate", 0.4, "--weights", weights, "--out", out)
    output = json.loads((out / "results.json").read_text())
    assert output["weights"] == {"file": "mine.pt", "sha256": file_sha256(weights)}
    assert refused("verify", out) == f"{out} was made from mine.pt: pass that file with --weights."
    assert refused("verify", out, "--weights", other) == (
        f"{other} is not the mine.pt that {out} was made from: its sha256 differs."
    )
    assert refused("verify", out, "--weights", tmp_path / "gone.pt") == (
        f"{tmp_path}/gone.pt does not exist."
    )
    run("verify", out, "--weights", weights)
