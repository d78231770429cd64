"""Small networks whose channels are moved about between convolutions, and a reference for them.

`MovementNet(seed)` draws one to three convolutions and a few movements of their channels (stack,
view, permute, chunk, cat, slices with steps, …). `check` compares its compact model with
`with_noise`, which is independent of `fpgm.verify`: removed filters become noise and whatever reads
them reads it with weight zero.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fpgm
from fpgm.errors import ModelError
from fpgm.pruning.plan import Cut, Plan

Move = Callable[[list[Tensor]], list[Tensor]]
BATCH, WIDTH, SIZE = 2, 3, 6


def with_noise(model: nn.Module, plan: Plan) -> nn.Module:
    """Copy the model with noise for every removed filter and zeros where one is read."""
    noisy = copy.deepcopy(model)
    tensors = noisy.state_dict(keep_vars=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for cut in sorted(plan.cuts, key=lambda cut: cut.role in ("reads", "both")):
            tensor = tensors[cut.tensor]
            removed = removed_mask(cut, tensor)
            noise = torch.rand(tensor.shape, generator=generator).to(tensor) + 0.5
            zero = cut.role in ("reads", "both")
            tensor.copy_(torch.where(removed, torch.zeros_like(noise) if zero else noise, tensor))
    return noisy


def removed_mask(cut: Cut, tensor: Tensor) -> Tensor:
    """True at every element a cut takes away."""
    mask = torch.ones(tensor.shape, dtype=torch.bool)
    rows, count = tensor.shape[0] // cut.blocks, len(cut.keep) // cut.blocks
    for block in range(cut.blocks):
        keep = torch.tensor(cut.keep[block * count : (block + 1) * count])
        part = mask[block * rows : (block + 1) * rows] if cut.blocks > 1 else mask
        part.index_fill_(cut.dim, keep, False)
    return mask


def check(model: nn.Module, rate: float, example: Tensor | None = None) -> str:
    """Plan and compact without `verify`; returns "right", "frozen" or what is wrong."""
    model = model.double().eval()
    x = torch.randn(BATCH, WIDTH, SIZE, SIZE).double() if example is None else example.double()
    try:
        plan = fpgm.plan(model, x, rate=rate, align=1)
    except ModelError as error:
        return "frozen" if "nothing to prune" in str(error).lower() else f"error: {error}"
    if not plan.cuts:
        return "frozen"
    small, noisy = fpgm.compact(model, plan), with_noise(model, plan)
    larger = torch.randn(*x.shape[:2], *(n + 2 for n in x.shape[2:]))
    with torch.no_grad():
        for inputs in (torch.randn_like(x), larger):
            try:
                wanted = noisy(inputs.double())
            except RuntimeError:
                continue  # the network itself wants inputs of one size
            try:
                results = small(inputs.double())
            except RuntimeError as error:
                return f"wrong: {error}"
            if results.shape != wanted.shape:
                return f"wrong: {tuple(results.shape)}, not {tuple(wanted.shape)}"
            error = (results - wanted).abs().transpose(0, 1).flatten(1).amax(1)
            scale = wanted.abs().transpose(0, 1).flatten(1).amax(1).clamp(min=1e-6)
            if float((error / scale).max()) > 1e-8:
                return f"wrong: outputs differ by {float((error / scale).max()):.1e}"
    return "right"


class MovementNet(nn.Module):
    """Convolutions with random movements between them, drawn by a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rand = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList()
        self.moves: list[Move | list[int]] = []
        self.names: list[str] = []
        xs = [torch.randn(BATCH, WIDTH, SIZE, SIZE)]
        branches, width = rand.choice([1, 1, 2, 2, 3]), rand.choice([4, 6, 8, 12, 16])
        xs = self._run_layers([nn.Conv2d(WIDTH, width, 1) for _ in range(branches)], xs * branches)
        for _ in range(rand.choice([1, 1, 2])):
            for _ in range(rand.randint(1, 4)):
                xs = self._move(rand, xs)
            xs = self._run(_join(rand, xs), "join", xs)
            conv = nn.Conv2d(xs[0].shape[1], rand.choice([4, 8, 12]), 3, padding=1)
            xs = self._run_layers([conv], xs)
        self._run_layers([nn.Conv2d(xs[0].shape[1], 3, 1)], xs)

    def forward(self, x: Tensor) -> Tensor:
        xs = [x]
        for move in self.moves:
            xs = self._apply_layers(move, xs) if isinstance(move, list) else move(xs)
        return xs[0]

    def _apply_layers(self, numbers: list[int], xs: list[Tensor]) -> list[Tensor]:
        """One layer a tensor; the input goes to all of the first layers."""
        xs = xs * len(numbers) if len(xs) == 1 else xs
        return [self.layers[i](x).tanh() for i, x in zip(numbers, xs, strict=True)]

    def _run_layers(self, layers: list[nn.Module], xs: list[Tensor]) -> list[Tensor]:
        numbers = list(range(len(self.layers), len(self.layers) + len(layers)))
        self.layers.extend(layers)
        self.moves.append(numbers)
        self.names.append(f"layers{numbers}")
        with torch.no_grad():
            return self._apply_layers(numbers, xs)

    def _run(self, move: Move, name: str, xs: list[Tensor]) -> list[Tensor]:
        self.moves.append(move)
        self.names.append(name)
        with torch.no_grad():
            return move(xs)

    def _move(self, rand: random.Random, xs: list[Tensor]) -> list[Tensor]:
        """Add a random movement that these tensors allow."""
        for _ in range(20):
            name = rand.choice(list(MOVES))
            move = MOVES[name](rand, [x.shape[1] for x in xs])
            try:
                out = [] if move is None else move(xs)
            except RuntimeError:
                continue
            if not out or any(not 2 <= x.shape[1] <= 64 or x.shape[2] > 16 for x in out):
                continue
            assert move is not None
            xs = self._run(move, name, xs)
            if rand.random() < 0.25:
                wide = [x.shape[1] for x in xs]
                xs = self._run_layers([nn.Conv2d(n, n, 1, groups=n) for n in wide], xs)
            return xs
        return xs


def _join(rand: random.Random, xs: list[Tensor]) -> Move:
    """Make one tensor of all."""
    if len({x.shape for x in xs}) == 1 and rand.random() < 0.3:
        return lambda xs: [torch.stack(xs).sum(0)]
    if len({x.shape[2:] for x in xs}) == 1:
        return lambda xs: [torch.cat(xs, 1)]
    return lambda xs: xs[:1]


def each(move: Callable[[Tensor], Tensor]) -> Move:
    """A movement of every tensor by itself."""
    return lambda xs: [move(x) for x in xs]


def stack_flat(rand: random.Random, widths: list[int]) -> Move | None:
    """Stack branches beside or behind the channels, and merge both dims."""
    if len(widths) < 2 or len(set(widths)) > 1:
        return None
    dim, how = rand.choice([1, 2]), rand.randrange(4)
    merged = widths[0] * len(widths)

    def move(xs: list[Tensor]) -> list[Tensor]:
        b, _, h, w = xs[0].shape
        if how == 3:  # channels last
            last = torch.stack([x.permute(0, 2, 3, 1) for x in xs], dim + 2)
            return [last.flatten(3).permute(0, 3, 1, 2)]
        y = torch.stack(xs, dim)
        if how == 0:
            return [y.flatten(1, 2)]
        return [y.reshape(b, -1, h, w) if how == 1 else y.reshape(b, merged, h, w)]

    return move


def shuffle(rand: random.Random, widths: list[int]) -> Move | None:
    """Split the channels into dims, swap those, merge them again."""
    k, how = rand.choice([2, 2, 3, 4]), rand.randrange(6)
    if any(c % k for c in widths):
        return None

    def move(x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        if how == 0:
            return x.view(b, k, c // k, h, w).transpose(1, 2).reshape(b, c, h, w)
        if how == 1:
            return x.view(b, c // k, k, h, w).transpose(1, 2).flatten(1, 2)
        if how == 2:
            return x.unflatten(1, (k, -1)).movedim(1, 2).flatten(1, 2)
        if how == 3:
            return x.unflatten(1, (-1, k)).flip(2).flatten(1, 2)
        if how == 4:
            return x.view(b, k, c // k, h, w).flip(1).reshape(b, -1, h, w)
        return torch.channel_shuffle(x, k)

    return each(move)


def pieces(rand: random.Random, widths: list[int]) -> Move | None:
    """Chunk and concatenate in another order, or add."""
    k, how = rand.choice([2, 2, 3, 4]), rand.randrange(5)
    if any(c % k for c in widths):
        return None
    order = rand.sample(range(k), k)
    sizes = [c // k for c in widths]

    def move(x: Tensor, size: int) -> Tensor:
        if how == 4:
            return torch.cat([torch.split(x, size, 1)[i] for i in order], 1)
        parts = x.chunk(k, 1)
        if how == 0:
            return torch.cat([parts[i] for i in order], 1)
        if how == 1:
            return torch.stack([parts[i] for i in order], 2).flatten(1, 2)
        if how == 2:
            return parts[order[0]] * parts[order[1]].sigmoid()
        return torch.cat([parts[order[0]], parts[order[1]]], 1)

    return lambda xs: [move(x, size) for x, size in zip(xs, sizes, strict=True)]


def steps(rand: random.Random, widths: list[int]) -> Move | None:
    """Slices with steps or bounds."""
    how, cut = rand.randrange(7), rand.choice([1, 2, 3])
    if any(c < 4 for c in widths):
        return None

    def move(x: Tensor) -> Tensor:
        c = x.shape[1]
        if how == 0:
            return x[:, ::2] * x[:, 1::2].sigmoid()
        if how == 1:
            return torch.cat([x[:, ::2], x[:, 1::2]], 1)
        if how == 2:
            return torch.cat([x[:, c // 2 :], x[:, : c // 2]], 1)
        if how == 3:
            return torch.cat([x[:, -cut:], x[:, :-cut]], 1)
        if how == 4:
            return x[:, cut:]
        if how == 5:
            return x[:, -cut - 1 :]
        return x[:, :: cut + 1]

    return each(move)


def repeats(rand: random.Random, widths: list[int]) -> Move | None:
    """Repeat channels one by one, or all of them."""
    how = rand.randrange(4)
    if how == 0:
        return each(lambda x: x.repeat_interleave(2, 1))
    if how == 1:
        return each(lambda x: x.repeat(1, 2, 1, 1))
    if how == 2:
        return each(lambda x: x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2))
    return each(lambda x: x[:, None].expand(-1, 2, -1, -1, -1).reshape(len(x), -1, *x.shape[2:]))


def turns(rand: random.Random, widths: list[int]) -> Move | None:
    """Flip or roll the channels."""
    by = rand.choice([1, 2, -1])
    return each(lambda x: x.flip(1)) if rand.random() < 0.6 else each(lambda x: x.roll(by, 1))


def to_space(rand: random.Random, widths: list[int]) -> Move | None:
    """Pixel shuffle, by hand in two orders or torch's own."""
    if any(c % 4 for c in widths):
        return None
    how = rand.randrange(3)

    def move(x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        if how == 0:
            return nn.functional.pixel_shuffle(x, 2)
        if how == 1:
            y = x.view(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3)
        else:
            y = x.view(b, 2, 2, c // 4, h, w).permute(0, 3, 4, 1, 5, 2)
        return y.reshape(b, c // 4, h * 2, w * 2)

    return each(move)


def to_channels(rand: random.Random, widths: list[int]) -> Move | None:
    """Pixels to channels, by hand in two orders or torch's own."""
    how = rand.randrange(3)

    def move(x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        if how == 0:
            return nn.functional.pixel_unshuffle(x, 2)
        y = x.view(b, c, h // 2, 2, w // 2, 2)
        y = y.permute(0, 1, 3, 5, 2, 4) if how == 1 else y.permute(0, 3, 5, 1, 2, 4)
        return y.reshape(b, c * 4, h // 2, w // 2)

    return each(move)


def branch(rand: random.Random, widths: list[int]) -> Move | None:
    """Take tensors apart into several, or swap them."""
    how = rand.randrange(5)
    if how == 0 and len(widths) == 1:
        return lambda xs: list(xs[0].chunk(2, 1))
    if how == 1 and len(widths) == 1:
        return lambda xs: [xs[0][:, ::2], xs[0][:, 1::2]]
    if how == 2 and len(widths) == 1:
        return lambda xs: list(xs[0].unflatten(1, (2, -1)).unbind(1))
    if how == 3 and len(widths) == 1:
        return lambda xs: list(xs[0].unflatten(1, (-1, 2)).unbind(2))
    return (lambda xs: xs[::-1]) if len(widths) > 1 else None


MOVES: dict[str, Callable[[random.Random, list[int]], Move | None]] = {
    "stack": stack_flat,
    "shuffle": shuffle,
    "pieces": pieces,
    "steps": steps,
    "repeats": repeats,
    "turns": turns,
    "to_space": to_space,
    "to_channels": to_channels,
    "branch": branch,
}
