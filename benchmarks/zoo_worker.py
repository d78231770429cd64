"""Run the tools on one model of the zoo, in a process that may hang or crash.

It builds the model again for each tool and prints every stage as it starts, with the results so
far. `zoo_run.py` sets time limits and keeps records.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from typing import Any

from zoo_cache import Record
from zoo_measure import best, clocks, measure, repeats, since
from zoo_models import Case, Subject, build
from zoo_peer import peer

MARK = "@zoo "
"""Prefix of a worker's messages; models and libraries print too."""


def work(case: Case, tools: Sequence[str], rate: float) -> None:
    """Run the tools on one model and report each stage when it starts and ends."""
    import torch

    torch.set_num_threads(1)
    for tool in tools:
        _say("build", tool)
        subject = build(case, fused_attention=tool == "ours")
        with torch.no_grad():
            subject.model(*subject.inputs)  # warm-up: kernels are chosen on the first call
        _warm_up(tool, rate)
        _run_tool(tool, subject, rate)
        del subject
        gc.collect()


def _warm_up(tool: str, rate: float) -> None:
    """Run each tool once before measuring, since its first use in a process imports and sets up."""
    import torch
    from torch import nn

    if tool in ("ours", "peer"):
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        for _ in _TOOLS[tool](Subject(net.eval(), (torch.randn(1, 3, 8, 8),)), rate):
            pass


def _run_tool(tool: str, subject: Subject, rate: float) -> None:
    try:
        for stage, result in _TOOLS[tool](subject, rate):
            _say(stage, tool, result)
    except Exception as error:  # any failure of a tool is a result, not ours to judge
        _say("failed", tool, {"status": f"error: {_one_line(error)}"})


def _say(stage: str, tool: str, result: Record | None = None) -> None:
    line = json.dumps({"stage": stage, "tool": tool, "result": result or {}})
    print(MARK + line, flush=True)


def _one_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:200]


def _ours(subject: Subject, rate: float) -> Iterator[tuple[str, Record | None]]:
    import fpgm

    yield "prune", None
    model, inputs = subject.model, subject.inputs
    for start, times in repeats():
        plan = _plan(model, inputs, rate)
        planned = clocks()
        small = fpgm.compact(model, plan)
        times.append(since(start) | {"plan_seconds": planned[0] - start[0]})
    channels = _output_channels(model)
    frozen = sum(place.channels for place in plan.frozen if not _is_output(place.reason))
    yield (
        "verify",
        {
            **best(times),
            "groups": len(plan.groups),
            "frozen_channels": frozen,
            "frozen_share": frozen / channels,
            "reasons": sorted({f.reason for f in plan.frozen if not _is_output(f.reason)})[:5],
            "macs_planned": plan.macs_removed,
            "approximate": not plan.exact,
        },
    )
    start = clocks()
    cert = fpgm.verify(model, plan, inputs)
    yield (
        "check",
        {
            "verify_seconds": clocks()[0] - start[0],
            "max_error": float(cert.max_error),
            "moved": float(cert.moved),
        },
    )
    result = measure(subject, model, small)
    if not cert.ok:
        result["status"] = "mismatch"
    yield "done", result


def _plan(model: Any, inputs: tuple[Any, ...], rate: float) -> Any:
    """Return an exact plan; if nothing can be pruned exactly, an approximate one."""
    import fpgm

    try:
        return fpgm.plan(model, inputs, rate=rate, align=1)
    except fpgm.ModelError:
        return fpgm.plan(model, inputs, rate=rate, align=1, approximate=True)


def _is_output(reason: str) -> bool:
    """Tell whether a layer is frozen only because it is the model's output."""
    return reason.startswith("the model's output")


def _output_channels(model: Any) -> int:
    """Count output channels of all convolutions and linear layers."""
    sizes = (getattr(m, "out_channels", getattr(m, "out_features", 0)) for m in model.modules())
    return sum(size for size in sizes if isinstance(size, int))


def _nothing(subject: Subject, rate: float) -> Iterator[tuple[str, Record | None]]:
    """Check only that the model, and the detector around it, run."""
    if subject.run_inside is not None:
        subject.run_inside(subject.model)
    yield "done", {"status": "ok"}


_TOOLS = {"ours": _ours, "peer": peer, "nothing": _nothing}
