"""Run Torch-Pruning as its examples do, and check its result.

It gets by hand what our planner finds by itself: the layers that produce the output, and the
attention heads. Its result is compared with the original without the units it reports as removed,
so a model that runs but computes something else is a mismatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from zoo_cache import Record
from zoo_measure import best, clocks, measure, repeats, since, tensors
from zoo_models import Subject

TOLERANCE = 1e-3
"""Relative error above which Torch-Pruning's result counts as a mismatch."""


def peer(subject: Subject, rate: float) -> Iterator[tuple[str, Record | None]]:
    import copy

    import torch_pruning as tp

    original, inputs = subject.model, subject.inputs
    yield "prune", None
    for _, times in repeats():
        model = copy.deepcopy(original)  # it prunes in place
        ignored = output_layers(model, inputs)
        attention = {m: q for m in model.modules() if (q := _qkv(m)) is not None}
        heads = {qkv: m.num_heads for m, qkv in attention.items()}
        start = clocks()
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
        times.append(since(start))
    for module, qkv in attention.items():  # its timm example asks users to do this by hand
        module.num_heads = heads[qkv]
        module.head_dim = qkv.out_features // (3 * module.num_heads)
        if hasattr(module, "attn_dim"):  # newer than the example
            module.attn_dim = module.num_heads * module.head_dim
    yield "check", best(times) | {"groups": len(groups)}
    result = measure(subject, original, model)
    if result["status"] == "ok":
        error = _error(original, model, groups, inputs)
        result["max_error"] = error
        if error is not None and not error <= TOLERANCE:
            result["status"] = "mismatch"
    yield "done", result


def output_layers(model: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """List layers whose channels are the model's output channels, which must not be pruned.

    Walks the autograd graph back from the outputs to the first convolution or linear layer on
    every path; a grouped one passes its channels through, so the walk continues behind it.
    """
    import torch
    from torch import nn

    made_by: dict[Any, nn.Module] = {}
    kinds = (nn.modules.conv._ConvNd, nn.Linear)

    def remember(module: nn.Module, _: Any, output: Any) -> None:
        made_by[output.grad_fn] = module

    hooks = [m.register_forward_hook(remember) for m in model.modules() if isinstance(m, kinds)]
    with torch.enable_grad():
        pending = [t.grad_fn for t in tensors(model(*inputs))]
    for hook in hooks:
        hook.remove()
    results: list[nn.Module] = []
    recorded: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in recorded:
            continue
        recorded.add(node)
        layer = made_by.get(node)
        if layer is not None and layer not in results:
            results.append(layer)
        if layer is None or getattr(layer, "groups", 1) > 1:
            pending += [parent for parent, _ in node.next_functions]
    return results


def _qkv(module: Any) -> Any:
    """Find the fused projections of timm-style attention, which Torch-Pruning needs to know."""
    import torch

    qkv = getattr(module, "qkv", None)
    fused = isinstance(qkv, torch.nn.Linear) and isinstance(getattr(module, "num_heads", 0), int)
    return qkv if fused and hasattr(module, "num_heads") else None


def _error(
    original: Any, pruned: Any, groups: Iterable[Any], inputs: tuple[Any, ...]
) -> float | None:
    """Measure the relative error of Torch-Pruning's model against the original without those units.

    In the reference, every consumer ignores the inputs that the tool reports as removed. None where
    that report cannot be applied to the original: norms over channels (approximate by nature), and
    layers other than convolution and linear.
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
            dropped = [kept[i] for i in indices]
            left[layer] = sorted(set(kept) - set(dropped))
            with torch.no_grad():
                twin.weight.index_fill_(dim, torch.tensor(dropped), 0.0)
    with torch.no_grad():
        pairs = list(zip(tensors(original(*inputs)), tensors(pruned(*inputs)), strict=True))
    return max(float((a - b).norm() / a.norm().clamp_min(1e-12)) for a, b in pairs)
