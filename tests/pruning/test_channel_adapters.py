"""Adapters as modules: a compact model is plain PyTorch in every tool, under its old names."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.helpers.recoverable import stir
from torch import Tensor, nn
from torch.ao.quantization import fuse_modules
from torch.nn import functional as F

import fpgm
from fpgm.errors import PlanError
from fpgm.models import resnet
from fpgm.pruning.adapter_placement import adapter_at, attach_, join
from fpgm.pruning.compaction import fingerprint
from fpgm.utils.adapter_spec import Adapter
from fpgm.utils.channel_adapters import Adapted, AdaptedSequential, Gather, Scatter, unwrap, wrap
from fpgm.utils.modules import modules_by_path


class BasicBlock(nn.Module):
    def __init__(self, reads: int, writes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(reads, writes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(writes)
        self.conv2 = nn.Conv2d(writes, writes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(writes)
        self.relu = nn.ReLU()
        self.downsample = (
            nn.Sequential(nn.Conv2d(reads, writes, 1, stride), nn.BatchNorm2d(writes))
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + self.downsample(x))


class Bottleneck(nn.Module):
    def __init__(self, reads: int, writes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(reads, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, stride, 1, bias=False), nn.BatchNorm2d(8)
        self.conv3, self.bn3 = nn.Conv2d(8, writes, 1, bias=False), nn.BatchNorm2d(writes)
        self.relu = nn.ReLU()
        self.downsample = nn.Conv2d(reads, writes, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        return self.relu(out + self.downsample(x))


class Residual(nn.Module):
    def __init__(self, block: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(block(16, 16), block(16, 32, 2), block(32, 32))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.bn(self.stem(x))))
        return self.fc(x.mean((2, 3)))


class Shuffled(nn.Module):
    """A unit of ShuffleNet: its halves are shuffled and split again, so it needs a gather."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        out = torch.cat((a, self.conv(b)), dim=1)
        n, c, h, w = out.shape
        return out.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class Shuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.units = nn.Sequential(Shuffled(), Shuffled())
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.units(torch.relu(self.stem(x))).mean((2, 3)))


class Eca(nn.Module):
    """A convolution along the channels: a scatter before it and a gather after it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.eca = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.head = nn.Conv2d(16, 4, 1)
        self.other, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        gate = torch.sigmoid(self.eca(y.mean((2, 3)).unsqueeze(1))).squeeze(1)
        return self.head(y * gate[:, :, None, None]) + self.last(F.relu(self.other(x)))


pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

NETWORKS: dict[str, tuple[Callable[[], nn.Module], fpgm.tracing.residual.Residual]] = {
    "basic": (lambda: Residual(BasicBlock), "independent"),
    "bottleneck": (lambda: Residual(Bottleneck), "independent"),
    "option A": (lambda: resnet(20), "independent"),
    "shuffle": (Shuffle, "coupled"),
    "eca": (Eca, "coupled"),
}
X = torch.randn(2, 3, 16, 16)


def pruned(name: str) -> tuple[nn.Module, nn.Module]:
    """A network and the compact one, with adapters."""
    make, residual = NETWORKS[name]
    torch.manual_seed(0)
    model = stir(make()).eval()
    plan = fpgm.plan(model, X, rate=0.4, residual=residual, align=1)
    assert plan.adapters
    return model, fpgm.compact(model, plan).eval()


TOOLS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "script": torch.jit.script,
    "trace": lambda net: torch.jit.trace(net, X),
    "fx": torch.fx.symbolic_trace,
    "export": lambda net: torch.export.export(net, (X,)).module(),
    "compile": lambda net: torch.compile(net, backend="eager", fullgraph=True),
    "deepcopy": copy.deepcopy,
    "channels last": lambda net: copy.deepcopy(net).to(memory_format=torch.channels_last),
    "double": lambda net: lambda x: copy.deepcopy(net).double()(x.double()).float(),
}


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", NETWORKS)
def test_tools_take_a_compact_model_as_it_is(name: str, tool: str) -> None:
    _, small = pruned(name)
    with torch.no_grad():
        wanted = small(X)
        assert torch.allclose(TOOLS[tool](small)(X), wanted, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_pickled_model_is_restored(name: str) -> None:
    _, small = pruned(name)
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again(X), small(X))


@pytest.mark.parametrize("name", NETWORKS)
def test_state_dicts_keep_the_names_of_the_original(name: str) -> None:
    model, small = pruned(name)
    state = {key: value.clone() for key, value in small.state_dict().items()}
    assert list(state) == list(model.state_dict())
    wanted = small(X)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.zero_()
    small.load_state_dict(state)
    assert torch.equal(small(X), wanted)


@pytest.mark.parametrize("name", NETWORKS)
def test_names_of_the_tree_are_read_too(name: str) -> None:
    _, small = pruned(name)
    other = copy.deepcopy(small)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    tree = {**dict(small.named_parameters()), **dict(small.named_buffers())}
    wanted = {key: value for key, value in tree.items() if not key.endswith((".index", ".origins"))}
    assert list(wanted) != list(small.state_dict())
    other.load_state_dict(wanted)
    assert torch.equal(other(X), small(X))


def test_a_file_is_loaded_by_its_plan(tmp_path: Path) -> None:
    for name, (make, _) in NETWORKS.items():
        _, small = pruned(name)
        fpgm.save(small, tmp_path / "small.safetensors")
        again = fpgm.load(tmp_path / "small.safetensors", make).eval()
        assert torch.equal(again(X), small(X))


def test_a_second_plan_of_an_earlier_version_still_fits() -> None:
    """Its fingerprint holds the positions as buffers of the layer itself."""
    model = stir(Eca())
    assert fingerprint(fpgm.compact(model, fpgm.plan(model, X, rate=0.5, align=1))) == ECA
    net = resnet(20)
    plan = fpgm.plan(net, torch.randn(1, 3, 32, 32), rate=0.4, residual="independent", align=1)
    assert fingerprint(fpgm.compact(net, plan)) == "3a67d5fe2550992d"


ECA = "3ca9e35948bf4cd5"


@pytest.mark.parametrize("name", ["basic", "bottleneck"])
def test_convolution_and_norm_are_fused_under_the_name_inside(name: str) -> None:
    _, small = pruned(name)
    last = {"basic": ("conv2", "bn2"), "bottleneck": ("conv3", "bn3")}[name]
    pairs = [["stem", "bn" if type(small.bn) is nn.BatchNorm2d else "bn.base_layer"]]
    for number in range(3):
        block = f"blocks.{number}"
        first = small.get_submodule(f"{block}.conv1")
        inner = ".base_layer" if isinstance(first, Adapted) else ""
        pairs.append([f"{block}.conv1{inner}", f"{block}.bn1"])
        pairs.append([f"{block}.{last[0]}", f"{block}.{last[1]}.base_layer"])
    fused = fuse_modules(small, pairs)
    assert not any(
        isinstance(fused.get_submodule(f"blocks.{n}.{last[1]}").base_layer, nn.BatchNorm2d)
        for n in range(3)
    )
    assert torch.allclose(fused(X), small(X), atol=1e-4)


def test_a_wrapped_norm_is_not_fused_by_mistake() -> None:
    """Under the wrapper's own name torch refuses, and loses no placing without a word."""
    _, small = pruned("basic")
    with pytest.raises(AssertionError, match="fuser method"):
        fuse_modules(small, [["blocks.0.conv2", "blocks.0.bn2"]])


class TestAttributes:
    def test_what_a_layer_has_its_wrapper_has(self) -> None:
        _, small = pruned("basic")
        norm = small.get_submodule("blocks.0.bn2")
        assert isinstance(norm, Adapted)
        assert norm.num_features == len(norm.weight) == norm.base_layer.num_features
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = norm.no_such_thing

    def test_setting_one_sets_the_layers(self) -> None:
        _, small = pruned("basic")
        norm = small.get_submodule("blocks.0.bn2")
        norm.momentum = 0.5
        assert norm.base_layer.momentum == 0.5
        assert "momentum" not in vars(norm)

    def test_norms_are_detected_and_frozen_by_their_class(self) -> None:
        model, small = pruned("basic")
        small.train()
        kinds = [
            sum(isinstance(m, nn.BatchNorm2d) for m in net.modules()) for net in (model, small)
        ]
        for module in small.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        before = small.state_dict()["blocks.0.bn2.running_mean"].clone()
        small(X)
        assert kinds[0] == kinds[1]
        assert torch.equal(small.state_dict()["blocks.0.bn2.running_mean"], before)

    def test_parts_of_a_sequential_are_detected_by_number(self) -> None:
        inner = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
        model = nn.Sequential(inner, nn.Conv2d(8, 2, 1))
        attach_(model, Adapter("0", "output", "scatter", 1, (0, 2, 4, 6), 8))
        assert isinstance(model[0], AdaptedSequential)
        assert (len(model[0]), model[0][0], list(model[0])) == (2, inner[0], list(inner))
        assert modules_by_path(model)["0.0"] is inner[0]
        assert list(model.state_dict()) == ["0.0.weight", "0.0.bias", "1.weight", "1.bias"]
        assert torch.jit.script(model)(X).shape == model(X).shape

    def test_a_list_that_torch_does_not_know_holds_the_wrapper_too(self) -> None:
        class Listed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 1)
                self.steps = [self.conv]

            def forward(self, x: Tensor) -> Tensor:
                for step in self.steps:
                    x = step(x)
                return x

        model = Listed()
        attach_(model, Adapter("conv", "output", "scatter", 1, (0, 2, 4, 6), 8))
        assert model(X).shape[1] == 8

    def test_modules_of_several_arguments_are_called_as_before(self) -> None:
        class Two(nn.Module):
            def forward(self, x: Tensor, times: int = 1) -> Tensor:
                return x * times

        wrapped = wrap(Two())
        wrapped.before = Gather(1, torch.tensor([0, 2]), 3)
        wrapped.after = Scatter(1, torch.tensor([0, 2]), 3)
        assert torch.equal(wrapped(X, 2), wrapped(x=X, times=2))
        assert torch.equal(wrapped(X, 2)[:, 2], X[:, 2] * 2)
        assert unwrap(wrapped) is wrapped.base_layer


def test_training_continues_with_the_optimizer() -> None:
    model = stir(Residual(BasicBlock)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model(X).square().mean().backward()
    optimizer.step()
    plan = fpgm.plan(model, X, rate=0.4, residual="independent", align=1)
    small = fpgm.compact(model, plan, optimizer=optimizer)
    before = small.state_dict()["blocks.0.bn2.weight"].clone()
    small.train()(X).square().mean().backward()
    optimizer.step()
    assert not torch.equal(small.state_dict()["blocks.0.bn2.weight"], before)


class TestJoining:
    first = Adapter("a", "output", "gather", 1, (3, 5), 8)

    def test_two_gathers_of_one_plan_are_one(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 1))
        first = Adapter("0", "output", "gather", 1, (3, 5), 8)
        plain = model(X)
        attach_(model, first, Adapter("0", "output", "gather", 1, (1,), 2))
        assert torch.equal(model(X), plain[:, [5]])

    def test_a_gather_after_a_scatter_is_refused(self) -> None:
        with pytest.raises(PlanError, match="two adapters for 'a'"):
            join(Adapter("a", "output", "scatter", 1, (3, 5), 8), self.first)

    def test_a_later_plan_replaces_what_the_side_had(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 1))
        attach_(model, Adapter("0", "output", "scatter", 1, tuple(range(8)), 16))
        later = Adapter("0", "output", "scatter", 1, tuple(range(8, 16)), 16)
        attach_(model, later)
        assert adapter_at(model, "0", "output") == later
        assert not model(X)[:, :8].any()
