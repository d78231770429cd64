"""Prune one network with Torch-Pruning and test the result like ours.

It gets by hand which layers produce the output and where attention heads are. The reference is the
original in which every consumer ignores the units that Torch-Pruning reports as removed. If they
cannot be mapped to the original, the result is `not checkable`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from tests.helpers.independent_reference import run, run_leaves, training_fault
from tests.helpers.output_comparison import difference, leaves
from tests.structures.judge import Verdict, describe
from tests.structures.registry import Network
from torch import Tensor, nn

SETTINGS: dict[str, dict[str, Any]] = {
    "rate 0.3": {"pruning_ratio": 0.3},
    "rate 0.5": {"pruning_ratio": 0.5},
    "macs 0.3": {"pruning_ratio": 0.3, "global_pruning": True},
    "independent": {"pruning_ratio": 0.5, "round_to": 2},
}
"""The closest options: a global ratio instead of a fraction of MACs, widths rounded to pairs."""
TOLERANCE = 1e-2


def judge_peer(network: Network, options: dict[str, Any]) -> Verdict:
    """Prune a network with Torch-Pruning and describe the result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, groups, seconds = _prune(network, options)
        except Exception as error:
            return Verdict("crash", describe(error))
        if not groups:
            return Verdict("refused", "it removes nothing", seconds=seconds)
        try:
            verdict = _check(network, model, groups)
        except Exception as error:
            verdict = Verdict("not checkable", describe(error))
        verdict.seconds = seconds
        return verdict


def _prune(network: Network, options: dict[str, Any]) -> tuple[nn.Module, list[Any], float]:
    import torch_pruning as tp

    model, example = network.build(), network.example()
    inputs = list(example) if isinstance(example, tuple) else example
    ignored = output_layers(model, example)
    heads = {m.qkv: m.heads for m in model.modules() if hasattr(m, "qkv") and hasattr(m, "heads")}
    start = time.process_time()
    pruner = tp.pruner.BasePruner(
        model,
        inputs,
        importance=tp.importance.FPGMImportance(p=2),
        ignored_layers=ignored,
        num_heads=heads,
        **options,
    )
    groups = []
    for group in pruner.step(interactive=True):
        group.prune()
        groups.append(group)
    return model, groups, time.process_time() - start


def _check(network: Network, model: nn.Module, groups: list[Any]) -> Verdict:
    removed = sum(len(group[0].idxs) for group in groups)
    reference = network.build()
    checkable = _zero_consumers_(reference, model, groups)
    worst, where = 0.0, ""
    for number, example in enumerate(network.new_inputs()):
        want = run_leaves(reference, example, True, number)
        try:
            have = run_leaves(model.eval(), example, True, number)
        except Exception as error:
            return Verdict("crash", f"its result does not run: {describe(error)}", removed)
        shapes = [[getattr(t, "shape", type(t)) for t in part] for part in (want, have)]
        if shapes[0] != shapes[1]:
            return Verdict("silent", "the output has another shape", removed)
        error, place = difference(want, have, torch.float32)
        if error > worst:
            worst, where = error, place
    if not checkable:
        return Verdict("not checkable", "no account of what its layers lost", removed)
    if worst > TOLERANCE:
        return Verdict("silent", f"differs by {worst:.1e} at {where}", removed, error=worst)
    if training_fault(network.build(), network.example()) is None:
        fault = training_fault(model, network.example())
        if fault is not None:
            return Verdict("untrainable", fault, removed)
    return Verdict("exact", "", removed, error=worst)


def _zero_consumers_(reference: nn.Module, model: nn.Module, groups: Iterable[Any]) -> bool:
    """Zero in the reference what consumers lost; return False if that is not recorded."""
    from torch_pruning.pruner import function

    consumes = {function.prune_conv_in_channels, function.prune_linear_in_channels}
    plain = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._BatchNorm, nn.PReLU)
    twins = dict(zip(model.modules(), reference.modules(), strict=True))
    left: dict[Any, list[int]] = {}
    for group in groups:
        lost: dict[Any, set[int]] = {}
        for dep, indices in group:
            layer = dep.target.module
            if layer not in twins:  # an operation without weights of its own
                if isinstance(layer, nn.Parameter):
                    return False
                continue
            twin = twins[layer]
            if not isinstance(twin, plain) and any(True for _ in twin.parameters(recurse=False)):
                return False
            if dep.handler in consumes:
                if getattr(twin, "groups", 1) > 1:
                    return False
                lost.setdefault(layer, set()).update(indices)
        for layer, indices in lost.items():
            if not _zero_inputs_(twins[layer], left, layer, indices):
                return False
    return True


def _zero_inputs_(twin: Any, left: dict[Any, list[int]], layer: Any, lost: set[int]) -> bool:
    """Zero inputs by their current indices; return False if there are none."""
    dim = 0 if getattr(twin, "transposed", False) else 1
    kept = left.setdefault(layer, list(range(twin.weight.shape[dim])))
    if max(lost) >= len(kept):
        return False
    dropped = [kept[i] for i in sorted(lost)]
    left[layer] = sorted(set(kept) - set(dropped))
    with torch.no_grad():
        twin.weight.data.index_fill_(dim, torch.tensor(dropped), 0.0)
    return True


def output_layers(model: nn.Module, example: Any) -> list[nn.Module]:
    """List layers whose channels are the model's output channels, which must not be pruned.

    Walks the autograd graph back from the outputs to the first convolution or linear layer on
    every path; a grouped one passes its channels through, so the walk continues behind it.
    """
    made_by: dict[Any, nn.Module] = {}

    def remember(module: nn.Module, _: Any, output: Any) -> None:
        made_by[output.grad_fn] = module

    kinds = (nn.modules.conv._ConvNd, nn.Linear)
    hooks = [m.register_forward_hook(remember) for m in model.modules() if isinstance(m, kinds)]
    try:
        with torch.enable_grad():
            outputs = leaves(run(model, example))
    finally:
        for hook in hooks:
            hook.remove()
    pending = [t.grad_fn for t in outputs if isinstance(t, Tensor)]
    results: list[nn.Module] = []
    visited: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        layer = made_by.get(node)
        if layer is not None and layer not in results:
            results.append(layer)
        if layer is None or getattr(layer, "groups", 1) > 1:
            pending += [parent for parent, _ in node.next_functions]
    return results
