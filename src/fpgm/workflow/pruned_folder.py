"""The folder of a pruned model: what `fpgm prune` writes, and reading it back with all checks.

File names and safe replacement are in `utils.run_files`; models are built here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import nn

from fpgm.errors import FileError, PlanError, VerificationError
from fpgm.models import assets
from fpgm.models.registry import load_model, names_code
from fpgm.pruning.compaction import compact
from fpgm.pruning.plan import Plan
from fpgm.pruning.serialization import load, read_plans, save
from fpgm.pruning.verification import Certificate
from fpgm.utils.atomic_io import file_sha256
from fpgm.utils.copying import copy_model
from fpgm.utils.modules import tensors_sha256
from fpgm.utils.plain_json import to_json
from fpgm.utils.run_files import (
    PLAN,
    RESULTS,
    SMALL,
    RunResults,
    WeightsFile,
    check_replaceable,
    read_results,
    write_files,
)
from fpgm.utils.safe_read import read_text
from fpgm.utils.text import reason
from fpgm.workflow.original_model import build_model
from fpgm.workflow.step_timer import Steps, StepTimer


@dataclass(frozen=True)
class PrunedFolder:
    """The contents of a folder, after all checks."""

    path: Path
    results: RunResults
    original: nn.Module
    plan: Plan
    plain: nn.Module
    """The compact model with the original's weights."""
    small: nn.Module
    """The compact model with the weights in the folder."""

    @property
    def own_weights(self) -> bool:
        """Tell whether recovery or `fpgm compare` changed the weights."""
        return has_own_weights(self.results)


def has_own_weights(results: RunResults) -> bool:
    """Tell whether a compact model has different weights from its original."""
    return results.get("recovery") is not None or "row" in results


def open_pruned(
    folder: Path,
    results: RunResults,
    weights: Path | None,
    steps: Steps | None = None,
) -> PrunedFolder:
    """Rebuild the original and load the compact model; raise an error if anything has changed.

    Args:
        folder: What `fpgm prune`, `recover` or `compare` wrote.
        results: Its results, which the user trusts if they name code.
        weights: The file of trained weights that the original was built with.
        steps: Follows the steps, with their durations.
    """
    steps = steps or StepTimer()
    with steps.step("build"):
        original = _build_original(folder, results, weights)
    with steps.step("load"):
        plan = _read_plan(folder)
        small = load(folder / SMALL, lambda: copy_model(original))
        plain = compact(original, plan)
        if has_own_weights(results):
            _check_digest(folder, small, plain, str(results.get("small_sha256")))
        else:
            _check_tensors(folder, small, plain)
    return PrunedFolder(folder, results, original, plan, plain, small)


def check_sources(
    folder: Path, results: RunResults, weights: Path | None, allowed: Sequence[str]
) -> None:
    """Refuse a folder whose original cannot be built with what the user gave."""
    problems = [
        untrusted_code(folder, results, allowed),
        _missing_weights(folder, results, weights),
    ]
    if any(problems):
        raise FileError(f"{'; '.join(filter(None, problems))}.")


def read_trusted(folder: Path, allowed: Sequence[str] = ()) -> RunResults:
    """Read results of a folder; if its model is code, only if the user names that code."""
    results = read_results(folder)
    if (why := untrusted_code(folder, results, allowed)) is not None:
        raise FileError(f"{why}.")
    return results


def load_small(folder: Path, results: RunResults) -> nn.Module:
    """Load the compact model of a folder; its architecture is that of the original."""
    return load(folder / SMALL, lambda: load_model(results["model"]))


def untrusted_code(folder: Path, results: RunResults, allowed: Sequence[str]) -> str | None:
    """Describe the code that would run without the user's permission, or return None."""
    model = results["model"]
    if not names_code(model) or model in allowed:
        return None
    return (
        f"{folder} was made from {model}, which is code that would be run: if you trust it, pass "
        f"--model {quote(model)}"
    )


def write_pruned(
    out: Path,
    small: nn.Module,
    plan: Plan,
    results: Mapping[str, Any],
    beside: Mapping[str, str],
    *,
    force: bool = False,
    check: Callable[[], None] | None = None,
) -> None:
    """Write the files of a pruned model, all or none.

    Args:
        out: The folder.
        small: The compact model.
        plan: The plan that made it.
        results: Content of results.json.
        beside: Other texts by file name.
        force: Replace what another process put there meanwhile.
        check: Decides instead of `force` whether an existing folder may be replaced.
    """
    texts = {PLAN: plan.to_json(indent=1), RESULTS: to_json(dict(results)), **beside}
    allow = check or (lambda: check_replaceable(out, force=force))
    write_files(out, texts, lambda path: save(small, path), allow)


def costs_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan's costs before and after pruning, for results.json."""
    return {
        "macs_before": plan.macs_before,
        "macs_after": plan.macs_after,
        "macs_removed": round(plan.macs_removed, 6),
        "params_before": plan.params_before,
        "params_after": plan.params_after,
        "params_removed": round(plan.params_removed, 6),
        **({} if plan.latency is None else {"latency": asdict(plan.latency)}),
    }


def certificate_dict(certificate: Certificate) -> dict[str, Any]:
    """Return a certificate with its verdict, for results.json."""
    return {"ok": certificate.ok, **asdict(certificate)}


def weights_record(weights: Path | None) -> WeightsFile | None:
    """Return name and digest of a weights file, for results.json."""
    return None if weights is None else {"file": weights.name, "sha256": file_sha256(weights)}


def _missing_weights(folder: Path, results: RunResults, weights: Path | None) -> str | None:
    """Say that a weights file is needed, or None; the one in the package need not be given."""
    used = results["weights"]
    if used is None or weights is not None or _find_shipped(used) is not None:
        return None
    return f"{folder} was made from {used['file']}: pass that file with --weights"


def _find_shipped(used: WeightsFile) -> Path | None:
    """Find the file in the package that a model was built with."""
    files = assets.SHIPPED_WEIGHTS.values()
    return next((file for file in files if file_sha256(file) == used["sha256"]), None)


def _build_original(folder: Path, results: RunResults, weights: Path | None) -> nn.Module:
    original = build_model(results["model"], _check_weights(folder, results, weights))
    if tensors_sha256(original) != results["original_sha256"]:
        raise FileError(
            f"{results['model']!r} is not the model that {folder} was made from: its weights or "
            "its code have changed."
        )
    return original


def _check_weights(folder: Path, results: RunResults, weights: Path | None) -> Path | None:
    """Return the weights file that the original was built with."""
    used = results["weights"]
    if used is None:
        if weights is not None:
            raise FileError(f"{folder} was made without a weights file: leave out --weights.")
        return None
    if weights is None:
        return _find_shipped(used)
    if weights.is_file() and file_sha256(weights) != used["sha256"]:
        raise FileError(
            f"{weights} is not the {used['file']} that {folder} was made from: its sha256 differs."
        )
    return weights


def _read_plan(folder: Path) -> Plan:
    file = folder / PLAN
    try:
        plan = Plan.from_json(read_text(file))
    except (OSError, PlanError, UnicodeDecodeError) as error:
        raise FileError(f"{file} cannot be read: {reason(error)}.") from error
    if read_plans(folder / SMALL).get("") != (plan,):
        raise FileError(f"{file} is not the plan in {folder / SMALL}.")
    return plan


def _check_tensors(folder: Path, small: nn.Module, plain: nn.Module) -> None:
    """Refuse a model that does not hold the kept weights bit by bit."""
    given = small.state_dict()
    for name, tensor in plain.state_dict().items():
        same = torch.equal(tensor, given[name]) if tensor.numel() else True
        if not same:
            raise VerificationError(
                f"{folder / SMALL} is not the original without the removed units: "
                f"'{name}' holds other values (trained since, or damaged)."
            )


def _check_digest(folder: Path, small: nn.Module, plain: nn.Module, digest: str) -> None:
    """Refuse a recovered model whose weights are not those that were written."""
    shapes = [{n: t.shape for n, t in net.state_dict().items()} for net in (small, plain)]
    if shapes[0] != shapes[1] or tensors_sha256(small) != digest:
        raise VerificationError(
            f"{folder / SMALL} is not the model that was written: its tensors have changed "
            "since (trained, or damaged)."
        )
