"""Stores around stores."""

from __future__ import annotations

from typing import NoReturn

from onward.errors import StorageError
from onward.storage.base import Barrier, Capabilities, Entry, Sink, Store


class ReadOnlyStore:
    """Another store, of which nothing can be changed: for drills and for looking at a lone folder."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.url = inner.url
        self.capabilities: Capabilities = inner.capabilities

    def read(self, path: str, *, limit: int) -> bytes:
        return self._inner.read(path, limit=limit)

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        self._inner.read_into(path, start, view)

    def stat(self, path: str) -> Entry:
        return self._inner.stat(path)

    def list(self, folder: str) -> list[Entry]:
        return self._inner.list(folder)

    def create(self, path: str, data: bytes, *, content: Barrier, name: Barrier | None) -> None:
        self._refuse(path)

    def replace(self, path: str, data: bytes) -> None:
        self._refuse(path)

    def open_new(self, path: str, *, direct: bool = False) -> Sink:
        self._refuse(path)

    def make_folder(self, path: str, *, exist_ok: bool = False) -> None:
        self._refuse(path)

    def sync_folder(self, path: str, barrier: Barrier) -> None:
        # A reader syncs the ledger before it believes it; that changes nothing, and may be refused to a reader.
        self._inner.sync_folder(path, barrier)

    def sync_file(self, path: str, barrier: Barrier) -> None:
        self._inner.sync_file(path, barrier)

    def rename_folder(self, path: str, to: str) -> None:
        self._refuse(path)

    def remove(self, path: str) -> None:
        self._refuse(path)

    def remove_folder(self, path: str) -> None:
        self._refuse(path)

    def drop_cache(self, path: str) -> None:
        self._inner.drop_cache(path)

    def free_bytes(self) -> int | None:
        return self._inner.free_bytes()

    def _refuse(self, path: str) -> NoReturn:
        raise StorageError(
            f"{self.url}/{path} was to be changed, but the store is open for reading only",
            next_step="open the store for writing",
        )
