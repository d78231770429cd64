"""What must hold for every network: the compact model computes what the silenced one computes.

Random networks are drawn from all structures of `tests.networks` and pruned in every way. Beside
the package's own verification stand two paths that share nothing with it: masking a copy and
comparing outputs here, and `tests.helpers.independent_reference` on new inputs. That a structure is
handled, not merely left alone, is shown in `test_structures.py`.

`FPGM_EXAMPLES` sets how many networks are drawn; `benchmarks/property_sweep.py` draws many more.
Around every structure stand its plainest network and one for each way to write it; other sizes,
activations, norms and dimensions are tried around a few of them, and around all in the sweep.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from tests.helpers.independent_reference import compare
from tests.networks import (
    BLOCKS,
    HEADS,
    B,
    Case,
    Inputs,
    Net,
    build,
    call,
    cases,
    has_private_units,
    leaves,
    networks,
    variants,
)
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

import fpgm
from fpgm.errors import ModelError
from fpgm.pruning.plan import Plan
from fpgm.utils.modules import modules_by_path

EXAMPLES = int(os.environ.get("FPGM_EXAMPLES", "40"))
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
random_networks = settings(
    max_examples=EXAMPLES,
    derandomize="FPGM_EXAMPLES" not in os.environ,
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    # On networks this small more threads only wait for each other.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The truths, one function each.


@dataclass(frozen=True)
class Outcome:
    """What pruning one network came to."""

    removed: int
    moved: float


def check(case: Case) -> Outcome | None:
    """All properties of one case; None when the network has nothing to prune."""
    model, inputs = build(case.net, getattr(torch, case.dtype))
    before = Snapshot(model)
    try:
        plan = plan_of(model, inputs, case)
    except ModelError as error:
        if "nothing to prune" not in str(error).lower() or has_private_units(case.net):
            raise
        before.check_unchanged(model)
        return None
    small = fpgm.compact(model, plan)
    removed = sum(group.units - group.kept for group in plan.groups)
    moved = check_masked_equals_compact(model, plan, small, inputs)
    check_independent_reference(model, plan, small, inputs)
    if removed:
        check_certificate(model, plan, inputs)
    check_costs(plan, small, inputs)
    check_round_trip(model, plan, small)
    before.check_unchanged(model)
    before.check_same_kind(small)
    check_trains(model, small, inputs)
    return Outcome(removed, moved)


class Snapshot:
    """Everything about a model that pruning must leave as it was."""

    def __init__(self, model: nn.Module) -> None:
        self.kind = type(model)
        self.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.grads = {name: p.requires_grad for name, p in model.named_parameters()}
        self.modes = {name: module.training for name, module in model.named_modules()}
        self.random = torch.get_rng_state()

    def check_unchanged(self, model: nn.Module) -> None:
        """The model has the same values, bit by bit, and the same flags."""
        state = model.state_dict()
        assert list(state) == list(self.state)
        changed = [name for name, tensor in state.items() if not _same(tensor, self.state[name])]
        assert not changed, f"the original was changed: {changed}"
        assert {n: m.training for n, m in model.named_modules()} == self.modes
        assert {n: p.requires_grad for n, p in model.named_parameters()} == self.grads
        assert torch.equal(torch.get_rng_state(), self.random), "the random state was changed"

    def check_same_kind(self, small: nn.Module) -> None:
        """The compact model has the original's class, names and flags."""
        assert type(small) is self.kind
        assert list(small.state_dict()) == list(self.state)
        assert {n: m.training for n, m in modules_by_path(small).items()} == self.modes
        state = small.state_dict(keep_vars=True)  # the names of the original
        assert {n: state[n].requires_grad for n in self.grads} == self.grads
        assert len(list(small.parameters())) == len(self.grads)


def check_masked_equals_compact(
    model: nn.Module, plan: Plan, small: nn.Module, inputs: Inputs
) -> float:
    """Masking a copy and compacting give one output; returns how far it is from the original's."""
    masked = copy.deepcopy(model)
    fpgm.mask_(masked, plan)
    original, reference, compact = (_outputs(m, inputs) for m in (model, masked, small))
    assert [t.shape for t in compact] == [t.shape for t in original], "output shapes changed"
    assert all(bool(t.isfinite().all()) for t in reference), "the masked model gives NaN or inf"
    error = _distance(compact, reference)
    assert error < TOLERANCE[original[0].dtype], f"masked and compact differ by {error:.1e}"
    return _distance(reference, original)


def check_independent_reference(
    model: nn.Module, plan: Plan, small: nn.Module, inputs: Inputs
) -> None:
    """Noise in removed filters and zeros in their consumers give the same, on new inputs too."""
    with torch.random.fork_rng(devices=[]):
        others = tree_map(lambda t: torch.randn(3, *t.shape[1:], dtype=t.dtype), inputs)
        found = compare(
            lambda: copy.deepcopy(model), copy.deepcopy(small), plan, [inputs, others], random=False
        )
    assert found.ok, f"compact and reference: {found}"


def check_certificate(model: nn.Module, plan: Plan, inputs: Inputs) -> None:
    """The package's own verification agrees.

    Units that no example switches on may be removed without moving anything; only then may the
    certificate call itself vacuous.
    """
    found = fpgm.verify(model, plan, inputs)
    tolerance = TOLERANCE[_outputs(model, inputs)[0].dtype]
    assert found.max_error < tolerance, f"verify finds a difference of {found.max_error:.1e}"
    if not found.ok:  # in float32, outputs may seem to move by rounding
        exact, masked = (copy.deepcopy(model).double() for _ in range(2))
        fpgm.mask_(masked, plan)
        moved = _distance(*(_outputs(m, _double(inputs)) for m in (masked, exact)))
        assert moved < 1e-6, f"verify proves nothing, but outputs moved by {moved:.1e}"


def check_costs(plan: Plan, small: nn.Module, inputs: Inputs) -> None:
    """The plan's promises are what torch counts on the compact model."""
    assert plan.exact
    assert plan.params_after == sum(p.numel() for p in small.parameters())
    assert plan.macs_after == _macs(small, inputs)
    assert plan.macs_after <= plan.macs_before


def check_round_trip(model: nn.Module, plan: Plan, small: nn.Module) -> None:
    """A plan read back from JSON is equal, and applies equally."""
    again = Plan.from_json(plan.to_json())
    assert again == plan
    first, second = small.state_dict(), fpgm.compact(model, again).state_dict()
    assert list(first) == list(second)
    assert all(_same(first[name], second[name]) for name in first)


def check_trains(model: nn.Module, small: nn.Module, inputs: Inputs) -> None:
    """The compact model takes a step in training mode, where its outputs have their old shapes."""
    # In float64, for oneDNN's float32 code writes out of bounds in the backward pass of a strided
    # 1×1 convolution on fewer than eight channels-last channels (uxlfoundation/oneDNN#6035).
    model, small = (copy.deepcopy(m).double().train() for m in (model, small))
    inputs = _double(inputs)
    with torch.random.fork_rng(devices=[]):
        shapes = [tensor.shape for tensor in leaves(call(model, inputs))]
        step = torch.optim.SGD(small.parameters(), lr=1e-3)
        outputs = leaves(call(small, inputs))
        assert [tensor.shape for tensor in outputs] == shapes, "training output shapes changed"
        loss = torch.stack([tensor.square().mean() for tensor in outputs]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        step.step()
        after = torch.stack([t.square().mean() for t in leaves(call(small, inputs))]).sum()
    assert bool(loss.isfinite()), f"the loss is {loss.item()}"
    assert bool(after.isfinite()), f"the loss after a step is {after.item()}"
    idle = [name for name, p in small.named_parameters() if p.requires_grad and p.grad is None]
    assert not idle, f"parameters without a gradient: {idle}"


def plan_of(model: nn.Module, inputs: Inputs, case: Case) -> Plan:
    """The plan a case asks for."""
    return fpgm.plan(model, inputs, rate=case.rate, align=case.align, residual=case.residual)


@torch.no_grad()
def _outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    modes = {module: module.training for module in model.modules()}
    outputs = [tensor.clone() for tensor in leaves(call(model.eval(), inputs))]
    for module, mode in modes.items():
        module.training = mode
    return outputs


def _double(inputs: Inputs) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs.double()
    if isinstance(inputs, dict):
        return {name: tensor.double() for name, tensor in inputs.items()}
    return tuple(tensor.double() for tensor in inputs)


def _distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Largest difference relative to the largest value, over all outputs."""
    tiny = 1e-30
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=tiny))
        for a, b in zip(ours, theirs, strict=True)
    )


def _macs(model: nn.Module, inputs: Inputs) -> int:
    with FlopCounterMode(display=False) as counter:
        _outputs(model, inputs)
    return counter.get_total_flops() // 2


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


# The generator itself.


@given(networks())
@settings(random_networks, max_examples=min(EXAMPLES, 30))
def test_a_description_pastes_back_and_builds_the_same_model(net: Net) -> None:
    assert eval(repr(net), {"B": B, "Net": Net}) == net
    (model, inputs), (again, same) = build(net), build(net)
    assert all(map(_same, model.state_dict().values(), again.state_dict().values()))
    assert all(map(_same, _outputs(model, inputs), _outputs(again, same)))
    assert all(bool(tensor.isfinite().all()) for tensor in _outputs(model, inputs))


# Random networks, pruned in every way.


@given(cases())
@random_networks
def test_masked_equals_compact_on_random_networks(case: Case) -> None:
    note(f"check({case})")
    assume(check(case) is not None)


def around_one_structure() -> Iterator[Any]:
    """All variants of all structures; swept where only a size or a layer is another."""
    for name in (*BLOCKS, *HEADS):
        for i, net in enumerate(variants(name)):
            item = net.head if name in HEADS else net.blocks[0]
            other_dims = not item.options and name in ("conv", "norm", "residual", "flatten_linear")
            another_way = other_dims or any(
                option in ("groups", "stride", "shift")
                or (
                    isinstance(value, (str, bool))
                    and (option not in ("act", "norm") or name == option)
                )
                for option, value in item.options
            )
            marks = () if i == 0 or another_way else pytest.mark.sweep
            yield pytest.param(net, marks=marks, id=repr(net))


@pytest.mark.parametrize("net", list(around_one_structure()))
def test_masked_equals_compact_around_one_structure(net: Net) -> None:
    """In both modes for residual streams, unless they lead to one plan."""
    coupled, independent = Case(net), Case(net, residual="independent")
    check(coupled)
    if decisions(coupled) != decisions(independent):
        check(independent)


def decisions(case: Case) -> Plan | None:
    """The plan a case leads to, without the request; None if there is nothing to prune."""
    try:
        return replace(plan_of(*build(case.net), case), asked={})
    except ModelError:
        return None


def case(*blocks: B, rate: float = 0.5, residual: str = "coupled", **net: Any) -> Case:
    """A case of the sweep, in its smallest form."""
    return Case(Net(*blocks, **net), rate=rate, residual=residual)


ONCE_WRONG = {
    "weights of a layer norm were counted for channels along two dims": case(
        B("interleave", how="behind"), B("layer_norm")
    ),
    "a bias makes a silent unit speak before its neighbours read it": case(
        B("token_mix"), B("eca"), B("conv")
    ),
    "a layer met twice was taken for its bias": case(
        B("norm", norm="instance"), B("spatial_gate"), B("convnext")
    ),
    "a grouped convolution of one input a group looks depthwise": case(
        B("roll"),
        B("resnext", groups=4, hidden=16),
        head=B("flatten_linear", how="view"),
        rate=0.75,
    ),
    "a shuffled branch enters a stream in another order": case(
        B("shuffle", grouped=True),
        B("non_local"),
        inputs="two_tuple",
        rate=0.3,
        residual="independent",
    ),
    "the same, twice the input": case(
        B("shuffle", grouped=True), B("resnext"), inputs="two_dict", residual="independent"
    ),
    "the same, behind a sum": case(B("shuffle"), B("token_mix"), seed=980, residual="independent"),
    "a convolution behind a scatter runs twice": case(
        B("join", body=(B("shared"),)), residual="independent"
    ),
    "padding is one unit with a channel that folds onto it": case(
        B("residual", shortcut="pad_lambda"), B("fold_batch")
    ),
    "padding and channels are one unit under a norm": case(
        B("residual", shortcut="pad_derived"), B("group_norm")
    ),
    "half the groups of a norm are one of two pieces": case(
        B("group_norm"), B("split"), B("conv"), dims=1
    ),
    "padding is one unit with a channel that is written beside it": case(
        B("residual", shortcut="pad_lambda"), B("slice_write")
    ),
    "space of a tensor of zeros is taken for channels": case(
        B("interleave", how="strided"), B("preact"), head=B("flatten_linear", how="module")
    ),
    "the batch of a tensor of zeros shares an axis with channels": case(
        B("interleave", how="strided"), B("residual", norm="instance")
    ),
    "one channel is left, and no output depends on it": case(
        B("non_local", hidden=4),
        B("preact", hidden=4),
        B("channel_softmax"),
        B("group_norm", groups="each"),
        rate=0.75,
    ),
}


@pytest.mark.parametrize("found", ONCE_WRONG.values(), ids=ONCE_WRONG)
def test_networks_that_once_went_wrong(found: Case) -> None:
    outcome = check(found)
    assert outcome is not None
    assert outcome.removed > 0
