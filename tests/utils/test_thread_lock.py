"""Several threads at once get what one gets after the other, and leave all as it was."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.models import digits, resnet
from fpgm.utils.modules import tensors_sha256

THREADS = 4
GREY = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
COLOUR = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


class Noisy(nn.Module):
    """Draws random numbers, warns, counts its calls, and behaves otherwise in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        self.attend = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.second = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Dropout(0.5), nn.Conv2d(16, 4, 1))
        self.extra = nn.Conv2d(16, 4, 1)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        warnings.warn("watch out", stacklevel=2)
        y = self.first(x + 0.1 * torch.randn(1))
        y = y + self.attend(y.flatten(2).transpose(1, 2)).transpose(1, 2).view_as(y)
        out: Tensor = self.second(y)
        return out + self.extra(y).mean() if self.training else out


def net(kind: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(kind)
    return [
        lambda: (digits().eval(), GREY),
        lambda: (resnet(20).eval(), COLOUR),
        lambda: (Noisy(), GREY),
        lambda: (digits(width=16), GREY),
    ][kind % 4]()


@pytest.fixture(autouse=True)
def _crowded() -> Iterator[None]:
    """Threads change as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(THREADS)))


def shared() -> dict[str, Any]:
    """What belongs to all threads of a process."""
    return {
        "threads": torch.get_num_threads(),
        "random": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "grad": torch.is_grad_enabled(),
        "attention": torch.backends.mha.get_fastpath_enabled(),
        "warnings": list(warnings.filters),
        "type": torch.get_default_dtype(),
    }


def state(model: nn.Module) -> tuple[Any, ...]:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return tensors_sha256(model), [m.training for m in model.modules()], hooks


def plain(plan: fpgm.Plan) -> str:
    return plan.to_json()


WORK: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "plan": lambda net, x: plain(fpgm.plan(net, x, rate=0.4, align=1)),
    "independent": lambda net, x: plain(
        fpgm.plan(net, x, rate=0.4, align=1, residual="independent")
    ),
    "compact": lambda net, x: state(fpgm.compact(net, fpgm.plan(net, x, rate=0.4, align=1))),
    "prune": lambda net, x: state(fpgm.prune(net, x, macs=0.4)),
    "analyze": lambda net, x: str(fpgm.analyze(net, x)),
    "verify": lambda net, x: fpgm.verify(net, fpgm.plan(net, x, rate=0.4, align=1), x),
    "recover": lambda net, x: state(
        fpgm.recover(net, fpgm.plan(net, x, rate=0.4, align=1), [x, x.flip(0)])
    ),
}


@pytest.mark.filterwarnings("ignore:watch out")
@pytest.mark.parametrize("name", WORK)
def test_different_models_at_once(name: str) -> None:
    nets = [net(kind) for kind in range(THREADS)]
    before = [state(model) for model, _ in nets]
    wanted = [WORK[name](*item) for item in nets]
    about = shared()
    assert at_once(lambda kind: WORK[name](*nets[kind])) == wanted
    assert [state(model) for model, _ in nets] == before
    assert shared() == about


@pytest.mark.filterwarnings("ignore:watch out")
@pytest.mark.parametrize("name", WORK)
def test_the_same_model_at_once(name: str) -> None:
    model, x = net(2)
    before = state(model)
    wanted = WORK[name](model, x)
    about = shared()
    assert at_once(lambda _: WORK[name](model, x)) == [wanted] * THREADS
    assert state(model) == before
    assert shared() == about


def test_files_at_once(tmp_path: Path) -> None:
    files = [tmp_path / f"{kind}.safetensors" for kind in range(THREADS)]
    makers: list[Callable[[], nn.Module]] = [digits, lambda: resnet(20), digits, lambda: resnet(20)]

    def through(kind: int) -> Any:
        torch.manual_seed(0)
        small = fpgm.prune(makers[kind](), COLOUR if kind % 2 else GREY, rate=0.4)
        fpgm.save(small, files[kind])
        return state(small) == state(fpgm.load(files[kind], makers[kind]))

    assert at_once(through) == [True] * THREADS


def test_one_file_at_once(tmp_path: Path) -> None:
    """The last one wins, and whatever is read meanwhile is one of them."""
    file = tmp_path / "small.safetensors"
    smalls = [fpgm.prune(digits(), GREY, rate=rate) for rate in (0.2, 0.3, 0.4, 0.5)]
    digests = {tensors_sha256(small) for small in smalls}
    fpgm.save(smalls[0], file)

    def through(kind: int) -> bool:
        for _ in range(5):
            fpgm.save(smalls[kind], file)
            if tensors_sha256(fpgm.load(file, digits)) not in digests:
                return False
        return True

    assert all(at_once(through))
    assert list(tmp_path.iterdir()) == [file]
