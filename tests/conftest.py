"""What every test needs: one torch thread a worker, a fixed seed, torchvision, trained weights."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from fpgm.errors import RequestError
from fpgm.models._torchvision import import_torchvision

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure() -> None:
    # Tests run in several processes; torch's own threads would only fight over the cores.
    torch.set_num_threads(1)
    with suppress(RequestError):  # the zoo extra is optional: tests that need it skip themselves
        import_torchvision()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def weights_dir() -> Path:
    """Folder with cifar10_resnet{20,32,56}.safetensors, or a skip that says how to get it."""
    folder = Path(os.environ.get("FPGM_WEIGHTS", ROOT.parent / "shared" / "weights"))
    if not (folder / "cifar10_resnet20.safetensors").is_file():
        pytest.skip(f"no trained weights in {folder}: set FPGM_WEIGHTS to their folder")
    return folder
