"""What many tests need: one torch thread a worker, a fixed seed, networks, weights, small data."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.runs import write_net
from tests.helpers.shell import run
from tests.helpers.simulated_backends import Ideal
from tests.helpers.skips import skip_summary
from tests.helpers.small_cifar10 import COUNT, Small

from fpgm.data import cifar10, cifar10_fetch
from fpgm.errors import RequestError
from fpgm.latency import backends, budget_search
from fpgm.latency.backends import BACKENDS
from fpgm.models.torchvision_import import import_torchvision
from fpgm.utils import machine_load
from fpgm.utils.timing import time_interleaved

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure() -> None:
    # Tests run in several processes; torch's own threads would only fight over the cores.
    torch.set_num_threads(1)
    with suppress(RequestError):  # the zoo extra is optional: tests that need it skip themselves
        import_torchvision()


SWEPT = pytest.StashKey[int]()
"""How many tests are marked `sweep` and were not selected."""


def pytest_deselected(items: list[pytest.Item]) -> None:
    swept = sum(item.get_closest_marker("sweep") is not None for item in items)
    config = items[0].config
    config.stash[SWEPT] = config.stash.get(SWEPT, 0) + swept
    if hasattr(config, "workeroutput"):  # one of several processes: it reports to the first
        config.workeroutput["swept"] = config.stash[SWEPT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Note what a worker of pytest-xdist left out: each of them collects all tests."""
    node.config.stash[SWEPT] = getattr(node, "workeroutput", {}).get("swept", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """End by saying what was left out, and the command that makes it run."""
    skipped = [report.longrepr[2] for report in terminalreporter.getreports("skipped")]
    reasons = [reason.removeprefix("Skipped: ") for reason in skipped]
    swept = config.stash.get(SWEPT, 0) if "not sweep" in config.option.markexpr else 0
    if lines := skip_summary(reasons, swept):
        terminalreporter.section("not run, and how to run it")
        terminalreporter.write_line("\n".join(lines))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run beside each other are not to call the machine busy."""
    monkeypatch.setattr(machine_load, "_busy_seconds", lambda: None)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Times of layers measured on a busy machine are not to be kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FPGM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _brief_timing() -> Iterator[None]:
    """Plans for a budget in time run models for moments: their figures are not looked at here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget_search, "SECONDS", 0.2)
        patch.setattr(backends, "LAYER_SECONDS", 0.002)
        yield


@pytest.fixture(scope="session")
def weights_dir() -> Path:
    """Folder with cifar10_resnet{20,32,56}.safetensors, or a skip that says how to get it."""
    folder = Path(os.environ.get("FPGM_WEIGHTS", ROOT.parent / "shared" / "weights"))
    if not (folder / "cifar10_resnet20.safetensors").is_file():
        pytest.skip(f"no trained weights in {folder}: set FPGM_WEIGHTS to their folder")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of pruning the digits network with fresh weights."""
    run("prune", "digits", "--rate", 0.4, "--out", tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A small network with batch norm and dropout, by the path of its file."""
    return write_net(tmp_path, "nn.BatchNorm2d(16), ", 0.2)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Small:
    """The stand-in, and neither network nor npm unless a test brings its own."""
    (tmp_path / "elsewhere").mkdir()
    data = Small(tmp_path / "elsewhere")
    digests = {name: hashlib.sha256(r.data).hexdigest() for name, r in data.records.items()}
    monkeypatch.setattr(cifar10, "PER_BATCH", COUNT)
    monkeypatch.setattr(cifar10, "SHA256", digests)
    monkeypatch.setattr(cifar10_fetch, "URL", "http://127.0.0.1:9/nothing")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("FPGM_DATA", str(tmp_path / "default"))
    return data


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, recovered and timed."""
    place = tmp_path_factory.mktemp("run") / "small"
    run(
        "prune", "resnet20", "--weights", "shipped", "--macs", 0.5, "--recover", "norms",
        "--data", "cifar10-sample", "--images", 64, "--test", 64, "--out", place,
    )  # fmt: skip
    run("bench", place, "--backend", "eager", "--seconds", 0.1, "--keep")
    return place


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FPGM_CACHE", str(tmp_path))
    return tmp_path / "latency"


@pytest.fixture
def ideal(monkeypatch: pytest.MonkeyPatch) -> Ideal:
    backend = Ideal()
    monkeypatch.setattr(
        budget_search, "time_interleaved", partial(time_interleaved, clock=lambda: backend.now)
    )
    monkeypatch.setitem(BACKENDS, "ideal", backend)
    return backend
