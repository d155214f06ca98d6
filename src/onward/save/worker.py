"""The writer process: takes captured states from shared memory and saves them, without torch.

It is a session of its own and outlives the trainer: a save that was handed over is finished, whatever happens to
the process that trained. It ends when the trainer's side of the socket is closed and no save is left.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import sys
from contextlib import suppress

from onward.catalog.incarnation import Home
from onward.catalog.ledger import reattach
from onward.catalog.stores import open_home
from onward.errors import OnwardError
from onward.format.names import RunPlaces
from onward.save.pipeline import SaveSettings, save
from onward.save.wire import Done, Failed, Memory, Ready, Reply, Request, Save, Setup, receive, send

_NICENESS = 10
_LOOK_SECONDS = 0.5
_OOM_SCORE = "500"  # when memory runs out it is this process that goes, not the trainer


def main(fd: int, trainer: int) -> None:
    """Serves one trainer until it is gone.

    Args:
        fd: The inherited end of the socket.
        trainer: The trainer's process id.
    """
    with socket.socket(fileno=fd) as sock:
        _step_back()
        with suppress(EOFError, BrokenPipeError, ConnectionError):
            setup, _ = receive(sock, Request)
            assert isinstance(setup, Setup)
            try:
                home = _home(setup)
            except OnwardError as error:
                send(sock, Failed.of(error))
                return
            send(sock, Ready())
            _serve(sock, setup, home, trainer)


def _serve(sock: socket.socket, setup: Setup, home: Home, trainer: int) -> None:
    settings = SaveSettings(
        threads=setup.threads, verify_after_save="full" if setup.verify_after_save == "full" else "sizes"
    )
    memory = memoryview(b"")
    while True:
        # The socket alone does not tell that the trainer is gone: its forked loader workers hold copies of its end.
        while not select.select([sock], [], [], _LOOK_SECONDS)[0]:
            if os.getppid() != trainer:
                return
        message, fds = receive(sock, Request)
        if isinstance(message, Memory):
            memory = memoryview(mmap.mmap(fds[0], message.size, prot=mmap.PROT_READ | mmap.PROT_WRITE))
            os.close(fds[0])
            continue
        assert isinstance(message, Save)
        reply: Reply
        try:
            result = save(home, message.captured(memory, setup.threads), message.context(), settings)
            reply = Done(entry=result.entry, seconds=result.seconds, report=result.report)
        except Exception as error:  # told to the trainer, whatever it is; the next save is tried all the same
            reply = Failed.of(error)
        with suppress(BrokenPipeError, ConnectionError):  # nobody is left to hear it; the checkpoint stands
            send(sock, reply)


def _home(setup: Setup) -> Home:
    store, record = open_home(setup.store)
    places = RunPlaces(setup.run)
    ledger = reattach(store, places, epoch=setup.epoch, incarnation=setup.incarnation)
    return Home(store=store, tier=record.tier, ledger=ledger)


def _step_back() -> None:
    """Makes way for the trainer, and does not die of what is meant for it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(_OOM_SCORE)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
