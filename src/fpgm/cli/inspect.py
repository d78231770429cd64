"""`fpgm inspect`: show what can be pruned, what cannot and why, and where the cost is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fpgm.cli import _common as common
from fpgm.pruning.plan import Group
from fpgm.tracing.residual import Residual
from fpgm.utils.modules import modules_by_path
from fpgm.workflow.api import plan
from fpgm.workflow.original_model import build_model, example_input, shape_text


def inspect(
    model: common.Model,
    input: common.Input = None,  # noqa: A002  (the option's name)
    residual: common.Residual = "coupled",
    approximate: Annotated[
        bool,
        typer.Option(
            "--approximate", help="Include the inputs of norms over channels (LayerNorm)."
        ),
    ] = False,
    all_rows: common.All = False,
    json: common.AsJson = False,
) -> None:
    """Show a model's channel groups, frozen layers and cost, without pruning anything."""
    shape = common.input_shape(input, model)
    with common.StepBar(3) as steps:
        with steps.step("build"):
            net = build_model(model, None)
            x = example_input(shape)
        with steps.step("trace and plan"), common.explain_assumed_shape(shape, input):
            # Only removing some units shows whether the model's code works with smaller sizes.
            structure = plan(
                net, x, rate=0.5, align=1, residual=_read_policy(residual), approximate=approximate
            )
        with steps.step("count"):
            macs = macs_by_module(net, x)
    fractions = macs_fractions(structure.groups, macs)
    if json:
        common.show_json(
            {
                "model": model,
                "input": shape,
                "macs": structure.macs_before,
                "params": structure.params_before,
                "groups": [
                    {
                        "name": g.name,
                        "layers": g.layers,
                        "units": g.units,
                        "macs_share": round(fraction, 6),
                        "exact": g.exact,
                    }
                    for g, fraction in zip(structure.groups, fractions, strict=True)
                ],
                "frozen": [asdict(f) for f in structure.frozen],
            }
        )
        return
    typer.echo(
        f"{model} on {shape_text(shape)}: {structure.macs_before:,} MACs, "
        f"{structure.params_before:,} parameters\n"
    )
    most = None if all_rows else common.ROWS
    common.show_table(
        ("group", "layers", "units", "MACs", "exact"),
        [
            (
                g.name,
                str(len(g.layers)),
                str(g.units),
                f"{fraction:.1%}",
                "yes" if g.exact else "no",
            )
            for g, fraction in zip(structure.groups, fractions, strict=True)
        ],
        most=most,
    )
    common.show_frozen(structure.frozen, most)


def _read_policy(text: str) -> Residual:
    # `plan` rejects any other value with its own message.
    return text  # type: ignore[return-value]


def macs_by_module(model: nn.Module, x: Tensor) -> dict[str, int]:
    """Count multiply-accumulates of each module's own operators, without its children's.

    A layer inside an adapter wrapper is listed under its path in the original model.

    >>> macs_by_module(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.zeros(1, 3))
    {'': 0, '0': 12, '1': 8}
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x)
    counts = counter.get_flop_counts()
    root = type(model).__name__

    def total_macs(path: str) -> int:
        key = f"{root}.{path}" if path else root
        return sum(counts[key].values()) // 2 if key in counts else 0

    paths = {id(module): path for path, module in modules_by_path(model).items()}
    return {
        paths[id(module)]: total_macs(path)
        - sum(total_macs(f"{path}.{name}" if path else name) for name, _ in module.named_children())
        for path, module in model.named_modules()
        if id(module) in paths
    }


def macs_fractions(groups: Sequence[Group], macs: Mapping[str, int]) -> list[float]:
    """Compute each group's fraction of all MACs; a layer in two groups counts by units.

    >>> groups = [Group("a", ("a", "b"), 8, 8), Group("c", ("b",), 24, 24)]
    >>> macs_fractions(groups, {"a": 60, "b": 40})
    [0.7, 0.3]
    """
    total = sum(macs.values())
    units: Counter[str] = Counter()
    for group in groups:
        for layer in group.layers:
            units[layer] += group.units
    return [
        sum(macs.get(layer, 0) * group.units / units[layer] for layer in group.layers)
        / (total or 1)
        for group in groups
    ]
