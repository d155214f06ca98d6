"""A writer process and its trainer's side, around a store on disk; the process may be another program."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from onward.catalog.incarnation import Incarnation
from onward.catalog.lease import process_start
from onward.catalog.listing import read_catalog
from onward.save import remote
from onward.save.pipeline import SaveSettings
from onward.save.remote import WriterProcess
from support import PLACES, TIER, captured, context

REAL = remote._START
OPENING = "import sys, os, time, socket; sys.path.insert(0, sys.argv[1]); from onward.save import wire, worker\n"
SERVE = "s = socket.socket(fileno=int(sys.argv[2])); wire.receive(s, wire.Request); wire.send(s, wire.Ready())\n"
HEAR = "while not isinstance(wire.receive(s, wire.Request)[0], wire.Save): pass\n"


class Fixture:
    """A writer process, and the shared memory from which it is fed."""

    def __init__(self, incarnation: Incarnation, **settings: Any) -> None:
        self.incarnation = incarnation
        self.named: list[tuple[int, str]] = []
        self.fd = os.memfd_create("test")
        os.ftruncate(self.fd, 1 << 16)
        self.writer = WriterProcess(
            incarnation,
            SaveSettings(threads=2, **settings),
            memory=lambda: (1, self.fd, 1 << 16),
            on_start=lambda pid, started: self.named.append((pid, started)),
        )

    def save(self, step: int) -> Any:
        state = captured(step)
        for file in state.plan.files:
            os.pwrite(self.fd, state.region(file), file.start)
        return self.writer.save(state, context())

    def steps(self) -> list[int]:
        return [info.step for info in read_catalog(self.incarnation.store, PLACES, TIER).offered()]


def gone(pid: int, seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while process_start(pid) is not None and time.monotonic() < until:
        time.sleep(0.01)
    return process_start(pid) is None


Make = Callable[..., Fixture]
