"""Files damaged in every way a disk, a network or an enemy can think of."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

STRANGE: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, -(2**63), 1.5, 1e308, float("inf"), float("nan"), "", "x",
    "../../etc/passwd", "__class__", [], {}, [[]], {"": None}, [2**40], "\u0000", "weight",
    "filter",
]  # fmt: skip


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One of many kinds of damage."""
    return rng.choice(_VARIANTS)(data, rng)


def _flip(data: bytes, rng: random.Random) -> bytes:
    """A few bits, most of them where the file describes itself."""
    changed = bytearray(data)
    end = len(data) if rng.random() < 0.3 else min(len(data), 8 + _header_size(data))
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _grow(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + rng.randbytes(rng.choice((1, 7, 64))) + data[place:]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    a, b = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
    return data[:b] + data[a:b] + data[b:]


def _length(data: bytes, rng: random.Random) -> bytes:
    """Another size of the header."""
    size = rng.choice((0, 1, 2**20, 2**40, 2**63, _header_size(data) + rng.choice((-1, 1))))
    return struct.pack("<Q", size) + data[8:]


def _header(data: bytes, rng: random.Random) -> bytes:
    """A header that is well-formed and says something else."""
    header, rest = header_of(data)
    return packed(_changed(header, rng), rest)


def _plans(data: bytes, rng: random.Random) -> bytes:
    """Well-formed plans that say something else."""
    header, rest = header_of(data)
    output = header["__metadata__"]
    key = rng.choice(("fpgm_plans", "fpgm_plans", "fpgm_plans", "fpgm_shared"))
    output[key] = json.dumps(_changed(json.loads(output[key]), rng))
    return packed(header, rest)


_VARIANTS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip, _flip, _cut, _grow, _repeat, _length, _header, _plans, _plans, _plans,
)  # fmt: skip


def _changed(value: Any, rng: random.Random) -> Any:
    """The same with one thing in it replaced, removed, or doubled."""
    places = list(_places(value))
    if not places:
        return rng.choice(STRANGE)
    holder, key = rng.choice(places)
    variant = rng.random()
    if variant < 0.6:
        holder[key] = rng.choice(STRANGE)
    elif variant < 0.8 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
        holder[key] += rng.choice((-1, 1))
    elif variant < 0.9:
        del holder[key]
    elif isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[f"{key}x"] = holder[key]
    return value


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inside in items:
        yield value, key
        if isinstance(inside, dict | list):
            yield from _places(inside)


def _header_size(data: bytes) -> int:
    return int(struct.unpack("<Q", data[:8])[0])


def header_of(data: bytes) -> tuple[Any, bytes]:
    """What a file says about itself, and the bytes of its tensors."""
    size = _header_size(data)
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def packed(header: Any, rest: bytes) -> bytes:
    """A file of these."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest
