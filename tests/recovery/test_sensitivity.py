"""Sensitivity: estimated output errors are those that least squares leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fpgm
from fpgm.recovery.sensitivity.result import GroupSensitivity, Sensitivity
from fpgm.recovery.sensitivity.runner import correct_curve
from fpgm.recovery.sensitivity.trials import Trials
from fpgm.utils.calibration_data import read_inputs

SHAPE = (3, 7, 7)


def batches(count: int = 3) -> list[Tensor]:
    torch.manual_seed(5)
    return [torch.randn(16, *SHAPE) for _ in range(count)]


def chain(groups: int = 1) -> nn.Sequential:
    torch.manual_seed(2)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1, groups=groups)
    )
    return net.eval()


def least_error(net: nn.Sequential, dropped: list[int], data: list[Tensor]) -> float:
    """Compute the relative error that is left with the best weights of the last layer."""
    with torch.no_grad():
        inner = torch.cat([net[1](net[0](x)) for x in data])
        wanted = torch.cat([net(x) for x in data]).movedim(1, 0).flatten(1).T.double()
    kept = [i for i in range(inner.shape[1]) if i not in dropped]
    rows = nn.functional.unfold(inner[:, kept], 3, padding=1).movedim(1, 0).flatten(1).T.double()
    rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], 1)
    left = wanted - rows @ torch.linalg.lstsq(rows, wanted).solution
    return float(left.square().sum() / wanted.square().sum())


def test_the_curve_is_what_least_squares_leaves() -> None:
    """The outputs are the consumer's own, so no probe is involved."""
    net, data = chain(), batches(16)
    results = fpgm.sensitivity(net, data[0], data, align=1)
    [group] = results.groups
    for count in (1, 3, 6):
        plan = fpgm.plan(net, data[0], rates={"0": count / 8}, align=1)
        [dropped] = [c.removed() for c in plan.cuts if c.tensor == "0.weight"]
        assert group.harm[count] == pytest.approx(least_error(net, list(dropped), data), rel=0.1)
    assert group.harm[0] == 0
    assert list(group.harm) == sorted(group.harm)


def test_groups_that_tolerate_pruning_are_pruned() -> None:
    """One layer's filters are all the same but for their size: they go, and nothing else does."""
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 4, 3, padding=1),
    ).eval()  # fmt: skip
    with torch.no_grad():
        net[2].weight.copy_(net[2].weight[:1] * torch.linspace(0.5, 2, 16)[:, None, None, None])
        net[2].bias.zero_()
    data = batches()
    plan = fpgm.plan(net, data[0], macs=0.3, align=1, allocate="sensitivity", loader=data)
    dropped = {group.name: group.units - group.kept for group in plan.groups}
    assert dropped["2"] > 4
    assert dropped["0"] == dropped["4"] == 0


@pytest.mark.parametrize("groups", [1, 2])
def test_any_consumer_is_measured(groups: int) -> None:
    net, data = chain(groups), batches()
    results = fpgm.sensitivity(net, data[0], data, align=1)
    assert results.groups[0].harm[-2] > results.groups[0].harm[2] > 0


def test_the_model_is_unchanged() -> None:
    net, data = chain().train(), batches()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    fpgm.sensitivity(net, data[0], data)
    assert net.training
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks for m in net.modules())


def test_json_round_trip() -> None:
    net, data = chain(), batches()
    results = fpgm.sensitivity(net, data[0], data)
    again = Sensitivity.from_json(results.to_json())
    assert again == results
    for text in ("", "[]", '{"format": 2}', '{"format": 1}'):
        with pytest.raises(fpgm.FileError):
            Sensitivity.from_json(text)


def test_curves_of_other_sizes_and_of_what_was_not_measured() -> None:
    results = Sensitivity(
        (GroupSensitivity("a", 2, (0.0, 1.0, 3.0)), GroupSensitivity("b", 1, (0.0, 5.0))),
        {},
        inputs=1,
    )
    assert results.curve("a", 2) == [0.0, 1.0, 3.0]
    assert results.curve("a", 4) == [0.0, 0.5, 1.0, 2.0, 3.0]
    assert results.curve("c", 1) == [0.0, 4.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allocate": "sensitivity"}, "allocate='sensitivity' needs data: pass loader=."),
        ({"allocate": "x"}, "allocate is 'x': give 'uniform', 'sensitivity' or a result."),
    ],
)
def test_bad_requests(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fpgm.RequestError) as error:
        fpgm.plan(chain(), torch.randn(1, *SHAPE), rate=0.5, **options)
    assert str(error.value) == message


class Classifier(nn.Module):
    """Three classes that only some of its units distinguish."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x).relu()).relu().mean((2, 3)))


@torch.no_grad()
def labelled(net: Classifier, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Make images in many colors, and classes that are about equally frequent."""
    data = [x + 2 * torch.randn(16, 3, 1, 1) for x in batches(count)]
    net.head.bias -= torch.cat([net(x) for x in data]).mean(0)
    return [(x, net(x).argmax(1)) for x in data]


def without_labels(data: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [x for x, _ in data]


def test_accuracy_is_that_of_the_recovered_model() -> None:
    """The last group's consumer is the only layer that recover has to solve, too."""
    torch.manual_seed(3)
    net = Classifier().eval()
    data = labelled(net, 12)
    results = fpgm.sensitivity(net, data[0][0], data, align=1, rates=(0.25, 0.5, 0.75))
    assert results.accuracy == 1.0
    last = results.groups[-1]
    plain = []
    for rate in (0.25, 0.5, 0.75):
        plan = fpgm.plan(net, data[0][0], rates={last.name: rate}, align=1)
        nets = fpgm.recover(net, plan, without_labels(data)), fpgm.compact(net, plan)
        with torch.no_grad():
            right = [sum(int((n(x).argmax(1) == y).sum()) for x, y in data) for n in nets]
        assert last.accuracy[str(rate)] == pytest.approx(right[0] / results.inputs, abs=0.03)
        plain.append(right[1] / results.inputs)
    counted = [value for value in last.accuracy.values() if value is not None]
    assert len(counted) == 3
    assert counted[0] > counted[-1]
    assert sum(counted) > sum(plain) + 0.1


def test_a_duplicate_costs_no_accuracy() -> None:
    torch.manual_seed(3)
    net = Classifier().eval()
    with torch.no_grad():
        for tensor in (net.a.weight, net.a.bias):
            tensor[4:] = tensor[:4]
    data = labelled(net)
    results = fpgm.sensitivity(net, data[0][0], data, rates=[0.125])
    [first] = [g for g in results.groups if g.name == "a"]
    assert first.accuracy["0.125"] == 1.0
    assert first.at(0.125) < 1e-3


def test_without_labels_accuracy_is_not_measured() -> None:
    net = Classifier().eval()
    data = labelled(net)
    for other in (without_labels(data), [(x, torch.rand(16)) for x, _ in data]):
        results = fpgm.sensitivity(net, data[0][0], other)
        assert results.accuracy is None
        assert not any(g.accuracy for g in results.groups)


def test_an_interrupted_measurement_continues(tmp_path: Path, monkeypatch: Any) -> None:
    net = Classifier().eval()
    data = labelled(net)
    full = fpgm.sensitivity(net, data[0][0], data)
    file = tmp_path / "sensed.json"
    tried: list[int] = []
    without = Trials.accuracy_without

    def counted(self: Trials, order: Tensor, count: int) -> float | None:
        tried.append(count)
        if len(tried) == 7:
            raise KeyboardInterrupt
        return without(self, order, count)

    monkeypatch.setattr(Trials, "accuracy_without", counted)
    with pytest.raises(KeyboardInterrupt):
        fpgm.sensitivity(net, data[0][0], data, cache=file)
    assert Sensitivity.read(file).groups[0] == full.groups[0]
    results = fpgm.sensitivity(net, data[0][0], data, cache=file)
    assert results == full
    assert len(tried) == 7 + 4  # the first group's four were not measured again
    assert Sensitivity.read(file) == full
    monkeypatch.setattr(
        "fpgm.recovery.sensitivity.runner.collect_statistics", None
    )  # nothing is left to measure
    assert fpgm.sensitivity(net, data[0][0], data, cache=file) == full


def test_a_file_about_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    net = Classifier().eval()
    data = labelled(net)
    file = tmp_path / "sensed.json"
    fpgm.sensitivity(net, data[0][0], data, cache=file, rates=())
    kept = file.read_text()
    with pytest.raises(fpgm.FileError, match="another criterion"):
        fpgm.sensitivity(net, data[0][0], data, cache=file, criterion="l1")
    with pytest.raises(fpgm.FileError, match="another set of inputs"):
        fpgm.sensitivity(net, data[0][0], data[:2], cache=file)
    with pytest.raises(fpgm.FileError, match="another choice of groups"):
        fpgm.sensitivity(net, data[0][0], data, cache=file, ignore=["a"])
    with pytest.raises(fpgm.FileError, match="another set of weights"):
        fpgm.sensitivity(Classifier().eval(), data[0][0], data, cache=file)
    with pytest.raises(fpgm.RequestError, match="between 0 and 1"):
        fpgm.sensitivity(net, data[0][0], data, rates=[1.5])
    assert file.read_text() == kept
    assert not list(tmp_path.glob(".*"))


def test_inputs_of_a_consumer_too_wide_for_equations_count_as_independent(monkeypatch: Any) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 25, 4)).eval()
    data = batches(32)  # fewer than weights, and they would be fitted but nothing else
    exact = fpgm.sensitivity(net, data[0], data, align=1).groups[0]
    monkeypatch.setattr("fpgm.recovery.sensitivity.probes.MAX_FAN_IN", 100)
    rough = fpgm.sensitivity(net, data[0], data, align=1).groups[0]
    assert rough.harm[0] == 0
    assert list(rough.harm) == sorted(rough.harm)
    assert exact.harm[4] < rough.harm[4] < 1


def test_a_curve_is_corrected_by_measured_errors() -> None:
    curve = np.array([0.0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    results = correct_curve(curve, {3: 6.0, 6: 3.0}.get)
    assert results[[0, 3, 6]] == pytest.approx([0, 6, 6])  # a curve never decreases
    assert results[1] == pytest.approx(2)  # below the first point, the same ratio
    assert results[10] == pytest.approx(6)
    assert correct_curve(curve, lambda count: None) is curve
    nothing = np.zeros(11)  # a probe estimate of zero does not make units free
    assert correct_curve(nothing, {3: 6.0, 6: 9.0}.get)[[0, 3, 6, 10]] == pytest.approx(
        [0, 6, 9, 15]
    )
    assert correct_curve(nothing, lambda count: None) is nothing


def test_errors_are_right_behind_a_mean_over_positions() -> None:
    """Errors of all positions are correlated here; probes alone treat them as independent."""
    torch.manual_seed(3)
    net = Classifier().eval()
    data = [x + 2 * torch.randn(16, 3, 1, 1) for x in batches(8)]
    group = fpgm.sensitivity(net, data[0], data, align=1).groups[0]
    count = round(0.3 * 8)
    plan = fpgm.plan(net, data[0], rates={"a": count / 8}, align=1)
    [dropped] = [c.removed() for c in plan.cuts if c.tensor == "a.weight"]
    with torch.no_grad():
        inner = torch.cat([net.a(x).relu() for x in data])
        kept = [i for i in range(8) if i not in dropped]
        rows = nn.functional.unfold(inner[:, kept], 3, padding=1).movedim(1, 0).flatten(1).T
        rows = torch.cat([rows, torch.ones(len(rows), 1)], 1).double()
        wanted = net.b(inner).movedim(1, 0).flatten(1).T.double()
        solved = rows @ torch.linalg.lstsq(rows, wanted).solution
        results = solved.T.reshape(8, len(inner), *inner.shape[2:]).movedim(0, 1).float()
        tried = slice(len(inner) // 4)  # a quarter of the inputs
        outputs, original = (
            net.head(b.relu().mean((2, 3)))[tried] for b in (results, net.b(inner))
        )
    error = float((outputs - original).square().sum() / original.square().sum())
    assert group.harm[count] == pytest.approx(error, rel=0.15)


class Masked(Classifier):
    """One class is never chosen."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.tensor([0.0, 0.0, -torch.inf])


def test_outputs_that_are_not_finite_are_left_out() -> None:
    torch.manual_seed(3)
    net = Masked().eval()
    data = batches()
    results = fpgm.sensitivity(net, data[0], data, align=1)
    assert all(0 < group.harm[1] < group.harm[7] < 10 for group in results.groups)


def test_a_wide_consumer_s_mean_is_that_of_all_batches(monkeypatch: Any) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 25, 4)).eval()
    monkeypatch.setattr("fpgm.recovery.sensitivity.probes.MAX_FAN_IN", 100)
    x = torch.cat(batches())
    one, all_ = (fpgm.sensitivity(net, x, list(x.split(n)), align=1) for n in (1, 48))
    assert one.groups[0].harm == pytest.approx(all_.groups[0].harm, rel=0.5)
    assert one.groups[0].harm[1] > 0


def test_a_consumer_without_bias_is_not_given_a_constant() -> None:
    net, data = chain(), batches(16)
    net[2] = nn.Conv2d(8, 6, 3, padding=1, bias=False)
    net.eval()
    group = fpgm.sensitivity(net, data[0], data, align=1).groups[0]
    plan = fpgm.plan(net, data[0], rates={"0": 2 / 8}, align=1)
    small = fpgm.recover(net, plan, data)
    assert group.harm[2] == pytest.approx(small.fpgm_recovery.after, rel=0.1)


class Flagged(Classifier):
    """Takes numbers beside its images, and returns a dict with a tensor of varying length."""

    def forward(self, x: Tensor, scale: Tensor, k: int = 1) -> Any:  # type: ignore[override]
        out = super().forward(x * scale * k)
        return {"scores": out, "large": out[out > 0.1]}


def flagged(k: int = 1) -> list[dict[str, Any]]:
    return [{"x": x, "scale": torch.tensor(2.0), "k": k} for x in batches()]


def test_any_arguments_and_outputs(tmp_path: Path) -> None:
    torch.manual_seed(3)
    net = Flagged().eval()
    file = tmp_path / "sensed.json"
    results = fpgm.sensitivity(net, flagged()[0], flagged(), cache=file)
    assert results.groups[0].harm[-2] > 0
    with pytest.raises(fpgm.FileError, match="another set of inputs"):
        fpgm.sensitivity(net, flagged()[0], flagged(k=3), cache=file)


def test_the_same_groups_in_another_order_are_another_measurement(tmp_path: Path) -> None:
    net = Classifier().eval()
    data = batches()

    def measured(name: str, **options: Any) -> Sensitivity:
        return fpgm.sensitivity(net, data[0], data, cache=tmp_path / name, **options)

    for name, one, other in (
        ("ignore", {"ignore": ["b"]}, {}),
        ("seed", {"criterion": "random", "seed": 0}, {"criterion": "random", "seed": 1}),
        (
            "function",
            {"criterion": lambda rows: rows.norm(dim=1)},
            {"criterion": lambda rows: -rows.norm(dim=1)},
        ),
    ):
        measured(name, **one)
        with pytest.raises(fpgm.FileError, match="another choice of groups and units"):
            measured(name, **other)


def test_an_incomplete_result_is_continued_and_not_planned_with(
    tmp_path: Path, monkeypatch: Any
) -> None:
    net = Classifier().eval()
    data = batches()
    full = fpgm.sensitivity(net, data[0], data)
    file = tmp_path / "sensed.json"
    error = Trials.error_without
    tried: list[int] = []

    def tries(self: Trials, order: Tensor, count: int) -> float | None:
        tried.append(count)
        if len(tried) == 3:  # two for the first group
            raise KeyboardInterrupt
        return error(self, order, count)

    monkeypatch.setattr(Trials, "error_without", tries)
    with pytest.raises(KeyboardInterrupt):
        fpgm.sensitivity(net, data[0], data, cache=file)
    begun = Sensitivity.read(file)
    assert begun.groups == full.groups[:1]
    with pytest.raises(fpgm.RequestError, match="is incomplete"):
        fpgm.plan(net, data[0], macs=0.3, allocate=begun)
    assert fpgm.sensitivity(net, data[0], data, cache=file) == full
    assert len(tried) == 5
    with pytest.raises(fpgm.FileError, match="is not a folder"):
        fpgm.sensitivity(net, data[0], data, cache=tmp_path / "absent" / "sensed.json")
    assert len(tried) == 5


def test_unusable_labels_are_not_tried_again(tmp_path: Path, monkeypatch: Any) -> None:
    net = Classifier().eval()
    data = [(x, y) for x, y in labelled(net)]
    deep = nn.Sequential(net, nn.Unflatten(1, (3, 1))).eval()  # not one score a class
    file = tmp_path / "sensed.json"
    result = fpgm.sensitivity(deep, data[0][0], data, cache=file)
    assert result.accuracy is None
    monkeypatch.setattr("fpgm.recovery.sensitivity.runner.collect_statistics", None)
    assert fpgm.sensitivity(deep, data[0][0], data, cache=file) == result


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    net = Classifier().eval()
    data = batches(1)
    file = tmp_path / "sensed.json"
    fpgm.sensitivity(net, data[0], data, cache=file)
    good = json.loads(file.read_text())
    for change in (
        {"asked": None},
        {"accuracy": []},
        {"groups": []},
        {"complete": {}, "format": 9},
    ):
        file.write_text(json.dumps(good | change))
        with pytest.raises(fpgm.FileError, match=r"sensed\.json"):
            fpgm.sensitivity(net, data[0], data, cache=file)
    good["groups"][0]["harm"] = []
    file.write_text(json.dumps(good))
    with pytest.raises(fpgm.FileError, match="has missing errors"):
        fpgm.sensitivity(net, data[0], data, cache=file)
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(fpgm.FileError, match="cannot be read"):
        fpgm.sensitivity(net, data[0], data, cache=file)


def test_targets_of_trials_have_no_autograd_graph() -> None:
    net = Classifier()
    data = batches(1)
    inputs = read_inputs(data, 16)
    trials = Trials(net, None, None, inputs)  # type: ignore[arg-type]
    assert not any(out.requires_grad for kept in trials._targets for out in kept)


def test_without_trials_the_probe_estimate_is_returned(tmp_path: Path, monkeypatch: Any) -> None:
    """A result without trials is not taken for one with trials."""
    net = Classifier().eval()
    data = without_labels(labelled(net))
    corrected = fpgm.sensitivity(net, data[0], data, cache=tmp_path / "a.json", align=1)
    monkeypatch.setattr(Trials, "error_without", None)
    estimated = fpgm.sensitivity(net, data[0], data, trials=False, align=1)
    assert estimated.groups[0].harm != corrected.groups[0].harm
    fpgm.plan(net, data[0], macs=0.3, allocate=estimated, align=1)
    with pytest.raises(fpgm.FileError, match="measured for another way of measuring"):
        fpgm.sensitivity(net, data[0], data, trials=False, cache=tmp_path / "a.json", align=1)


def test_a_layer_with_more_weights_than_inputs_does_not_seem_free_to_prune() -> None:
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = nn.Sequential(*features, nn.Linear(64, 16)).eval()
    few, others = batches(2), torch.randn(256, *SHAPE)
    group = fpgm.sensitivity(net, few[0], few, align=1, rates=()).groups[0]
    small = fpgm.recover(net, fpgm.plan(net, few[0], rate=0.6, align=1), few)
    with torch.no_grad():
        targets = net(others)
        error = float((small(others) - targets).square().sum() / targets.square().sum())
    assert group.at(0.6) > error / 3
    assert group.at(0.99) >= group.at(0.6)
