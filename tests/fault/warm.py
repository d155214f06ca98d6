"""A process that has everything imported and forks at a word: a crash point then costs milliseconds.

It is a process of its own, without torch and without threads, so that its children are clean copies. Run as
``python -m fault.warm`` it reads requests from its standard input and answers on its standard output.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit status (negative: a signal), or None while it is stopped; and what it told."""

    status: int | None
    told: tuple[Any, ...]


def _send(to: BinaryIO, message: object) -> None:
    data = pickle.dumps(message)
    to.write(struct.pack("<I", len(data)) + data)
    to.flush()


def _receive(source: BinaryIO) -> Any:
    head = source.read(4)
    if len(head) < 4:
        raise EOFError
    return pickle.loads(source.read(struct.unpack("<I", head)[0]))


class Warm:
    """The other end: forks a child that calls a function of this package, and waits for it."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fault.warm"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout

    def run(self, job: Callable[..., object], *args: object) -> Ended:
        """Calls ``job(tell, *args)`` in a fork. Returns when it has ended, or is stopped."""
        _send(self._to, (job, args))
        return self._answer()

    def resume(self) -> Ended:
        """Lets the stopped child go on."""
        _send(self._to, None)
        return self._answer()

    def _answer(self) -> Ended:
        status, told = _receive(self._from)
        return Ended(status, told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._to.close()
        self._process.wait(timeout=30)


def _child(job: Callable[..., object], args: tuple[object, ...], pipe: int) -> None:
    status = 70
    try:

        def tell(what: object) -> None:
            # Out of the process at once: what was told before the crash stays told.
            data = pickle.dumps(what)
            os.write(pipe, struct.pack("<I", len(data)) + data)

        job(tell, *args)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _told(pipe: int) -> tuple[object, ...]:
    told: list[object] = []
    os.set_blocking(pipe, False)
    data = b""
    try:
        while part := os.read(pipe, 1 << 16):
            data += part
    except BlockingIOError:
        pass
    while data:
        size = struct.unpack("<I", data[:4])[0]
        told.append(pickle.loads(data[4 : 4 + size]))
        data = data[4 + size :]
    return tuple(told)


def _wait(child: int) -> int | None:
    _, status = os.waitpid(child, os.WUNTRACED)
    return None if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)


def serve() -> None:
    """Forks for every request, until the other end is closed."""
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a child prints must not be taken for an answer
    stopped: tuple[int, int] | None = None
    while True:
        try:
            request = _receive(source)
        except EOFError:
            if stopped:
                os.kill(stopped[0], signal.SIGKILL)
            return
        if request is None:
            assert stopped is not None
            child, reading = stopped
            os.kill(child, signal.SIGCONT)
        else:
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reading)
                _child(*request, writing)
            os.close(writing)
        status = _wait(child)
        stopped = (child, reading) if status is None else None
        _send(answers, (status, _told(reading)))
        if stopped is None:
            os.close(reading)


if __name__ == "__main__":
    import fault.lives  # noqa: F401  imported once, before anything is forked
    from fault.state import many_small_files

    many_small_files()
    serve()
