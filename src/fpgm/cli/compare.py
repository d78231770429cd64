"""`fpgm compare`: compare pruning methods on one model, with equal MACs and equal training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from fpgm._version import __version__
from fpgm.cli import _common as common
from fpgm.cli import _data_options as data_opts
from fpgm.cli._outcome import show_untrained
from fpgm.data.loaders import Epochs
from fpgm.errors import FileError, FpgmError, RequestError
from fpgm.models.checkpoint import shipped_file
from fpgm.paper.baselines.comparison import ComparisonResult
from fpgm.paper.baselines.comparison import compare as run_one
from fpgm.paper.baselines.registry import METHODS, SgdSchedule, Task, get_method
from fpgm.planning.budget import Budget
from fpgm.report.page import compare as write_comparison
from fpgm.tracing.residual import Residual
from fpgm.utils.atomic_io import explain_write_errors, file_sha256, is_unfinished, write_text
from fpgm.utils.modules import tensors_sha256
from fpgm.utils.plain_json import to_json
from fpgm.utils.run_files import FORMAT, RESULTS
from fpgm.utils.safe_read import read_json
from fpgm.utils.safetensors_io import read_head
from fpgm.utils.tables import format_mean_std, latex_table, markdown_table
from fpgm.utils.text import escape_text, reason
from fpgm.workflow.original_model import build_model, example_input
from fpgm.workflow.pipeline import Origin
from fpgm.workflow.pruned_folder import write_pruned

USUAL = ("fpgm", "l2", "pfec", "random", "thinet", "cp", "nisp", "hrank")
"""Methods that need neither labels nor training."""
LEAST = 2
"""Minimum steps for methods that train before pruning, which use half of the steps for that."""
NAME = "compare"
"""Name of the files with the table."""
PAGE = "comparison.html"


def compare(
    context: typer.Context,
    model: common.Model,
    data: Annotated[
        str, typer.Option(metavar="NAME|DIR", help="Select filters, train and test on this data.")
    ],
    macs: Annotated[
        float,
        typer.Option(
            parser=common.read_fraction, metavar="FRACTION", help="Remove this fraction of MACs."
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Write to this folder, or resume its run.")
    ],
    methods: Annotated[
        str, typer.Option(metavar="A,B,…", help=f"Compare some of {', '.join(METHODS)}; or all.")
    ] = ",".join(USUAL),
    steps: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Train each method for this many steps; 0: none."),
    ] = 0,
    lr: Annotated[float, typer.Option(help="Set the learning rate of --steps.")] = 0.01,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Repeat with N seeds.")] = 1,
    residual: common.Residual = "coupled",
    align: Annotated[int, typer.Option(metavar="N", help="Round widths to multiples of this.")] = 1,
    images: data_opts.Images = 512,
    test: data_opts.RequiredTest = 2000,
    mean: data_opts.Mean = None,
    std: data_opts.Std = None,
    weights: common.Weights = None,
    input: common.Input = None,  # noqa: A002  (the option's name)
    json: common.AsJson = False,
) -> None:
    """Prune one model with several methods, recover and fine-tune each, and compare accuracy."""
    chosen, idle = _choose_methods(methods, steps)
    Budget(macs=macs)
    if macs <= 0:
        raise RequestError(
            f"--macs is {macs:g}: nothing would be removed. Give a fraction such as 0.5."
        )
    if not 0 < lr < math.inf:
        raise RequestError(f"--lr is {lr:g}: give a positive number.")
    if test < 1 or images < 1:
        raise RequestError("--test and --images must be at least 1.")
    shape = common.input_shape(input, model)
    weights = shipped_file(weights, model)
    if weights is not None:
        read_head(weights)  # fail early if it cannot be read
    trained = {"file": weights.name, "sha256": file_sha256(weights)} if weights else None
    untrained = Origin(model, weights, shape).untrained
    asked = {
        "model": model, "weights": trained, "data": data,
        "macs": macs, "steps": steps, "lr": lr, "residual": residual, "align": align,
        "images": images, "test": test, "mean": mean, "std": std, "input": list(shape),
        "fpgm": __version__,
    }  # fmt: skip
    with common.LayerBar() as bar:
        net = build_model(model, weights)
        asked["original_sha256"] = digest = tensors_sha256(net)
        calibration, training = (
            data_opts.open_images(data, mean, std, shape[-1], augment=augmented)
            for augmented in (False, True)
        )
        calibration.check(net, data, model)
        task = Task(
            net,
            example_input(shape),
            macs,
            loader=calibration,
            images=images,
            before_pruning=SgdSchedule(steps // 2, lr),
            residual=cast(Residual, residual),
            align=align,
            progress=bar.show,
        )
        task.planner()  # raises an error for invalid options
        folder = _ComparisonFolder(out, asked)
        right, tested = calibration.count_correct(net, test)
        if not tested:
            raise RequestError(f"{model} does not return class scores, which fpgm compare needs.")
        baseline = right / tested
        _check_classes(net, calibration, data, model)

        def count(classifier: torch.nn.Module) -> float:
            share = calibration.accuracy(classifier, test)
            assert share is not None
            return share

        about = {
            "model": model,
            "weights": trained,
            "untrained": untrained,
            "original_sha256": digest,
            "input": list(shape),
            "command": context.obj,
            "test_images": tested,
        }
        folder.begin()
        for seed in range(seeds):
            for name in chosen:
                if folder.read_row(name, seed) is None:
                    bar.show(name, 0, 1)
                    seeded = replace(task, seed=seed, training=Epochs(training.sets, seed))
                    try:
                        result = run_one(get_method(name), seeded, SgdSchedule(steps, lr), count)
                    except (FpgmError, RuntimeError, ValueError) as error:  # other methods may work
                        folder.fail(name, seed, reason(error))
                    else:
                        folder.keep(result, {**about, "accuracy": baseline})
    rows = [folder.row(name, seed) for name in chosen for seed in range(seeds)]
    shown = format_table(rows, baseline)
    sources = {name: {"title": method.title, "about": method.summary, "cite": method.cite}
               for name, method in METHODS.items() if name in chosen}  # fmt: skip
    summary = {
        "asked": asked,
        "original": baseline,
        "rows": rows,
        "left_out": idle,
        "methods": sources,
    }
    page = folder.finish(summary, *shown)
    if json:
        common.show_json({**summary, "page": None if page is None else str(page)})
    else:
        show_untrained(model, untrained)
        common.show_table(*shown)
        for row in rows:
            for note in [row["failed"]] if "failed" in row else row["notes"]:
                typer.echo(f"\n{row['method']}: {escape_text(note)}")
        if idle:
            typer.echo(
                f"\nSkipped because they need training: {', '.join(idle)}; pass --steps {LEAST} or "
                "more."
            )
        typer.echo(f"\nWritten to {out}: {NAME}.json, {NAME}.md, {NAME}.tex")
        if page is not None:
            typer.echo(f"Report: {page}")
    if any("failed" in row for row in rows):
        raise typer.Exit(2)


def _choose_methods(methods: str, steps: int) -> tuple[list[str], list[str]]:
    """Return the methods to run, and those of "all" that are skipped because they need training."""
    named = METHODS if methods == "all" else [name.strip() for name in methods.split(",")]
    chosen = list(dict.fromkeys(named))
    idle = [name for name in chosen if get_method(name).needs == "training" and steps < LEAST]
    if idle and methods != "all":
        problem = f"{', '.join(idle)} {'train' if len(idle) > 1 else 'trains'} before pruning"
        raise RequestError(f"{problem}: pass --steps {LEAST} or more.")
    return [name for name in chosen if name not in idle], idle


@torch.no_grad()
def _check_classes(
    net: torch.nn.Module, calibration: data_opts.LabelledImages, data: str, model: str
) -> None:
    """Check that the model has an output for every class of the data."""
    outputs = net(next(iter(calibration))[0][:1]).shape[1]
    if outputs < calibration.sets.classes:
        raise RequestError(f"--data {data} has {calibration.sets.classes} classes, but {model} has "
                           f"{outputs} outputs: they must match.")  # fmt: skip


def format_table(
    rows: Sequence[Mapping[str, Any]], baseline: float
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Format one line per method: means over seeds with standard deviations, or "failed".

    >>> row = {"method": "fpgm", "macs_removed": 0.5, "once": 0.3, "recovered": 0.9, "tuned": None}
    >>> _, lines = format_table([{**row, "seconds": 2.0}], 0.92)
    >>> lines[1]
    ('FPGM', '50.0%', '30.00%', '90.00%', '–', '2 s')
    """
    header = ("method", "MACs removed", "one-shot", "recovered", "fine-tuned", "time")
    lines: list[tuple[str, ...]] = [("original", "0.0%", f"{baseline:.2%}", "–", "–", "–")]
    for name in dict.fromkeys(row["method"] for row in rows):
        matches = [row for row in rows if row["method"] == name]
        title = METHODS[name].title
        if any("failed" in row for row in matches):
            lines.append((title, "failed", "–", "–", "–", "–"))
            continue
        shares = [
            format_mean_std([row[key] for row in matches if row[key] is not None])
            for key in ("once", "recovered", "tuned")
        ]
        removed = statistics.mean(row["macs_removed"] for row in matches)
        seconds = statistics.mean(row["seconds"] for row in matches)
        lines.append((title, f"{removed:.1%}", *shares, f"{seconds:.0f} s"))
    return header, lines


def _is_row(value: Any, method: str, seed: int) -> bool:
    """Check that a file contains the row of this method and seed."""
    if not isinstance(value, dict) or (value.get("method"), value.get("seed")) != (method, seed):
        return False
    notes = value.get("notes")
    return (
        all(_is_number(value.get(key)) for key in ("macs_removed", "once", "seconds"))
        and all(key in value for key in ("recovered", "tuned", "steps"))
        and all(value[key] is None or _is_number(value[key]) for key in ("recovered", "tuned"))
        and isinstance(notes, list)
        and all(isinstance(note, str) for note in notes)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e15


class _ComparisonFolder:
    """The output folder, with one run folder per row, which other commands can read."""

    def __init__(self, out: Path, asked: Mapping[str, Any]) -> None:
        self._out, self._asked = out, asked
        self._failed: dict[tuple[str, int], dict[str, Any]] = {}
        """Rows that failed; they are tried again by the next run."""
        self._file = out / "asked.json"
        if out.exists() and not out.is_dir():
            raise FileError(f"{out} is a file: --out must be a folder.")
        if self._file.exists():
            kept = self._read(self._file)
            other = [key for key in asked if kept.get(key) != asked[key]]
            if other or kept.keys() != asked.keys():
                what = f" (different {', '.join(other)})" if other else ""
                raise FileError(
                    f"{out} contains a different comparison{what}: choose another --out."
                )
        elif out.exists() and any(not is_unfinished(own.name) for own in out.iterdir()):
            raise FileError(f"{out} is not empty: choose another --out.")

    def begin(self) -> None:
        """Write the options, so that the folder can be checked when the command is run again."""
        self._write(self._file, self._asked)

    def read_row(self, method: str, seed: int) -> dict[str, Any] | None:
        """Return a row of an earlier run, or None."""
        file = self._place(method, seed) / RESULTS
        row = self._read(file).get("row") if file.exists() else None
        return row if _is_row(row, method, seed) else None

    def row(self, method: str, seed: int) -> dict[str, Any]:
        """Return a row, or the reason why it failed."""
        row = self.read_row(method, seed)
        return self._failed[method, seed] if row is None else row

    def keep(self, result: ComparisonResult, about: Mapping[str, Any]) -> None:
        """Write the result of a method as a run folder, as `fpgm prune` does."""
        row = result.row
        shares = {"original": about["accuracy"], "compact": row.once, "recovered": row.recovered,
                  "trained on": row.tuned}  # fmt: skip
        results = {
            **about,
            "format": FORMAT,
            "small_sha256": tensors_sha256(result.best_model),
            "asked": {**self._asked, "criterion": row.method, "seed": row.seed},
            "accuracy": {name: share for name, share in shares.items() if share is not None},
            "seconds": {"prune": row.seconds},
            "versions": {"fpgm": __version__, "torch": torch.__version__},
            "row": row.to_dict(),
        }
        place = self._place(row.method, row.seed)
        if result.plan is not None:
            write_pruned(place, result.best_model, result.plan, results, {}, force=True)
        else:
            self._write(place / RESULTS, results)

    def fail(self, method: str, seed: int, why: str) -> None:
        """Record why a method failed."""
        self._failed[method, seed] = {"method": method, "seed": seed, "failed": why}

    def finish(
        self, summary: Mapping[str, Any], header: Sequence[str], lines: Sequence[Sequence[str]]
    ) -> Path | None:
        """Write the table as JSON, Markdown and LaTeX, and a page if there are several runs."""
        self._write(self._out / f"{NAME}.json", summary)
        sources = [f"- {source['title']}: {source['about']} {source['cite']}\n"
                  for source in summary["methods"].values()]  # fmt: skip
        texts = {
            "md": "\n".join([markdown_table(header, lines), "", "".join(sources)]),
            "tex": latex_table(header, lines) + "\n",
        }
        for ending, text in texts.items():
            file = self._out / f"{NAME}.{ending}"
            with explain_write_errors(file):
                write_text(file, text)
        runs = [
            self._place(row["method"], row["seed"])
            for row in summary["rows"]
            if "failed" not in row and row["seed"] == 0
        ]
        return write_comparison(runs, self._out / PAGE) if len(runs) > 1 else None

    def _place(self, method: str, seed: int) -> Path:
        return self._out / (f"{method}-{seed}" if seed else method)

    def _read(self, file: Path) -> dict[str, Any]:
        try:
            return dict(read_json(file))
        except (OSError, ValueError, TypeError) as error:
            raise FileError(f"{file} cannot be read: {reason(error)}.") from error

    def _write(self, file: Path, value: Mapping[str, Any]) -> None:
        with explain_write_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, to_json(value) + "\n")
