"""Networks on sound."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import floats, network, signal, unit

FAMILY = "audio"
SIGNALS = (signal(), signal(length=96, batch=3))


@network(FAMILY, *SIGNALS)
class WaveNet(nn.Module):
    """Gated dilated convolutions with residual and skip sums."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 8, 1)
        self.gates = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))
        self.residuals = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(8, 12, 1) for _ in range(3))
        self.head = nn.Conv1d(12, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.stem(x), 0
        for i, (gate, residual, skip) in enumerate(
            zip(self.gates, self.residuals, self.skips, strict=True)
        ):
            a, b = gate(F.pad(x, (2**i, 0))).chunk(2, 1)
            z = a.tanh() * b.sigmoid()
            x, total = x + residual(z), total + skip(z)
        return self.head(total.relu())


@network(FAMILY, *SIGNALS)
class TemporalConvolutions(nn.Module):
    """Causal blocks that cut off what they padded."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleList(
            nn.Conv1d(1 if i == 0 else 8, 8, 3, 1, 2 << i, 1 << i) for i in (0, 1)
        )
        self.b = nn.ModuleList(nn.Conv1d(8, 8, 3, 1, 2 << i, 1 << i) for i in (0, 1))
        self.shortcut = nn.Conv1d(1, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 1):
            cut = 2 << i
            y = self.a[i](x)[..., :-cut].relu()
            y = self.b[i](y)[..., :-cut].relu()
            x = (y + (self.shortcut(x) if i == 0 else x)).relu()
        return self.head(x[..., -1])


@network(FAMILY, *SIGNALS)
class SincNet(nn.Module):
    """Filters from two learnt frequencies each."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.linspace(0.02, 0.2, 8))
        self.band = nn.Parameter(torch.full((8,), 0.1))
        self.register_buffer("time", torch.arange(-5, 6).float())
        self.norm, self.mix = nn.BatchNorm1d(8), nn.Conv1d(8, 8, 3, 1, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.low.abs(), self.low.abs() + self.band.abs()
        t = 2 * self.time
        kernels = 2 * high[:, None] * torch.sinc(high[:, None] * t)
        kernels = kernels - 2 * low[:, None] * torch.sinc(low[:, None] * t)
        y = F.conv1d(x, kernels[:, None], padding=5)
        return self.head(self.mix(self.norm(y).relu()).mean(2))


@network(FAMILY, floats(2, 256), floats(3, 320))
class SpectrogramNet(nn.Module):
    """A spectrogram by torch.stft, then convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(32))
        self.layers = nn.Sequential(unit(1, 8), unit(8, 8, stride=2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 32, 16, window=self.window, return_complex=True).abs()
        return self.head(self.layers(spectrum.log1p()[:, None]).mean((2, 3)))


@network(FAMILY, floats(2, 256), floats(3, 320))
class LearntFilterBank(nn.Module):
    """A mel-like matrix over frequencies, learnt; instance norm behind."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = nn.Parameter(torch.rand(12, 17))
        self.register_buffer("window", torch.hann_window(32))
        self.layers = nn.Sequential(nn.Conv1d(12, 8, 3, 1, 1), nn.InstanceNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        power = torch.stft(x, 32, 16, window=self.window, return_complex=True).abs() ** 2
        return self.head(self.layers((self.bank @ power).log1p()).mean(2))


@network(FAMILY, *SIGNALS)
class ConvTasNet(nn.Module):
    """Masks for two speakers over a learnt basis, which is transposed back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, 12, 8, 4, bias=False)
        self.mask = nn.Sequential(
            nn.Conv1d(12, 8, 1), nn.PReLU(), nn.Conv1d(8, 8, 3, 1, 1, groups=8), nn.PReLU(8),
            nn.Conv1d(8, 24, 1),
        )  # fmt: skip
        self.decoder = nn.ConvTranspose1d(12, 1, 8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        e = self.encoder(x).relu()
        masks = self.mask(e).view(x.shape[0], 2, -1, e.shape[-1]).sigmoid()
        result = [self.decoder(e * masks[:, i]) for i in range(2)]
        return torch.cat(result, 1)


@network(FAMILY, *SIGNALS)
class WaveUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv1d(1, 8, 5, 1, 2), nn.Conv1d(8, 12, 5, 1, 2)])
        self.middle = nn.Conv1d(12, 12, 5, 1, 2)
        self.up = nn.ModuleList([nn.Conv1d(24, 8, 5, 1, 2), nn.Conv1d(16, 8, 5, 1, 2)])
        self.head = nn.Conv1d(9, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips, y = [], x
        for layer in self.down:
            skips.append(layer(y).relu())
            y = skips[-1][..., ::2]
        y = self.middle(y).relu()
        for layer in self.up:
            y = F.interpolate(y, scale_factor=2.0, mode="linear")
            y = layer(torch.cat([y, skips.pop()], 1)).relu()
        return self.head(torch.cat([y, x], 1)).tanh()


@network(FAMILY, *SIGNALS)
class VectorQuantiser(nn.Module):
    """The nearest code for every frame; codes have the encoder's width."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, 8, 5, 1, 2), nn.ReLU(), nn.Conv1d(8, 6, 3, 1, 1))
        self.codes = nn.Parameter(torch.randn(10, 6))
        self.decoder = nn.Sequential(nn.Conv1d(6, 8, 3, 1, 1), nn.ReLU(), nn.Conv1d(8, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x).mT
        index = torch.cdist(z, self.codes.expand(z.shape[0], -1, -1)).argmin(-1)
        q = F.embedding(index, self.codes)
        return self.decoder((z + (q - z).detach()).mT), index


@network(FAMILY, *SIGNALS)
class StatisticsPooling(nn.Module):
    """A speaker embedding from attention-weighted mean and deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(1, 8, 5, 1, 2), nn.ReLU(), nn.BatchNorm1d(8))
        self.attention = nn.Sequential(nn.Conv1d(8, 4, 1), nn.Tanh(), nn.Conv1d(4, 8, 1))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        f = self.layers(x)
        w = self.attention(f).softmax(2)
        mean = (f * w).sum(2)
        spread = ((f**2 * w).sum(2) - mean**2).clamp(min=1e-4).sqrt()
        return self.head(torch.cat([mean, spread], 1))


@network(FAMILY, *SIGNALS)
class Snake(nn.Module):
    """BigVGAN's activation with a parameter for every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(1, 8, 5, 1, 2), nn.Conv1d(8, 8, 5, 1, 2)
        self.alpha = nn.Parameter(torch.rand(1, 8, 1) + 0.5)
        self.head = nn.Conv1d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = x + (self.alpha * x).sin() ** 2 / (self.alpha + 1e-9)
        return self.head(self.b(x).relu())


@network(FAMILY, *SIGNALS)
class FramesByUnfold(nn.Module):
    """Tensor.unfold cuts overlapping frames behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = nn.Conv1d(1, 8, 3, 1, 1), nn.Conv1d(8, 8, 3, 1, 1)
        self.frame, self.head = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.mix(self.stem(x).relu()).unfold(2, 8, 4)
        return self.head(self.frame(frames).relu().mean((1, 2)) * math.sqrt(2))


@network(FAMILY, signal(1, 64), signal(1, 128, 3))
class Periods(nn.Module):
    """HiFi-GAN's period discriminator: the signal as rows of four."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, (5, 1), (3, 1), (2, 0)), nn.LeakyReLU(0.1),
            nn.Conv2d(8, 12, (5, 1), (3, 1), (2, 0)), nn.LeakyReLU(0.1),
        )  # fmt: skip
        self.head = nn.Conv2d(12, 1, (3, 1), 1, (1, 0))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        n, c, t = x.shape
        maps = []
        x = x.view(n, c, t // 4, 4)
        for layer in self.layers:
            x = layer(x)
        maps.append(x)
        x = self.head(x)
        return x.flatten(1, -1), maps
