"""Files and folders of a POSIX filesystem, with the one durable-write primitive of the project.

Every path is walked from the root with ``O_NOFOLLOW`` on each part, so that a link planted inside the store leads
nowhere. Nothing is ever written in ``TMPDIR``: a temporary file lies beside its target, on the same filesystem.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from onward.errors import Damaged, StorageError
from onward.storage.base import AlreadyExists, Barrier, Bytes, Capabilities, Entry, NotFound
from onward.storage.syscalls import Syscalls

Mode = Literal["private", "group", "umask"]
_MODES: dict[str, tuple[int, int]] = {"private": (0o600, 0o700), "group": (0o640, 0o2750), "umask": (0o666, 0o777)}
FOLDER_MODES = {mode: folder for mode, (_, folder) in _MODES.items()}
_WRITE_BLOCK = 4 * 1024 * 1024  # hashing and writing alternate on blocks that fit the cache
_MKDIR_TRIES = 5
TEMP_SUFFIX = ".tmp"
DIRECT_ALIGN = 4096  # the largest logical block in use; a multiple of all smaller ones
_BOUNCE_LIMIT = 1024 * 1024  # headers: small, whole pages, but in memory of any alignment


def _umask() -> int:
    # os.umask can only be read by setting it, which would race with other threads that create files.
    with suppress(OSError, ValueError, IndexError), open("/proc/self/status", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


class PosixStore:
    """A store below one folder.

    Args:
        root: The folder; made absolute at once, so that a later ``chdir`` changes nothing.
        mode: Who may read: ``private`` (0600, 0700), ``group`` (0640, 2750) or ``umask``.
        publish: How a finished file gets its name without replacing another: by hard link, or by
            ``renameat2(RENAME_NOREPLACE)`` where the probe found that links do not work.
        direct_io: Write large files past the page cache, where the probe found that it works.
        calls: The seam for tests.
    """

    capabilities = Capabilities(folders=True, create_if_absent=True, durable=True, local=True)

    def __init__(
        self,
        root: str | Path,
        *,
        mode: Mode = "private",
        publish: Literal["link", "rename"] = "link",
        direct_io: bool = False,
        calls: Syscalls | None = None,
    ) -> None:
        self.root = Path(os.path.abspath(root))
        self.url = f"file://{quote(os.fsencode(self.root))}"
        self.mode = mode
        self.publish = publish
        self.direct_io = direct_io
        self.calls = calls or Syscalls()

    def local_path(self, path: str) -> Path:
        """Where the file lies on this machine."""
        return self.root / path

    # --- reading -----------------------------------------------------------------------------------------------

    def read(self, path: str, *, limit: int) -> bytes:
        with self._opened(path) as fd:
            size = os.fstat(fd).st_size
            if size > limit:
                raise Damaged(f"{self.url}/{path} has {size} bytes; a file of its kind has at most {limit}")
            view = memoryview(bytearray(size))
            self._fill(fd, path, 0, view)
            return bytes(view)

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        with self._opened(path) as fd:
            self._fill(fd, path, start, view)

    def stat(self, path: str) -> Entry:
        with self._folder_of(path) as (folder, name), self._errors("stat", path):
            return _entry(name, os.stat(name, dir_fd=folder, follow_symlinks=False))

    def list(self, folder: str) -> list[Entry]:
        with self._folder(folder) as fd, self._errors("list", folder):
            found: list[Entry] = []
            with os.scandir(fd) as items:
                for item in items:
                    # A file that vanishes between the listing and the look at it was never ours to report.
                    with suppress(FileNotFoundError):
                        found.append(_entry(item.name, item.stat(follow_symlinks=False)))
            return sorted(found, key=lambda entry: entry.name)

    def drop_cache(self, path: str) -> None:
        with self._opened(path) as fd, suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def free_bytes(self) -> int | None:
        with self._errors("statvfs", "."):
            facts = os.statvfs(self.root)
            return facts.f_bavail * facts.f_frsize

    # --- writing -----------------------------------------------------------------------------------------------

    def create(self, path: str, data: bytes, *, content: Barrier, name: Barrier | None) -> None:
        temp = self._temp_for(path)
        try:
            self._write_whole(temp, data, content)
            self._give_name(temp, path)
        except BaseException:
            # The name may have been given although the call failed; only the temporary name is ours to take back.
            with suppress(StorageError):
                self.remove(temp)
            raise
        with suppress(NotFound):
            self.remove(temp)
        if name is not None:
            self.sync_folder(_parent(path), name)

    def replace(self, path: str, data: bytes) -> None:
        temp = self._temp_for(path)
        sink = self.open_new(temp)
        try:
            sink.write(data)
            sink.close()
            with self._folder_of(path) as (folder, name), self._errors("rename", path):
                self.calls.rename(temp.rsplit("/", 1)[-1], name, folder, path)
        except BaseException:
            # A lease beats for weeks: on a full disk every beat would leave a file and a descriptor behind.
            sink.abandon()
            with suppress(StorageError):
                self.remove(temp)
            raise

    def open_new(self, path: str, *, direct: bool = False) -> PosixSink:
        with self._folder_of(path) as (folder, name), self._errors("create", path):
            wanted, _ = _MODES[self.mode]
            fd = self.calls.open_new(name, wanted, folder, path)
        try:
            with self._errors("chmod", path):
                if self.mode != "umask" and wanted & _umask():
                    self.calls.fchmod(fd, wanted, path)
        except StorageError:
            os.close(fd)
            raise
        return PosixSink(self, fd, path, direct=direct and self.direct_io and self.calls.set_direct(fd, True))

    def make_folder(self, path: str, *, exist_ok: bool = False) -> None:
        _, wanted = _MODES[self.mode]
        with self._folder_of(path) as (folder, name), self._errors("mkdir", path):
            try:
                self.calls.mkdir(name, wanted & 0o777, folder, path)
            except FileExistsError:
                # A network filesystem may repeat a mkdir that took effect and report its own folder as foreign,
                # and may show the folder late; only a real other thing at the place is an error.
                if not exist_ok or not self._becomes_folder(name, folder):
                    raise
                return
            if self.mode != "umask" and (wanted & _umask() or wanted & 0o7000):
                fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
                try:
                    self.calls.fchmod(fd, wanted, path)
                finally:
                    os.close(fd)

    def sync_folder(self, path: str, barrier: Barrier) -> None:
        with self._folder(path) as fd, self._errors("fsync", path):
            self.calls.fsync(fd, path, barrier.name)

    def sync_file(self, path: str, barrier: Barrier) -> None:
        with self._opened(path) as fd, self._errors("fsync", path):
            self.calls.fsync(fd, path, barrier.name)

    def rename_folder(self, path: str, to: str) -> None:
        if _parent(path) != _parent(to):
            raise StorageError(f"{path} and {to} do not lie in one folder")
        with self._folder_of(to) as (folder, name), self._errors("rename", to):
            with suppress(FileNotFoundError):
                os.stat(name, dir_fd=folder, follow_symlinks=False)
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), to)
            self.calls.rename(path.rsplit("/", 1)[-1], name, folder, to)

    def remove(self, path: str) -> None:
        with suppress(NotFound), self._folder_of(path) as (folder, name), self._errors("unlink", path):
            self.calls.unlink(name, folder, path)

    def remove_folder(self, path: str) -> None:
        with suppress(NotFound), self._folder_of(path) as (folder, name), self._errors("rmdir", path):
            self.calls.rmdir(name, folder, path)

    # --- inside ------------------------------------------------------------------------------------------------

    def _temp_for(self, path: str) -> str:
        folder, _, name = path.rpartition("/")
        temp = f".{name}.{secrets.token_hex(8)}{TEMP_SUFFIX}"
        return f"{folder}/{temp}" if folder else temp

    def _write_whole(self, path: str, data: bytes, barrier: Barrier) -> None:
        sink = self.open_new(path)
        try:
            sink.write(data)
            sink.finish(barrier)
        except BaseException:
            sink.abandon()
            raise

    def _give_name(self, temp: str, path: str) -> None:
        with self._folder_of(path) as (folder, name), self._errors("publish", path):
            if self.publish == "link":
                self.calls.link(temp.rsplit("/", 1)[-1], name, folder, path)
            else:
                self.calls.rename_noreplace(temp.rsplit("/", 1)[-1], name, folder, path)

    def _becomes_folder(self, name: str, dir_fd: int) -> bool:
        for attempt in range(_MKDIR_TRIES):
            with suppress(FileNotFoundError):
                return stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
            time.sleep(0.01 * 2**attempt)
        return False

    def _fill(self, fd: int, path: str, start: int, view: memoryview) -> None:
        done = 0
        with self._errors("read", path):
            while done < len(view):
                count = self.calls.pread(fd, view[done:], start + done, path)
                if count == 0:
                    raise Damaged(f"{self.url}/{path} ends at byte {start + done}; {len(view) - done} more are missing")
                done += count

    @contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        with self._folder_of(path) as (folder, name), self._errors("open", path):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Damaged(f"{self.url}/{path} is not a regular file")
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _folder(self, path: str) -> Iterator[int]:
        parts = [part for part in path.split("/") if part and part != "."]
        if ".." in parts or "\0" in path:
            raise Damaged(f"{path!r} leads out of the store")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with self._errors("open", path):
            # The root itself may be reached through links: it is the user's choice. Nothing below it may.
            fd = os.open(self.root, flags)
            for part in parts:
                below = _open_part(part, flags | os.O_NOFOLLOW, fd)
                fd = below
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _folder_of(self, path: str) -> Iterator[tuple[int, str]]:
        folder, _, name = path.rpartition("/")
        if name in ("", ".", "..") or "\0" in name:
            raise StorageError(f"{path!r} is not the path of a file")
        with self._folder(folder) as fd:
            yield fd, name

    @contextmanager
    def _errors(self, what: str, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"{what} {self.url}/{path}: not found") from error
        except FileExistsError as error:
            raise AlreadyExists(f"{what} {self.url}/{path}: the name is taken") from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise Damaged(f"{what} {self.url}/{path}: a link or a file stands where a folder is due") from error
            raise StorageError(
                f"{what} {self.url}/{path}: {error.strerror} ({errno.errorcode.get(error.errno or 0)})"
            ) from error


class PosixSink:
    """A new file of a ``PosixStore`` being written.

    In direct mode every write goes from the caller's memory to the device. What the device cannot take (memory or
    a length that is not a multiple of ``DIRECT_ALIGN``, as at the end of a file) is written through the page cache;
    ``finish`` makes both durable.
    """

    def __init__(self, store: PosixStore, fd: int, path: str, *, direct: bool = False) -> None:
        self._store, self._fd, self._path, self._direct = store, fd, path, direct
        self._size = 0

    def write(self, data: Bytes) -> None:
        view = memoryview(data).cast("B")
        while view:
            part = view[:_WRITE_BLOCK]
            if self._direct:
                part = self._aligned(part)
            with self._store._errors("write", self._path):
                # One call writes at most 2147479552 bytes, and may write fewer at any time.
                try:
                    count = self._store.calls.write(self._fd, part, self._path)
                except OSError as error:
                    if not self._direct or error.errno != errno.EINVAL:
                        raise
                    # Some filesystems take the flag and refuse the write; the same bytes go through the cache then.
                    self._leave_direct()
                    continue
            self._size += count
            view = view[count:]

    def _leave_direct(self) -> None:
        self._direct = False
        self._store.calls.set_direct(self._fd, False)

    def _aligned(self, part: memoryview) -> memoryview:
        """The leading bytes that may be written directly; leaves direct mode when there are none."""
        fits = len(part) - len(part) % DIRECT_ALIGN
        if fits and self._size % DIRECT_ALIGN == 0:
            if _address(part) % DIRECT_ALIGN == 0:
                return part[:fits]
            if len(part) == fits and fits <= _BOUNCE_LIMIT:
                bounce = memoryview(mmap.mmap(-1, fits))
                bounce[:] = part
                return bounce
        self._leave_direct()
        return part

    def finish(self, barrier: Barrier) -> int:
        with self._store._errors("fsync", self._path):
            self._store.calls.fsync(self._fd, self._path, barrier.name)
            size = os.fstat(self._fd).st_size
        if size != self._size:
            raise StorageError(f"{self._store.url}/{self._path} has {size} bytes after {self._size} were written")
        self.close()
        return size

    def close(self) -> None:
        """Closes; an error at close is the store's last word about earlier writes, and counts."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with self._store._errors("close", self._path):
                self._store.calls.close(fd, self._path)

    def abandon(self) -> None:
        with suppress(StorageError):
            self.close()


def _address(view: memoryview) -> int:
    if view.readonly:
        return 1  # of no use for a direct write: ctypes cannot tell where it lies
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _open_part(name: str, flags: int, parent: int) -> int:
    try:
        return os.open(name, flags, dir_fd=parent)
    finally:
        os.close(parent)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _entry(name: str, facts: os.stat_result) -> Entry:
    kinds: list[tuple[Callable[[int], bool], Literal["file", "folder", "link"]]] = [
        (stat.S_ISREG, "file"),
        (stat.S_ISDIR, "folder"),
        (stat.S_ISLNK, "link"),
    ]
    kind: Literal["file", "folder", "link", "other"] = "other"
    for test, label in kinds:
        if test(facts.st_mode):
            kind = label
    return Entry(name=name, kind=kind, size=facts.st_size, mtime=facts.st_mtime)
