"""Find narrow groups: few channels between wide depthwise layers, as a mobile network's streams.

Each of their channels carries more than one of the wide layers around them does. Removing some
costs far more accuracy than removing as many multiplications from the wide layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fpgm.pruning.plan import Group
from fpgm.tracing.grouping import Structure, distinct
from fpgm.tracing.producers import rows_of
from fpgm.tracing.trace_values import ParameterInfo
from fpgm.utils.text import shorten

RATIO = 3
"""A group is narrow if the layers that write and read it have this many times its channels."""


def narrow_group_note(structure: Structure, groups: Sequence[Group]) -> str | None:
    """Advise against a uniform rate if it removes units of narrow groups.

    Args:
        structure: the model's groups and its trace.
        groups: the same groups in the plan, with what each loses.
    """
    narrow = find_narrow_groups(structure) if any(g.rate for g in groups) else set()
    losing = list(dict.fromkeys(groups[n].name for n in sorted(narrow) if groups[n].rate))
    if not losing:
        return None
    names = ", ".join(repr(name) for name in losing)
    names += "," if len(losing) == 1 else ""
    return (
        f"{shorten(losing)}: few channels between wide depthwise layers. Less accuracy is lost if "
        f"they keep all: ignore=({names}), or allocate='sensitivity'."
    )


def find_narrow_groups(structure: Structure) -> set[int]:
    """Return the places of groups that wide groups with depthwise layers write and read."""
    groups = structure.groups
    has_depthwise = [any(producer.carries for producer in group.producers) for group in groups]
    if not any(has_depthwise):
        return set()
    group_of_class = torch.full((int(structure.classes.max()) + 1,), -1)
    for number, group in enumerate(groups):
        group_of_class[group.units] = number
    group_of_label = group_of_class[structure.classes].numpy()

    def groups_of(info: ParameterInfo, role: str) -> set[int]:
        numbers = [distinct(group_of_label[rows.numpy()]) for rows in _rows(info, role)]
        return {n for found in numbers for n in found.tolist() if n >= 0}

    written: list[list[int]] = [[] for _ in groups]
    read: list[list[int]] = [[] for _ in groups]
    for info in structure.trace.parameter_infos.values():
        if not {"reads", "filter"} <= set(info.roles):
            continue
        inputs, outputs = groups_of(info, "reads"), groups_of(info, "filter")
        for own, others, wide in ((outputs, inputs, written), (inputs, outputs, read)):
            for number in own:
                wide[number] += [n for n in others if has_depthwise[n]]

    def width(number: int) -> int:  # a group may be a part of the channels, as after a shuffle
        return max(len(producer.classes) for producer in groups[number].producers)

    def ratio(numbers: Sequence[int], number: int) -> float:
        return sum(map(width, numbers)) / (len(numbers) or 1) / width(number)

    return {
        number
        for number in range(len(groups))
        if set(written[number]) != set(read[number])  # else a squeeze-and-excite's hidden layer
        and min(ratio(written[number], number), ratio(read[number], number)) >= RATIO
    }


def _rows(info: ParameterInfo, role: str) -> Iterator[Tensor]:
    """Yield the labels along the axes of a weight that have a role."""
    for field, own in zip(info.fields, info.roles, strict=True):
        if own == role:
            yield rows_of(field)
