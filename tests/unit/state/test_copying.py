"""The accelerator's path, driven on a CPU: a device whose kernels run late, in any order that its streams allow."""

from __future__ import annotations

import logging
import mmap
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from onward.state import copying
from onward.state import tensors as exact
from onward.state.copying import HostCopier, StreamCopier, copier
from onward.state.staging import Arena

Op = int


class Device:
    """A simulated accelerator with the stream interface of ``torch.cuda``; nothing runs before it must or may."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.work: list[tuple[Callable[[], None], set[Op]]] = []
        self.done: set[Op] = set()
        self.default = Stream(self)
        self._current = threading.local()

    def current_stream(self) -> Stream:
        return getattr(self._current, "stream", self.default)

    def Stream(self) -> Stream:
        return Stream(self)

    def Event(self) -> Event:
        return Event(self)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        yield
        self._current.stream = before

    def launch(self, kernel: Callable[[], None]) -> None:
        """Queues a kernel on the current stream; the host goes on."""
        stream = self.current_stream()
        self.work.append((kernel, stream.behind | ({stream.last} if stream.last is not None else set())))
        stream.last = len(self.work) - 1

    def run(self, op: Op) -> None:
        """Runs an operation, after all that it must wait for."""
        if op not in self.done:
            kernel, behind = self.work[op]
            for each in behind:
                self.run(each)
            self.done.add(op)
            kernel()

    def idle(self) -> None:
        """Runs everything that is left, in a drawn order."""
        left = [op for op in range(len(self.work)) if op not in self.done]
        self.random.shuffle(left)
        for op in left:
            self.run(op)

    def some(self) -> None:
        """Lets time pass: some of what is queued runs."""
        left = [op for op in range(len(self.work)) if op not in self.done]
        for op in self.random.sample(left, self.random.randint(0, len(left))):
            self.run(op)


class Stream:
    def __init__(self, device: Device) -> None:
        self.device, self.last = device, None
        self.behind: set[Op] = set()
        self.last: Op | None = None

    def wait_stream(self, other: Stream) -> None:
        self.behind = self.behind | other.behind | ({other.last} if other.last is not None else set())

    def wait_event(self, event: Event) -> None:
        self.behind = self.behind | event.behind


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.behind: set[Op] = set()

    def record(self, stream: Stream) -> None:
        self.behind = stream.behind | ({stream.last} if stream.last is not None else set())

    def synchronize(self) -> None:
        for op in self.behind:
            self.device.run(op)


class Driver:
    """Registers host memory; ``code`` is what it answers."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("pin", address))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unpin", address))
        return 0


class WithoutWait(StreamCopier):
    """The negative control: copies do not wait for the training stream."""

    def start(self, copies: Any) -> None:
        self._stream = self._device.Stream()
        self._stream.wait_stream = lambda other: None
        super().start(copies)


class WithoutProtect(StreamCopier):
    """The negative control: the next step does not wait for the copies."""

    def protect(self) -> None:
        pass


class WithoutFinish(StreamCopier):
    """The negative control: nobody waits for the bytes."""

    def finish(self) -> None:
        self._event = None


def train(kind: type[StreamCopier], seed: int, monkeypatch: pytest.MonkeyPatch, steps: int = 4) -> int:
    """Trains with a copy after every step; returns how many copies were not of one step, as captured."""
    device = Device(seed)
    tensors = [torch.zeros(8) for _ in range(6)]
    views = [memoryview(bytearray(32)) for _ in tensors]

    targets = [exact.target_of(view, "float32", (8,)) for view in views]

    def copy_all(copies: Any, *, non_blocking: bool) -> None:
        assert non_blocking
        for copy in copies:
            device.launch(lambda copy=copy: exact.copy_all([copy]))

    monkeypatch.setattr(copying, "exact", type("Exact", (), {"copy_all": staticmethod(copy_all)}))
    engine, wrong = kind(device, Driver()), 0
    for step in range(1, steps + 1):
        for tensor in tensors:
            device.launch(lambda tensor=tensor, step=step: tensor.fill_(step))  # type: ignore[misc]
        device.some()
        engine.start(list(zip(tensors, targets, strict=True)))
        device.some()
        engine.protect()
        for tensor in tensors:
            device.launch(lambda tensor=tensor, step=step: tensor.fill_(-step))  # type: ignore[misc]
        device.some()
        engine.finish()
        wrong += any(set(torch.frombuffer(view, dtype=torch.float32).tolist()) != {float(step)} for view in views)
        device.idle()
    return wrong


def test_copies_are_of_the_boundary_in_every_order_that_the_streams_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(150):
        with monkeypatch.context() as patch:
            assert train(StreamCopier, seed, patch) == 0, f"seed {seed}"
    print("\naccelerator: 150 orders of 4 steps, every copy of one boundary")


@pytest.mark.parametrize("kind", [WithoutWait, WithoutProtect, WithoutFinish])
def test_each_of_the_three_waits_is_needed(kind: type[StreamCopier], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = 0
    for seed in range(30):
        with monkeypatch.context() as patch:
            wrong += train(kind, seed, patch)
    assert wrong > 5


def test_finish_in_one_thread_cannot_take_the_event_from_under_protect_in_another() -> None:
    """The save's thread finishes while the training loop protects its step: both want the one event."""
    device = Device(0)
    engine = StreamCopier(device, Driver())
    engine.start([])
    stream = device.default

    def while_the_save_finishes() -> Stream:
        engine.finish()
        return stream

    device.current_stream = while_the_save_finishes  # type: ignore[method-assign]
    engine.protect()


def test_protect_and_finish_without_a_copy_do_nothing() -> None:
    engine = StreamCopier(Device(0), Driver())
    engine.protect()
    engine.finish()
    engine.start([])
    engine.finish()
    engine.protect()
    engine.finish()


def test_the_copy_stream_is_made_once() -> None:
    device = Device(0)
    made: list[Stream] = []
    make = device.Stream
    device.Stream = lambda: made.append(make()) or made[-1]  # type: ignore[method-assign,func-returns-value]
    engine = StreamCopier(device, Driver())
    for _ in range(5):
        engine.start([])
        engine.finish()
    assert len(made) == 1


def test_staging_memory_is_pinned_once_for_each_mapping_and_unpinned_before_it_goes() -> None:
    driver = Driver()
    arena = Arena(StreamCopier(Device(0), driver))
    for size in (4096, 4096, 8192, 100, 40960):
        arena.view(size)
    arena.close()
    arena.close()
    assert [call for call, _ in driver.calls] == ["pin", "unpin"] * 3
    pins = [address for call, address in driver.calls if call == "pin"]
    assert pins == [address for call, address in driver.calls if call == "unpin"]


def test_memory_that_cannot_be_pinned_is_used_all_the_same_and_said(caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(StreamCopier(Device(0), Driver(code=2)))
    with caplog.at_level(logging.WARNING, logger="onward"):
        arena.view(4096)
    assert "could not be pinned (error 2)" in caplog.text
    arena.close()


def test_the_driver_is_asked_for_only_when_it_is_needed() -> None:
    class Lazy(Device):
        asked = 0

        def cudart(self) -> Driver:
            self.asked += 1
            return Driver()

    device = Lazy(0)
    engine = StreamCopier(device)
    engine.start([])
    engine.finish()
    assert device.asked == 0
    memory = mmap.mmap(-1, 4096)
    engine.pin(memory)
    engine.unpin(memory)
    assert device.asked == 1


def test_without_an_accelerator_the_host_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(copier(), HostCopier)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(copier(), StreamCopier)


def test_a_host_copy_is_over_when_start_returns() -> None:
    view = memoryview(bytearray(12))
    engine = HostCopier()
    tensor = torch.tensor([1.0, 2.0, 3.0])
    engine.start([(tensor, exact.target_of(view, "float32", (3,)))])
    tensor.zero_()
    engine.protect()
    engine.finish()
    assert torch.frombuffer(view, dtype=torch.float32).tolist() == [1.0, 2.0, 3.0]
