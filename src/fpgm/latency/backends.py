"""Runtimes a model can be timed in, each behind the same two questions.

How is a model brought to run there, and how long does one layer take there by itself? What a
machine lacks is told as a reason, never as an empty column.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fpgm.errors import FpgmError, ModelError, RequestError
from fpgm.exporters.bn_folding import simplified
from fpgm.exporters.onnx import input_arrays, layer_to_onnx, session_of, to_onnx, uninstalled
from fpgm.latency.memory import process_bytes, torch_bytes
from fpgm.tracing.layer_calls import Layer
from fpgm.utils.copying import copy_model
from fpgm.utils.example_inputs import Example
from fpgm.utils.text import reason
from fpgm.utils.timing import side_by_side

LAYER_SECONDS = 0.02
"""Time given to one layer of one size."""
_LAYER_RUNS = 12
"""Runs of a layer under a runtime's own profiler."""
_MOVES = ("Reorder", "ReorderInput", "ReorderOutput", "Parameter", "Result", "Constant", "Input",
          "Output", "Const")  # fmt: skip
"""What runtimes do around a layer that is alone: within a model its neighbours spare them that."""


Feed = Mapping[str, Any]
"""Arrays by the names of a model's inputs."""


class Backend(Protocol):
    """A runtime."""

    name: str

    def missing(self) -> str | None:
        """Why it cannot be used here, or None."""

    def version(self) -> str:
        """What its times depend on, besides the machine."""

    def load(self, model: nn.Module, example: Example, threads: int) -> Loaded:
        """Make a model ready to run on an example."""

    def layer_seconds(self, layer: Layer, threads: int) -> float:
        """How long one layer takes."""


@dataclass(frozen=True)
class Loaded:
    """A model ready to run."""

    run: Callable[[], Any]
    size: int | None = None
    """Bytes of the file the runtime reads, if it reads one."""
    pieces: Callable[[], list[Piece]] | None = None
    """Where the runtime itself says the time goes, if it tells."""
    memory: Callable[[], int | None] = lambda: None
    """Bytes it needs to run, weights included, where that can be told."""


@dataclass(frozen=True)
class Piece:
    """A node of a runtime's own graph and its seconds in one run."""

    name: str
    kind: str
    seconds: float


class Torch:
    """PyTorch itself: as it is, in channels-last order, compiled, or on a CUDA device."""

    def __init__(
        self, name: str, *, last: bool = False, compiled: bool = False, cuda: bool = False
    ):
        self.name, self.last, self.compiled, self.cuda = name, last, compiled, cuda

    def missing(self) -> str | None:
        if self.cuda and not torch.cuda.is_available():
            return "no CUDA device"
        if self.compiled and not self.cuda and not _compiler():
            return "torch.compile needs a C++ compiler (g++ or clang++)"
        return None

    def version(self) -> str:
        device = torch.cuda.get_device_name() if self.cuda else _processor()
        return f"torch {torch.__version__} {device}"

    def load(self, model: nn.Module, example: Example, threads: int) -> Loaded:
        args, kwargs = self._placed((example.args, dict(example.kwargs)))
        net = self._brought(model)
        waits = any(p.is_cuda for p in net.parameters())
        call = _compiled(net) if self.compiled else net

        def run() -> None:
            with torch.no_grad(), torch_threads(threads):
                call(*args, **kwargs)
                if waits:
                    torch.cuda.synchronize()

        return Loaded(run, memory=lambda: torch_bytes(net, run))

    def layer_seconds(self, layer: Layer, threads: int) -> float:
        run = self.load(layer.module(), Example((layer.input(),), {}), threads).run
        return side_by_side([run], LAYER_SECONDS)[0].median

    def _brought(self, model: nn.Module) -> nn.Module:
        """A copy on the device and in the order it is timed in; as it is, the model itself."""
        if not self.last and not self.cuda:
            return model
        net = copy_model(model)
        net = net.cuda() if self.cuda else net
        if self.last:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return net

    def _placed(self, values: Any) -> Any:
        def place(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = value.cuda() if self.cuda else value.clone()
            image = self.last and value.ndim == 4
            return value.contiguous(memory_format=torch.channels_last) if image else value

        return tree_map(place, values)


class _ReadsOnnx:
    """A runtime that reads ONNX and tells the time of every node."""

    def __init__(self, name: str) -> None:
        self.name = name

    def missing(self) -> str | None:
        extra = "export" if self.name == "onnxruntime" else self.name
        return uninstalled(extra, "onnx", "onnxscript", self.name)

    def version(self) -> str:
        return f"{self.name} {metadata.version(self.name)} {_processor()}"

    def load(self, model: nn.Module, example: Example, threads: int) -> Loaded:
        data = to_onnx(simplified(model, example), example)
        feed = input_arrays(data, example)
        run = self.start(data, threads)
        return Loaded(
            lambda: run(feed),
            len(data),
            lambda: self._pieces(data, feed, threads),
            lambda: process_bytes(self.name, data, feed, threads),
        )

    def layer_seconds(self, layer: Layer, threads: int) -> float:
        pieces = self._pieces(layer_to_onnx(layer), {"x": layer.input().numpy()}, threads)
        return sum(piece.seconds for piece in pieces if piece.kind not in _MOVES)

    def _pieces(self, data: bytes, feed: Feed, threads: int) -> list[Piece]:
        found: dict[tuple[str, str], list[float]] = {}
        for piece in self.profile(data, feed, threads):
            found.setdefault((piece.name, piece.kind), []).append(piece.seconds)
        return [Piece(*place, _middle(times)) for place, times in found.items()]

    def start(self, data: bytes, threads: int) -> Callable[[Feed], Any]:
        """A function that runs the model."""
        raise NotImplementedError

    def profile(self, data: bytes, feed: Feed, threads: int) -> Iterator[Piece]:
        """Every node of several runs."""
        raise NotImplementedError


class OnnxRuntime(_ReadsOnnx):
    """ONNX Runtime on the processor, all graph optimisations on."""

    def start(self, data: bytes, threads: int) -> Callable[[Feed], Any]:
        session = session_of(data, threads)
        return lambda feed: session.run(None, feed)

    def profile(self, data: bytes, feed: Feed, threads: int) -> Iterator[Piece]:
        with tempfile.TemporaryDirectory() as folder:
            session = session_of(data, threads, str(Path(folder) / "times"))
            for _ in range(_LAYER_RUNS):
                session.run(None, feed)
            events = json.loads(Path(session.end_profiling()).read_text())
        for event in events:
            name = str(event.get("name", ""))
            if event.get("cat") == "Node" and name.endswith("_kernel_time"):
                kind = str(event["args"]["op_name"])
                yield Piece(name.removesuffix("_kernel_time"), kind, event["dur"] / 1e6)


class OpenVino(_ReadsOnnx):
    """OpenVINO on the processor, in float32."""

    def start(self, data: bytes, threads: int) -> Callable[[Feed], Any]:
        request = self._request(data, threads)
        return lambda feed: request.infer(feed)

    def profile(self, data: bytes, feed: Feed, threads: int) -> Iterator[Piece]:
        request = self._request(data, threads, profile=True)
        for _ in range(_LAYER_RUNS):
            request.infer(feed)
            for node in request.profiling_info:
                yield Piece(node.node_name, node.node_type, node.real_time.total_seconds())

    def _request(self, data: bytes, threads: int, profile: bool = False) -> Any:
        import openvino

        core = openvino.Core()
        options = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "PERF_COUNT": profile,
        }
        model = core.read_model(data)
        return core.compile_model(model, "CPU", options).create_infer_request()


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Torch("eager"),
        Torch("channels-last", last=True),
        Torch("compile", compiled=True),
        OnnxRuntime("onnxruntime"),
        OpenVino("openvino"),
        Torch("cuda", cuda=True),
        Torch("cuda-compile", cuda=True, compiled=True),
    )
}


def backend_of(name: str) -> Backend:
    """The runtime of a name, if it can be used here."""
    if name not in BACKENDS:
        raise RequestError(f"backend is {name!r}: give one of {', '.join(BACKENDS)}.")
    if (why := BACKENDS[name].missing()) is not None:
        raise RequestError(f"backend {name!r} cannot be used here: {why}.")
    return BACKENDS[name]


@contextmanager
def running(backend: Backend) -> Iterator[None]:
    """Whatever a runtime objects to in here is said in one line."""
    try:
        yield
    except FpgmError:
        raise
    except Exception as error:  # runtimes have errors of their own kinds
        raise ModelError(f"{backend.name} cannot run this model: {reason(error)}.") from error


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """So many threads for torch in here."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compiled(net: nn.Module) -> Callable[..., Any]:
    """A model as torch compiles it, anew: by a function that nothing was compiled for before.

    torch gives up on functions it had to compile too often, and a class has one for all models.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return net(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    compiled: Callable[..., Any] = torch.compile(call)
    return compiled


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


def _processor() -> str:
    """The processor's name and cores, as far as the system tells."""
    told: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            told.setdefault(key.strip(), value.strip())
    parts = [told[key] for key in ("CPU implementer", "CPU part") if key in told]
    name = told.get("model name") or " ".join([platform.processor() or platform.machine(), *parts])
    return f"{name}, {os.cpu_count()} cores"
