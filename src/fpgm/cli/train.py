"""`fpgm train`: run a recipe, or resume its run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn, TextColumn, TimeRemainingColumn

from fpgm.cli import _common as common
from fpgm.errors import RequestError
from fpgm.training.recipes import SHIPPED
from fpgm.utils.distributed import is_main_process
from fpgm.utils.text import did_you_mean


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="A TOML file, or the name of a shipped recipe."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write to this folder, or resume its run.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Replace a value, such as train.epochs=3."
        ),
    ] = None,
    allow_code: Annotated[
        bool,
        typer.Option("--allow-code", help="Run the Python code that the recipe names."),
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the shipped recipes.")] = False,
    json: common.AsJson = False,
) -> None:
    """Train and prune with a recipe, or resume the run in --out."""
    if list_:
        _show_recipes(json)
        return
    if recipe is None:
        raise RequestError("Give a recipe: a TOML file, or a name from fpgm train --list.")
    file = find_recipe(recipe)
    engine = _import_trainer()
    recipe_value = engine.read_recipe(file, change or [], allow_code=allow_code)
    folder = out or Path("runs") / file.stem
    try:
        with TrainingBar() as bars:
            outcome = engine.train(recipe_value, folder, bars)
        engine.destroy_process_group()
    except KeyboardInterrupt:
        if is_main_process():
            message = (
                "fpgm: stopped; the same command resumes from the last checkpoint, if there is one."
            )
            typer.echo(message, err=True)
        raise typer.Exit(130) from None
    if not is_main_process():
        return  # only the first process prints
    if json:
        common.show_json({"folder": str(folder), **outcome.results})
    else:
        _show(folder, outcome.results)


def find_recipe(name: str) -> Path:
    """Find a recipe: a file, or a shipped recipe by its name."""
    path = Path(name)
    if path.suffix or path.is_file():
        return path
    shipped = SHIPPED / f"{name}.toml"
    if not shipped.is_file():
        hint = did_you_mean(name, [file.stem for file in SHIPPED.glob("[!_]*.toml")])
        raise RequestError(
            f"There is no recipe {name!r}: {hint or 'see fpgm train --list, or give a file.'}"
        )
    return shipped


class TrainingBar(common.ProgressBars):
    """One bar over all steps, and one line per epoch."""

    def __init__(self) -> None:
        super().__init__(
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("", total=None, figures="")
        self._epochs = self._steps = 1

    def show_phase(self, doing: str, done: int, total: int) -> None:
        """Show what runs before training starts."""
        self._progress.update(self._task, description=doing, completed=done, total=total)
        self.log(f"{doing} ({done}/{total})")

    def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
        """Show that training starts, or resumes after some epochs."""
        self._steps = steps
        self._epochs = epochs
        self._progress.update(self._task, total=epochs * steps, completed=epoch * steps)
        line = f"resuming after epoch {epoch} of {epochs}" if epoch else f"training {epochs} epochs"
        self.terminal.print(f"{line}, {steps} steps each", highlight=False)

    def on_step(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics after a step."""
        self._progress.update(
            self._task,
            description=f"epoch {epoch + 1}/{self._epochs}",
            completed=epoch * self._steps + step,
            figures=f"loss {metrics['loss']:.3f}, {metrics['accuracy']:.1%}, "
            f"{metrics['images_per_second']:,.0f} images/s",
        )

    def on_epoch_end(self, metrics: dict[str, Any]) -> None:
        """Print the metrics of an epoch."""
        self.terminal.print(epoch_line(metrics), highlight=False, soft_wrap=True)


def epoch_line(metrics: dict[str, Any]) -> str:
    """Format the metrics of an epoch in one line.

    >>> epoch_line({"epoch": 3, "train_loss": 0.5, "test_accuracy": 0.9, "seconds": 2.0})
    'epoch 3: loss 0.500, test 90.00%, 2.0 s'
    """
    parts = [f"loss {metrics['train_loss']:.3f}", f"test {metrics['test_accuracy']:.2%}"]
    if "pruned_accuracy" in metrics:
        parts.append(f"pruned {metrics['pruned_accuracy']:.2%}")
    if metrics.get("zeroed"):
        parts.append(
            f"{metrics['zeroed']} of {metrics['units']} units zeroed ({metrics['changed']} "
            f"added or removed), {metrics['regrown']} had regrown"
        )
    if "average_accuracy" in metrics:
        parts.append(f"average {metrics['average_accuracy']:.2%}")
    return f"epoch {metrics['epoch']}: {', '.join(parts)}, {metrics['seconds']} s"


def _import_trainer() -> Any:
    """Import the trainer, which needs extra packages."""
    with common.explain_missing_extra("train", "fpgm train"):
        import fpgm.training.trainer
    return fpgm.training


def _show(folder: Path, results: dict[str, Any]) -> None:
    rows = [("epochs", str(results["epochs"])), ("accuracy", f"{results['accuracy']:.2%}")]
    if "macs_after" in results:
        rows += [
            ("masked accuracy", f"{results['masked_accuracy']:.2%}"),
            ("MACs", f"{results['macs_before']:,} → {results['macs_after']:,}"),
            ("parameters", f"{results['params_before']:,} → {results['params_after']:,}"),
            ("largest difference, masked and compact", f"{results['max_error']:.1e}"),
        ]
    common.show_table(("", "result"), rows)
    typer.echo(f"\nWritten to {folder}: {', '.join(results['files'])}")


def _show_recipes(json: bool) -> None:
    files = sorted(SHIPPED.glob("[!_]*.toml"))
    rows = [(file.stem, _first_line(file)) for file in files]
    if json:
        common.show_json([{"name": name, "about": about} for name, about in rows])
    else:
        common.show_table(("recipe", "about"), rows, left=2)


def _first_line(file: Path) -> str:
    return file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ").rstrip()
