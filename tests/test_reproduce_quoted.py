"""Rows that the paper quotes from other papers, run by this package's version of their method."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.test_reproduce_full import changes, options, trained
from torch import nn

from fpgm import paper
from fpgm.methods.mil import layers_of
from fpgm.models.spec import load_model
from fpgm.reproduce import TABLES, full, quoted
from fpgm.reproduce.rows import Row
from fpgm.store import load

TABLE1, TABLE2 = TABLES["table1"], TABLES["table2"]
QUOTED = [(table, row) for table in (TABLE1, TABLE2) for row in table.rows if row.quoted]


def maker(tmp_path: Path, tiny: str) -> full.Full:
    trained(tiny, tmp_path / "cifar10_resnet56.safetensors")
    trained(tiny, tmp_path / "cifar10_resnet110.safetensors")
    trained(tiny, tmp_path / "imagenet_resnet101.safetensors")
    return full.Full(tmp_path / "out", tmp_path, changes(tiny))


def left(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "out" / "runs").glob("*.safetensors")
    return file


def test_they_are_the_rows_whose_method_is_not_the_authors() -> None:
    assert len(QUOTED) == 15
    assert {row.method for _, row in QUOTED} == {
        "pfec", "cp", "mil", "nisp", "thinet", "rethinking",
    }  # fmt: skip


def test_the_recipes_do_not_prune_and_fine_tune_as_pfec_does() -> None:
    rows = full.Full(Path("out"), Path("weights"), ["data.root=images"])
    for _, row in QUOTED:
        recipe = rows._recipe(row, 0)
        assert recipe.prune is None
        assert recipe.train.epochs == row.epochs
        if row.start == "trained":
            assert (row.epochs, recipe.train.lr) == (20 if row.imagenet else 40, 0.001)
        else:
            assert (row.epochs, recipe.train.lr) == (100 if row.imagenet else 200, 0.1)


def test_hours_count_what_a_method_trains_before_it_prunes() -> None:
    row = TABLE2.row("resnet101-rethinking-trained")
    epoch = 3 * paper.macs(paper.imagenet_resnet(101)) * 1_281_167 / full.SPEED / 3600
    assert full.hours(TABLE2, row) == pytest.approx((20 + quoted.EPOCHS) * epoch)
    row = TABLE2.row("resnet50-thinet-trained")
    epoch = 3 * paper.macs(paper.imagenet_resnet(50)) * 1_281_167 / full.SPEED / 3600
    assert full.hours(TABLE2, row) == pytest.approx(20 * epoch)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("table1", "resnet56-pfec-trained"),
        ("table1", "resnet56-cp-trained"),
        ("table1", "resnet110-nisp-trained"),
        ("table2", "resnet101-rethinking-trained"),
    ],
)
def test_what_a_method_leaves_is_fine_tuned(
    tmp_path: Path, tiny: str, table: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quoted, "EPOCHS", 1)
    rows, row = maker(tmp_path, tiny), TABLES[table].row(key)
    made = rows.make(TABLES[table], row, 0)
    assert made.ours["FLOPs"] == pytest.approx(100 * row.macs, abs=6)  # 16 filters a layer
    for own in TABLES[table].accuracies:
        assert made.ours[own.before] is not None  # type: ignore[index]
        assert made.ours[own.after] is not None
    plan = quoted.chosen(left(tmp_path))
    assert made.ours["FLOPs"] == pytest.approx(100 * plan.macs_removed)
    (folder,) = (path for path in (tmp_path / "out" / "runs").iterdir() if path.is_dir())
    small = load(folder / "small.safetensors", lambda: load_model(tiny))
    start = load(left(tmp_path), lambda: load_model(tiny))
    shapes = [[p.shape for p in net.parameters()] for net in (small, start)]
    assert shapes[0] == shapes[1]
    moved = zip(small.parameters(), start.parameters(), strict=True)
    assert not all(torch.equal(after, before) for after, before in moved)


def fresh_and_trained(tmp_path: Path, tiny: str, row: Row) -> tuple[nn.Module, nn.Module]:
    start = load(left(tmp_path), lambda: load_model(tiny))
    whole = load(tmp_path / f"cifar10_{row.network}.safetensors", lambda: load_model(tiny))
    return start, whole


def test_from_scratch_the_structure_is_trained_from_fresh_weights(
    tmp_path: Path, tiny: str
) -> None:
    rows, row = maker(tmp_path, tiny), TABLE1.row("resnet56-pfec-scratch")
    made = rows.make(TABLE1, row, 0)
    assert made.ours["FLOPs"] > 0  # type: ignore[operator]
    start, whole = fresh_and_trained(tmp_path, tiny, row)
    plan = quoted.chosen(left(tmp_path))
    (layer,) = {cut.tensor for cut in plan.cuts if cut.tensor.endswith("0.weight")}
    kept = dict(start.named_parameters())[layer]
    given = dict(whole.named_parameters())[layer]
    assert len(kept) < len(given)
    among = [any(torch.equal(own, other) for other in given) for own in kept]
    assert not any(among)


def test_a_choice_is_made_once(tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, row = maker(tmp_path, tiny), TABLE1.row("resnet56-pfec-trained")
    first = rows.make(TABLE1, row, 0)
    monkeypatch.setattr(quoted, "choose", None)
    assert rows.make(TABLE1, row, 0) == first


def test_mil_is_trained_with_its_cheap_layers(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, row = maker(tmp_path, tiny), TABLE1.row("resnet32-mil-scratch")
    seen = []
    count = quoted.skipped

    def watched(*given: object) -> float:
        seen.append(given[1])
        return count(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(quoted, "skipped", watched)
    made = rows.make(TABLE1, row, 0)
    (model,) = seen
    assert layers_of(model)  # type: ignore[arg-type]
    assert made.ours["FLOPs"] == pytest.approx(
        100 * count(row, model, rows._recipe(row, 0).data)  # type: ignore[arg-type]
    )
    assert made.ours["FLOPs left"] == pytest.approx(
        paper.macs(paper.cifar_resnet(32)) * (1 - made.ours["FLOPs"] / 100)  # type: ignore[operator]
    )
    again = rows.make(TABLE1, row, 0)
    assert again.ours == made.ours  # from the folder of the finished training


def test_two_processes_agree_on_a_choice(tmp_path: Path, tiny: str) -> None:
    trained(tiny, tmp_path / "cifar10_resnet56.safetensors")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
              "2", "-m", "fpgm", "reproduce"]  # fmt: skip
    asked = ["table1", "--scale", "full", "--rows", "resnet56-cp-trained", "--weights",
             str(tmp_path), "--out", str(tmp_path / "out")]  # fmt: skip
    done = subprocess.run(
        [*launch, *asked, *options(tiny)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "out/table1-full/resnet56-cp-trained.0.json").read_text())
    plan = quoted.chosen(left(tmp_path))
    assert told["ours"]["FLOPs"] == pytest.approx(100 * plan.macs_removed)
    assert told["how"].startswith("CP, cifar10-resnet56-pretrained")
