"""The store refuses a call, once or for good: the old checkpoint stays, the failure is named, the next save works."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from onward.catalog.attempts import read_outcomes
from onward.catalog.incarnation import Incarnation
from onward.errors import OnwardError, SaveFailed
from onward.storage.syscalls import MUTATING
from onward.testing.faults import FailAt, When
from onward.testing.recorder import Recorder

from .conftest import Templates
from .harness import (
    PLACES,
    check_second_recovery,
    check_stories,
    copy_store,
    posix,
    save_step,
    start,
    take_over,
    temporary,
)

Repeat = Literal["once", "forever"]
ERRORS = {
    "ENOSPC": errno.ENOSPC,
    "EDQUOT": errno.EDQUOT,
    "EIO": errno.EIO,
    "EINTR": errno.EINTR,
    "EFBIG": errno.EFBIG,
    "ESTALE": errno.ESTALE,
}
WRITES = ("write",)
SYNCS = ("fsync",)
CLOSES = ("close",)
NAMES = ("open", "mkdir", "link", "rename")
REMOVALS = ("unlink", "rmdir")
READS = ("pread",)
ANSWERS = ("link", "pread")


@dataclass
class Faulty:
    """A run that committed step 10, taken over without a fault; ``arm`` makes a later save meet one."""

    root: Path
    incarnation: Incarnation
    fault: FailAt

    def arm(self, n: int) -> None:
        self.fault.arm(n)


def faulty(root: Path, number: int, repeat: Repeat, only: tuple[str, ...], when: When = "before") -> Faulty:
    fault = FailAt(1 << 60, number, repeat, only=only, when=when)
    return Faulty(root, start(posix(root, fault)), fault)


def fails(run: Faulty) -> OnwardError | None:
    """Saves step 20; the error, which must name itself, the step, the file and the cause."""
    try:
        save_step(run.incarnation, 20)
    except OnwardError as error:
        assert isinstance(error, SaveFailed), f"a refusal of the store came up as {error!r}"
        text = str(error)
        assert "step 20" in text, text
        assert any(call.path.rpartition("/")[2] in text for call in run.fault.hits), text
        return error
    return None


def check_failure(run: Faulty, error: OnwardError | None, repeat: Repeat) -> None:
    """What holds after a failed save: the old state is offered, the story told, the next save works, no litter."""
    fault = run.fault
    store = posix(run.root)
    stories = {story.outcome: story.reason for story in read_outcomes(store, PLACES)}
    if error is not None and repeat == "once" and "was committed" not in str(error):
        assert stories and set(stories) <= {"failed", "kept"}, "a failed attempt left no story"
        assert all(os.strerror(fault.errno) in reason for reason in stories.values())
    fault.clear()
    save_step(run.incarnation, 30)
    run.incarnation.end()
    seen = take_over(store)
    assert seen.steps[0] == 30
    assert seen.steps[-1] == 10
    assert set(seen.steps) <= {30, 20, 10}
    if error is None:
        assert 20 in seen.steps, "a save that answered well is not there"
    assert temporary(store) == []
    check_stories(store)
    check_second_recovery(store)


def sweep(
    template: Path, place: Path, name: str, repeat: Repeat, only: tuple[str, ...], every: int, when: When = "before"
) -> None:
    n, points, failed = 1, 0, 0
    while True:  # until a save ends without having met the fault: then every call was tried
        run = faulty(copy_store(template, place / f"{name}-{n}"), ERRORS[name], repeat, only, when)
        run.arm(n)
        error = fails(run)
        if not run.fault.hits:
            break
        points, failed, n = points + 1, failed + (error is not None), n + every
        check_failure(run, error, repeat)
    assert points
    print(f"\n{name} {repeat}, {when} {'/'.join(only)}: {points} faults tried, {failed} saves failed")


QUICK: list[tuple[str, Repeat, tuple[str, ...], int, When]] = [
    ("ENOSPC", "once", WRITES, 7, "before"),
    ("ENOSPC", "forever", WRITES, 11, "before"),
    ("EDQUOT", "forever", NAMES, 7, "before"),
    ("EIO", "once", SYNCS, 6, "before"),
    ("EIO", "forever", SYNCS, 9, "after"),
    ("EINTR", "once", WRITES, 17, "before"),
    ("EIO", "once", CLOSES, 6, "before"),
    ("ESTALE", "once", NAMES, 6, "after"),
]


@pytest.mark.parametrize(("name", "repeat", "only", "every", "when"), QUICK, ids=str)
def test_a_store_that_refuses_a_call_costs_one_save_and_nothing_else(
    templates: Templates, place: Path, name: str, repeat: Repeat, only: tuple[str, ...], every: int, when: When
) -> None:
    sweep(templates(10), place, name, repeat, only, every, when)


@pytest.mark.full
@pytest.mark.parametrize("only", [MUTATING, CLOSES, READS], ids=lambda only: only[0])
@pytest.mark.parametrize("repeat", ["once", "forever"])
@pytest.mark.parametrize("name", ["ENOSPC", "EIO"])
def test_a_store_that_refuses_any_call_costs_one_save_and_nothing_else(
    templates: Templates, place: Path, name: str, repeat: Repeat, only: tuple[str, ...]
) -> None:
    sweep(templates(10), place, name, repeat, only, 1)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(ERRORS) - {"ENOSPC", "EIO"}))
def test_every_kind_of_refusal_costs_one_save_and_nothing_else(templates: Templates, place: Path, name: str) -> None:
    sweep(templates(10), place, name, "once", MUTATING, 2)
    sweep(templates(10), place / "forever", name, "forever", MUTATING, 7)


@pytest.mark.full
@pytest.mark.parametrize("only", [NAMES, REMOVALS, SYNCS, ANSWERS], ids=lambda only: only[0])
@pytest.mark.parametrize("repeat", ["once", "forever"])
def test_a_call_that_took_effect_and_is_told_as_an_error_costs_at_most_one_save(
    templates: Templates, place: Path, repeat: Repeat, only: tuple[str, ...]
) -> None:
    sweep(templates(10), place, "EIO", repeat, only, 1, "after")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_answer_of_the_ledger_does_not_cost_the_next_save(templates: Templates, place: Path, when: When) -> None:
    """The entry took effect, or not, and cannot be read back: who wrote it finds out before it goes on."""
    run = faulty(copy_store(templates(10), place / "s"), errno.EIO, "forever", ANSWERS, when)
    run.fault.match = "/ledger/"
    run.arm(1)
    error = fails(run)
    assert error is not None
    check_failure(run, error, "forever")


def test_a_file_whose_fsync_failed_is_never_synced_again_nor_written_to(templates: Templates, place: Path) -> None:
    """The kernel may call the second try a success although the bytes are gone."""
    for n in range(1, 30):
        root = copy_store(templates(10), place / str(n))
        recorder = Recorder()
        fault = FailAt(1 << 60, errno.EIO, "once", only=SYNCS, inner=recorder)
        incarnation = start(posix(root, fault))
        fault.arm(n)
        with suppress(SaveFailed):
            save_step(incarnation, 20)
        if not fault.hits:
            break
        failed = fault.hits[0].path
        save_step(incarnation, 30)
        touched = [op for op in recorder.log if op.path == failed and op.name in ("fsync", "write")]
        is_folder = (root / failed).is_dir() or "." not in failed.rpartition("/")[2]
        assert is_folder or all(op.name == "write" for op in touched)
        assert is_folder or not any(op.name in ("link", "rename") and op.source == failed for op in recorder.log)
        incarnation.end()
    assert n > 15
