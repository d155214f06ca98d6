"""A training process seen from outside: started, watched through its log, frozen, killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from onward.errors import EXIT_FINDING, OnwardError


class DemoFailed(OnwardError):
    """The story could not be told to its end: a process failed, or the kill never hit a save."""

    code = "demo-failed"
    exit_code = EXIT_FINDING
    advice = "look into the logs beside the report"


@dataclass(frozen=True)
class Life:
    """What one training process did, from its start to its end; times are seconds since the epoch."""

    name: str
    started: float
    ended: float
    killed: bool
    losses: tuple[tuple[float, float], ...]
    resumed: dict[str, Any] | None


class Trainer:
    """The training script in a process group of its own, so that its loader's workers live and die with it.

    Attributes:
        name: What its files are called.
        log: Its JSON lines; the final state lies beside them.
        started: Seconds since the epoch; ``ended`` likewise, None while it runs.
    """

    def __init__(self, name: str, folder: Path, arguments: Sequence[str]) -> None:
        self.name = name
        self.log = folder / f"{name}.jsonl"
        self.started = time.time()
        self.ended: float | None = None
        self._lines: list[dict[str, Any]] = []
        self._read = 0
        self._errors = folder / f"{name}.err"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*training_command(), *arguments, "--out", str(self.log)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.kill()

    @property
    def running(self) -> bool:
        """Whether it has not ended; one that failed by itself raises instead.

        Raises:
            DemoFailed: It ended with an error.
        """
        code = self._process.poll()
        if code is None:
            return True
        if self.ended is None:
            self.ended = time.time()
            if code != 0:
                tail = "\n".join(self._errors.read_text(errors="replace").splitlines()[-12:])
                raise DemoFailed(f"the training process {self.name!r} ended with {code}:\n{tail}")
        return False

    def lines(self) -> list[dict[str, Any]]:
        """What it has put on record so far; a line it was killed in the middle of does not count."""
        if self.log.exists():
            with self.log.open("rb") as file:
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read += len(whole) + 1
                self._lines += [json.loads(line) for line in whole.splitlines()]
        return self._lines

    def losses(self) -> list[tuple[float, float]]:
        """Step and loss of every step done so far."""
        return [(line["step"], float.fromhex(line["loss"])) for line in self.lines() if "step" in line]

    def resumed(self) -> dict[str, Any] | None:
        """What ``resume()`` answered, once it has."""
        return next((line for line in self.lines() if line.get("event") == "resume"), None)

    def freeze(self) -> bool:
        """Stops trainer, workers and writer where they stand and waits for the trainer; False if it ended before."""
        self._signal(signal.SIGSTOP)
        # The answer is left in place (WNOWAIT): the exit code belongs to whoever asks for it later.
        state = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return state is not None and state.si_code == os.CLD_STOPPED

    def thaw(self) -> None:
        """Lets what was frozen go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to all of it, the writer process too, as when a node dies; works on what is frozen too."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self.ended = time.time()

    def _signal(self, number: signal.Signals) -> None:
        """To the trainer's group, and to that of its writer: alone, the writer would finish the save."""
        writer = (self.resumed() or {}).get("writer")
        for group in (self._process.pid, writer):
            if isinstance(group, int):
                with suppress(ProcessLookupError):
                    os.killpg(group, number)

    def life(self) -> Life:
        """What it did, now that it has ended."""
        killed = self._process.returncode == -signal.SIGKILL
        return Life(self.name, self.started, self.ended or time.time(), killed, tuple(self.losses()), self.resumed())


def training_command() -> list[str]:
    """How the training script is started, without its arguments."""
    return [sys.executable, "-m", "onward.demo.train"]
