"""Processes that share work: who they are, and how they exchange tensors, values and errors.

A computation that can be shared calls `current_ranks` once and uses its methods, which in one
process return what they are given. Every rank calls them in the same order. Each exchange begins
with a vote: a rank that has failed votes so instead, and all others raise a `RankError` instead of
waiting for it.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fpgm.errors import RankError, RequestError
from fpgm.utils.text import reason

P = ParamSpec("P")
T = TypeVar("T")

WAIT_TIMEOUT = timedelta(days=1)
"""How long a rank waits for others: rank 0 may measure times for hours."""

WARN_SECONDS = 60.0
"""After so long, a rank that begins shared work warns that it still waits for the others."""
_WAITS = (
    "Waiting for the other ranks, which must call the same function. To run it on one rank only, "
    "call it in fpgm.utils.distributed.work_alone()."
)
_initialized = False
_alone: ContextVar[bool] = ContextVar("_alone", default=False)
_failing_together: ContextVar[bool] = ContextVar("_failing_together", default=False)


def is_main_process() -> bool:
    """Return whether this process has rank 0."""
    return os.environ.get("RANK", "0") == "0"


def world_size() -> int:
    """Return the number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def mark_initialized() -> None:
    """Record that this process has initialized a process group."""
    global _initialized
    _initialized = True


def was_initialized() -> bool:
    """Return whether it ever did, even if the group is destroyed by now."""
    return _initialized


@dataclass(frozen=True)
class Ranks:
    """The processes that a computation is divided among; by default only this one."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints and writes files."""
        return self.rank == 0

    @property
    def local_size(self) -> int:
        """How many of them share this machine's memory; all, if the launcher does not say."""
        return min(self.size, int(os.environ.get("LOCAL_WORLD_SIZE", self.size)))

    def owns(self, number: int) -> bool:
        """Return whether item `number` of what is divided is this rank's."""
        return number % self.size == self.rank

    def sum_(self, *tensors: Tensor) -> None:
        """Replace every tensor by its sum over all ranks, with one all-reduce."""
        if self.size == 1 or not tensors:
            return
        dtype = reduce(torch.promote_types, [t.dtype for t in tensors])
        flat = torch.cat([t.detach().reshape(-1).to(_device(), dtype) for t in tensors])
        self._vote()
        with _explain_lost_connection():
            dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    def copy_from_first_(self, tensors: Iterable[Tensor]) -> None:
        """Replace every tensor by that of rank 0, bit by bit."""
        if self.size == 1:
            return
        all_tensors = [t.detach() for t in tensors]
        if not all_tensors:
            return
        parts = [t.cpu().reshape(-1).view(torch.uint8) for t in all_tensors]
        flat = torch.cat(parts).to(_device())
        self._vote()
        with _explain_lost_connection():
            dist.broadcast(flat, 0)
        if not self.is_first:
            for tensor, part in zip(all_tensors, flat.split([len(p) for p in parts]), strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        self._vote()
        values: list[Any] = [None] * self.size
        with _explain_lost_connection():
            dist.all_gather_object(values, value)
        return values

    def on_first(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 only, and return its result on every rank."""
        if self.size == 1:
            return function()
        with self.fail_together():
            sent: list[Any] = [None]
            if self.is_first:
                with work_alone():
                    sent = [function()]
            self._vote()
            with _explain_lost_connection():
                dist.broadcast_object_list(sent, 0)
        result: T = sent[0]
        return result

    def check_same(self, values: Mapping[str, str]) -> None:
        """Refuse to go on if a value that all ranks must have in common differs.

        This is the first exchange of shared work, where a rank could wait in vain for others that
        do not take part. So it warns after a while.
        """
        warning = threading.Timer(WARN_SECONDS, warnings.warn, (_WAITS,))
        warning.daemon = True
        warning.start()
        try:
            everyone = self.gather(dict(values))
        finally:
            warning.cancel()
        for name in values:
            for rank, other in enumerate(everyone):
                if other[name] != everyone[0][name]:
                    raise RequestError(
                        f"The {name} of rank {rank} differ from those of rank 0: ranks that share "
                        "work need the same model and options, and the same batches in the same "
                        "order."
                    )

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """End the block on all ranks if it fails on one: the others raise a `RankError`.

        Of nested blocks only the outermost one does so.
        """
        if self.size == 1 or _failing_together.get():
            yield
            return
        token = _failing_together.set(True)
        try:
            yield
            self._vote()
        except (RankError, GeneratorExit):
            raise
        except BaseException as error:
            with suppress(RankError):
                self._vote(error)
            raise
        finally:
            _failing_together.reset(token)

    def _vote(self, error: BaseException | None = None) -> None:
        """Tell the other ranks whether this one has failed; raise if another one has."""
        with _explain_lost_connection():
            failed = torch.tensor([float(error is not None)], device=_device())
            dist.all_reduce(failed)
            if not failed.item():
                return
            own = None if error is None else (type(error).__name__, reason(error))
            errors: list[Any] = [None] * self.size
            dist.all_gather_object(errors, own)
        if error is not None:
            return
        rank = next(rank for rank, other in enumerate(errors) if other is not None)
        kind, message = errors[rank]
        raise RankError(f"Rank {rank} failed: {message}.", kind)


ALONE = Ranks()
"""Only this process."""


def current_ranks() -> Ranks:
    """Return the ranks of the default process group; only this process if there is none."""
    if _alone.get() or not dist.is_available() or not dist.is_initialized():
        return ALONE
    return Ranks(dist.get_rank(), dist.get_world_size())


@contextmanager
def work_alone() -> Iterator[None]:
    """Share nothing in the block: for code that runs on one rank only."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def fails_together(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that all ranks call: if it fails on one, it fails on all."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with current_ranks().fail_together():
            return function(*args, **kwargs)

    return run


def init_process_group() -> Ranks:
    """Connect the processes that a launcher such as torchrun started, if it started several."""
    if world_size() > 1 and not dist.is_initialized():
        try:
            store = store_after_restart()
            where: dict[str, Any] = {} if store is None else {
                "store": store, "rank": int(os.environ["RANK"]), "world_size": world_size()
            }  # fmt: skip
            dist.init_process_group("gloo", timeout=WAIT_TIMEOUT, **where)
        except (KeyError, ValueError, RuntimeError) as error:
            raise RequestError(
                f"WORLD_SIZE is {world_size()}, but the processes cannot be connected: "
                f"{reason(error)}. Start them with torchrun, or unset WORLD_SIZE."
            ) from error
        mark_initialized()
    return current_ranks()


def store_after_restart() -> Store | None:
    """Return a store of this attempt if torchrun has restarted the processes.

    torchrun's store still has the addresses of the failed attempt, and gloo would try to connect to
    those. A separate prefix for each attempt avoids that.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not attempt:
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, world_size(), is_master=False)
    return PrefixStore(f"attempt {attempt}", store)


@contextmanager
def _explain_lost_connection() -> Iterator[None]:
    """Raise a `RankError` if another process does not respond."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"Another rank has ended or cannot be reached: {reason(error)}.") from error


def _device() -> torch.device:
    """Return where the default group exchanges tensors."""
    nccl = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
