"""Plans from strangers: what no planner could have written for a model is refused in one line."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import fpgm
from fpgm.cli import _common as common
from fpgm.errors import FileError, PlanError
from fpgm.models.checkpoint import load_weights
from fpgm.pruning.plan import Attribute, Cached, Cut, Frozen, Group, Latency, Plan, StaleSize
from fpgm.pruning.plan_checks import check_places, holds_size
from fpgm.pruning.serialization import DIGEST, MAX_PLANS, content_sha256, read_plans
from fpgm.utils.adapter_spec import Adapter

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ESCAPE = "\x1b]0;owned\x07\x9b2J"


class Net(nn.Module):
    """A module of the user's own, with numbers of every kind."""

    rows = 8

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 4, 1)
        self.width, self.parts, self.stride, self.flag = 8, [4, 4], 8, True
        self.set = 0
        self.mean = torch.zeros(8)

    @property
    def height(self) -> int:
        return 8

    @height.setter
    def height(self, value: int) -> None:
        self.set = value

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.norm(self.a(x)).relu())
        return out


def made() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return fpgm.plan(made(), X, rate=0.5, align=1)


def refusal(plan: Plan) -> str:
    """What is said against a plan that came as JSON."""
    with pytest.raises(PlanError) as caught:
        fpgm.compact(made(), Plan.from_json(plan.to_json()))
    line = str(caught.value)
    assert "\n" not in line
    assert line.isprintable()
    return line


class TestAttributes:
    @pytest.mark.parametrize(
        ("module", "name", "before", "after"),
        [
            ("a", "stride", (1, 1), (1, 1)),
            ("a", "kernel_size", (3, 3), (1, 1)),
            ("a", "dilation", (1, 1), (1, 1)),
            ("a", "_version", 1, 1),
            ("", "stride", 8, 4),
        ],
    )
    def test_what_counts_no_channels_stays(
        self, plan: Plan, module: str, name: str, before: Any, after: Any
    ) -> None:
        other = Attribute(module, name, before, after)
        assert refusal(replace(plan, attributes=(*plan.attributes, other))) == (
            f"The plan is damaged: it changes {name} of '{module}', which is not a number of "
            "channels."
        )

    @pytest.mark.parametrize(
        ("name", "before"),
        [("training", 0), ("flag", 1), ("__class__", 8), ("width", 9), ("height", 8), ("mean", 8)],
    )
    def test_what_is_not_there_stays(self, plan: Plan, name: str, before: int) -> None:
        other = Attribute("", name, max(before, 1), 1)
        line = refusal(replace(plan, attributes=(*plan.attributes, other)))
        assert line.startswith("The plan is damaged: ")

    @pytest.mark.parametrize(
        ("before", "after"), [(8, 9), (8, -1), (8, (4,)), ((4, 4), (4,)), ((4, 4), (5, 4))]
    )
    def test_sizes_shrink(self, plan: Plan, before: Any, after: Any) -> None:
        name = "width" if before == 8 else "parts"
        assert "becomes" in refusal(replace(plan, attributes=(Attribute("", name, before, after),)))

    def test_something_is_left_of_a_layer(self, plan: Plan) -> None:
        emptied = tuple(replace(a, after=0) for a in plan.attributes if a.name == "out_channels")
        message = refusal(replace(plan, attributes=emptied))
        assert "reduces out_channels" in message
        assert message.endswith(" to 0.")

    def test_a_user_s_own_sizes_follow(self, plan: Plan) -> None:
        item = (Attribute("", "width", 8, 4), Attribute("", "parts", (4, 4), (2, 2)))
        layers = tuple(a for a in plan.attributes if a.module)
        small = fpgm.compact(made(), replace(plan, attributes=(*layers, *item)))
        assert (small.width, small.parts) == (4, [2, 2])

    def test_a_layer_s_sizes_are_those_of_its_weight(self, plan: Plan) -> None:
        changed = tuple(replace(a, after=3) for a in plan.attributes)
        assert "out_channels of 'a' becomes 3" in refusal(replace(plan, attributes=changed))
        groups = Attribute("b", "groups", 1, 1)
        fpgm.compact(made(), replace(plan, attributes=(*plan.attributes, groups)))

    @pytest.mark.parametrize(
        ("layer", "name"),
        [(nn.Embedding(5, 8), "embedding_dim"), (nn.LSTM(8, 4), "input_size")],
        ids=["embedding", "recurrent"],
    )
    def test_sizes_of_tables_and_recurrent_layers_are_those_of_their_weights(
        self, plan: Plan, layer: nn.Module, name: str
    ) -> None:
        net = made()
        net.extra = layer
        same, other = (Attribute("extra", name, 8, after) for after in (8, 3))
        check_places(net, replace(plan, attributes=(same,)), ())
        with pytest.raises(PlanError, match=f"{name} of 'extra' becomes 3"):
            check_places(net, replace(plan, attributes=(other,)), ())

    def test_a_cut_of_a_dim_of_size_one_removes_nothing(self, plan: Plan) -> None:
        net, cut = made(), Cut("b.weight", 3, 3, (0,), "reads")
        odd = replace(plan, cuts=(*plan.cuts, cut))
        assert fpgm.compact(net, odd).b.weight.shape == (4, 4, 1, 1)  # type: ignore[union-attr]
        assert fpgm.verify(net, odd, X).ok
        fpgm.mask_(net, odd)

    def test_none_is_changed_twice(self, plan: Plan) -> None:
        twice = replace(plan, attributes=plan.attributes * 2)
        assert refusal(twice).endswith("twice.")

    def test_which_hold_sizes(self) -> None:
        net = made()
        names = [name for name in dir(net) if holds_size(net, name)]
        assert names == ["parts", "rows", "set", "width"]

        class Own(nn.Conv2d):
            pass

        item = Own(3, 8, 3)
        assert [n for n in vars(item) if holds_size(item, n)] == [
            "in_channels", "out_channels", "groups"
        ]  # fmt: skip


class TestAdapters:
    @pytest.mark.parametrize(
        ("adapter", "why"),
        [
            (
                Adapter("a", "output", "scatter", 1, (0, 1), 2**62),
                "no tensor of the model has more",
            ),
            (Adapter("a", "output", "scatter", 1, (0, 1), 17), "no tensor of the model has more"),
            (Adapter("a", "output", "gather", 1, (0, 1), 2**31), "no tensor of the model has more"),
            (Adapter("a", "output", "scatter", 99, (0, 1), 8), "no activation has a dim 99"),
            (Adapter("a", "output", "scatter", 1, (1, 1), 8), "some positions appear twice"),
            (Adapter("a", "output", "gather", 1, (0, 8), 8), "its positions are not among 8"),
            (Adapter("", "output", "gather", 1, (0, 1), 8), "there is no module ''"),
            (Adapter("c", "output", "gather", 1, (0, 1), 8), "there is no module 'c'"),
        ],
    )
    def test_impossible_adapters_are_refused(self, plan: Plan, adapter: Adapter, why: str) -> None:
        assert why in refusal(replace(plan, adapters=(adapter,)))

    def test_more_than_a_module_can_have(self, plan: Plan) -> None:
        one = Adapter("norm", "output", "scatter", 1, (0, 1, 2, 3), 8)
        fpgm.compact(made(), Plan.from_json(replace(plan, adapters=(one,)).to_json()))
        start = time.process_time()
        many = replace(plan, adapters=(one,) * 20_000)
        assert "more than 4 adapters at 'norm'" in refusal(many)
        assert time.process_time() - start < 20

    def test_nothing_is_adapted_where_nothing_is_cut(self, plan: Plan) -> None:
        assert "cuts nothing" in refusal(replace(plan, cuts=()))

    def test_pruned_again_a_stream_may_be_wider_than_all_weights(self, plan: Plan) -> None:
        """The bound is the widest that the model ever was, not what the last plan left."""
        wide = replace(plan, adapters=(Adapter("norm", "output", "scatter", 1, (0,), 40),))
        earlier = replace(plan, adapters=(Adapter("norm", "output", "scatter", 1, (0,), 20),))
        check_places(made(), wide, [earlier])
        with pytest.raises(PlanError, match="it needs 40 channels at 'norm'"):
            check_places(made(), wide, [])


class TestNumbers:
    @pytest.mark.parametrize(
        "change",
        [
            {"groups": (Group("a", ("a",), 0, 0),)},
            {"groups": (Group("a", ("a",), 4, 5),)},
            {"frozen": (Frozen(("a",), -1, "why"),)},
            {"macs_before": -1},
            {"params_after": 10**400},
            {"latency": Latency("eager", 1, float("inf"), 0.5, 0.5, 1.0, 1.0)},
            {"latency": Latency("eager", 0, 0.5, 0.5, 0.5, 1.0, 1.0)},
            {"outputs": (Cut("../a", 1, 4, (0,), "reads"),)},
            {"asked": {"a": [[[[[[[[1]]]]]]]]}},
            {"asked": {"a": 2**80}},
            {"cuts": (Cut("a.weight", 0, 8, (0, 0), "filter"),)},
            {"cuts": (Cut("a.weight", 0, 8, (0, 9), "filter"),)},
            {"cuts": (Cut("a.weight", 0, 8, (0, 1), "filter", blocks=2),)},
        ],
    )
    def test_what_cannot_be_meant(self, plan: Plan, change: dict[str, Any]) -> None:
        assert refusal(replace(plan, **change)).startswith("This is not a plan: ")

    @pytest.mark.parametrize("name", ["_parameters", "training", "_buffers"])
    def test_what_modules_cache_is_no_table_of_torch(self, plan: Plan, name: str) -> None:
        line = refusal(replace(plan, cached=(Cached("", name, 1, 8, (0,)),)))
        assert line == f"The plan is damaged: '' caches nothing in '{name}'."

    def test_lists_that_are_invalid(self, plan: Plan) -> None:
        raw = json.loads(plan.to_json())
        for key in ("cuts", "adapters", "notes", "groups"):
            for value in ("abc", {}, 5, None):
                with pytest.raises(PlanError, match="is not a list"):
                    Plan.from_json(json.dumps({**raw, key: value}))


class TestPrinting:
    def test_a_plan_prints_escapes_as_text(self, plan: Plan) -> None:
        evil = replace(
            plan,
            groups=(Group(f"g{ESCAPE}\n", ("a",), 4, 2),),
            frozen=(Frozen((f"a{ESCAPE}",), 4, f"why{ESCAPE}"),),
            stale=(StaleSize(f"a{ESCAPE}", f"width{ESCAPE}", 4),),
            notes=(f"note{ESCAPE}\r\n\u202e",),
            latency=Latency(f"eager{ESCAPE}", 1, 0.5, 0.5, 0.5, 1.0, 1.0),
        )
        text = str(Plan.from_json(evil.to_json()))
        assert all(line.isprintable() for line in text.split("\n"))
        assert text.count("\\x1b]0;owned\\x07\\x9b2J") == 7
        # heading, group, MACs, params, time, frozen, stale, note
        assert len(text.split("\n")) == 8

    def test_tables_and_json_of_the_command_line_too(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        common.show_frozen([Frozen((f"a{ESCAPE}",), 4, f"why{ESCAPE}")])
        common.show_json({f"a{ESCAPE}": ESCAPE})
        text = capsys.readouterr().out
        assert all(line.isprintable() for line in text.split("\n"))
        assert json.loads(text[text.index("{") :]) == {f"a{ESCAPE}": ESCAPE}

    def test_an_error_prints_escapes_as_text(self, plan: Plan) -> None:
        other = Adapter(f"a{ESCAPE}\n{'x' * 5000}", "output", "gather", 1, (0,), 8)
        line = refusal(replace(plan, adapters=(other,)))
        assert len(line) <= 1000
        assert "\\x1b" in line


class TestFiles:
    @pytest.fixture
    def file(self, plan: Plan, tmp_path: Path) -> Path:
        fpgm.save(fpgm.compact(made(), plan), tmp_path / "small.safetensors")
        return tmp_path / "small.safetensors"

    def signed(self, file: Path, change: Any) -> None:
        """Change a file and write a digest that agrees."""
        with safe_open(str(file), "pt") as stream:
            result = dict(stream.metadata())
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        change(tensors, result)
        result[DIGEST] = content_sha256(tensors, result)
        save_file(tensors, file, result)

    @pytest.mark.parametrize(
        "dtype",
        [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8, torch.int8],
    )
    def test_weights_of_another_kind(self, file: Path, dtype: torch.dtype) -> None:
        self.signed(file, lambda t, _: t.update({"a.weight": t["a.weight"].to(dtype)}))
        with pytest.raises(FileError) as caught:
            fpgm.load(file, made)
        assert str(caught.value).endswith(f"its 'a.weight' is torch.float32, the file's {dtype}.")
        with pytest.raises(FileError, match="with a different dtype"):
            load_weights(fpgm.compact(made(), read_plans(file)[""][0]), file)

    def test_weights_of_another_precision(self, file: Path) -> None:
        self.signed(file, lambda t, _: t.update({"a.weight": t["a.weight"].half()}))
        assert fpgm.load(file, made).a.weight.dtype == torch.float16

    def test_more_plans_than_anyone_makes(self, file: Path) -> None:
        def repeat(_: Any, result: dict[str, str]) -> None:
            plans = json.loads(result["fpgm_plans"])
            idle = {**plans[""][0], "cuts": [], "attributes": []}
            result["fpgm_plans"] = json.dumps({"": [idle] * (MAX_PLANS + 1)})

        self.signed(file, repeat)
        with pytest.raises(FileError, match="holds 1,001 plans"):
            fpgm.load(file, made)
