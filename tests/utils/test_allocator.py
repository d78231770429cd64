"""Freed memory is used again inside the block, and returned after it."""

import platform
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fpgm.utils import allocator
from fpgm.utils.allocator import reuse_freed_memory

BYTES = 96 * 2**20
"""Above the size that glibc returns to the system at once."""


def allocate_often() -> None:
    for _ in range(4):
        torch.zeros(BYTES, dtype=torch.uint8).add_(1)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_is_reused_inside_the_block_and_returned_after_it() -> None:
    with reuse_freed_memory():
        allocate_often()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        allocate_often()
        new_pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        resident = resident_bytes()
    assert new_pages < BYTES / resource.getpagesize() / 10
    assert resident_bytes() < resident - BYTES / 2


class TestOptions:
    """Which options are set, and when."""

    @pytest.fixture(autouse=True)
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
        calls: list[dict[int, int]] = []
        monkeypatch.setattr(allocator, "_set_options", calls.append)
        monkeypatch.setattr(allocator, "_return_free_memory", lambda: calls.append({}))
        return calls

    def test_nested_blocks_set_and_reset_once(self, calls: list[dict[int, int]]) -> None:
        with reuse_freed_memory():
            with reuse_freed_memory():
                pass
            assert [call[allocator.MMAP_MAX] for call in calls] == [0]
        assert calls[1][allocator.MMAP_MAX] == allocator.DEFAULT_MMAP_MAX
        assert calls[2:] == [{}]

    def test_the_last_of_two_threads_resets(self, calls: list[dict[int, int]]) -> None:
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with reuse_freed_memory():
                entered.set()
                leave.wait()

        other = threading.Thread(target=hold)
        with reuse_freed_memory():
            other.start()
            entered.wait()
        assert len(calls) == 1
        leave.set()
        other.join()
        assert len(calls) == 3

    def test_an_error_ends_the_block(self, calls: list[dict[int, int]]) -> None:
        with pytest.raises(ValueError, match="user code"), reuse_freed_memory():
            raise ValueError("user code")
        assert len(calls) == 3


@pytest.mark.parametrize("error", [TypeError, OSError, AttributeError])
def test_nothing_happens_without_glibc(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def no_library(_: Any) -> None:
        raise error

    monkeypatch.setattr("ctypes.CDLL", no_library)
    allocator._glibc.cache_clear()
    try:
        with reuse_freed_memory():
            allocate_often()
        allocator.share_memory_among_threads()
        assert allocator._glibc() is None
    finally:
        allocator._glibc.cache_clear()
