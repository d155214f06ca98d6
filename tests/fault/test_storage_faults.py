"""The store refuses a call, once or for good: the old checkpoint stays, the failure is named, and the next save works."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from onward.catalog.attempts import read_outcomes
from onward.catalog.incarnation import Incarnation
from onward.errors import OnwardError, SaveFailed, StorageError, Superseded
from onward.testing.faults import Call, CountingSyscalls, FailAt, FlipAfterClose, LateFolders, ShortReads, ShortWrites
from onward.testing.recorder import Recorder

from .conftest import Templates
from .harness import (
    PLACES,
    check_checkpoint,
    check_second_recovery,
    check_stories,
    copy_store,
    held_by,
    posix,
    save_step,
    start,
    take_over,
    temporary,
)
from .state import contents_of

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
NAMES = ("open", "mkdir", "link", "rename")
REMOVALS = ("unlink", "rmdir")


@dataclass
class Faulty:
    """A run that committed step 10, taken over without a fault; ``arm`` makes a later save meet one."""

    root: Path
    incarnation: Incarnation
    fault: FailAt

    def arm(self, n: int) -> None:
        self.fault.arm(n)


def faulty(root: Path, number: int, repeat: Repeat, only: tuple[str, ...], when: str = "before") -> Faulty:
    how: Literal["before", "after"] = "after" if when == "after" else "before"
    fault = FailAt(1 << 60, number, repeat, only=only, when=how)
    return Faulty(root, start(posix(root, fault)), fault)


def calls_in_a_save(root: Path, only: tuple[str, ...]) -> int:
    counting = CountingSyscalls()
    incarnation = start(posix(root, counting))
    before = counting.count
    save_step(incarnation, 20)
    incarnation.end()
    return sum(call.name in only for call in counting.log[before:])


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
    assert fault.hits, "the fault was not met"
    store = posix(run.root)
    stories = {story.outcome: story.reason for story in read_outcomes(store, PLACES)}
    if error is not None and repeat == "once" and not "was committed" in str(error):
        assert set(stories) <= {"failed", "kept"} and stories, "a failed attempt left no story"
        assert all(hit in reason for reason in stories.values() for hit in [os.strerror(fault.errno)])
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
    template: Path, place: Path, name: str, repeat: Repeat, only: tuple[str, ...], every: int, when: str = "before"
) -> None:
    total = calls_in_a_save(copy_store(template, place / "count"), only)
    points = list(range(1, total + 1, every))
    failed = 0
    for n in points:
        run = faulty(copy_store(template, place / str(n)), ERRORS[name], repeat, only, when)
        run.arm(n)
        error = fails(run)
        failed += error is not None
        check_failure(run, error, repeat)
    print(f"\n{name} {repeat}, {when} {'/'.join(only)}: {len(points)} of {total} calls, {failed} saves failed")


QUICK = [
    ("ENOSPC", "once", WRITES, 5),
    ("ENOSPC", "forever", WRITES, 9),
    ("EDQUOT", "forever", NAMES, 7),
    ("EIO", "once", SYNCS, 4),
    ("EIO", "forever", SYNCS, 9),
    ("EINTR", "once", WRITES, 13),
]


@pytest.mark.parametrize(("name", "repeat", "only", "every"), QUICK, ids=lambda value: str(value))
def test_a_store_that_refuses_a_call_costs_one_save_and_nothing_else(
    templates: Templates, place: Path, name: str, repeat: Repeat, only: tuple[str, ...], every: int
) -> None:
    sweep(templates(10), place, name, repeat, only, every)


@pytest.mark.full
@pytest.mark.parametrize("only", [WRITES, SYNCS, NAMES, REMOVALS, ("close",)], ids=lambda only: only[0])
@pytest.mark.parametrize("repeat", ["once", "forever"])
@pytest.mark.parametrize("name", sorted(ERRORS))
def test_a_store_that_refuses_any_call_costs_one_save_and_nothing_else(
    templates: Templates, place: Path, name: str, repeat: Repeat, only: tuple[str, ...]
) -> None:
    sweep(templates(10), place, name, repeat, only, 1)
