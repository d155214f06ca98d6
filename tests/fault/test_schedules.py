"""Two processes in every order: one is stopped before its n-th call, another takes over and works, the first wakes up.

The one that was overtaken commits nothing any more and removes nothing that counts; what the other saved all loads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from onward.catalog.incarnation import Incarnation
from onward.catalog.ledger import read_ledger
from onward.errors import Superseded
from onward.format.names import parse_checkpoint_folder, parse_writing_folder
from onward.records import CheckpointEntry, DeleteEntry, OpenEntry
from onward.storage.posix import PosixStore

from . import lives
from .conftest import Templates
from .harness import PLACES, Seen, check_checkpoint, copy_store, delete_step, posix, save_step, start, take_over
from .test_crash_sweep import crowded
from .warm import Warm

QUIET_ENDS = {"Busy", "Superseded", "NotFound", "StorageError"}
"""How an overtaken process may end. NotFound: what it was about to name was swept away as a dead process's."""


@dataclass(frozen=True)
class Woken:
    """What the first process said after it was let go: how it ended, its fence, and its calls since."""

    outcome: str
    epoch: int
    calls: list[tuple[str, str]]


@dataclass(frozen=True)
class Schedule:
    """One order that was played: who held which fence, and what the second process was promised."""

    root: Path
    first: Woken
    second: Incarnation
    acknowledged: list[int]


def play(warm: Warm, root: Path, what: str, n: int) -> Schedule | None:
    """The first process does ``what`` up to its n-th call, the second takes over, saves and deletes, the first wakes.

    None when the first process has no n-th call.
    """
    ended = warm.run(lives.is_stopped, root, what, n)
    if ended.status is not None:
        assert ended.status == 0, f"the first process failed before its call {n}"
        return None
    store = posix(root)
    # As if its lease had run out: the lease only keeps people from starting a job twice, and proves nothing.
    store.remove(PLACES.lease)
    second = start(store)
    acknowledged = [save_step(second, 30).entry.sequence]
    delete_step(second, 12)
    woken = warm.resume()
    assert woken.status == 0
    return Schedule(root, Woken(*woken.told[-1]), second, acknowledged)


def check(played: Schedule) -> Counter[str]:
    """What must hold after any order. Returns how it ended, for the statistics."""
    store = posix(played.root)
    first, second = played.first, played.second
    ledger = read_ledger(store, PLACES)
    opens = {e.sequence: e for e in ledger.entries.values() if isinstance(e, OpenEntry)}
    newest = opens[max(opens)]
    if newest.incarnation == second.ledger.incarnation:
        check_overtaken(played)
        played.acknowledged.append(save_step(second, 40).entry.sequence)
    else:
        # The first had not yet made its fence when it was stopped, so it is the first that has overtaken.
        assert first.epoch in (0, newest.sequence)
        with pytest.raises(Superseded):
            save_step(second, 40)
    second.end()
    seen = take_over(store)
    check_all_load(store, seen, played)
    return Counter([first.outcome])


def check_overtaken(played: Schedule) -> None:
    """The first process was overtaken: it has appended nothing since, and removed nothing that counts."""
    store, fence = posix(played.root), played.second.ledger.epoch
    ledger = read_ledger(store, PLACES)
    later = [entry for number, entry in ledger.entries.items() if number > fence]
    assert {entry.incarnation for entry in later} == {played.second.ledger.incarnation}
    assert played.first.outcome in QUIET_ENDS | {"acknowledged"}
    if played.first.outcome == "acknowledged":
        mine = [e for e in ledger.checkpoints() if e.epoch == played.first.epoch]
        assert mine and all(entry.sequence < fence for entry in mine), "acknowledged, but not before it was overtaken"
    live = {entry.folder for entry in ledger.live()}
    for name, path in played.first.calls:
        folder = path.split("/")[3] if path.startswith(f"{PLACES.checkpoints}/") else ""
        if name in ("unlink", "rmdir"):
            assert folder not in live, f"an overtaken process removed {path}"
        if folder:
            assert sequence_of(folder) <= fence, f"an overtaken process touched {path}"


def sequence_of(folder: str) -> int:
    attempt, final = parse_writing_folder(folder), parse_checkpoint_folder(folder)
    return attempt.sequence if attempt else final[1] if final else 0


def check_all_load(store: PosixStore, seen: Seen, played: Schedule) -> None:
    """Everything that the second process was promised is offered, and nothing it deleted; all that is offered loads."""
    offered = {info.sequence for info in seen.catalog.offered()}
    assert set(played.acknowledged) <= offered
    ledger = read_ledger(store, PLACES)
    deleted = {e.victim for e in ledger.entries.values() if isinstance(e, DeleteEntry)}
    committed = {e.sequence for e in ledger.entries.values() if isinstance(e, CheckpointEntry)}
    assert offered == committed - deleted, "a checkpoint that nobody decided to delete is not there"
    for info in seen.catalog.offered():
        check_checkpoint(store, info)


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("what", ["saves", "deletes", "recovers"])
def test_a_process_that_was_overtaken_while_stopped_commits_and_removes_nothing(
    warm: Warm, templates: Templates, place: Path, what: str, every: int
) -> None:
    template = templates(10, 12, 15)
    if what == "recovers":
        template = crowded(warm, templates(10, 12, 15), place)
        # The half-deleted one is gone for the second process too; it deletes 12 as in the other schedules.
    ends: Counter[str] = Counter()
    n = 1
    while played := play(warm, copy_store(template, place / f"{what}-{n}"), what, n):
        ends += check(played)
        n += every
    assert ends["Superseded"] > 0
    assert ends["acknowledged"] > 0
    print(f"\n{what}: {sum(ends.values())} schedules; the first process ended as {dict(ends)}")
