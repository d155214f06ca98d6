"""What the machine allows: the references that no program can beat."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

_WRITE = 8 * 1024 * 1024
_READ = 4 * 1024 * 1024
_PAGE = mmap.PAGESIZE


class Memcpy:
    """A copy of given tensors into memory that is there already.

    Args:
        tensors: What is copied; contiguous.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        sources = [tensor.view(-1).view(torch.uint8) if tensor.dim() else tensor.reshape(1) for tensor in tensors]
        memory = torch.empty(sum(source.nbytes for source in sources), dtype=torch.uint8)
        memory.fill_(1)  # every page is there before anything is timed
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        start = 0
        for source in sorted(sources, key=lambda source: -source.element_size()):
            target = memory[start : start + source.nbytes].view(source.dtype)
            start += source.nbytes
            self._pairs.append((target, source))

    def seconds(self) -> float:
        """The best of every number of threads, each tried twice."""
        usual = torch.get_num_threads()
        best = float("inf")
        try:
            for threads in sorted({1, usual}):
                torch.set_num_threads(threads)
                for _ in range(2):
                    started = time.perf_counter()
                    for target, source in self._pairs:
                        target.copy_(source)
                    best = min(best, time.perf_counter() - started)
        finally:
            torch.set_num_threads(usual)
        return best


class RawWrite:
    """As many bytes as the state has, from page-aligned memory to new files, with O_DIRECT and an fsync each.

    Args:
        folder: Where the files go; they are removed again.
        nbytes: How many bytes.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._folder, self._size = folder, -(-nbytes // _PAGE) * _PAGE
        self._memory = mmap.mmap(-1, self._size)
        noise = os.urandom(_READ)
        for start in range(0, self._size, _READ):
            part = min(_READ, self._size - start)
            self._memory[start : start + part] = noise[:part]
        self.direct = True

    def seconds(self, files: int, threads: int = 4) -> float:
        """One write of all bytes into so many files, and their removal, which is not timed."""
        self._folder.mkdir()
        share = -(-self._size // files // _PAGE) * _PAGE
        view = memoryview(self._memory)
        parts = [view[start : start + share] for start in range(0, self._size, share)]
        started = time.perf_counter()
        _each(lambda number: self._write(self._folder / f"{number}", parts[number]), len(parts), threads)
        taken = time.perf_counter() - started
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()
        return taken

    def _write(self, path: Path, data: memoryview) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(path, flags | os.O_DIRECT)
        except OSError:  # the filesystem has no direct writes
            self.direct = False
            fd = os.open(path, flags)
        try:
            while data:
                data = data[os.write(fd, data[:_WRITE]) :]
            os.fsync(fd)
        finally:
            os.close(fd)


class PageCacheRead:
    """Files, read from the page cache into memory that is there already.

    Args:
        paths: What is read.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._files = [(path, memoryview(bytearray(b"\1") * path.stat().st_size)) for path in paths]
        self.seconds()  # fills the cache

    def seconds(self, threads: int = 2) -> float:
        """One read of all bytes."""
        started = time.perf_counter()
        _each(lambda number: self._read(*self._files[number]), len(self._files), threads)
        return time.perf_counter() - started

    def _read(self, path: Path, buffer: memoryview) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            done = 0
            while count := os.preadv(fd, [buffer[done : done + _READ]], done):
                done += count
        finally:
            os.close(fd)


def _each(work: Callable[[int], None], count: int, threads: int) -> None:
    waiting = list(range(count))
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while True:
                try:
                    number = waiting.pop(0)
                except IndexError:
                    return
                work(number)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=run) for _ in range(min(threads, count))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
