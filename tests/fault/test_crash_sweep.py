"""The process ends at the n-th mutating call, for every n: what loads afterwards is the old state or the new one.

By default a sample of the points is tried, with every one around the commit; ``-m full`` tries all of them. How many
there are is compared with what strace counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from onward.catalog.attempts import read_outcomes
from onward.catalog.listing import read_catalog
from onward.catalog.stores import init_store
from onward.errors import ConfigurationError
from onward.testing.faults import CrashAt
from onward.testing.seam import Call

from . import lives
from .conftest import Templates
from .counting import calls_of
from .harness import (
    PLACES,
    Seen,
    check_checkpoint,
    check_second_recovery,
    check_stories,
    copy_store,
    posix,
    save_step,
    start,
    take_over,
    temporary,
)
from .loading import check_loads
from .warm import Warm

CRASHED = 77


def is_decisive(call: Call) -> bool:
    """Whether a call belongs to the few that make a checkpoint exist, or cease to."""
    named = call.name in ("link", "rename") and ("/ledger/" in call.path or "/checkpoints/" in call.path)
    return named or call.barrier in ("PUBLISHED", "LEDGER_COMMIT", "LEDGER_DELETE")


def sample(calls: list[Call], every: int) -> list[int]:
    """Crash points: every k-th, and all around what decides."""
    near = {n + d for n, call in enumerate(calls, 1) if is_decisive(call) for d in (0, 1)}
    return sorted({n for n in range(1, len(calls) + 1) if n % every == 0} | near & set(range(1, len(calls) + 1)))


class Sweep:
    """Lets a life end at one call after another, on a fresh copy of a template each time."""

    def __init__(self, warm: Warm, template: Path, place: Path, life: Callable[..., object], *args: object) -> None:
        self.warm, self.template, self.place, self.life, self.args = warm, template, place, life, args

    def crash(self, n: int, how: str = "before") -> tuple[Path, tuple[object, ...]]:
        """The store after a crash at call ``n``, and what had been promised by then."""
        root = copy_store(self.template, self.place / f"{n}-{how}")
        ended = self.warm.run(self.life, root, *self.args, partial(CrashAt, n, how, status=CRASHED))
        assert ended.status == CRASHED, f"call {n} was not reached: the life ended with {ended.status}"
        return root, ended.told

    def points(self, points: list[int], how: str = "before") -> Iterator[tuple[int, Path, tuple[object, ...]]]:
        for n in points:
            yield n, *self.crash(n, how)


def check(root: Path, allowed: set[tuple[int, ...]], *, go_on: bool = True) -> Seen:
    """What holds after every crash: old or new, everything cleared up, a second recovery idle, saving possible."""
    store = posix(root)
    seen = take_over(store)
    assert seen.steps in allowed, f"{seen.steps} is offered, which is neither the old state nor the new one"
    for info in seen.catalog.offered():
        check_loads(store, info)
    check_second_recovery(store)
    check_stories(store)
    if go_on:
        incarnation = start(store)
        save_step(incarnation, 40)
        incarnation.end()
        offered = read_catalog(store, PLACES, seen.incarnation.tier).offered()
        assert tuple(info.step for info in offered) == (40, *seen.steps)
        check_checkpoint(store, offered[0])
    return seen


def check_save(n: int, root: Path, told: tuple[object, ...], old: tuple[int, ...], go_on: bool) -> bool:
    allowed = {(20, *old)} if "acknowledged 20" in told else {old, (20, *old)}
    seen = check(root, allowed, go_on=go_on)
    rolled_back = [story for story in read_outcomes(posix(root), PLACES) if story.outcome == "rolled-back"]
    assert all(story.step == 20 for story in rolled_back)
    return seen.steps != old


def swept(name: str, points: list[int], total: int, **found: int) -> None:
    """Prints the counts, so that they can be quoted."""
    print(f"\n{name}: {len(points)} of {total} crash points; " + ", ".join(f"{k} {v}" for k, v in found.items()))


def run_save_sweep(warm: Warm, template: Path, place: Path, old: tuple[int, ...], every: int) -> None:
    calls = calls_of("saves", copy_store(template, place / "count"))
    shards = {call.path for call in calls if call.path.endswith(".safetensors")}
    assert len(shards) >= 5, "the sweep is about several shard files"
    points = sample(calls, every)
    new = 0
    for n, root, told in Sweep(warm, template, place, lives.saves).points(points):
        new += check_save(n, root, told, old, go_on=every == 1 or n % 5 == 0)
    assert 0 < new < len(points)
    swept(f"save onto {old}", points, len(calls), old=len(points) - new, new=new)


def test_a_crash_at_any_call_of_a_save_leaves_the_old_or_the_new_state(
    warm: Warm, templates: Templates, place: Path
) -> None:
    run_save_sweep(warm, templates(10), place, (10,), every=8)


def test_a_crash_at_any_call_of_a_runs_first_save_leaves_nothing_or_the_new_state(
    warm: Warm, templates: Templates, place: Path
) -> None:
    run_save_sweep(warm, templates(), place, (), every=20)


@pytest.mark.full
@pytest.mark.parametrize("old", [(), (10,), (10, 15)])
def test_a_crash_at_every_call_of_a_save_leaves_the_old_or_the_new_state(
    warm: Warm, templates: Templates, place: Path, old: tuple[int, ...]
) -> None:
    run_save_sweep(warm, templates(*old), place, tuple(reversed(old)), every=1)


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.full)])
def test_a_crash_right_after_a_call_is_no_different(warm: Warm, templates: Templates, place: Path, every: int) -> None:
    template = templates(10)
    calls = calls_of("saves", copy_store(template, place / "count"))
    points = list(range(every, len(calls) + 1, every))
    for n, root, told in Sweep(warm, template, place, lives.saves).points(points, "after"):
        check_save(n, root, told, (10,), go_on=False)
    swept("save, crash after the call", points, len(calls))


# --- recovery -----------------------------------------------------------------------------------------------------


def crowded(warm: Warm, template: Path, place: Path) -> Path:
    """A store with everything that dead processes can leave: steps 15 and 12 are live, 10 is half deleted."""
    root = copy_store(template, place / "crowded")
    for life, fault in (
        ("saves", partial(CrashAt, 9, only=("write",), match=".safetensors")),  # amid the shards
        ("saves", partial(CrashAt, 1, only=("open",), match="manifest.json")),  # all records there
        ("saves", partial(CrashAt, 2, only=("link",), match="/ledger/")),  # renamed, not named; a temporary entry
        ("deletes", partial(CrashAt, 5, only=("unlink",), match="/checkpoints/")),  # half deleted
    ):
        assert warm.run(lives.leaves, root, life, fault).status == CRASHED
    items = [item.name for item in posix(root).list(PLACES.checkpoints)]
    assert len(items) == 6
    assert sum(".writing-" in name for name in items) == 2
    assert any(path.startswith("ledger/") for path in temporary(posix(root)))
    return root


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.full)])
def test_a_crash_at_any_call_of_recovery_is_cleared_up_by_the_next(
    warm: Warm, templates: Templates, place: Path, every: int
) -> None:
    template = crowded(warm, templates(10, 12, 15), place)
    calls = calls_of("recovers", copy_store(template, place / "count"))
    points = sample(calls, every)
    for n, root, _ in Sweep(warm, template, place, lives.recovers).points(points):
        seen = check(root, {(15, 12)}, go_on=n % 5 == 0)
        adoptable = [item.name for item in seen.catalog.foreign if item.kind == "adoptable"]
        assert len(adoptable) == 1, "a folder under a final name that no entry names keeps its bytes"
        stories = read_outcomes(posix(root), PLACES)
        assert sorted(story.outcome for story in stories) == ["kept", "rolled-back", "rolled-back"]
        assert not [path for path in temporary(posix(root)) if path.startswith(("ledger/", "checkpoints/"))]
    swept("recovery", points, len(calls))


@pytest.mark.full
def test_a_crash_in_recovery_after_a_crash_anywhere_in_a_save_is_cleared_up(
    warm: Warm, templates: Templates, place: Path
) -> None:
    total = 0
    for first in range(30, 96, 8):
        root, told = Sweep(warm, templates(10), place, lives.saves).crash(first)
        calls = calls_of("recovers", copy_store(root, place / f"count-{first}"))
        (place / str(first)).mkdir()
        again = Sweep(warm, root, place / str(first), lives.recovers)
        for _, after, _ in again.points(list(range(1, len(calls) + 1, 2))):
            check(after, {(20, 10)} if "acknowledged 20" in told else {(10,), (20, 10)}, go_on=False)
            total += 1
    print(f"\nsave, then recovery: {total} pairs of crash points")


# --- deletion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.full)])
def test_a_crash_at_any_call_of_a_delete_leaves_the_victim_whole_or_gone(
    warm: Warm, templates: Templates, place: Path, every: int
) -> None:
    template = templates(10, 12, 15)
    calls = calls_of("deletes", copy_store(template, place / "count"))
    points = sample(calls, every)
    whole = 0
    for _, root, told in Sweep(warm, template, place, lives.deletes).points(points):
        allowed = {(15, 12)} if "deleted 10" in told else {(15, 12), (15, 12, 10)}
        seen = check(root, allowed, go_on=False)
        if 10 in seen.steps:
            whole += 1
        else:
            assert not [i for i in posix(root).list(PLACES.checkpoints) if i.name.startswith("step-000000000010")]
    assert 0 < whole < len(points)
    swept("delete", points, len(calls), whole=whole, gone=len(points) - whole)


# --- creating a store ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.full)])
def test_a_crash_while_a_store_is_created_leaves_a_store_or_a_place_for_one(
    warm: Warm, place: Path, every: int
) -> None:
    n, stores = 1, 0
    while True:
        root = place / str(n)
        ended = warm.run(lives.inits, root, partial(CrashAt, n, status=CRASHED))
        if ended.status == 0:
            break
        assert ended.status == CRASHED
        try:
            init_store(f"file://{root}")
        except ConfigurationError as error:
            assert "is a store already" in error.message
            stores += 1
        assert take_over(posix(root)).steps == ()
        n += every
    assert stores or every > 1
    print(f"\ninit: {n // every} crash points")
