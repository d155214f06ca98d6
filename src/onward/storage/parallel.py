"""Blocking work on several files at once.

Not ``concurrent.futures``: its pools refuse work as soon as the interpreter begins to end, before the threads that
it waits for have ended. A save in flight at the end of a program would be lost there.

Not ``threading.Thread`` either: without memory for a new thread's first steps, ``start`` waits for it for ever.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def each(function: Callable[[T], R], items: Iterable[T], *, threads: int) -> list[R]:
    """Calls ``function`` for each item in up to ``threads`` threads, this one among them; results come in order.

    The first error ends the work: calls under way are waited for, no further one is begun, and it is raised. A thread
    that the machine does not give is done without.
    """
    waiting = list(enumerate(items))[::-1]
    total = len(waiting)
    results: dict[int, R] = {}
    errors: list[BaseException] = []
    running = 0
    changed = threading.Condition()

    def work() -> None:
        nonlocal running
        while True:
            with changed:
                if errors or not waiting:
                    return
                number, item = waiting.pop()
                running += 1
            try:
                results[number] = function(item)
            except BaseException as error:  # raised below, in the thread that asked
                errors.append(error)
            finally:
                with changed:
                    running -= 1
                    changed.notify_all()

    for _ in range(min(threads, total) - 1):
        with suppress(RuntimeError):
            _thread.start_new_thread(work, ())
    work()
    with changed:
        changed.wait_for(lambda: running == 0)
    if errors:
        raise errors[0]
    return [results[number] for number in range(total)]
