"""What the child processes of the sweeps do; each reports through ``tell`` what it was promised."""

from __future__ import annotations

import fcntl
import os
import pickle
import resource
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from onward.catalog import incarnation as incarnation_module
from onward.catalog import stores
from onward.catalog.stores import init_store
from onward.errors import OnwardError, SaveFailed
from onward.save.pipeline import SaveSettings, save
from onward.save.plan import plan
from onward.storage.syscalls import Syscalls
from onward.testing.faults import CountingSyscalls, CrashAt, StopAt

from .harness import delete_step, make_store, posix, save_step, start
from .powercut_life import Life
from .state import DEFAULT_SMALLEST_FILE, context, tiny_tensors

POWER_LOST = 78
FS_IOC_SHUTDOWN, WITHOUT_FLUSHING_THE_LOG = 0x8004587D, 2

Tell = Callable[[object], None]
Make = Callable[[], Syscalls]
"""Makes the fault in the child: a lock cannot be sent to another process."""


def make(tell: Tell, root: Path, steps: tuple[int, ...]) -> None:
    """A store with a run that has committed these steps."""
    make_store(root, *steps)


def saves(tell: Tell, root: Path, calls: Make) -> None:
    """Takes over and saves step 20."""
    incarnation = start(posix(root, calls()))
    tell("took over")
    save_step(incarnation, 20)
    tell("acknowledged 20")
    incarnation.end()


def saves_twice(tell: Tell, root: Path, calls: Make) -> None:
    """Takes over and saves steps 20 and 30."""
    incarnation = start(posix(root, calls()))
    for step in (20, 30):
        save_step(incarnation, step)
        tell(f"acknowledged {step}")
    incarnation.end()


def deletes(tell: Tell, root: Path, calls: Make) -> None:
    """Takes over and deletes step 10."""
    incarnation = start(posix(root, calls()))
    delete_step(incarnation, 10)
    tell("deleted 10")
    incarnation.end()


def recovers(tell: Tell, root: Path, calls: Make) -> None:
    """Takes over, which clears up."""
    start(posix(root, calls())).end()
    tell("recovered")


def leaves(tell: Tell, root: Path, life: str, calls: Make) -> None:
    """Lives, but clears up nothing: what dead processes before it left lies there still."""
    incarnation_module.recover = lambda *args, **kwargs: []  # type: ignore[assignment]
    LIVES[life](tell, root, calls)


def inits(tell: Tell, root: Path, calls: Make) -> None:
    """Creates the store."""
    stores.open_store = lambda url, **kwargs: posix(root, calls())  # type: ignore[assignment]
    init_store(f"file://{root}")
    tell("initialised")


def saves_thousands(tell: Tell, root: Path, descriptors: int, count: int) -> None:
    """Saves a state of very many tiny tensors with few file descriptors, and tells how it was done."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    assert plan.__kwdefaults__ is not None
    plan.__kwdefaults__["smallest"] = DEFAULT_SMALLEST_FILE
    counting = CountingSyscalls()
    incarnation = start(posix(root, counting))
    began = time.monotonic()
    result = save(incarnation, tiny_tensors(count), context(), SaveSettings())
    tell(time.monotonic() - began)
    tell([call.name for call in counting.log])
    tell(result.report is not None and result.report.ok)


def modes(tell: Tell, root: Path, mode: str, umask: int) -> None:
    """Creates a store in a mode under a umask, and lives in it."""
    os.umask(umask)
    init_store(f"file://{root}", mode=mode)  # type: ignore[arg-type]
    incarnation = start(posix(root))
    for step in (10, 20):
        save_step(incarnation, step)
    delete_step(incarnation, 10)


def with_tmpdir(tell: Tell, root: Path, folder: Path) -> None:
    """Saves with another folder for temporary files."""
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    incarnation = start(posix(root))
    save_step(incarnation, 20)
    incarnation.end()


def is_stopped(tell: Tell, root: Path, what: str, n: int) -> None:
    """Does something, stopped with SIGSTOP before its n-th mutating call; tells how it ended, and what it then did."""
    counting = CountingSyscalls()
    outcome, epoch = "ended", 0
    try:
        incarnation = start(posix(root, StopAt(n, inner=counting)))
        epoch = incarnation.ledger.epoch
        if what == "deletes":
            delete_step(incarnation, 10)
            outcome = "deleted"
        for step in (20, 21):  # a save that fails because its attempt was rolled back is tried once more
            try:
                save_step(incarnation, step)
            except SaveFailed:
                continue
            outcome = "acknowledged"
            break
        incarnation.end()
    except OnwardError as error:
        outcome = type(error).__name__
    tell((outcome, epoch, [(call.name, call.path) for call in counting.log[n - 1 :]]))


LIVES: dict[str, Callable[[Tell, Path, Make], None]] = {
    job.__name__: job for job in (saves, saves_twice, deletes, recovers)
}


def loses_power(tell: Tell, root: Path, n: int, log: Path, sync: bool) -> None:
    """Lives a whole life on a mounted filesystem, and cuts its power before the n-th mutating call (0: at the end)."""
    life = Life(root, lambda _: not sync)

    def cut() -> NoReturn:
        # The journal is not flushed either: what was not synced is gone, as with the plug pulled.
        fd = os.open(root, os.O_RDONLY)
        fcntl.ioctl(fd, FS_IOC_SHUTDOWN, struct.pack("I", WITHOUT_FLUSHING_THE_LOG))
        log.write_bytes(pickle.dumps(life.log))
        os._exit(POWER_LOST)

    class PowerCut(CrashAt):
        def end(self) -> NoReturn:
            cut()

    life.recorder.inner = PowerCut(n)
    life.live()
    cut()
