"""Write the page of `paper.py`: the results as tables, and in words where FPGM wins and loses."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paper_flops
from fpgm.paper.baselines.registry import METHODS
from fpgm.paper.flops import flops_rows
from fpgm.paper.tables import TABLES
from fpgm.paper.tables.full_scale import MACS_PER_SECOND, MIN_EPOCH_SECONDS, gpu_hours, row_command
from fpgm.paper.tables.quick_scale import LONG_TUNING_FACTOR
from fpgm.utils.tables import format_mean_std, markdown_table

LEVEL = 0.005
"""Closer accuracies count as equal: on 10,000 images, two standard errors of an accuracy of 90 %
are 0.6 points, and those of a difference on the same images are somewhat smaller."""
TRAINED = 0.01
"""The same after training, which also depends on the order of images."""
FIGURES = ("once", "recovered", "tuned")
BESIDE = {"sfp": "fpgm-soft"}
"""The variant of FPGM that a method is compared with, if not the plain one."""


def page(result: dict[str, Any]) -> Iterator[str]:
    yield "# Every method, the same network, the same MACs"
    yield ""
    yield f"    {result['command']}"
    yield ""
    yield (
        "Accuracy on CIFAR-10's 10,000 test images. *One-shot*: as the method leaves the "
        "network. *Recovered*: the method's selection of units with weights from least squares on "
        f"{result['images']} unlabeled images. *Fine-tuned*: from *one-shot*, {result['steps']} "
        "steps of SGD with batch size 128, which is all the training a method gets; one that "
        "trains before it prunes has half of them left. Every convolution is pruned separately "
        "(`independent`), except the classifier, all to the MACs that whole filters leave; the "
        "paper's number, with fractional filters, is in parentheses. Mean and standard deviation "
        "over the number of seeds in the last column. Seeds determine the order of images, and "
        "the selection of methods that use random numbers or train first. A number without a "
        "deviation is the same for all seeds. Seconds are for selection and any training before "
        "it, on one thread of a machine with other load. Missing cells were not measured. "
        "Everything takes about six hours on two cores and needs trained weights (set "
        "FPGM_WEIGHTS to their folder, [where to get them](trained.py)) and CIFAR-10 (`fpgm data "
        "cifar10`). FPGM removes the same fraction of every layer here; [recovery](recovery.md) "
        "reaches higher accuracy with rates by sensitivity and more images."
    )
    for setting in result["settings"]:
        yield from _section(setting)
    yield from _verdict(result["settings"])
    yield from _mil(result["mil"])
    for name, item in result["tables"].items():
        yield from _vgg(name, item, result["steps"])
    yield from _flops()
    yield from _commands()


def _section(setting: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"## {setting['title']}"
    yield ""
    kept = setting["original"]
    first = "missing" if kept is None else f"{kept['accuracy']:.2%}"
    yield (
        f"Target for all methods: {setting['macs']:.1%} of MACs removed (the paper prints "
        f"{setting['printed']}); original {first}."
    )
    yield ""
    rows = []
    for name in METHODS:
        item = [row for row in setting["rows"] if row["method"] == name]
        if not item:
            rows.append((METHODS[name].title, "missing", "", "", "", "", "0"))
        elif any("failed" in row for row in item):
            rows.append((METHODS[name].title, "failed", item[0]["failed"], "", "", "", ""))
        else:
            fractions = [_share(item, key) for key in FIGURES]
            removed = statistics.mean(row["macs_removed"] for row in item)
            seconds = statistics.mean(row["seconds"] for row in item)
            rows.append(
                (
                    METHODS[name].title,
                    f"{removed:.1%}",
                    *fractions,
                    f"{seconds:.0f}",
                    str(len(item)),
                )
            )
    header = ("method", "MACs removed", "one-shot", "recovered", "fine-tuned", "seconds", "seeds")
    yield markdown_table(header, rows)
    for name in METHODS:
        output = [
            row["notes"] for row in setting["rows"] if row["method"] == name and "notes" in row
        ]
        if notes := dict.fromkeys(note.rstrip(".") for item in output for note in item):
            yield ""
            yield f"Notes on {METHODS[name].title}, all seeds: {'; '.join(notes)}."


def _verdict(settings: list[dict[str, Any]]) -> Iterator[str]:
    """Compare FPGM with each of the others, in words."""
    yield ""
    yield "## Where FPGM wins, ties and loses"
    yield ""
    yield (
        f"On par means within {100 * LEVEL:g} points, after training within {100 * TRAINED:g}. MIL "
        "removes nothing and is not listed, nor are FPGM's own variants and methods that give "
        "exactly the same network as another. SFP, which zeroes during training, is compared with "
        "the variant of FPGM that does the same."
    )
    yield ""
    rows = []
    for setting in settings:
        means = {name: _means(setting, name) for name in _others(setting)}
        for key, title, near in (
            ("recovered", "recovered", LEVEL),
            ("tuned", "fine-tuned", TRAINED),
        ):
            ahead, level, behind = [], [], []
            for name, others in means.items():
                item = _means(setting, BESIDE.get(name, "fpgm")).get(key)
                if item is None or key not in others:
                    continue
                more = item - others[key]
                side = ahead if more > near else behind if more < -near else level
                side.append(METHODS[name].title)
            chance = means["random"].get(key, 0.0) - near
            poor = [METHODS[name].title for name in METHODS
                    if _means(setting, name).get(key, 1.0) < chance]  # fmt: skip
            sides = map("; ".join, (ahead, level, behind, poor))
            rows.append((setting["title"], title, *sides))
    header = ("network", "", "FPGM is ahead of", "on par with", "behind", "random is ahead of")
    yield markdown_table(header, rows, 6)


def _others(setting: dict[str, Any]) -> Iterator[str]:
    """List the methods that FPGM is compared with."""
    recorded: list[list[Any]] = []
    for name in METHODS:
        item = [row for row in setting["rows"] if row["method"] == name and "failed" not in row]
        figures = [(row["seed"], *(row[key] for key in FIGURES)) for row in item]
        if not name.startswith(("fpgm", "mil")) and figures not in recorded:
            recorded.append(figures)
            yield name


def _mil(item: dict[str, Any]) -> Iterator[str]:
    """Describe MIL's saving after training from random weights."""
    name = item["table"]
    yield ""
    yield "## MIL from random weights"
    yield ""
    yield (
        "Next to a trained network, MIL's cheap layers produce hardly any zeros, so its rows "
        "above save nothing. The authors train the whole network from random weights for hundreds "
        "of epochs. Here are a few epochs, the first at a tenth of the learning rate: "
        f"`{item['command']}`, which also trains the baseline, the network without cheap layers. "
        "The saving is theoretical."
    )
    yield ""
    yield markdown_table(item["header"], item["lines"], len(TABLES[name].labels))


def _share(rows: list[dict[str, Any]], key: str) -> str:
    """Format mean and deviation; without deviation if all seeds agree."""
    known = [row[key] for row in rows if row[key] is not None]
    return format_mean_std(known[:1] if len(set(known)) == 1 else known)


def _means(setting: dict[str, Any], method: str) -> dict[str, float]:
    item = [row for row in setting["rows"] if row["method"] == method and "failed" not in row]
    by_key = {
        key: [row[key] for row in item if row[key] is not None] for key in ("recovered", "tuned")
    }
    return {key: statistics.mean(values) for key, values in by_key.items() if values}


def _vgg(name: str, item: dict[str, Any], steps: int) -> Iterator[str]:
    """Return a table of VGG-16, as `fpgm reproduce` shows it."""
    how = {
        "table3": f"; fine-tuning for {steps} and {LONG_TUNING_FACTOR * steps} steps replaces the "
        "paper's 40 and 160 epochs. Without fine-tuning both methods leave it near chance "
        "accuracy; whether its narrow width or its short training is the reason was not measured",
        "table4": " and pruned after each; the baseline is trained for as many",
    }
    yield ""
    yield f"## {TABLES[name].title} (Table {name[-1]})"
    yield ""
    yield (
        f"`{item['command']}`: VGG-16 with a quarter of its width, trained for {item['epochs']} "
        f"epochs{how[name]}. The baseline is one network for all seeds. The paper's numbers are "
        "for the full width."
    )
    yield ""
    yield markdown_table(item["header"], item["lines"], len(TABLES[name].labels))


def _flops() -> Iterator[str]:
    yield ""
    yield "## The FLOPs columns"
    yield ""
    yield (
        "`python benchmarks/paper_flops.py`: the paper's numbers; the same counted like the "
        "authors' script, with fractional filters and without the layers it omits; and the whole "
        "network with fractional and with whole filters. See [reproducing the "
        "paper](../docs/paper.md)."
    )
    yield ""
    yield markdown_table(paper_flops.HEADER, [paper_flops.cells(row) for row in flops_rows()], 3)


def _commands() -> Iterator[str]:
    yield ""
    yield "## At the paper's scale"
    yield ""
    yield (
        "One command per row; without `accelerate launch -m` it runs on one GPU. Hours are "
        "estimated for one V100 in float32: three times the forward pass at "
        f"{MACS_PER_SECOND / 1e12:.1f}e12 multiply-accumulates per second, and at least "
        f"{MIN_EPOCH_SECONDS:g} s per epoch of CIFAR-10. A row from scratch also trains its "
        "baseline, once for all rows of a network (`fpgm reproduce TABLE --list` prints "
        "the same). WEIGHTS is your folder of trained weights "
        "(cifar10_resnet56.safetensors and so on); missing files are taken from the baselines "
        "trained in the same --out. IMAGENET contains train and val. None of these was run here."
    )
    yield ""
    rows = [
        (name, row.key, f"`{row_command(table, row, Path('runs/reproduce'))}`",
         f"{gpu_hours(table, row):.1f}")
        for name, table in TABLES.items()
        for row in table.rows
    ]  # fmt: skip
    yield markdown_table(("table", "row", "command", "GPU hours"), rows, 3)
