"""Freed memory is used again inside the block, and returned after it."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fpgm.utils import allocator
from fpgm.utils.allocator import reuse_freed_memory

PROGRAM = """
import ctypes, resource, runpy, sys

functions = runpy.run_path(sys.argv[1])
library, size = ctypes.CDLL(None), 96 * 2**20
library.malloc.restype = ctypes.c_void_p


def allocate_often():
    for _ in range(4):
        block = ctypes.c_void_p(library.malloc(ctypes.c_size_t(size)))
        ctypes.memset(block, 1, size)
        library.free(block)


def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    allocate_often()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


outside = new_pages()
with functions["reuse_freed_memory"]():
    allocate_often()
    inside, resident = new_pages(), resident_bytes()
assert inside < outside / 10, (inside, outside)
assert resident_bytes() < resident - size / 2, (resident_bytes(), resident)
"""


@pytest.mark.skipif(allocator._glibc() is None, reason="needs glibc, on linux")
def test_memory_is_reused_inside_the_block_and_returned_after_it() -> None:
    """In a process of its own: its heap has no holes, and its only thread uses the main one."""
    file = Path(allocator.__file__)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


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
            pass
        allocator.share_memory_among_threads()
        assert allocator._glibc() is None
    finally:
        allocator._glibc.cache_clear()
