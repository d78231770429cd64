"""One damaged file: what becomes of it, and what Python was made to do on the way."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from tests.mutations import forged, mutated
from torch import nn

import fpgm
from fpgm.models import digits
from fpgm.plan import Latency

Outcome = Literal["refused", "loaded"]

FORBIDDEN = ("exec", "compile", "os.system", "subprocess.Popen", "pickle.find_class", "ctypes",
             "socket", "open")  # fmt: skip
"""What a file must not make Python do: run code, open other files."""

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
GREY = X[:, :1]


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)
    ).eval()


def tied() -> nn.Module:
    first, last = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
    last.weight = first.weight
    middle = (nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 1))
    return nn.Sequential(first, *middle, last).eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, str]] = {
    "plain": (plain, X, "coupled"),
    "tied": (tied, X, "coupled"),
    "residual": (digits, GREY, "independent"),
}


@cache
def _saved(name: str) -> bytes:
    import tempfile

    torch.manual_seed(0)
    build, x, residual = MODELS[name]
    model = build()
    plan = fpgm.plan(model, x, rate=0.5, align=1, residual=residual)  # type: ignore[arg-type]
    plan = replace(plan, latency=Latency("eager", 1, 0.5, 0.5, 0.5, 2e-3, 1e-3))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "small.safetensors"
        fpgm.save(fpgm.compact(model, plan), file)
        fpgm.load(file, build).eval()(x)  # whatever is imported on the way is by now
        return file.read_bytes()


def damage(folder: Path, seed: int) -> Outcome:
    """Damage a saved model and load it; whatever should not happen is an AssertionError."""
    rng = random.Random(seed)
    name = rng.choice(sorted(MODELS))
    build, x, _ = MODELS[name]
    file = folder / "bad.safetensors"
    forgery = rng.random() < 0.3
    file.write_bytes((forged if forgery else mutated)(_saved(name), rng))
    with _watched() as calls:
        found = _loaded(file, build)
    others = [call for call in calls if str(file) not in call[1]]
    assert not others, f"it made Python {others[0]}"
    if isinstance(found, str):
        assert "\n" not in found, "its error has several lines"
        assert len(found) < 1000, "its error is a page"
        return "refused"
    if forgery:  # of a file that lies about itself only this can be asked: it did no harm
        return "loaded"
    whole = _whole(name)
    assert list(found.state_dict()) == list(whole), "half-loaded"
    same = (torch.equal(value, whole[key]) for key, value in found.state_dict().items())
    assert all(same), "other values"
    with torch.no_grad():
        found.eval()(x)
    return "loaded"


@cache
def _whole(name: str) -> dict[str, torch.Tensor]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "small.safetensors"
        file.write_bytes(_saved(name))
        return fpgm.load(file, MODELS[name][0]).state_dict()


def _loaded(file: Path, build: Callable[[], nn.Module]) -> nn.Module | str:
    """The model, or what was said against the file."""
    try:
        return fpgm.load(file, build)
    except fpgm.FpgmError as error:
        return str(error)


_calls: list[tuple[str, str]] | None = None


def _hear(event: str, args: tuple[object, ...]) -> None:
    if _calls is not None and event.startswith(FORBIDDEN):
        _calls.append((event, str(args)))


sys.addaudithook(_hear)


@contextmanager
def _watched() -> Iterator[list[tuple[str, str]]]:
    global _calls
    _calls = found = []
    try:
        yield found
    finally:
        _calls = None
