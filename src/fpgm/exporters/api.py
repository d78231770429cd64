"""Handing a model over: formats that other runtimes read, each checked against PyTorch.

What is written computes what the model computes, or there is no file: it is read back as its
runtime reads it and run on the example, on noise and on real inputs, if there are any.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fpgm._version import __version__
from fpgm.errors import ForwardError, ModelError, RequestError, VerificationError
from fpgm.exporters.bn_folding import simplified
from fpgm.exporters.check_inputs import noise, real
from fpgm.exporters.comparison import Beside, compared, lost
from fpgm.exporters.int8 import RUINED, to_int8
from fpgm.exporters.low_rank import Split, split_layers
from fpgm.exporters.onnx import OnnxModule, batch_dims, to_onnx, uninstalled
from fpgm.exporters.output_error import TOLERANCE, difference
from fpgm.planning.budget import check_share
from fpgm.pruning.serialization import plans_json
from fpgm.utils.atomic_io import write_whole, writing
from fpgm.utils.calibration_data import answer
from fpgm.utils.copying import copy_model
from fpgm.utils.example_inputs import (
    Example,
    as_examples,
    batch_of,
    beside,
    positional,
    resized,
    tensors_in,
)
from fpgm.utils.locking import quietly
from fpgm.utils.modules import unwrapped
from fpgm.utils.text import reason

Format = Literal["onnx", "pt2", "torchscript"]

ENDINGS: dict[str, Format] = {".onnx": "onnx", ".pt2": "pt2", ".pt": "torchscript"}
"""Of files whose format nobody named."""

Run = Callable[[Example], list[Tensor]]


@dataclass(frozen=True)
class Exported:
    """What was written, and how near the runtime comes to PyTorch."""

    path: Path
    format: Format
    bytes: int
    error: float
    """Largest difference of an output to PyTorch's, as a share of its largest number; of the model
    before layers were split or bits taken, which have figures of their own."""
    noise: int
    """How many inputs of noise it was compared on, beside the example; what is no floating-point
    number is the example's there."""
    inputs: int
    """How many inputs of the loader it was compared on."""
    splits: tuple[Split, ...] = ()
    """Layers that were split in two, if that was asked for."""
    low_rank: Beside | None = None
    """The model with split layers beside the one without."""
    int8: Beside | None = None
    """The model in eight bits beside the float model, to which `error` belongs."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "path": str(self.path)}


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
    """Write a model for another runtime, of any batch size, batch norms folded.

    `to="onnx"` is for ONNX Runtime, OpenVINO and TensorRT, `"pt2"` for `torch.export.load`,
    `"torchscript"` for `torch.jit.load`; by default the path's ending says which (.onnx, .pt2,
    .pt). The file is tried on the example, on noise, and on
    `images` inputs of a `loader`; if its outputs are not the model's, that is a `VerificationError`
    and no file is left. With `any_batch=False` it takes the example's batch size only.
    ONNX only: with `low_rank=0.05` layers are split in two where that is cheaper and the squared
    error of their weights stays below 5 %; with `int8=True` weights and activations have eight
    bits, the size of activations looked up on those inputs. What both lose and gain is measured;
    eight bits that change the outputs by more than half of their squares are a `VerificationError`.
    """
    target = Path(path)
    to = to or format_of(target)
    if to not in get_args(Format):
        raise RequestError(f"to is {to!r}: give {', '.join(map(repr, get_args(Format)))}.")
    if int8 and (to != "onnx" or loader is None):
        raise RequestError("int8=True is for to='onnx' and looks at inputs: give loader=.")
    if low_rank is not None:
        check_share("low_rank", low_rank)
        if to != "onnx":
            raise RequestError("low_rank= is for to='onnx'.")
    if to == "onnx" and (missing := uninstalled("export", "onnx", "onnxscript", "onnxruntime")):
        raise RequestError(f"Export to ONNX needs more packages: {missing}")
    model = unwrapped(model)
    plain = copy_model(model).eval()
    example = given = positional(plain, as_examples(beside(model, example_inputs))[0])
    if any_batch:  # of one alone the exporter would think that it is always one
        example = resized(given, max(2, batch_of(given) or 2))
    fixed = None if any_batch else batch_of(example)
    read, inputs = real(model, loader, images, fixed)
    shown = [positional(plain, own) for own in read]
    made = list(noise(example, any_batch=any_batch))
    tried = [example, *made, *shown]
    wanted = [_answers(plain, own, given) for own in (example, *made)]
    with torch.no_grad():
        wanted += [tensors_in(answer(plain, own)) for own in shown]
    small = simplified(plain, example)
    told = about(model, to)

    def written(net: nn.Module, answers: Sequence[Sequence[Tensor]]) -> tuple[bytes, float]:
        if any_batch:
            _run_one_input(net, example)
        data, run = _WRITERS[to](net, example, any_batch, told)
        return data, _checked(run, tried, answers)

    data, error = written(small, wanted)
    first = data
    splits: list[Split] = []
    thin = eight = None
    if low_rank is not None:
        small, splits = split_layers(small, example, error=low_rank)
        ranks = {split.layer: split.rank for split in splits}
        told["fpgm_low_rank"] = json.dumps({"error": low_rank, "ranks": ranks})
        data, _ = written(small, [_answers(small, own, own) for own in tried])
        thin = compared(first, data, shown or [example], fixed or 1)
    if int8:
        told["fpgm_int8"] = json.dumps(True)
        float_data, data = data, to_int8(data, shown, told)
        eight = compared(first, data, shown, fixed or 1)
        # What split layers lose is not blamed on the bits.
        _check_bits(eight.error if float_data is first else lost(float_data, data, shown))
    with writing(target):
        write_whole(target, lambda stream: stream.write(data))
    count = sum(batch_of(own) or 1 for own in made)
    return Exported(target, to, len(data), error, count, inputs, tuple(splits), thin, eight)


def format_of(path: Path) -> Format:
    """By a file's ending.

    >>> format_of(Path("small.pt2"))
    'pt2'
    """
    if path.suffix not in ENDINGS:
        raise RequestError(
            f"{path.name} does not say which format it is to be: let it end in "
            f"{', '.join(ENDINGS)}, or name the format."
        )
    return ENDINGS[path.suffix]


@torch.no_grad()
def _answers(model: nn.Module, example: Example, given: Example) -> list[Tensor]:
    """What the model itself says to the example that was given, or to one of another size."""
    try:
        return tensors_in(example.call(model))
    except Exception as error:
        where, hint = "the example input", ""
        if example is not given:
            _answers(model, given, given)  # if that fails as well, sizes are not to blame
            where = f"{batch_of(example)} inputs"
            hint = "; if it takes one batch size only, any_batch=False"
        raise ForwardError(
            f"The model's own forward fails on {where}: {reason(error)}{hint}."
        ) from error


def _run_one_input(model: nn.Module, example: Example) -> None:
    """Run a batch of one, so that a shape the model keeps from its last call is not the traced one.

    A head that compares its grid's shape with the next input's (YOLO's anchors) would otherwise fix
    the batch size of the file. A batch of one always differs: exporters trace two or more.
    """
    with contextlib.suppress(Exception), torch.no_grad():  # of the model's own code, of any kind
        resized(example, 1).call(model)


def _checked(run: Run, tried: Sequence[Example], wanted: Sequence[Sequence[Tensor]]) -> float:
    """How far what was exported is from what is wanted, if that is no more than rounding."""
    try:
        given = [run(own) for own in tried]
    except Exception as error:  # runtimes have errors of their own kinds
        raise ModelError(f"The exported model does not run: {reason(error)}.") from error
    off = max(difference(g, w) for g, w in zip(given, wanted, strict=True))
    if not off <= TOLERANCE:
        raise VerificationError(
            f"The exported model differs from PyTorch's by {off:.1e} of its largest output (at "
            f"most {TOLERANCE:.0e} is rounding): nothing was written."
        )
    return off


def _check_bits(off: float) -> None:
    """Refuse a model in eight bits that is no longer that model."""
    if not off <= RUINED:
        raise VerificationError(
            f"Eight bits change the outputs by {off:.0%} of their squares (beyond {RUINED:.0%} the "
            "model is ruined): nothing was written. Export it without int8."
        )


def about(model: nn.Module, to: Format) -> dict[str, str]:
    """What a file says about itself: versions, the plans that made the model, and what it is."""
    packages = ("onnx", "onnxruntime") if to == "onnx" else ()
    return {
        "fpgm_version": __version__,
        "torch_version": str(torch.__version__),
        **{f"{name}_version": str(import_module(name).__version__) for name in packages},
        "fpgm_plans": plans_json(model),
        "fpgm_low_rank": json.dumps(None),
        "fpgm_int8": json.dumps(False),
    }


def _onnx(
    model: nn.Module, example: Example, any_batch: bool, told: dict[str, str]
) -> tuple[bytes, Run]:
    data = to_onnx(model, example, any_batch=any_batch, told=told)
    session = OnnxModule(data)
    return data, lambda own: tensors_in(own.call(session))


def _pt2(
    model: nn.Module, example: Example, any_batch: bool, told: dict[str, str]
) -> tuple[bytes, Run]:
    shapes = batch_dims(example) if any_batch else None
    with quietly():
        try:
            program = torch.export.export(
                model, tuple(example.args), dict(example.kwargs), dynamic_shapes=shapes
            )
        except Exception as error:
            raise ModelError(f"PyTorch cannot export this model: {reason(error)}.") from error
        stream = io.BytesIO()
        torch.export.save(program, stream, extra_files=dict(told))
        stream.seek(0)
        read = torch.export.load(stream).module()
    return stream.getvalue(), lambda own: tensors_in(own.call(read))


def _torchscript(
    model: nn.Module, example: Example, any_batch: bool, told: dict[str, str]
) -> tuple[bytes, Run]:
    if example.kwargs:
        raise RequestError("TorchScript takes inputs by position: give them as a tuple.")
    with quietly():
        try:
            traced = torch.jit.trace(model, tuple(example.args), check_trace=False)
        except Exception as error:
            raise ModelError(f"PyTorch cannot trace this model: {reason(error)}.") from error
        stream = io.BytesIO()
        torch.jit.save(traced, stream, _extra_files=dict(told))
        stream.seek(0)
        read = torch.jit.load(stream)
    return stream.getvalue(), lambda own: tensors_in(own.call(read))


_WRITERS: dict[str, Callable[..., tuple[bytes, Run]]] = {
    "onnx": _onnx,
    "pt2": _pt2,
    "torchscript": _torchscript,
}
