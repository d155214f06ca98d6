"""A store in memory: for tests, and the reference for what every other store must do."""

from __future__ import annotations

import threading
import time

from onward.errors import Damaged, StorageError
from onward.storage.base import AlreadyExists, Barrier, Bytes, Capabilities, Entry, NotFound


class MemoryStore:
    """Files and folders in two dictionaries, under one lock."""

    capabilities = Capabilities(folders=True, create_if_absent=True, durable=False, local=False)

    def __init__(self, name: str = "memory") -> None:
        self.url = f"memory://{name}"
        self.files: dict[str, bytes] = {}
        self.folders: dict[str, float] = {"": time.time()}
        self._lock = threading.RLock()

    def read(self, path: str, *, limit: int) -> bytes:
        with self._lock:
            data = self._file(path)
        if len(data) > limit:
            raise Damaged(f"{self.url}/{path} has {len(data)} bytes; a file of its kind has at most {limit}")
        return data

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        with self._lock:
            data = self._file(path)
        part = data[start : start + len(view)]
        if len(part) < len(view):
            raise Damaged(f"{self.url}/{path} ends at byte {len(data)}; {len(view) - len(part)} more are missing")
        view[:] = part

    def stat(self, path: str) -> Entry:
        with self._lock:
            name = path.rpartition("/")[2]
            if path in self.folders:
                return Entry(name=name, kind="folder", size=0, mtime=self.folders[path])
            return Entry(name=name, kind="file", size=len(self._file(path)), mtime=0.0)

    def list(self, folder: str) -> list[Entry]:
        _require_inside(folder)
        with self._lock:
            if folder not in self.folders:
                raise NotFound(f"list {self.url}/{folder}: not found")
            prefix = f"{folder}/" if folder else ""
            items = [p for p in (*self.files, *self.folders) if p.startswith(prefix) and p != folder]
            return [self.stat(path) for path in sorted(items) if "/" not in path[len(prefix) :]]

    def create(self, path: str, data: bytes, *, content: Barrier, name: Barrier | None) -> None:
        with self._lock:
            self._claim(path)
            self.files[path] = bytes(data)

    def replace(self, path: str, data: bytes) -> None:
        with self._lock:
            self._parent(path)
            self.files[path] = bytes(data)

    def open_new(self, path: str, *, direct: bool = False) -> MemorySink:
        with self._lock:
            self._claim(path)
            self.files[path] = b""
        return MemorySink(self, path)

    def make_folder(self, path: str, *, exist_ok: bool = False) -> None:
        with self._lock:
            if path in self.folders and exist_ok:
                return
            self._claim(path)
            self.folders[path] = time.time()

    def sync_folder(self, path: str, barrier: Barrier) -> None:
        with self._lock:
            if path not in self.folders:
                raise NotFound(f"fsync {self.url}/{path}: not found")

    def sync_file(self, path: str, barrier: Barrier) -> None:
        with self._lock:
            self._file(path)

    def rename_folder(self, path: str, to: str) -> None:
        with self._lock:
            if path not in self.folders:
                raise NotFound(f"rename {self.url}/{path}: not found")
            self._claim(to)
            for old in [p for p in self.folders if p == path or p.startswith(f"{path}/")]:
                self.folders[to + old[len(path) :]] = self.folders.pop(old)
            for old in [p for p in self.files if p.startswith(f"{path}/")]:
                self.files[to + old[len(path) :]] = self.files.pop(old)

    def remove(self, path: str) -> None:
        with self._lock:
            self.files.pop(path, None)

    def remove_folder(self, path: str) -> None:
        with self._lock:
            if path in self.folders and self.list(path):
                raise StorageError(f"rmdir {self.url}/{path}: the folder is not empty")
            self.folders.pop(path, None)

    def drop_cache(self, path: str) -> None:
        """Nothing lies between this store and its reader."""

    def free_bytes(self) -> int | None:
        return None

    def _file(self, path: str) -> bytes:
        _require_inside(path)
        if path not in self.files:
            raise NotFound(f"read {self.url}/{path}: not found")
        return self.files[path]

    def _parent(self, path: str) -> None:
        _require_inside(path)
        if path.rpartition("/")[0] not in self.folders:
            raise NotFound(f"create {self.url}/{path}: its folder is not there")

    def _claim(self, path: str) -> None:
        self._parent(path)
        if path in self.files or path in self.folders:
            raise AlreadyExists(f"create {self.url}/{path}: the name is taken")


def _require_inside(path: str) -> None:
    if ".." in path.split("/") or "\0" in path:
        raise Damaged(f"{path!r} leads out of the store")


class MemorySink:
    """A new file of a ``MemoryStore`` being written."""

    def __init__(self, store: MemoryStore, path: str) -> None:
        self._store, self._path, self._parts = store, path, bytearray()

    def write(self, data: Bytes) -> None:
        self._parts += memoryview(data).cast("B")

    def finish(self, barrier: Barrier) -> int:
        self._store.files[self._path] = bytes(self._parts)
        return len(self._parts)

    def abandon(self) -> None:
        """The empty file stays, as it would on a disk."""
