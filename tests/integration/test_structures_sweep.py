"""Every network of `tests.structures`, pruned in one setting and compared with a reference.

The reference shares nothing with the package's own verification. `benchmarks/structures.py` runs
all four settings, beside Torch-Pruning.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from tests.helpers.independent_reference import compare
from tests.helpers.output_comparison import difference, leaves
from tests.structures import NETWORKS
from tests.structures.judge import FAULTS, SETTINGS, judge
from torch import nn

import fpgm

NAMES = list(NETWORKS)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_handed_over_is_right_and_trains(name: str) -> None:
    settings = list(SETTINGS.values())
    verdict = judge(NETWORKS[name], settings[NAMES.index(name) % len(settings)])
    assert verdict.word not in FAULTS, f"{verdict.word}: {verdict.reason}"


def test_there_are_many_networks_of_many_families() -> None:
    assert len(NETWORKS) >= 220
    assert len({network.family for network in NETWORKS.values()}) >= 20


# The reference itself: it passes what is right and fails what is not.


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 4, 3)).eval()


INPUTS = [torch.ones(2, 3, 8, 8), torch.randn(1, 3, 12, 12, generator=torch.Generator())]


def test_the_reference_agrees_with_a_right_model_and_would_notice_a_wrong_one() -> None:
    plan = fpgm.plan(chain(), INPUTS[0], rate=0.5, align=1)
    right = compare(chain, fpgm.compact(chain(), plan), plan, INPUTS)
    assert right.ok
    assert right.precision == "float64"
    assert right.moved > 1e-3

    wrong = fpgm.compact(chain(), plan)
    wrong[2].weight.data[1] *= 1.001  # one of four channels, by a thousandth
    results = compare(chain, wrong, plan, INPUTS)
    assert not results.ok
    assert "axis 1, position 1" in results.where


def test_the_reference_does_not_depend_on_what_removed_filters_hold() -> None:
    plan = fpgm.plan(chain(), INPUTS[0], rate=0.5, align=1)
    small = fpgm.compact(chain(), plan)
    (cut,) = [c for c in plan.cuts if c.tensor == "0.weight"]
    other = chain()
    other[0].weight.data[cut.removed()] = 100.0
    assert compare(lambda: copy.deepcopy(other), small, plan, INPUTS).ok


def test_every_channel_is_compared_on_its_own_scale() -> None:
    boxes = torch.tensor([[1280.0, 0.3]])
    scores_wrong = torch.tensor([[1280.0, 0.2]])
    error, where = difference([boxes], [scores_wrong], torch.float64)
    assert error == pytest.approx(1 / 3)
    assert where == "output 0, axis 1, position 1"


def test_infinities_masks_and_nan_in_equal_places_are_equal() -> None:
    masked = torch.tensor([1.0, -torch.inf, torch.nan, -1e9])
    assert difference([masked], [masked.clone()], torch.float32)[0] == 0
    moved = torch.tensor([-torch.inf, 1.0, torch.nan, -1e9])
    assert difference([masked], [moved], torch.float32)[0] == torch.inf


def test_integers_must_be_equal_and_containers_equally_long() -> None:
    assert difference([torch.tensor([3])], [torch.tensor([3])], torch.float32)[0] == 0
    assert difference([torch.tensor([3])], [torch.tensor([4])], torch.float32)[0] == torch.inf
    assert difference(leaves({"a": 1}), leaves({"a": 1, "b": 2}), torch.float32)[0] == torch.inf
