"""The inputs recovery looks at, read once from any iterable.

They are needed again for every layer. A few stay in memory; what is more goes to a temporary file,
so that memory does not grow with their number.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fpgm.errors import RequestError
from fpgm.examples import Example, beside, tensors_in

IN_MEMORY = 512 * 2**20
"""Bytes of inputs kept at hand."""


class Inputs:
    """Batches of inputs as calls of the model, and how many inputs they hold together."""

    def __init__(self) -> None:
        self.count = 0
        self._kept: list[Example | _Filed] = []
        self._labels: list[Tensor | None] = []
        self._bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

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
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="fpgm-")
        self._kept.append(_Filed(example, Path(self._folder.name) / f"{len(self)}.safetensors"))

    def close(self) -> None:
        """Remove the file, if there is one."""
        self._kept.clear()
        if self._folder is not None:
            self._folder.cleanup()


class _Filed:
    """A batch whose tensors lie in a file."""

    def __init__(self, example: Example, file: Path) -> None:
        leaves, tree = tree_flatten((example.args, dict(example.kwargs)))
        self._file, self._tree = file, tree
        tensors = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self._devices = {name: tensor.device for name, tensor in tensors.items()}
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)

    def read(self) -> Example:
        leaves = list(self._leaves)
        for name, tensor in load_file(self._file).items():
            leaves[int(name)] = tensor.to(self._devices[name])
        args, kwargs = tree_unflatten(leaves, self._tree)
        return Example(args, kwargs)


def read_inputs(loader: Iterable[Any], images: int) -> Inputs:
    """The first batches of a loader, until they hold so many inputs."""
    found = _read(loader, images)
    if not len(found):
        raise RequestError("The loader gives nothing: recovery needs some batches of inputs.")
    return found


def read_unseen(model: nn.Module, loader: Iterable[Any], seen: int, images: int) -> Inputs:
    """Batches that come after so many, until they hold so many inputs; there may be none.

    Only a loader that can be read again has any, and where its order is another each time, some
    of them may have been seen.
    """
    again = () if iter(loader) is loader else loader
    return _read((beside(model, batch) for batch in islice(again, seen, None)), images)


def _read(loader: Iterable[Any], images: int) -> Inputs:
    found = Inputs()
    try:
        for batch in loader:
            example = as_call(batch)
            first = next(iter(tensors_in((example.args, dict(example.kwargs)))), None)
            if first is None or not first.ndim:
                raise RequestError(
                    f"The loader gives {type(batch).__name__} without a tensor of inputs: give "
                    "batches of inputs, or pairs of inputs and labels."
                )
            found.add(example, first.shape[0], _classes(batch, first.shape[0]))
            if found.count >= images:
                break
    except BaseException:
        found.close()
        raise
    return found


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
    return Example((batch[0] if isinstance(batch, Sequence) else batch,), {})
