"""`fpgm export`: export a pruned model for another runtime, and compare it with PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from torch import Tensor, nn

from fpgm.cli import _common as common
from fpgm.cli import _data_options as data_opts
from fpgm.cli._outcome import Outcome, next_command, show_outcome
from fpgm.errors import RequestError
from fpgm.exporters.api import SUFFIXES as KNOWN
from fpgm.exporters.api import Exported, Format, format_of
from fpgm.exporters.api import export as write
from fpgm.exporters.comparison_inputs import split_batch
from fpgm.exporters.onnx import OnnxModule
from fpgm.utils.example_inputs import Example
from fpgm.utils.text import format_number
from fpgm.workflow.original_model import example_input
from fpgm.workflow.pruned_folder import load_small, read_trusted

ENDINGS = {to: ending for ending, to in KNOWN.items()}


def export(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder written by `fpgm prune`.")
    ],
    to: Annotated[
        str | None,
        typer.Option(
            help=f"Write {', '.join(get_args(Format))}; default: by the suffix of --out, or onnx."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write to this file; default: small.onnx in the folder."),
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Quantize weights and activations to int8; needs --data.")
    ] = False,
    low_rank: Annotated[
        float | None,
        typer.Option(metavar="ERROR", help="Factorize layers within this error; 0.05 is 5 %."),
    ] = None,
    fixed_batch: Annotated[
        bool, typer.Option("--fixed-batch", help="Fix the batch size to that of --input.")
    ] = False,
    data: data_opts.Data = None,
    images: data_opts.Images = 256,
    test: data_opts.Test = 2000,
    mean: data_opts.Mean = None,
    std: data_opts.Std = None,
    input: common.Input = None,  # noqa: A002  (the option's name)
    trusted: common.Trusted = None,
    json: common.AsJson = False,
) -> None:
    """Export a pruned model for another runtime, and check its outputs."""
    if to is None:
        to = "onnx" if out is None else format_of(out)
    if to not in ENDINGS:
        raise RequestError(f"--to is {to!r}: give one of {', '.join(ENDINGS)}.")
    if int8 and data is None:
        raise RequestError("--int8 needs images: pass --data.")
    if to != "onnx" and (int8 or low_rank is not None):
        raise RequestError("--int8 and --low-rank need --to onnx.")
    summary = read_trusted(folder, trusted or ())
    name = f"small{'.low-rank' * (low_rank is not None)}{'.int8' * int8}{ENDINGS[to]}"
    shape = (
        tuple(summary["input"]) if input is None else common.input_shape(input, summary["model"])
    )
    with common.StepBar(2 + (data is not None)) as steps:
        with steps.step("load"):
            small = load_small(folder, summary).eval()
            image_data = None if data is None else data_opts.open_images(data, mean, std, shape[-1])
            if image_data is not None and data is not None:
                image_data.check(small, data, str(folder))
        with steps.step("export and compare"):
            done = write(
                small, example_input(shape), out or folder / name,
                to=to, loader=image_data, images=images, any_batch=not fixed_batch,
                low_rank=low_rank, int8=int8,
            )  # fmt: skip
        shares: dict[str, Any] = {}
        if image_data is not None and to == "onnx" and test:
            with steps.step("count accuracy"):
                batch = None if done.any_batch else shape[0]
                shares = _count_accuracies(image_data, test, small, done, batch)
    if json:
        common.show_json({**done.to_dict(), "accuracy": shares or None})
    else:
        _show(done, shares, next_command("export", folder, summary))


def _count_accuracies(
    data: data_opts.LabelledImages, count: int, small: nn.Module, done: Exported, batch: int | None
) -> dict[str, float]:
    """Measure the accuracy of the model in PyTorch and of the file in ONNX Runtime.

    Models that take only one batch size get their inputs in batches of that size.
    """
    nets = {"PyTorch": small, done.path.name: OnnxModule(done.path.read_bytes())}
    if batch is not None:
        nets = {name: _SplitBatches(net, batch) for name, net in nets.items()}
    accuracies = {name: data.accuracy(net, count) for name, net in nets.items()}
    return {name: share for name, share in accuracies.items() if share is not None}


class _SplitBatches(nn.Module):
    """Runs a model of a fixed batch size on batches of any size."""

    def __init__(self, net: nn.Module, batch: int) -> None:
        super().__init__()
        self._net, self._batch = net, batch

    def forward(self, x: Tensor) -> Any:
        """Return the outputs of all inputs, or those of the first part if they are not tensors."""
        outputs = [piece.call(self._net) for piece in split_batch(Example((x,), {}), self._batch)]
        scores = all(isinstance(out, Tensor) and out.ndim for out in outputs)
        return torch.cat(outputs)[: len(x)] if scores else outputs[0]


def _show(done: Exported, shares: dict[str, float], follow: Outcome) -> None:
    """Print the outcome, then how it was checked."""
    accuracy = (
        {"Accuracy": f"{shares['PyTorch']:.2%} → {shares[done.path.name]:.2%}"} if shares else {}
    )
    size = f"{done.path} ({done.format}, {format_number(done.bytes / 1e6)} MB)"
    show_outcome({**accuracy, "File": size, **follow})
    typer.echo("")
    plain = done.low_rank is None and done.int8 is None
    typer.echo(
        f"Largest difference from PyTorch{'' if plain else ' before int8 and low rank'}: "
        f"{done.error:.1e}, relative to the largest output, over {done.noise} random inputs"
        f"{f' and {done.inputs} images' if done.inputs else ''}."
    )
    typer.echo("The batch size may vary." if done.any_batch else "The batch size is fixed.")
    for name, result in (
        (f"low rank, {len(done.splits)} layers", done.low_rank),
        ("int8", done.int8),
    ):
        if result is not None:
            typer.echo(
                f"{name}: {format_number(result.bytes_before / 1e6)} MB before; relative squared "
                f"error of the outputs {result.error:.2%}; "
                f"{format_number(1000 * result.seconds_before)} ms → "
                f"{format_number(1000 * result.seconds)} ms ({result.faster:.2f}× as fast, "
                f"ONNX Runtime, threads: {result.threads})."
                f"{f' Unreliable: {result.crowd}.' if result.crowd else ''}"
            )
    if shares:
        texts = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
        typer.echo(f"Accuracy on test images: {texts}.")
