"""`fpgm export`: hand a pruned model over to another runtime, checked, with figures beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from torch import Tensor, nn

from fpgm.cli import _common as common
from fpgm.cli import _data_options as pic
from fpgm.cli import _run_dir as res
from fpgm.errors import RequestError
from fpgm.exporters.api import ENDINGS as KNOWN
from fpgm.exporters.api import Exported, Format, format_of
from fpgm.exporters.api import export as write
from fpgm.exporters.check_inputs import pieces
from fpgm.exporters.onnx import OnnxModule
from fpgm.utils.example_inputs import Example
from fpgm.utils.text import figure

ENDINGS = {to: ending for ending, to in KNOWN.items()}


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `fpgm prune` wrote.")],
    to: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(get_args(Format))}; by default as --out ends, else onnx."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="By default small.onnx in the folder.")
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Eight-bit weights and activations; needs --data.")
    ] = False,
    low_rank: Annotated[
        float | None,
        typer.Option(metavar="ERROR", help="Split layers in two within this error; 0.05 is 5 %."),
    ] = None,
    fixed_batch: Annotated[
        bool, typer.Option("--fixed-batch", help="Only of the batch size in --input.")
    ] = False,
    data: pic.Data = None,
    images: pic.Images = 256,
    test: pic.Test = 2000,
    mean: pic.Mean = None,
    std: pic.Std = None,
    input: common.Input = None,  # noqa: A002  (the option's name)
    trusted: common.Trusted = None,
    json: common.AsJson = False,
) -> None:
    """Write a pruned model for another runtime; it is tried before it is left there."""
    if to is None:
        to = "onnx" if out is None else format_of(out)
    if to not in ENDINGS:
        raise RequestError(f"--to is {to!r}: give one of {', '.join(ENDINGS)}.")
    if int8 and data is None:
        raise RequestError("--int8 looks at pictures: give --data.")
    if to != "onnx" and (int8 or low_rank is not None):
        raise RequestError("--int8 and --low-rank go with --to onnx.")
    told = res.read(folder, trusted or ())
    name = f"small{'.low-rank' * (low_rank is not None)}{'.int8' * int8}{ENDINGS[to]}"
    shape = tuple(told["input"]) if input is None else common.input_shape(input, told["model"])
    with common.Steps(2 + (data is not None)) as steps:
        with steps.step("load"):
            small = res.small_of(folder, told).eval()
            pictures = None if data is None else pic.open_pictures(data, mean, std, shape[-1])
            if pictures is not None and data is not None:
                pictures.check(small, data, str(folder))
        with steps.step("export and compare"):
            done = write(
                small, common.example(shape), out or folder / name,
                to=to, loader=pictures, images=images, any_batch=not fixed_batch,
                low_rank=low_rank, int8=int8,
            )  # fmt: skip
        shares: dict[str, Any] = {}
        if pictures is not None and to == "onnx" and test:
            with steps.step("count accuracy"):
                batch = shape[0] if fixed_batch else None
                shares = _accuracies(pictures, test, small, done, batch)
    if json:
        common.show_json({**done.to_dict(), "accuracy": shares or None})
    else:
        _show(done, shares)


def _accuracies(
    pictures: pic.Pictures, count: int, small: nn.Module, done: Exported, batch: int | None
) -> dict[str, float]:
    """Of the model in PyTorch and of the file in ONNX Runtime; in pieces if they take one size."""
    nets = {"PyTorch": small, done.path.name: OnnxModule(done.path.read_bytes())}
    if batch is not None:
        nets = {name: _Pieces(net, batch) for name, net in nets.items()}
    found = {name: pictures.accuracy(net, count) for name, net in nets.items()}
    return {name: share for name, share in found.items() if share is not None}


class _Pieces(nn.Module):
    """A model of one batch size, asked about any number of pictures."""

    def __init__(self, net: nn.Module, batch: int) -> None:
        super().__init__()
        self._net, self._batch = net, batch

    def forward(self, x: Tensor) -> Any:
        """Scores of all, or what comes of the first piece if those are no scores."""
        found = [piece.call(self._net) for piece in pieces(Example((x,), {}), self._batch)]
        scores = all(isinstance(out, Tensor) and out.ndim for out in found)
        return torch.cat(found)[: len(x)] if scores else found[0]


def _show(done: Exported, shares: dict[str, float]) -> None:
    plain = done.low_rank is None and done.int8 is None
    typer.echo(
        f"Written to {done.path}: {done.format}, {figure(done.bytes / 1e6)} MB. "
        f"{'Its outputs' if plain else 'Outputs of the model it was made from'} differ from "
        f"PyTorch's by {done.error:.1e} of the largest at most, over {done.noise} inputs of noise"
        f"{f' and {done.inputs} pictures' if done.inputs else ''}."
    )
    for name, own in (
        (f"{len(done.splits)} layers in two", done.low_rank),
        ("Eight bits", done.int8),
    ):
        if own is not None:
            typer.echo(
                f"{name}: {figure(own.bytes_before / 1e6)} MB before; the outputs' squared error "
                f"is {own.error:.2%} of their squares; {figure(1000 * own.seconds_before)} ms "
                f"before, {figure(1000 * own.seconds)} ms now ({own.faster:.2f}× as fast, ONNX "
                f"Runtime, threads: {own.threads}).{f' But {own.crowd}.' if own.crowd else ''}"
            )
    if shares:
        texts = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
        typer.echo(f"Accuracy on test pictures: {texts}.")
