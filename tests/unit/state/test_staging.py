"""Staging memory: pages of its own, reused, brought in beforehand, refused instead of failing later."""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

import pytest

from onward.state import staging
from onward.state.copying import HostCopier
from onward.state.staging import PAGE, Arena, page_aligned

MIB = 1024 * 1024


class Pins(HostCopier):
    """Notes what is pinned and unpinned, and whether the memory was still mapped."""

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.unpinned: list[int] = []

    def pin(self, memory: mmap.mmap) -> None:
        self.pinned.append(id(memory))

    def unpin(self, memory: mmap.mmap) -> None:
        assert not memory.closed, "memory must be unpinned while it is still mapped"
        self.unpinned.append(id(memory))


def in_memory(arena: Arena) -> int:
    """Bytes of the memory file that have pages."""
    return os.fstat(arena.fd).st_blocks * 512


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("size", "pages"), [(0, 0), (1, 1), (PAGE - 1, 1), (PAGE, 1), (PAGE + 1, 2), (10 * PAGE, 10)])
def test_sizes_are_rounded_up_to_whole_pages(size: int, pages: int) -> None:
    assert page_aligned(size) == pages * PAGE


def test_the_buffer_begins_on_a_page_and_is_an_anonymous_memory_file() -> None:
    """Not a file of ``/dev/shm``, whose 64 MB in a container end in SIGBUS."""
    import ctypes

    arena = Arena()
    view = arena.view(3 * PAGE + 5)
    assert len(view) == 3 * PAGE + 5 and arena.capacity == 4 * PAGE
    assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE == 0
    assert os.readlink(f"/proc/self/fd/{arena.fd}").startswith("/memfd:onward-staging")
    del view
    arena.close()


def test_memory_is_reused_until_the_state_grows() -> None:
    arena = Arena()
    arena.view(8 * PAGE)[:3] = b"old"
    first, fd = arena.generation, arena.fd
    assert bytes(arena.view(8 * PAGE)[:3]) == b"old"
    assert bytes(arena.view(PAGE)[:3]) == b"old"
    assert (arena.generation, arena.fd) == (first, fd)
    grown = arena.view(8 * PAGE + 1)
    assert arena.generation == first + 1 and arena.capacity == 9 * PAGE and len(grown) == 8 * PAGE + 1
    del grown
    arena.close()


def test_another_mapping_of_the_memory_file_sees_the_same_bytes() -> None:
    """What the writer process does with the descriptor that it is given."""
    arena = Arena()
    view = arena.view(2 * PAGE)
    other = mmap.mmap(os.dup(arena.fd), arena.capacity)
    view[PAGE : PAGE + 5] = b"hello"
    assert other[PAGE : PAGE + 5] == b"hello"
    arena.close()
    assert other[PAGE : PAGE + 5] == b"hello", "the writer's mapping must outlive the trainer's"


def test_growing_many_times_keeps_no_descriptor_and_balances_every_pin() -> None:
    before = open_files()
    pins = Pins()
    arena = Arena(pins)
    held = set()
    for pages in range(1, 40):
        arena.view(pages * PAGE)
        held.add(open_files() - before)
    assert len(held) == 1, held
    arena.close()
    arena.close()
    assert open_files() == before
    assert len(pins.pinned) == 39 and pins.pinned == pins.unpinned


def test_a_view_that_is_still_held_stays_readable_after_close() -> None:
    arena = Arena()
    view = arena.view(PAGE)
    view[:4] = b"kept"
    arena.close()
    assert bytes(view[:4]) == b"kept" and arena.capacity == 0 and arena.fd == -1
    assert bytes(arena.view(PAGE)[:4]) == bytes(4), "memory taken anew is another one"
    arena.close()


def test_prefault_brings_every_page_in_before_the_first_copy() -> None:
    size = 40 * MIB + 17
    arena = Arena()
    arena.view(size)
    assert in_memory(arena) == 0
    arena.prefault(size)
    arena.wait_prefault()
    assert in_memory(arena) >= page_aligned(size)
    assert not any(arena.view(size)[::PAGE])
    arena.close()


def test_prefault_works_without_the_kernels_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels before 5.14 refuse the advice; the pages are touched one by one then."""

    class Old:
        def madvise(self, *_: Any) -> int:
            return -1

    monkeypatch.setattr(staging, "_libc", Old())
    arena = Arena()
    arena.prefault(3 * MIB)
    arena.wait_prefault()
    assert in_memory(arena) >= 3 * MIB
    arena.close()


def test_prefault_leaves_what_a_copy_has_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """``view`` waits for it: a late touch must not wipe out captured bytes."""
    import threading
    import time

    held = threading.Event()
    touch = staging._touch

    def late(view: memoryview) -> None:
        held.wait(10)
        touch(view)

    monkeypatch.setattr(staging, "_touch", late)
    arena = Arena()
    arena.prefault(4 * PAGE)
    threading.Timer(0.2, held.set).start()
    started = time.monotonic()
    view = arena.view(4 * PAGE)
    assert time.monotonic() - started > 0.1
    view[:] = b"x" * len(view)
    arena.prefault(4 * PAGE)
    assert bytes(arena.view(4 * PAGE)) == b"x" * 4 * PAGE
    del view
    arena.close()


def test_prefault_of_nothing_is_nothing() -> None:
    arena = Arena()
    arena.prefault(0)
    arena.wait_prefault()
    arena.close()


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EFBIG, errno.EMFILE])
@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_memory_that_is_not_given_is_said_and_nothing_is_left_open(
    monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    arena = Arena(pins := Pins())
    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(MemoryError, match="8192 bytes of staging memory"):
            arena.view(8192)
    assert open_files() == before and arena.capacity == 0
    assert len(arena.view(8192)) == 8192, "the next try works again"
    arena.close()
    assert pins.pinned == pins.unpinned


def test_a_system_without_memory_files_has_staging_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    arena = Arena()
    assert arena.fd == -1
    arena.view(PAGE)[:2] = b"ok"
    assert bytes(arena.view(PAGE)[:2]) == b"ok" and arena.fd == -1
    arena.close()
