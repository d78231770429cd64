"""Structures that must be handled, not merely left alone: shapes worked out by hand.

Every network is pruned at rate 0.5 from eight stem channels. What cannot shrink is listed too.
"""

from __future__ import annotations

import pytest
from tests.integration.test_random_networks import check, plan_of
from tests.networks import ACTIVATIONS, BLOCKS, HEADS, NORMS, B, Case, Net, build

import fpgm

Shapes = dict[str, tuple[int, ...]]

EXACT_BLOCKS: dict[str, tuple[Net, Shapes]] = {
    **{
        f"conv {act}": (
            Net(B("conv", act=act)),
            {"stem.0.weight": (4, 3, 3, 3), "blocks.0.layers.0.weight": (4, 4, 3, 3)},
        )
        for act in ACTIVATIONS
    },
    **{
        f"conv norm {norm}": (
            Net(B("conv", norm=norm)),
            {"blocks.0.layers.0.weight": (4, 4, 3, 3), "head.classifier.weight": (5, 4)},
        )
        for norm in NORMS
    },
    "conv 1-d": (Net(B("conv"), dims=1), {"blocks.0.layers.0.weight": (4, 4, 3)}),
    "conv 3-d": (Net(B("conv"), dims=3), {"blocks.0.layers.0.weight": (4, 4, 3, 3, 3)}),
    "functional": (
        Net(B("functional")),
        {"blocks.0.kernel": (4, 4, 3, 3), "blocks.0.shift": (4,)},
    ),
    "weight_norm": (
        Net(B("weight_norm")),
        {
            "blocks.0.conv.parametrizations.weight.original0": (4, 1, 1, 1),
            "blocks.0.conv.parametrizations.weight.original1": (4, 4, 3, 3),
        },
    ),
    "shared sequence": (Net(B("shared")), {"blocks.0.conv.weight": (4, 4, 3, 3)}),
    "shared branches": (
        Net(B("shared", where="branches")),
        {"blocks.0.conv.weight": (4, 4, 3, 3)},
    ),
    "tied twice": (
        Net(B("tied")),
        {"blocks.0.first.weight": (4, 4, 3, 3), "blocks.0.second.weight": (4, 4, 3, 3)},
    ),
    "tied autoencoder": (
        Net(B("tied", where="autoencoder", hidden=12)),
        {"blocks.0.first.weight": (6, 4, 3, 3), "blocks.0.second.weight": (6, 4, 3, 3)},
    ),
    "transposed": (Net(B("transposed")), {"blocks.0.up.weight": (4, 4, 2, 2)}),
    "transposed grouped": (
        Net(B("transposed", groups=2, out=12)),
        {"blocks.0.up.weight": (4, 3, 2, 2), "head.classifier.weight": (5, 6)},
    ),
    "norm": (Net(B("norm")), {"blocks.0.norm.weight": (4,), "stem.0.weight": (4, 3, 3, 3)}),
    "norm plain": (Net(B("norm", norm="batch_plain")), {"blocks.0.norm.running_var": (4,)}),
    "group_norm each": (Net(B("group_norm", groups="each")), {"blocks.0.norm.weight": (4,)}),
    "act prelu": (Net(B("act", act="prelu")), {"blocks.0.act.weight": (4,)}),
    "scale": (Net(B("scale", shift=True)), {"blocks.0.gamma": (4, 1, 1)}),
    "scale buffer": (Net(B("scale", buffer=True)), {"blocks.0.gamma": (4, 1, 1)}),
    "pool": (Net(B("pool")), {"head.classifier.weight": (5, 4)}),
    "interpolate": (Net(B("interpolate")), {"head.classifier.weight": (5, 4)}),
    "interpolate bilinear": (
        Net(B("interpolate", mode="bilinear")),
        {"head.classifier.weight": (5, 4)},
    ),
    "residual": (
        Net(B("residual", hidden=12)),
        {"blocks.0.conv1.weight": (6, 4, 3, 3), "blocks.0.conv2.weight": (4, 6, 3, 3)},
    ),
    "residual inplace": (
        Net(B("residual", inplace=True)),
        {"blocks.0.conv2.weight": (4, 4, 3, 3)},
    ),
    "residual 1-d": (Net(B("residual"), dims=1), {"blocks.0.conv2.weight": (4, 4, 3)}),
    "residual 3-d": (Net(B("residual"), dims=3), {"blocks.0.conv2.weight": (4, 4, 3, 3, 3)}),
    "residual projection": (
        Net(B("residual", shortcut="projection", out=12)),
        {"blocks.0.shortcut.0.weight": (6, 4, 1, 1), "blocks.0.conv2.weight": (6, 4, 3, 3)},
    ),
    **{
        f"residual {kind}": (
            Net(B("residual", shortcut=kind)),
            {"blocks.0.conv2.weight": (8, 4, 3, 3), "head.classifier.weight": (5, 8)},
        )
        for kind in ("pad", "pad_lambda", "pad_inline", "cat_zero")
    },
    "preact": (
        Net(B("preact", hidden=12)),
        {"blocks.0.conv1.weight": (6, 4, 3, 3), "blocks.0.conv2.weight": (4, 6, 3, 3)},
    ),
    "resnext": (
        Net(B("resnext")),
        {
            "blocks.0.reduce.0.weight": (4, 4, 1, 1),
            "blocks.0.grouped.0.weight": (4, 2, 3, 3),
            "blocks.0.expand.0.weight": (4, 4, 1, 1),
        },
    ),
    "resnext 4 groups": (
        Net(B("resnext", hidden=16, groups=4)),
        {"blocks.0.reduce.0.weight": (8, 4, 1, 1), "blocks.0.grouped.0.weight": (8, 2, 3, 3)},
    ),
    **{
        f"res2net {how}": (
            Net(B("res2net", how=how)),
            {
                "blocks.0.reduce.0.weight": (8, 4, 1, 1),
                "blocks.0.steps.1.0.weight": (2, 2, 3, 3),
                "blocks.0.expand.0.weight": (4, 8, 1, 1),
            },
        )
        for how in ("split_attr", "chunk")
    },
    **{
        f"join {kind}": (
            Net(B("join", kind=kind)),
            {"blocks.0.body.0.layers.0.weight": (4, 4, 3, 3), "head.classifier.weight": (5, 4)},
        )
        for kind in ("add", "max", "min", "mul", "stack")
    },
    "join cat": (Net(B("join", kind="cat")), {"head.classifier.weight": (5, 8)}),
    "dense": (
        Net(B("dense")),
        {
            "blocks.0.steps.0.2.weight": (2, 4, 3, 3),
            "blocks.0.steps.1.2.weight": (2, 6, 3, 3),
            "head.classifier.weight": (5, 8),
        },
    ),
    "inception": (
        Net(B("inception")),
        {
            "blocks.0.one.0.weight": (3, 4, 1, 1),
            "blocks.0.three.1.0.weight": (4, 4, 3, 3),
            "blocks.0.pooled.1.0.weight": (2, 4, 1, 1),
            "head.classifier.weight": (5, 9),
        },
    ),
    "unet": (
        Net(B("unet")),
        {
            "blocks.0.down.0.weight": (6, 4, 3, 3),
            "blocks.0.body.0.layers.0.weight": (4, 6, 3, 3),
            "blocks.0.join.0.weight": (4, 8, 3, 3),
        },
    ),
    **{
        f"ghost {how}": (
            Net(B("ghost", how=how)),
            {
                "blocks.0.primary.0.weight": (4, 4, 1, 1),
                "blocks.0.cheap.0.weight": (4, 1, 3, 3),
                "head.classifier.weight": (5, 8),
            },
        )
        for how in ("whole", "attr")
    },
    "global_cat": (Net(B("global_cat")), {"blocks.0.join.0.weight": (4, 8, 1, 1)}),
    "coordinates": (Net(B("coordinates")), {"blocks.0.join.0.weight": (4, 6, 3, 3)}),
    "separable": (
        Net(B("separable")),
        {"blocks.0.depth.0.weight": (4, 1, 3, 3), "blocks.0.point.0.weight": (4, 4, 1, 1)},
    ),
    "separable 1-d": (Net(B("separable"), dims=1), {"blocks.0.depth.0.weight": (4, 1, 3)}),
    "separable 3-d": (
        Net(B("separable"), dims=3),
        {"blocks.0.depth.0.weight": (4, 1, 3, 3, 3)},
    ),
    "separable multiplier 2": (
        Net(B("separable", multiplier=2)),
        {"blocks.0.depth.0.weight": (8, 1, 3, 3), "blocks.0.point.0.weight": (4, 8, 1, 1)},
    ),
    "inverted": (
        Net(B("inverted", gate=True)),
        {
            "blocks.0.expand.0.weight": (8, 4, 1, 1),
            "blocks.0.depth.0.weight": (8, 1, 3, 3),
            "blocks.0.gate.reduce.weight": (2, 8, 1, 1),
            "blocks.0.project.0.weight": (4, 8, 1, 1),
        },
    ),
    "grouped": (Net(B("grouped")), {"blocks.0.layers.0.weight": (4, 2, 3, 3)}),
    "grouped 4, wider": (
        Net(B("grouped", groups=4, out=16)),
        {"stem.0.weight": (4, 3, 3, 3), "head.classifier.weight": (5, 8)},
    ),
    "se conv": (
        Net(B("se")),
        {"blocks.0.reduce.weight": (2, 4, 1, 1), "blocks.0.expand.weight": (4, 2, 1, 1)},
    ),
    "se linear": (
        Net(B("se", how="linear")),
        {"blocks.0.reduce.weight": (2, 4), "blocks.0.expand.weight": (4, 2)},
    ),
    "eca": (Net(B("eca")), {"stem.0.weight": (4, 3, 3, 3), "head.classifier.weight": (5, 4)}),
    "spatial_gate": (Net(B("spatial_gate")), {"blocks.0.conv.weight": (1, 4, 1, 1)}),
    "self_gate": (Net(B("self_gate")), {"head.classifier.weight": (5, 4)}),
    "selective view": (
        Net(B("selective")),
        {"blocks.0.far.0.weight": (4, 4, 5, 5), "blocks.0.expand.weight": (8, 3)},
    ),
    "selective layers": (
        Net(B("selective", how="layers")),
        {"blocks.0.near.0.weight": (4, 4, 3, 3), "blocks.0.expands.1.weight": (4, 3)},
    ),
    "split_attention": (
        Net(B("split_attention")),
        {
            "blocks.0.conv.0.weight": (8, 2, 3, 3),
            "blocks.0.reduce.weight": (3, 4, 1, 1),
            "blocks.0.expand.weight": (8, 3, 1, 1),
        },
    ),
    **{
        f"split {how}": (
            Net(B("split", how=how)),
            {"blocks.0.one.0.weight": (2, 2, 3, 3), "head.classifier.weight": (5, 4)},
        )
        for how in (
            "chunk",
            "split_derived",
            "split_attr",
            "slice_derived",
            "narrow",
            "tensor_split",
        )
    },
    "split sizes_attr": (
        Net(B("split", how="sizes_attr")),
        {"stem.0.weight": (4, 3, 3, 3)},
    ),
    "split add": (
        Net(B("split", join="add")),
        {"blocks.0.one.0.weight": (2, 2, 3, 3), "head.classifier.weight": (5, 2)},
    ),
    "split convs": (
        Net(B("split", join="convs")),
        {"blocks.0.one.0.weight": (4, 2, 3, 3), "blocks.0.two.weight": (4, 2, 3, 3)},
    ),
    **{
        f"glu {how}": (
            Net(B("glu", how=how)),
            {"blocks.0.widen.weight": (8, 4, 3, 3), "blocks.0.narrow.weight": (4, 4, 1, 1)},
        )
        for how in ("chunk", "function", "split")
    },
    **{
        f"shuffle {how}": (
            Net(B("shuffle", how=how)),
            {"stem.0.weight": (4, 3, 3, 3), "head.classifier.weight": (5, 4)},
        )
        for how in ("view", "module")
    },
    "shuffle grouped": (
        Net(B("shuffle", grouped=True)),
        {"blocks.0.before.0.weight": (4, 2, 1, 1), "head.classifier.weight": (5, 4)},
    ),
    "shufflenet": (
        Net(B("shufflenet")),
        {"blocks.0.branch.0.0.weight": (2, 2, 1, 1), "head.classifier.weight": (5, 4)},
    ),
    "shufflenet down": (
        Net(B("shufflenet", down=True)),
        {"blocks.0.side.1.0.weight": (4, 4, 1, 1), "head.classifier.weight": (5, 8)},
    ),
    **{
        f"pixel_shuffle {how}": (
            Net(B("pixel_shuffle", how=how)),
            {"blocks.0.widen.0.weight": (8, 4, 3, 3), "blocks.0.narrow.weight": (4, 2, 3, 3)},
        )
        for how in ("module", "function")
    },
    "pixel_unshuffle": (
        Net(B("pixel_unshuffle")),
        {"blocks.0.narrow.0.weight": (4, 16, 1, 1)},
    ),
    "flip": (Net(B("flip")), {"stem.0.weight": (4, 3, 3, 3), "head.classifier.weight": (5, 4)}),
    "mlp": (
        Net(B("mlp")),
        {"blocks.0.first.weight": (6, 4), "blocks.0.second.weight": (4, 6)},
    ),
    "mlp added": (
        Net(B("mlp", adds=True)),
        {"stem.0.weight": (4, 3, 3, 3), "blocks.0.second.weight": (4, 6)},
    ),
    "convnext": (
        Net(B("convnext", hidden=24)),
        {"blocks.0.first.weight": (12, 8), "blocks.0.second.weight": (8, 12)},
    ),
    "token_mix": (Net(B("token_mix")), {"head.classifier.weight": (5, 4)}),
    "pool_linear mean": (
        Net(B("conv"), head=B("pool_linear", how="mean")),
        {"head.classifier.weight": (5, 4)},
    ),
    "pool_linear max": (
        Net(B("conv"), head=B("pool_linear", how="max")),
        {"head.classifier.weight": (5, 4)},
    ),
    **{
        f"flatten_linear {how}": (
            Net(B("conv"), head=B("flatten_linear", how=how)),
            {"head.classifier.weight": (5, 4 * 64)},
        )
        for how in ("flatten", "view", "module")
    },
    "pool_flatten": (
        Net(B("conv"), head=B("pool_flatten")),
        {"head.classifier.weight": (5, 4 * 4)},
    ),
    "mlp_head": (
        Net(B("conv"), head=B("mlp_head")),
        {"head.layers.0.weight": (6, 4), "head.layers.3.weight": (5, 6)},
    ),
    "map": (Net(B("conv"), head=B("map")), {"head.classifier.weight": (5, 4, 1, 1)}),
    **{
        f"several {kind}": (
            Net(B("conv"), head=B("several", kind=kind)),
            {"head.features.0.weight": (4, 4, 3, 3), "head.map.weight": (3, 4, 1, 1)},
        )
        for kind in ("tuple", "dict", "dataclass", "nested")
    },
    "auxiliary": (
        Net(B("conv"), head=B("auxiliary", hidden=12)),
        {"head.extra.0.weight": (6, 4, 3, 3), "head.extra_classifier.weight": (5, 6)},
    ),
    **{
        f"inputs {inputs}": (
            Net(B("conv"), inputs=inputs),
            {"blocks.0.layers.0.weight": (4, 4, 3, 3)},
        )
        for inputs in ("tuple", "dict")
    },
    "inputs added": (
        Net(B("conv"), inputs="two_tuple"),
        {"side.0.weight": (4, 2, 3, 3), "blocks.0.layers.0.weight": (4, 4, 3, 3)},
    ),
    "inputs concatenated": (
        Net(B("conv"), inputs="two_dict"),
        {"side.0.weight": (4, 2, 3, 3), "blocks.0.layers.0.weight": (4, 8, 3, 3)},
    ),
}

FROZEN_BLOCKS: dict[str, tuple[Net, Shapes]] = {
    name: (
        Net(B(name), B("mlp")),
        {"stem.0.weight": (8, 3, 3, 3), "blocks.1.first.weight": (6, 8)},
    )
    for name in ("channel_softmax", "channel_mean", "layer_norm")
} | {
    "features": (
        Net(B("residual"), head=B("features")),
        {"stem.0.weight": (8, 3, 3, 3), "blocks.0.conv1.weight": (4, 8, 3, 3)},
    )
}

# Exactness is demanded of these as of all others, but they may stay whole.
OPEN_BLOCKS = {
    "roll",
    "slice_write",
    "fold_batch",
    "non_local",
    "interleave",
    "remembered",
    "train_only",
    "keeps",
    "pairs",
    "containers",
    "two_scales",
    "classes",
}


@pytest.mark.parametrize("name", EXACT_BLOCKS)
def test_the_structure_gets_smaller(name: str) -> None:
    net, expected = EXACT_BLOCKS[name]
    assert _compact_shapes(net, expected) == expected
    check(Case(net))


@pytest.mark.parametrize("name", FROZEN_BLOCKS)
def test_frozen_channels_stay_and_others_are_removed(name: str) -> None:
    net, expected = FROZEN_BLOCKS[name]
    model, inputs = build(net)
    plan = plan_of(model, inputs, Case(net))
    frozen = {layer for place in plan.frozen for layer in place.layers}
    assert any(layer.startswith("stem") for layer in frozen), plan.frozen
    assert all(place.reason for place in plan.frozen)
    assert _compact_shapes(net, expected) == expected


def test_every_structure_is_claimed_as_exact_frozen_or_open() -> None:
    tables = EXACT_BLOCKS | FROZEN_BLOCKS
    claimed = {name for net, _ in tables.values() for name in net.names()} | OPEN_BLOCKS
    assert {*BLOCKS, *HEADS} == claimed


def _compact_shapes(net: Net, names: Shapes) -> Shapes:
    model, inputs = build(net)
    state = fpgm.compact(model, plan_of(model, inputs, Case(net))).state_dict()
    return {name: tuple(state[name].shape) for name in names}
