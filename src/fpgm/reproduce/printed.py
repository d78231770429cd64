"""The paper's Tables 1 to 5, figure by figure, and how each row can be made again.

A row names what made it there and what makes it here: a recipe, or a method with its budget. What
the paper leaves out is None. Misprints are left as printed; `docs/paper.md` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Start = Literal["scratch", "trained"]


@dataclass(frozen=True)
class Row:
    """One printed row."""

    key: str
    """By which it is asked for and kept."""
    labels: tuple[str, ...]
    printed: Mapping[str, float | None]
    """By column, as printed."""
    network: str
    method: str
    """Of `fpgm.methods`, or a criterion where a recipe prunes while training."""
    macs: float
    """Share of MACs that went, by the paper."""
    rate: float | None = None
    start: Start = "scratch"
    recipe: str | None = None
    """That makes it at full scale, if there is one."""
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """One of the paper's tables."""

    name: str
    title: str
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    unit: Mapping[str, str] = field(default_factory=dict)

    def row(self, key: str) -> Row:
        """A row by its key."""
        return next(row for row in self.rows if row.key == key)


_NAMES = {"PFEC": "pfec", "CP": "cp", "SFP": "sfp", "MIL": "mil", "NISP": "nisp",
          "ThiNet": "thinet", "Rethinking": "rethinking", "FPGM-only": "fpgm",
          "FPGM-mix": "fpgm-mix"}  # fmt: skip


def _cifar(
    depth: int,
    method: str,
    rate: float | None,
    start: Start,
    baseline: float | None,
    accuracy: float | None,
    drop: float | None,
    saved: float,
) -> Row:
    """A row of Table 1."""
    name = _NAMES[method]
    kinds = {"fpgm": "scratch" if start == "scratch" else "pretrained", "fpgm-mix": "mix",
             "sfp": "sfp"}  # fmt: skip
    recipe = None if name not in kinds or rate is None else f"cifar10-resnet{depth}-{kinds[name]}"
    changes = () if rate in (None, 0.4) else (f"prune.rate={rate}",)
    share = f"-{rate:.0%}".replace("%", "") if rate is not None and method != "SFP" else ""
    return Row(
        f"resnet{depth}-{name}{share}-{start}",
        (f"ResNet-{depth}", method if rate is None else f"{method} {rate:.0%}", start),
        {"baseline": baseline, "accuracy": accuracy, "drop": drop, "FLOPs": saved},
        f"resnet{depth}",
        name,
        saved / 100,
        rate,
        start,
        recipe,
        changes,
    )


TABLE1 = Table(
    "table1",
    "Pruned ResNets on CIFAR-10",
    ("network", "method", "from"),
    ("baseline", "accuracy", "drop", "FLOPs"),
    tuple(
        _cifar(depth, method, rate, start, *figures)  # type: ignore[arg-type]
        for depth, method, rate, start, figures in (
            (20, "SFP", 0.3, "scratch", (92.20, 90.83, 1.37, 42.2)),
            (20, "FPGM-only", 0.3, "scratch", (92.20, 91.09, 1.11, 42.2)),
            (20, "FPGM-only", 0.4, "scratch", (92.20, 90.44, 1.76, 54.0)),
            (20, "FPGM-mix", 0.4, "scratch", (92.20, 90.62, 1.58, 54.0)),
            (32, "MIL", None, "scratch", (92.33, 90.74, 1.59, 31.2)),
            (32, "SFP", 0.3, "scratch", (92.63, 92.08, 0.55, 41.5)),
            (32, "FPGM-only", 0.3, "scratch", (92.63, 92.31, 0.32, 41.5)),
            (32, "FPGM-only", 0.4, "scratch", (92.63, 91.93, 0.70, 53.2)),
            (32, "FPGM-mix", 0.4, "scratch", (92.63, 91.91, 0.72, 53.2)),
            (56, "PFEC", None, "scratch", (93.04, 91.31, 1.75, 27.6)),
            (56, "CP", None, "scratch", (92.80, 90.90, 1.90, 50.0)),
            (56, "SFP", 0.4, "scratch", (93.59, 92.26, 1.33, 52.6)),
            (56, "FPGM-only", 0.4, "scratch", (93.59, 92.93, 0.66, 52.6)),
            (56, "FPGM-mix", 0.4, "scratch", (93.59, 92.89, 0.70, 52.6)),
            (56, "PFEC", None, "trained", (93.04, 93.06, -0.02, 27.6)),
            (56, "CP", None, "trained", (92.80, 91.80, 1.00, 50.0)),
            (56, "FPGM-only", 0.4, "trained", (93.59, 93.49, 0.10, 52.6)),
            (56, "FPGM-mix", 0.4, "trained", (93.59, 93.26, 0.33, 52.6)),
            (110, "MIL", None, "scratch", (93.63, 93.44, 0.19, 34.2)),
            (110, "PFEC", None, "scratch", (93.53, 92.94, 0.61, 38.6)),
            (110, "SFP", 0.3, "scratch", (93.68, 93.38, 0.30, 40.8)),
            (110, "FPGM-only", 0.4, "scratch", (93.68, 93.73, -0.05, 52.3)),
            (110, "FPGM-mix", 0.4, "scratch", (93.68, 93.85, -0.17, 52.3)),
            (110, "PFEC", None, "trained", (93.53, 93.30, 0.20, 38.6)),
            (110, "NISP", None, "trained", (None, None, 0.18, 43.8)),
            (110, "FPGM-only", 0.4, "trained", (93.68, 93.74, -0.16, 52.3)),
        )
    ),
)


def _imagenet(
    depth: int,
    method: str,
    rate: float | None,
    start: Start,
    figures: Sequence[float | None],
) -> Row:
    """A row of Table 2."""
    name = _NAMES[method]
    columns = ("top-1", "pruned top-1", "top-5", "pruned top-5", "top-1 drop", "top-5 drop",
               "FLOPs")  # fmt: skip
    saved = figures[-1]
    assert saved is not None
    share = f"-{rate:.0%}".replace("%", "") if rate is not None and method != "SFP" else ""
    kind = "scratch" if start == "scratch" else "pretrained"
    changes = {"fpgm": (), "fpgm-mix": ("prune.criterion=mix",), "sfp": ("prune.criterion=l2",)}
    ours = name in changes and rate is not None
    rates = (f"prune.rate={rate}",) if ours else ()
    return Row(
        f"resnet{depth}-{name}{share}-{start}",
        (f"ResNet-{depth}", method if rate is None else f"{method} {rate:.0%}", start),
        dict(zip(columns, figures, strict=True)),
        f"torchvision:resnet{depth}",
        name,
        saved / 100,
        rate,
        start,
        f"imagenet-resnet{depth}-{kind}" if ours else None,
        (*changes.get(name, ()), *rates),
    )


TABLE2 = Table(
    "table2",
    "Pruned ResNets on ILSVRC-2012",
    ("network", "method", "from"),
    ("top-1", "pruned top-1", "top-5", "pruned top-5", "top-1 drop", "top-5 drop", "FLOPs"),
    tuple(
        _imagenet(depth, method, rate, start, figures)  # type: ignore[arg-type]
        for depth, method, rate, start, figures in (
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
)

_VGG3 = ("baseline", "without fine-tuning", "40 epochs", "160 epochs")
TABLE3 = Table(
    "table3",
    "Pruning a trained VGG-16 on CIFAR-10",
    ("method",),
    _VGG3,
    (
        Row("pfec", ("PFEC",), dict(zip(_VGG3, (93.58, 77.45, 93.22, 93.28), strict=True)),
            "vgg16", "l1", 0.342, None, "trained", "cifar10-vgg16-pretrained",
            ("prune.criterion=l1", "prune.mode=hard")),
        Row("fpgm", ("FPGM",), dict(zip(_VGG3, (93.58, 80.38, 93.24, 94.00), strict=True)),
            "vgg16", "fpgm", 0.342, None, "trained", "cifar10-vgg16-pretrained",
            ("prune.mode=hard",)),
    ),
)  # fmt: skip

TABLE4 = Table(
    "table4",
    "Pruning VGG-16 on CIFAR-10 from scratch",
    ("method", "sensitivity"),
    ("baseline", "accuracy", "FLOPs"),
    (
        Row("pfec-sensitivity", ("PFEC", "yes"),
            {"baseline": 93.58, "accuracy": 93.31, "FLOPs": 34.2}, "vgg16", "l1", 0.342, None,
            "scratch", "cifar10-vgg16-scratch", ("prune.criterion=l1",)),
        Row("fpgm-sensitivity", ("FPGM", "yes"),
            {"baseline": 93.58, "accuracy": 93.54, "FLOPs": 34.2}, "vgg16", "fpgm", 0.342, None,
            "scratch", "cifar10-vgg16-scratch", ()),
        Row("fpgm", ("FPGM", "no"),
            {"baseline": 93.58, "accuracy": 93.23, "FLOPs": 35.9}, "vgg16", "fpgm", 0.359, 0.2,
            "scratch", "cifar10-vgg16-scratch", ()),
    ),
)  # fmt: skip

_TIMES = ("ms before", "ms after", "realised", "theory")
TABLE5 = Table(
    "table5",
    "Theoretical and realised acceleration",
    ("network",),
    _TIMES,
    tuple(
        Row(f"resnet{depth}", (f"ResNet-{depth} {rate:.0%}",),
            dict(zip(_TIMES, figures, strict=True)), f"torchvision:resnet{depth}", "fpgm",
            figures[-1] / 100, rate)
        for depth, rate, figures in (
            (18, 0.3, (37.05, 26.77, 27.7, 41.8)),
            (34, 0.3, (63.89, 45.24, 29.2, 41.1)),
            (50, 0.4, (134.57, 83.22, 38.2, 53.5)),
            (101, 0.3, (219.70, 147.45, 32.9, 42.2)),
        )
    ),
)  # fmt: skip


def _ablation(what: str, value: str, accuracy: float | None, *changes: str, **more: Any) -> Row:
    """What the paper varies, on a ResNet-110 at 40 % from scratch."""
    key = f"{what}-{value}".replace(" ", "-").replace("%", "")
    printed = {"accuracy": accuracy}
    recipe = more.pop("recipe", "cifar10-resnet110-scratch")
    return Row(key, (what, value), printed, "resnet110", "fpgm", 0.523, 0.4,
               recipe=recipe, changes=changes, **more)  # fmt: skip


ABLATIONS = Table(
    "ablations",
    "What the paper varies: ResNet-110 at 40 %",
    ("what", "value"),
    ("accuracy",),
    (
        *(
            _ablation("interval", f"{epochs}", 93.73 if epochs == 1 else None,
                      f"prune.interval={epochs}")
            for epochs in range(1, 11)
        ),
        *(
            _ablation("rate", f"{rate:.0%}", 93.73 if rate == 0.4 else None, f"prune.rate={rate}")
            for rate in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
        ),
        _ablation("distance", "l2", 93.73, "prune.distance=l2"),
        _ablation("distance", "l1", 93.87, "prune.distance=l1"),
        _ablation("distance", "cosine", 93.56, "prune.distance=cosine"),
        *(
            _ablation("mix", f"{share:.0%} by norm", 93.85 if share == 0.75 else None,
                      f"prune.criterion=mix={share}")
            for share in (0.25, 0.5, 0.75, 1.0)
        ),
        _ablation("criterion", "l2 norm", None, "prune.criterion=l2"),
        _ablation("criterion", "random", None, "prune.criterion=random"),
        _ablation("from", "trained", 93.74, start="trained",
                  recipe="cifar10-resnet110-pretrained"),
        _ablation("mode", "soft", None, "prune.mode=soft"),
        _ablation("mode", "hard", None, "prune.mode=hard"),
    ),
)  # fmt: skip

TABLES = {table.name: table for table in (TABLE1, TABLE2, TABLE3, TABLE4, TABLE5, ABLATIONS)}
