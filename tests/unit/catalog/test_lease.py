"""The lease: a second live job is told 'busy', a dead owner's lease is taken over, nobody waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from onward.catalog.incarnation import make_run
from onward.catalog.lease import Lease, acquire, boot_id, owner_state, process_start, read_lease
from onward.errors import Busy
from onward.format.codec import encode
from onward.records import LeaseRecord
from onward.storage.memory import MemoryStore
from support import PLACES, RUN, dead_lease


@pytest.fixture
def home(store: MemoryStore) -> MemoryStore:
    make_run(store, PLACES)
    return store


class Time:
    """A clock that only moves when somebody sleeps, and what happens meanwhile."""

    def __init__(self, meanwhile: Callable[[float], None] = lambda now: None) -> None:
        self.now, self.meanwhile, self.naps = 0.0, meanwhile, 0

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.naps += 1
        self.meanwhile(self.now)

    def clock(self) -> float:
        return self.now


@pytest.fixture
def take(home: MemoryStore) -> Iterator[Callable[..., Lease]]:
    held: list[Lease] = []

    def take(at: Time | None = None, said: list[str] | None = None) -> Lease:
        at = at or Time()
        say = (said if said is not None else []).append
        held.append(acquire(home, PLACES, lease_seconds=30.0, say=say, sleep=at.sleep, clock=at.clock))
        return held[-1]

    yield take
    for lease in held:
        lease.release()


def leave(home: MemoryStore, **changes: object) -> LeaseRecord:
    record = dead_lease(**changes)
    home.replace(PLACES.lease, encode(record))
    return record


def test_a_lease_is_taken_and_given_back(home: MemoryStore, take: Callable[..., Lease]) -> None:
    lease = take()
    record = read_lease(home, PLACES)
    assert record is not None
    assert (record.pid, record.run, record.boot) == (os.getpid(), RUN, boot_id())
    assert owner_state(record) == "alive"
    lease.release()
    assert read_lease(home, PLACES) is None


def test_a_live_owner_on_this_machine_is_not_disturbed(home: MemoryStore, take: Callable[..., Lease]) -> None:
    """T154, last case: refused at once, naming who holds it."""
    take()
    with pytest.raises(Busy, match=rf"pid {os.getpid()}"):
        take()
    assert read_lease(home, PLACES) is not None


def test_a_dead_owners_lease_is_taken_over_at_once_and_said(home: MemoryStore, take: Callable[..., Lease]) -> None:
    """T154: a pid that is not there any more."""
    leave(home)
    at, said = Time(), list[str]()
    take(at, said)
    assert at.naps == 0
    assert "its owner is dead" in said[-1]


def test_a_pid_that_another_program_has_now_is_no_owner(home: MemoryStore, take: Callable[..., Lease]) -> None:
    """T154: the pid lives, but its process started at another time."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        started = process_start(other.pid)
        leave(home, pid=other.pid, pid_started=started)
        with pytest.raises(Busy):
            take()
        leave(home, pid=other.pid, pid_started=str(int(started or "0") - 1))
        take()
        other.kill()


def test_a_process_that_ended_and_was_not_waited_for_is_dead(home: MemoryStore, take: Callable[..., Lease]) -> None:
    """A zombie keeps its pid and its start time; it will never save again."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    started = process_start(child.pid)
    deadline = time.monotonic() + 20
    while process_start(child.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    leave(home, pid=child.pid, pid_started=started)
    take()
    child.wait()


def test_a_pid_of_before_the_reboot_is_dead(home: MemoryStore, take: Callable[..., Lease]) -> None:
    leave(home, pid=os.getpid(), pid_started=process_start(os.getpid()), boot="another-boot")
    take()


@pytest.mark.parametrize("content", [b"", b"\0" * 300, b"{", b"not a lease", b'{"format":9}\n', b"[]"])
def test_a_lease_that_cannot_be_read_holds_nobody_off(
    home: MemoryStore, take: Callable[..., Lease], content: bytes
) -> None:
    """T154: an empty file, as an interrupted writer of another program leaves it."""
    home.replace(PLACES.lease, content)
    at = Time()
    take(at)
    assert at.naps == 0


def test_an_owner_elsewhere_is_dead_when_its_counter_stands_still(
    home: MemoryStore, take: Callable[..., Lease]
) -> None:
    """T154: by the observer's own monotonic clock; what the other machine says of the time plays no part."""
    leave(home, host="elsewhere", lease_seconds=30.0, since="2999-01-01T00:00:00Z")
    at, said = Time(), list[str]()
    take(at, said)
    assert at.now >= 30.0
    assert at.now < 35.0
    assert "waiting up to 30 s" in said[0]


def test_an_owner_elsewhere_that_beats_is_alive(home: MemoryStore, take: Callable[..., Lease]) -> None:
    def beat(now: float) -> None:
        if now > 6.0:
            leave(home, host="elsewhere", lease_seconds=30.0, counter=4)

    leave(home, host="elsewhere", lease_seconds=30.0)
    at = Time(beat)
    with pytest.raises(Busy, match="elsewhere"):
        take(at)
    assert at.now < 10.0


def test_another_job_that_takes_the_lease_meanwhile_is_seen(home: MemoryStore, take: Callable[..., Lease]) -> None:
    leave(home, host="elsewhere", lease_seconds=30.0)
    with pytest.raises(Busy, match="third"):
        take(Time(lambda now: None if now < 3 else leave(home, host="third", token="0" * 32) and None))


def test_a_lease_that_is_given_back_meanwhile_ends_the_wait(home: MemoryStore, take: Callable[..., Lease]) -> None:
    leave(home, host="elsewhere", lease_seconds=30.0)
    at = Time(lambda now: home.remove(PLACES.lease) if now > 3 else None)
    take(at)
    assert at.now < 6.0


@pytest.mark.parametrize("seconds", [1e9, 1e308, -5.0, 0.0])
def test_a_garbled_lease_time_does_not_hold_a_start_off_for_ever(
    home: MemoryStore, take: Callable[..., Lease], seconds: float
) -> None:
    leave(home, host="elsewhere", lease_seconds=seconds)
    at = Time()
    take(at)
    assert at.now <= 700


def test_a_beat_advances_the_counter_and_never_writes_over_another_owner(home: MemoryStore) -> None:
    lease = acquire(home, PLACES, lease_seconds=0.1, say=lambda text: None)
    deadline = time.monotonic() + 20
    while (found := read_lease(home, PLACES)) is not None and found.counter < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    other = leave(home, token="e" * 32)
    time.sleep(0.1)
    assert read_lease(home, PLACES) == other
    lease.release()
    assert read_lease(home, PLACES) == other, "what is another's is not given back"
