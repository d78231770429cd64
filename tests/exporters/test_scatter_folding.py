"""Scatters into a residual stream: memory layout, and folding into the convolution."""

from collections import Counter

import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.recoverable import stir
from torch import Tensor, nn

import fpgm
from fpgm.exporters.bn_folding import fold_batch_norms, simplify
from fpgm.exporters.onnx import to_onnx
from fpgm.pruning.adapter_placement import attach_, output_scatter
from fpgm.utils.adapter_spec import Adapter
from fpgm.utils.channel_adapters import gather, scatter
from fpgm.utils.example_inputs import Example


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    order=st.randoms(use_true_random=False),
    dim=st.integers(0, 4),
)
def test_a_scatter_keeps_the_memory_layout(sizes: list[int], order, dim: int) -> None:  # type: ignore[no-untyped-def]
    dim %= len(sizes)
    dims = list(range(len(sizes)))
    order.shuffle(dims)
    x = (
        torch.randn(*sizes)
        .permute(dims)
        .contiguous()
        .permute([dims.index(d) for d in range(len(dims))])
    )
    index = torch.randperm(x.shape[dim] + 3)[: x.shape[dim]]
    placed = scatter(x, dim, index, x.shape[dim] + 3)
    assert torch.equal(gather(placed, dim, index), x)
    assert placed.count_nonzero() == x.count_nonzero()
    wide = [d for d in range(x.ndim) if x.shape[d] > 1 and d != dim]
    assert sorted(wide, key=placed.stride) == sorted(wide, key=x.stride)


def test_channels_last_stay_last() -> None:
    x = torch.randn(2, 5, 4, 4).to(memory_format=torch.channels_last)
    placed = scatter(x, 1, torch.tensor([0, 2, 3, 5, 6]), 8)
    assert placed.is_contiguous(memory_format=torch.channels_last)
    assert scatter(x.contiguous(), 1, torch.tensor([0, 2, 3, 5, 6]), 8).is_contiguous()


class Block(nn.Module):
    """A stream of `wide` channels, and a convolution that writes some of them."""

    def __init__(
        self, reads: int, kept: int, wide: int, groups: int = 1, norm: bool = True
    ) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, reads, 1)
        self.stream = nn.Conv2d(3, wide, 1)
        self.conv = nn.Conv2d(reads, kept, 1, groups=groups, bias=not norm)
        self.norm = nn.BatchNorm2d(kept) if norm else nn.Identity()
        host = "norm" if norm else "conv"
        places = tuple(sorted(torch.randperm(wide)[:kept].tolist()))
        attach_(self, Adapter(host, "output", "scatter", 1, places, wide))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.stream(x) + self.norm(self.conv(self.first(x))))


X = torch.randn(2, 3, 6, 6)


def steps(model: nn.Module) -> Counter[str]:
    data = to_onnx(model, Example((X,), {}))
    return Counter(node.op_type for node in onnx.load_from_string(data).graph.node)


@pytest.mark.parametrize("norm", [True, False])
class TestWithin:
    @pytest.mark.parametrize(
        ("reads", "kept", "wide", "filters", "left"),
        [
            (8, 20, 32, 32, Counter()),  # 8 x 12 products against 32 channels
            (64, 72, 128, 73, Counter(Gather=1)),  # 64 x 56 against 128; 64 read by each of 72
            (96, 72, 128, 72, Counter(Gather=1, Concat=1)),  # 96 read by each of 72
        ],
    )
    def test_scatters_are_folded_only_as_far_as_it_is_cheaper(
        self, reads: int, kept: int, wide: int, filters: int, left: Counter[str], norm: bool
    ) -> None:
        block = stir(Block(reads, kept, wide, norm=norm)).eval()
        thin = fold_batch_norms(block, Example((X,), {}))
        assert torch.allclose(thin(X), block(X), atol=1e-5)
        assert thin.get_submodule("conv").out_channels == filters
        results = steps(thin)
        assert Counter({k: results[k] for k in ("Gather", "Concat", "Pad") if k in results}) == left

    def test_groups_stay_as_they_are(self, norm: bool) -> None:
        block = stir(Block(8, 20, 32, groups=4, norm=norm)).eval()
        thin = fold_batch_norms(block, Example((X,), {}))
        assert torch.allclose(thin(X), block(X), atol=1e-5)
        assert thin.get_submodule("conv").out_channels == 20

    def test_a_hook_of_the_user_still_gets_the_output(self, norm: bool) -> None:
        """It may change the output before the scatter."""
        block = stir(Block(8, 20, 32, norm=norm)).eval()
        host = block.get_submodule("norm" if norm else "conv")
        host.register_forward_hook(lambda module, args, out: out * 2)
        thin = fold_batch_norms(block, Example((X,), {}))
        assert torch.allclose(thin(X), block(X), atol=1e-5)
        assert thin.get_submodule("conv").out_channels == 20

    def test_a_gather_before_the_layer_stays(self, norm: bool) -> None:
        block = stir(Block(8, 20, 32, norm=norm)).eval()
        block.first = nn.Conv2d(3, 10, 1)
        attach_(block, Adapter("conv", "input", "gather", 1, (0, 1, 2, 3, 5, 6, 8, 9), 10))
        thin = fold_batch_norms(block, Example((X,), {}))
        assert torch.allclose(thin(X), block(X), atol=1e-5)
        assert thin.get_submodule("conv").out_channels == 32


def test_a_pruned_network_is_added_to_its_stream_without_a_scatter() -> None:
    class Bottleneck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 64, 1), nn.Linear(64, 4)
            self.down, self.up = nn.Conv2d(64, 16, 1), nn.Conv2d(16, 64, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = x + self.up(torch.relu(self.down(x)))
            return self.head(torch.relu(x).mean((2, 3)))

    model = stir(Bottleneck()).eval()
    small = fpgm.prune(model, X, rate=0.5, residual="independent").eval()
    assert output_scatter(small, "up") is not None
    thin = fold_batch_norms(small, Example((X,), {}))
    assert output_scatter(thin, "up") is None
    assert torch.allclose(thin(X), small(X), atol=1e-5)
    results = steps(thin)
    assert results["Gather"] == 1  # what `down` reads of the stem's channels
    assert not results.keys() & {"Concat", "ScatterND", "ScatterElements"}


def test_a_norm_whose_attributes_are_read_is_not_folded() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x.to(self.norm.weight.dtype)))

    model = stir(Asking()).eval()
    assert isinstance(simplify(model, Example((X,), {})).norm, nn.BatchNorm2d)
    assert torch.equal(simplify(model, Example((X,), {}))(X), model(X))
