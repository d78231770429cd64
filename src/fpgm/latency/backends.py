"""Runtimes to time models in: PyTorch, ONNX Runtime and OpenVINO.

Each backend can load a model, time a single layer, and say why it is not available on this machine.
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
from fpgm.exporters.bn_folding import simplify
from fpgm.exporters.onnx import create_session, input_arrays, install_hint, layer_to_onnx, to_onnx
from fpgm.latency.memory import process_bytes, torch_bytes
from fpgm.tracing.layer_calls import LayerSpec
from fpgm.utils.copying import copy_model
from fpgm.utils.default_device import users_default_device
from fpgm.utils.example_inputs import Example
from fpgm.utils.text import reason
from fpgm.utils.timing import time_interleaved

LAYER_SECONDS = 0.02
"""Time to spend on one layer of one size."""
_PROFILED_RUNS = 12
"""Runs under a runtime's own profiler."""
_LAYOUT_OPS = ("Reorder", "ReorderInput", "ReorderOutput", "Parameter", "Result", "Constant",
               "Input", "Output", "Const")  # fmt: skip
"""Layout changes around a single layer, which are not needed between the layers of a model."""


Feed = Mapping[str, Any]
"""Arrays by the names of a model's inputs."""


class Backend(Protocol):
    """A runtime that models and layers can be timed in."""

    name: str

    def unavailable_reason(self) -> str | None:
        """Return why it cannot be used on this machine, or None if it can."""

    def version(self) -> str:
        """Describe what its times depend on: versions and the device."""

    def load(self, model: nn.Module, example: Example, threads: int) -> LoadedModel:
        """Prepare a model to run on an example."""

    def layer_seconds(self, layer: LayerSpec, threads: int) -> float:
        """Measure the time of one layer."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run in a runtime."""

    run: Callable[[], Any]
    size: int | None = None
    """Bytes of the file the runtime reads, if it reads one."""
    profile: Callable[[], list[ProfiledNode]] | None = None
    """Measures the time of each node, if the runtime has a profiler."""
    memory: Callable[[], int | None] = lambda: None
    """Measures the bytes it needs to run, weights included; None if that is unknown."""


@dataclass(frozen=True)
class ProfiledNode:
    """A node of a runtime's graph, and its seconds in one run."""

    name: str
    kind: str
    seconds: float


class TorchBackend:
    """PyTorch: eager, in channels-last order, compiled, or on a CUDA device."""

    def __init__(
        self, name: str, *, last: bool = False, compiled: bool = False, cuda: bool = False
    ):
        self.name, self.last, self.compiled, self.cuda = name, last, compiled, cuda

    def unavailable_reason(self) -> str | None:
        if self.cuda and not torch.cuda.is_available():
            return "no CUDA device"
        if self.compiled and not self.cuda and not _has_compiler():
            return "torch.compile needs a C++ compiler (g++ or clang++)"
        return None

    def version(self) -> str:
        device = torch.cuda.get_device_name() if self.cuda else _processor()
        return f"torch {torch.__version__} {device}"

    def load(self, model: nn.Module, example: Example, threads: int) -> LoadedModel:
        args, kwargs = self._prepare_inputs((example.args, dict(example.kwargs)))
        net = self._prepare_model(model)
        waits = any(p.is_cuda for p in net.parameters())
        call = _compile(net) if self.compiled else net

        def run() -> None:
            with torch.no_grad(), torch_threads(threads), users_default_device():
                call(*args, **kwargs)
                if waits:
                    torch.cuda.synchronize()

        return LoadedModel(run, memory=lambda: torch_bytes(net, run))

    def layer_seconds(self, layer: LayerSpec, threads: int) -> float:
        run = self.load(layer.module(), Example((layer.input(),), {}), threads).run
        return time_interleaved([run], LAYER_SECONDS)[0].median

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        """Copy the model to the device and memory format; return it as it is if both are right."""
        if not self.last and not self.cuda:
            return model
        net = copy_model(model)
        net = net.cuda() if self.cuda else net
        if self.last:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return net

    def _prepare_inputs(self, values: Any) -> Any:
        """Copy all tensors to the device and memory format."""

        def prepare(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = value.cuda() if self.cuda else value.clone()
            image = self.last and value.ndim == 4
            return value.contiguous(memory_format=torch.channels_last) if image else value

        return tree_map(prepare, values)


class _OnnxBackend:
    """A runtime that reads ONNX and has a profiler."""

    def __init__(self, name: str) -> None:
        self.name = name

    def unavailable_reason(self) -> str | None:
        extra = "export" if self.name == "onnxruntime" else self.name
        return install_hint(extra, "onnx", "onnxscript", self.name)

    def version(self) -> str:
        return f"{self.name} {metadata.version(self.name)} {_processor()}"

    def load(self, model: nn.Module, example: Example, threads: int) -> LoadedModel:
        data = to_onnx(simplify(model, example), example)
        feed = input_arrays(data, example)
        run = self.start(data, threads)
        return LoadedModel(
            lambda: run(feed),
            len(data),
            lambda: self._median_profile(data, feed, threads),
            lambda: process_bytes(self.name, data, feed, threads),
        )

    def layer_seconds(self, layer: LayerSpec, threads: int) -> float:
        feed = {"x": layer.input().numpy()}
        nodes = self._median_profile(layer_to_onnx(layer), feed, threads)
        return sum(node.seconds for node in nodes if node.kind not in _LAYOUT_OPS)

    def _median_profile(self, data: bytes, feed: Feed, threads: int) -> list[ProfiledNode]:
        """Profile several runs, and return each node with its median time."""
        seconds: dict[tuple[str, str], list[float]] = {}
        for node in self.profile(data, feed, threads):
            seconds.setdefault((node.name, node.kind), []).append(node.seconds)
        return [ProfiledNode(*key, _median(times)) for key, times in seconds.items()]

    def start(self, data: bytes, threads: int) -> Callable[[Feed], Any]:
        """Load the model; return a function that runs it."""
        raise NotImplementedError

    def profile(self, data: bytes, feed: Feed, threads: int) -> Iterator[ProfiledNode]:
        """Run the model several times, and yield every node of every run."""
        raise NotImplementedError


class OnnxRuntime(_OnnxBackend):
    """ONNX Runtime on the CPU, with all graph optimizations."""

    def start(self, data: bytes, threads: int) -> Callable[[Feed], Any]:
        session = create_session(data, threads)
        return lambda feed: session.run(None, feed)

    def profile(self, data: bytes, feed: Feed, threads: int) -> Iterator[ProfiledNode]:
        with tempfile.TemporaryDirectory() as folder:
            session = create_session(data, threads, str(Path(folder) / "times"))
            for _ in range(_PROFILED_RUNS):
                session.run(None, feed)
            events = json.loads(Path(session.end_profiling()).read_text())
        for event in events:
            name = str(event.get("name", ""))
            if event.get("cat") == "Node" and name.endswith("_kernel_time"):
                kind = str(event["args"]["op_name"])
                yield ProfiledNode(name.removesuffix("_kernel_time"), kind, event["dur"] / 1e6)


class OpenVino(_OnnxBackend):
    """OpenVINO on the CPU, in float32."""

    def start(self, data: bytes, threads: int) -> Callable[[Feed], Any]:
        request = self._request(data, threads)
        return lambda feed: request.infer(feed)

    def profile(self, data: bytes, feed: Feed, threads: int) -> Iterator[ProfiledNode]:
        request = self._request(data, threads, profile=True)
        for _ in range(_PROFILED_RUNS):
            request.infer(feed)
            for node in request.profiling_info:
                yield ProfiledNode(node.node_name, node.node_type, node.real_time.total_seconds())

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
        TorchBackend("eager"),
        TorchBackend("channels-last", last=True),
        TorchBackend("compile", compiled=True),
        OnnxRuntime("onnxruntime"),
        OpenVino("openvino"),
        TorchBackend("cuda", cuda=True),
        TorchBackend("cuda-compile", cuda=True, compiled=True),
    )
}


def get_backend(name: str) -> Backend:
    """Return the backend of a name; raise `RequestError` if it cannot be used here."""
    if name not in BACKENDS:
        raise RequestError(f"backend is {name!r}: give one of {', '.join(BACKENDS)}.")
    if (why := BACKENDS[name].unavailable_reason()) is not None:
        raise RequestError(f"backend {name!r} cannot be used on this machine: {why}.")
    return BACKENDS[name]


@contextmanager
def runtime_errors(backend: Backend) -> Iterator[None]:
    """Turn any error that a runtime raises in the block into a `ModelError` of one line."""
    try:
        yield
    except FpgmError:
        raise
    except Exception as error:  # each runtime has its own kinds of errors
        raise ModelError(f"{backend.name} cannot run this model: {reason(error)}.") from error


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Set torch's number of threads in the block."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compile(net: nn.Module) -> Callable[..., Any]:
    """Compile a model through a new function, for which nothing was compiled before.

    torch stops compiling a function that it had to compile too often, and all models of a class
    share one `forward`.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return net(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    compiled: Callable[..., Any] = torch.compile(call)
    return compiled


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _has_compiler() -> bool:
    """Tell whether torch.compile finds a C++ compiler."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


def _processor() -> str:
    """Describe the CPU: its name, as far as the system reports it, and its cores."""
    info: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
    parts = [info[key] for key in ("CPU implementer", "CPU part") if key in info]
    name = info.get("model name") or " ".join([platform.processor() or platform.machine(), *parts])
    return f"{name}, {os.cpu_count()} cores"
