"""Prune, recover, evaluate and save as library functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.models import digits
from fpgm.utils.plain_json import to_json
from fpgm.utils.run_files import PRUNED, read_results
from fpgm.workflow.original_model import build_model, example_input
from fpgm.workflow.pipeline import (
    AccuracyResult,
    Origin,
    RecoveryOptions,
    count_accuracy,
    recovery_results,
    run_pruning,
    run_recovery,
    save_pruning,
    save_recovery,
)
from fpgm.workflow.plan_request import PlanRequest
from fpgm.workflow.pruned_folder import open_pruned

SHAPE = (1, 1, 8, 8)


class Noise:
    """Inputs without meaning, and a fixed count for every model."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            yield torch.randn(32, 1, 8, 8, generator=generator), torch.zeros(32).long()

    def count_correct(self, model: nn.Module, count: int) -> tuple[int, int]:
        return (3, 4) if count else (0, 0)


def test_a_model_goes_through_and_is_restored(tmp_path: Path) -> None:
    net, out = build_model("digits", None), tmp_path / "out"
    run = run_pruning(
        net, example_input(SHAPE), PlanRequest(rate=0.5), recovery=RecoveryOptions(), data=Noise()
    )
    assert run.certificate.ok
    assert run.recovery is not None
    assert run.accuracy == AccuracyResult({"original": 0.75, "compact": 0.75, "recovered": 0.75}, 4)
    assert list(run.seconds) == [
        "trace and plan", "compact and verify", "analyze filters", "recover", "count accuracy",
    ]  # fmt: skip
    results = save_pruning(run, out, Origin("digits", None, SHAPE), asked={"data": "noise"})
    assert json.loads(to_json(results)) == read_results(out)
    assert results["asked"]["rate"] == 0.5
    assert results["asked"]["data"] == "noise"
    assert {file.name for file in out.iterdir()} <= set(PRUNED)

    pruned = open_pruned(out, read_results(out), None)
    assert pruned.own_weights
    again = run_recovery(pruned, RecoveryOptions(None, 64, distil=1.0), data=Noise())
    save_recovery(again, None, recovery_results(again))
    open_pruned(out, read_results(out), None)


def test_nothing_is_written_to_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    net = build_model("digits", None)
    run = run_pruning(net, example_input(SHAPE), PlanRequest(rate=0.5))
    with pytest.raises(fpgm.FileError, match="is not empty"):
        save_pruning(run, tmp_path, Origin("digits", None, SHAPE))
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_recovery_without_data_is_refused() -> None:
    with pytest.raises(fpgm.RequestError, match="needs inputs"):
        run_pruning(
            digits().eval(), example_input(SHAPE), PlanRequest(rate=0.5), recovery=RecoveryOptions()
        )


def test_what_is_no_classifier_has_no_accuracy() -> None:
    assert count_accuracy({"original": nn.Identity()}, Noise(), 0).to_dict() == {"accuracy": None}


def test_a_custom_criterion_is_stored_by_name() -> None:
    def largest(filters: Tensor) -> Tensor:
        return filters.abs().amax(1)

    asked = PlanRequest(macs=0.3, criterion=largest, align="auto", threads=2).to_dict()
    assert (asked["criterion"], asked["align"], asked["threads"]) == ("largest", "auto", 2)
    assert json.dumps(asked)


class TestRecoverFurther:
    @pytest.fixture
    def net(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)
        ).eval()

    def test_from_a_recovered_model(self, net: nn.Module) -> None:
        x = [torch.randn(32, 3, 8, 8) for _ in range(4)]
        plan = fpgm.plan(net, x[0], rate=0.5)
        once = fpgm.recover(net, plan, x, method="norms")
        kept = {name: value.clone() for name, value in once.state_dict().items()}
        twice = fpgm.recover(net, plan, x, start=once)
        assert twice.fpgm_recovery.before == pytest.approx(once.fpgm_recovery.after)
        assert twice.fpgm_recovery.after < once.fpgm_recovery.after
        assert all(torch.equal(kept[name], value) for name, value in once.state_dict().items())

    def test_a_model_of_another_plan_is_no_start(self, net: nn.Module) -> None:
        x = torch.randn(8, 3, 8, 8)
        plan, other = (fpgm.plan(net, x, rate=rate, align=1) for rate in (0.5, 0.25))
        with pytest.raises(fpgm.RequestError, match="start is not a compact model of this plan"):
            fpgm.recover(net, plan, [x], start=fpgm.compact(net, other))

    def test_no_method_needs_time_to_distil(self, net: nn.Module) -> None:
        x = torch.randn(8, 3, 8, 8)
        with pytest.raises(fpgm.RequestError, match="pass distil="):
            fpgm.recover(net, fpgm.plan(net, x, rate=0.5), [x], method=None)
