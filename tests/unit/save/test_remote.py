"""The trainer's side of the writer process: started, fed, looked after, ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from writerside import Fixture, Make, gone, holds

from onward.catalog.lease import process_start
from onward.errors import Busy
from onward.save import remote
from support import posix_store, start, verified


def test_saves_one_after_another_and_ends_when_it_is_closed(make: Make) -> None:
    fixture = make()
    pid = fixture.writer.pid
    assert pid and fixture.named == [(pid, process_start(pid))]
    for step in (10, 20):
        result = fixture.save(step)
        assert result.entry.step == step and result.report.ok
        assert verified(fixture.incarnation.store, result.entry.folder).ok
        assert holds(fixture.incarnation.store, result.entry.folder, step)
    assert fixture.steps() == [20, 10] and fixture.writer.pid == pid and fixture.writer.restarts == 0
    fixture.writer.close()
    assert gone(pid, 0) and fixture.writer.pid is None
    fixture.writer.close()


def test_memory_is_sent_once_for_each_generation(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    real = remote.send
    monkeypatch.setattr(remote, "send", lambda s, m, fds=(): sent.append(type(m).__name__) or real(s, m, fds))
    fixture = make()
    fixture.save(10)
    fixture.save(20)
    fixture.writer._memory = lambda: (2, fixture.fd, 1 << 16)
    fixture.save(30)
    assert sent == ["Setup", "Memory", "Save", "Save", "Memory", "Save"]


def test_a_death_while_idle_is_seen_by_looking_after_it(make: Make) -> None:
    fixture = make()
    fixture.save(10)
    assert fixture.writer.look_after() is None
    first = fixture.writer.pid
    assert first
    os.kill(first, signal.SIGKILL)
    while fixture.writer.pid == first and not gone(first, 0):
        time.sleep(0.01)
    assert fixture.writer.look_after() == "was ended by SIGKILL; it was started again"
    assert fixture.writer.pid != first and fixture.writer.restarts == 1
    assert fixture.named[-1] == (fixture.writer.pid, process_start(fixture.writer.pid or 0))
    fixture.save(20)
    assert fixture.steps() == [20, 10]


def test_a_death_that_nobody_has_seen_yet_costs_no_save(make: Make) -> None:
    fixture = make()
    assert fixture.writer.pid
    os.kill(fixture.writer.pid, signal.SIGKILL)
    assert gone(fixture.writer.pid)
    assert fixture.save(10).entry.step == 10


def test_looking_after_a_busy_writer_does_not_wait(make: Make) -> None:
    fixture = make()
    with fixture.writer._lock:
        looked: list[Any] = []
        thread = threading.Thread(target=lambda: looked.append(fixture.writer.look_after()))
        thread.start()
        thread.join(5)
    assert looked == [None]


def test_ending_it_on_purpose_is_no_death(make: Make) -> None:
    fixture = make()
    fixture.save(10)
    fixture.writer.end()
    assert fixture.writer.look_after() is None
    assert fixture.save(20).entry.step == 20
    assert fixture.writer.restarts == 0


def test_it_ends_at_close_though_a_forked_worker_holds_the_socket_too(make: Make) -> None:
    """Data loader workers are forked while the run is on, and hold every descriptor of the trainer."""
    fixture = make()
    fixture.save(10)
    pid = fixture.writer.pid
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        started = time.monotonic()
        fixture.writer.close()
        assert pid and gone(pid, 0)
        assert time.monotonic() - started < 4
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    "name",
    [
        "with space",
        "ünï",
        "100%41",
        "a#b",
        "a?b",
        "a%2Fb",
        "caf\udce9",
    ],
)
def test_a_store_in_a_folder_of_any_name_is_found_by_the_writer(tmp_path: Path, name: str) -> None:
    incarnation = start(posix_store(tmp_path / name))
    fixture = Fixture(incarnation)
    fixture.writer.start()
    try:
        assert fixture.save(10).entry.step == 10
    finally:
        fixture.writer.close()
        os.close(fixture.fd)
        incarnation.end()


def test_busy_is_not_what_it_says_to_its_own_incarnation(make: Make) -> None:
    """The lease is the trainer's; its writer does not ask for it, and a second job still finds it held."""
    fixture = make()
    fixture.save(10)
    with pytest.raises(Busy):
        start(fixture.incarnation.store)
