"""Trainers that are imitated: one that waits for its accelerator, and one that keeps the interpreter busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from bench.state import Trainee


def train(
    trainee: Trainee,
    steps: int,
    step_seconds: float,
    after: Callable[[int], Any] = lambda step: None,
    update: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> float:
    """Wall seconds of so many steps of a trainer that is bound by its accelerator.

    The host sleeps while the accelerator would compute; then the optimizer steps. Its gradients are absent, so the
    real AdamW runs its hooks and changes nothing; one small parameter is changed in its place.

    Args:
        trainee: What is trained.
        steps: How many steps.
        step_seconds: How long a step keeps the accelerator busy.
        after: Called with each step's number when it is complete.
        update: What is held while the state changes.
    """
    started = time.perf_counter()
    for step in range(steps):
        time.sleep(step_seconds)
        with update():
            trainee.optimizer.step()
            trainee.touch()
        after(step)
    return time.perf_counter() - started


def due(steps: int, saves: int) -> set[int]:
    """The steps after which a run saves: evenly spread, the last one far enough from the end to be copied in it."""
    every = max(steps // saves, 1)
    return {every // 2 + every * number for number in range(saves)}


class BusyTrainer:
    """A trainer that computes in Python and never lets go of the interpreter by itself.

    Args:
        seconds: How long one of its steps shall take on this machine, about.
    """

    def __init__(self, seconds: float = 0.005) -> None:
        self._count = 10_000
        self._count = max(int(self._count * seconds / min(self._timed() for _ in range(20))), 1)

    def step(self) -> int:
        """One step: the same amount of work each time."""
        total = 0
        for number in range(self._count):
            total = (total * 31 + number) & 0xFFFF
        return total

    def seconds_per_step(self, going: Callable[[], bool], limit: float) -> tuple[float, int]:
        """Mean seconds of a step while something goes on, no longer than ``limit``; and the number of steps."""
        started, steps = time.perf_counter(), 0
        while steps == 0 or (going() and time.perf_counter() - started < limit):
            self.step()
            steps += 1
        return (time.perf_counter() - started) / steps, steps

    def _timed(self) -> float:
        started = time.thread_time()  # what others do on the machine must not make the step a smaller one
        self.step()
        return time.thread_time() - started
