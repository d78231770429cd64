"""Verify numerically that the compact model matches the masked original.

Both run in float64: on the examples with the weights as they are, and on shuffled examples with
modified weights that cannot hide an error. All outputs must agree up to rounding, and masking must
change them; otherwise nothing was verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fpgm.errors import ModelError, VerificationError
from fpgm.pruning.compaction import check_fits, compact
from fpgm.pruning.decision_inputs import (
    DecisionRecorder,
    comparable,
    returns_integers,
    unused_modules,
)
from fpgm.pruning.float64 import ConstantNoise, Float64, to_double
from fpgm.pruning.masked_reference import (
    compare_weights,
    copy_kept_weights_,
    ignore_removed_,
    masked_copy,
    norms_over_kept,
    randomize_removed_,
)
from fpgm.pruning.output_differences import Difference, difference, distance, form_problem
from fpgm.pruning.plan import Plan
from fpgm.pruning.train_check import training_problem
from fpgm.pruning.verification_weights import TINY, Calibration, calibrate_, vary_weights_
from fpgm.utils.copying import copy_model
from fpgm.utils.default_device import cpu_by_default
from fpgm.utils.example_inputs import (
    Example,
    as_examples,
    batch_size,
    map_tensors,
    resize_batch,
    shuffled_inputs,
)
from fpgm.utils.html_table import html_table
from fpgm.utils.kept_weights import KeptWeights
from fpgm.utils.modules import keep_tied_buffers, named_tensors, unwrap_model
from fpgm.utils.outputs import Leaf, find_nan, read_outputs
from fpgm.utils.preserve_state import ModelState, disable_compilation
from fpgm.utils.rng import random_state, restore_random_state, seed_everything
from fpgm.utils.text import escape_text
from fpgm.utils.thread_lock import suppress_warnings, with_global_lock
from fpgm.utils.tracebacks import describe_error
from fpgm.utils.weight_norm import weight_norms

TOLERANCE = 1e-4
"""Largest relative difference that float32 rounding explains in a deep network."""

_EXACT_TOLERANCE = 1e-8
_MAX_ROUNDING = 1e-5
"""Larger differences in float64 are never attributed to rounding."""
_ROUNDING_FACTOR = 10
"""How much more a model may round than with each weight changed by one unit in the last place."""
_MIN_MOVE = 1e-6
_PARAMETER = "parameter "


@dataclass(frozen=True, repr=False)
class Certificate:
    """The result of verification.

    `max_error` is the largest difference between the compact model and the masked original, each
    output channel relative to its own scale, and `worst` says where it is. `moved` is how much
    masking changes the original's outputs, relative to their typical size.
    """

    max_error: float
    moved: float
    inputs: int
    tolerance: float
    precision: str
    exact: bool = True
    worst: str = ""
    problem: str = ""
    """Any problem other than numbers: another shape, or a model that does not run or train."""
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Tell whether outputs agree up to rounding, and masking changes them."""
        return not self.differs and self.moved > max(_MIN_MOVE, 100 * self.max_error)

    @property
    def differs(self) -> bool:
        """Tell whether the compact model is wrong, not merely unverified."""
        return bool(self.problem) or not self.max_error <= self.tolerance

    def __repr__(self) -> str:
        return f"Certificate({self._outcome()})"

    def _repr_html_(self) -> str:
        rows = [
            ("largest difference", f"{self.max_error:.1e}", escape_text(self.worst)),
            ("tolerance", f"{self.tolerance:.0e}", "larger differences are not rounding"),
            ("masking changes outputs by", f"{self.moved:.3g}", "relative to their typical size"),
            ("inputs", str(self.inputs), self.precision),
        ]
        notes = [escape_text(note) for note in self.notes]
        return html_table(f"Certificate: {self._outcome()}", (), rows, notes)

    def _outcome(self) -> str:
        """Summarize in one line whether the compact model is right."""
        if self.problem:
            return f"NOT ok: {escape_text(self.problem)}"
        where = f" at {escape_text(self.worst)}" if self.worst and self.differs else ""
        verdict = "ok" if self.ok else "NOT ok" if self.differs else "nothing verified"
        kind = "" if self.exact else ", approximate"
        return (
            f"{verdict}: differs by {self.max_error:.1e}{where}, tolerance {self.tolerance:.0e}, "
            f"over {self.inputs} inputs in {self.precision}{kind}"
        )

    def check(self) -> Certificate:
        """Raise unless ok."""
        if self.ok:
            return self
        if self.problem:
            raise VerificationError(self.problem)
        if self.worst.startswith(_PARAMETER):
            raise VerificationError(
                f"The compact model's {self.worst} does not contain the original values that "
                "the plan keeps: compact the model again."
            )
        notes = "".join(f" {note}" for note in self.notes)
        if not self.differs:
            raise VerificationError(
                f"Nothing was verified: masking the removed units changes the outputs by only "
                f"{self.moved:.1e}, with these weights and with modified ones. Verify with an "
                f"example input that reaches those units.{notes}"
            )
        where = f" at {self.worst}" if self.worst else ""
        raise VerificationError(
            f"The compact model differs from the masked original by {self.max_error:.1e}{where} "
            f"(tolerance {self.tolerance:.0e}). Do not use it: plan again with ignore= for the "
            f"layers before that output.{notes}"
        )


@cpu_by_default()
def verify(
    model: nn.Module,
    plan: Plan,
    example_inputs: Any,
    *,
    compacted: nn.Module | None = None,
    inputs: int = 2,
) -> Certificate:
    """Compare the compact model with the masked original on the examples and shuffled ones.

    Works in float64, or in the model's own precision if its code runs in no other. It compares with
    the weights as they are, and again with weights that make every unit affect the outputs. The
    compact model must also train if the original does.
    """
    certificate = certify(model, plan, as_examples(example_inputs), compacted, inputs)
    if certificate.problem:
        raise VerificationError(certificate.problem)
    return certificate


@with_global_lock
def certify(
    model: nn.Module,
    plan: Plan,
    examples: Sequence[Example],
    compacted: nn.Module | None = None,
    inputs: int = 2,
) -> Certificate:
    """Run `verify` on parsed examples; return a certificate instead of raising an error."""
    model = unwrap_model(model)
    check_fits(model, plan)
    small = compact(model, plan) if compacted is None else unwrap_model(compacted)
    state = random_state()
    try:
        try:
            certificate = _Check(model, small, plan, wide=True).certificate(examples, inputs)
        except _OriginalError:
            # The model's own code works only in its precision: compare there.
            certificate = _Check(model, small, plan, wide=False).certificate(examples, inputs)
        if not certificate.differs and (problem := training_problem(model, small, examples)):
            certificate = replace(certificate, problem=problem)
    except _OriginalError as error:
        raise VerificationError(str(error)) from error.__cause__
    finally:
        restore_random_state(state)
    return certificate


class _OriginalError(Exception):
    """The original itself, or the original with units masked, does not run."""


@dataclass
class _WorstCase:
    """The worst of several comparisons."""

    difference: Difference = field(default_factory=Difference)
    moved: float = 0.0
    problem: str = ""

    def add(self, other: _WorstCase) -> None:
        self.difference = max(self.difference, other.difference, key=lambda case: case.error)
        self.moved = max(self.moved, other.moved)
        self.problem = self.problem or other.problem


class _Check:
    """Copies of the original, the masked original and the compact model, in one precision."""

    def __init__(self, model: nn.Module, small: nn.Module, plan: Plan, *, wide: bool) -> None:
        self.plan, self.wide = plan, wide
        self.weights = compare_weights(model, small, plan)
        self.original, self.small = copy_model(model), copy_model(small)
        if wide:
            self._cast_to_double()
            if self._holds_original_weights and weight_norms(model):
                # Its gains were computed in lower precision.
                copy_kept_weights_(self.small, plan, self.original)
        for copied in (self.original, self.small):
            copied.eval()
        randomize_removed_(self.original, plan)
        self.reference = masked_copy(self.original, plan)
        self.tolerance = _EXACT_TOLERANCE if wide else TOLERANCE
        self.same_noise = False
        self.keeps_state = False
        self.decisions: list[Leaf] = []
        """Numbers from which the last call computed integers, if it returns any."""
        self.read: set[int] = set()
        self.moved: dict[str, float] = {}
        """How far masking moves each output."""
        self.notes: list[str] = []
        self.undefined: set[str] = set()
        """Outputs that hold NaN with the examples as they are."""

    def _cast_to_double(self) -> None:
        try:
            with suppress_warnings():  # parameters of a scripted part are not leaves once copied
                for copied in (self.original, self.small):
                    with keep_tied_buffers(copied):
                        copied.double()
                        if any(tensor.is_complex() for tensor in named_tensors(copied).values()):
                            copied._apply(to_double)
        except Exception as error:
            text = describe_error(error)
            raise _OriginalError(f"The model cannot be cast to float64: {text}.") from error

    def certificate(self, examples: Sequence[Example], inputs: int) -> Certificate:
        """Compare on the examples as they are, then on shuffled ones with varied weights."""
        if self.wide:
            examples = [map_tensors(example, to_double) for example in examples]
        shuffled = shuffled_inputs(examples, inputs - 1)
        worst = _WorstCase()
        for example in examples:
            before = self._run(self.original, example)
            self.undefined |= find_nan(before)
            worst.add(self._compare(example, before))
        count = len(examples)
        if not worst.problem and worst.difference.error <= self.tolerance:
            varied = self._compare_varied(examples, shuffled)
            count += len(shuffled)
            if not varied.problem and varied.difference.error <= self.tolerance:
                varied.add(self._compare_in_train_mode(examples))
            if worst.moved > TINY:
                varied.moved = 0.0  # masking changes it with the weights as they are
            worst.add(varied)
        if not worst.problem and worst.difference.error <= self.tolerance and self.weights.changed:
            worst.difference = Difference(1.0, f"{_PARAMETER}'{self.weights.changed}'")
        self._note_unchecked()
        return Certificate(
            worst.difference.error, worst.moved, count, self.tolerance,
            str(self._precision).removeprefix("torch."), self.plan.exact, worst.difference.where,
            worst.problem, tuple(self.notes),
        )  # fmt: skip

    @property
    def _holds_original_weights(self) -> bool:
        """Tell whether the compact model holds the original's weights, so that both can change."""
        return self.weights.comparable and not self.weights.changed

    @property
    def _precision(self) -> torch.dtype:
        kinds = (p.dtype for p in self.original.parameters() if p.is_floating_point())
        return torch.float64 if self.wide else next(kinds, torch.float32)

    def _compare_varied(
        self, examples: Sequence[Example], shuffled: Sequence[Example]
    ) -> _WorstCase:
        """Compare with varied weights, as long as the original runs with them."""
        trials = [*shuffled, *([] if shuffled else examples[:1])]
        if not self._holds_original_weights:
            return self._compare_trials(trials)
        before = {name: t.clone() for name, t in named_tensors(self.original).items()}
        vary_weights_(self.original, self.plan)
        self._update_reference()
        try:
            calibration = self._calibrate(trials[0])
        except _OriginalError as error:  # its code does not work with other weights
            self._note(f"The check with modified weights was skipped: {error}")
            self._restore(before)
            return _WorstCase()
        calibration.repeat_(self.reference, self.original)
        copy_kept_weights_(self.small, self.plan, self.original)
        return self._compare_trials(trials)

    def _restore(self, values: Mapping[str, Tensor]) -> None:
        """Restore the original weights in all copies."""
        with torch.no_grad():
            for name, tensor in named_tensors(self.original).items():
                tensor.copy_(values[name])
        self._update_reference()
        copy_kept_weights_(self.small, self.plan, self.original)

    def _calibrate(self, trial: Example) -> Calibration:
        """Set the masked model's weights and statistics; its other state is restored."""
        state, self.keeps_state = ModelState(self.reference), True
        before = {id(p): p.detach().clone() for p in self.reference.parameters()}
        try:
            calibration = calibrate_(self.reference, lambda _: self._run_masked(trial))
        finally:
            self.keeps_state = False
        state.restore(except_for=calibration.values.keys())
        with torch.no_grad():
            for parameter in self.reference.parameters():  # the forward pass may write into some
                if id(parameter) not in calibration.values:
                    parameter.copy_(before[id(parameter)])
                if id(parameter) in calibration.divisors:
                    parameter.div_(calibration.divisors[id(parameter)])
        return calibration

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _note_unchecked(self) -> None:
        """Note the outputs that masking never changes, and the modules that no example uses."""
        still = [path for path, moved in self.moved.items() if not moved > _MIN_MOVE]
        if still and len(still) < len(self.moved):
            self._note(
                f"{_list_names(still)}: not verified, because masking the removed units does not "
                "change it."
            )
        if unused := unused_modules(self.original, self.read):
            names = _list_names([f"'{path}'" for path in unused])
            self._note(f"{names}: not used by the examples, so its outputs were not checked.")

    def _update_reference(self) -> None:
        """Copy the original's weights to the masked reference."""
        values = named_tensors(self.original)
        with torch.no_grad():
            for name, tensor in named_tensors(self.reference).items():
                tensor.copy_(values[name])
        ignore_removed_(self.reference, self.plan)

    def _run_masked(self, example: Example) -> list[Leaf]:
        with norms_over_kept(self.reference, self.plan):
            return self._run(self.reference, example)

    def _compare_in_train_mode(self, examples: Sequence[Example]) -> _WorstCase:
        """Compare in train mode what only train mode computes (auxiliary heads), if it runs."""
        if self.plan.outputs:
            return _WorstCase()  # they are planned for eval mode, which may return others
        self.same_noise = True
        try:
            for copied in (self.original, self.reference, self.small):
                copied.train()
        except Exception:  # it refuses to train, and so does its compact copy
            return _WorstCase()
        worst = _WorstCase()
        for example in examples:
            if batch_size(example) == 1:  # batch norm needs several different values per channel
                (example,) = shuffled_inputs([resize_batch(example, 2)], 1)
            worst.add(self._compare_in_training(example))
        return worst

    def _compare_in_training(self, example: Example) -> _WorstCase:
        try:
            worst = self._compare_once(example, self._run(self.original, example))
        except (_OriginalError, ModelError):
            return _WorstCase()
        if worst.problem:
            worst.problem = f"In train mode: {worst.problem}"
        elif worst.difference.error:
            where = f"{worst.difference.where}, in train mode"
            worst.difference = replace(worst.difference, where=where)
        return worst

    def _compare_trials(self, trials: Sequence[Example]) -> _WorstCase:
        """Compare on generated inputs, except where the original's outputs are undefined."""
        worst = _WorstCase()
        for trial in trials:
            worst.add(self._compare_if_defined(trial))
        return worst

    def _compare_if_defined(self, trial: Example) -> _WorstCase:
        try:
            before = self._run(self.original, trial)
            defined = find_nan(before) <= self.undefined
            if defined:
                return self._compare(trial, before)
            self._note("With modified weights its outputs contain NaN: this check was skipped.")
        except _OriginalError as error:
            self._note(f"The check with modified weights and inputs was skipped: {error}")
        return _WorstCase()

    def _compare(self, example: Example, before: list[Leaf]) -> _WorstCase:
        worst = self._compare_once(example, before)
        if worst.difference.error <= self.tolerance and not worst.problem:
            return worst
        if not self.same_noise and self._draws_random_numbers(example):
            self.same_noise = True
            self.notes.append("The model draws random numbers; constants were used instead.")
            return self._compare_once(example, self._run(self.original, example))
        if self.wide and not worst.problem and worst.difference.error < _MAX_ROUNDING:
            rounding = _ROUNDING_FACTOR * self._measure_rounding(example)
            if worst.difference.error <= rounding:
                self.tolerance = min(rounding, _MAX_ROUNDING)
                self._note("The model amplifies rounding, so the tolerance is larger than usual.")
                return worst
        if self._is_nondeterministic(example):
            self.notes.append(
                "Its outputs differ from one run to the next, even with the same seed: switch "
                "that off for verification."
            )
        return worst

    def _compare_once(self, example: Example, before: list[Leaf]) -> _WorstCase:
        want, decided = self._run_masked(example), self.decisions
        try:
            have = self._call(self.small, example)
        except Exception as error:
            text = describe_error(error)
            return _WorstCase(problem=f"The compact model does not run on the example: {text}.")
        kept = _kept_outputs(want, self.plan)
        if problem := form_problem(kept, have):
            return _WorstCase(problem=problem)
        worst = _WorstCase(moved=1.0 if len(before) != len(want) else 0.0)
        for a, b, c, whole in zip(kept, before, have, want, strict=False):
            worst.add(_WorstCase(difference(a, c, self._precision, self.tolerance)))
            moved = max(distance(whole, b), _shrinks(whole, a))
            worst.moved = max(worst.moved, moved)
            if whole.is_tensor:
                self.moved[whole.path] = max(self.moved.get(whole.path, 0.0), moved)
        for a, c in comparable(decided, self.decisions):
            worst.add(_WorstCase(difference(a, c, self._precision, self.tolerance)))
        return worst

    def _run(self, net: nn.Module, example: Example) -> list[Leaf]:
        try:
            return self._call(net, example)
        except ModelError:
            raise
        except Exception as error:
            which = "original" if net is self.original else "masked"
            raise _OriginalError(
                f"The {which} model does not run on the example: {describe_error(error)}."
            ) from error

    def _call(self, net: nn.Module, example: Example) -> list[Leaf]:
        with ExitStack() as stack:
            stack.enter_context(suppress_warnings())
            stack.enter_context(torch.no_grad())
            stack.enter_context(disable_compilation())
            if self.same_noise:
                stack.enter_context(ConstantNoise())  # type: ignore[no-untyped-call]
            if self.wide:
                stack.enter_context(Float64())  # type: ignore[no-untyped-call]
            if not self.keeps_state:
                stack.callback(ModelState(net).restore)
                written = KeptWeights(net)
                stack.callback(written.restore)
                stack.enter_context(written)
            decisions = stack.enter_context(DecisionRecorder())
            seed_everything(0)
            outputs = read_outputs(example.call(net))
            self.decisions = decisions.leaves if returns_integers(outputs) else []
            if net is self.original:
                self.read |= decisions.read
            return outputs

    def _draws_random_numbers(self, example: Example) -> bool:
        """Tell whether the model draws random numbers from torch."""
        seed_everything(0)
        before = torch.get_rng_state()
        self._run(self.original, example)
        return not torch.equal(before, torch.get_rng_state())

    def _measure_rounding(self, example: Example) -> float:
        """Measure how much the outputs change with weights that differ in the last place."""
        expected = self._run_masked(example)
        values = named_tensors(self.reference)
        before = {name: tensor.clone() for name, tensor in values.items()}
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor in values.values():
                if tensor.dtype == torch.float64:
                    signs = torch.rand(tensor.shape, generator=generator).sub_(0.5).sign_()
                    tensor.mul_(1 + torch.finfo(torch.float64).eps * signs.to(tensor))
            rounded = self._run_masked(example)
            for name, tensor in values.items():
                tensor.copy_(before[name])
        pairs = zip(expected, rounded, strict=False)
        errors = (difference(a, b, self._precision, self.tolerance).error for a, b in pairs)
        return max(errors, default=0.0)

    def _is_nondeterministic(self, example: Example) -> bool:
        one, other = (self._run(self.original, example) for _ in range(2))
        return any(distance(a, b) > 0 for a, b in zip(one, other, strict=False))


def _list_names(names: Sequence[str]) -> str:
    """List the first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _kept_outputs(want: list[Leaf], plan: Plan) -> list[Leaf]:
    """Return what the plan keeps of the model's outputs."""
    number, kept = -1, []
    for leaf in want:
        if leaf.is_tensor and leaf.value.numel():
            number += 1
            for c in plan.outputs:
                if c.tensor == str(number):
                    index = torch.tensor(c.keep, device=leaf.value.device)
                    leaf = Leaf(leaf.path, leaf.value.index_select(c.dim, index))
        kept.append(leaf)
    return kept


def _shrinks(whole: Leaf, kept: Leaf) -> float:
    """Return 1 if an output shrinks, since masking then certainly changes it."""
    return float(whole.is_tensor and kept.value.shape != whole.value.shape)
