"""The inputs recovery looks at, read once from any iterable.

They are needed again for every layer. A few stay in memory; what is more goes to a temporary file,
so that memory does not grow with their number. It has no name, so it ends with the process, however
that ends.
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
from fpgm.utils.example_inputs import Example, beside, described, taken, tensors_in
from fpgm.utils.text import reason

IN_MEMORY = 512 * 2**20
"""Bytes of inputs kept at hand."""
_END = object()
"""Comes after the last batch."""


class Inputs:
    """Batches of inputs as calls of the model, and how many inputs they hold together."""

    def __init__(self) -> None:
        self.count = 0
        self._kept: list[Example | _Filed] = []
        self._labels: list[Tensor | None] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, number: int) -> Example:
        kept = self._kept[number]
        return kept if isinstance(kept, Example) else kept.read()

    @property
    def labelled(self) -> bool:
        """Whether some batch has labels."""
        return any(labels is not None for labels in self._labels)

    def labels(self, number: int) -> Tensor | None:
        """A batch's classes, if it came with some."""
        return self._labels[number]

    def digest(self) -> str:
        """By which the same inputs and labels are known again."""
        found = hashlib.sha256()
        for number in range(len(self)):
            example = self[number]
            call = (example.args, dict(example.kwargs), self._labels[number])
            leaves, tree = tree_flatten(call)
            others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
            found.update(repr((tree, others)).encode())
            for tensor in tensors_in(call):
                found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                found.update(flat.view(torch.uint8).numpy().data)
        return found.hexdigest()[:16]

    def add(self, example: Example, inputs: int, labels: Tensor | None = None) -> None:
        """Keep a batch, at hand or in a file."""
        self.count += inputs
        self._labels.append(labels)
        size = sum(t.nbytes for t in tensors_in((example.args, dict(example.kwargs))))
        if self._bytes + size <= IN_MEMORY or not self._kept:
            self._bytes += size
            self._kept.append(example)
            return
        try:
            if self._file is None:
                # Unbuffered: what finds no room is told when it is written, not when it is closed.
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (see close)
            self._kept.append(_Filed(example, self._file))
        except OSError as error:
            raise FileError(
                f"Inputs cannot be kept in {tempfile.gettempdir()}: {reason(error)}. Look at "
                "fewer, or let TMPDIR name a folder with more room."
            ) from error

    def close(self) -> None:
        """Forget the batches, and the file of some, if there is one."""
        self._kept.clear()
        if self._file is not None:
            self._file.close()


class _Filed:
    """A batch whose tensors lie in a file, behind those of others."""

    def __init__(self, example: Example, file: IO[bytes]) -> None:
        leaves, tree = tree_flatten((example.args, dict(example.kwargs)))
        self._tree, self._file = tree, file
        tensors = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self._devices = {name: tensor.device for name, tensor in tensors.items()}
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # Copies: this format holds no two tensors that share their memory.
        whole = torch.contiguous_format
        content = safetensors.save({k: t.clone(memory_format=whole) for k, t in tensors.items()})
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


def moved(model: nn.Module, loader: Any) -> Iterator[Any]:
    """A loader's batches, on the device the model is on."""
    if isinstance(loader, Tensor):  # going through it gives single inputs, which are no batches
        raise RequestError("The loader is a tensor: give batches of inputs, such as x.split(100).")
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise RequestError(
            f"The loader is a {type(loader).__name__}: give batches of inputs, as a list or a "
            "DataLoader."
        )
    return (beside(model, batch) for batch in loader)


def answer(model: nn.Module, example: Example) -> Any:
    """What the model says to a batch of a loader."""
    try:
        return example.call(model)
    except Exception as error:
        raise ForwardError(
            f"The model's own forward fails on a batch of the loader ({described(example)}): "
            f"{reason(error)}."
        ) from error


@contextmanager
def explained(model: nn.Module, *read: Inputs) -> Iterator[None]:
    """If what is done with inputs fails because the model cannot take them, say so."""
    try:
        yield
    except Exception as error:
        if isinstance(error, FpgmError) and not isinstance(error, ForwardError):
            raise
        for inputs in read:
            for number in range(len(inputs)):
                answer(model, inputs[number])
        raise


def read_inputs(loader: Iterable[Any], images: int) -> Inputs:
    """The first batches of a loader, until they hold so many inputs."""
    found, _ = read_apart(loader, images, 0)
    return found


def read_apart(loader: Iterable[Any], images: int, others: int) -> tuple[Inputs, Inputs]:
    """The first batches, until they hold so many inputs, and so many others, if there are any.

    Of what follows every second batch is one of the others: a short loader keeps some it was not
    read for.
    """
    inputs, apart = Inputs(), Inputs()
    rest = iter(loader)
    try:
        for found, wanted in ((inputs, images), (apart, others)):
            while found.count < wanted and (batch := next(rest, _END)) is not _END:
                count = inputs_in(batch)
                found.add(as_call(batch), count, _classes(batch, count))
                if found is apart:
                    next(rest, None)
        if not len(inputs):
            raise RequestError("The loader gives nothing: recovery needs some batches of inputs.")
    except BaseException:
        inputs.close()
        apart.close()
        raise
    return inputs, apart


def inputs_in(batch: Any) -> int:
    """How many inputs a batch holds: the first size of its first tensor."""
    example = as_call(batch)
    first = next(iter(tensors_in((example.args, dict(example.kwargs)))), None)
    if first is None or not first.ndim:
        raise RequestError(
            f"The loader gives {type(batch).__name__} without a tensor of inputs: give batches of "
            "inputs, or pairs of inputs and labels."
        )
    return int(first.shape[0])


class Known:
    """Inputs that are known again by their values, in whatever order they come."""

    def __init__(self, inputs: Inputs) -> None:
        self._marks = {mark for n in range(len(inputs)) for mark in _marks(inputs[n])}

    def without(self, example: Example) -> Example | None:
        """A batch less the inputs that are known; None if nothing is left."""
        marks = _marks(example) if self._marks else []
        new = [place for place, mark in enumerate(marks) if mark not in self._marks]
        if len(new) == len(marks):
            return example
        return taken(example, new) if new else None


def _marks(example: Example) -> list[bytes]:
    """One for every input of a batch, made of the first tensor's values."""
    first = tensors_in((example.args, dict(example.kwargs)))[0].detach().cpu()
    rows = first.reshape(first.shape[0], -1).contiguous().view(torch.uint8).numpy()
    return [hashlib.blake2b(row.data, digest_size=16).digest() for row in rows]


def _classes(batch: Any, inputs: int) -> Tensor | None:
    """What stands behind a batch's inputs, if that is a class for each."""
    found = batch[1] if isinstance(batch, Sequence) and len(batch) > 1 else None
    if not isinstance(found, Tensor) or found.shape != (inputs,):
        return None
    return None if found.is_floating_point() or found.is_complex() else found


def as_call(batch: Any) -> Example:
    """A batch as the model takes it: what stands behind the first of several is not looked at."""
    if isinstance(batch, Mapping):
        return Example((), dict(batch))
    if isinstance(batch, Sequence) and not batch:
        return Example((), {})
    return Example((batch[0] if isinstance(batch, Sequence) else batch,), {})
