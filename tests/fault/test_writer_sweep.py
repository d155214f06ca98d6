"""The shipped writer process ends at its n-th mutating call: the trainer is told, and what loads is old or new.

``test_crash_sweep.py`` ends the code of a save at every call in quickly forked processes; here it is the real process
of a trainer, started as always, fed through shared memory, and started again by the trainer's side.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.catalog.incarnation import Incarnation
from onward.catalog.listing import read_catalog
from onward.errors import SaveFailed
from onward.save import remote
from onward.save.pipeline import SaveSettings
from onward.save.plan import DEFAULT_THREADS
from onward.save.remote import WriterProcess

from .conftest import Templates
from .counting import PATH, calls_of, count_changes, strace
from .harness import PLACES, check_second_recovery, check_stories, copy_store, posix, start, take_over
from .state import captured, context

REAL = remote._START
MEMORY = 1 << 18
SMALL = "from fault.state import many_small_files; many_small_files()\n"
CRASHING = """
from functools import partial
from onward.storage import posix
from onward.testing.faults import CrashAt
posix.Syscalls = partial(CrashAt, {n}, status=77)
"""


class Trainer:
    """The trainer's side of a writer process whose first process runs ``program`` before it serves."""

    def __init__(self, incarnation: Incarnation, program: str) -> None:
        self.incarnation = incarnation
        self.fd = os.memfd_create("test")
        os.ftruncate(self.fd, MEMORY)
        settings = SaveSettings(threads=DEFAULT_THREADS)
        self.writer = WriterProcess(incarnation, settings, memory=lambda: (1, self.fd, MEMORY))
        first, rest = REAL.split("from onward.save.worker", 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remote, "_START", f"{first}\n{SMALL}{program}\nfrom onward.save.worker{rest}")
            self.writer.start()
        # Those that are started after a death are whole, but must plan the same files.
        remote._START = f"{first}\n{SMALL}\nfrom onward.save.worker{rest}"

    def save(self, step: int) -> bool:
        """Whether the save ended well."""
        state = captured(step)
        for file in state.plan.files:
            os.pwrite(self.fd, state.region(file), file.start)
        try:
            self.writer.save(state, context())
        except SaveFailed as error:
            assert f"step {step}" in error.message and "ended with status 77" in error.message
            return False
        return True

    def close(self) -> None:
        self.writer.end()
        os.close(self.fd)


@pytest.fixture(autouse=True)
def _tests_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", PATH)
    yield
    remote._START = REAL


def offered(root: Path) -> list[int]:
    return [info.step for info in read_catalog(posix(root), PLACES, "home").offered()]


def crash(root: Path, n: int) -> bool:
    """One crash; whether the save was told as done."""
    incarnation = start(posix(root))
    trainer = Trainer(incarnation, CRASHING.format(n=n))
    first, saved = trainer.writer.pid, trainer.save(20)
    # What the trainer was told is what is there: it asks the ledger, not the process that died.
    assert offered(root) == ([20, 10] if saved else [10])
    assert trainer.save(30)
    assert offered(root) == ([30, 20, 10] if saved else [30, 10])
    assert trainer.writer.pid != first, f"call {n} was not reached"
    trainer.close()
    incarnation.end()
    seen = take_over(posix(root))
    assert seen.steps == ((30, 20, 10) if saved else (30, 10))
    check_second_recovery(posix(root))
    check_stories(posix(root))
    return saved


def calls_of_a_writer(template: Path, place: Path) -> int:
    """Those of a save, and one sync of the ledger: how far this incarnation has come must not vanish again."""
    saving = calls_of("saves", copy_store(template, place / "count"))
    taking_over = calls_of("recovers", copy_store(template, place / "count-begin"))
    return len(saving) - len(taking_over) + 1


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.full)])
def test_a_writer_process_that_ends_at_any_call_leaves_the_old_or_the_new_state(
    templates: Templates, place: Path, every: int
) -> None:
    total = calls_of_a_writer(templates(10), place)
    points = list(range(1, total + 1, every))
    told = [crash(copy_store(templates(10), place / str(n)), n) for n in points]
    print(f"\nwriter process: {len(points)} of {total} crash points; {sum(told)} told as done all the same")


def test_the_writer_process_makes_as_many_calls_as_strace_counts(
    templates: Templates, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = calls_of_a_writer(templates(10), place)
    root, log = copy_store(templates(10), tmp_path / "s"), tmp_path / "strace.log"
    popen = subprocess.Popen

    def traced(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        return popen([*strace(log), *command], **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(subprocess, "Popen", traced)
    # Under strace its parent is not the trainer, by which it would take itself for an orphan.
    incarnation = start(posix(root))
    trainer = Trainer(incarnation, "import os; os.getppid = lambda: int(sys.argv[3])")
    assert trainer.save(20)
    trainer.writer.close()
    os.close(trainer.fd)
    incarnation.end()
    counted = count_changes(log, root)
    print(f"\nwriter process: {sum(counted.values())} system calls in strace, {total} crash points")
    assert sum(counted.values()) == total > 50
