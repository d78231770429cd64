"""Text, and recurrent hybrids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import floats, image, integers, network, unit

IMAGES = (image(), image(size=20, batch=3))
TOKENS = (integers(11, 3, 9), integers(11, 2, 14))
TEXT, RECURRENT = "text", "recurrent"


@network(TEXT, *TOKENS)
class TextCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.convs = nn.ModuleList(nn.Conv1d(8, 6, k) for k in (2, 3, 4))
        self.head = nn.Linear(18, 4)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embed(x).mT
        return self.head(torch.cat([c(e).relu().amax(2) for c in self.convs], 1))


@network(TEXT, *TOKENS)
class TextCNNAsImages(nn.Module):
    """Kernels as wide as the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.convs = nn.ModuleList(nn.Conv2d(1, 6, (k, 8)) for k in (2, 3))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embed(x)[:, None]
        parts = [
            F.max_pool1d((y := c(e).relu().squeeze(3)), y.shape[2]).squeeze(2) for c in self.convs
        ]
        return self.head(torch.cat(parts, 1))


@network(TEXT, *TOKENS)
class CharCNN(nn.Module):
    """One-hot characters and a highway layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(11, 8, 3, 1, 1)
        self.gate, self.change, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hot = F.one_hot(x, 11).to(self.conv.weight.dtype).mT
        f = self.conv(hot).relu().amax(2)
        gate = self.gate(f).sigmoid()
        return self.head(gate * self.change(f).relu() + (1 - gate) * f)


@network(TEXT, *TOKENS)
class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 8)
        self.hidden, self.head = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.bag(x)).relu())


@network(TEXT, *TOKENS)
class MaskedMean(nn.Module):
    """Padding (token 0) does not count; masked softmax attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.mix, self.score, self.head = nn.Linear(8, 12), nn.Linear(12, 1), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.embed(x)).relu()
        scores = self.score(h).squeeze(-1).masked_fill(x == 0, -1e9)
        return self.head((scores.softmax(1)[..., None] * h).sum(1))


@network(TEXT, *TOKENS)
class PositionsAdded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8), nn.Embedding(20, 8)
        self.conv, self.head = nn.Conv1d(8, 8, 3, 1, 1), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embed(x) + self.place(torch.arange(x.shape[1]))
        return self.head(self.conv(e.mT).relu().mT)


@network(RECURRENT, image(size=16), image(size=16, width=24))
class ConvolutionalRecurrentReader(nn.Module):
    """CRNN: columns of a feature map are steps of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            unit(3, 8), nn.MaxPool2d((2, 1)), unit(8, 8), nn.MaxPool2d((8, 1))
        )
        self.lstm = nn.LSTM(8, 6, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        f = self.features(x).squeeze(2).mT
        return self.head(self.lstm(f)[0]).log_softmax(-1)


@network(RECURRENT, floats(2, 10, 5), floats(3, 7, 5))
class GatedRecurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gru = nn.Linear(5, 8), nn.GRU(8, 8, 2, batch_first=True)
        self.hidden, self.head = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.gru(self.up(x).relu())
        return self.head(self.hidden(out[:, -1]).relu())


@network(RECURRENT, floats(2, 10, 5), floats(3, 7, 5))
class RecurrentCell(nn.Module):
    """A cell unrolled by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            h = (self.into(x[:, t]) + self.again(h)).tanh()
        return self.head(h)


@network(RECURRENT, floats(2, 10, 5), floats(3, 7, 5))
class RecurrentCellOwnWidth(nn.Module):
    """The first state takes its width from a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.again.in_features)
        for t in range(x.shape[1]):
            h = (self.into(x[:, t]) + self.again(h)).tanh()
        return self.head(h)


@network(RECURRENT, floats(2, 10, 5), floats(3, 7, 5))
class StateSpace(nn.Module):
    """A diagonal recurrence with a learnt decay for every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.gate = nn.Linear(5, 8), nn.Linear(5, 8)
        self.decay, self.head = nn.Parameter(torch.rand(8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        u, g = self.into(x), F.silu(self.gate(x))
        h, out = torch.zeros_like(u[:, 0]), []
        for t in range(x.shape[1]):
            h = self.decay.sigmoid() * h + u[:, t]
            out.append(h)
        return self.head(torch.stack(out, 1) * g)
