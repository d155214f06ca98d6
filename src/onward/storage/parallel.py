"""Blocking work on several files at once.

Not ``concurrent.futures``: its pools refuse work as soon as the interpreter begins to end, before the threads that
it waits for have ended. A save in flight at the end of a program would be lost there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def each(function: Callable[[T], R], items: Iterable[T], *, threads: int, name: str) -> list[R]:
    """Calls ``function`` for each item in up to ``threads`` threads, and returns the results in order.

    The first error ends the work: calls under way are waited for, no further one is begun, and it is raised.
    """
    waiting = list(enumerate(items))[::-1]
    results: dict[int, R] = {}
    errors: list[BaseException] = []
    lock = threading.Lock()
    total = len(waiting)

    def work() -> None:
        while not errors:
            with lock:
                if not waiting:
                    return
                number, item = waiting.pop()
            try:
                results[number] = function(item)
            except BaseException as error:  # raised below, in the thread that asked
                errors.append(error)

    workers = [threading.Thread(target=work, name=f"{name}-{n}") for n in range(min(max(threads, 1), total))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(total)]
