"""Copying while training goes on: waited for, of one boundary, and loud when something else than a step changes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from onward.errors import SaveFailed
from onward.save.capture import Capture, Capturer
from onward.save.captured import Captured
from onward.state.copying import Copy, HostCopier
from onward.state.register import register


def by_value(tensor: torch.Tensor) -> bool:
    return True


class Gate(HostCopier):
    """Copies nothing before it is opened; the first start of each capture, for the boundary, passes."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = threading.Event()
        self.starts: list[int] = []

    def start(self, copies: Sequence[Copy]) -> None:
        self.starts.append(len(copies))
        if len(self.starts) % 2 == 0:
            self.begun.set()
            assert self.open.wait(30)
        super().start(copies)


class Device(HostCopier):
    """Copies in ``finish``, as a device that is behind would."""

    def __init__(self) -> None:
        self.queued: list[Copy] = []
        self.protected = 0

    def start(self, copies: Sequence[Copy]) -> None:
        self.queued += copies

    def protect(self) -> None:
        self.protected += 1

    def finish(self) -> None:
        queued, self.queued = self.queued, []
        super().start(queued)


def overlapped(engine: HostCopier, later: Callable[[torch.Tensor], bool]) -> tuple[dict[str, Any], Capture]:
    box = {"late": torch.full((1000,), 1.0), "other": torch.full((1000,), 1.0), "soon": torch.full((1000,), 1.0)}
    return box, Capturer(register(others={"box": box}), engine=engine).capture(1, later=later)


def values(captured: Captured) -> dict[str, set[float]]:
    found: dict[str, set[float]] = {}
    for file in captured.plan.files:
        region = captured.region(file)
        for piece in file.pieces:
            part = bytearray(region[piece.begin : piece.begin + piece.nbytes])
            found.setdefault(piece.key, set()).update(torch.frombuffer(part, dtype=torch.float32).tolist())
    return found


def test_what_may_not_wait_is_copied_before_the_call_returns() -> None:
    engine = Gate()
    box = {"late": torch.full((1000,), 1.0), "soon": torch.full((1000,), 1.0)}
    capturer = Capturer(register(others={"box": box}), engine=engine)
    capture = capturer.capture(1, later=lambda tensor: tensor.data_ptr() == box["late"].data_ptr())
    assert engine.begun.wait(30)
    box["soon"].fill_(2)
    engine.open.set()
    capture.settle()
    box["late"].fill_(2)
    assert values(capture.finish()) == {'["box","late"]': {1.0}, '["box","soon"]': {1.0}}
    assert engine.starts == [1, 1]


def test_settle_returns_only_when_the_copy_is_over() -> None:
    engine = Gate()
    _, capture = overlapped(engine, by_value)
    assert engine.begun.wait(30)
    settled = threading.Thread(target=capture.settle)
    settled.start()
    settled.join(0.1)
    assert settled.is_alive()
    engine.open.set()
    settled.join(30)
    assert not settled.is_alive()


@pytest.mark.parametrize("how", ["add_", "fill_", "copy_", "view", "out", "index"])
def test_a_tensor_changed_in_place_during_the_copy_is_noticed(how: str) -> None:
    engine = Gate()
    box, capture = overlapped(engine, by_value)
    assert engine.begun.wait(30)
    tensor = box["other"]
    with torch.no_grad():
        {
            "add_": lambda: tensor.add_(1),
            "fill_": lambda: tensor.fill_(2),
            "copy_": lambda: tensor.copy_(torch.zeros(1000)),
            "view": lambda: tensor.view(10, 100)[3].zero_(),
            "out": lambda: torch.zeros(1000, out=tensor),
            "index": lambda: tensor.__setitem__(5, 7.0),
        }[how]()
    engine.open.set()
    capture.settle()
    with pytest.raises(SaveFailed, match=r"step 1: .*other.* changed between the step boundary and optimizer\.step"):
        capture.finish()


def test_the_failure_says_what_to_do_about_it() -> None:
    engine = Gate()
    box, capture = overlapped(engine, by_value)
    box["late"].add_(1)
    engine.open.set()
    with pytest.raises(SaveFailed) as failed:
        capture.finish()
    assert "overlap" in failed.value.next_step and "\n" not in failed.value.message


def test_a_tensor_changed_through_data_during_the_copy_is_noticed() -> None:
    """Averages swapped in for an evaluation are often written through ``.data``, which autograd does not count."""
    engine = Gate()
    box, capture = overlapped(engine, by_value)
    assert engine.begun.wait(30)
    box["other"].data.fill_(2)
    engine.open.set()
    capture.settle()
    with pytest.raises(SaveFailed):
        capture.finish()


def test_a_tensor_that_is_given_other_memory_keeps_the_bytes_of_the_boundary() -> None:
    """Swapping ``.data`` of two parameters exchanges their memory; the copy reads the memory that it began with."""
    engine = Gate()
    box, capture = overlapped(engine, by_value)
    box["other"].data = torch.full((1000,), 5.0)
    engine.open.set()
    assert set.union(*values(capture.finish()).values()) == {1.0}


def test_a_change_before_a_device_has_copied_is_noticed() -> None:
    """On an accelerator the copies are only queued when ``start`` returns."""
    engine = Device()
    box, capture = overlapped(engine, by_value)
    capture._copied.wait()
    box["other"].add_(1)
    capture.settle()
    assert engine.protected == 1
    with pytest.raises(SaveFailed):
        capture.finish()


def test_a_change_by_the_step_that_has_waited_is_no_failure() -> None:
    engine = Gate()
    box, capture = overlapped(engine, by_value)
    engine.open.set()
    capture.settle()
    box["other"].add_(1)
    assert set.union(*values(capture.finish()).values()) == {1.0}


def test_an_error_while_copying_is_told_and_does_not_hold_training_up() -> None:
    class Broken(HostCopier):
        calls = 0

        def start(self, copies: Sequence[Copy]) -> None:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("the device is gone")
            super().start(copies)

    _, capture = overlapped(Broken(), by_value)
    capture.settle()
    with pytest.raises(SaveFailed, match="step 1: the capture failed: the device is gone"):
        capture.finish()


def test_settling_and_finishing_twice_is_harmless() -> None:
    _, capture = overlapped(HostCopier(), by_value)
    for _ in range(2):
        capture.settle()
        assert set.union(*values(capture.finish()).values()) == {1.0}
