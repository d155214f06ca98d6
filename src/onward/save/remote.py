"""The trainer's side of the writer process: starts it, hands captured states over, notices when it dies."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import onward
from onward.catalog.incarnation import Home
from onward.catalog.lease import process_start
from onward.catalog.ledger import reattach
from onward.errors import OnwardError, SaveFailed
from onward.records import CheckpointEntry
from onward.save.captured import Captured, SaveContext
from onward.save.pipeline import SaveResult, SaveSettings
from onward.save.wire import Done, Failed, Memory, Ready, Reply, Save, Setup, receive, send

log = logging.getLogger("onward")

_START = "import sys; sys.path.insert(0, sys.argv[1]); from onward.save.worker import main; main(int(sys.argv[2]))"
_START_SECONDS = 60.0
_END_SECONDS = 5.0


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
        self._lock = threading.RLock()
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the process without waiting until it is ready."""
        with self._lock:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _START, str(Path(onward.__file__).parents[1]), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C and a terminal's hang-up are for the trainer
                )
            self._socket, self._ready, self._mapped = ours, False, -1
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
            if self._process is None or self._process.poll() is None:
                return None
            how = _how(self._process.returncode)
            self._restart()
            return how
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
                sock = self._connected()
                generation, fd, size = self._memory()
                if generation != self._mapped:
                    send(sock, Memory(size=size), (fd,))
                    self._mapped = generation
                send(sock, Save.of(captured, context))
                sock.settimeout(self._settings.deadline_seconds)
                reply, _ = receive(sock, Reply)
            except TimeoutError:
                return self._after_death(captured, f"did not answer for {self._settings.deadline_seconds} s")
            except (EOFError, OSError):
                return self._after_death(captured, None)
            if isinstance(reply, Failed):
                raise reply.error()
            assert isinstance(reply, Done)
            self._seen = reply.entry.sequence
            return SaveResult(entry=reply.entry, seconds=reply.seconds, report=reply.report)

    def close(self) -> None:
        """Lets the process end; it finishes what it has."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            process, self._process, self._socket = self._process, None, None
            if process is not None:
                try:
                    process.wait(timeout=_END_SECONDS)
                except subprocess.TimeoutExpired:
                    log.warning("the writer process %d has not ended yet; it goes on by itself", process.pid)

    def end(self) -> None:
        """Ends the process for good, so that this process may append; the next save starts another."""
        with self._lock:
            if self._process is not None:
                self._end_for_good()

    # --- inside ------------------------------------------------------------------------------------------------

    def _connected(self) -> socket.socket:
        if self._process is None or self._process.poll() is not None:
            self._restart()
        assert self._socket is not None
        if not self._ready:
            self._socket.settimeout(_START_SECONDS)
            reply, _ = receive(self._socket, Reply)
            if isinstance(reply, Failed):
                raise reply.error()
            assert isinstance(reply, Ready)
            self._ready = True
        return self._socket

    def _restart(self) -> None:
        if self._process is not None:
            self._end_for_good()
            self.restarts += 1
        self.start()

    def _end_for_good(self) -> None:
        """Two processes must never append for one incarnation: the old one is dead before a new one starts."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)  # works on a stopped process too
        self._process.wait()
        if self._socket is not None:
            self._socket.close()

    def _after_death(self, captured: Captured, stuck: str | None) -> SaveResult:
        assert self._process is not None
        self._end_for_good()
        how = stuck or _how(self._process.returncode)
        entry = self._committed(captured)
        with suppress(OnwardError, OSError):
            self._restart()
        if entry is not None:
            log.warning("the writer process %s after it had committed step %d", how, captured.step)
            return SaveResult(entry=entry)
        raise SaveFailed(
            f"the save of step {captured.step} failed: the writer process {how}",
            next_step="it was started again; the next trigger saves (look for the kernel's OOM killer in the log)",
        )

    def _committed(self, captured: Captured) -> CheckpointEntry | None:
        """What the dead writer had committed, if it came so far; asked of the ledger, not of the writer."""
        ledger = reattach(
            self._home.store,
            self._home.places,
            epoch=self._home.ledger.epoch,
            incarnation=self._home.ledger.incarnation,
        )
        found: CheckpointEntry | None = None
        for number in range(self._seen + 1, ledger.last + 1):
            entry = ledger.entry(number)
            if isinstance(entry, CheckpointEntry) and entry.step == captured.step:
                found = entry
        return found


def _how(code: int | None) -> str:
    if code is None:
        return "closed its side"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with status {code}"
