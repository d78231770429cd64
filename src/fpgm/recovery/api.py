"""`recover`: compact a model and compute weights that compensate for the removed units.

Layer by layer, in execution order, least squares finds the weights for which a layer's output is
closest to the original's, given its inputs in the partly recovered compact model. No labels are
needed. Distillation may follow. Every step gives a candidate; the one closest to the original on
held-out inputs is returned (`candidates`). Several ranks divide the inputs (`utils.distributed`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fpgm.errors import RankError, RequestError
from fpgm.pruning.compaction import compact
from fpgm.pruning.plan import Plan
from fpgm.recovery.bn_reestimation import reestimate_batch_norms_
from fpgm.recovery.candidates import Candidate, choose_candidate, compare_candidates
from fpgm.recovery.data_free import compensate
from fpgm.recovery.distillation import DistillationResult, distil_, training_batches
from fpgm.recovery.layer_solver import LayerSolver, SolvedLayer
from fpgm.recovery.solvable_layers import SolvableLayer, find_solvable_layers
from fpgm.recovery.solve_cache import SolveCache
from fpgm.recovery.staged_forward import PairedForwards
from fpgm.utils.allocator import reuse_freed_memory
from fpgm.utils.calibration_data import Inputs, explain_forward_errors, move_batches, read_held_out
from fpgm.utils.copying import copy_model
from fpgm.utils.default_device import cpu_by_default
from fpgm.utils.distributed import current_ranks, fails_together
from fpgm.utils.example_inputs import tensors_in
from fpgm.utils.html_table import html_table
from fpgm.utils.modules import named_tensors, tensors_sha256, unwrap_model
from fpgm.utils.parameter_roles import layer_of
from fpgm.utils.precision import full_precision
from fpgm.utils.preserve_state import disable_fused_attention, preserve_state
from fpgm.utils.progress import Progress
from fpgm.utils.text import reason, shorten

RECOVERY = "fpgm_recovery"
"""Attribute in which a recovered model carries its `Recovery`."""

Method = Literal["solve", "norms", "weights"]

MEMORY_FRACTION = 0.125
"""Of the machine's memory that paused passes may hold before activations are offloaded."""
OFFLOADED_FRACTION = 0.25
"""Of that memory, what offloaded activations may take before they go to a file: reading it back
costs little, since the system caches it where memory is free."""
DEFAULT_MEMORY = 8 * 2**30
"""Bytes of memory to assume where the system does not report them."""
VALIDATION_INPUTS = 256
"""Held-out inputs that candidates are compared on, if the loader has more than are solved with."""
DISTILLATION_VALIDATION_INPUTS = 512
"""So many if there is distillation."""
PRUNED, NORMS, SOLVED, SOLVED_NORMS, COMPENSATED, DISTILLED = (
    "pruned",
    "batch norms re-estimated",
    "least squares",
    "least squares, batch norms re-estimated",
    "compensated without data",
    "distilled",
)
"""The candidates."""
FEW_STEPS = 50
"""Distillation with fewer steps is not expected to help."""
PASS_MEMORY_FACTOR = 4
"""A paused pass holds about this many times the largest layer's input and output."""


@dataclass(frozen=True, repr=False)
class Recovery:
    """The effect of recovery on each layer and on the output error."""

    method: Method | None
    """None: only distillation."""
    layers: tuple[SolvedLayer, ...]
    before: float | None
    """Squared error of the compact model's outputs, relative to the original outputs' squares."""
    after: float | None
    inputs: int
    """Inputs that were used to recover."""
    judges: int
    """Held-out inputs on which `before` and `after` were measured; 0: on the same inputs."""
    steps: int
    """Distillation steps, if their result was kept."""
    seconds: float
    notes: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    """What was compared on the held-out inputs."""
    kept: str = PRUNED
    """The candidate that was returned."""
    unsolved: tuple[tuple[str, str], ...] = ()
    """Layers that could not be solved, with the reason."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        return f"Recovery({self._outcome()})"

    def _repr_html_(self) -> str:
        rows = [(s.layer, f"{s.before:.3g}", f"{s.after:.3g}") for s in self.layers]
        header = ("layer", "error before", "after") if rows else ()
        return html_table(f"Recovery: {self._outcome()}", header, rows, self.notes)

    def _outcome(self) -> str:
        """Describe the effect on the outputs in one line."""
        error = "output error not compared"
        if self.before is not None and self.after is not None:
            error = f"output error {self.before:.3g} → {self.after:.3g}"
        steps = f", {self.steps} steps of distillation" if self.steps else ""
        agreements = [c.agreement for c in self.candidates if c.name in (PRUNED, self.kept)]
        if agreements and agreements[0] is not None and agreements[-1] is not None:
            error += f", agreement {agreements[0]:.1%} → {agreements[-1]:.1%}"
        return (
            f"{self.method or 'distillation'}: {error}, {self.inputs} inputs{steps}, "
            f"{self.seconds:g} s"
        )


def recovery_of(model: nn.Module) -> Recovery:
    """Return the `Recovery` of a model that `recover` returned."""
    recovery = getattr(model, RECOVERY, None)
    if not isinstance(recovery, Recovery):
        raise RequestError("This model was not returned by fpgm.recover.")
    return recovery


@cpu_by_default()
@torch.no_grad()
@reuse_freed_memory()
@fails_together
def recover(
    model: nn.Module,
    plan: Plan,
    loader: Iterable[Any],
    *,
    method: Method | None = "solve",
    images: int = 1024,
    distil: float = 0.0,
    start: nn.Module | None = None,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Compact a model, and adjust the kept weights to compensate for the removed units.

    The model itself is unchanged. The result has a `Recovery` as its attribute `fpgm_recovery`.

    Args:
        model: the original model.
        plan: what to remove.
        loader: batches of inputs, or of inputs and labels; labels are ignored.
        method: `"solve"` solves for every layer's weights by least squares; `"norms"` only
            re-estimates batch-norm statistics; `"weights"` is data-free: it estimates the
            covariance of units from the weights, and needs one batch (noise will do) to run.
        images: how many inputs to read from the loader.
        distil: seconds of distillation towards the original's outputs afterwards. It uses all
            batches of a loader that can be read again, except up to 512 held-out inputs, which
            decide whether its result is kept.
        cache: file to which solved layers are written; an interrupted recovery of the same model,
            plan and inputs continues from it. It is removed at the end.
        progress: called with a title, the number of steps done, and their total.

    `start` is a compact model of the same plan to recover further, such as one that `recover`
    returned: its weights are kept unless new ones bring the outputs closer to the original's.
    `method=None` runs only distillation.

    If `torch.distributed` is initialized, all ranks call this with the same arguments: they divide
    the batches among them, and all return the same weights.

    >>> import fpgm
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    >>> x = [torch.randn(8, 3, 8, 8) for _ in range(4)]
    >>> small = fpgm.recover(net, fpgm.plan(net, x[0], rate=0.5, align=1), x)
    >>> small.fpgm_recovery.after < small.fpgm_recovery.before
    True
    """
    if method is not None and method not in get_args(Method):
        raise RequestError(f"method is {method!r}: give 'solve', 'norms' or 'weights'.")
    if not isinstance(images, int) or images < 1:
        raise RequestError(f"images is {images!r}: give an integer of at least 1.")
    if not isinstance(distil, int | float) or not 0 <= distil < math.inf:
        raise RequestError(f"distil is {distil!r}: give a number of seconds, 0 or more.")
    if distil > 0 and torch.is_inference_mode_enabled():
        raise RequestError(
            "distil= trains the model: call recover outside of torch.inference_mode()."
        )
    if method is None and not distil:
        raise RequestError("method=None runs only distillation: pass distil= (seconds).")
    began = time.perf_counter()
    model = unwrap_model(model)
    plain = _start(model, plan, start)
    small = _start(model, plan, start)
    modes = [module.training for module in small.modules()]
    # Solved weights fit their own inputs already: only others show what a candidate is worth.
    held_out = DISTILLATION_VALIDATION_INPUTS if distil > 0 else VALIDATION_INPUTS
    ranks = current_ranks()
    inputs, validation = read_held_out(move_batches(model, loader), images, held_out, ranks)
    result = _Attempts({PRUNED: plain})
    distilled: DistillationResult | None = None
    solve_cache: SolveCache | None = None
    try:
        if ranks.size > 1:
            common = {
                "weights": tensors_sha256(model),
                "starting weights": tensors_sha256(small),
                "plans": plan.to_json(),
                "options": repr((method, images, distil)),
                "inputs": inputs.digest() + validation.digest(),
            }
            ranks.check_same(common)
        explaining = explain_forward_errors(model, inputs, validation)
        with preserve_state(model), disable_fused_attention(), full_precision(), explaining:
            for net in (model, plain, small):
                net.eval()
            judging = validation if validation.batches else inputs
            if cache is not None and method == "solve" and ranks.is_first:
                solve_cache = SolveCache(Path(cache), model, small, plan, inputs)
            _add_candidates(result, model, small, plan, inputs, method, solve_cache, progress)
            nets = result.nets
            candidates = compare_candidates(model, nets, judging)
            if distil > 0:
                best = _choose(list(nets), candidates, judging.count)
                nets[DISTILLED] = copy_model(nets[best])
                batches = training_batches(model, loader, inputs, validation)
                distilled = distil_(nets[DISTILLED], model, plan, batches, distil, progress, ranks)
                one = compare_candidates(model, {DISTILLED: nets[DISTILLED]}, judging)
                candidates = candidates and one and [*candidates, *one]
    finally:
        inputs.close()
        validation.close()
    notes = result.notes
    kept = _choose(list(result.nets), candidates, judging.count)
    if candidates is None:
        notes.append("The two models' outputs differ in shape: they were not compared.")
    elif kept == PRUNED and method is not None:
        notes.append(_describe_failure(candidates))
    if distilled is not None:
        notes.append(_describe(distilled, distil, kept=kept == DISTILLED))
    small = result.nets[kept]
    ranks.copy_from_first_(named_tensors(small).values())
    for module, mode in zip(small.modules(), modes, strict=True):
        module.training = mode
    errors = {c.name: c.error for c in candidates or ()}
    recovery = Recovery(
        method,
        tuple(result.solved),
        errors.get(PRUNED),
        errors.get(kept),
        inputs.count,
        validation.count,
        distilled.steps if distilled is not None and kept == DISTILLED else 0,
        round(time.perf_counter() - began, 2),
        tuple(notes),
        tuple(candidates or ()),
        kept,
        tuple(result.unsolved.items()),
    )
    setattr(small, RECOVERY, recovery)
    if solve_cache is not None:
        solve_cache.remove()
    return small


def _start(model: nn.Module, plan: Plan, given: nn.Module | None) -> nn.Module:
    """Return a compact model to work on: new, or a copy of the given one."""
    new = compact(model, plan)
    if given is None:
        return new
    given = unwrap_model(given)
    shapes = [{n: t.shape for n, t in net.state_dict().items()} for net in (given, new)]
    if shapes[0] != shapes[1]:
        raise RequestError("start is not a compact model of this plan: its tensors differ.")
    return copy_model(given)


@dataclass
class _Attempts:
    """What recovery tried."""

    nets: dict[str, nn.Module]
    """Candidates by name; the compact model as it was is the first."""
    solved: list[SolvedLayer] = field(default_factory=list)
    unsolved: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _add_candidates(
    result: _Attempts,
    model: nn.Module,
    small: nn.Module,
    plan: Plan,
    inputs: Inputs,
    method: Method | None,
    cache: SolveCache | None,
    progress: Progress | None,
) -> None:
    """Add the models that a method makes.

    Args:
        result: Gets the models, and notes about layers that were not solved.
        model: The original model.
        small: The compact model; it may be changed.
        plan: The plan it was made with.
        inputs: Inputs to solve with.
        method: The method; None adds nothing.
        cache: Where solved layers are stored, if anywhere.
        progress: Reports progress.
    """
    nets = result.nets
    if method == "weights":
        full, changed = compensate(model, plan, inputs.first)
        nets[COMPENSATED] = compact(full, plan).eval()
        result.notes += [] if changed else ["No layer could compensate for the removed units."]
    elif method is not None:
        norms = _reestimate_batch_norms(small, inputs, method)
        if isinstance(norms, nn.Module):
            nets[NORMS] = norms
        elif norms is not None:
            result.notes.append(norms)
    if method == "solve":
        result.solved, result.unsolved = _solve_(model, small, plan, inputs, cache, progress)
        result.notes += [s.note for s in result.solved if s.note is not None]
        if result.unsolved:
            result.notes.append(_count_layers(len(result.solved), result.unsolved))
        nets[SOLVED] = small
        again = _reestimate_batch_norms(small, inputs, method) if NORMS in nets else None
        if isinstance(again, nn.Module):
            nets[SOLVED_NORMS] = again


def _reestimate_batch_norms(
    small: nn.Module, inputs: Inputs, method: Method
) -> nn.Module | str | None:
    """Return a copy with re-estimated batch norms; None if it has none, or why it failed.

    It fails for a single input, or if the model's code expects all of it to be in eval mode.
    """
    net = copy_model(small).eval()
    try:
        return net if reestimate_batch_norms_(net, inputs) else None
    except RankError:
        raise
    except Exception as error:  # the model's own code may raise anything
        if method == "norms":
            raise
        return f"Batch norms were not re-estimated: {reason(error)}."


def _choose(names: list[str], candidates: list[Candidate] | None, inputs: int) -> str:
    """Choose the best candidate; what the method made, if nothing could be compared."""
    if candidates is None:
        return next((n for n in (SOLVED, NORMS, COMPENSATED) if n in names), PRUNED)
    return names[choose_candidate(candidates, inputs)]


def _count_layers(solved: int, unsolved: Mapping[str, str]) -> str:
    """Say how many layers were solved, and why others were not.

    >>> _count_layers(48, {"head": "its weights are computed from other tensors"})
    '48 of 49 layers solved; not solved: head (its weights are computed from other tensors).'
    """
    by_reason: dict[str, list[str]] = {}
    for path, why in unsolved.items():
        by_reason.setdefault(why, []).append(path or "the model itself")
    parts = [f"{shorten(paths)} ({why})" for why, paths in by_reason.items()]
    total = solved + len(unsolved)
    return f"{solved} of {total} layers solved; not solved: {'; '.join(parts)}."


def _describe_failure(candidates: Sequence[Candidate]) -> str:
    """Say that nothing was better than the pruned model."""
    before, last = candidates[0], candidates[-1]
    change = f"squared error {before.error:.3g} before, {last.error:.3g} after"
    if before.agreement is not None and last.agreement is not None:
        change += f"; agreement {before.agreement:.1%} before, {last.agreement:.1%} after"
    return f"Recovery did not bring the outputs nearer ({change}): weights are unchanged."


def _describe(distilled: DistillationResult, seconds: float, *, kept: bool) -> str:
    """Describe the outcome of distillation in a sentence.

    >>> _describe(DistillationResult(steps=1), 5, kept=False)
    '1 step of distillation in 5 s; it did not help and was discarded: give it more time.'
    """
    if distilled.not_trained is not None:
        return f"Distillation was skipped: {distilled.not_trained}."
    steps = distilled.steps
    text = f"{steps} step{'s' * (steps != 1)} of distillation in {seconds:g} s"
    if distilled.skipped:
        text += f", {distilled.skipped} more skipped because of gradients that are not finite"
    if not kept:
        text += "; it did not help and was discarded"
        text += ": give it more time" if steps < FEW_STEPS else ""
    return f"{text}."


def device_memory(x: Tensor | None) -> int:
    """Return bytes of memory where a tensor is: free on a GPU, else what this process may use."""
    if x is not None and x.device.type == "cuda":
        return int(torch.cuda.mem_get_info(x.device)[0])
    limits = [DEFAULT_MEMORY]
    with suppress(AttributeError, OSError, ValueError):
        limits = [max(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    with suppress(OSError, ValueError):  # limit of a container; "max" if it has none
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def _solve_(
    model: nn.Module,
    small: nn.Module,
    plan: Plan,
    inputs: Inputs,
    cache: SolveCache | None,
    progress: Progress | None,
) -> tuple[list[SolvedLayer], dict[str, str]]:
    """Solve for all layers in execution order, each with the inputs it gets from solved ones.

    Args:
        model: The original model, whose outputs are the targets.
        small: The compact model, which is changed.
        plan: The plan it was made with.
        inputs: Inputs to solve with.
        cache: Layers solved before an interruption, if any.
        progress: Reports progress.

    Returns:
        The solved layers, and the reason for each layer that cannot be solved.
    """
    layers, largest, unsolvable = _find_layers(model, small, inputs)
    ranks = inputs.ranks
    available = _available_memory(inputs)
    # By the batches of all ranks, so that offloading does not depend on how many share a machine.
    offload = 2 * PASS_MEMORY_FACTOR * largest * inputs.batches / ranks.size > available
    max_bytes = int(OFFLOADED_FRACTION * available)
    passes = PairedForwards(model, small, layers, inputs, offload=offload, max_bytes=max_bytes)
    paths = [layer.path for layer in layers]
    solved = ranks.on_first(lambda: [] if cache is None else cache.read_(small, paths))
    if solved:
        ranks.copy_from_first_(named_tensors(small).values())
    try:
        for number, layer in enumerate(layers):
            if number < len(solved):
                continue
            if progress is not None:
                progress(layer.path, number, len(layers))
            solved.append(LayerSolver(model, small, plan, passes, number).solve_())
            if cache is not None:
                cache.write(small, solved, now=number + 1 == len(layers))
    finally:
        passes.close()
    known = {*unsolvable, *(layer.path for layer in layers)}
    for path in dict.fromkeys(layer_of(cut.tensor) for cut in plan.cuts if cut.role == "reads"):
        if path not in known:
            unsolvable[path] = "it is no convolution or linear layer"
    return solved, unsolvable


def _available_memory(inputs: Inputs) -> float:
    """Return the bytes that this rank's paused passes may hold."""
    x = next(iter(tensors_in((inputs.first.args,))), None)
    shares = x is None or x.device.type != "cuda"  # every rank has a GPU of its own
    return MEMORY_FRACTION * device_memory(x) / (inputs.ranks.local_size if shares else 1)


def _find_layers(
    model: nn.Module, small: nn.Module, inputs: Inputs
) -> tuple[list[SolvableLayer], int, dict[str, str]]:
    """Find layers to solve for, the bytes of the largest, and layers that cannot be solved.

    If the two models have different numbers of additions, these cannot be matched. Then the target
    of each layer is its own output.
    """
    nets, ranks = (small, model), inputs.ranks
    own = {n: find_solvable_layers(nets[n], inputs.first) for n in (0, 1) if ranks.owns(n)}
    found = {n: layers for one in ranks.gather(own) for n, layers in one.items()}
    compact_layers, original_layers = found[0], found[1]
    layers = compact_layers.layers
    if compact_layers.additions != original_layers.additions:
        layers = [replace(layer, addition=None) for layer in layers]
    return layers, original_layers.largest_bytes, compact_layers.unsolvable
