"""Find the role of every parameter axis from the operators that use the parameter.

A convolution assigns roles to the axes of its own weight directly. A weight that passes through
other operators first (a transpose, a sum of two weights, weight norm) gets its roles here, from the
operators that use the result. An axis that one use writes along and another reads along has the
role `both`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fpgm.tracing.recorder import TraceRecorder
from fpgm.tracing.trace_values import ParameterInfo, ParameterSum, RoleMark
from fpgm.utils.parameter_roles import Role


def resolve_roles(trace: TraceRecorder) -> None:
    """Set the final role of every axis."""
    uses: dict[tuple[int, int], set[Role]] = {}
    open_parameters = [key for key, info in trace.parameter_infos.items() if info.open]
    sums = _Sums(trace.sums)
    for mark in trace.roles:
        marked = sums.trace(mark)
        for key in mark.parameter_ids or open_parameters:
            info = trace.parameter_infos[key]
            for i, field in enumerate(info.fields):
                if bool(torch.isin(field, marked).any()):
                    uses.setdefault((key, i), set()).add(mark.role)
    for (key, i), used_roles in uses.items():
        info = trace.parameter_infos[key]
        info.roles[i] = _combine(info.roles[i], used_roles)
    for info in trace.parameter_infos.values():
        _resolve_weight_norm(info)


class _Sums:
    """Sums of parameters, by the parameters they are computed from."""

    def __init__(self, sums: Sequence[ParameterSum]) -> None:
        self._sums = sums
        self._by_parameter: dict[int, list[int]] = {}
        self._unknown = [number for number, one in enumerate(sums) if not one.parameter_ids]
        """Sums whose parameters are not known: they may include any."""
        for number, one in enumerate(sums):
            for key in one.parameter_ids:
                self._by_parameter.setdefault(key, []).append(number)

    def trace(self, mark: RoleMark) -> Tensor:
        """Return the labels of a mark and those of the terms of every sum that has them."""
        if len(mark.parameter_ids) == 1:
            return mark.labels
        numbers = {n for key in mark.parameter_ids for n in self._by_parameter.get(key, ())}
        numbers.update(self._unknown)
        marked = mark.labels
        for number in sorted(
            numbers if mark.parameter_ids else range(len(self._sums)), reverse=True
        ):
            one = self._sums[number]
            marked = torch.cat([marked, one.part[torch.isin(one.out, marked)]])
        return marked


def _combine(own_role: Role, used_roles: set[Role]) -> Role:
    """Combine an axis's `own_role` role with the roles `used_roles` in what is computed from it."""
    writes = own_role in ("filter", "depthwise", "both") or bool(used_roles & {"filter", "both"})
    reads = own_role in ("reads", "both") or bool(used_roles & {"reads", "both"})
    if writes and reads:
        return "both"
    if own_role in ("filter", "depthwise", "reads"):
        return own_role
    if writes:
        return "filter"
    if reads:
        return "reads"
    return "shift" if "shift" in used_roles else own_role


def _resolve_weight_norm(info: ParameterInfo) -> None:
    """Mask the gain of a weight norm, not the direction, whose norm must not become zero."""
    for i, (field, role) in enumerate(zip(info.fields, info.roles, strict=True)):
        if info.gain and role == "filter":
            info.roles[i] = "gain"
        elif info.norm_axis is not None and field.shape[info.norm_axis] > 1:
            info.roles[i] = "direction" if role in ("filter", "both") else "scale"
