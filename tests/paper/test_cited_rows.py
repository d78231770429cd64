"""Rows that the paper quotes from other papers, run by this package's version of their method."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.helpers.faults import two_processes
from tests.helpers.shell import run
from tests.paper.test_full_scale import Killed, changes, options, trained
from torch import nn

import fpgm
from fpgm.data.registry import DataSpec
from fpgm.errors import ModelError
from fpgm.models.registry import load_model
from fpgm.paper import flops as paper
from fpgm.paper.baselines.mil import CollaborativeConv, collaborative_layers
from fpgm.paper.tables import TABLES, RowStore
from fpgm.paper.tables import cited_rows as quoted
from fpgm.paper.tables import full_scale as full
from fpgm.paper.tables.paper_tables import BASELINES
from fpgm.paper.tables.table_schema import TableRow
from fpgm.pruning.serialization import load
from fpgm.training.lr_schedule import learning_rate

TABLE1, TABLE2 = TABLES["table1"], TABLES["table2"]
QUOTED = [(table, row) for table in (TABLE1, TABLE2) for row in table.rows if row.cited]


def maker(tmp_path: Path, tiny: str) -> full.FullScale:
    trained(tiny, tmp_path / "cifar10_resnet56.safetensors")
    trained(tiny, tmp_path / "cifar10_resnet110.safetensors")
    for depth in (50, 101):
        trained(tiny, tmp_path / f"imagenet_resnet{depth}.safetensors")
    return full.FullScale(tmp_path / "out", tmp_path, changes(tiny))


def left(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "out" / "runs").glob("*.safetensors")
    return file


def test_they_are_the_rows_whose_method_is_not_the_authors() -> None:
    assert len(QUOTED) == 15
    assert {row.method for _, row in QUOTED} == {
        "pfec", "cp", "mil", "nisp", "thinet", "rethinking",
    }  # fmt: skip


def test_the_recipes_do_not_prune_and_fine_tune_as_pfec_does() -> None:
    rows = full.FullScale(Path("out"), Path("weights"), ["data.root=images"])
    for _, row in QUOTED:
        recipe = rows._recipe(row, 0)
        assert recipe.prune is None
        assert recipe.train.epochs == row.epochs
        if row.start == "trained":
            assert (row.epochs, recipe.train.lr) == (20 if row.imagenet else 40, 0.001)
            assert learning_rate(recipe.train, row.epochs - 1) == 0.001  # all along
        else:
            assert (row.epochs, recipe.train.lr) == (100 if row.imagenet else 200, 0.1)


def test_hours_count_what_a_method_trains_before_it_prunes() -> None:
    row = TABLE2.row("resnet101-rethinking-trained")
    epoch = 3 * paper.macs(paper.imagenet_resnet(101)) * 1_281_167 / full.MACS_PER_SECOND / 3600
    assert full.gpu_hours(TABLE2, row) == pytest.approx((20 + quoted.TRAIN_EPOCHS) * epoch)
    row = TABLE2.row("resnet50-thinet-trained")
    epoch = 3 * paper.macs(paper.imagenet_resnet(50)) * 1_281_167 / full.MACS_PER_SECOND / 3600
    assert full.gpu_hours(TABLE2, row) == pytest.approx(20 * epoch)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("table1", "resnet56-pfec-trained"),
        ("table1", "resnet56-cp-trained"),
        ("table1", "resnet110-nisp-trained"),
        ("table2", "resnet50-thinet-trained"),
        ("table2", "resnet101-rethinking-trained"),
    ],
)
def test_what_a_method_leaves_is_fine_tuned(
    tmp_path: Path, tiny: str, table: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quoted, "TRAIN_EPOCHS", 1)
    rows, row = maker(tmp_path, tiny), TABLES[table].row(key)
    result = rows.run(TABLES[table], row, 0)
    assert result.ours["FLOPs"] == pytest.approx(100 * row.macs, abs=6)  # 16 filters a layer
    for item in TABLES[table].accuracies:
        assert result.ours[item.before] is not None  # type: ignore[index]
        assert result.ours[item.after] is not None
    plan = quoted.read_pruning_plan(left(tmp_path))
    assert result.ours["FLOPs"] == pytest.approx(100 * plan.macs_removed)
    (folder,) = (path for path in (tmp_path / "out" / "runs").iterdir() if path.is_dir())
    small = load(folder / "small.safetensors", lambda: load_model(tiny))
    start = load(left(tmp_path), lambda: load_model(tiny))
    shapes = [[p.shape for p in net.parameters()] for net in (small, start)]
    assert shapes[0] == shapes[1]
    moved = zip(small.parameters(), start.parameters(), strict=True)
    assert not all(torch.equal(after, before) for after, before in moved)


def fresh_and_trained(tmp_path: Path, tiny: str, row: TableRow) -> tuple[nn.Module, nn.Module]:
    start = load(left(tmp_path), lambda: load_model(tiny))
    complete = load(tmp_path / f"cifar10_{row.network}.safetensors", lambda: load_model(tiny))
    return start, complete


def test_from_scratch_the_structure_is_trained_from_fresh_weights(
    tmp_path: Path, tiny: str
) -> None:
    rows, row = maker(tmp_path, tiny), TABLE1.row("resnet56-pfec-scratch")
    result = rows.run(TABLE1, row, 0)
    assert result.ours["FLOPs"] > 0  # type: ignore[operator]
    start, complete = fresh_and_trained(tmp_path, tiny, row)
    plan = quoted.read_pruning_plan(left(tmp_path))
    (layer,) = {cut.tensor for cut in plan.cuts if cut.tensor.endswith("0.weight")}
    kept = dict(start.named_parameters())[layer]
    given = dict(complete.named_parameters())[layer]
    assert len(kept) < len(given)
    among = [any(torch.equal(item, other) for other in given) for item in kept]
    assert not any(among)


def test_a_selection_is_computed_once(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, row = maker(tmp_path, tiny), TABLE1.row("resnet56-pfec-trained")
    first = rows.run(TABLE1, row, 0)
    monkeypatch.setattr(quoted, "prune_network", None)
    assert rows.run(TABLE1, row, 0) == first


def test_mil_is_trained_with_its_cheap_layers(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, row = maker(tmp_path, tiny), TABLE1.row("resnet32-mil-scratch")
    recorded = []
    count = quoted.mil_saving

    def watched(*given: object) -> tuple[float, str]:
        recorded.append(given[1])
        return count(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(quoted, "mil_saving", watched)
    result = rows.run(TABLE1, row, 0)
    (model,) = recorded
    assert collaborative_layers(model)  # type: ignore[arg-type]
    assert " 1 epochs; zero ratio of " in result.how
    zeros = result.ours["FLOPs"]
    assert zeros is not None
    # Before any training its layers are zero at about half of all places; the first layer has none.
    assert -20 < zeros < 100
    assert result.ours["FLOPs left"] == pytest.approx(
        paper.macs(paper.cifar_resnet(32)) * (1 - result.ours["FLOPs"] / 100)  # type: ignore[operator]
    )
    again = rows.run(TABLE1, row, 0)
    assert again.ours == result.ours  # from the folder of the finished training


def test_mil_begins_as_its_authors_do(tiny: str) -> None:
    """Norms of cheap layers as new ones are, and other weights for every seed."""
    row = TABLE1.row("resnet32-mil-scratch")

    def made(seed: int) -> list[CollaborativeConv]:
        return list(
            collaborative_layers(
                quoted.build_collaborative(row, lambda: load_model(tiny), seed)
            ).values()
        )

    first, second, same = made(0), made(1), made(0)
    assert first
    for item, other, again in zip(first, second, same, strict=True):
        assert item.norm.weight.tolist() == [1.0] * len(item.norm.weight)
        assert not item.norm.bias.any()
        assert not torch.equal(item.cheap.weight, other.cheap.weight)
        assert torch.equal(item.cheap.weight, again.cheap.weight)


def test_mil_begins_with_losses_that_can_be_trained() -> None:
    """A stream of products explodes if blocks are heard at once: losses of hundreds came of it."""
    row = TABLE1.row("resnet32-mil-scratch")
    model = quoted.build_collaborative(row, lambda: load_model(row.network), 0).train()
    torch.manual_seed(0)
    x, classes = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), classes)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert max(losses) < 4
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("key", ["resnet32-mil-scratch", "resnet18-mil-scratch"])
def test_what_mils_blocks_add_begins_at_zero(key: str) -> None:
    (row,) = (row for _, row in QUOTED if row.key == key)
    if row.imagenet:
        pytest.importorskip("torchvision")
    model = quoted.build_collaborative(row, lambda: load_model(row.network), 0)
    norms = {name: m for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    silent = {name for name, norm in norms.items() if not norm.weight.any()}
    assert silent == {name for name in norms if name.endswith(".bn2")}
    assert silent
    cheap = torch.cat(
        [layer.cheap.weight.flatten() for layer in collaborative_layers(model).values()]
    )
    assert cheap.std().item() == pytest.approx(2**0.5, rel=0.1)


def test_mil_begins_slowly() -> None:
    """As in its authors' code: nearly 3 % of the epochs come first with a tenth of the rate."""
    rows = full.FullScale(Path("out"), Path("weights"), ["data.root=images"])
    for _, row in QUOTED:
        if row.start != "scratch" or row.network == "resnet110":
            continue  # that one's recipe has a slow epoch for all methods
        part = rows._recipe(row, 0).train
        warm = (2 if row.imagenet else 5) if row.method == "mil" else 0
        slow = [epoch for epoch in range(9) if learning_rate(part, epoch) < 0.1]
        assert slow == list(range(warm))
        assert not warm or part.warmup_lr == pytest.approx(0.01)


def test_mil_leaves_its_slow_start_however_short_the_training() -> None:
    row = TABLE1.row("resnet32-mil-scratch")

    def rates(*given: str) -> list[float]:
        part = full.FullScale(Path("out"), Path("weights"), given)._recipe(row, 0).train
        return [round(learning_rate(part, epoch), 4) for epoch in range(part.epochs)]

    assert rates("train.epochs=1") == [0.1]
    assert rates("train.epochs=3", "train.lr=0.05") == [0.005, 0.05, 0.05]
    assert rates("train.epochs=2", "train.warmup=0") == [0.1, 0.1]


def test_mil_needs_a_suitable_layer() -> None:
    row = TABLE1.row("resnet32-mil-scratch")
    with pytest.raises(ModelError, match="no convolution that MIL"):
        quoted.build_collaborative(row, lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), 0)


def test_a_choice_is_known_by_what_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    row = TABLE1.row("resnet56-pfec-trained")
    result = {quoted.choice_digest(row), quoted.choice_digest(replace(row, macs=0.5))}
    monkeypatch.setattr(quoted, "CALIBRATION_IMAGES", 64)
    assert len({*result, quoted.choice_digest(row)}) == 3


def test_it_reads_few_images_at_once(tmp_path: Path, tiny: str) -> None:
    """Some methods keep all that layers give out, and one process does it alone."""
    model = trained(tiny, tmp_path / "any.safetensors")
    task = quoted._task(TABLE2.rows[-2], model, DataSpec("synthetic", 256), 0)
    assert len(next(iter(task.loader))[0]) == quoted.CALIBRATION_BATCH
    assert task.training is not None
    assert len(next(iter(task.training))[0]) == quoted.TRAIN_BATCH


def test_a_killed_row_continues_from_another_place(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same folder by another path, with settings of another machine: nothing is made again."""
    rows, row = maker(tmp_path, tiny), TABLE1.row("resnet56-pfec-trained")
    rows.changes = tuple(changes(tiny, 2))
    with pytest.raises(KeyboardInterrupt):
        rows.run(TABLE1, row, 0, Killed(kill=True))
    monkeypatch.chdir(tmp_path)
    again = full.FullScale(Path("out"), Path(), [*changes(tiny, 2), "run.accumulate=2"])
    monkeypatch.setattr(quoted, "prune_network", None)
    watch = Killed(kill=False)
    again.run(TABLE1, row, 0, watch)
    assert watch.began == 1


def test_weights_that_differ_between_machines_are_refused_and_left_as_they_are(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, row = maker(tmp_path, tiny), TABLE1.row("resnet56-pfec-trained")
    file = tmp_path / "cifar10_resnet56.safetensors"
    before = file.read_bytes()
    result = iter((file, "another digest"))
    monkeypatch.setattr(full, "run_on_first", lambda act: next(result))
    with pytest.raises(fpgm.RequestError, match="the same on every machine"):
        rows.run(TABLE1, row, 0)
    assert file.read_bytes() == before


def test_a_row_waits_for_a_baseline_that_another_process_makes(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = (
        *("reproduce", "table1", "--scale", "full", "--rows", "resnet56-pfec-scratch"),
        *("--out", tmp_path / "out", "--weights", tmp_path / "none", *options(tiny)),
    )

    @contextmanager
    def claimed(results: RowStore, row: TableRow, seed: int) -> Iterator[bool]:
        yield results.table is not BASELINES

    with monkeypatch.context() as patched:
        patched.setattr(RowStore, "claim", claimed)
        out, _ = run(*requested)
    assert "resnet56-pfec-scratch, seed 0, waits for its baseline, which another process" in out
    out, _ = run(*requested, "--json")
    (line,) = json.loads(out)["rows"]
    assert "missing" not in line


def test_two_processes_agree_on_a_choice(tmp_path: Path, tiny: str) -> None:
    trained(tiny, tmp_path / "cifar10_resnet56.safetensors")
    requested = ("reproduce", "table1", "--scale", "full", "--rows", "resnet56-cp-trained",
             "--weights", tmp_path, "--out", tmp_path / "out")  # fmt: skip
    for ended in two_processes(*requested, *options(tiny)):
        assert ended.code == 0, ended.err
    document = json.loads((tmp_path / "out/table1-full/resnet56-cp-trained.0.json").read_text())
    plan = quoted.read_pruning_plan(left(tmp_path))
    assert document["ours"]["FLOPs"] == pytest.approx(100 * plan.macs_removed)
    assert document["how"].startswith("CP, cifar10-resnet56-pretrained")


FAR = """
from pathlib import Path
from fpgm.utils.distributed import is_main_process
from fpgm.paper.tables import processes

place = Path.cwd() / f"disk{{processes.init_processes() and is_main_process()}}"
file = place / "weights"
if is_main_process():
    file.parent.mkdir()
    file.write_bytes(b"of the first")
elif {left!r} == "stale":
    file.parent.mkdir()
    file.write_bytes(b"of old")
processes.copy_to_all(file)
assert file.read_bytes() == b"of the first"
assert processes.run_on_first(lambda: 7) == 7
processes.destroy_processes()
print("same", flush=True)
"""


@pytest.mark.parametrize("left", ["nothing", "stale"])
def test_processes_with_disks_of_their_own_get_the_first_ones_file(
    tmp_path: Path, left: str
) -> None:
    code = FAR.format(left=left) + "raise SystemExit(0)"
    for ended in two_processes(cwd=tmp_path, before=code):
        assert (ended.code, ended.out) == (0, "same\n"), ended.err
