"""A writer process and its trainer's side, around a store on disk; the process may be another program."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import safetensors

from onward.catalog.incarnation import Incarnation
from onward.catalog.lease import process_start
from onward.catalog.listing import read_catalog
from onward.save import remote
from onward.save.captured import Captured, staged
from onward.save.pipeline import SaveSettings
from onward.save.plan import plan
from onward.save.remote import WriterProcess
from onward.storage.base import Store
from support import PLACES, SHAPES, TIER, captured, content, context, key

REAL = remote._START
OPENING = "import sys, os, time, socket; sys.path.insert(0, sys.argv[1]); from onward.save import wire, worker\n"
SERVE = "s = socket.socket(fileno=int(sys.argv[2])); wire.receive(s, wire.Request); wire.send(s, wire.Ready())\n"
HEAR = "while not isinstance(wire.receive(s, wire.Request)[0], wire.Save): pass\n"


def laid_out(step: int) -> Captured:
    """The state of a step, laid out in memory as the plan of its layout says."""
    state = captured(step)
    planned = plan(state.layout.tensors, threads=2)
    memory, contents = bytearray(planned.arena_bytes), content(step)
    names = {key(name): name for name in contents}
    for piece in (piece for file in planned.files for piece in file.pieces):
        part = contents[names[piece.key]][piece.offset : piece.offset + piece.nbytes]
        memory[piece.start : piece.start + piece.nbytes] = part
    return replace(state, plan=planned, region=staged(memoryview(memory)))


def holds(store: Store, folder: str, step: int) -> bool:
    """Whether a checkpoint's tensors are those of a step, by stock safetensors: a digest vouches only for itself."""
    place = f"{PLACES.checkpoint(folder)}/rank-00000"
    found: dict[str, bytes] = {}
    for item in store.list(place):
        if item.name.endswith(".safetensors"):
            for name, entry in safetensors.deserialize(store.read(f"{place}/{item.name}", limit=1 << 30)):
                found[name] = bytes(entry["data"])
    return found == {key(name): content(step)[name] for name in SHAPES}


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
        state = laid_out(step)
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
