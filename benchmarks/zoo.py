"""Prune the whole zoo at rate 0.3, verify every result, and run Torch-Pruning beside it.

    python benchmarks/zoo.py                          # everything, resumes where it stopped
    python benchmarks/zoo.py --only 'resnet*'         # a part of it
    python benchmarks/zoo.py --suite timm --no-peer   # ours alone
    python benchmarks/zoo.py --list --check           # does every model build and run?

Each model gets a process of its own, one thread, both tools back to back on fresh models from the
same seed. Results go line by line to `benchmarks/.cache/zoo.jsonl`; at the end `zoo.json` and
`zoo.md` are written from it. Which models, and how they are built, is in `zoo_models.py`.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import hashlib
import importlib.metadata
import json
import os
import platform
import queue
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zoo_models import SUITES, Case, Subject, all_cases, build

HERE = Path(__file__).resolve().parent
CACHE = HERE / ".cache" / "zoo.jsonl"
SOURCE = HERE.parent / "src" / "fpgm"

MARK = "@zoo "
"""Opens the lines of a worker that are meant for us; models and libraries print too."""

HUGE = 8
"""A model marked huge gets this many times the usual limit, for our own tool only."""

TOLERANCE = 1e-3
"""Relative error above which Torch-Pruning's result counts as computing something else."""

Record = dict[str, Any]


# --- the worker: one model, one process ---------------------------------------------------------


def work(case: Case, tools: Sequence[str], rate: float) -> None:
    """Run the tools on one model and report each stage as it starts and as it ends."""
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
    """What a tool imports and sets up on its first use in a process is not the model's cost."""
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


def _ours(subject: Subject, rate: float) -> Iterator[tuple[str, Record | None]]:
    import fpgm

    yield "prune", None
    model, inputs = subject.model, subject.inputs
    for start, times in _repeats():
        plan = _plan(model, inputs, rate)
        planned = _clocks()
        small = fpgm.compact(model, plan)
        times.append(_since(start) | {"plan_seconds": planned[0] - start[0]})
    channels = _output_channels(model)
    frozen = sum(place.channels for place in plan.frozen if not _is_output(place.reason))
    yield (
        "verify",
        {
            **_best(times),
            "groups": len(plan.groups),
            "frozen_channels": frozen,
            "frozen_share": frozen / channels,
            "reasons": sorted({f.reason for f in plan.frozen if not _is_output(f.reason)})[:5],
            "macs_planned": plan.macs_removed,
            "approximate": not plan.exact,
        },
    )
    start = _clocks()
    cert = fpgm.verify(model, plan, inputs)
    yield (
        "check",
        {
            "verify_seconds": _clocks()[0] - start[0],
            "max_error": float(cert.max_error),
            "moved": float(cert.moved),
        },
    )
    result = _measure(subject, model, small)
    if not cert.ok:
        result["status"] = "mismatch"
    yield "done", result


def _plan(model: Any, inputs: tuple[Any, ...], rate: float) -> Any:
    """An exact plan; where nothing can go exactly, one that accepts norms over fewer channels."""
    import fpgm

    try:
        return fpgm.plan(model, inputs, rate=rate, align=1)
    except fpgm.ModelError:
        return fpgm.plan(model, inputs, rate=rate, align=1, approximate=True)


def _clocks() -> tuple[float, float]:
    """Processor time, which other work on the machine does not stretch, and wall time."""
    return time.process_time(), time.perf_counter()


def _repeats() -> Iterator[tuple[tuple[float, float], list[Record]]]:
    """Up to three runs of what is quick: the first in a process also warms caches."""
    times: list[Record] = []
    while len(times) < 3 and sum(t["wall_seconds"] for t in times) < 2:
        yield _clocks(), times


def _since(start: tuple[float, float]) -> Record:
    now = _clocks()
    return {"seconds": now[0] - start[0], "wall_seconds": now[1] - start[1]}


def _best(times: Sequence[Record]) -> Record:
    return min(times, key=lambda t: t["seconds"])


def _is_output(reason: str) -> bool:
    """A model's outputs stay as they are by nature; that does not count as frozen."""
    return reason.startswith("the model's output")


def _output_channels(model: Any) -> int:
    """Output channels of all convolutions and linear layers."""
    sizes = (getattr(m, "out_channels", getattr(m, "out_features", 0)) for m in model.modules())
    return sum(size for size in sizes if isinstance(size, int))


def _peer(subject: Subject, rate: float) -> Iterator[tuple[str, Record | None]]:
    import copy

    import torch_pruning as tp

    original, inputs = subject.model, subject.inputs
    yield "prune", None
    for _, times in _repeats():
        model = copy.deepcopy(original)  # it prunes in place
        ignored = output_layers(model, inputs)
        attention = {m: q for m in model.modules() if (q := _qkv(m)) is not None}
        heads = {qkv: m.num_heads for m, qkv in attention.items()}
        start = _clocks()
        pruner = tp.pruner.BasePruner(
            model,
            inputs[0] if len(inputs) == 1 else inputs,
            importance=tp.importance.FPGMImportance(p=2),
            pruning_ratio=rate,
            ignored_layers=ignored,
            num_heads=heads,
        )
        groups = []
        for group in pruner.step(interactive=True):  # what step() does, with the groups to look at
            group.prune()
            groups.append(group)
        times.append(_since(start))
    for module, qkv in attention.items():  # its timm example asks users to do this by hand
        module.num_heads = heads[qkv]
        module.head_dim = qkv.out_features // (3 * module.num_heads)
        if hasattr(module, "attn_dim"):  # newer than the example
            module.attn_dim = module.num_heads * module.head_dim
    yield "check", _best(times) | {"groups": len(groups)}
    result = _measure(subject, original, model)
    if result["status"] == "ok":
        error = _peer_error(original, model, groups, inputs)
        result["max_error"] = error
        if error is not None and not error <= TOLERANCE:
            result["status"] = "mismatch"
    yield "done", result


def _nothing(subject: Subject, rate: float) -> Iterator[tuple[str, Record | None]]:
    """Only checks that the model, and the detector around it, run as they are."""
    if subject.run_inside is not None:
        subject.run_inside(subject.model)
    yield "done", {"status": "ok"}


_TOOLS = {"ours": _ours, "peer": _peer, "nothing": _nothing}


def _measure(subject: Subject, before: Any, after: Any) -> Record:
    """Whether the pruned model runs with the same output shapes, and how much smaller it is."""
    shapes, macs = _shapes_and_macs(before, subject.inputs)
    new_shapes, new_macs = _shapes_and_macs(after, subject.inputs)
    result: Record = {
        "status": "ok",
        "macs": macs,
        "macs_removed": 1 - new_macs / macs,
        "params_removed": 1 - _parameters(after) / _parameters(before),
    }
    if shapes != new_shapes:
        result["status"] = "output shape changed"
    elif not result["params_removed"] > 0:
        result["status"] = "nothing removed"
    elif subject.run_inside is not None:
        subject.run_inside(after)
    return result


def _shapes_and_macs(model: Any, inputs: tuple[Any, ...]) -> tuple[list[Any], int]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model.requires_grad_(False)  # the counter's hooks expect gradients of parameters passed on
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        output = model(*inputs)
    return [tuple(t.shape) for t in _tensors(output)], counter.get_total_flops() // 2


def _tensors(output: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def _qkv(module: Any) -> Any:
    """The fused projection of a timm-style attention module, which Torch-Pruning must be told."""
    import torch

    qkv = getattr(module, "qkv", None)
    fused = isinstance(qkv, torch.nn.Linear) and isinstance(getattr(module, "num_heads", 0), int)
    return qkv if fused and hasattr(module, "num_heads") else None


def output_layers(model: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Layers whose channels are the model's output channels: what the peer must leave alone.

    Walks the autograd graph back from the outputs to the first convolution or linear layer on
    every path; a grouped one passes its channels through, so the walk goes on behind it.
    """
    import torch
    from torch import nn

    made_by: dict[Any, nn.Module] = {}
    kinds = (nn.modules.conv._ConvNd, nn.Linear)

    def remember(module: nn.Module, _: Any, output: Any) -> None:
        made_by[output.grad_fn] = module

    hooks = [m.register_forward_hook(remember) for m in model.modules() if isinstance(m, kinds)]
    with torch.enable_grad():
        pending = [t.grad_fn for t in _tensors(model(*inputs))]
    for hook in hooks:
        hook.remove()
    found: list[nn.Module] = []
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        layer = made_by.get(node)
        if layer is not None and layer not in found:
            found.append(layer)
        if layer is None or getattr(layer, "groups", 1) > 1:
            pending += [parent for parent, _ in node.next_functions]
    return found


def _peer_error(
    original: Any, pruned: Any, groups: Iterable[Any], inputs: tuple[Any, ...]
) -> float | None:
    """Relative distance between Torch-Pruning's result and the original with the same units cut.

    In the reference every reader ignores the inputs that went, by the tool's own account of what
    went. None where that account cannot be replayed: norms over channels (approximate by nature)
    and layers other than convolution and linear.
    """
    import torch
    from torch import nn
    from torch_pruning.pruner import function

    reads = {function.prune_conv_in_channels, function.prune_linear_in_channels}
    plain = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._BatchNorm, nn.PReLU)
    twins = dict(zip(pruned.modules(), original.modules(), strict=True))
    left: dict[Any, list[int]] = {}
    for dep, indices in (item for group in groups for item in group):
        layer = dep.target.module
        if layer not in twins:  # an operation without weights of its own
            if isinstance(layer, nn.Parameter):
                return None
            continue
        twin = twins[layer]
        if not isinstance(twin, plain) and any(True for _ in twin.parameters(recurse=False)):
            return None
        if dep.handler in reads:
            dim = 0 if getattr(twin, "transposed", False) else 1
            if getattr(twin, "groups", 1) > 1:
                return None
            kept = left.setdefault(layer, list(range(twin.weight.shape[dim])))
            gone = [kept[i] for i in indices]
            left[layer] = sorted(set(kept) - set(gone))
            with torch.no_grad():
                twin.weight.index_fill_(dim, torch.tensor(gone), 0.0)
    with torch.no_grad():
        pairs = list(zip(_tensors(original(*inputs)), _tensors(pruned(*inputs)), strict=True))
    return max(float((a - b).norm() / a.norm().clamp_min(1e-12)) for a, b in pairs)


def _one_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:200]


# --- the parent: one worker after another, with limits ------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Seconds a tool may take in one stage of its work on a model of the usual size."""

    timeout_seconds: float
    rate: float

    def of(self, case: Case, tool: str, stage: str) -> float:
        """The limit of one stage; building and checking are not what is measured, so 5 times."""
        scale = HUGE if case.huge and (tool == "ours" or stage != "prune") else 1
        return self.timeout_seconds * scale * (1 if stage == "prune" else 5)


def run_case(case: Case, tools: Sequence[str], limits: Limits) -> list[Record]:
    """Both tools on one model; a tool that hangs or dies does not cost the other its turn."""
    records: list[Record] = []
    rest = list(tools)
    while rest:
        done = _run_worker(case, rest, limits)
        records += done
        rest = rest[len(done) :]
    return records


def _run_worker(case: Case, tools: Sequence[str], limits: Limits) -> list[Record]:
    """Records of the tools that got their turn: at least one."""
    run = uuid.uuid4().hex[:12]
    command = [sys.executable, __file__, "--worker", json.dumps(asdict(case))]
    command += ["--tools", ",".join(tools), "--rate", str(limits.rate)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    records: dict[str, Record] = {}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **threads, "PYTHONWARNINGS": "ignore"},
        )
        messages = _messages(process)
        tool, stage = tools[0], "build"
        records[tool] = {"key": case.key, "tool": tool, "run": run}
        while True:
            limit = limits.of(case, tool, stage)
            try:
                message = messages.get(timeout=limit)
            except queue.Empty:
                records[tool]["status"] = f"timeout in {stage} ({limit:.0f} s)"
                break
            if message is None:
                break
            tool, stage = message["tool"], message["stage"]
            records.setdefault(tool, {"key": case.key, "tool": tool, "run": run})
            records[tool].update(message["result"])
        process.kill()
        code = process.wait()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or [""])[-1][:200]
    records[tool].setdefault("status", f"died in {stage} (code {code}): {last}")
    return [_stamped(record) for record in records.values()]


def _messages(process: subprocess.Popen[str]) -> queue.Queue[Record | None]:
    """What a worker says, as it says it; None at its end."""
    messages: queue.Queue[Record | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                messages.put(json.loads(line.removeprefix(MARK)))
        messages.put(None)

    threading.Thread(target=read, daemon=True).start()
    return messages


def _stamped(record: Record) -> Record:
    extra = {"source": source_digest()} if record["tool"] == "ours" else {}
    return record | extra | {"time": time.strftime("%Y-%m-%dT%H:%M:%S")}


def source_digest() -> str:
    """Tells results of one state of the package from those of another."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        digest.update(path.relative_to(SOURCE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def read_cache(path: Path = CACHE) -> dict[tuple[str, str], Record]:
    """The latest record of every (model, tool)."""
    if not path.exists():
        return {}
    lines = (json.loads(line) for line in path.read_text().splitlines() if line.strip())
    return {(record["key"], record["tool"]): record for record in lines}


def append_cache(records: Iterable[Record], path: Path = CACHE) -> None:
    """Add records, keeping the whole directory out of version control."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / ".gitignore").write_text("*\n")
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def is_pending(
    case: Case,
    tools: Sequence[str],
    cache: Mapping[tuple[str, str], Record],
    options: argparse.Namespace,
) -> bool:
    """Whether a model has to run (again); results of an older source count only if accepted."""
    records = [cache.get((case.key, tool)) for tool in tools]
    if any(record is None for record in records):
        return True
    ours = cache.get((case.key, "ours"))
    if ours is None:
        return False
    if options.redo_failed and ours["status"] != "ok":
        return True
    return not options.accept_stale and ours.get("source") != source_digest()


# --- the report ---------------------------------------------------------------------------------


def write_report(cases: Sequence[Case], command: str, rate: float) -> None:
    """`zoo.json` for machines, `zoo.md` for people, both from the cache."""
    import fpgm

    cache = read_cache()
    rows = [
        {
            "model": case.name,
            "suite": case.suite,
            "kind": case.kind,
            "family": case.family,
            "input": "x".join(map(str, case.shape)),
            "ours": _public(cache.get((case.key, "ours"))),
            "peer": _public(cache.get((case.key, "peer"))),
            "ratio": _ratio(cache.get((case.key, "ours")), cache.get((case.key, "peer"))),
        }
        for case in cases
        if (case.key, "ours") in cache or (case.key, "peer") in cache
    ]
    about = {
        "command": command,
        "rate": rate,
        "align": 1,
        "threads": 1,
        "versions": {
            "python": platform.python_version(),
            "fpgm": fpgm.__version__,
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    text = json.dumps({"about": about, "rows": rows}, indent=1)
    (HERE / "zoo.json").write_text(text + "\n")
    (HERE / "zoo.md").write_text("\n".join(_markdown(about, rows)) + "\n")


_PACKAGES = ("torch", "torchvision", "timm", "torch-pruning")


def _public(record: Record | None) -> Record | None:
    if record is None:
        return None
    shown = {k: v for k, v in record.items() if k not in {"key", "tool", "run", "source", "time"}}
    return {k: _rounded(v) for k, v in shown.items()}


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _ratio(ours: Record | None, peer: Record | None) -> float | None:
    """How many times faster ours is; only where both prune the model, in the same process."""
    if ours is None or peer is None or ours["run"] != peer["run"]:
        return None
    if ours["status"] != "ok" or peer["status"] not in {"ok", "mismatch"}:
        return None
    return round(float(peer["seconds"] / ours["seconds"]), 2)


def _markdown(about: Record, rows: Sequence[Record]) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    yield "# The zoo: every model pruned and verified"
    yield ""
    yield f"Made by `{about['command']}` with {versions} on {about['machine']}."
    yield (
        f"Rate {about['rate']}, align {about['align']}, one thread, random weights with randomised "
        "norm statistics and layer scales. Beside it Torch-Pruning with its `FPGMImportance(p=2)` "
        "and `BasePruner`, output layers ignored, same seed, same process. Seconds: processor "
        "time of plan + compact for ours, of build + step for the peer, the best of up to three runs "
        "of each in one process. MACs are counted by "
        "`torch.utils.flop_counter` on the pruned models. Frozen: share of channels left alone for "
        "a reason other than being a model's output. `mismatch` means that the model runs but "
        "computes something else than the original without the removed units; it cannot be told "
        "for the peer where units go through a norm over channels."
    )
    yield ""
    yield "## Summary"
    yield ""
    yield from _summary(rows)
    yield "## Every model"
    yield ""
    yield (
        "| model | kind | input | ours | MACs − | params − | frozen | s | error | moved "
        "| peer | MACs − | s | peer s ÷ ours |"
    )
    yield "|" + "---|" * 14
    yield from (_row(row) for row in rows)


def _summary(rows: Sequence[Record]) -> Iterator[str]:
    yield "| | models | ours ok | mismatch | fails | peer ok | mismatch | times out | fails |"
    yield "|---|" + "--:|" * 8
    for suite, kind in dict.fromkeys((row["suite"], row["kind"]) for row in rows):
        part = [row for row in rows if (row["suite"], row["kind"]) == (suite, kind)]
        yield _counts(f"{suite} {kind}", part)
    yield _counts("**all**", rows)
    yield ""
    ratios = sorted((row["ratio"], row["model"]) for row in rows if row["ratio"] is not None)
    if ratios:
        values = [ratio for ratio, _ in ratios]
        yield (
            f"Speed (models both prune: {len(values)}): Torch-Pruning takes a median of "
            f"**{statistics.median(values):.1f}×** our time (least {values[0]:.1f}×: "
            f"{ratios[0][1]}; most {values[-1]:.1f}×: {ratios[-1][1]})."
        )
        slower = [f"{name} ({ratio:.2f}×)" for ratio, name in ratios if ratio < 1]
        yield f"Models where we are slower: {', '.join(slower) or 'none'}."
        yield ""
    good = [row for row in rows if (row["ours"] or {}).get("status") == "ok"]
    whole = [row for row in good if row["kind"] in _CNN and not row["ours"]["frozen_channels"]]
    light = [row for row in whole if row["ours"]["macs_removed"] < 0.35]
    if good:
        names = [f"{row['model']} ({row['ours']['macs_removed']:.1%})" for row in light]
        yield (
            f"CNNs with nothing frozen: {len(whole)}. Of these, losing less than 35 % of MACs: "
            f"{', '.join(names) or 'none'}."
        )
        worst = max(good, key=lambda row: row["ours"]["max_error"])
        least = min(good, key=lambda row: row["ours"]["moved"])
        yield (
            f"Largest error among the verified: {worst['ours']['max_error']:.1e} "
            f"({worst['model']}); least movement: {least['ours']['moved']:.1e} ({least['model']})."
        )
        yield ""
    loose = [row["model"] for row in good if row["ours"].get("approximate")]
    if loose:
        yield (
            f"Nothing can go exactly, so pruned with norms over fewer channels (`approximate=True` "
            f"allows it) and verified against that: {', '.join(loose)}."
        )
        yield ""
    failed = [row for row in rows if row["ours"] and row["ours"]["status"] != "ok"]
    yield from (f"- {row['suite']}:{row['model']}: {row['ours']['status']}" for row in failed)
    if failed:
        yield ""


_CNN = {"classification CNNs", "segmentation", "detection backbones", "video", "CNNs"}


def _counts(name: str, rows: Sequence[Record]) -> str:
    ours = [row["ours"]["status"] for row in rows if row["ours"]]
    peer = [row["peer"]["status"] for row in rows if row["peer"]]
    late = sum(status.startswith("timeout") for status in peer)
    cells = [
        len(rows),
        ours.count("ok"),
        ours.count("mismatch"),
        len(ours) - ours.count("ok") - ours.count("mismatch"),
        peer.count("ok"),
        peer.count("mismatch"),
        late,
        len(peer) - peer.count("ok") - peer.count("mismatch") - late,
    ]
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"


def _row(row: Record) -> str:
    ours, peer = row["ours"] or {}, row["peer"] or {}
    cells = [
        row["model"],
        f"{row['suite']} {row['kind']}",
        row["input"],
        _cell(ours.get("status"), "{} (approximate)" if ours.get("approximate") else "{}"),
        _cell(ours.get("macs_removed"), "{:.1%}"),
        _cell(ours.get("params_removed"), "{:.1%}"),
        _cell(ours.get("frozen_share"), "{:.0%}"),
        _cell(ours.get("seconds"), "{:.2f}"),
        _cell(ours.get("max_error"), "{:.0e}"),
        _cell(ours.get("moved"), "{:.1g}"),
        _cell(peer.get("status"), "{}"),
        _cell(peer.get("macs_removed"), "{:.1%}"),
        _cell(peer.get("seconds"), "{:.2f}"),
        _cell(row["ratio"], "{:.1f}"),
    ]
    return "| " + " | ".join(cells) + " |"


def _cell(value: Any, style: str) -> str:
    return "–" if value is None else style.format(value).replace("|", "\\|")[:120]


# --- the command --------------------------------------------------------------------------------


def main() -> None:
    options = _options()
    if options.worker:
        case = json.loads(options.worker)
        case["shape"] = tuple(case["shape"])
        work(Case(**case), options.tools.split(","), options.rate)
        return
    cases = [
        case
        for case in all_cases()
        if options.suite in {"all", case.suite} and fnmatch.fnmatch(case.name, options.only)
    ]
    if options.list:
        show_list(cases, options)
    else:
        run_all(cases, options)
        command = shlex.join(["python", "benchmarks/zoo.py", *sys.argv[1:]])
        write_report(all_cases(), command, options.rate)
        print(f"Written: {HERE.name}/zoo.md, {HERE.name}/zoo.json")


def run_all(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Run what the cache does not hold yet, with a bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    tools = [tool for tool in options.tools.split(",") if tool != "peer" or not options.no_peer]
    limits = Limits(options.timeout, options.rate)
    cache = read_cache()
    todo = [case for case in cases if is_pending(case, tools, cache, options)]
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress, ThreadPoolExecutor(options.jobs) as pool:
        bar = progress.add_task("zoo", total=len(cases), completed=len(cases) - len(todo))
        futures = {pool.submit(run_case, case, tools, limits): case for case in todo}
        try:
            for future in as_completed(futures):
                records = future.result()
                append_cache(records)
                news = _news(futures[future], records)
                progress.console.print(news, markup=False, highlight=False, soft_wrap=True)
                progress.advance(bar)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _news(case: Case, records: Sequence[Record]) -> str:
    parts = []
    for record in records:
        removed = _cell(record.get("macs_removed"), "{:.1%}")
        seconds = _cell(record.get("seconds"), "{:.2f}")
        parts.append(f"{record['tool']} {record['status']} −{removed} {seconds} s")
    return f"{case.key}: " + "; ".join(parts)


def show_list(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Print the models; with --check, build each and run it once in a process of its own."""
    broken = 0
    for case in cases:
        note = ""
        if options.check:
            start = time.monotonic()
            [record] = run_case(case, ["nothing"], Limits(options.timeout, options.rate))
            broken += record["status"] != "ok"
            note = f"  {record['status']}  {time.monotonic() - start:.1f} s"
        print(f"{case.key:<50} {case.kind:<22} {'x'.join(map(str, case.shape))}{note}", flush=True)
    print(f"{len(cases)} models" + (f", {broken} broken" if options.check else ""))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=[*SUITES, "all"], default="all")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="models by wildcard")
    parser.add_argument("--rate", type=float, default=0.3)
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for a tool on a model")
    parser.add_argument("--no-peer", action="store_true", help="leave Torch-Pruning out")
    parser.add_argument("--redo-failed", action="store_true", help="run again what is not ok")
    parser.add_argument(
        "--accept-stale",
        action="store_true",
        help="keep results made by another state of src/fpgm instead of running those models again",
    )
    parser.add_argument("--list", action="store_true", help="list the models and stop")
    parser.add_argument("--check", action="store_true", help="with --list: build and run each once")
    parser.add_argument("--tools", default="ours,peer", help=argparse.SUPPRESS)
    parser.add_argument("--worker", metavar="CASE", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
