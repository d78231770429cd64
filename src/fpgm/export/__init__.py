"""Handing a model over: formats that other runtimes read, each checked against PyTorch.

What is written computes what the model computes, or there is no file: it is read back as its
runtime reads it and run on noise of several batch sizes and on real inputs, if there are any.
"""

from __future__ import annotations

import copy
import io
import json
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fpgm._version import __version__
from fpgm.budget import check_share
from fpgm.compact import PLANS
from fpgm.errors import ForwardError, ModelError, RequestError, VerificationError
from fpgm.examples import (
    Example,
    as_examples,
    batch_of,
    beside,
    positional,
    resized,
    tensors_in,
)
from fpgm.export.comparison import Beside, compared
from fpgm.export.fold import folded
from fpgm.export.int8 import to_int8
from fpgm.export.low_rank import Split, split_layers
from fpgm.export.onnx import OnnxModule, batch_dims, to_onnx, uninstalled
from fpgm.files import write_whole, writing
from fpgm.recovery.batches import read_inputs
from fpgm.wording import reason

Format = Literal["onnx", "pt2", "torchscript"]

Run = Callable[[Example], list[Tensor]]

TOLERANCE = 1e-4
"""Largest difference of an output, as a share of its largest number, that is rounding."""
_BATCHES = (1, 2, 5)
"""Sizes an exported model is tried with."""


@dataclass(frozen=True)
class Exported:
    """What was written, and how near the runtime comes to PyTorch."""

    path: Path
    format: Format
    bytes: int
    error: float
    """Largest difference of an output to PyTorch's, as a share of its largest number; of the model
    before layers were split or bits taken, which have figures of their own."""
    inputs: int
    """How many inputs it was compared on."""
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
    to: Format = "onnx",
    loader: Iterable[Any] | None = None,
    images: int = 64,
    any_batch: bool = True,
    low_rank: float | None = None,
    int8: bool = False,
) -> Exported:
    """Write a model for another runtime, of any batch size, batch norms folded.

    `to="onnx"` is for ONNX Runtime, OpenVINO and TensorRT, `"pt2"` for `torch.export.load`,
    `"torchscript"` for `torch.jit.load`. The file is tried on noise, and on `images` inputs of a
    `loader`; if its outputs are not the model's, that is a `VerificationError` and no file is left.
    ONNX only: with `low_rank=0.05` layers are split in two where that is cheaper and the squared
    error of their weights stays below 5 %; with `int8=True` weights and activations have eight
    bits, the size of activations looked up on those inputs. What both lose and gain is measured.
    """
    if to not in get_args(Format):
        raise RequestError(f"to is {to!r}: give {', '.join(map(repr, get_args(Format)))}.")
    if int8 and (to != "onnx" or loader is None):
        raise RequestError("int8=True is for to='onnx' and looks at inputs: give loader=.")
    if low_rank is not None:
        check_share("low_rank", low_rank)
        if to != "onnx":
            raise RequestError("low_rank= is for to='onnx'.")
    if to == "onnx" and (missing := uninstalled("onnx", "onnxscript", "onnxruntime")):
        raise RequestError(f"Export to ONNX needs more packages: {missing}.")
    plain = copy.deepcopy(model).eval()
    example = positional(plain, as_examples(beside(model, example_inputs))[0])
    if any_batch:  # of one alone the exporter would think that it is always one
        example = resized(example, max(2, batch_of(example) or 2))
    fixed = None if any_batch else batch_of(example)
    real = [positional(plain, own) for own in _read(model, loader, images, fixed)]
    tried = [*_noise(example, any_batch), *real]
    wanted = [_answers(plain, own, any_batch) for own in tried]
    small = _folded(plain, example, wanted[0])

    def written(net: nn.Module, answers: Sequence[Sequence[Tensor]]) -> tuple[bytes, float]:
        data, run = _WRITERS[to](net, example, any_batch, about(model))
        return data, _checked(run, tried, answers)

    data, error = written(small, wanted)
    first = data
    splits: list[Split] = []
    thin = eight = None
    if low_rank is not None:
        small, splits = split_layers(small, example, error=low_rank)
        data, _ = written(small, [_answers(small, own, any_batch) for own in tried])
        thin = compared(first, data, real or [example], fixed or 1)
    if int8:
        data = to_int8(data, real)
        eight = compared(first, data, real, fixed or 1)
    target = Path(path)
    with writing(target):
        write_whole(target, lambda stream: stream.write(data))
    count = sum(batch_of(own) or 1 for own in tried)
    return Exported(target, to, len(data), error, count, tuple(splits), thin, eight)


@torch.no_grad()
def _answers(model: nn.Module, example: Example, any_batch: bool) -> list[Tensor]:
    """What the model itself says."""
    try:
        return tensors_in(example.call(model))
    except Exception as error:
        hint = "; if it takes one batch size only, any_batch=False" if any_batch else ""
        size = batch_of(example)
        raise ForwardError(
            f"The model's own forward fails on {size} inputs: {reason(error)}{hint}."
        ) from error


def _folded(plain: nn.Module, example: Example, wanted: Sequence[Tensor]) -> nn.Module:
    """With norms folded, if that is the same model: not if a layer's output is one of its own."""
    small = folded(plain, example)
    if not difference(_answers(small, example, False), wanted) <= TOLERANCE:
        small = copy.deepcopy(plain)
    return small.requires_grad_(False)


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


def _read(
    model: nn.Module, loader: Iterable[Any] | None, images: int, batch: int | None
) -> list[Example]:
    """Real inputs, in batches as they come, or of the one size there is."""
    if loader is None:
        return []
    if not isinstance(images, int) or images < 1:
        raise RequestError(f"images is {images!r}: give a whole number from 1 up.")
    read = read_inputs((beside(model, own) for own in loader), images)
    try:
        found = [read[number] for number in range(len(read))]
    finally:
        read.close()
    return found if batch is None else [resized(own, batch) for own in found]


def about(model: nn.Module) -> dict[str, str]:
    """What a file says about itself: versions, and the plans that made the model."""
    plans = [json.loads(plan.to_json()) for plan in getattr(model, PLANS, ())]
    return {
        "fpgm_version": __version__,
        "torch_version": str(torch.__version__),
        "fpgm_plans": json.dumps(plans),
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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


def _noise(example: Example, any_batch: bool) -> Iterable[Example]:
    """The example, and noise of its shape in several batch sizes."""
    yield example
    random = torch.Generator().manual_seed(0)

    def like(value: Any, batch: int) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.ndim:
            return value
        shape = (batch, *value.shape[1:])
        return torch.randn(shape, generator=random).to(value)

    values = (*example.args, *example.kwargs.values())
    if any_batch and all(isinstance(v, Tensor) and v.is_floating_point() for v in values):
        for batch in _BATCHES:
            yield Example(
                tuple(like(v, batch) for v in example.args),
                {name: like(v, batch) for name, v in example.kwargs.items()},
            )


def difference(given: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Largest difference of an output, as a share of its largest number; inf if not comparable.

    >>> difference([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 4.0])])
    0.5
    >>> difference([torch.tensor([torch.nan, 2.0])], [torch.tensor([1.0, 2.0])])
    inf
    """
    if [t.shape for t in given] != [t.shape for t in wanted]:
        return math.inf
    worst = 0.0
    for g, w in zip((t.detach() for t in given), (t.detach() for t in wanted), strict=True):
        finite = w.isfinite()
        if not torch.equal(g.isfinite(), finite) or not torch.equal(
            g[~finite].nan_to_num().cpu().float(), w[~finite].nan_to_num().cpu().float()
        ):
            return math.inf
        if bool(finite.any()):
            mine, theirs = g[finite].double().cpu(), w[finite].double().cpu()
            size = float(theirs.abs().max()) or 1.0
            worst = max(worst, float((mine - theirs).abs().max()) / size)
    return worst
