"""The writer: takes captured states one at a time and saves them while training goes on.

Here it is a thread of the trainer. One save at a time is in flight; a failed one stops nobody, is told once, and
leaves the writer ready for the next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from onward.errors import OnwardError, SaveFailed
from onward.save.captured import Captured
from onward.save.pipeline import SaveResult

log = logging.getLogger("onward")


@dataclass
class _Job:
    captured: Captured
    work: Callable[[], SaveResult]
    done: threading.Event
    result: SaveResult | None = None
    error: OnwardError | None = None


class ThreadWriter:
    """Runs saves in a thread; at most one is in flight."""

    def __init__(self) -> None:
        self._job: _Job | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._job is not None and not self._job.done.is_set()

    def submit(self, captured: Captured, work: Callable[[], SaveResult]) -> None:
        """Starts a save. The outcome of the one before must have been taken with ``collect``."""
        assert self._job is None, "the outcome of the save before was not collected"
        job = _Job(captured=captured, work=work, done=threading.Event())
        self._job = job
        # Not a daemon: the interpreter waits for a save in flight instead of cutting it off at exit.
        threading.Thread(target=_run, args=(job,), name=f"onward-save-{captured.step}", daemon=False).start()

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
        job.error = SaveFailed(f"the save of step {job.captured.step} failed: {type(error).__name__}: {error}")
        job.error.__cause__ = error
    finally:
        if job.error is not None:
            log.error("%s", job.error)  # also when nobody is left to collect it
        job.done.set()
