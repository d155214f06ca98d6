"""Writes past the page cache: what the device can take goes straight, the rest through the cache, every byte once."""

from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path
from typing import Any

import pytest

from onward.errors import StorageError
from onward.storage.base import Barrier
from onward.storage.posix import PosixStore
from onward.storage.syscalls import Syscalls

PAGE = 4096


class Watching(Syscalls):
    """Notes which bytes went directly; may cut writes short, or refuse direct ones as some network filesystems do."""

    def __init__(self, *, block: int = 0, refuse: bool = False) -> None:
        self.direct = self.cached = 0
        self.block, self.refuse, self.on = block, refuse, False

    def set_direct(self, fd: int, on: bool) -> bool:
        self.on = super().set_direct(fd, on) and on
        return self.on or not on

    def write(self, fd: int, data: Any, path: str) -> int:
        if self.on and self.refuse:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        count = os.write(fd, data[: self.block] if self.block else data)
        if self.on:
            self.direct += count
        else:
            self.cached += count
        return count


@pytest.fixture
def memory() -> memoryview:
    """Aligned memory, as staging memory is."""
    view = memoryview(mmap.mmap(-1, 64 * PAGE))
    view[:] = random.Random(1).randbytes(len(view))
    return view


@pytest.fixture
def watching(tmp_path: Path) -> Watching:
    fd = os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT)
    works = Syscalls().set_direct(fd, True)
    os.close(fd)
    if not works:
        pytest.skip("the filesystem of the temporary folder has no O_DIRECT")
    return Watching()


def written(root: Path, calls: Syscalls, *parts: Any) -> bytes:
    store = PosixStore(root, direct_io=True, calls=calls)
    sink = store.open_new("file", direct=True)
    for part in parts:
        sink.write(part)
    size = sink.finish(Barrier.SHARD)
    data = (root / "file").read_bytes()
    assert size == len(data)
    return data


def test_aligned_memory_goes_directly_and_only_the_tail_through_the_cache(
    tmp_path: Path, watching: Watching, memory: memoryview
) -> None:
    assert (
        written(tmp_path, watching, memory[: 10 * PAGE], memory[10 * PAGE : 12 * PAGE + 77]) == memory[: 12 * PAGE + 77]
    )
    assert (watching.direct, watching.cached) == (12 * PAGE, 77)


def test_after_an_odd_length_nothing_goes_directly_any_more(
    tmp_path: Path, watching: Watching, memory: memoryview
) -> None:
    """The file's position is no multiple of a page; a direct write there would be refused."""
    assert (
        written(tmp_path, watching, memory[:PAGE], memory[PAGE : PAGE + 5], memory[PAGE + 5 : 9 * PAGE])
        == memory[: 9 * PAGE]
    )
    assert watching.direct == PAGE


def test_a_small_part_in_odd_memory_is_copied_to_a_page_first(
    tmp_path: Path, watching: Watching, memory: memoryview
) -> None:
    """A shard's header is such a part; it must not end the direct writing of the tensors after it."""
    header = bytes(memory[:PAGE])
    assert written(tmp_path, watching, header, memory[PAGE:]) == memory
    assert (watching.direct, watching.cached) == (len(memory), 0)


def test_direct_writes_that_are_cut_short_are_continued(tmp_path: Path, watching: Watching, memory: memoryview) -> None:
    for block in (PAGE, 3 * PAGE, 512):  # of whole sectors, as the kernel cuts them
        calls = Watching(block=block)
        root = tmp_path / str(block)
        root.mkdir()
        assert written(root, calls, memory, memory[:PAGE]) == bytes(memory) + bytes(memory[:PAGE])


def test_a_filesystem_that_refuses_a_direct_write_is_written_through_the_cache(
    tmp_path: Path, watching: Watching, memory: memoryview
) -> None:
    """It lets a file be opened so and then says EINVAL: a reason to be slower, not to fail every save."""
    calls = Watching(refuse=True)
    assert written(tmp_path, calls, memory) == memory
    assert (calls.direct, calls.cached) == (0, len(memory))


def test_a_store_that_does_not_write_directly_is_never_asked_to(tmp_path: Path, memory: memoryview) -> None:
    calls = Watching()
    store = PosixStore(tmp_path, direct_io=False, calls=calls)
    sink = store.open_new("file", direct=True)
    sink.write(memory)
    sink.finish(Barrier.SHARD)
    assert (calls.direct, calls.cached) == (0, len(memory))


def test_an_error_of_a_direct_write_is_the_stores_error(tmp_path: Path, watching: Watching, memory: memoryview) -> None:
    class Full(Watching):
        def write(self, fd: int, data: Any, path: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StorageError, match="ENOSPC"):
        written(tmp_path, Full(), memory)
