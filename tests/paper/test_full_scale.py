"""The paper's rows by their recipes: measured before and after, killed and gone on with, shared."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.faults import two_processes
from tests.helpers.shell import run
from torch import nn

import fpgm
from fpgm.data.registry import DataSpec
from fpgm.models import resnet
from fpgm.models.checkpoint import load_weights
from fpgm.models.registry import load_model
from fpgm.paper import flops as paper
from fpgm.paper.tables import TABLES, RowStore
from fpgm.paper.tables import full_scale as full
from fpgm.paper.tables.paper_tables import BASELINES, baseline_row
from fpgm.paper.tables.processes import top_k_accuracy
from fpgm.pruning.serialization import save

TABLE1, TABLE2, TABLE3, TABLE4 = (TABLES[f"table{number}"] for number in (1, 2, 3, 4))
ABLATIONS = TABLES["ablations"]
SYNTHETIC = DataSpec("synthetic", 64)


def changes(tiny: str, epochs: int = 1) -> list[str]:
    """What turns every recipe into seconds of training."""
    return [
        f"model.name={tiny}", "data.name=synthetic", "data.crop=0", "data.flip=false",
        f"train.epochs={epochs}", "train.schedule=cosine", "prune.ignore=[]", "train.lr=0.05",
    ]  # fmt: skip


def maker(tmp_path: Path, tiny: str, epochs: int = 1) -> full.FullScale:
    return full.FullScale(tmp_path / "out", tmp_path, changes(tiny, epochs))


def trained(tiny: str, file: Path) -> nn.Module:
    torch.manual_seed(3)
    model = load_model(tiny).eval()
    save(model, file)
    return model


class TestCommand:
    def test_every_row_has_a_command_and_hours(self) -> None:
        for table in TABLES.values():
            for row in table.rows:
                words = full.row_command(table, row, Path("out")).split()
                assert words[words.index("--rows") + 1] == row.key
                assert full.gpu_hours(table, row) > 0
        row = TABLE1.row("resnet56-fpgm-40-scratch")
        assert full.row_command(TABLE1, row, Path("out")) == (
            "accelerate launch -m fpgm reproduce table1 --scale full --rows "
            "resnet56-fpgm-40-scratch --out out"
        )
        row = TABLE2.row("resnet18-fpgm-30-trained")
        assert full.row_command(TABLE2, row, Path("out")) == (
            "accelerate launch -m fpgm reproduce table2 --scale full --rows "
            "resnet18-fpgm-30-trained --weights WEIGHTS --data IMAGENET --out out"
        )

    def test_hours_match_the_documentation(self) -> None:
        row = TABLE2.row("resnet50-fpgm-30-scratch")
        macs = paper.macs(paper.imagenet_resnet(50))
        seconds = 3 * macs * 1_281_167 * 100 / full.MACS_PER_SECOND
        assert full.gpu_hours(TABLE2, row) == pytest.approx(seconds / 3600)
        # 200 epochs of at least 8 s; Table 3 has 40 epochs and then 160.
        row = TABLE1.row("resnet20-fpgm-40-scratch")
        assert full.gpu_hours(TABLE1, row) == pytest.approx(200 * 8 / 3600)
        short = full.gpu_hours(TABLE4, TABLE4.row("fpgm"))
        assert short is not None
        assert full.gpu_hours(TABLE3, TABLE3.row("fpgm")) == pytest.approx(short * 200 / 160)


class TestTops:
    def test_counted_by_hand(self) -> None:
        """A net that ranks classes 3, 2, 1, 0, … for every image."""

        class Fixed(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                scores = torch.tensor([6.0, 7, 8, 9, 5, 4, 3, 2, 1, 0])
                return scores.expand(len(x), 10)

        from fpgm.data.base import SINGLE_PROCESS
        from fpgm.data.registry import open_splits

        batches = open_splits(SYNTHETIC, 0, SINGLE_PROCESS, "cpu").test.epoch(0)
        labels = torch.cat([batch.labels for batch in batches])
        right = [float((labels == 3).double().mean()), float((labels < 5).double().mean())]
        assert top_k_accuracy(Fixed(), SYNTHETIC, (1, 5)) == pytest.approx(
            [100 * item for item in right]
        )
        assert top_k_accuracy(Fixed(), SYNTHETIC, (20,)) == [100.0]


class TestRows:
    def test_a_row_from_scratch_and_what_it_is_compared_with(
        self, tmp_path: Path, tiny: str
    ) -> None:
        rows = maker(tmp_path, tiny)
        result = rows.run(TABLE4, TABLE4.row("fpgm"), 0)
        assert result is not None
        assert set(result.ours) == {"accuracy", "FLOPs"}
        assert 0 < result.ours["FLOPs"] < 60  # type: ignore[operator]
        assert result.how == "cifar10-vgg16-scratch, 1 epochs"
        complete = rows.run(BASELINES, baseline_row("vgg16"), 0)
        assert complete is not None
        assert set(complete.ours) == {"top-1"}
        assert len(list((tmp_path / "out" / "runs").iterdir())) == 2

    def test_a_row_from_trained_weights_measures_them(self, tmp_path: Path, tiny: str) -> None:
        model = trained(tiny, tmp_path / "cifar10_resnet56.safetensors")
        result = maker(tmp_path, tiny).run(TABLE1, TABLE1.row("resnet56-fpgm-40-trained"), 0)
        assert result is not None
        assert set(result.ours) == {"baseline", "accuracy", "FLOPs left", "FLOPs"}
        assert result.ours["baseline"] == top_k_accuracy(model, SYNTHETIC)[0]
        plan = json.loads(next((tmp_path / "out").glob("runs/*/plan.json")).read_text())
        assert result.ours["FLOPs left"] == plan["macs_after"]

    def test_imagenet_counts_the_first_five_too(self, tmp_path: Path, tiny: str) -> None:
        pytest.importorskip("torchvision")
        trained(tiny, tmp_path / "imagenet_resnet18.safetensors")
        result = maker(tmp_path, tiny).run(TABLE2, TABLE2.row("resnet18-fpgm-30-trained"), 0)
        assert result is not None
        ours: dict[str, Any] = dict(result.ours)
        assert set(ours) == {"top-1", "pruned top-1", "top-5", "pruned top-5", "FLOPs"}
        assert ours["top-1"] < ours["top-5"]
        assert ours["pruned top-1"] < ours["pruned top-5"]

    def test_a_trained_network_pruned_at_once_and_tuned_twice(
        self, tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(full, "pfec_rates", lambda: {"0": 0.5})
        monkeypatch.setattr(full, "default_shape", lambda name: (1, 3, 16, 16))
        model = trained(tiny, tmp_path / "cifar10_vgg16.safetensors")
        rows = full.FullScale(
            tmp_path / "out", tmp_path,
            [*changes(tiny, 8), "train.schedule=step", "train.milestones=[4, 6]"],
        )  # fmt: skip
        result = rows.run(TABLE3, TABLE3.row("pfec"), 0)
        assert result is not None
        assert set(result.ours) == set(TABLE3.keys)
        plan = fpgm.plan(
            model, torch.zeros(1, 3, 16, 16), rates={"0": 0.5}, criterion="l1", rounding="paper"
        )
        small = fpgm.compact(model, plan)
        assert result.ours["baseline"] == top_k_accuracy(model, SYNTHETIC)[0]
        assert result.ours["without fine-tuning"] == top_k_accuracy(small, SYNTHETIC)[0]
        assert result.how == "cifar10-vgg16-pretrained, 2 epochs from 0.001 and 8 from 0.05"
        recipes = [
            json.loads(file.read_text())["train"]
            for file in (tmp_path / "out" / "runs").glob("*/recipe.json")
        ]
        assert sorted((item["epochs"], tuple(item["milestones"])) for item in recipes) == [
            (2, (1, 1)), (8, (4, 6)),
        ]  # fmt: skip

    def test_rows_with_the_same_training_share_it(self, tmp_path: Path) -> None:
        rows = full.FullScale(tmp_path, tmp_path, [])

        def folders(*pairs: tuple[str, str]) -> set[Path]:
            result = [TABLES[table].row(key) for table, key in pairs]
            return {rows._folder(row, rows._recipe(row, 0)) for row in result}

        same = ("interval-1", "rate-40", "distance-l2", "from-scratch", "mode-hard")
        usual = folders(("table1", "resnet110-fpgm-40-scratch"), *(("ablations", k) for k in same))
        assert len(usual) == 1
        assert len(folders(("ablations", "rate-30"), ("ablations", "rate-50"))) == 2
        complete = folders(("ablations", "rate-0"), ("baselines", "resnet110"))
        assert len(complete) == 1
        assert complete != usual

    def test_trained_weights_are_given_or_trained_here(self, tmp_path: Path, tiny: str) -> None:
        row = TABLE1.row("resnet56-fpgm-40-trained")
        rows = maker(tmp_path, tiny)
        with pytest.raises(fpgm.RequestError, match=r"has no cifar10_resnet56\.safetensors: give"):
            rows.run(TABLE1, row, 0)
        assert rows.settings(row, 0)["weights"] is None
        rows.run(BASELINES, BASELINES.row("resnet56"), 0)
        start = rows.start_weights(row, 0)
        assert start is not None
        assert start.name == "weights.safetensors"
        assert rows.start_weights(row, 1) is None  # of another seed
        result = rows.run(TABLE1, row, 0)
        assert result is not None
        complete = load_weights(load_model(tiny), start)
        assert result.ours["baseline"] == top_k_accuracy(complete, SYNTHETIC)[0]
        trained(tiny, tmp_path / "cifar10_resnet56.safetensors")  # what is given goes first
        assert rows.start_weights(row, 0) == tmp_path / "cifar10_resnet56.safetensors"

    def test_other_weights_under_the_same_name_are_another_training(
        self, tmp_path: Path, tiny: str
    ) -> None:
        row, rows = TABLE1.row("resnet56-fpgm-40-trained"), maker(tmp_path, tiny)
        file = tmp_path / "cifar10_resnet56.safetensors"
        trained(tiny, file)
        rows.run(TABLE1, row, 0)
        other = load_model(tiny)
        save(other, file)
        result = rows.run(TABLE1, row, 0)
        assert result is not None
        assert len(list((tmp_path / "out" / "runs").iterdir())) == 2
        fresh = full.FullScale(tmp_path / "fresh", tmp_path, rows.changes).run(TABLE1, row, 0)
        assert fresh is not None
        assert result.ours == fresh.ours

    def test_a_baseline_of_another_machine_is_detected(self, tmp_path: Path) -> None:
        here, there = (
            full.FullScale(tmp_path, tmp_path, [f"data.root={root}", "data.workers=2"])
            for root in ("/a", "/b")
        )
        base = BASELINES.row("resnet56")
        recipes = [item._recipe(base, 0) for item in (here, there)]
        assert recipes[0] != recipes[1]
        assert here._folder(base, recipes[0]) == there._folder(base, recipes[1])

    def test_settings_leave_out_what_is_a_machines_own(self, tmp_path: Path) -> None:
        rows = full.FullScale(
            tmp_path, tmp_path, ["data.root=/a", "run.compile=true", "train.lr=0.2"]
        )
        assert rows.settings(TABLE2.rows[1], 0) == {"--set": ["train.lr=0.2"], "weights": None}


class Killed:
    """Stops a training behind its first epoch, and remembers where one began."""

    def __init__(self, kill: bool) -> None:
        self.kill, self.began = kill, -1

    def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
        self.began = epoch

    def on_step(self, epoch: int, step: int, figures: dict[str, float]) -> None:
        pass

    def on_epoch_end(self, metrics: dict[str, Any]) -> None:
        if self.kill:
            raise KeyboardInterrupt


def test_a_row_that_was_stopped_continues(tmp_path: Path, tiny: str) -> None:
    """And counts the seconds of all epochs, not only of the last ones."""
    row = TABLE4.row("fpgm")
    rows = maker(tmp_path, tiny, epochs=3)
    with pytest.raises(KeyboardInterrupt):
        rows.run(TABLE4, row, 0, Killed(True))
    second = Killed(False)
    result = rows.run(TABLE4, row, 0, second)
    assert second.began == 1
    alone = full.FullScale(tmp_path / "alone", tmp_path, rows.changes).run(TABLE4, row, 0)
    assert result is not None
    assert alone is not None
    assert result.ours == alone.ours
    (metrics,) = (tmp_path / "out" / "runs").glob("*/metrics.jsonl")
    document = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [item["epoch"] for item in document] == [1, 2, 3]
    seconds = sum(item["seconds"] + item["pruning_seconds"] for item in document)
    assert result.seconds == pytest.approx(seconds, abs=0.06)
    third = Killed(True)
    assert rows.run(TABLE4, row, 0, third) == result  # it is done: nothing is trained
    assert third.began == -1


def options(tiny: str) -> list[str]:
    return [word for item in changes(tiny) for word in ("--set", item)]


def test_the_command_makes_a_row_and_its_baseline(tmp_path: Path, tiny: str) -> None:
    requested = ("reproduce", "table4", "--scale", "full", "--rows", "fpgm", "--out", tmp_path,
             *options(tiny))  # fmt: skip
    out, _ = run(*requested, "--json")
    (line,) = json.loads(out)["rows"]
    assert "missing" not in line
    assert (tmp_path / "baselines-full" / "vgg16.0.json").is_file()
    before = (tmp_path / "table4-full" / "fpgm.0.json").stat().st_mtime_ns
    run(*requested)
    assert (tmp_path / "table4-full" / "fpgm.0.json").stat().st_mtime_ns == before


def test_two_processes_make_one_row(tmp_path: Path, tiny: str) -> None:
    requested = ("reproduce", "baselines", "--scale", "full", "--rows", "vgg16", "--out", tmp_path)
    first, second = two_processes(*requested, *options(tiny), "--json")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert len(json.loads(first.out + second.out)["files"]) == 3  # one of them speaks
    document = json.loads((tmp_path / "baselines-full" / "vgg16.0.json").read_text())
    (results,) = (tmp_path / "runs").glob("*/results.json")
    assert document["ours"]["top-1"] == pytest.approx(
        100 * json.loads(results.read_text())["accuracy"]
    )


class TestFigures:
    def test_the_papers_networks_from_given_weights(self, tmp_path: Path) -> None:
        pytest.importorskip("altair")
        save(resnet(110), tmp_path / "cifar10_resnet110.safetensors")
        out, _ = run("reproduce", "fig3", "--scale", "full", "--weights", tmp_path, "--out",
                     tmp_path / "out")  # fmt: skip
        assert "fig3-resnet110-first.svg, fig3-resnet110-first-log.svg" in out
        assert (
            f"ImageNet is missing: there are no trained weights {tmp_path}/imagenet_resnet18" in out
        )

    @pytest.mark.filterwarnings("ignore:This DataLoader will create")
    def test_maps_of_a_resnet50(self, tmp_path: Path) -> None:
        pytest.importorskip("altair")
        models = pytest.importorskip("torchvision.models")
        from PIL import Image

        file = tmp_path / "any.pth"  # one network needs no folder
        torch.save(models.resnet50(weights=None).state_dict(), file)
        for part in ("train", "val"):
            (tmp_path / "images" / part / "panda").mkdir(parents=True)
            Image.new("RGB", (64, 64), (9, 99, 199)).save(
                tmp_path / "images" / part / "panda" / "1.png"
            )
        requested = ("reproduce", "fig5", "--scale", "full", "--weights", file, "--out", tmp_path)
        out, _ = run(*requested, "--data", tmp_path / "images", "--json")
        files = [Path(item) for item in json.loads(out)["files"]]
        assert [item.name for item in files] == [
            "fig5-resnet50.svg", "fig5-resnet50-replaced.svg",
        ]  # fmt: skip
        # The first block's first layer has 64 maps, of which a tenth goes, as in the paper.
        text = files[0].read_text()
        assert text.count("<image") == 64
        assert "layer1.0.conv1 at 10%" in text


def test_a_row_that_fails_ends_many_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that went on to the next row would leave the others waiting for it for ever."""
    command_line = importlib.import_module("fpgm.cli.reproduce")
    for place in (command_line.processes, full):
        monkeypatch.setattr(place, "run_on_first", lambda act: act())
    row, out = TABLE1.row("resnet56-fpgm-40-trained"), tmp_path / "out"
    requested = SimpleNamespace(out=out, weights=tmp_path, recipes=list)
    maker = command_line._FullRows(requested, [row])
    results = RowStore(out, TABLE1, "full", maker.settings)
    notes, failed = command_line._fill(results, [row], 1, maker, "fpgm")
    assert failed
    assert "has no cifar10_resnet56" in notes[0]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(fpgm.RequestError, match="has no cifar10_resnet56"):
        command_line._fill(results, [row], 1, maker, "fpgm")


HOLD = """
import sys
from pathlib import Path
from fpgm.utils.file_lock import LOCK_NAME, ProcessLock
lock = ProcessLock(Path(sys.argv[1]) / LOCK_NAME)
assert lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_training_that_another_row_shares_is_left_to_its_process(
    tmp_path: Path, tiny: str
) -> None:
    """Rows are claimed one by one, and a run of Algorithm 1 is behind several of them."""
    rows = maker(tmp_path, tiny)
    first, second = (ABLATIONS.row(key) for key in ("interval-1", "distance-l2"))
    folders = {rows._folder(row, rows._recipe(row, 0)) for row in (first, second)}
    (folder,) = folders
    folder.mkdir(parents=True)
    changed = [word for item in changes(tiny) for word in ("--set", item)]
    requested = ("reproduce", "ablations", "--scale", "full", "--rows", "distance-l*",
             "--weights", tmp_path, "--out", tmp_path / "out", *changed, "--json")  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        document = json.loads(run(*requested)[0])
        (note,) = document["notes"]
        assert note.startswith("distance-l2, seed 0, waits for its training in another process: ")
        assert ["missing" in line for line in document["rows"]] == [True, False]  # l2, l1
        other.communicate("")
    document = json.loads(run(*requested)[0])
    assert not document["notes"]
    assert not any("missing" in line for line in document["rows"])
