"""Saved models changed on purpose, with their digest made right: what an attacker would write."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from tests.helpers.mutations import header_of, packed

from fpgm.pruning.serialization import DIGEST, content_sha256

ESCAPE = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\n\u202e"
NUMBERS: list[Any] = [
    0, -1, 1, 2, 3, 7, 8, 9, 16, 17, 99, 2**16, 2**31, 2**32 + 1, 2**53, 2**62, 2**63,
    2**64, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"), True, False,
    None, "8", [8],
]  # fmt: skip
TEXTS: list[Any] = [
    "", ESCAPE, "x" * 100_000, "../../etc/passwd", "0", "0.weight", "2", "\ud800", "\x00", None, 5,
    "stride", "padding", "kernel_size", "dilation", "training", "_version", "__class__", "__dict__",
    "forward", "weight", "in_channels", "out_channels", "groups", "eps", "momentum", "scatter",
    "gather", "input", "output", "both", "reads",
]  # fmt: skip
DTYPES = (
    torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8, torch.int8,
    torch.float16, torch.bfloat16, torch.float64, torch.int32,
)  # fmt: skip
DTYPE_NAMES = ("F8_E8M0", "F4", "F6_E2M3", "C64", "BOOL", "U16", "F64", "Q9", "")


def forged(data: bytes, rng: random.Random) -> bytes:
    """One to three changes to what a file says, and a digest that agrees with them."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(_VARIANTS)(data, rng)
    return _signed(data)


def _signed(data: bytes) -> bytes:
    header, rest = header_of(data)
    result = header.get("__metadata__")
    if not isinstance(result, dict):
        return data
    try:
        result[DIGEST] = content_sha256(load(data), result)
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        return data  # what cannot be read at all needs no digest
    return packed(header, rest)


def _plans(data: bytes, rng: random.Random) -> bytes:
    """Change something deep in the plans."""
    return _metadata_json(data, rng, "fpgm_plans")


def _shared(data: bytes, rng: random.Random) -> bytes:
    """Change which tensors share one memory."""
    return _metadata_json(data, rng, "fpgm_shared")


def _metadata_json(data: bytes, rng: random.Random, key: str) -> bytes:
    header, rest = header_of(data)
    try:
        value = json.loads(header["__metadata__"][key])
    except (KeyError, ValueError, TypeError, RecursionError):
        return data  # an earlier change left nothing to change
    header["__metadata__"][key] = json.dumps(_changed(value, rng))
    return packed(header, rest)


def _deep(data: bytes, rng: random.Random) -> bytes:
    """Nest something without end."""
    header, rest = header_of(data)
    depth = rng.choice((10, 400, 900, 5000, 100_000))
    opened, closed = rng.choice((("[", "]"), ('{"a":', "}")))
    text = opened * depth + "1" + closed * depth
    result = header["__metadata__"]
    key = rng.choice(sorted(result))
    result[key] = rng.choice((text, result[key].replace('"rate": 0.5', f'"rate": {text}')))
    return packed(header, rest)


def _metadata(data: bytes, rng: random.Random) -> bytes:
    """Change, drop or add a text of the metadata."""
    header, rest = header_of(data)
    result = header["__metadata__"]
    key = rng.choice(sorted(result))
    if rng.random() < 0.3:
        del result[key]
    else:
        texts = [text for text in TEXTS if isinstance(text, str) and text != "\ud800"]
        result[rng.choice((key, ESCAPE))] = rng.choice([*texts, "1", "2", "3", "9" * 5000])
    return packed(header, rest)


def _tensors(data: bytes, rng: random.Random) -> bytes:
    """Other tensors: another kind, another shape, another name, one more or one less."""
    header, _ = header_of(data)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError):
        return data
    if not tensors:
        return data
    name = rng.choice(sorted(tensors))
    item = tensors.pop(name)
    variant = rng.randrange(7)
    if variant == 0:
        tensors[name] = item.to(rng.choice(DTYPES))
    elif variant == 1:
        tensors[name] = rng.choice(
            (item.flatten(), item[None], item.new_zeros(0), item.new_zeros(()))
        )
    elif variant == 2:
        tensors[rng.choice((ESCAPE, f"{name}x", "", "x" * 10_000))] = item
    elif variant == 3:
        tensors |= {name: item, f"{name}.{ESCAPE}": item.clone()}
    elif variant == 4:
        tensors[name] = torch.full_like(item, rng.choice((0, 1, 127)))
    elif variant == 5:
        tensors |= {f"extra{n}": torch.zeros(1) for n in range(200)} | {name: item}
    return save(tensors, header["__metadata__"])


def _dtype(data: bytes, rng: random.Random) -> bytes:
    """Another name for a tensor's kind, or another shape, of the same bytes."""
    header, rest = header_of(data)
    name = rng.choice([key for key in sorted(header) if key != "__metadata__"] or ["none"])
    if name in header:
        if rng.random() < 0.5:
            header[name]["dtype"] = rng.choice(DTYPE_NAMES)
        else:
            header[name]["shape"] = rng.choice(([2**62, 4], [0, 2**63], [-1], [1] * 200, [], None))
    return packed(header, rest)


_VARIANTS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_plans,) * 8, *(_tensors,) * 3, _shared, _deep, _metadata, _dtype,
)  # fmt: skip


def _changed(value: Any, rng: random.Random) -> Any:
    """The same with one thing in it replaced, removed, repeated or renamed."""
    places = list(_places(value)) if isinstance(value, dict | list) else []
    if not places:
        return rng.choice([*NUMBERS, {ESCAPE: ESCAPE}])
    holder, key = _chosen(places, rng)
    item, variant = holder[key], rng.random()
    if isinstance(item, list) and variant < 0.6:
        holder[key] = _other_list(item, rng)
    elif isinstance(item, dict) and variant < 0.5:
        holder[key] = _other_object(item, rng)
    elif variant < 0.75:
        holder[key] = rng.choice(NUMBERS if isinstance(item, int | float) else TEXTS)
    elif variant < 0.9 and isinstance(item, int):
        holder[key] = item + rng.choice((-1, 1))
    elif variant < 0.95:
        del holder[key]
    else:
        holder[key] = rng.choice([*NUMBERS, *TEXTS, [], {}, [[]], {"": {}}])
    return value


def _chosen(places: list[tuple[Any, Any]], rng: random.Random) -> tuple[Any, Any]:
    """One place; names and sizes of parts more often than single positions."""
    named = [place for place in places if isinstance(place[1], str)]
    return rng.choice(named if named and rng.random() < 0.8 else places)


def _other_list(item: list[Any], rng: random.Random) -> list[Any]:
    many = [*item] * (5_000 // max(1, len(item)))
    return rng.choice(
        ([], item * 2, item[::-1], item[:1], item[1:], many, [*item, item], list(range(9)))
    )


def _other_object(item: dict[str, Any], rng: random.Random) -> Any:
    if not item:
        return {"a": 1}
    key = rng.choice(sorted(item))
    renamed = {(rng.choice((ESCAPE, f"{k}x")) if k == key else k): v for k, v in item.items()}
    return rng.choice((renamed, {}, [item], {**item, "fpgm": item}))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inside in items:
        yield value, key
        if isinstance(inside, dict | list):
            yield from _places(inside)
