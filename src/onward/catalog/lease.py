"""The lease: tells a second live job "busy" instead of fencing the first. For people; safety rests on the ledger.

On the owner's own machine its process is looked at: same pid, same start time, same boot. From another machine the
owner is dead only when its counter has stood still for the lease time on the observer's own monotonic clock, so
that neither a stepped clock nor a wrong one decides.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import msgspec

from onward.catalog.stamp import host, now, token
from onward.errors import Busy, OnwardError, StorageError
from onward.format.codec import SMALL_LIMIT, decode, encode
from onward.format.names import RunPlaces
from onward.records import FORMAT, LeaseRecord
from onward.storage.base import NotFound, Store

_BEATS_PER_LEASE = 5
_ORPHAN = 60.0
_LONGEST_WAIT = 600.0  # a garbled lease must not hold the run off for ever


def boot_id() -> str:
    """This boot of this machine; a pid means nothing beyond it."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return ""


def process_start(pid: int) -> str | None:
    """When a process started, in kernel ticks since boot; None when there is no such process, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return "unknown"
    return None if fields[0] in ("Z", "X") else fields[19]


def owner_state(lease: LeaseRecord) -> Literal["alive", "dead", "unknown"]:
    """Whether a lease's owner lives, as far as this machine can see without waiting."""
    if lease.host != host():
        return "unknown"
    if lease.boot != boot_id():
        return "dead"
    started = process_start(lease.pid)
    if started == "unknown":
        return "unknown"
    return "alive" if started is not None and started == lease.pid_started else "dead"


def writer_lives(lease: LeaseRecord) -> bool:
    """Whether the owner's writer process is at work on this machine; it may outlive the owner."""
    here = lease.host == host() and lease.boot == boot_id()
    return here and lease.writer_pid > 0 and process_start(lease.writer_pid) == lease.writer_started


class Lease:
    """A held lease, whose counter a thread advances until ``release``."""

    def __init__(self, store: Store, places: RunPlaces, record: LeaseRecord) -> None:
        self._store, self._places, self._record = store, places, record
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="onward-lease", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(self._record.lease_seconds / _BEATS_PER_LEASE):
            # A store that is away for a moment must not end training; the ledger guards what matters.
            with self._lock, suppress(StorageError):
                self._record = msgspec.structs.replace(self._record, counter=self._record.counter + 1)
                current = read_lease(self._store, self._places)
                if current is not None and current.token != self._record.token:
                    return  # taken over: the new owner's lease is not to be written over
                self._store.replace(self._places.lease, encode(self._record))

    def name_writer(self, pid: int, started: str) -> None:
        """Says which process writes for this incarnation: it may outlive the owner, and is then waited for."""
        with self._lock:
            self._record = msgspec.structs.replace(self._record, writer_pid=pid, writer_started=started)
            with suppress(StorageError):
                self._store.replace(self._places.lease, encode(self._record))

    def release(self) -> None:
        """Gives the lease back, if it is still this one's."""
        self._stop.set()
        self._thread.join(timeout=self._record.lease_seconds)
        with suppress(OnwardError):
            current = read_lease(self._store, self._places)
            if current is not None and current.token == self._record.token:
                self._store.remove(self._places.lease)


def read_lease(store: Store, places: RunPlaces) -> LeaseRecord | None:
    """The lease as it stands; None when there is none, or it cannot be read (an empty one holds nobody off)."""
    try:
        return decode(store.read(places.lease, limit=SMALL_LIMIT), LeaseRecord, places.lease)
    except NotFound:
        return None
    except StorageError:
        raise
    except OnwardError:
        return None


def acquire(
    store: Store,
    places: RunPlaces,
    *,
    lease_seconds: float,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Lease:
    """Takes the lease, or says who holds it.

    Args:
        store: The home.
        places: The run.
        lease_seconds: After how long without a beat an owner on another machine counts as dead.
        say: Told when a dead owner's lease is taken over, or when waiting begins.
        sleep: For tests.
        clock: For tests; monotonic seconds.

    Raises:
        Busy: The owner lives.
    """
    held = read_lease(store, places)
    if held is not None:
        _require_dead(store, places, held, say=say, sleep=sleep, clock=clock)
        await_orphan(held, say=say, sleep=sleep, clock=clock)
        say(f"taking over the lease of {held.host}, pid {held.pid} (since {held.since}): its owner is dead")
    pid = os.getpid()
    record = LeaseRecord(
        format=FORMAT,
        run=places.run,
        token=token(),
        host=host(),
        boot=boot_id(),
        pid=pid,
        pid_started=process_start(pid) or "",
        counter=0,
        lease_seconds=lease_seconds,
        since=now(),
    )
    store.replace(places.lease, encode(record))
    return Lease(store, places, record)


def await_orphan(
    held: LeaseRecord, *, say: Callable[[str], None], sleep: Callable[[float], None], clock: Callable[[], float]
) -> None:
    """Waits a while for a dead owner's writer, which may be about to commit; after that it is fenced off."""
    since, told = clock(), False
    while writer_lives(held) and clock() - since < min(held.lease_seconds, _ORPHAN):
        if not told:
            say(f"the last job is dead, but its writer process {held.writer_pid} is finishing a save; waiting for it")
            told = True
        sleep(0.02)


def _require_dead(
    store: Store,
    places: RunPlaces,
    held: LeaseRecord,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> None:
    owner = f"{held.host}, pid {held.pid}, since {held.since}"
    state = owner_state(held)
    if state == "dead":
        return
    if state == "alive":
        raise Busy(f"the run {places.run!r} is in use by {owner}")
    wait = min(max(held.lease_seconds, 0.0), _LONGEST_WAIT)
    say(f"the run {places.run!r} was last used on {owner}; waiting up to {wait:.0f} s for a sign of life")
    since, seen = clock(), (held.token, held.counter)
    while clock() - since < wait:
        sleep(min(1.0, max(wait / 20, 0.01)))
        current = read_lease(store, places)
        if current is None:
            return
        if (current.token, current.counter) != seen:
            raise Busy(f"the run {places.run!r} is in use by {current.host}, pid {current.pid}, since {current.since}")
