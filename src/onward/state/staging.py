"""Staging memory: host buffers into which the live state is copied, reused from save to save.

An anonymous memory file rather than ``/dev/shm``: a container's ``/dev/shm`` is often 64 MB, and writing past it
ends in SIGBUS, which no program survives. The writer process maps the same file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from contextlib import suppress

from onward.state.copying import Copier, copier

PAGE = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23  # Linux 5.14: faults pages in without touching what they hold
_MADV_HUGEPAGE = 14
_HUGE = 2 * 1024 * 1024
_PREFAULT_STEP = 64 * 1024 * 1024
_libc = ctypes.CDLL(None, use_errno=True)


def page_aligned(size: int) -> int:
    """``size`` rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


class Arena:
    """One growing, page-aligned buffer. Whoever captures waits until the writer has let go of it.

    Attributes:
        capacity: Bytes that are mapped.
        generation: Grows whenever the memory file is another one, so that a writer knows when to map it anew.
    """

    def __init__(self, engine: Copier | None = None) -> None:
        self._engine = engine or copier()
        self._map: mmap.mmap | None = None
        self._fd = -1
        self._prefault: threading.Thread | None = None
        self.capacity = 0
        self.generation = 0

    @property
    def fd(self) -> int:
        """The memory file; -1 where the system has none."""
        return self._fd

    def view(self, size: int) -> memoryview:
        """At least ``size`` writable bytes; what was there before is lost when the buffer has to grow.

        Raises:
            MemoryError: The machine does not give that much.
        """
        self.wait_prefault()
        if self._map is None or size > self.capacity:
            self.close()
            try:
                self._open(max(page_aligned(size), PAGE))
            except OSError as error:
                self.close()
                raise MemoryError(f"{size} bytes of staging memory: {error.strerror}") from error
        assert self._map is not None
        return memoryview(self._map)[:size]

    def prefault(self, size: int) -> None:
        """Begins to bring ``size`` bytes into memory, in the background: a first save then costs what later ones do.

        Without it the first copy takes a page fault for every 4 KiB, four times as long as the copy itself.
        """
        view = self.view(size)
        self._prefault = threading.Thread(target=_touch, args=(view,), name="onward-prefault", daemon=True)
        self._prefault.start()

    def wait_prefault(self) -> None:
        """Returns when no prefault is under way."""
        thread, self._prefault = self._prefault, None
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """Gives the memory back. Views handed out before stay valid until they are dropped."""
        self.wait_prefault()
        held, self._map, self.capacity = self._map, None, 0
        if held is not None:
            self._engine.unpin(held)
            with suppress(BufferError):  # somebody still reads it; it goes with the last view
                held.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self, size: int) -> None:
        self.generation += 1
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("onward-staging", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
        else:
            self._map = mmap.mmap(-1, size)
        self.capacity = size
        self._engine.pin(self._map)


def prefer_huge_pages(view: memoryview) -> None:
    """Asks that fresh memory is faulted in by 2 MiB at a time: a load into new tensors is then not spent on faults."""
    if len(view) < 2 * _HUGE or view.readonly:
        return
    base = ctypes.addressof(ctypes.c_char.from_buffer(view))
    start = -(-base // _HUGE) * _HUGE
    size = (base + len(view) - start) // _HUGE * _HUGE
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_HUGEPAGE)


def _touch(view: memoryview) -> None:
    """Faults pages in, outside of the interpreter's lock."""
    if not len(view):
        return
    base = ctypes.addressof(ctypes.c_char.from_buffer(view))
    for start in range(0, len(view), _PREFAULT_STEP):
        size = min(_PREFAULT_STEP, len(view) - start)
        address = ctypes.c_void_p(base + start)
        if _libc.madvise(address, ctypes.c_size_t(page_aligned(size)), _MADV_POPULATE_WRITE) != 0:
            ctypes.memset(address, 0, size)
