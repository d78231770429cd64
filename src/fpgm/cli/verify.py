"""`fpgm verify`: build the original again and prove once more what a folder of results claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from fpgm.cli import _common as common
from fpgm.cli import _run_dir as res
from fpgm.errors import FileError, PlanError, VerificationError
from fpgm.models import assets
from fpgm.pruning.compaction import compact
from fpgm.pruning.plan import Plan
from fpgm.pruning.serialization import load, read_plans
from fpgm.pruning.verification import verify as certify
from fpgm.utils.atomic_io import file_sha256
from fpgm.utils.copying import copy_model
from fpgm.utils.modules import tensors_sha256
from fpgm.utils.safe_read import text_of
from fpgm.utils.text import printable, reason


def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="What `fpgm prune` or `fpgm compare` wrote.")
    ],
    weights: common.Weights = None,
    trusted: common.Trusted = None,
    json: common.AsJson = False,
) -> None:
    """Prove again that the compact model in a folder is the original without the removed units."""
    results = res.told_in(folder)
    wanting = [res.untrusted(folder, results, trusted or ()), _no_weights(folder, results, weights)]
    if any(wanting):
        raise FileError(f"{'; '.join(filter(None, wanting))}.")
    own = results.get("recovery") is not None or "row" in results  # its weights: fpgm compare's too
    with common.Steps(3) as steps:
        with steps.step("build"):
            weights = _checked_weights(folder, results, weights)
            original = common.build(results["model"], weights)
            if tensors_sha256(original) != results["original_sha256"]:
                raise FileError(
                    f"{results['model']!r} is not the model that {folder} was made from: its "
                    "weights or its code have changed."
                )
        with steps.step("load"):
            made = _read_plan(folder)
            small = load(folder / res.SMALL, lambda: copy_model(original))
        with steps.step("verify"):
            plain = compact(original, made)
            x = common.example(results["input"])
            if not own:
                _check_tensors(folder, small, plain)
                certificate = certify(original, made, x, compacted=small)
            else:  # its weights are its own: the structure is proven, the weights by digest
                _check_recovered(folder, small, plain, str(results.get("small_sha256")))
                certificate = certify(original, made, x, compacted=plain)
    if json:
        common.show_json(
            {
                "folder": str(folder),
                "model": results["model"],
                "achieved": res.achieved(made),
                "certificate": res.certificate_dict(certificate),
                "recovered": results.get("recovery") is not None,
                "own_weights": own,
            }
        )
    else:
        typer.echo(
            f"{printable(results['model'])}: MACs −{made.macs_removed:.1%}, "
            f"parameters −{made.params_removed:.1%}"
        )
        typer.echo(res.certificate_line(certificate))
        if own:
            typer.echo(
                "That is the structure, before recovery; the weights are those recovery gave it, "
                "by their sha256."
                if results.get("recovery") is not None
                else "That is the structure; the weights are those fpgm compare left, by their "
                "sha256."
            )
    certificate.check()


def _no_weights(folder: Path, results: dict[str, Any], weights: Path | None) -> str | None:
    """What is to be said if a file is needed; only the one in the package need not be given."""
    used = results["weights"]
    if used is None or weights is not None or used["sha256"] == file_sha256(assets.WEIGHTS):
        return None
    return f"{folder} was made from {used['file']}: give that file with --weights"


def _checked_weights(folder: Path, results: dict[str, Any], weights: Path | None) -> Path | None:
    """The file the model was pruned with."""
    used = results["weights"]
    if used is None:
        if weights is not None:
            raise FileError(f"{folder} was made without a weights file: leave out --weights.")
        return None
    if weights is None:
        return assets.WEIGHTS
    if weights.is_file() and file_sha256(weights) != used["sha256"]:
        raise FileError(
            f"{weights} is not the {used['file']} that {folder} was made from: its sha256 differs."
        )
    return weights


def _read_plan(folder: Path) -> Plan:
    file = folder / res.PLAN
    try:
        made = Plan.from_json(text_of(file))
    except (OSError, PlanError, UnicodeDecodeError) as error:
        raise FileError(f"{file} cannot be read: {reason(error)}.") from error
    if read_plans(folder / res.SMALL).get("") != (made,):
        raise FileError(f"{file} is not the plan in {folder / res.SMALL}.")
    return made


def _check_tensors(folder: Path, small: nn.Module, expected: nn.Module) -> None:
    """The file must hold the kept weights bit by bit, else the proof is about another model."""
    found = small.state_dict()
    for name, tensor in expected.state_dict().items():
        same = torch.equal(tensor, found[name]) if tensor.numel() else True
        if not same:
            raise VerificationError(
                f"{folder / res.SMALL} is not the original without the removed units: "
                f"'{name}' holds other values (trained since, or damaged)."
            )


def _check_recovered(folder: Path, small: nn.Module, plain: nn.Module, digest: str) -> None:
    """A recovered model has the compact model's tensors, with the values recovery gave them."""
    shapes = [{n: t.shape for n, t in net.state_dict().items()} for net in (small, plain)]
    if shapes[0] != shapes[1] or tensors_sha256(small) != digest:
        raise VerificationError(
            f"{folder / res.SMALL} is not the model that was written: its tensors have changed "
            "since (trained, or damaged)."
        )
