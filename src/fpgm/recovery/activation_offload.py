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
            storage = _storage_of(tensor)
            if storage is None or storage.nbytes() < MIN_BYTES:
                continue
            key = storage._cdata
            if key in self._saved or tensor.dtype not in (*_HALF, *_KEPT):
                continue
            flat = tensor.new_empty(0).set_(storage)
            size = float(flat.abs().max()) if tensor.dtype in _HALF else 0.0
            if not size < float("inf"):  # infinite, or NaN
                continue
            self._saved[key] = self._save(flat, max(size, 1e-30) / _LARGEST)
            storage.resize_(0)

    def restore(self, tensor: Tensor) -> None:
        """Give a tensor its memory and values back, if they were offloaded."""
        storage = _storage_of(tensor) if self._saved else None
        saved = None if storage is None else self._saved.pop(storage._cdata, None)
        if saved is None:
            return
        values = self._take(saved)
        saved.storage.resize_(saved.bytes)
        flat = torch.empty(0, dtype=saved.dtype, device=saved.storage.device)
        flat.set_(saved.storage)
        flat[: saved.count].copy_(values)
        if saved.dtype in _HALF:
            flat.mul_(saved.scale)

    def close(self) -> None:
        """Drop everything."""
        self._saved.clear()
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
                # Unbuffered: what finds no room is told when it is written, not when it is closed.
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (see close)
            self._file.seek(place)
            rest = memoryview(values.view(torch.uint8).numpy().data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise FileError(
                f"Activations cannot be kept in {tempfile.gettempdir()}: {reason(error)}. Use "
                "fewer images, or let TMPDIR name a folder with more room."
            ) from error
        self.file_bytes = max(self.file_bytes, place + values.nbytes)
        return place


class LiveActivations:
    """The tensors that one pass computed and still holds."""

    def __init__(self, store: ActivationOffload, others: Iterable[Tensor]) -> None:
        """Follow a pass.

        Args:
            store: where activations are offloaded to.
            others: tensors that belong to others, such as weights and inputs.
        """
        self.store = store
        storages = [_storage_of(tensor) for tensor in others]
        self._others = {storage._cdata for storage in storages if storage is not None}
        self._references: dict[int, weakref.ref[Tensor]] = {}

    def add(self, tensor: Tensor) -> None:
        """Follow a tensor until nothing refers to it."""
        number = id(tensor)
        storage = _storage_of(tensor)
        if number in self._references or storage is None or storage._cdata in self._others:
            return
        if storage.nbytes() >= MIN_BYTES:

            def forget(_: object) -> None:
                self._references.pop(number, None)

            self._references[number] = weakref.ref(tensor, forget)

    def restore(self, *tensors_or_none: Tensor | None) -> None:
        """Give tensors their values back."""
        for tensor in tensors_or_none:
            if tensor is not None:
                self.store.restore(tensor)

    def offload(self) -> None:
        """Free the memory of all tensors that are alive."""
        alive = [reference() for reference in list(self._references.values())]
        self.store.offload(tensor for tensor in alive if tensor is not None)


class RestoreOnAccess(TorchFunctionMode):
    """Restores tensors before code reads them in a way that is no operator, as `numpy` does."""

    def __init__(self, live: LiveActivations) -> None:
        super().__init__()
        self._live = live

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if args and isinstance(args[0], Tensor) and getattr(func, "__name__", "") in _ACCESSES:
            with torch._C.DisableTorchFunction():
                self._live.restore(args[0])
        return func(*args, **(kwargs or {}))


_ACCESSES = {"numpy", "__array__", "data_ptr", "untyped_storage", "__dlpack__", "tolist", "storage"}


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return where a tensor's values are; None if it has no memory of its own."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.untyped_storage()
