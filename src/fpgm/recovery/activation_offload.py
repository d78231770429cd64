"""Offload activations of paused passes: half precision in memory, and a file where that is short.

A pass that waits for a layer to be solved holds a few activations, most of which it needs much
later. `ActivationOffload` frees their memory and keeps their values in half precision, scaled so
that none overflows. The pass restores a tensor before an operator uses it, so the model's code
notices nothing.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fpgm.errors import FileError
from fpgm.utils.text import reason

MIN_BYTES = 2**16
"""Smaller tensors stay where they are."""
_LARGEST = 2.0**15
"""Values are scaled to at most this, below the largest half-precision number."""
_HALF = {torch.float32: torch.float16, torch.float64: torch.float16}
_KEPT = (torch.float16, torch.bfloat16)
"""These have half precision already."""


class _Saved:
    """The values of a storage whose memory was freed."""

    def __init__(self, values: Tensor | None, place: int, scale: float, flat: Tensor) -> None:
        self.values = values
        """None if they are in the file."""
        self.place, self.scale = place, scale
        self.dtype, self.count = flat.dtype, len(flat)
        self.saved_dtype = _HALF.get(flat.dtype, flat.dtype)
        self.storage = flat.untyped_storage()
        self.bytes = self.storage.nbytes()

    @property
    def saved_bytes(self) -> int:
        return self.count * self.saved_dtype.itemsize


class ActivationOffload:
    """Keeps the values of activations whose memory it freed."""

    def __init__(self, max_bytes: int) -> None:
        """Keep up to `max_bytes` in memory, and the rest in a temporary file."""
        self.max_bytes = max_bytes
        self.bytes = 0
        """Bytes kept in memory."""
        self._saved: dict[int, _Saved] = {}
        self._file: IO[bytes] | None = None
        self.file_bytes = 0
        """Size of the file."""
        self._free: dict[int, list[int]] = {}
        """Places in the file that are free again, by their size."""

    def offload(self, activations: Iterable[Tensor]) -> None:
        """Free the memory of tensors; those that are too small or of other types keep it."""
        self._release_unused()
        for tensor in activations:
            storage = storage_of(tensor)
            if storage is None or storage.nbytes() < MIN_BYTES:
                continue
            key = storage._cdata
            if key in self._saved or tensor.dtype not in (*_HALF, *_KEPT):
                continue
            flat = torch.empty(0, dtype=tensor.dtype, device=storage.device).set_(storage)
            size = float(flat.abs().max()) if tensor.dtype in _HALF else 0.0
            if not size < float("inf"):  # infinite, or NaN
                continue
            self._saved[key] = self._save(flat, max(size, 1e-30) / _LARGEST)
            storage.resize_(0)

    def restore(self, tensor: Tensor) -> None:
        """Give a tensor its memory and values back, if they were offloaded."""
        storage = storage_of(tensor) if self._saved else None
        saved = None if storage is None else self._saved.pop(storage._cdata, None)
        if saved is None:
            return
        self._fill(saved)

    def _fill(self, saved: _Saved) -> None:
        """Give a storage its memory and values back."""
        values = self._take(saved)
        saved.storage.resize_(saved.bytes)
        flat = torch.empty(0, dtype=saved.dtype, device=saved.storage.device)
        flat.set_(saved.storage)
        flat[: saved.count].copy_(values)
        if saved.dtype in _HALF:
            flat.mul_(saved.scale)

    def close(self) -> None:
        """Drop everything, but restore what a model has left elsewhere, as a list of features."""
        self._release_unused()
        for key in list(self._saved):
            self._fill(self._saved.pop(key))
        self.bytes = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _release_unused(self) -> None:
        """Drop the values of storages that nothing but this object refers to."""
        for key in list(self._saved):
            if torch._C._storage_Use_Count(key) == 1:
                self._release(self._saved.pop(key))

    def _save(self, flat: Tensor, scale: float) -> _Saved:
        dtype = _HALF.get(flat.dtype)
        values = flat.clone() if dtype is None else (flat / scale).to(dtype)
        values = values.cpu()
        saved = _Saved(values, -1, scale, flat)
        if self.bytes + values.nbytes <= self.max_bytes:
            self.bytes += values.nbytes
        else:
            saved.place = self._write(values)
            saved.values = None
        return saved

    def _take(self, saved: _Saved) -> Tensor:
        """Return the values, which are not kept from then on."""
        values = saved.values
        if values is None:
            assert self._file is not None
            self._file.seek(saved.place)
            content = bytearray()
            while len(content) < saved.saved_bytes:  # the largest come in several blocks
                content += self._file.read(saved.saved_bytes - len(content))
            values = torch.frombuffer(content, dtype=saved.saved_dtype)
        self._release(saved)
        return values

    def _release(self, saved: _Saved) -> None:
        if saved.values is not None:
            self.bytes -= saved.values.nbytes
            saved.values = None
        else:
            self._free.setdefault(saved.saved_bytes, []).append(saved.place)

    def _write(self, values: Tensor) -> int:
        """Write values to the file, and return where they begin."""
        free = self._free.get(values.nbytes)
        place = free.pop() if free else self.file_bytes
        try:
            if self._file is None:
                # Unbuffered: a full disk raises an error on write, not on close.
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (see close)
            self._file.seek(place)
            rest = memoryview(values.view(torch.uint8).numpy().data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise FileError(
                f"Activations cannot be kept in {tempfile.gettempdir()}: {reason(error)}. Use "
                "fewer images, or set TMPDIR to a folder with more space."
            ) from error
        self.file_bytes = max(self.file_bytes, place + values.nbytes)
        return place


class LiveActivations:
    """The tensors that one pass computed and still holds."""

    def __init__(self, store: ActivationOffload) -> None:
        """Follow a pass, whose activations are offloaded to `store`."""
        self.store = store
        self._references: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """Tensors by id, each with the key of its storage."""
        self._memory: dict[int, _Memory] = {}
        """Storages that the pass allocated, by key."""

    def add(self, results: Iterable[Tensor], used: Iterable[Tensor]) -> None:
        """Follow an operator's results until nothing refers to them.

        What shares memory with one of its operands is followed only if this operand is: weights,
        inputs and constants belong to others.
        """
        with torch._C.DisableTorchFunction():
            operands = [storage._cdata for t in used if (storage := storage_of(t)) is not None]
            for result in results:
                storage = storage_of(result)
                if storage is None:  # it may have the operands inside, as a sparse tensor does
                    self._keep(operands)
                elif storage.nbytes() >= MIN_BYTES:
                    key = storage._cdata
                    if key in self._memory or (key not in operands and storage.resizable()):
                        self._follow(result, key)

    def _follow(self, tensor: Tensor, key: int) -> None:
        number = id(tensor)
        if number in self._references:
            return
        memory = self._memory.setdefault(key, _Memory(tensor.dtype))
        memory.aliases.add(number)
        memory.kept = memory.kept or tensor.dtype != memory.dtype  # its bits have another meaning

        def forget(_: object) -> None:
            self._references.pop(number, None)
            memory.aliases.discard(number)
            if not memory.aliases and self._memory.get(key) is memory:
                del self._memory[key]

        self._references[number] = weakref.ref(tensor, forget), key

    def keep(self, tensor: Tensor) -> None:
        """Restore a tensor and never offload it again: other code may hold its memory."""
        with torch._C.DisableTorchFunction():
            self.restore(tensor)
            storage = storage_of(tensor)
            self._keep([] if storage is None else [storage._cdata])

    def _keep(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self._memory:
                self._memory[key].kept = True

    def restore(self, *tensors_or_none: Tensor | None) -> None:
        """Give tensors their values back, and those inside of tensor subclasses."""
        with torch._C.DisableTorchFunction():
            pending = [tensor for tensor in tensors_or_none if tensor is not None]
            seen: set[int] = set()
            while pending:
                tensor = pending.pop()
                self.store.restore(tensor)
                if type(tensor) not in (Tensor, torch.nn.Parameter) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    pending += [v for v in vars(tensor).values() if isinstance(v, Tensor)]

    def offload(self) -> None:
        """Free the memory of all tensors that are alive."""
        alive = [(reference(), key) for reference, key in list(self._references.values())]
        self.store.offload(t for t, key in alive if t is not None and self._may_offload(t, key))

    def _may_offload(self, tensor: Tensor, key: int) -> bool:
        """Tell whether a tensor still has its own memory, which no other tensor shares."""
        storage, memory = storage_of(tensor), self._memory.get(key)
        if storage is None or memory is None or storage._cdata != key:
            return False
        return not memory.kept and tensor.dtype == memory.dtype


@dataclass
class _Memory:
    """A storage that a pass allocated."""

    dtype: torch.dtype
    aliases: set[int] = field(default_factory=set)
    """Ids of the tensors in it."""
    kept: bool = False
    """Whether it is never offloaded."""


class RestoreOnAccess(TorchFunctionMode):
    """Restores tensors before code reads them without an operator, as `numpy` does."""

    def __init__(self, live: LiveActivations) -> None:
        super().__init__()
        self._live = live

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if args and isinstance(args[0], Tensor):
            name = getattr(func, "__name__", "")
            if name in _SHARES:
                self._live.keep(args[0])
            elif name in _READS:
                self._live.restore(args[0])
        return func(*args, **(kwargs or {}))


_SHARES = {
    "numpy",
    "__array__",
    "data_ptr",
    "untyped_storage",
    "_typed_storage",
    "storage",
    "share_memory_",
    "__dlpack__",
}
"""What gives other code the memory itself."""
_READS = {"tolist", "__deepcopy__", "__reduce_ex__"}


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return where a tensor's values are; None if it has no memory of its own."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # a subclass that wraps others
        return None
