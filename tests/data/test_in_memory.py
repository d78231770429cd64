"""Batches: right pixels, right labels, and the same whoever takes part and whenever they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from fpgm.data.base import ProcessShare
from fpgm.data.image_folder import IMAGENET, FolderBatches
from fpgm.data.in_memory import Augment, Images, MemoryBatches, Normalization, channel_statistics
from fpgm.data.registry import CIFAR10, DataSpec, open_splits
from fpgm.errors import FileError, RequestError

PLAIN = Normalization((0.0,), (1 / 255,))
"""Shows bytes as the numbers they are."""


def numbered(count: int = 10, size: int = 4) -> Images:
    """Images whose every pixel says which image and which place it is."""
    place = torch.arange(size * size).reshape(1, 1, size, size)
    number = torch.arange(count).reshape(-1, 1, 1, 1) * size * size
    return Images((1 + place + number).to(torch.uint8), torch.arange(count))


def test_without_a_seed_everything_comes_once_and_in_order() -> None:
    batches = MemoryBatches(numbered(), 4, PLAIN)
    got = list(batches.epoch(0))
    assert len(batches) == len(got) == 3
    assert [len(b.labels) for b in got] == [4, 4, 2]
    assert torch.cat([b.labels for b in got]).tolist() == list(range(10))
    torch.testing.assert_close(torch.cat([b.images for b in got]), numbered().images.float())


def test_every_epoch_has_its_own_reproducible_order() -> None:
    batches = MemoryBatches(numbered(), 4, PLAIN, seed=3)
    first, again, second = (
        torch.cat([b.labels for b in batches.epoch(n)]).tolist() for n in (0, 0, 1)
    )
    assert sorted(first) == list(range(10))
    assert first == again != second
    assert first != list(range(10))


def test_labels_stay_with_their_images() -> None:
    batches = MemoryBatches(numbered(), 4, PLAIN, augment=Augment(1, True), seed=3)
    for batch in batches.epoch(5):
        lit = batch.images.flatten(1).max(1).values
        assert ((lit - 1) // 16).long().tolist() == batch.labels.tolist()


@pytest.mark.parametrize("flip", [False, True])
def test_a_crop_is_a_window_of_the_padded_image(flip: bool) -> None:
    """Every augmented image is one of the (2·2 + 1)² windows, or its mirror image."""
    data = numbered()
    batches = MemoryBatches(data, 10, PLAIN, augment=Augment(2, flip), seed=0)
    recorded = set()
    for epoch in range(40):
        (batch,) = batches.epoch(epoch)
        for image, label in zip(batch.images, batch.labels, strict=True):
            window = _window(image, data.images[label], flip)
            assert window is not None
            recorded.add(window)
    assert len({(dy, dx) for dy, dx, _ in recorded}) == 25
    assert {mirrored for *_, mirrored in recorded} == ({False, True} if flip else {False})


def _window(image: Tensor, original: Tensor, flip: bool) -> tuple[int, int, bool] | None:
    padded = torch.nn.functional.pad(original.float(), (2, 2, 2, 2))
    for dy in range(5):
        for dx in range(5):
            window = padded[:, dy : dy + 4, dx : dx + 4]
            for mirrored in (False, True) if flip else (False,):
                if torch.allclose(image, window.flip(-1) if mirrored else window):
                    return dy, dx, mirrored
    return None


@pytest.mark.parametrize("world", [2, 3])
def test_processes_divide_a_batch_image_by_image(world: int) -> None:
    def all_of(share: ProcessShare) -> list[list[list[float]]]:
        batches = MemoryBatches(numbered(), 6, PLAIN, augment=Augment(1, True), seed=1, share=share)
        return [b.images.flatten(1).tolist() for b in batches.epoch(2)]

    alone = all_of(ProcessShare())
    fractions = [all_of(ProcessShare(rank, world)) for rank in range(world)]
    for number, complete in enumerate(alone):
        parts = [share[number] for share in fractions]
        together = [parts[i % world][i // world] for i in range(len(complete))]
        assert together == complete


def test_a_look_centres_and_scales() -> None:
    random = torch.randint(0, 256, (500, 3, 8, 8), dtype=torch.uint8)
    shown = channel_statistics(random).apply(random)
    torch.testing.assert_close(shown.mean((0, 2, 3)), torch.zeros(3), atol=1e-3, rtol=0)
    torch.testing.assert_close(shown.std((0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)


def test_the_papers_look_of_cifar10() -> None:
    assert CIFAR10.mean == pytest.approx((125.3 / 255, 123.0 / 255, 113.9 / 255), abs=1e-4)
    assert CIFAR10.std == pytest.approx((63.0 / 255, 62.1 / 255, 66.7 / 255), abs=1e-4)


# Sources.


def test_digits_are_1300_to_train_and_497_to_test() -> None:
    sets = open_splits(DataSpec("digits", 100), 0, ProcessShare(), "cpu")
    assert sets.shape == (1, 8, 8)
    counts = [sum(len(b.labels) for b in part.epoch(0)) for part in (sets.train, sets.test)]
    assert counts == [1300, 497]


def test_a_limit_keeps_the_first_images() -> None:
    sets = open_splits(DataSpec("synthetic", 16, limit=40), 0, ProcessShare(), "cpu")
    assert sum(b.total for b in sets.train.epoch(0)) == 40


def test_an_image_with_impossible_size(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    batches = FolderBatches(image_root / "val", 6, IMAGENET, size=16, workers=0)
    with pytest.raises(FileError, match=r"\.png is not a readable image: remove it\.$"):
        next(batches.epoch(0))


def test_an_unknown_data_set_is_named() -> None:
    with pytest.raises(RequestError) as caught:
        open_splits(DataSpec("cifar", 16), 0, ProcessShare(), "cpu")
    assert str(caught.value) == (
        "There is no data set 'cifar': give one of 'cifar10', 'cifar10-sample', 'digits', "
        "'synthetic', 'folder'."
    )


@pytest.fixture
def image_root(tmp_path: Path) -> Path:
    """A folder of six small images in two classes, each of one color."""
    for part in ("train", "val"):
        for number in range(6):
            folder = tmp_path / part / ("cats" if number % 2 else "dogs")
            folder.mkdir(parents=True, exist_ok=True)
            colour = (40 * number, 10, 200)
            Image.new("RGB", (40, 30), colour).save(folder / f"{number}.png")
    return tmp_path


def test_folders_of_images(image_root: Path) -> None:
    wanted = DataSpec(
        "folder", 4, str(image_root), size=16, workers=0, mean=(0.0,) * 3, std=(1.0,) * 3
    )
    sets = open_splits(wanted, 0, ProcessShare(), "cpu")
    assert sets.shape == (3, 16, 16)
    (first, second) = sets.test.epoch(0)
    assert first.images.shape == (4, 3, 16, 16)
    assert torch.cat([first.labels, second.labels]).tolist() == [0, 0, 0, 1, 1, 1]
    reds = torch.cat([first.images, second.images])[:, 0, 8, 8] * 255
    assert reds.round().tolist() == [40.0, 120.0, 200.0, 0.0, 80.0, 160.0]
    orders = [torch.cat([b.labels for b in sets.train.epoch(n)]).tolist() for n in (0, 0, 1, 2)]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) > 1


def test_shares_of_a_folder_are_disjoint_and_complete(image_root: Path) -> None:
    def reds(share: ProcessShare) -> list[float]:
        look = Normalization((0.0,) * 3, (1.0,) * 3)
        batches = FolderBatches(
            image_root / "train", 4, look, size=16, seed=0, share=share, workers=0
        )
        results = torch.cat([b.images[:, 0, 8, 8] for b in batches.epoch(1)]) * 255
        return [round(x) for x in results.tolist()]

    both = reds(ProcessShare(0, 2)) + reds(ProcessShare(1, 2))
    assert sorted(both) == [0, 40, 80, 120, 160, 200]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_process_without_images_gets_an_empty_batch(image_root: Path, workers: int) -> None:
    """Six images by five are five and one, which only the first of two processes sees."""
    look = Normalization((0.0,) * 3, (1.0,) * 3)
    options = {"size": 16, "share": ProcessShare(1, 2), "workers": workers}
    batches = FolderBatches(image_root / "val", 5, look, **options)  # type: ignore[arg-type]
    assert [(len(b.labels), b.total) for b in batches.epoch(0)] == [(2, 5), (0, 1)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_is_not_an_image_is_named(image_root: Path, workers: int) -> None:
    (image_root / "val/cats/1.png").write_bytes(b"none")
    sets = open_splits(
        DataSpec("folder", 4, str(image_root), size=16, workers=workers), 0, ProcessShare(), "cpu"
    )
    with pytest.raises(FileError) as caught:
        list(sets.test.epoch(0))
    assert str(caught.value) == (f"{image_root}/val/cats/1.png is not a readable image: remove it.")


def test_folders_must_hold_the_same_classes(image_root: Path) -> None:
    assert (
        open_splits(DataSpec("folder", 4, str(image_root)), 0, ProcessShare(), "cpu").classes == 2
    )
    (image_root / "train/bats").mkdir()
    Image.new("RGB", (40, 30)).save(image_root / "train/bats/0.png")
    with pytest.raises(FileError, match="have different classes: 'bats' is in one of them only"):
        open_splits(DataSpec("folder", 4, str(image_root)), 0, ProcessShare(), "cpu")


@pytest.mark.parametrize("given", [{"limit": 3}, {"flip": True}, {"crop": 1}])
def test_options_that_folders_do_not_have_are_refused(
    image_root: Path, given: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match="are for data sets in memory: leave them out"):
        open_splits(DataSpec("folder", 4, str(image_root), **given), 0, ProcessShare(), "cpu")


def test_folders_that_are_invalid(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        open_splits(DataSpec("folder", 4), 0, ProcessShare(), "cpu")
    assert str(caught.value) == (
        "Image folders need data.root: set it to the folder that contains 'train' and 'val'."
    )
    with pytest.raises(FileError) as missing:
        open_splits(DataSpec("folder", 4, str(tmp_path)), 0, ProcessShare(), "cpu")
    assert str(missing.value) == (
        f"There is no folder {tmp_path}/train: give a folder that contains train/CLASS/… and "
        "val/CLASS/…, or the name of a data set (cifar10, cifar10-sample, digits, synthetic)."
    )
    (tmp_path / "train").mkdir()
    with pytest.raises(RequestError, match=r"^.*/train is not a folder of images: "):
        open_splits(DataSpec("folder", 4, str(tmp_path)), 0, ProcessShare(), "cpu")


def test_alternate_flips_mirror_every_image_in_every_other_epoch() -> None:
    batches = MemoryBatches(numbered(), 10, PLAIN, augment=Augment(flip="alternate"), seed=0)
    recorded = []
    for epoch in range(3):
        (batch,) = batches.epoch(epoch)
        order = batch.labels.argsort()
        recorded.append(batch.images[order])
    mirrored = (recorded[0] != numbered().images).flatten(1).any(1)
    assert 0 < int(mirrored.sum()) < len(mirrored)
    torch.testing.assert_close(recorded[1], recorded[0].flip(-1))
    torch.testing.assert_close(recorded[2], recorded[0])


@pytest.mark.parametrize("side", [1, 2, 3])
def test_cutout_blanks_one_square_which_the_edge_may_cut(side: int) -> None:
    data = Images(torch.full((200, 3, 8, 8), 255, dtype=torch.uint8), torch.zeros(200))
    (batch,) = MemoryBatches(data, 200, PLAIN, augment=Augment(cutout=side), seed=0).epoch(0)
    blank = batch.images == 0
    assert bool((blank == blank[:, :1]).all())  # the same in all channels
    rows, columns = (blank[:, 0].any(dim).sum(1) for dim in (2, 1))
    assert bool((blank[:, 0].sum((1, 2)) == rows * columns).all())  # a rectangle
    assert int(rows.max()) == int(columns.max()) == side
    assert bool((rows >= (side + 1) // 2).all())
    assert len({tuple(image.nonzero()[0].tolist()) for image in blank[:, 0]}) > 20
