"""`fpgm prune`: plan, compact, verify, and write what came of it with everything to check it by."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import torch
import typer
from torch import nn

from fpgm._version import __version__
from fpgm.cli import _common as common
from fpgm.cli import _data_options as pic
from fpgm.cli import _run_dir as res
from fpgm.cli import sensitivity as sensed
from fpgm.criteria import DISTANCES, NAMES
from fpgm.errors import RequestError
from fpgm.latency.budget_search import Where
from fpgm.models.registry import is_guess
from fpgm.planning.budget import ALIGN
from fpgm.pruning.plan import Plan
from fpgm.pruning.verification import Certificate
from fpgm.recovery.recover import Method, recovery_of
from fpgm.recovery.recover import recover as solve
from fpgm.recovery.sensitivity.api import sensitivity as measure
from fpgm.recovery.sensitivity.result import Sensitivity
from fpgm.report.analysis.api import analysis_of
from fpgm.utils.atomic_io import file_sha256
from fpgm.utils.modules import tensors_sha256
from fpgm.workflow.api import compact_certified, planned

CHOICE = ("criterion", "distance", "residual", "ignore", "approximate")
"""Options that say which units go and where, and not how many."""


def prune(
    context: typer.Context,
    model: common.Model,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the results.")],
    rate: Annotated[
        float | None, typer.Option(help="Share of units to remove from every group.")
    ] = None,
    macs: Annotated[float | None, typer.Option(help="Share of MACs to remove.")] = None,
    params: Annotated[float | None, typer.Option(help="Share of parameters to remove.")] = None,
    latency: Annotated[
        float | None, typer.Option(help="Share of the time to remove, measured in --backend.")
    ] = None,
    backend: common.Backend = "eager",
    threads: common.Threads = None,
    rates: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=RATE", help="Rate of some layers; may be repeated."),
    ] = None,
    criterion: Annotated[str, typer.Option(help=f"One of {', '.join(NAMES)}.")] = "fpgm",
    distance: Annotated[str, typer.Option(help=f"One of {', '.join(DISTANCES)}.")] = "l2",
    residual: Annotated[
        str, typer.Option(metavar="POLICY", help="Residual streams: coupled or independent.")
    ] = "coupled",
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Layers to leave whole; may be repeated."),
    ] = None,
    align: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Multiple that widths are brought to; 1 is off, auto measures it in --backend.",
        ),
    ] = str(ALIGN),
    rounding: Annotated[
        str, typer.Option(help="nearest, or paper: int(n · rate) units go.")
    ] = "nearest",
    min_channels: Annotated[int, typer.Option(help="Least channels a layer keeps.")] = 1,
    approximate: Annotated[
        bool, typer.Option("--approximate", help="Also prune under norms over channels.")
    ] = False,
    allocate: Annotated[
        str,
        typer.Option(
            metavar="WAY",
            help="uniform; sensitivity (with --data); or a file of fpgm sensitivity --out.",
        ),
    ] = "uniform",
    recover: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="solve: new weights for what is left, from --data; norms: batch norms only; "
            "weights: without data.",
        ),
    ] = None,
    distil: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Train on towards the original's answers, so long."),
    ] = 0.0,
    data: pic.Data = None,
    images: pic.Images = 1024,
    test: pic.Test = 2000,
    mean: pic.Mean = None,
    std: pic.Std = None,
    weights: common.Weights = None,
    input: common.Input = None,  # noqa: A002  (the option's name)
    force: Annotated[
        bool, typer.Option("--force", help="Replace the results of an earlier prune.")
    ] = False,
    json: common.AsJson = False,
) -> None:
    """Remove units from a model, prove the result, and write it to a folder."""
    res.check_folder(out, force)
    if all(way is None for way in (rate, macs, params, latency)) and not rates:
        raise RequestError(
            "Say how much to remove: --rate, --macs, --params, --latency or --rates."
        )
    options: dict[str, Any] = {
        "rate": rate, "macs": macs, "params": params, "latency": latency,
        "rates": read_rates(rates or []),
        "criterion": criterion, "distance": distance, "residual": residual,
        "ignore": ignore or [], "align": read_align(align), "rounding": rounding,
        "min_channels": min_channels, "approximate": approximate,
    }  # fmt: skip
    method = _method(recover, distil)
    if images < 1:
        raise RequestError(f"--images is {images}: give a whole number from 1 up.")
    for needs, wanting in (
        (method in ("solve", "norms"), f"--recover {recover}"),
        (allocate == "sensitivity", "--allocate sensitivity"),
        (distil > 0, "--distil"),
    ):
        if needs and data is None:
            raise RequestError(f"{wanting} looks at pictures: give --data.")
    shape = common.input_shape(input, model)
    with common.Steps(4 + (method is not None) + (data is not None)) as steps:
        with steps.step("build"):
            net = common.build(model, weights)
            x = common.example(shape)
            pictures = None if data is None else pic.open_pictures(data, mean, std, shape[-1])
            if pictures is not None and data is not None:
                pictures.check(net, data, model)
        with steps.step("watch and plan"), common.supposing(shape, input):
            way: Any = allocate
            if allocate == "sensitivity" and pictures is not None:
                chosen = {name: options[name] for name in CHOICE}
                way = measure(net, x, pictures, rates=(), progress=steps.inside, **chosen)
            elif allocate != "uniform":
                way = sensed.read(Path(allocate))
            made, planner = planned(
                net, x, allocate=way, backend=backend, threads=threads, progress=steps.inside,
                **options,
            )  # fmt: skip
        if not made.cuts:
            raise RequestError("No unit would go: ask for more, or for finer steps with --align 1.")
        with steps.step("compact and verify"):
            pruned = compact_certified(planner, made, Where.of(backend, threads), steps.inside)
            small, made, certificate = pruned.model, pruned.plan, pruned.certificate
        with steps.step("look at filters"):
            beside = {res.ANALYSIS: common.to_json(analysis_of(planner, quick=True).to_dict())}
            if isinstance(way, Sensitivity):
                beside[res.SENSITIVITY] = way.to_json(indent=1)
        told: dict[str, Any] = {}
        plain = small
        if method is not None:
            with steps.step("recover"):
                batches = [x] if pictures is None else pictures
                small = solve(
                    net, made, batches,
                    method=method, images=images, distil=distil, progress=steps.inside,
                )  # fmt: skip
                told["recovery"] = recovery_of(small).to_dict()
                told["small_sha256"] = tensors_sha256(small)
        if pictures is not None:
            with steps.step("count accuracy"):
                told |= _accuracies(pictures, test, net, plain, small)
    asked = options | _looked(allocate, method, data, images, test, distil)
    if latency is not None or align == "auto":
        asked |= {"backend": backend, "threads": threads}
    results = {
        "format": res.FORMAT,
        "model": model,
        "weights": {"file": weights.name, "sha256": file_sha256(weights)} if weights else None,
        "original_sha256": tensors_sha256(net),
        "input": shape,
        "asked": {name: value for name, value in asked.items() if value not in (None, {}, [])},
        "achieved": res.achieved(made),
        "certificate": res.certificate_dict(certificate),
        **told,
        "versions": {
            "fpgm": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "seconds": steps.seconds,
        "command": context.obj,
    }
    res.write(out, small, made, results, beside, force=force)
    if json:
        common.show_json(results)
    else:
        _show(made, certificate, told, _looked_at(shape, assumed=input is None and is_guess(model)))
        written = (res.SMALL, res.PLAN, res.RESULTS, *beside)
        typer.echo(f"Written to {out}: {', '.join(written)}")


def _method(recover: str | None, distil: float) -> Method | None:
    """What `--recover` names."""
    if not 0 <= distil < math.inf:
        raise RequestError(f"--distil is {distil}: give seconds, from 0 up.")
    if recover is None and distil:
        raise RequestError("--distil goes on from a recovered model: give --recover solve too.")
    for method in get_args(Method):
        if recover == method:
            return cast(Method, method)
    if recover is not None:
        names = ", ".join(get_args(Method))
        raise RequestError(f"--recover is {recover!r}: give one of {names}.")
    return None


def _looked(
    allocate: str,
    method: Method | None,
    data: str | None,
    images: int,
    test: int,
    distil: float,
) -> dict[str, Any]:
    """What was asked of data."""
    return {
        "allocate": None if allocate == "uniform" else allocate,
        "recover": method,
        "data": data,
        "images": images if method is not None else None,
        "test": test if data is not None else None,
        "distil": distil or None,
    }


def _accuracies(
    pictures: pic.Pictures, count: int, net: nn.Module, plain: nn.Module, small: nn.Module
) -> dict[str, Any]:
    """Of the original, the compact model, and the recovered one; and on how many pictures."""
    nets = {"original": net, "compact": plain} | ({} if small is plain else {"recovered": small})
    found = {name: pictures.right(own, count) for name, own in nets.items()}
    shares = {name: right / seen for name, (right, seen) in found.items() if seen}
    if not shares:
        return {"accuracy": None}
    return {"accuracy": shares, "test_images": max(seen for _, seen in found.values())}


def read_align(text: str) -> int | Literal["auto"]:
    """`--align`: a whole number or the word.

    >>> read_align("8"), read_align("auto")
    (8, 'auto')
    """
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise RequestError(f"--align is {text!r}: give a whole number from 1 up, or auto.")
    return int(text)


def read_rates(items: list[str]) -> dict[str, float]:
    """Rates by layer pattern from the command line.

    >>> read_rates(["layer3.*=0.2"])
    {'layer3.*': 0.2}
    """
    rates = {}
    for item in items:
        pattern, equals, rate = item.rpartition("=")
        try:
            rates[pattern] = float(rate)
        except ValueError:
            equals = ""
        if not equals or not pattern:
            raise RequestError(f"--rates is {item!r}: write a pattern and a share, layer3.*=0.2.")
    return rates


def _looked_at(shape: Sequence[int], *, assumed: bool) -> str:
    """Which input MACs and the certificate are of, and how to look at another."""
    text = f"Input: {common.shape_text(shape)}"
    return f"{text}, which was assumed: --input changes it." if assumed else f"{text}."


def _show(made: Plan, certificate: Certificate, told: dict[str, Any], looked_at: str) -> None:
    common.show_table(
        ("group", "layers", "units", "kept", "removed", "exact"),
        [
            (g.name, str(len(g.layers)), str(g.units), str(g.kept), f"{g.rate:.1%}",
             "yes" if g.exact else "no")
            for g in made.groups
        ],
    )  # fmt: skip
    common.show_frozen(made.frozen)
    typer.echo("")
    common.show_table(
        ("", "before", "after", "removed"),
        [
            ("MACs", f"{made.macs_before:,}", f"{made.macs_after:,}", f"{made.macs_removed:.1%}"),
            ("parameters", f"{made.params_before:,}", f"{made.params_after:,}",
             f"{made.params_removed:.1%}"),
        ],
    )  # fmt: skip
    typer.echo(f"\n{looked_at}")
    if made.latency is not None:
        typer.echo(f"\n{res.latency_line(made.latency)}")
    for note in made.notes:
        typer.echo(f"\nNote: {note}")
    typer.echo(f"\n{res.certificate_line(certificate)}")
    if "recovery" in told:
        r = told["recovery"]
        typer.echo(f"Recovered in {r['seconds']:.0f} s; inputs looked at: {r['inputs']}.")
        if r["before"] is not None and r["after"] < r["before"]:
            typer.echo(
                "The outputs' squared error, as a share of their squares, fell from "
                f"{r['before']:.3g} to {r['after']:.3g}."
            )
        for note in r["notes"]:
            typer.echo(f"Note: {note}")
    if told.get("accuracy"):
        shares = ", ".join(f"{name} {share:.2%}" for name, share in told["accuracy"].items())
        typer.echo(f"Accuracy on {told['test_images']} test pictures: {shares}.")
