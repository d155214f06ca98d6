"""The writer process: what it is, and what happens to a run when it dies, stops or gets lost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import onward
from onward.catalog.lease import process_start, read_lease
from onward.catalog.stores import open_home

from .driving import Run, handing
from .writers import (
    PLACES,
    QUIET,
    State,
    check_ledger,
    gone,
    load,
    offered,
    root,
    running,
    standing_still,
    stop,
    wait_for,
    writing,
)

__all__ = ["handing"]
LARGE = 24.0
"""Mebibytes that take long enough to be hashed and written for a phase to be hit."""


@pytest.fixture
def url(fast_path: Path) -> str:
    onward.init_store(f"file://{fast_path}/store")
    return f"file://{fast_path}/store"


@pytest.fixture
def run(url: str) -> Iterator[Run]:
    state = State()
    with running(url, every=1, save=QUIET, state=state.box) as (ckpt, _):
        yield Run(ckpt, state)


@pytest.fixture
def large(url: str) -> Iterator[Run]:
    state = State(LARGE)
    with running(url, every=1, save=onward.SaveSettings(threads=1), state=state.box) as (ckpt, _):
        run = Run(ckpt, state)
        run.step(wait=True)
        yield run


# --- what it is -------------------------------------------------------------------------------------------------


def test_it_has_not_imported_torch(run: Run) -> None:
    """Neither before a save nor after one; this process, which has, is the control."""
    for _ in range(2):
        run.step(wait=True)
        maps = Path(f"/proc/{run.pid}/maps").read_text()
        assert "libtorch" not in maps and "/torch/" not in maps
    assert "libtorch" in Path("/proc/self/maps").read_text()
    private = int(Path(f"/proc/{run.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    print(f"\nwriter: {private / 1e6:.0f} MB resident, torch not loaded")


def test_it_stands_back_behind_the_trainer_in_a_session_of_its_own(run: Run) -> None:
    run.step(wait=True)
    said = subprocess.check_output(["ps", "-o", "pid=,sid=,pgid=,ni=,ppid=", "-p", str(run.pid)], text=True).split()
    pid, session, group, niceness, parent = map(int, said)
    assert pid == session == group == run.pid != os.getsid(0)
    assert niceness == min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19) and parent == os.getpid()
    assert (
        int(Path(f"/proc/{run.pid}/oom_score_adj").read_text())
        == 500
        > int(Path("/proc/self/oom_score_adj").read_text())
    )


def test_it_holds_nothing_of_the_trainer_but_its_socket_and_the_memory(run: Run) -> None:
    secret = os.open("/dev/zero", os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        run.step(wait=True)
        os.kill(run.pid, signal.SIGKILL)
        wait_for(lambda: gone(run.pid), "it dies")
        run.step(wait=True)
        held = {os.readlink(f"/proc/{run.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{run.pid}/fd")}
        assert "/dev/zero" not in held and Path(f"/proc/{run.pid}/fd/0").readlink() == Path("/dev/null")
    finally:
        os.close(secret)


@pytest.mark.parametrize(
    "names",
    [
        ("SIGINT", "SIGTERM", "SIGHUP", "SIGXFSZ", "SIGPIPE"),
        ("SIGUSR1", "SIGUSR2"),
    ],
)
def test_signals_that_are_meant_for_the_trainer_do_not_end_it(run: Run, names: tuple[str, ...]) -> None:
    """A scheduler's warning goes to every process of the job."""
    run.step(wait=True)
    pid = run.pid
    for name in names:
        os.kill(pid, getattr(signal, name))
    time.sleep(0.05)
    run.step(wait=True)
    assert run.pid == pid and not gone(pid)


def test_the_lease_names_it_and_the_one_that_takes_its_place(run: Run, url: str) -> None:
    store, _ = open_home(url)
    seen: set[int] = set()
    for _ in range(2):
        run.step(wait=True)
        seen.add(run.pid)
        lease = read_lease(store, PLACES)
        assert lease and (lease.writer_pid, lease.writer_started) == (run.pid, process_start(run.pid))
        os.kill(run.pid, signal.SIGKILL)
        wait_for(lambda: gone(run.pid), "it dies")
    assert len(seen) == 2


# --- its death --------------------------------------------------------------------------------------------------


def test_a_death_while_idle_is_reported_at_the_next_step_and_costs_no_save(
    run: Run, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    run.step(wait=True)
    first = run.pid
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: gone(first), "it dies")
    run.step(wait=True)
    assert "was ended by SIGKILL" in caplog.text and run.pid != first
    assert check_ledger(url) == [2, 1]
    run.ckpt.close()
    assert load(url) == 2


PHASES = ["before it reads", "in the middle of writing", "right after the commit"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_death_in_a_save_is_told_and_no_later_save_suffers(
    large: Run, url: str, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = large.pid
    if phase == "before it reads":
        large.step_into(first)
    else:
        large.step()
    if phase == "in the middle of writing":
        wait_for(lambda: writing(url), "the save begins")
        stop(first)
        assert writing(url) and offered(url) == [1], "the phase was hit"
    elif phase == "right after the commit":
        wait_for(lambda: (root(url) / "runs/r/ledger/000000003.json").exists(), "the commit")
        stop(first)
    os.kill(first, signal.SIGKILL)
    if phase == "right after the commit":
        large.ckpt.wait()
        assert offered(url) == [2, 1] and "after it had committed step 2" in caplog.text
    else:
        with pytest.warns(UserWarning, match="step 2 .*SIGKILL"), pytest.raises(onward.errors.SaveFailed):
            large.ckpt.wait()
        assert offered(url) == [1] and not writing(url)
    for _ in range(2):
        large.step(wait=True)
    assert check_ledger(url)[:2] == [4, 3] and large.pid != first
    large.ckpt.close()
    assert load(url, LARGE) == 4


def test_a_writer_that_stands_still_is_given_up_after_the_deadline(url: str) -> None:
    state = State()
    settings = replace(QUIET, deadline_seconds=1.0, if_busy="skip")
    with running(url, every=1, save=settings, state=state.box) as (ckpt, _):
        run = Run(ckpt, state)
        run.step(wait=True)
        first = run.pid
        stop(first)
        longest, skipped = 0.0, 0
        with pytest.warns(UserWarning, match="step 2 .*did not answer for 1 s"):
            until = time.monotonic() + 20
            while ckpt.writer_pid in (first, None) or skipped == 0:
                started = time.monotonic()
                skipped += not run.step().saved
                longest = max(longest, time.monotonic() - started)
                time.sleep(0.02)
                assert time.monotonic() < until
            wait_for(lambda: run.step(wait=True).saved, "saves go on")
        assert longest < 0.7, "no step waited for a writer that stands still"
        assert gone(first) and ckpt.skipped_saves >= skipped > 0
    assert check_ledger(url)[0] == run.at and load(url) == run.at
    print(f"\nstuck writer: given up after 1 s, {skipped} saves skipped meanwhile, longest step {longest * 1e3:.0f} ms")


def test_a_writer_that_stood_still_for_a_while_is_forgiven(run: Run, url: str) -> None:
    run.step(wait=True)
    first = run.pid
    with standing_still(first):
        run.step()
        time.sleep(0.3)
    run.ckpt.wait()
    assert run.pid == first and offered(url) == [2, 1]


def test_deaths_in_a_row_end_training_only_when_the_settings_say_so(run: Run, url: str) -> None:
    """T47, with a writer that is killed each time: two are tolerated, a success in between begins the count anew."""
    for killed, step in ((True, 1), (True, 2), (False, 3), (True, 4), (True, 5)):
        if not killed:
            run.step(wait=True)
            continue
        run.step_into(run.pid)
        os.kill(run.pid, signal.SIGKILL)
        with pytest.warns(UserWarning, match=f"step {step} "):
            run.ckpt._collect(wait=True)  # as the next step does, however long the save takes to fail
    run.step_into(run.pid)
    os.kill(run.pid, signal.SIGKILL)
    with pytest.raises(onward.errors.SaveFailed, match="step 6 "):
        run.ckpt.wait()
    run.step(wait=True)
    assert check_ledger(url) == [7, 3]


def test_how_often_it_was_started_again_can_be_seen(run: Run) -> None:
    """Like the count of skipped saves: somebody watches a number, not a log."""
    run.step(wait=True)
    for _ in range(3):
        os.kill(run.pid, signal.SIGKILL)
        wait_for(lambda: gone(run.pid), "it dies")
        run.step(wait=True)
    ckpt: Any = run.ckpt
    assert ckpt.writer_restarts == 3
