"""Theoretical and measured saving: the paper's Table 5 networks, latency budgets, and int8.

    python benchmarks/latency.py            # resumes; run it on an idle machine: about an hour

ResNets and MobileNetV2 at the paper's rates, in every runtime, with one and two threads, compared
with Torch-Pruning at equal MACs; three models with a budget of half their time; a CIFAR-10
ResNet-56 pruned, recovered and exported (trained weights from FPGM_WEIGHTS, CIFAR-10 from
`fpgm data cifar10`). Original and pruned model are timed alternately in one run. Results are kept
in --runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fpgm
from fpgm.data import cifar10
from fpgm.exporters.onnx import OnnxModule, create_session
from fpgm.latency.backends import BACKENDS
from fpgm.models import resnet
from fpgm.models.checkpoint import load_weights
from fpgm.models.registry import load_model
from fpgm.utils.atomic_io import write_text
from fpgm.utils.example_inputs import Example
from fpgm.utils.timing import time_interleaved, time_ratio
from peer import macs_of, peer_pruned
from recovery import accuracy, shown
from trained import add_weights

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RATES = {"resnet18": 0.3, "resnet34": 0.3, "resnet50": 0.4, "resnet101": 0.3, "mobilenet_v2": 0.3}
TABLE5 = {
    "resnet18": (27.7, 41.8),
    "resnet34": (29.2, 41.1),
    "resnet50": (38.2, 53.5),
    "resnet101": (32.9, 42.2),
}
"""Realised and theoretical saving in the paper, in percent, on a GPU."""
RUNTIMES = ("onnxruntime", "eager", "openvino", "channels-last", "compile")
VARIANTS = ("coupled", "independent", "Torch-Pruning")
TARGETS = (
    ("resnet18", "onnxruntime"),
    ("resnet50", "onnxruntime"),
    ("mobilenet_v2", "onnxruntime"),
    ("resnet18", "eager"),
)


@dataclass(frozen=True)
class Row:
    """One network pruned with one policy in one runtime."""

    model: str
    way: str
    backend: str
    threads: int

    @property
    def file(self) -> str:
        return "-".join(map(str, asdict(self).values())) + ".json"


def rows() -> Iterator[Row]:
    """List all rows, the most important first; compiling takes longest."""
    for backends in (RUNTIMES[:2], RUNTIMES[2:4], RUNTIMES[4:]):
        for model in RATES:
            for way in VARIANTS:
                for backend in backends:
                    for threads in (1, 2):
                        yield Row(model, way, backend, threads)


class Bench:
    """Models, and the folder of results."""

    def __init__(self, runs: Path, seconds: float, batch: int) -> None:
        self.runs, self.seconds = runs, seconds
        self.x = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        self._last: tuple[str, str] | None = None
        self._pair: tuple[nn.Module, nn.Module]
        runs.mkdir(parents=True, exist_ok=True)

    def load_or_measure(self, name: str, measure: Any) -> dict[str, Any]:
        """Return the stored result of this name; measure it if there is none."""
        file = self.runs / name
        if not file.exists():
            write_text(file, json.dumps(measure()) + "\n")
            print(name, flush=True)
        return dict(json.loads(file.read_text()))

    def row(self, row: Row) -> dict[str, Any]:
        pair = self._models(row.model, row.way)
        example = Example((self.x,), {})
        loaded = [BACKENDS[row.backend].load(net, example, row.threads) for net in pair]
        original, small = time_interleaved([item.run for item in loaded], self.seconds)
        complete, left = (macs_of(net, self.x) for net in pair)
        return {
            **asdict(row),
            "theory": 1 - left / complete,
            "realised": 1 - 1 / time_ratio(original, small),
            "milliseconds": [1000 * item.median for item in (original, small)],
            "spread": [item.spread for item in (original, small)],
        }

    def _models(self, name: str, way: str) -> tuple[nn.Module, nn.Module]:
        if self._last != (name, way):
            torch.manual_seed(0)
            original = load_model(f"torchvision:{name}").eval()
            x = self.x[:1]
            if way == "Torch-Pruning":
                wanted = fpgm.plan(original, x, rate=RATES[name]).macs_removed
                small, _ = peer_pruned(original, x, wanted)
            else:
                small = fpgm.prune(original, x, rate=RATES[name], residual=way)
            self._last, self._pair = (name, way), (original, small.eval())
            gc.collect()
        return self._pair

    def target(self, name: str, backend: str, threads: int) -> dict[str, Any]:
        """Plan for half of the latency."""
        torch.manual_seed(0)
        model = load_model(f"torchvision:{name}").eval()
        plan = fpgm.plan(model, self.x, latency=0.5, backend=backend, threads=threads)
        assert plan.latency is not None
        return {"model": name, "macs_removed": plan.macs_removed, **asdict(plan.latency)}


def cifar(weights: Path, data: Path) -> dict[str, Any]:
    """Measure ResNet-56: float, pruned and recovered, and both in int8."""
    known = cifar10.read(data)
    model = load_weights(resnet(56), weights / "cifar10_resnet56.safetensors").eval()
    order = torch.randperm(50_000, generator=torch.Generator().manual_seed(0))
    batches = [shown(known.train_images[part]) for part in order[:2048].split(128)]
    x = shown(known.train_images[:1])
    plan = fpgm.plan(model, x, macs=0.526, allocate="sensitivity", loader=batches[:4])
    small = fpgm.recover(model, plan, batches, images=2048).eval()
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, net in (("original", model), ("pruned and recovered", small)):
            for int8 in (False, True):
                file = Path(folder) / "model.onnx"
                fpgm.export(net, x, file, loader=batches, images=512, int8=int8)
                files[name + (", eight bits" if int8 else "")] = file.read_bytes()
    times = {str(threads): together(files, x, threads) for threads in (1, 2)}
    return {
        "macs_removed": plan.macs_removed,
        "models": {
            name: {
                "bytes": len(data),
                "accuracy": accuracy(OnnxModule(data), known),
                "milliseconds": {threads: item[name] for threads, item in times.items()},
            }
            for name, data in files.items()
        },
    }


def together(files: dict[str, bytes], x: Tensor, threads: int) -> dict[str, float]:
    """Time all models alternately in ONNX Runtime, in milliseconds per image."""

    def call(data: bytes) -> Callable[[], Any]:
        session = create_session(data, threads)
        feed = {session.get_inputs()[0].name: x.numpy()}
        return lambda: session.run(None, feed)

    timed = time_interleaved([call(data) for data in files.values()], 8.0)
    return {name: 1000 * item.median for name, item in zip(files, timed, strict=True)}


def markdown(command: str, result: dict[str, Any]) -> Iterator[str]:
    yield "# Theoretical and measured saving"
    yield ""
    yield f"    {command}"
    yield ""
    yield (
        f"Batch {result['batch']}, 224×224, random weights (time does not depend on them), "
        "original and pruned model timed alternately in one run. Cells are the saving of time "
        "and, in parentheses, its ratio to the saving of MACs; empty cells were not measured. "
        f"Torch-Pruning at the coupled plan's MACs. torch {torch.__version__}, "
        f"{result['processor']}."
    )
    for threads in (1, 2):
        yield ""
        yield f"## {threads} thread{'s' * (threads > 1)}"
        yield ""
        yield f"| network | pruned | MACs | {' | '.join(RUNTIMES)} | paper: MACs → time |"
        yield "|---|---|--:|" + "--:|" * (len(RUNTIMES) + 1)
        for model in RATES:
            for way in VARIANTS:
                yield _line(model, way, threads, result["rows"])
    yield from _targets(result["targets"])
    if result["cifar"]:
        yield from _cifar(result["cifar"])


def _line(model: str, way: str, threads: int, known: list[dict[str, Any]]) -> str:
    item = {
        r["backend"]: r
        for r in known
        if (r["model"], r["way"], r["threads"]) == (model, way, threads)
    }
    theory = next((f"{r['theory']:.1%}" for r in item.values()), "")
    cells = [
        f"{item[b]['realised']:.1%} ({item[b]['realised'] / item[b]['theory']:.2f})"
        if b in item
        else ""
        for b in RUNTIMES
    ]
    paper = "" if model not in TABLE5 else "{1} → {0} ({2:.2f})".format(
        *TABLE5[model], TABLE5[model][0] / TABLE5[model][1]
    )  # fmt: skip
    return f"| {model} {RATES[model]:.0%} | {way} | {theory} | {' | '.join(cells)} | {paper} |"


def _targets(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield ""
    yield "## Half the time requested"
    yield ""
    yield "| network | runtime | threads | requested | predicted | measured | MACs removed |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for r in rows:
        yield (
            f"| {r['model']} | {r['backend']} | {r['threads']} | {r['asked']:.1%} "
            f"| {r['predicted']:.1%} | {r['measured']:.1%} | {r['macs_removed']:.1%} |"
        )


def _cifar(cifar: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "## CIFAR-10, ResNet-56"
    yield ""
    yield (
        f"{cifar['macs_removed']:.1%} of MACs removed, 10,000 test images. Milliseconds in ONNX "
        "Runtime, batch 1, with the speedup over the original; all four models timed alternately "
        "in one run."
    )
    yield ""
    yield "| | accuracy | kB | 1 thread | 2 threads |"
    yield "|---|--:|--:|--:|--:|"
    first = cifar["models"]["original"]["milliseconds"]
    for name, output in cifar["models"].items():
        times = [
            f"{took:.2f} ({first[threads] / took:.2f}×)"
            for threads, took in output["milliseconds"].items()
        ]
        size = f"{output['bytes'] / 1e3:,.0f}"
        yield f"| {name} | {output['accuracy']:.2%} | {size} | {' | '.join(times)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_weights(parser)
    parser.add_argument("--data", type=Path, default=cifar10.default_root())
    parser.add_argument("--runs", type=Path, default=Path("runs/latency"))
    parser.add_argument("--seconds", type=float, default=4.0, help="for each comparison")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--only-table", action="store_true", help="measure nothing more")
    options = parser.parse_args()
    bench = Bench(options.runs, options.seconds, options.batch)

    def known(name: str, measure: Any) -> dict[str, Any] | None:
        if options.only_table and not (options.runs / name).exists():
            return None
        return bench.load_or_measure(name, measure)

    targets = [
        known(f"target-{m}-{b}-{t}.json", lambda m=m, b=b, t=t: bench.target(m, b, t))
        for m, b in TARGETS
        for t in (1, 2)
    ]
    end_to_end = known("cifar.json", lambda: cifar(options.weights, options.data))
    measurements = [known(row.file, lambda row=row: bench.row(row)) for row in rows()]
    command = shlex.join(["python", "benchmarks/latency.py"])
    result = {
        "command": command,
        "batch": options.batch,
        "processor": BACKENDS["eager"].version().split(" ", 2)[-1],
        "rows": [r for r in measurements if r],
        "targets": [t for t in targets if t],
        "cifar": end_to_end,
    }
    (HERE / "latency.json").write_text(json.dumps(result, indent=1) + "\n")
    text = "\n".join(markdown(command, result)) + "\n"
    (HERE / "latency.md").write_text(text)
    print(text)


if __name__ == "__main__":
    sys.exit(main())
