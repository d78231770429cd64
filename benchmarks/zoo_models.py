"""The models of the zoo, and how to build them so that verification is meaningful.

All of torchvision's classification, segmentation and detection models and its video CNNs. From
timm, the smallest model of every kind of architecture in each module with convolutional networks,
and a few pure transformers. `zoo.py` prunes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

SUITES = ("torchvision", "timm")

SEED = 0

TIMM_CNNS = {
    "byobnet": "bat_resnext26ts eca_resnet33ts eca_resnext26ts gcresnet33ts gcresnext26ts gernet_s "
    "mobileone_s1 regnetz_b16 repvgg_a0 resnet32ts resnet51q resnext26ts seresnet33ts "
    "seresnext26ts test_byobnet",
    "convmixer": "convmixer_768_32",
    "convnext": "convnext_zepto_rms convnext_atto convnextv2_atto test_convnext",
    "cspnet": "cs3darknet_focus_s cs3darknet_s cs3sedarknet_xdw cspdarknet53 cspresnet50 "
    "cspresnext50 darknet17 darknetaa53 sedarknet21 cs3edgenet_x",
    "densenet": "densenet121 densenetblur121d",
    "dla": "dla46x_c dla46_c dla34 dla60_res2net dla60_res2next",
    "dpn": "dpn48b dpn68",
    "efficientnet": "efficientnet_lite0 efficientnet_b0 efficientnet_b0_gn efficientnet_b0_g8_gn "
    "efficientnet_b0_g16_evos efficientnet_blur_b0 efficientnet_cc_b0_4e efficientnet_es "
    "efficientnet_x_b3@224 efficientnetv2_rw_t fbnetc_100 gc_efficientnetv2_rw_t mixnet_s "
    "mnasnet_small mobilenet_edgetpu_100 mobilenet_edgetpu_v2_xs mobilenetv1_100 mobilenetv2_035 "
    "semnasnet_050 spnasnet_100 test_efficientnet tf_efficientnet_lite0 tf_efficientnetv2_b0 "
    "tf_mixnet_s tinynet_e",
    "fasternet": "fasternet_t0",
    "focalnet": "focalnet_tiny_srf",
    "ghostnet": "ghostnet_050 ghostnetv2_100 ghostnetv3_050",
    "hardcorenas": "hardcorenas_b",
    "hgnet": "hgnet_tiny hgnetv2_b0",
    "hrnet": "hrnet_w18_small",
    "inception_next": "inception_next_atto",
    "inception_resnet_v2": "inception_resnet_v2@224",
    "inception_v3": "inception_v3@224",
    "inception_v4": "inception_v4@224",
    "lcnetv2": "lcnetv2_small",
    "mambaout": "mambaout_femto test_mambaout",
    "metaformer": "convformer_s18 poolformer_s12 poolformerv2_s12",
    "mobilenetv3": "fbnetv3_b lcnet_035 mobilenetv3_small_050 mobilenetv4_conv_small_035 "
    "mobilenetv4_conv_blur_medium tf_mobilenetv3_small_075",
    "nasnet": "nasnetalarge@224",
    "nfnet": "dm_nfnet_f0 eca_nfnet_l0 nf_ecaresnet26 nf_regnet_b0 nf_resnet26 nf_seresnet26 "
    "nfnet_l0 test_nfnet",
    "pnasnet": "pnasnet5large@224",
    "rdnet": "rdnet_tiny",
    "regnet": "regnetv_040 regnetx_002 regnety_002 regnetz_005",
    "repghost": "repghostnet_050",
    "repvit": "repvit_m1",
    "res2net": "res2net50_14w_8s res2net50_26w_4s res2next50",
    "resnest": "resnest14d resnest50d_1s4x24d resnest50d_4s2x40d",
    "resnet": "ecaresnet26t ecaresnetlight ecaresnext26t_32x4d resnet10t resnet18 resnetaa34d "
    "resnetblur18 resnetrs50 resnext50_32x4d seresnet18 seresnetaa50d seresnext26t_32x4d "
    "test_resnet wide_resnet50_2",
    "resnetv2": "resnetv2_18 resnetv2_50d_evos resnetv2_50d_frn resnetv2_50d_gn resnetv2_50x1_bit",
    "rexnet": "rexnet_100 rexnetr_100",
    "selecsls": "selecsls42",
    "senet": "legacy_seresnet18 legacy_seresnext26_32x4d",
    "sknet": "skresnet18 skresnext50_32x4d",
    "starnet": "starnet_s050",
    "tresnet": "tresnet_m",
    "vgg": "vgg11 vgg11_bn",
    "vovnet": "eca_vovnet39b ese_vovnet19b_slim_dw ese_vovnet39b_evos vovnet39a",
    "xception": "legacy_xception@224",
    "xception_aligned": "xception41@224 xception41p@224",
}
"""timm module → models; `@` gives an input size other than the model's own."""

TIMM_HYBRIDS = {
    "byoanet": "botnet26t_256 eca_botnext26ts_256 eca_halonext26ts halonet_h1 haloregnetz_b "
    "lambda_resnet26t sebotnet33ts_256",
    "coat": "coat_tiny",
    "cpubone": "cpubone_nano",
    "csatv2": "csatv2",
    "davit": "davit_tiny",
    "edgenext": "edgenext_xx_small",
    "efficientformer": "efficientformer_l1",
    "efficientformer_v2": "efficientformerv2_s0",
    "efficientvim": "efficientvim_m1",
    "efficientvit_mit": "efficientvit_b0",
    "efficientvit_msra": "efficientvit_m0",
    "fastvit": "fastvit_t8",
    "gcvit": "gcvit_xxtiny",
    "iformer": "iformer_t",
    "levit": "levit_128s levit_conv_128s",
    "lowformer": "lowformer_b0",
    "maxxvit": "coatnet_pico_rw_224 coatnet_rmlp_nano_rw_224 coatnext_nano_rw_224 "
    "maxvit_pico_rw_256 maxvit_rmlp_pico_rw_256 maxxvit_rmlp_nano_rw_256 maxxvitv2_nano_rw_256",
    "metaformer": "caformer_s18",
    "mobilenetv3": "mobilenetv4_hybrid_medium_075",
    "mobilenetv5": "mobilenetv5_base",
    "mobilevit": "mobilevit_xxs mobilevitv2_050",
    "mvitv2": "mvitv2_tiny",
    "nest": "nest_tiny",
    "nextvit": "nextvit_small",
    "pit": "pit_ti_224",
    "pvt_v2": "pvt_v2_b0",
    "shvit": "shvit_s1",
    "swiftformer": "swiftformer_xs",
    "tiny_vit": "tiny_vit_5m_224",
    "twins": "twins_svt_small",
    "visformer": "visformer_tiny",
    "vision_transformer_hybrid": "vit_tiny_r_s16_p8_224",
    "vitamin": "vitamin_small_224",
}

TIMM_TRANSFORMERS = {
    "cait": "cait_xxs24_224",
    "convit": "convit_tiny",
    "deit": "deit_tiny_patch16_224",
    "eva": "eva02_tiny_patch14_224",
    "hiera": "hiera_tiny_224",
    "mlp_mixer": "gmixer_12_224 gmlp_ti16_224 mixer_s16_224 resmlp_12_224",
    "sequencer": "sequencer2d_s",
    "swin_transformer": "swin_tiny_patch4_window7_224",
    "swin_transformer_v2": "swinv2_tiny_window8_256",
    "vision_transformer": "vit_tiny_patch16_224",
    "volo": "volo_d1_224",
    "xcit": "xcit_nano_12_p8_224",
}

TORCHVISION_HUGE = {"regnet_y_128gf", "vit_h_14"}
TORCHVISION_VIDEO = {  # frames, height, width; of the CNNs among the video models
    "mc3_18": (8, 112, 112),
    "r2plus1d_18": (8, 112, 112),
    "r3d_18": (8, 112, 112),
    "s3d": (16, 224, 224),
}
DETECTOR_SIZES = {"ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 320}


@dataclass(frozen=True)
class Case:
    """One model of the zoo and its input shape."""

    suite: str
    kind: str
    family: str
    name: str
    shape: tuple[int, ...]
    huge: bool = False

    @property
    def key(self) -> str:
        """Return a key that is unique among all cases."""
        return f"{self.suite}:{self.name}"


@dataclass(frozen=True)
class Subject:
    """A built model in eval mode, its example input, and the larger model that contains it."""

    model: Any
    inputs: tuple[Any, ...]
    run_inside: Callable[[Any], None] | None = None
    """Runs the detector around a backbone with another backbone in its place."""


def all_cases() -> list[Case]:
    """List all models of the zoo, torchvision first."""
    return [*_torchvision_cases(), *_timm_cases()]


def build(case: Case, fused_attention: bool = True) -> Subject:
    """Build the model of a case from a fixed seed, so that all weights and statistics matter.

    Fused attention is what users run; a tool that reads the autograd graph needs it off.
    """
    import torch

    torch.manual_seed(SEED)
    inside = None
    if case.suite == "timm":
        import_torchvision()
        import timm
        from timm.layers.config import set_fused_attn

        set_fused_attn(fused_attention)
        model = timm.create_model(case.name)
    else:
        models = import_torchvision().models
        options = {} if case.kind.startswith(("classification", "video")) else _NO_BACKBONE
        model = models.get_model(case.name, weights=None, **options)
        if case.kind == "detection backbones":
            inside = functools.partial(_run_detector, model.eval(), _image(case.shape))
            model = model.backbone
    randomise_(model, case.shape)
    return Subject(model.eval(), (_image(case.shape),), inside)


_NO_BACKBONE: dict[str, Any] = {"weights_backbone": None}


def randomise_(model: Any, shape: tuple[int, ...]) -> None:
    """Randomize constant parameters and batch-norm statistics in place.

    Freshly initialized models hide mistakes: layer scales of 1e-6 and zero gains switch whole
    branches off, and a norm without collected statistics is the identity. Constants are spread
    around one (scales) or zero (shifts). Then two images set the norms' statistics, so that signals
    neither die nor explode.
    """
    import torch
    from torch import nn

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.1)
                else:
                    parameter.uniform_(0.5, 1.0)
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        norms = [norm for norm in norms if norm.track_running_stats]
        if not norms:
            return
        momenta = [norm.momentum for norm in norms]
        model.eval()
        for norm in norms:
            norm.momentum = 1.0
            norm.train()
        model(torch.cat([_image(shape), torch.rand(1, *shape[1:])]))  # unlike each other
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            variance: Any = norm.running_var
            variance.clamp_(min=float(variance.mean()) / 2 + 1e-6)  # else other images explode


def import_torchvision() -> Any:
    """Import torchvision; replace the compiled operators of detectors if they do not load."""
    from fpgm.models.torchvision_import import import_torchvision as load

    torchvision: Any = load()
    if not torchvision.extension._has_ops():
        import torch

        torch.compiler.set_stance("force_eager")  # its Python roi_align asks to be compiled
        torchvision.ops.boxes.nms = _nms
    return torchvision


def _nms(boxes: Any, scores: Any, iou_threshold: float) -> Any:
    """Suppress overlapping boxes greedily, best score first."""
    import torch

    order = scores.argsort(descending=True).tolist()
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    alive = torch.ones(len(order), dtype=torch.bool)
    kept = []
    for i in order:
        if not alive[i]:
            continue
        kept.append(i)
        size = torch.minimum(boxes[:, 2:], boxes[i, 2:]) - torch.maximum(boxes[:, :2], boxes[i, :2])
        common = size.clamp(min=0).prod(dim=1)
        alive &= common <= iou_threshold * (areas + areas[i] - common)
        alive[i] = False
    return torch.tensor(kept, dtype=torch.long)


def _run_detector(detector: Any, images: Any, backbone: Any) -> None:
    """Run one forward pass with few candidates: only the backbone is measured."""
    import torch

    if detector.transform.fixed_size is None:
        detector.transform.min_size = (images.shape[-1],)
    if hasattr(detector, "rpn"):
        detector.rpn._pre_nms_top_n = detector.rpn._post_nms_top_n = {"testing": 20}
    else:
        detector.topk_candidates = 20
    item, detector.backbone = detector.backbone, backbone
    try:
        with torch.no_grad():
            detector(list(images.sigmoid()))
    finally:
        detector.backbone = item


def _image(shape: tuple[int, ...]) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED + 1))


def _torchvision_cases() -> Iterator[Case]:
    models = import_torchvision().models
    for name in models.list_models(module=models):
        attends = name.startswith(("swin", "vit", "maxvit"))
        kind = "classification transformers" if attends else "classification CNNs"
        shape = (1, 3, 224, 224)
        yield Case("torchvision", kind, "classification", name, shape, name in TORCHVISION_HUGE)
    for name in models.list_models(module=models.segmentation):
        yield Case("torchvision", "segmentation", "segmentation", name, (1, 3, 224, 224))
    for name in models.list_models(module=models.detection):
        size = DETECTOR_SIZES.get(name, 224)
        yield Case("torchvision", "detection backbones", "detection", name, (1, 3, size, size))
    for name, clip in TORCHVISION_VIDEO.items():
        yield Case("torchvision", "video", "video", name, (1, 3, *clip))


def _timm_cases() -> Iterator[Case]:
    import_torchvision()
    import timm

    kinds = {"CNNs": TIMM_CNNS, "hybrids": TIMM_HYBRIDS, "transformers": TIMM_TRANSFORMERS}
    for kind, families in kinds.items():
        for family, names in families.items():
            for name, _, size in (entry.partition("@") for entry in names.split()):
                settings: Any = timm.get_pretrained_cfg(name)
                item = settings.input_size
                shape = (1, item[0], int(size), int(size)) if size else (1, *item)
                yield Case("timm", kind, family, name, shape)
