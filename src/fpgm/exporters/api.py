"""`export`: write a model as ONNX, pt2 or TorchScript, after a check against PyTorch.

The exported model is loaded again in its runtime and run on the example, on noise and on real
inputs, if there are any. If its outputs differ from the model's, no file is written.
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fpgm._version import __version__
from fpgm.errors import ForwardError, FpgmError, ModelError, RequestError, VerificationError
from fpgm.exporters.bn_folding import simplify
from fpgm.exporters.comparison import ModelComparison, compare_models, output_error
from fpgm.exporters.comparison_inputs import noise_inputs, real_inputs, split_batch
from fpgm.exporters.int8 import MAX_ERROR, to_int8
from fpgm.exporters.low_rank import LayerSplit, split_layers
from fpgm.exporters.onnx import OnnxModule, batch_dims, install_hint, to_onnx
from fpgm.exporters.output_error import TOLERANCE, relative_difference
from fpgm.planning.budget import check_fraction
from fpgm.pruning.serialization import plans_json
from fpgm.utils.atomic_io import atomic_write_stream, explain_write_errors
from fpgm.utils.calibration_data import run_batch
from fpgm.utils.copying import copy_model
from fpgm.utils.default_device import cpu_by_default, users_default_device
from fpgm.utils.example_inputs import (
    Example,
    as_examples,
    batch_size,
    bind_positional,
    resize_batch,
    tensors_in,
    to_model_device,
)
from fpgm.utils.modules import unwrap_model
from fpgm.utils.text import full_reason, reason
from fpgm.utils.thread_lock import suppress_warnings

Format = Literal["onnx", "pt2", "torchscript"]

SUFFIXES: dict[str, Format] = {".onnx": "onnx", ".pt2": "pt2", ".pt": "torchscript"}
"""Format of a file by its suffix, unless it is given."""

Runner = Callable[[Example], list[Tensor]]
"""Runs an exported model."""


@dataclass(frozen=True)
class Exported:
    """The file, and how much its outputs differ from PyTorch's."""

    path: Path
    format: Format
    bytes: int
    error: float
    """Largest difference of an output from PyTorch's, relative to its largest value; before layers
    were split or quantized, which `low_rank` and `int8` report."""
    noise: int
    """Number of random inputs it was compared on, besides the example."""
    inputs: int
    """Number of the loader's inputs it was compared on."""
    splits: tuple[LayerSplit, ...] = ()
    """Layers that were split in two, if that was requested."""
    low_rank: ModelComparison | None = None
    """The model with split layers, compared with the one without."""
    int8: ModelComparison | None = None
    """The int8 model, compared with the float model."""
    any_batch: bool = True
    """Whether the file takes any batch size, or only that of the example."""
    batch_problem: str = ""
    """Why it takes only one batch size, if any was requested."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {**asdict(self), "path": str(self.path)}


@cpu_by_default()
def export(
    model: nn.Module,
    example_inputs: Any,
    path: str | Path,
    *,
    to: Format | None = None,
    loader: Iterable[Any] | None = None,
    images: int = 64,
    any_batch: bool = True,
    low_rank: float | None = None,
    int8: bool = False,
) -> Exported:
    """Write a model for another runtime, with batch norms folded.

    The file is checked on the example, on noise and on inputs of the loader. If its outputs differ
    from the model's, a `VerificationError` is raised and no file is written.

    Args:
        model: unchanged.
        example_inputs: as for `plan`.
        path: file to write.
        to: `"onnx"` for ONNX Runtime, OpenVINO and TensorRT, `"pt2"` for `torch.export.load`,
            `"torchscript"` for `torch.jit.load`; by default as the path ends (.onnx, .pt2, .pt).
        loader: batches of inputs to check on and, for int8, to calibrate with.
        images: how many inputs to read from the loader.
        any_batch: let the batch size vary; `False` fixes it to that of the example. If it cannot
            vary, a warning says why, and it is fixed.
        low_rank: ONNX only: split layers in two where that saves weights and the squared error of
            the weights stays below this fraction of their squares.
        int8: ONNX only: quantize weights and activations to int8. If that changes the outputs by
            more than half of their squares, a `VerificationError` is raised.
    """
    if not isinstance(path, str | Path):
        raise RequestError(
            f"path is a {type(path).__name__}: write fpgm.export(model, example_inputs, path)."
        )
    target = Path(path)
    to = to or format_of(target)
    if to not in get_args(Format):
        raise RequestError(f"to is {to!r}: give {', '.join(map(repr, get_args(Format)))}.")
    if int8 and (to != "onnx" or loader is None):
        raise RequestError("int8=True needs to='onnx' and inputs to calibrate with: pass loader=.")
    if low_rank is not None:
        check_fraction("low_rank", low_rank)
        if to != "onnx":
            raise RequestError("low_rank= needs to='onnx'.")
    if to == "onnx" and (command := install_hint("export", "onnx", "onnxscript", "onnxruntime")):
        raise RequestError(f"Export to ONNX needs more packages: {command}")
    model = unwrap_model(model)
    plain = copy_model(model).eval()
    given = bind_positional(plain, as_examples(to_model_device(model, example_inputs))[0])
    real, inputs = real_inputs(model, loader, images)
    metadata = file_metadata(model, to)
    problem = ""
    job = _Job(plain, given, real, to, metadata, any_batch)
    try:
        first, error = job.convert_plain()
    except ForwardError:
        raise
    except (ModelError, VerificationError) as failure:
        if not any_batch:
            raise
        problem = str(failure)
        job = replace(job, any_batch=False)
        try:
            first, error = job.convert_plain()
        except FpgmError:
            raise failure from failure.__cause__
        warn_fixed_batch(target, job.fixed, problem)
    data, small = first, job.simplified
    splits: list[LayerSplit] = []
    low_rank_result = int8_result = None
    if low_rank is not None:
        small, splits = split_layers(small, job.example, error=low_rank)
        ranks = {split.layer: split.rank for split in splits}
        metadata["fpgm_low_rank"] = json.dumps({"error": low_rank, "ranks": ranks})
        data, _ = job.convert(small, [_run_model(small, x, x) for x in job.checked])
        low_rank_result = compare_models(first, data, job.real or [job.example], job.fixed or 1)
    if int8:
        metadata["fpgm_int8"] = json.dumps(True)
        float_data, data = data, to_int8(data, job.real, metadata)
        int8_result = compare_models(first, data, job.real, job.fixed or 1)
        # The error of split layers is not attributed to quantization.
        split = float_data is not first
        _check_int8_error(output_error(float_data, data, job.real) if split else int8_result.error)
    with explain_write_errors(target):
        atomic_write_stream(target, lambda stream: stream.write(data))
    count = sum(batch_size(x) or 1 for x in job.noise)
    return Exported(
        target, to, len(data), error, count, inputs, tuple(splits), low_rank_result, int8_result,
        job.any_batch, problem,
    )  # fmt: skip


@dataclass(frozen=True)
class _Job:
    """A model to convert, what it is checked on, and whether the batch size may vary."""

    plain: nn.Module
    given: Example
    """The user's example."""
    read: Sequence[Example]
    """The loader's inputs."""
    to: Format
    metadata: dict[str, str]
    any_batch: bool

    @cached_property
    def example(self) -> Example:
        if not self.any_batch:
            return self.given
        # With a batch of one, the exporter would take 1 for a constant.
        return resize_batch(self.given, max(2, batch_size(self.given) or 2))

    @property
    def fixed(self) -> int | None:
        """Return the batch size that the file is fixed to; None if it takes any."""
        return None if self.any_batch else batch_size(self.given)

    @cached_property
    def real(self) -> list[Example]:
        real = self.read
        if self.fixed is not None:
            real = [part for example in self.read for part in split_batch(example, self.fixed)]
        return [bind_positional(self.plain, x) for x in real]

    @cached_property
    def noise(self) -> list[Example]:
        return list(noise_inputs(self.example, any_batch=self.any_batch))

    @property
    def checked(self) -> list[Example]:
        """List all inputs that outputs are compared on."""
        return [self.example, *self.noise, *self.real]

    @cached_property
    def expected(self) -> list[list[Tensor]]:
        """Run the model in PyTorch on all inputs."""
        outputs = [_run_model(self.plain, x, self.given) for x in (self.example, *self.noise)]
        with torch.no_grad():
            return outputs + [tensors_in(run_batch(self.plain, x)) for x in self.real]

    def convert_plain(self) -> tuple[bytes, float]:
        """Convert the model itself; see `convert`."""
        expected = self.expected  # the model's own errors come first
        return self.convert(self.simplified, expected)

    @cached_property
    def simplified(self) -> nn.Module:
        return simplify(self.plain, self.example)

    def convert(self, net: nn.Module, outputs: Sequence[Sequence[Tensor]]) -> tuple[bytes, float]:
        """Return a file and how much its outputs differ from these."""
        if self.any_batch:
            _run_one_input(net, self.example)
        try:
            data, run = _WRITERS[self.to](net, self.example, self.any_batch, self.metadata)
        except FpgmError:
            raise
        except Exception as error:  # each runtime raises its own kinds of errors
            raise ModelError(
                f"The exported model cannot be loaded: {full_reason(error)}."
            ).keep_full_message() from error
        return data, _check_outputs(run, self.checked, outputs)


def warn_fixed_batch(target: Path, batch: int | None, problem: str) -> None:
    """Warn that a file takes only one batch size, and say why."""
    warning = f"{target} takes only batches of {batch}, as with any_batch=False: {problem}"
    warnings.warn(warning, stacklevel=3)


def format_of(path: Path) -> Format:
    """Return the format of a file by its suffix.

    >>> format_of(Path("small.pt2"))
    'pt2'
    """
    if path.suffix not in SUFFIXES:
        raise RequestError(
            f"The format of {path.name} is unknown: use a suffix ({', '.join(SUFFIXES)}), or give "
            "the format."
        )
    return SUFFIXES[path.suffix]


@torch.no_grad()
def _run_model(model: nn.Module, example: Example, given: Example) -> list[Tensor]:
    """Run the model in PyTorch; an error says whether the batch size is the cause.

    Args:
        model: in eval mode.
        example: inputs.
        given: the user's example, of which `example` may be a version with another batch size.
    """
    try:
        return tensors_in(example.call(model))
    except Exception as error:
        where, hint = "the example input", ""
        if example is not given:
            _run_model(model, given, given)  # if that fails too, the size is not the cause
            where = f"{batch_size(example)} inputs"
            hint = "; if it takes only one batch size, pass any_batch=False"
        raise ForwardError(
            f"The model's own forward fails on {where}: {reason(error)}{hint}."
        ) from error


def _run_one_input(model: nn.Module, example: Example) -> None:
    """Run a batch of one, so that shapes cached by the last call differ from the traced ones.

    A head that compares the shape of its grid with that of the next input (YOLO's anchors) would
    otherwise fix the batch size of the file. One always differs: exporters trace two or more.
    """
    with contextlib.suppress(Exception), torch.no_grad():  # the model's code may raise anything
        resize_batch(example, 1).call(model)


def _check_outputs(
    run: Runner, examples: Sequence[Example], expected: Sequence[Sequence[Tensor]]
) -> float:
    """Return the relative difference of the exported model's outputs; raise if it is too large."""
    try:
        outputs = [run(example) for example in examples]
    except Exception as error:  # each runtime raises its own kinds of errors
        raise ModelError(
            f"The exported model does not run: {full_reason(error)}."
        ).keep_full_message() from error
    difference = max(relative_difference(o, e) for o, e in zip(outputs, expected, strict=True))
    if not difference <= TOLERANCE:
        raise VerificationError(
            f"The exported model's outputs differ from PyTorch's by {difference:.1e} of the "
            f"largest value (tolerance {TOLERANCE:.0e}): no file was written."
        )
    return difference


def _check_int8_error(error: float) -> None:
    """Reject a quantized model whose outputs are mostly error."""
    if not error <= MAX_ERROR:
        raise VerificationError(
            f"Quantization to int8 changes the outputs by {error:.0%} of their squares (at most "
            f"{MAX_ERROR:.0%} is accepted): no file was written. Export without int8."
        )


def file_metadata(model: nn.Module, to: Format) -> dict[str, str]:
    """Collect what is written into the file: versions, the model's plans, and later options."""
    packages = ("onnx", "onnxruntime") if to == "onnx" else ()
    return {
        "fpgm_version": __version__,
        "torch_version": str(torch.__version__),
        **{f"{name}_version": str(import_module(name).__version__) for name in packages},
        "fpgm_plans": plans_json(model),
        "fpgm_low_rank": json.dumps(None),
        "fpgm_int8": json.dumps(False),
    }


def _write_onnx(
    model: nn.Module, example: Example, any_batch: bool, metadata: dict[str, str]
) -> tuple[bytes, Runner]:
    data = to_onnx(model, example, any_batch=any_batch, metadata=metadata)
    session = OnnxModule(data)
    return data, lambda inputs: tensors_in(inputs.call(session))


def _write_pt2(
    model: nn.Module, example: Example, any_batch: bool, metadata: dict[str, str]
) -> tuple[bytes, Runner]:
    shapes = batch_dims(example) if any_batch else None
    with suppress_warnings(), users_default_device():
        try:
            program = torch.export.export(
                model, tuple(example.args), dict(example.kwargs), dynamic_shapes=shapes
            )
        except Exception as error:
            raise ModelError(
                f"PyTorch cannot export this model: {full_reason(error)}."
            ).keep_full_message() from error
        stream = io.BytesIO()
        torch.export.save(program, stream, extra_files=dict(metadata))
        stream.seek(0)
        loaded = torch.export.load(stream).module()
    return stream.getvalue(), lambda inputs: tensors_in(inputs.call(loaded))


def _write_torchscript(
    model: nn.Module, example: Example, any_batch: bool, metadata: dict[str, str]
) -> tuple[bytes, Runner]:
    if example.kwargs:
        raise RequestError("TorchScript takes inputs by position: give them as a tuple.")
    with suppress_warnings(), users_default_device():
        try:
            traced = torch.jit.trace(model, tuple(example.args), check_trace=False)
        except Exception as error:
            raise ModelError(
                f"PyTorch cannot trace this model: {full_reason(error)}."
            ).keep_full_message() from error
        stream = io.BytesIO()
        torch.jit.save(traced, stream, _extra_files=dict(metadata))
        stream.seek(0)
        loaded = torch.jit.load(stream)
    return stream.getvalue(), lambda inputs: tensors_in(inputs.call(loaded))


_WRITERS: dict[str, Callable[..., tuple[bytes, Runner]]] = {
    "onnx": _write_onnx,
    "pt2": _write_pt2,
    "torchscript": _write_torchscript,
}
