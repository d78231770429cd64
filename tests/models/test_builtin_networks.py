"""The built-in networks are the published ones: names, parameters, costs, trained weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fpgm.errors import RequestError
from fpgm.models import BUILTIN, build, digits, resnet, vgg16
from fpgm.models.checkpoint import load_weights
from fpgm.models.resnet_cifar import PadShortcut


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def macs(model: nn.Module, *shape: int) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.zeros(*shape))
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    ("depth", "count"),
    [(20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018), (110, 1_727_962)],
)
def test_resnets_have_the_published_number_of_parameters(depth: int, count: int) -> None:
    assert parameters(resnet(depth)) == count


def test_the_deepest_published_resnet_can_be_built() -> None:
    with torch.device("meta"):
        assert parameters(resnet(1202)) == 19_421_274


@pytest.mark.parametrize(
    ("depth", "count"), [(20, 40_551_040), (32, 68_862_592), (56, 125_485_696)]
)
def test_resnets_cost_the_published_macs(depth: int, count: int) -> None:
    assert macs(resnet(depth), 1, 3, 32, 32) == count


def test_vgg_costs_what_pfec_prints() -> None:
    assert f"{macs(vgg16(), 1, 3, 32, 32):.2E}" == "3.13E+08"


@pytest.mark.parametrize("depth", [1, 2, 7, 18, 21])
def test_depths_that_do_not_exist_are_refused_with_ones_that_do(depth: int) -> None:
    with pytest.raises(RequestError, match=r"6n \+ 2 layers.*try \d+ or \d+") as caught:
        resnet(depth)
    for suggestion in str(caught.value).rpartition("try ")[2].rstrip(".").split(" or "):
        assert resnet(int(suggestion))


def test_depths_no_paper_has_are_fine_too() -> None:
    assert len(resnet(8).layer3) == 1
    assert len(resnet(26).layer3) == 4


def test_the_shortcut_takes_every_second_pixel_and_pads_both_sides() -> None:
    x = torch.arange(2 * 4 * 4, dtype=torch.float32).reshape(1, 2, 4, 4)
    out = PadShortcut(4)(x)
    assert out.shape == (1, 4, 2, 2)
    assert torch.equal(out[0, 1], torch.tensor([[0.0, 2.0], [8.0, 10.0]]))
    assert torch.equal(out[0, 2], torch.tensor([[16.0, 18.0], [24.0, 26.0]]))
    assert not out[0, [0, 3]].any()


def test_only_blocks_that_change_shape_pad() -> None:
    model = resnet(20)
    padded = [n for n, m in model.named_modules() if isinstance(m, PadShortcut)]
    assert padded == ["layer2.0.shortcut", "layer3.0.shortcut"]


@pytest.mark.parametrize("name", [n for n in BUILTIN if n not in {"resnet110", "resnet1202"}])
def test_every_builtin_maps_its_input_to_logits_and_trains(name: str) -> None:
    model = build(name, classes=7)
    batch = torch.randn(2, *BUILTIN[name].input_shape[1:])
    logits = model(batch)
    assert logits.shape == (2, 7)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_width_multiplies_vggs_channels() -> None:
    full, half = (
        [m.out_channels for m in vgg16(width=w).modules() if isinstance(m, nn.Conv2d)]
        for w in (1.0, 0.5)
    )
    assert [2 * n for n in half] == full
    with pytest.raises(RequestError, match="width=0"):
        vgg16(width=0)


def test_the_digits_network_is_small_and_has_a_projection_shortcut() -> None:
    model = digits()
    assert parameters(model) < 200_000
    assert [
        n for n, m in model.named_modules() if "shortcut" in n and isinstance(m, nn.Conv2d)
    ] == ["stage2.0.shortcut.0"]


def test_an_unknown_name_is_answered_with_the_nearest_ones() -> None:
    with pytest.raises(RequestError, match="'resnet65': did you mean 'resnet56'"):
        build("resnet65")
    # 50 is 6n + 2, but who writes resnet50 means ImageNet's.
    with pytest.raises(RequestError, match="Others are 'torchvision:NAME', 'timm:NAME'"):
        build("resnet50")
    with pytest.raises(RequestError) as caught:  # which neither of them has
        build("resnet21")
    assert ":resnet21" not in str(caught.value)


@pytest.mark.parametrize("depth", [20, 32, 56])
def test_public_weights_load_as_they_are(weights_dir: Path, depth: int) -> None:
    model = resnet(depth)
    untouched = {k: v.clone() for k, v in model.state_dict().items()}
    load_weights(model, weights_dir / f"cifar10_resnet{depth}.safetensors")
    changed = [k for k, v in model.state_dict().items() if not torch.equal(v, untouched[k])]
    learnt = [k for k in untouched if not k.endswith("num_batches_tracked")]
    assert set(changed) >= {k for k in learnt if k.endswith("weight") or "running" in k}
    logits = model.eval()(torch.randn(4, 3, 32, 32))
    assert logits.shape == (4, 10)
    assert logits.isfinite().all()
