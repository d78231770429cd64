"""Calibration inputs, read once from any iterable.

They are needed again for every layer. A few stay in memory; others go to a temporary file, so that
memory does not grow with their number. It is unnamed, so it disappears with the process, however
that ends. If several ranks share the work, each reads all batches and keeps its part: with two
ranks, every second batch.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

import torch
from safetensors import torch as safetensors
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fpgm.errors import FileError, ForwardError, FpgmError, RequestError
from fpgm.utils.default_device import users_default_device
from fpgm.utils.distributed import ALONE, Ranks
from fpgm.utils.example_inputs import (
    Example,
    describe_example,
    take_rows,
    tensors_in,
    to_model_device,
)
from fpgm.utils.text import reason

MAX_BYTES_IN_MEMORY = 512 * 2**20
"""Bytes of inputs kept in memory."""
_END = object()
"""Comes after the last batch."""


class Inputs:
    """Batches of inputs as calls of the model: this rank's, and facts about those of all ranks."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        """The ranks that the batches are divided among."""
        self.count = self.batches = 0
        """Inputs and batches of all ranks."""
        self.has_labels = False
        """Whether some batch of some rank has labels."""
        self._kept: list[Example | _StoredBatch] = []
        self._first: Example | None = None
        self._places: list[tuple[int, int]] = []
        """For each batch of this rank, how many batches and inputs of all ranks precede it."""
        self._sizes: list[int] = []
        self.ends: list[int] = []
        """For each batch of all ranks, how many inputs there are up to its end."""
        self._hash = hashlib.sha256()
        self._labels: list[Tensor | None] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, number: int) -> Example:
        kept = self._kept[number]
        return kept if isinstance(kept, Example) else kept.read()

    @property
    def first(self) -> Example:
        """The first batch, on every rank."""
        assert self._first is not None
        return self._first

    def number_of(self, number: int) -> int:
        """Return the number that a batch of this rank has among those of all ranks."""
        return self._places[number][0]

    def offset_of(self, number: int) -> int:
        """Return how many inputs of all ranks precede a batch of this rank."""
        return self._places[number][1]

    def size_of(self, number: int) -> int:
        """Return how many inputs a batch of this rank has."""
        return self._sizes[number]

    def labels(self, number: int) -> Tensor | None:
        """Return a batch's labels, if it has any."""
        return self._labels[number]

    def digest(self) -> str:
        """Return a digest of the inputs and labels of all ranks."""
        digest = self._hash.copy()
        if self.ranks.size == 1:  # not computed before it is needed
            for number in range(len(self)):
                _add_to_hash(digest, self[number], self._labels[number])
        return digest.hexdigest()[:16]

    def add(self, example: Example, inputs: int, labels: Tensor | None = None) -> None:
        """Keep a batch, in memory or in a file, if it is this rank's."""
        number, offset = self.batches, self.count
        self.batches += 1
        self.count += inputs
        self.ends.append(self.count)
        self.has_labels |= labels is not None
        if self._first is None:
            self._first = example
        if self.ranks.size > 1:
            _add_to_hash(self._hash, example, labels)
        if not self.ranks.owns(number):
            return
        self._places.append((number, offset))
        self._sizes.append(inputs)
        self._labels.append(labels)
        size = sum(t.nbytes for t in tensors_in((example.args, dict(example.kwargs))))
        if self._bytes + size <= MAX_BYTES_IN_MEMORY or not self._kept:
            self._bytes += size
            self._kept.append(example)
            return
        try:
            if self._file is None:
                # Unbuffered: a full disk raises an error on writing, not on closing.
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (see close)
            self._kept.append(_StoredBatch(example, self._file))
        except OSError as error:
            raise FileError(
                f"Inputs cannot be kept in {tempfile.gettempdir()}: {reason(error)}. Use "
                "fewer, or set TMPDIR to a folder with more space."
            ) from error

    def close(self) -> None:
        """Release the batches and the temporary file."""
        self._kept.clear()
        self._first = None
        if self._file is not None:
            self._file.close()


def _add_to_hash(digest: Any, example: Example, labels: Tensor | None) -> None:
    """Add a batch to a hash: its structure, and the values of its tensors."""
    call = (example.args, dict(example.kwargs), labels)
    leaves, tree = tree_flatten(call)
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    digest.update(repr((tree, others)).encode())
    for tensor in tensors_in(call):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)


class _StoredBatch:
    """A batch whose tensors are in a file shared with others."""

    def __init__(self, example: Example, file: IO[bytes]) -> None:
        leaves, tree = tree_flatten((example.args, dict(example.kwargs)))
        self._tree, self._file = tree, file
        tensors = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self._devices = {name: tensor.device for name, tensor in tensors.items()}
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # Copies: this format cannot store tensors that share memory.
        contiguous = torch.contiguous_format
        content = safetensors.save(
            {k: t.clone(memory_format=contiguous) for k, t in tensors.items()}
        )
        self._start, self._size = file.seek(0, os.SEEK_END), len(content)
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]

    def read(self) -> Example:
        leaves = list(self._leaves)
        for name, tensor in safetensors.load(self._content()).items():
            leaves[int(name)] = tensor.to(self._devices[name])
        args, kwargs = tree_unflatten(leaves, self._tree)
        return Example(args, kwargs)

    def _content(self) -> bytes:
        self._file.seek(self._start)
        blocks, left = [], self._size
        while left and (block := self._file.read(left)):  # the largest come in several
            blocks.append(block)
            left -= len(block)
        return b"".join(blocks)


def move_batches(model: nn.Module, loader: Any) -> Iterator[Any]:
    """Yield a loader's batches, on the model's device."""
    if isinstance(loader, Tensor):  # iterating over it gives single inputs, not batches
        raise RequestError("The loader is a tensor: give batches of inputs, such as x.split(100).")
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise RequestError(
            f"The loader is a {type(loader).__name__}: give batches of inputs, as a list or a "
            "DataLoader."
        )
    return (to_model_device(model, batch) for batch in _read_loader(loader))


def _read_loader(loader: Iterable[Any]) -> Iterator[Any]:
    with users_default_device():
        batches = iter(loader)
    while True:
        with users_default_device():
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def run_batch(model: nn.Module, example: Example) -> Any:
    """Run the model on a batch of a loader."""
    try:
        return example.call(model)
    except Exception as error:
        raise ForwardError(
            f"The model's own forward fails on a batch of the loader "
            f"({describe_example(example)}): {reason(error)}."
        ) from error


@contextmanager
def explain_forward_errors(model: nn.Module, *read: Inputs) -> Iterator[None]:
    """Name the batch if the body fails because the model cannot take it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, FpgmError) and not isinstance(error, ForwardError):
            raise
        for inputs in read:
            for number in range(len(inputs)):
                run_batch(model, inputs[number])
        raise


def read_inputs(loader: Iterable[Any], images: int, ranks: Ranks = ALONE) -> Inputs:
    """Read the first batches of a loader, up to about `images` inputs."""
    inputs, _ = read_held_out(loader, images, 0, ranks)
    return inputs


def read_held_out(
    loader: Iterable[Any], images: int, others: int, ranks: Ranks = ALONE
) -> tuple[Inputs, Inputs]:
    """Read the first batches, and held-out inputs from those that follow, if there are any.

    Every second batch after the first ones is held out.

    Args:
        images: inputs to read.
        others: held-out inputs to read.
        ranks: the ranks to divide the batches among; all of them read the same loader.
    """
    inputs, held_out = Inputs(ranks), Inputs(ranks)
    rest = iter(loader)
    try:
        for target, limit in ((inputs, images), (held_out, others)):
            while target.count < limit and (batch := next(rest, _END)) is not _END:
                count = count_inputs(batch)
                target.add(batch_to_example(batch), count, _class_labels(batch, count))
                if target is held_out:
                    next(rest, None)
        if not inputs.batches:
            raise RequestError("The loader is empty: recovery needs some batches of inputs.")
    except BaseException:
        inputs.close()
        held_out.close()
        raise
    return inputs, held_out


def count_inputs(batch: Any) -> int:
    """Count the inputs of a batch: the first size of its first tensor."""
    example = batch_to_example(batch)
    first = next(iter(tensors_in((example.args, dict(example.kwargs)))), None)
    if first is None or not first.ndim:
        raise RequestError(
            f"The loader gives {type(batch).__name__} without a tensor of inputs: give batches of "
            "inputs, or pairs of inputs and labels."
        )
    return int(first.shape[0])


class InputSet:
    """A set of inputs, of all ranks, compared by their values."""

    def __init__(self, inputs: Inputs) -> None:
        marks = {mark for n in range(len(inputs)) for mark in _hash_inputs(inputs[n])}
        self._marks = set().union(*inputs.ranks.gather(marks))

    def remove_from(self, example: Example) -> Example | None:
        """Return a batch without the inputs in this set; None if nothing is left."""
        marks = _hash_inputs(example) if self._marks else []
        new = [place for place, mark in enumerate(marks) if mark not in self._marks]
        if len(new) == len(marks):
            return example
        return take_rows(example, new) if new else None


def _hash_inputs(example: Example) -> list[bytes]:
    """Hash every input of a batch by the values of its first tensor."""
    first = tensors_in((example.args, dict(example.kwargs)))[0].detach().cpu()
    rows = first.reshape(first.shape[0], -1).contiguous().view(torch.uint8).numpy()
    return [hashlib.blake2b(row.data, digest_size=16).digest() for row in rows]


def _class_labels(batch: Any, inputs: int) -> Tensor | None:
    """Return the second item of a batch if it is a class label for each input."""
    labels = batch[1] if isinstance(batch, Sequence) and len(batch) > 1 else None
    if not isinstance(labels, Tensor) or labels.shape != (inputs,):
        return None
    return None if labels.is_floating_point() or labels.is_complex() else labels


def batch_to_example(batch: Any) -> Example:
    """Return a batch as arguments of the model; of a sequence only the first item."""
    if isinstance(batch, Mapping):
        return Example((), dict(batch))
    if isinstance(batch, Sequence) and not batch:
        return Example((), {})
    return Example((batch[0] if isinstance(batch, Sequence) else batch,), {})
