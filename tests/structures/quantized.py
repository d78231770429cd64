"""Quantisation-aware training, by torch.ao and by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao import quantization as q

from .registry import image, network, pooled, unit

FAMILY = "quantised training"
IMAGES = (image(), image(size=20, batch=3))


def observed(model: nn.Module) -> nn.Module:
    """Let observers see data once."""
    model.train()
    model(torch.randn(4, 3, 16, 16))
    return model.eval()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = q.QuantStub(), q.DeQuantStub()
        self.conv1, self.norm1, self.act1 = nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.norm2, self.act2 = nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.norm1(self.conv1(self.quant(x))))
        x = self.act2(self.norm2(self.conv2(x)))
        return self.dequant(self.head(x.mean((2, 3))))


@network(FAMILY, *IMAGES)
def prepared_eager() -> nn.Module:
    model = Plain().train()
    model.qconfig = q.get_default_qat_qconfig("fbgemm")
    return observed(q.prepare_qat(model))


@network(FAMILY, *IMAGES)
def prepared_without_observers() -> nn.Module:
    """Ranges are fixed, as towards the end of training."""
    model = Plain().train()
    model.qconfig = q.get_default_qat_qconfig("fbgemm")
    return observed(q.prepare_qat(model)).apply(q.disable_observer)


@network(FAMILY, *IMAGES)
def prepared_and_fused() -> nn.Module:
    model = Plain().train()
    model.qconfig = q.get_default_qat_qconfig("qnnpack")
    fused = q.fuse_modules_qat(model, [["conv1", "norm1", "act1"], ["conv2", "norm2", "act2"]])
    return observed(q.prepare_qat(fused))


@network(FAMILY, *IMAGES)
class FakeQuantizedActivations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = unit(3, 8), unit(8, 8), nn.Conv2d(8, 4, 1)
        self.fake = q.FakeQuantize(q.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
        self.fake(torch.rand(4, 8) * 3)
        self.fake.disable_observer()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.fake(self.a(x.float()))))


@network(FAMILY, *IMAGES)
class FakeQuantizedPerChannel(nn.Module):
    """Weights with a scale for each filter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.conv, self.head = unit(3, 8), nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 4, 1)
        self.register_buffer("scale", torch.rand(8) * 0.02 + 0.01)
        self.register_buffer("zero", torch.zeros(8, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        w = torch.fake_quantize_per_channel_affine(
            self.conv.weight.float(), self.scale.float(), self.zero, 0, -128, 127
        )
        return self.head(F.conv2d(self.a(x.float()), w, self.conv.bias, padding=1).relu())


class LearntStep(nn.Module):
    """LSQ: rounding with a learnt step and a straight-through gradient."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.full(shape, 0.05))

    def forward(self, x: Tensor) -> Tensor:
        y = (x / self.step).clamp(-128, 127)
        return (y + (y.round() - y).detach()) * self.step


@network(FAMILY, *IMAGES)
class LearntStepQuantisation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.conv, self.head = unit(3, 8), nn.Conv2d(8, 8, 3, 1, 1), nn.Linear(8, 4)
        self.weight_step, self.step = LearntStep(()), LearntStep(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.step(self.a(x))
        w = self.weight_step(self.conv.weight)
        return self.head(pooled(F.conv2d(x, w, self.conv.bias, padding=1).relu()))


@network(FAMILY, *IMAGES)
class LearntStepPerFilter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.conv, self.head = unit(3, 8), nn.Conv2d(8, 8, 3, 1, 1), nn.Linear(8, 4)
        self.weight_step, self.step = LearntStep((8, 1, 1, 1)), LearntStep((1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.step(self.a(x))
        w = self.weight_step(self.conv.weight)
        return self.head(pooled(F.conv2d(x, w, self.conv.bias, padding=1).relu()))


@network(FAMILY, *IMAGES)
class TernaryWeights(nn.Module):
    """A threshold from the whole weight's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.conv = unit(3, 8), nn.Conv2d(8, 8, 3, 1, 1)
        self.b, self.head = unit(8, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        w = self.conv.weight
        t = w.sign() * (w.abs() > 0.7 * w.abs().mean())
        y = F.conv2d(self.a(x), w + (t * 0.1 - w).detach(), self.conv.bias, padding=1)
        return self.head(self.b(y.relu()))
