"""Multiply-accumulates of attention: fused and plain are the same work and count the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fpgm

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TOKENS, WIDTH = 16, 32


class Attention(nn.Module):
    """Tokens of 4 × 4 pixels, four heads of eight channels, and hidden units behind them."""

    def __init__(self, how: str, pairs: int = TOKENS, groups: int = 4) -> None:
        super().__init__()
        self.how, self.pairs, self.groups = how, pairs, groups
        self.tokens = nn.Conv2d(3, WIDTH, 4, 4)
        self.query, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8 * groups)
        self.values = nn.Linear(WIDTH, 8 * groups)
        self.hidden, self.head = nn.Linear(WIDTH, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.tokens(x).flatten(2).transpose(1, 2)
        some = tokens[:, : self.pairs]
        q = self.query(tokens).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = (
            layer(some).unflatten(-1, (self.groups, 8)).transpose(1, 2)
            for layer in (self.keys, self.values)
        )
        if self.how == "plain":
            k, v = (t.repeat_interleave(4 // self.groups, 1) for t in (k, v))
            mixed = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=self.how == "causal", enable_gqa=self.groups < 4
            )
        out: Tensor = self.head(self.hidden(mixed.transpose(1, 2).flatten(2)).relu())
        return out


def planned_macs(model: nn.Module, x: Tensor = X) -> tuple[int, int]:
    plan = fpgm.plan(model, x, rate=0.5, align=1)
    return plan.macs_before, plan.macs_after


def torch_macs(model: nn.Module, x: Tensor = X) -> int:
    """What torch's own counter says; it knows the products of the unfused form."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(x)
    return int(counter.get_total_flops()) // 2


@pytest.mark.parametrize(("pairs", "groups"), [(16, 4), (5, 4), (16, 2), (7, 1)])
def test_fused_attention_counts_like_plain_attention(pairs: int, groups: int) -> None:
    plain = planned_macs(Attention("plain", pairs, groups))
    fused = planned_macs(Attention("fused", pairs, groups))
    assert fused == plain
    assert fused[0] == torch_macs(Attention("fused", pairs, groups))
    assert fused[1] < fused[0]


def test_causal_attention_counts_all_pairs_as_torch_does() -> None:
    assert planned_macs(Attention("causal")) == planned_macs(Attention("plain"))


def test_the_products_of_attention_by_hand() -> None:
    """Two images, four heads: 16 queries meet 16 keys in 8 channels, and again 8 values each."""
    with_products = planned_macs(Attention("fused"))[0]
    layers = 2 * TOKENS * (3 * 16 * WIDTH + 3 * WIDTH * WIDTH + WIDTH * 64 + 64 * 5)
    assert with_products - layers == 2 * (2 * 4 * TOKENS * TOKENS * 8)


class Multihead(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.tokens = nn.Conv2d(3, WIDTH, 4, 4)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.hidden, self.head = nn.Linear(WIDTH, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.tokens(x).flatten(2).transpose(1, 2)
        mixed = self.attention(tokens, tokens, tokens, need_weights=self.need_weights)[0]
        out: Tensor = self.head(self.hidden(mixed).relu())
        return out


def test_multihead_attention_counts_the_same_with_and_without_its_weights() -> None:
    assert planned_macs(Multihead(True)) == planned_macs(Multihead(False))
    model = Multihead(False).train()  # the fused path of eval mode hides its products from torch
    assert planned_macs(Multihead(False))[0] == torch_macs(model)


@pytest.mark.slow
def test_a_vision_transformer_counts_its_attention() -> None:
    timm = pytest.importorskip("timm")
    from timm.layers import set_fused_attn

    x = torch.randn(1, 3, 224, 224)
    try:
        counts = []
        for fused in (True, False):
            set_fused_attn(fused)
            model = timm.create_model("vit_tiny_patch16_224").eval()
            counts.append(planned_macs(model, x))
        assert counts[0] == counts[1]
        assert counts[0][0] == 1_253_683_200 == torch_macs(model, x)
    finally:
        set_fused_attn(True)
