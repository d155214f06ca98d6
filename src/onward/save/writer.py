"""The save in flight, seen from the training loop: begun, waited for, its outcome taken once.

One save at a time is in flight. A thread of the trainer carries it; that thread either writes by itself or waits
for the writer process. A failed save stops nobody, is told once, and leaves the way free for the next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from onward.errors import OnwardError, SaveFailed
from onward.save.pipeline import SaveResult

log = logging.getLogger("onward")


@dataclass
class _Job:
    step: int
    work: Callable[[], SaveResult]
    done: threading.Event
    result: SaveResult | None = None
    error: OnwardError | None = None


class InFlight:
    """Runs saves in a thread; at most one is in flight."""

    def __init__(self) -> None:
        self._job: _Job | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is in flight, or its outcome was not taken yet."""
        return self._job is not None

    def submit(self, step: int, work: Callable[[], SaveResult]) -> None:
        """Starts a save. The outcome of the one before must have been taken with ``collect``."""
        assert self._job is None, "the outcome of the save before was not collected"
        job = _Job(step=step, work=work, done=threading.Event())
        self._job = job
        # Not a daemon: the interpreter waits for a save in flight instead of cutting it off at exit.
        threading.Thread(target=_run, args=(job,), name=f"onward-save-{step}", daemon=False).start()

    def put(self, result: SaveResult) -> None:
        """Leaves the outcome of a save that is over already, to be collected like any other."""
        self.submit(result.entry.step, lambda: result)

    def collect(self, *, wait: bool) -> SaveResult | OnwardError | None:
        """The outcome of the save in flight, once; None when there is none, or it is not over and ``wait`` is off."""
        job = self._job
        if job is None or not (wait or job.done.is_set()):
            return None
        job.done.wait()
        self._job = None
        return job.result if job.error is None else job.error


def _run(job: _Job) -> None:
    try:
        job.result = job.work()
    except OnwardError as error:
        job.error = error
    except BaseException as error:
        job.error = SaveFailed(f"the save of step {job.step} failed: {type(error).__name__}: {error}")
        job.error.__cause__ = error
    finally:
        if job.error is not None:
            log.error("%s", job.error)  # also when nobody is left to collect it
        job.done.set()
