"""Damaged files: a clear error or the model that was saved, never anything in between."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.helpers.fuzzing import GREY, _bounded, _watched, damage, forge

import fpgm
from fpgm.models import digits

COUNT = 1000
FORGED = 400
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_files(tmp_path: Path, part: int) -> None:
    results = Counter(damage(tmp_path, seed) for seed in range(part, COUNT, PARTS))
    assert results["refused"] > 0.9 * COUNT / PARTS  # the digest tells


@pytest.mark.parametrize("part", range(PARTS))
def test_forged_files(tmp_path: Path, part: int) -> None:
    """Changed on purpose, with a digest that agrees."""
    results = Counter(forge(tmp_path, seed) for seed in range(part, FORGED, PARTS))
    assert results["refused"] > FORGED / PARTS / 4
    assert results["loaded"] > 0


def test_memory_without_bound_would_be_noticed() -> None:
    with pytest.raises(RuntimeError, match="memory"), _bounded():
        torch.zeros(2**32)


def test_positions_that_are_invalid(tmp_path: Path) -> None:
    """A plan whose adapters pick nothing at all: whatever becomes of it, Python says nothing."""
    model = digits()
    plan = fpgm.plan(model, GREY, rate=0.5, align=1, residual="independent")
    nothing = tuple(replace(adapter, index=()) for adapter in plan.adapters)
    assert nothing
    fpgm.compact(model, fpgm.Plan.from_json(replace(plan, adapters=nothing).to_json()))


def test_the_helpers_of_this_file_work(tmp_path: Path) -> None:
    """A pickle that runs something is heard."""
    file = tmp_path / "evil"
    file.write_bytes(b"cposix\ngetcwd\n(tR.")
    with _watched() as calls:
        pickle.loads(file.read_bytes())
    assert [event for event, _ in calls if event == "pickle.find_class"]
