"""One damaged file: what becomes of it, and what Python was made to do on the way."""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from tests.helpers.forgeries import forged
from tests.helpers.mutations import mutated
from torch import nn

import fpgm
from fpgm.models import digits
from fpgm.pruning.plan import Latency

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
    results = _tried(folder, mutated(_saved(name), rng), build)
    if results is None:
        return "refused"
    complete = _whole(name)
    assert list(results.state_dict()) == list(complete), "half-loaded"
    same = (torch.equal(value, complete[key]) for key, value in results.state_dict().items())
    assert all(same), "other values"
    with torch.no_grad():
        results.eval()(x)
    return "loaded"


def forge(folder: Path, seed: int) -> Outcome:
    """Change a saved model on purpose, make its digest right and load it.

    A file that lies well is loaded: then it must be a model that can be printed and saved again,
    whose layers do what the original's do, and that is no larger.
    """
    rng = random.Random(seed)
    name = rng.choice(sorted(MODELS))
    build, x, _ = MODELS[name]
    results = _tried(folder, forged(_saved(name), rng), build)
    if results is None:
        return "refused"
    _check_layers(results, build())
    again = folder / "again.safetensors"
    with _bounded():
        for plan in getattr(results, "fpgm_plans", ()):
            assert all(line.isprintable() for line in str(plan).split("\n")), "escape codes"
        fpgm.save(results, again)
        same = fpgm.load(again, build).state_dict()
        with torch.no_grad(), suppress(RuntimeError, IndexError):  # adapters may not fit each other
            results.eval()(x)
    assert all(
        torch.equal(v, same[k]) for k, v in results.state_dict().items() if v.isfinite().all()
    )
    return "loaded"


def _tried(folder: Path, data: bytes, build: Callable[[], nn.Module]) -> nn.Module | None:
    """The model in a file, or None if it is refused as it should be."""
    file = folder / "bad.safetensors"
    file.write_bytes(data)
    with _bounded(), _watched() as calls:
        results = _loaded(file, build)
    others = [call for call in calls if str(file) not in call[1]]
    assert not others, f"it made Python {others[0]}"
    if isinstance(results, nn.Module):
        return results
    assert results.isprintable(), "its error has several lines or controls"
    assert len(results) <= 1000, "its error is a page"
    return None


def _check_layers(results: nn.Module, original: nn.Module) -> None:
    """Only sizes may differ from the original's, and none may be larger."""
    names = {name: tensor.shape for name, tensor in original.state_dict().items()}
    for name, tensor in results.state_dict().items():
        smaller = (a <= b for a, b in zip(tensor.shape, names[name], strict=True))
        assert all(smaller), f"a larger {name}"
    pairs = zip(_layers(results), _layers(original), strict=True)
    for item, wanted in pairs:
        for key in ("stride", "padding", "dilation", "kernel_size", "training", "eps", "momentum"):
            assert getattr(item, key, None) == getattr(wanted, key, None), f"another {key}"


def _layers(model: nn.Module) -> list[nn.Module]:
    kinds = (nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.ReLU)
    return [module for module in model.modules() if isinstance(module, kinds)]


MOST_BYTES = 768 * 2**20
"""Of memory beyond what the process has: the models are of some kilobytes, threads map arenas."""
MOST_SECONDS = 5.0
"""Of processor time."""


@contextmanager
def _bounded() -> Iterator[None]:
    """Let what happens inside have little memory and little time."""
    item = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    start = time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, item[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, item)
    taken = time.process_time() - start
    assert taken < MOST_SECONDS, f"it took {taken:.1f} s"


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
    _calls = results = []
    try:
        yield results
    finally:
        _calls = None
