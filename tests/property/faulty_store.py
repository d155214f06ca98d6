"""A store around a store that fails, or ends its process, at a chosen change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal, TypeVar

from onward.errors import StorageError
from onward.storage.base import Barrier, Bytes, Entry, Sink, Store

T = TypeVar("T")


class Crashed(BaseException):
    """The process ended here: nothing that it would have done later happens."""


class FaultyStore:
    """Passes everything on; ``arm`` chooses the change that goes wrong, before or after it took effect."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url, self.capabilities = inner.url, inner.capabilities
        self._lock = threading.Lock()
        self.disarm()

    def arm(self, at: int, how: Literal["error", "crash"], *, after: bool) -> None:
        """From here on the ``at``-th change fails once, or is the last of this process."""
        self._left, self._how, self._after = at, how, after

    def disarm(self) -> None:
        """Nothing goes wrong any more."""
        self._left, self._how, self._after, self._dead = 0, "error", False, False

    def _change(self, do: Callable[[], T]) -> T:
        with self._lock:
            if self._dead:
                raise Crashed
            self._left -= 1
            here = self._left == 0
            self._dead = here and self._how == "crash"
        if here and not self._after:
            self._fail()
        result = do()
        if here:
            self._fail()
        return result

    def _fail(self) -> None:
        if self._how == "crash":
            raise Crashed
        raise StorageError("EIO, as was asked")

    # --- reading ------------------------------------------------------------------------------------------------

    def read(self, path: str, *, limit: int) -> bytes:
        return self.inner.read(path, limit=limit)

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        self.inner.read_into(path, start, view)

    def stat(self, path: str) -> Entry:
        return self.inner.stat(path)

    def list(self, folder: str) -> list[Entry]:
        return self.inner.list(folder)

    def drop_cache(self, path: str) -> None:
        self.inner.drop_cache(path)

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    # --- writing ------------------------------------------------------------------------------------------------

    def create(self, path: str, data: bytes, *, content: Barrier, name: Barrier | None) -> None:
        self._change(lambda: self.inner.create(path, data, content=content, name=name))

    def replace(self, path: str, data: bytes) -> None:
        self._change(lambda: self.inner.replace(path, data))

    def open_new(self, path: str, *, direct: bool = False) -> Sink:
        return _FaultySink(self, self._change(lambda: self.inner.open_new(path, direct=direct)))

    def make_folder(self, path: str, *, exist_ok: bool = False) -> None:
        self._change(lambda: self.inner.make_folder(path, exist_ok=exist_ok))

    def sync_folder(self, path: str, barrier: Barrier) -> None:
        self._change(lambda: self.inner.sync_folder(path, barrier))

    def sync_file(self, path: str, barrier: Barrier) -> None:
        self._change(lambda: self.inner.sync_file(path, barrier))

    def rename_folder(self, path: str, to: str) -> None:
        self._change(lambda: self.inner.rename_folder(path, to))

    def remove(self, path: str) -> None:
        self._change(lambda: self.inner.remove(path))

    def remove_folder(self, path: str) -> None:
        self._change(lambda: self.inner.remove_folder(path))


class _FaultySink:
    def __init__(self, store: FaultyStore, inner: Sink) -> None:
        self._store, self._inner = store, inner

    def write(self, data: Bytes) -> None:
        self._store._change(lambda: self._inner.write(data))

    def finish(self, barrier: Barrier) -> int:
        return self._store._change(lambda: self._inner.finish(barrier))

    def abandon(self) -> None:
        self._inner.abandon()
