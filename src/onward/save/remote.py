"""The trainer's side of the writer process: starts it, hands captured states over, notices when it dies."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from onward.catalog.attempts import record_outcome
from onward.catalog.incarnation import Home
from onward.catalog.lease import process_start
from onward.catalog.ledger import Ledger, reattach
from onward.errors import OnwardError, SaveFailed, Superseded
from onward.format.names import parse_writing_folder
from onward.records import CheckpointEntry
from onward.save.captured import Captured, SaveContext
from onward.save.pipeline import SaveResult, SaveSettings
from onward.save.wire import NOT_A_MESSAGE, Done, Failed, Memory, Reply, Save, Setup, receive, send
from onward.storage.base import remove_tree

log = logging.getLogger("onward")

_START = "import sys; sys.path[:0] = [sys.argv[1]]; from onward.save.worker import main; main(*map(int, sys.argv[2:]))"
_START_SECONDS = 60.0
_END_SECONDS = 5.0
_DYING_SECONDS = 2.0
_KILL_SECONDS = 10.0


class WriterProcess:
    """One writer process, started again when it has died.

    Args:
        home: Where it writes; this process does not append while the writer lives.
        settings: How saves are written.
        memory: The current memory file and its size.
        on_start: Told the process's id and start time, for the lease.
    """

    def __init__(
        self,
        home: Home,
        settings: SaveSettings,
        memory: Callable[[], tuple[int, int, int]],
        on_start: Callable[[int, str], None] = lambda pid, started: None,
    ) -> None:
        self._home, self._settings, self._memory, self._on_start = home, settings, memory, on_start
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False
        self._mapped = -1
        self._seen = home.ledger.last  # entries up to here are known
        self._wanted = self._started = False
        self._doomed: int | None = None  # a process that was told to die and has not
        self._lock = threading.RLock()
        self.restarts = 0  # starts after a death, whether it was noticed by a save or while idle

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the process without waiting until it is ready.

        Raises:
            OSError: The machine gives no process or descriptor.
        """
        with self._lock:
            self._wanted = True
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                place, number = str(Path(__file__).parents[2]), str(theirs.fileno())
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _START, place, number, str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C and a terminal's hang-up are for the trainer
                )
            self._socket, self._ready, self._mapped, self._started = ours, False, -1, True
            send(
                ours,
                Setup(
                    store=self._home.store.url,
                    run=self._home.places.run,
                    tier=self._home.tier,
                    epoch=self._home.ledger.epoch,
                    incarnation=self._home.ledger.incarnation,
                    threads=self._settings.threads,
                    verify_after_save=self._settings.verify_after_save,
                ),
            )
            self._on_start(self._process.pid, process_start(self._process.pid) or "")

    def look_after(self) -> str | None:
        """Starts the process again if it has died while idle; says how it died."""
        if not self._lock.acquire(blocking=False):
            return None  # a save is in flight; whoever waits for it notices
        try:
            if not self._wanted or (self._process is not None and self._process.poll() is None):
                return None
            how = _how(self._process.returncode) if self._process is not None else "could not be started"
            try:
                self._restart()
            except (
                OSError,
                SaveFailed,
            ) as error:  # training goes on; the next look tries again
                return f"{how}, and could not be started again ({error})"
            return f"{how}; it was started again"
        finally:
            self._lock.release()

    def save(self, captured: Captured, context: SaveContext) -> SaveResult:
        """Hands a captured state over and waits for its end.

        Raises:
            SaveFailed: The process died or got stuck; it is started again for the next save.
            OnwardError: What the writer says.
        """
        with self._lock:
            try:
                sock = self._connected(captured.step)
                generation, fd, size = self._memory()
                if generation != self._mapped:
                    send(sock, Memory(size=size), (fd,))
                    self._mapped = generation
                send(sock, Save.of(captured, context))
                sock.settimeout(self._settings.deadline_seconds)
                reply, _ = receive(sock, Reply)
            except TimeoutError:
                return self._after_death(captured, f"did not answer for {self._settings.deadline_seconds:.0f} s")
            except (EOFError, OSError):
                return self._after_death(captured, None)
            except NOT_A_MESSAGE:
                return self._after_death(captured, "answered with what is no message")
            if isinstance(reply, Failed):
                raise reply.error()
            if not isinstance(reply, Done):
                return self._after_death(captured, "answered with what was not asked")
            self._seen = reply.entry.sequence
            return SaveResult(entry=reply.entry, seconds=reply.seconds, report=reply.report)

    def close(self) -> None:
        """Lets the process end; it finishes what it has."""
        with self._lock:
            self._wanted = False
            self._hang_up()
            process, self._process = self._process, None
            if process is not None:
                try:
                    process.wait(timeout=_END_SECONDS)
                except subprocess.TimeoutExpired:
                    log.warning("the writer process %d has not ended yet; it goes on by itself", process.pid)

    def end(self) -> None:
        """Ends the process for good, so that this process may append; the next save by process starts another."""
        with self._lock:
            self._wanted = self._started = False
            self._end_for_good()

    # --- inside ------------------------------------------------------------------------------------------------

    def _connected(self, step: int) -> socket.socket:
        if self._process is None or self._process.poll() is not None:
            self._restart()
        assert self._socket is not None
        if not self._ready:
            self._socket.settimeout(_START_SECONDS)
            reply, _ = receive(self._socket, Reply)
            if isinstance(reply, Failed):
                error = reply.error()
                self._end_for_good()  # it is about to end by itself; the next save must not meet it still ending
                # A store that is away for a moment is no reason to end training; being overtaken is.
                if isinstance(error, Superseded):
                    raise error
                raise SaveFailed(
                    f"the save of step {step} failed: the writer process could not set up: {error.message}",
                    next_step=error.next_step,
                )
            self._ready = True
        return self._socket

    def _restart(self) -> None:
        self.restarts += self._started
        self._end_for_good()
        self.start()

    def _hang_up(self) -> None:
        """Ends the connection, not only this end of it: forked loader workers hold copies of the descriptor."""
        held, self._socket = self._socket, None
        if held is not None:
            with suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)
            held.close()

    def _end_for_good(self) -> None:
        """Two processes must never append for one incarnation: the old one is dead before a new one starts."""
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)  # works on a stopped process too
            try:
                process.wait(timeout=0 if self._doomed == process.pid else _KILL_SECONDS)
            except subprocess.TimeoutExpired:
                self._doomed = process.pid
                raise SaveFailed(
                    f"the writer process {process.pid} cannot be ended: it waits inside the kernel",
                    next_step="look at the store's mount; saves go on once that process is gone",
                ) from None
            self._process = None
        self._hang_up()

    def _after_death(self, captured: Captured, stuck: str | None) -> SaveResult:
        process = self._process
        how = stuck or "could not be started"
        if process is not None and stuck is None:
            # The socket closes a little before the process has ended: how it ended by itself is worth waiting for.
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_DYING_SECONDS)
            how = _how(process.returncode)
        self._end_for_good()
        ledger = reattach(
            self._home.store,
            self._home.places,
            epoch=self._home.ledger.epoch,
            incarnation=self._home.ledger.incarnation,
        )
        entry = self._committed(ledger, captured.step)
        if entry is None:
            with suppress(OnwardError):
                clear_up(ledger, f"the writer process {how}")
        with suppress(OnwardError, OSError):
            self._restart()
        if entry is not None:
            log.warning("the writer process %s after it had committed step %d", how, captured.step)
            return SaveResult(entry=entry)
        raise SaveFailed(
            f"the save of step {captured.step} failed: the writer process {how}",
            next_step="it is started again, and the next trigger saves (the kernel's log tells of its OOM killer)",
        )

    def _committed(self, ledger: Ledger, step: int) -> CheckpointEntry | None:
        """What the dead writer had committed, if it came so far; asked of the ledger, not of the writer."""
        found: CheckpointEntry | None = None
        for number in range(self._seen + 1, ledger.last + 1):
            entry = ledger.entry(number)
            if isinstance(entry, CheckpointEntry) and entry.step == step:
                found = entry
        self._seen = ledger.last
        return found


def clear_up(ledger: Ledger, reason: str) -> None:
    """Tells the story of what a dead writer of this incarnation left, and removes it.

    Only what bears this incarnation's next number: nobody else can commit there, and its writer is dead.
    """
    store, places, number = ledger.store, ledger.places, ledger.next
    for item in store.list(places.checkpoints):
        writing = parse_writing_folder(item.name)
        if writing is not None and writing.sequence == number:
            record_outcome(
                store,
                places,
                attempt=writing.attempt,
                sequence=number,
                step=writing.step,
                outcome="failed",
                reason=reason,
            )
            remove_tree(store, places.checkpoint(item.name))


def _how(code: int | None) -> str:
    if code is None:
        return "closed its side"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with status {code}"
