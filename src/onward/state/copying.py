"""How bytes get from the device to staging memory: one seam, so that the accelerator's path can be driven on a CPU."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from onward.state import tensors as exact

log = logging.getLogger("onward")

Copy = tuple[torch.Tensor, torch.Tensor]
"""A tensor, and the place in host memory that it goes to (see ``exact.target_of``)."""


class Copier(Protocol):
    """Copies tensors to the host."""

    def pin(self, memory: mmap.mmap) -> None:
        """Prepares staging memory for fast copies from the device; may do nothing."""
        ...

    def unpin(self, memory: mmap.mmap) -> None:
        """Undoes ``pin``."""
        ...

    def start(self, copies: Sequence[Copy]) -> None:
        """Begins the copies, ordered after all work of the device so far."""
        ...

    def protect(self) -> None:
        """Makes what the device does from now on wait for the copies; the host does not wait."""
        ...

    def finish(self) -> None:
        """Returns when all bytes are on the host."""
        ...


class HostCopier:
    """State in host memory: plain copies, which are over when ``start`` returns."""

    def pin(self, memory: mmap.mmap) -> None:
        """Host memory needs no preparation."""

    def unpin(self, memory: mmap.mmap) -> None:
        """Nothing was prepared."""

    def start(self, copies: Sequence[Copy]) -> None:
        exact.copy_all(copies)

    def protect(self) -> None:
        """The copies are over."""

    def finish(self) -> None:
        """The copies are over."""


class StreamCopier:
    """State on an accelerator: copies on a stream of their own, into pinned memory, behind the training stream.

    Args:
        device: ``torch.cuda``, or what has its stream interface.
        runtime: What registers host memory with the driver; ``torch.cuda.cudart()`` by default.
    """

    def __init__(self, device: Any, runtime: Any = None) -> None:
        self._device, self._runtime = device, runtime
        self._stream: Any = None
        self._event: Any = None

    def pin(self, memory: mmap.mmap) -> None:
        code = self._driver().cudaHostRegister(_address(memory), len(memory), 0)
        if int(code) != 0:
            log.warning("staging memory could not be pinned (error %s); copies from the device will be slower", code)

    def unpin(self, memory: mmap.mmap) -> None:
        self._driver().cudaHostUnregister(_address(memory))

    def start(self, copies: Sequence[Copy]) -> None:
        if self._stream is None:
            self._stream = self._device.Stream()
        # Without this wait the copy would race with the kernels of the optimizer step that has just been launched.
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream):
            exact.copy_all(copies, non_blocking=True)
            self._event = self._device.Event()
            self._event.record(self._stream)

    def protect(self) -> None:
        # The next optimizer step is queued behind the copy: it would overwrite what has not yet been read.
        event = self._event  # once: the saving thread may forget it at any time
        if event is not None:
            self._device.current_stream().wait_event(event)

    def finish(self) -> None:
        event = self._event
        if event is not None:
            event.synchronize()
            if self._event is event:
                self._event = None

    def _driver(self) -> Any:
        if self._runtime is None:
            self._runtime = self._device.cudart()
        return self._runtime


def copier() -> Copier:
    """The copier for this machine."""
    return StreamCopier(torch.cuda) if torch.cuda.is_available() else HostCopier()


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
