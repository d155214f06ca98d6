"""The place of every fault: between a ``PosixStore`` and the kernel, around one call at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from onward.storage.syscalls import MUTATING, Syscalls

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Call:
    """One call of the store.

    Attributes:
        name: ``open``, ``write``, ``fchmod``, ``fsync``, ``mkdir``, ``link``, ``rename``, ``unlink``, ``rmdir``, or one
            that leaves no trace: ``close``, ``pread``.
        path: Where, relative to the store's root; of a link or rename the new name.
        barrier: The name of an fsync's barrier.
        source: The old name of a link or rename, in the same folder.
        data: What a write was given.
    """

    name: str
    path: str
    barrier: str | None = None
    source: str | None = None
    data: memoryview | None = None

    @property
    def mutating(self) -> bool:
        """Whether it can leave a trace on the disk."""
        return self.name in MUTATING


class Wrapper(Syscalls):
    """Passes every call through ``around``; the base of all faults.

    Args:
        inner: What performs the calls; the kernel by default.
    """

    def __init__(self, inner: Syscalls | None = None) -> None:
        self.inner = inner or Syscalls()

    def around(self, call: Call, do: Callable[[], T]) -> T:
        """Performs a call with ``do``; a subclass may act before and after it, or instead of it."""
        return do()

    def open_new(self, name: str, mode: int, dir_fd: int, path: str) -> int:
        return self.around(Call("open", path), lambda: self.inner.open_new(name, mode, dir_fd, path))

    def set_direct(self, fd: int, on: bool) -> bool:
        return self.inner.set_direct(fd, on)

    def write(self, fd: int, data: Bytes, path: str) -> int:
        call = Call("write", path, data=memoryview(data).cast("B"))
        return self.around(call, lambda: self.inner.write(fd, data, path))

    def fchmod(self, fd: int, mode: int, path: str) -> None:
        self.around(Call("fchmod", path), lambda: self.inner.fchmod(fd, mode, path))

    def fsync(self, fd: int, path: str, barrier: str) -> None:
        self.around(Call("fsync", path, barrier=barrier), lambda: self.inner.fsync(fd, path, barrier))

    def close(self, fd: int, path: str) -> None:
        self.around(Call("close", path), lambda: self.inner.close(fd, path))

    def mkdir(self, name: str, mode: int, dir_fd: int, path: str) -> None:
        self.around(Call("mkdir", path), lambda: self.inner.mkdir(name, mode, dir_fd, path))

    def link(self, source: str, target: str, dir_fd: int, path: str) -> None:
        self.around(Call("link", path, source=source), lambda: self.inner.link(source, target, dir_fd, path))

    def rename(self, source: str, target: str, dir_fd: int, path: str) -> None:
        self.around(Call("rename", path, source=source), lambda: self.inner.rename(source, target, dir_fd, path))

    def rename_noreplace(self, source: str, target: str, dir_fd: int, path: str) -> None:
        call = Call("rename", path, source=source)
        self.around(call, lambda: self.inner.rename_noreplace(source, target, dir_fd, path))

    def unlink(self, name: str, dir_fd: int, path: str) -> None:
        self.around(Call("unlink", path), lambda: self.inner.unlink(name, dir_fd, path))

    def rmdir(self, name: str, dir_fd: int, path: str) -> None:
        self.around(Call("rmdir", path), lambda: self.inner.rmdir(name, dir_fd, path))

    def pread(self, fd: int, view: memoryview, start: int, path: str) -> int:
        return self.around(Call("pread", path), lambda: self.inner.pread(fd, view, start, path))
