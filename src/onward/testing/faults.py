"""Scriptable faults: objects that stand between a ``PosixStore`` and the kernel.

Each is a ``Syscalls`` around another, so they can be stacked; the outermost sees a call first. What one of them
swallows, those inside it never see: ``WithoutBarrier(..., inner=Recorder())`` records a run that lacks an fsync.

    store = PosixStore(root, calls=FailAt(7, errno.ENOSPC, inner=CountingSyscalls()))

Mutating calls are numbered from 1 in the order in which they begin, over all threads.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Collection
from typing import Literal, TypeVar

from onward.storage.base import Barrier
from onward.storage.syscalls import MUTATING, Syscalls
from onward.testing.seam import Bytes, Call, Wrapper

T = TypeVar("T")
When = Literal["before", "after"]


class CountingSyscalls(Wrapper):
    """Counts and lists the mutating calls."""

    def __init__(self, inner: Syscalls | None = None) -> None:
        super().__init__(inner)
        self.log: list[Call] = []
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many mutating calls have begun."""
        return len(self.log)

    def around(self, call: Call, do: Callable[[], T]) -> T:
        if call.mutating:
            with self._lock:
                self.log.append(Call(call.name, call.path, call.barrier, call.source))
        return do()


class _Numbered(Wrapper):
    """Acts at the n-th call among those it watches."""

    def __init__(self, n: int, inner: Syscalls | None, only: Collection[str], match: str) -> None:
        super().__init__(inner)
        self.n, self.only, self.match = n, frozenset(only), match
        self.seen = 0
        self._lock = threading.Lock()

    def arm(self, n: int) -> None:
        """Counts anew from here; the n-th call is the one."""
        with self._lock:
            self.n, self.seen = n, 0

    def number(self, call: Call) -> int:
        """The call's number among the watched ones; 0 when it is not watched."""
        if call.name not in self.only or self.match not in call.path:
            return 0
        with self._lock:
            self.seen += 1
            return self.seen


class CrashAt(_Numbered):
    """Ends the process at the n-th mutating call, as a kill would: nothing is cleaned up, nothing flushed.

    Args:
        n: Which call, from 1; 0 never.
        how: ``before`` it takes effect, or ``after``.
        status: The exit status by which a parent knows that the point was reached.
        inner: What performs the calls.
        only: The calls that are counted.
        match: Count only calls whose path contains this.
    """

    def __init__(
        self,
        n: int,
        how: When = "before",
        *,
        status: int = 77,
        inner: Syscalls | None = None,
        only: Collection[str] = MUTATING,
        match: str = "",
    ) -> None:
        super().__init__(n, inner, only, match)
        self.how, self.status = how, status

    def around(self, call: Call, do: Callable[[], T]) -> T:
        here = self.number(call) == self.n > 0
        if here and self.how == "before":
            self.end()
        try:
            return do()
        finally:
            if here:  # however the call itself ended: a mkdir of what is there already is a call too
                self.end()

    def end(self) -> None:
        """Ends the process."""
        os._exit(self.status)


class StopAt(_Numbered):
    """Stops the whole process with SIGSTOP before the n-th mutating call; whoever watches lets it go on."""

    def __init__(
        self, n: int, *, inner: Syscalls | None = None, only: Collection[str] = MUTATING, match: str = ""
    ) -> None:
        super().__init__(n, inner, only, match)

    def around(self, call: Call, do: Callable[[], T]) -> T:
        if self.number(call) == self.n > 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return do()


class Halted(BaseException):
    """The process of ``HaltAt`` is dead: none of its calls takes effect any more. Not an ``Exception`` on purpose."""


class HaltAt(_Numbered):
    """A kill inside one process: from the n-th mutating call on, no call takes effect, clean-up code included."""

    def __init__(
        self, n: int, *, inner: Syscalls | None = None, only: Collection[str] = MUTATING, match: str = ""
    ) -> None:
        super().__init__(n, inner, only, match)
        self.halted = False

    def around(self, call: Call, do: Callable[[], T]) -> T:
        if self.halted or self.number(call) == self.n > 0:
            self.halted = True
            if call.name == "close":  # the kernel closes the files of a dead process
                return do()
            raise Halted
        return do()


class FailAt(_Numbered):
    """The store refuses.

    Args:
        n: From which of the watched calls on, from 1.
        number: The errno.
        repeat: ``once``, or ``forever`` until ``clear``.
        only: Names of the calls that are watched, also ``close`` and ``pread``; by default all mutating ones.
        match: Watch only calls whose path contains this.
        when: ``before``: nothing happened. ``after``: it took effect and only the answer is wrong, as on a network
            filesystem whose reply was lost.
        inner: What performs the calls.
    """

    def __init__(
        self,
        n: int,
        number: int,
        repeat: Literal["once", "forever"] = "once",
        *,
        only: Collection[str] = MUTATING,
        match: str = "",
        when: When = "before",
        inner: Syscalls | None = None,
    ) -> None:
        super().__init__(n, inner, only, match)
        self.errno, self.repeat, self.when = number, repeat, when
        self.cleared = False
        self.hits: list[Call] = []

    def clear(self) -> None:
        """The fault is over."""
        self.cleared = True

    def around(self, call: Call, do: Callable[[], T]) -> T:
        number = self.number(call)
        hit = number == self.n if self.repeat == "once" else number >= self.n
        if number == 0 or not hit or self.cleared:
            return do()
        self.hits.append(Call(call.name, call.path, call.barrier, call.source))
        # A close that fails has still closed: the kernel gives the descriptor back whatever it answers.
        if self.when == "after" or call.name == "close":
            do()
        raise OSError(self.errno, os.strerror(self.errno), call.path)


class ShortWrites(Wrapper):
    """Every write takes at most ``limit`` bytes, as a signal, a quota or 2 GiB may cause at any time."""

    def __init__(self, limit: int, inner: Syscalls | None = None) -> None:
        super().__init__(inner)
        self.limit = limit

    def set_direct(self, fd: int, on: bool) -> bool:
        return not on and super().set_direct(fd, on)  # past the page cache go whole blocks only, of any limit

    def write(self, fd: int, data: Bytes, path: str) -> int:
        return super().write(fd, memoryview(data).cast("B")[: self.limit], path)


class ShortReads(Wrapper):
    """Every read gives at most ``limit`` bytes."""

    def __init__(self, limit: int, inner: Syscalls | None = None) -> None:
        super().__init__(inner)
        self.limit = limit

    def pread(self, fd: int, view: memoryview, start: int, path: str) -> int:
        return super().pread(fd, view[: self.limit], start, path)


class WithoutBarrier(Wrapper):
    """Leaves out an fsync: all of one barrier, or those on paths that contain ``match``."""

    def __init__(self, barrier: Barrier, *, match: str = "", inner: Syscalls | None = None) -> None:
        super().__init__(inner)
        self.barrier, self.match = barrier, match
        self.left_out = 0

    def fsync(self, fd: int, path: str, barrier: str) -> None:
        if barrier == self.barrier.name and self.match in path:
            self.left_out += 1
        else:
            super().fsync(fd, path, barrier)


class FlipAfterClose(Wrapper):
    """A disk that lies: alters one bit of a file after it was written, synced and closed without an error.

    Args:
        root: The store's root on this machine.
        match: The first file whose path contains this, and that is long enough.
        offset: Which byte; negative counts from the end.
        inner: What performs the calls.
    """

    def __init__(self, root: str | os.PathLike[str], match: str, offset: int, inner: Syscalls | None = None) -> None:
        super().__init__(inner)
        self.root, self.match, self.offset = os.fspath(root), match, offset
        self.flipped: str | None = None

    def close(self, fd: int, path: str) -> None:
        size = os.fstat(fd).st_size
        super().close(fd, path)
        if self.flipped is None and self.match in path and -size <= self.offset < size:
            self.flipped = path
            with open(os.path.join(self.root, path), "r+b") as file:
                file.seek(self.offset % size)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))


class LateFolders(Wrapper):
    """A network filesystem that makes a folder and then reports it as somebody else's."""

    def mkdir(self, name: str, mode: int, dir_fd: int, path: str) -> None:
        super().mkdir(name, mode, dir_fd, path)
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), path)
