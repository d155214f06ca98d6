"""Staging memory: host buffers into which the live state is copied, reused from save to save.

An anonymous memory file rather than ``/dev/shm``: a container's ``/dev/shm`` is often 64 MB, and writing past it
ends in SIGBUS, which no program survives.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

PAGE = mmap.PAGESIZE


def page_aligned(size: int) -> int:
    """``size`` rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


class Arena:
    """One growing, page-aligned buffer. Not thread-safe: whoever captures waits until the writer has let go."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self.capacity = 0

    def view(self, size: int) -> memoryview:
        """At least ``size`` writable bytes; what was there before is lost when the buffer has to grow.

        Raises:
            MemoryError: The machine does not give that much.
        """
        if self._map is None or size > self.capacity:
            self.close()
            self.capacity = max(page_aligned(size), PAGE)
            try:
                self._map = _anonymous(self.capacity)
            except OSError as error:
                self.capacity = 0
                raise MemoryError(f"{size} bytes of staging memory: {error.strerror}") from error
        return memoryview(self._map)[:size]

    def close(self) -> None:
        """Gives the memory back. Views handed out before stay valid until they are dropped."""
        held, self._map, self.capacity = self._map, None, 0
        if held is not None:
            with suppress(BufferError):  # somebody still reads it; it goes with the last view
                held.close()


def _anonymous(size: int) -> mmap.mmap:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("onward-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)
    return mmap.mmap(-1, size)
