"""A full log of what was done to a disk, written data included: what the power-cut model replays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from onward.storage.syscalls import Syscalls
from onward.testing.seam import Call, Wrapper

T = TypeVar("T")


@dataclass(frozen=True)
class Operation:
    """One effect on the disk, or a ``mark``: a moment that a test names (``path`` says what happened then).

    ``path`` is relative to the store's root; of a link or rename it is the new one, and ``source`` the old one.
    """

    name: str
    path: str
    barrier: str | None = None
    source: str | None = None
    data: bytes = b""


class Recorder(Wrapper):
    """Performs calls one at a time and records those that took effect.

    The lock makes the log one order of events over all threads, which is what a disk sees.
    """

    def __init__(self, inner: Syscalls | None = None) -> None:
        super().__init__(inner)
        self.log: list[Operation] = []
        self._lock = threading.RLock()

    def mark(self, what: str) -> None:
        """Notes that something has just become true, for example that a save was acknowledged."""
        with self._lock:
            self.log.append(Operation("mark", what))

    def around(self, call: Call, do: Callable[[], T]) -> T:
        if not call.mutating:
            return do()
        with self._lock:
            result = do()
            source = call.source
            if source is not None:
                folder = call.path.rpartition("/")[0]
                source = f"{folder}/{source}" if folder else source
            data = b""
            if call.data is not None and isinstance(result, int):
                data = bytes(call.data[:result])  # what a short write left out was not written
            self.log.append(Operation(call.name, call.path, call.barrier, source, data))
            return result
