"""The paper's Tables 1 to 5 and its ablations: all values, and how to reproduce each row.

A row names the recipe, or the method and its budget, that reproduces it. Values that the paper does
not give are None. Misprints are kept as printed; `docs/paper.md` lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fpgm.paper.tables.table_schema import AccuracyColumns, Column, PaperTable, Start, TableRow

_METHOD_NAMES = {"PFEC": "pfec", "CP": "cp", "SFP": "sfp", "MIL": "mil", "NISP": "nisp",
          "ThiNet": "thinet", "Rethinking": "rethinking", "FPGM-only": "fpgm",
          "FPGM-mix": "fpgm-mix"}  # fmt: skip
_EPOCHS = {"resnet": 200, "vgg16": 160, "imagenet": 100}
"""Epochs of the training recipes."""
_TUNING_EPOCHS = {"cifar10": 40, "imagenet": 20}
"""Epochs of fine-tuning for cited methods, with a learning rate of 0.001, as in PFEC."""
FLOPS_REMOVED = Column("FLOPs", "FLOPs removed, %", ".1f", deterministic=True)
FLOPS_LEFT = Column("FLOPs left", format_spec=".2E", deterministic=True)


def _label(method: str, rate: float | None) -> str:
    return method if rate is None else f"{method} {rate:.0%}"


def _key(depth: int, method: str, rate: float | None, start: Start) -> str:
    rate_suffix = "" if rate is None or method == "SFP" else f"-{rate:.0%}".replace("%", "")
    return f"resnet{depth}-{_METHOD_NAMES[method]}{rate_suffix}-{start}"


def _cited_recipe(data: str, depth: int, start: Start, epochs: int) -> dict[str, Any]:
    """Return the fields of a cited row, whose recipe trains without pruning."""
    if start == "scratch":
        recipe = {"recipe": f"{data}-resnet{depth}-scratch", "epochs": epochs}
        return {**recipe, "prunes": False, "cited": True}
    tuning = _TUNING_EPOCHS[data]
    return {
        "recipe": f"{data}-resnet{depth}-pretrained",
        "changes": (f"train.epochs={tuning}", "train.lr=0.001"),
        "epochs": tuning,
        "prunes": False,
        "cited": True,
    }


_CIFAR_BASELINES = {20: (92.20, 0.18), 32: (92.63, 0.70), 56: (93.59, 0.58), 110: (93.68, 0.32)}
_FLOPS_LEFT_VALUES = {
    (20, 42.2): 2.43e7, (20, 54.0): 1.87e7, (32, 31.2): 4.70e7, (32, 41.5): 4.03e7,
    (32, 53.2): 3.23e7, (56, 27.6): 9.09e7, (56, 52.6): 5.94e7, (110, 38.6): 1.55e8,
    (110, 40.8): 1.50e8, (110, 52.3): 1.21e8,
}  # fmt: skip
"""FLOPs left by depth and percentage removed: the paper prints the same pairs in all rows."""


def _table1_row(
    depth: int,
    method: str,
    rate: float | None,
    start: Start,
    baseline: float | None,
    accuracy: float | None,
    spread: float | None,
    drop: float | None,
    flops_removed: float,
) -> TableRow:
    """Create a row of Table 1.

    Args:
        depth: Layers of the ResNet.
        method: The method, as the paper prints it.
        rate: Fraction of filters removed; None for values that the paper cites.
        start: Whether pruning starts from trained or from random weights.
        baseline: Accuracy of the unpruned network.
        accuracy: Accuracy of the pruned network.
        spread: Its standard deviation.
        drop: The accuracy drop as printed, which may not be their difference.
        flops_removed: In percent.
    """
    name = _METHOD_NAMES[method]
    recipe: dict[str, Any]
    if rate is None:
        recipe = _cited_recipe("cifar10", depth, start, _EPOCHS["resnet"])
    else:
        kinds = {"fpgm": "scratch", "fpgm-mix": "mix", "sfp": "sfp"}
        kind = "pretrained" if start == "trained" else kinds[name]
        changes = [f"prune.rate={rate}"] if rate != 0.4 else []
        changes += ["prune.criterion=mix"] if kind == "pretrained" and name == "fpgm-mix" else []
        recipe = {"recipe": f"cifar10-resnet{depth}-{kind}", "changes": tuple(changes),
               "epochs": _EPOCHS["resnet"]}  # fmt: skip
    spreads = {} if spread is None else {"accuracy": spread}
    if baseline == _CIFAR_BASELINES[depth][0] and rate is not None:
        spreads["baseline"] = _CIFAR_BASELINES[depth][1]
    return TableRow(
        _key(depth, method, rate, start),
        (f"ResNet-{depth}", _label(method, rate), start),
        {"baseline": baseline, "accuracy": accuracy, "drop": drop,
         "FLOPs left": _FLOPS_LEFT_VALUES.get((depth, flops_removed)), "FLOPs": flops_removed},
        f"resnet{depth}",
        name,
        flops_removed / 100,
        rate,
        start,
        spread=spreads,
        **recipe,
    )  # fmt: skip


TABLE1 = PaperTable(
    "table1",
    "Pruned ResNets on CIFAR-10",
    ("network", "method", "from"),
    (Column("baseline"), Column("accuracy"), Column("drop"), FLOPS_LEFT, FLOPS_REMOVED),
    tuple(
        _table1_row(depth, method, rate, start, *values)  # type: ignore[arg-type]
        for depth, method, rate, start, values in (
            (20, "SFP", 0.3, "scratch", (92.20, 90.83, 0.31, 1.37, 42.2)),
            (20, "FPGM-only", 0.3, "scratch", (92.20, 91.09, 0.10, 1.11, 42.2)),
            (20, "FPGM-only", 0.4, "scratch", (92.20, 90.44, 0.20, 1.76, 54.0)),
            (20, "FPGM-mix", 0.4, "scratch", (92.20, 90.62, 0.17, 1.58, 54.0)),
            (32, "MIL", None, "scratch", (92.33, 90.74, None, 1.59, 31.2)),
            (32, "SFP", 0.3, "scratch", (92.63, 92.08, 0.08, 0.55, 41.5)),
            (32, "FPGM-only", 0.3, "scratch", (92.63, 92.31, 0.30, 0.32, 41.5)),
            (32, "FPGM-only", 0.4, "scratch", (92.63, 91.93, 0.03, 0.70, 53.2)),
            (32, "FPGM-mix", 0.4, "scratch", (92.63, 91.91, 0.21, 0.72, 53.2)),
            (56, "PFEC", None, "scratch", (93.04, 91.31, None, 1.75, 27.6)),
            (56, "CP", None, "scratch", (92.80, 90.90, None, 1.90, 50.0)),
            (56, "SFP", 0.4, "scratch", (93.59, 92.26, 0.31, 1.33, 52.6)),
            (56, "FPGM-only", 0.4, "scratch", (93.59, 92.93, 0.49, 0.66, 52.6)),
            (56, "FPGM-mix", 0.4, "scratch", (93.59, 92.89, 0.32, 0.70, 52.6)),
            (56, "PFEC", None, "trained", (93.04, 93.06, None, -0.02, 27.6)),
            (56, "CP", None, "trained", (92.80, 91.80, None, 1.00, 50.0)),
            (56, "FPGM-only", 0.4, "trained", (93.59, 93.49, 0.13, 0.10, 52.6)),
            (56, "FPGM-mix", 0.4, "trained", (93.59, 93.26, 0.03, 0.33, 52.6)),
            (110, "MIL", None, "scratch", (93.63, 93.44, None, 0.19, 34.2)),
            (110, "PFEC", None, "scratch", (93.53, 92.94, None, 0.61, 38.6)),
            (110, "SFP", 0.3, "scratch", (93.68, 93.38, 0.30, 0.30, 40.8)),
            (110, "FPGM-only", 0.4, "scratch", (93.68, 93.73, 0.23, -0.05, 52.3)),
            (110, "FPGM-mix", 0.4, "scratch", (93.68, 93.85, 0.11, -0.17, 52.3)),
            (110, "PFEC", None, "trained", (93.53, 93.30, None, 0.20, 38.6)),
            (110, "NISP", None, "trained", (None, None, None, 0.18, 43.8)),
            (110, "FPGM-only", 0.4, "trained", (93.68, 93.74, 0.10, -0.16, 52.3)),
        )
    ),
    (AccuracyColumns("accuracy", "baseline", "drop"),),
)

_TOP_COLUMNS = ("top-1", "pruned top-1", "top-5", "pruned top-5", "top-1 drop", "top-5 drop")


def _table2_row(
    depth: int,
    method: str,
    rate: float | None,
    start: Start,
    values: Sequence[float | None],
) -> TableRow:
    """Create a row of Table 2."""
    name = _METHOD_NAMES[method]
    saved = values[-1]
    assert saved is not None
    recipe: dict[str, Any]
    if rate is None:
        recipe = _cited_recipe("imagenet", depth, start, _EPOCHS["imagenet"])
    else:
        changes = {"fpgm": (), "fpgm-mix": ("prune.criterion=mix",),
                   "sfp": ("prune.criterion=l2", "prune.mode=soft")}  # fmt: skip
        kind = "scratch" if start == "scratch" else "pretrained"
        recipe = {"recipe": f"imagenet-resnet{depth}-{kind}", "epochs": _EPOCHS["imagenet"],
               "changes": (*changes[name], f"prune.rate={rate}")}  # fmt: skip
    return TableRow(
        _key(depth, method, rate, start),
        (f"ResNet-{depth}", _label(method, rate), start),
        dict(zip((*_TOP_COLUMNS, "FLOPs"), values, strict=True)),
        f"torchvision:resnet{depth}",
        name,
        saved / 100,
        rate,
        start,
        **recipe,
    )


TABLE2 = PaperTable(
    "table2",
    "Pruned ResNets on ILSVRC-2012",
    ("network", "method", "from"),
    (*(Column(name) for name in _TOP_COLUMNS), FLOPS_REMOVED),
    tuple(
        _table2_row(depth, method, rate, start, values)  # type: ignore[arg-type]
        for depth, method, rate, start, values in (
            (18, "MIL", None, "scratch", (69.98, 66.33, 89.24, 86.94, 3.65, 2.30, 34.6)),
            (18, "SFP", 0.3, "scratch", (70.28, 67.10, 89.63, 87.78, 3.18, 1.85, 41.8)),
            (18, "FPGM-only", 0.3, "scratch", (70.28, 67.78, 89.63, 88.01, 2.50, 1.62, 41.8)),
            (18, "FPGM-mix", 0.3, "scratch", (70.28, 67.81, 89.63, 88.11, 2.47, 1.52, 41.8)),
            (18, "FPGM-only", 0.3, "trained", (70.28, 68.34, 89.63, 88.53, 1.94, 1.10, 41.8)),
            (18, "FPGM-mix", 0.3, "trained", (70.28, 68.41, 89.63, 88.48, 1.87, 1.15, 41.8)),
            (34, "SFP", 0.3, "scratch", (73.92, 71.83, 91.62, 90.33, 2.09, 1.29, 41.1)),
            (34, "FPGM-only", 0.3, "scratch", (73.92, 71.79, 91.62, 90.70, 2.13, 0.92, 41.1)),
            (34, "FPGM-mix", 0.3, "scratch", (73.92, 72.11, 91.62, 90.69, 1.81, 0.93, 41.1)),
            (34, "PFEC", None, "trained", (73.23, 72.17, None, None, 1.06, None, 24.2)),
            (34, "FPGM-only", 0.3, "trained", (73.92, 72.54, 91.62, 91.13, 1.38, 0.49, 41.1)),
            (34, "FPGM-mix", 0.3, "trained", (73.92, 72.63, 91.62, 91.08, 1.29, 0.54, 41.1)),
            (50, "SFP", 0.3, "scratch", (76.15, 74.61, 92.87, 92.06, 1.54, 0.81, 41.8)),
            (50, "FPGM-only", 0.3, "scratch", (76.15, 75.03, 92.87, 92.40, 1.12, 0.47, 42.2)),
            (50, "FPGM-mix", 0.3, "scratch", (76.15, 74.94, 92.87, 92.39, 1.21, 0.48, 42.2)),
            (50, "FPGM-only", 0.4, "scratch", (76.15, 74.13, 92.87, 91.94, 2.02, 0.93, 53.5)),
            (50, "ThiNet", None, "trained", (72.88, 72.04, 91.14, 90.67, 0.84, 0.47, 36.7)),
            (50, "SFP", 0.3, "trained", (76.15, 62.14, 92.87, 84.60, 14.01, 8.27, 41.8)),
            (50, "NISP", None, "trained", (None, None, None, None, 0.89, None, 44.0)),
            (50, "CP", None, "trained", (None, None, 92.20, 90.80, None, 1.40, 50.0)),
            (50, "FPGM-only", 0.3, "trained", (76.15, 75.59, 92.87, 92.63, 0.56, 0.24, 42.2)),
            (50, "FPGM-mix", 0.3, "trained", (76.15, 75.50, 92.87, 92.63, 0.65, 0.21, 42.2)),
            (50, "FPGM-only", 0.4, "trained", (76.15, 74.83, 92.87, 92.32, 1.32, 0.55, 53.5)),
            (101, "Rethinking", None, "trained", (77.37, 75.27, None, None, 2.10, None, 47.0)),
            (101, "FPGM-only", 0.3, "trained", (77.37, 77.32, 93.56, 93.56, 0.05, 0.00, 42.2)),
        )
    ),
    (
        AccuracyColumns("pruned top-1", "top-1", "top-1 drop"),
        AccuracyColumns("pruned top-5", "top-5", "top-5 drop"),
    ),
)

_VGG_BASELINE = (93.58, 0.03)
TUNING_COLUMNS = ("40 epochs", "160 epochs")
_TABLE3_COLUMNS = ("baseline", "without fine-tuning", *TUNING_COLUMNS)


def _table3_row(
    name: str, method: str, results: Sequence[tuple[float, float]], *changes: str
) -> TableRow:
    """Create a row of Table 3 from values and their standard deviations."""
    values, spreads = zip(_VGG_BASELINE, *results, strict=True)
    return TableRow(
        name.lower(), (name,), dict(zip(_TABLE3_COLUMNS, values, strict=True)), "vgg16", method,
        0.342, None, "trained", "cifar10-vgg16-pretrained", changes,
        sum(int(column.split()[0]) for column in TUNING_COLUMNS),
        spread=dict(zip(_TABLE3_COLUMNS, spreads, strict=True)),
    )  # fmt: skip


TABLE3 = PaperTable(
    "table3",
    "Pruning a trained VGG-16 on CIFAR-10",
    ("method",),
    tuple(Column(name) for name in _TABLE3_COLUMNS),
    (
        _table3_row("PFEC", "l1", ((77.45, 0.03), (93.22, 0.03), (93.28, 0.07)),
                     "prune.criterion=l1"),
        _table3_row("FPGM", "fpgm", ((80.38, 0.03), (93.24, 0.01), (94.00, 0.13))),
    ),
)  # fmt: skip


def _table4_row(
    key: str,
    labels: tuple[str, str],
    method: str,
    accuracy: tuple[float, float],
    saved: float,
    rate: float | None,
    *changes: str,
) -> TableRow:
    """Create a row of Table 4.

    Args:
        key: Name of the row.
        labels: Its first two columns.
        method: A method or a criterion, as in `TableRow`.
        accuracy: Mean and standard deviation.
        saved: FLOPs removed, in percent.
        rate: Fraction of filters removed.
        changes: Changes to the recipe, as for `fpgm train --set`.
    """
    return TableRow(
        key, labels, {"baseline": _VGG_BASELINE[0], "accuracy": accuracy[0], "FLOPs": saved},
        "vgg16", method, saved / 100, rate, "scratch", "cifar10-vgg16-scratch", changes,
        _EPOCHS["vgg16"], spread={"baseline": _VGG_BASELINE[1], "accuracy": accuracy[1]},
    )  # fmt: skip


TABLE4 = PaperTable(
    "table4",
    "Pruning VGG-16 on CIFAR-10 from scratch",
    ("method", "sensitivity"),
    (Column("baseline"), Column("accuracy"), FLOPS_REMOVED),
    (
        _table4_row("pfec-sensitivity", ("PFEC", "yes"), "l1", (93.31, 0.02), 34.2, None,
                     "prune.criterion=l1", "prune.mode=hard"),
        _table4_row("fpgm-sensitivity", ("FPGM", "yes"), "fpgm", (93.54, 0.08), 34.2, None),
        _table4_row("fpgm", ("FPGM", "no"), "fpgm", (93.23, 0.13), 35.9, 0.2),
    ),
    (AccuracyColumns("accuracy", "baseline"),),
)  # fmt: skip

_TIME_COLUMNS = ("ms before", "ms after", "realised", "theory")
TABLE5 = PaperTable(
    "table5",
    "Theoretical and realised acceleration",
    ("network",),
    (
        Column("ms before"),
        Column("ms after"),
        Column("realised", "realised, %", ".1f"),
        Column("theory", "theory, %", ".1f", deterministic=True),
    ),
    tuple(
        TableRow(f"resnet{depth}", (f"ResNet-{depth} {rate:.0%}",),
            dict(zip(_TIME_COLUMNS, values, strict=True)), f"torchvision:resnet{depth}", "fpgm",
            values[-1] / 100, rate)
        for depth, rate, values in (
            (18, 0.3, (37.05, 26.77, 27.7, 41.8)),
            (34, 0.3, (63.89, 45.24, 29.2, 41.1)),
            (50, 0.4, (134.57, 83.22, 38.2, 53.5)),
            (101, 0.3, (219.70, 147.45, 32.9, 42.2)),
        )
    ),
)  # fmt: skip


def _ablation_row(
    what: str,
    value: str,
    paper: tuple[float, float] | None,
    *changes: str,
    rate: float = 0.4,
    saved: float | None = 52.3,
    **options: Any,
) -> TableRow:
    """Create a row of the ablations of a ResNet-110 at 40 % from scratch.

    Args:
        what: The setting that is varied.
        value: Its value in this row.
        paper: The printed accuracy and its standard deviation, if there are any.
        changes: Changes to the recipe, as for `fpgm train --set`.
        rate: Fraction of filters removed.
        saved: FLOPs removed, in percent; None for the unpruned network.
        options: `recipe`, and other fields of `TableRow`.
    """
    key = f"{what}-{value}".replace(" ", "-").replace("%", "")
    recipe = options.pop("recipe", "cifar10-resnet110-scratch")
    return TableRow(
        key, (what, value), {"accuracy": paper and paper[0], "FLOPs": saved}, "resnet110",
        "fpgm", 0.0 if saved is None else saved / 100, rate, recipe=recipe, changes=changes,
        epochs=_EPOCHS["resnet"], spread={"accuracy": paper[1]} if paper else {}, **options,
    )  # fmt: skip


_DEFAULT_RESULT = (93.73, 0.23)
"""The default of all ablations: interval 1, 40 %, l2 distance."""

ABLATIONS = PaperTable(
    "ablations",
    "Ablations: ResNet-110 at 40 %",
    ("what", "value"),
    (Column("accuracy"), FLOPS_REMOVED),
    (
        *(
            _ablation_row("interval", f"{epochs}", _DEFAULT_RESULT if epochs == 1 else None,
                      f"prune.interval={epochs}")
            for epochs in range(1, 11)
        ),
        _ablation_row("rate", "0%", _CIFAR_BASELINES[110], rate=0.0, saved=0.0, prunes=False),
        *(
            _ablation_row("rate", f"{rate:.0%}", _DEFAULT_RESULT if rate == 0.4 else None,
                          f"prune.rate={rate}", rate=rate, saved={0.3: 40.8, 0.4: 52.3}.get(rate))
            for rate in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
        ),
        _ablation_row("distance", "l2", _DEFAULT_RESULT, "prune.distance=l2"),
        _ablation_row("distance", "l1", (93.87, 0.22), "prune.distance=l1"),
        _ablation_row("distance", "cosine", (93.56, 0.13), "prune.distance=cosine"),
        *(
            _ablation_row("mix", f"{fraction:.0%} by norm",
                          (93.85, 0.11) if fraction == 0.75 else None,
                          f"prune.criterion=mix={fraction}")
            for fraction in (0.25, 0.5, 0.75, 1.0)
        ),
        _ablation_row("criterion", "l2 norm", None, "prune.criterion=l2"),
        _ablation_row("criterion", "random", None, "prune.criterion=random"),
        _ablation_row("from", "scratch", _DEFAULT_RESULT),
        _ablation_row("from", "trained", (93.74, 0.10), start="trained",
                  recipe="cifar10-resnet110-pretrained"),
        _ablation_row("mode", "soft", None, "prune.mode=soft"),
        _ablation_row("mode", "hard", None, "prune.mode=hard"),
    ),
    (AccuracyColumns("accuracy"),),
)  # fmt: skip


def _baseline_row(
    label: str,
    network: str,
    recipe: str,
    epochs: int,
    top1: float,
    top5: float | None = None,
    spread: float | None = None,
) -> TableRow:
    """Create the row of an unpruned network.

    Args:
        label: The network's name in the table.
        network: Its name for `load_model`.
        recipe: Name of its recipe, without "-scratch".
        epochs: Epochs of that recipe.
        top1: The paper's top-1 accuracy.
        top5: The paper's top-5 accuracy, if printed.
        spread: Standard deviation of the top-1 accuracy, if printed.
    """
    return TableRow(
        network.replace("torchvision:", "imagenet-"), (label,), {"top-1": top1, "top-5": top5},
        network, "none", 0.0, recipe=f"{recipe}-scratch", epochs=epochs, prunes=False,
        spread={} if spread is None else {"top-1": spread},
    )  # fmt: skip


BASELINES = PaperTable(
    "baselines",
    "Unpruned networks",
    ("network",),
    (Column("top-1"), Column("top-5")),
    (
        *(
            _baseline_row(f"ResNet-{depth}, CIFAR-10", f"resnet{depth}", f"cifar10-resnet{depth}",
                      _EPOCHS["resnet"], top, spread=spread)
            for depth, (top, spread) in _CIFAR_BASELINES.items()
        ),
        _baseline_row("VGG-16, CIFAR-10", "vgg16", "cifar10-vgg16", _EPOCHS["vgg16"],
                  _VGG_BASELINE[0], spread=_VGG_BASELINE[1]),
        *(
            _baseline_row(f"ResNet-{depth}, ImageNet", f"torchvision:resnet{depth}",
                      f"imagenet-resnet{depth}", _EPOCHS["imagenet"], one, five)
            for depth, one, five in ((18, 70.28, 89.63), (34, 73.92, 91.62), (50, 76.15, 92.87),
                                     (101, 77.37, 93.56))
        ),
    ),
    (AccuracyColumns("top-1"), AccuracyColumns("top-5")),
)  # fmt: skip

TABLES = {
    table.name: table for table in (TABLE1, TABLE2, TABLE3, TABLE4, TABLE5, ABLATIONS, BASELINES)
}


def baseline_row(network: str) -> TableRow:
    """Return the baseline row of a network."""
    return next(row for row in BASELINES.rows if row.network == network)
