"""Every system call with which the POSIX store changes or reads a disk, in one place.

The store goes through an object of this class, so that a test can count, fail, cut short or end the process at
any one of them, and so that the count can be compared with what strace sees.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

_RENAME_NOREPLACE = 1
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


class Syscalls:
    """Thin names over ``os``. Mutating calls come first; a subclass overrides ``before`` to interfere."""

    def before(self, call: str, path: str) -> None:
        """Called before each mutating call; may raise OSError or end the process."""

    def open_new(self, name: str, mode: int, dir_fd: int, path: str) -> int:
        self.before("open", path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, mode, dir_fd=dir_fd)

    def set_direct(self, fd: int, on: bool) -> bool:
        """Switches O_DIRECT for an open file; False where the filesystem does not have it."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError:
            return False
        return True

    def write(self, fd: int, data: bytes | bytearray | memoryview, path: str) -> int:
        self.before("write", path)
        return os.write(fd, data)

    def fchmod(self, fd: int, mode: int, path: str) -> None:
        self.before("fchmod", path)
        os.fchmod(fd, mode)

    def fsync(self, fd: int, path: str, barrier: str) -> None:
        self.before("fsync", path)
        os.fsync(fd)

    def close(self, fd: int, path: str) -> None:
        os.close(fd)

    def mkdir(self, name: str, mode: int, dir_fd: int, path: str) -> None:
        self.before("mkdir", path)
        os.mkdir(name, mode, dir_fd=dir_fd)

    def link(self, source: str, target: str, dir_fd: int, path: str) -> None:
        self.before("link", path)
        os.link(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)

    def rename(self, source: str, target: str, dir_fd: int, path: str) -> None:
        self.before("rename", path)
        os.rename(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def rename_noreplace(self, source: str, target: str, dir_fd: int, path: str) -> None:
        """``renameat2(RENAME_NOREPLACE)``: for filesystems without hard links."""
        self.before("rename", path)
        done = _libc.renameat2(dir_fd, os.fsencode(source), dir_fd, os.fsencode(target), _RENAME_NOREPLACE)
        if done != 0:
            number = ctypes.get_errno() or errno.EIO
            raise OSError(number, os.strerror(number), target)

    def unlink(self, name: str, dir_fd: int, path: str) -> None:
        self.before("unlink", path)
        os.unlink(name, dir_fd=dir_fd)

    def rmdir(self, name: str, dir_fd: int, path: str) -> None:
        self.before("rmdir", path)
        os.rmdir(name, dir_fd=dir_fd)

    def pread(self, fd: int, view: memoryview, start: int, path: str) -> int:
        return os.preadv(fd, [view], start)


MUTATING = ("open", "write", "fchmod", "fsync", "mkdir", "link", "rename", "unlink", "rmdir")
"""Names given to ``before``: the calls that can leave a trace on the disk."""
