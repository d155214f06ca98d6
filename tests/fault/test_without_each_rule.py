"""Negative controls: a rule of the protocol is taken away, and the proofs of this folder must notice.

Each control also shows that the same proof passes while the rule stands; a test that cannot fail proves nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from onward.catalog import deletion, incarnation, ledger, recovery
from onward.catalog.ledger import Ledger, LedgerView, read_ledger
from onward.errors import OnwardError, SaveFailed, StorageError, Superseded
from onward.format.names import RunPlaces, parse_writing_folder
from onward.records import AttemptOutcome, LedgerEntry, OpenEntry
from onward.save import pipeline
from onward.storage.base import Barrier, Store, remove_tree
from onward.storage.posix import PosixStore
from onward.testing.faults import FailAt, HaltAt, Halted

from .conftest import Templates
from .harness import PLACES, Broken, copy_store, delete_step, examine, posix, save_step, start
from .powercut_life import Interruption
from .test_schedules import check, play
from .warm import Warm

Rule = Callable[[pytest.MonkeyPatch], None]


def kept(patch: pytest.MonkeyPatch) -> None:
    """The code as it is."""


def take_away(*parts: object) -> pytest.MarkDecorator:
    """Runs a proof with the rule, where it must hold, and without it, where it must fail."""
    return pytest.mark.parametrize(("rule", "holds"), [(kept, True), *((part, False) for part in parts)])


def dead(root: Path) -> None:
    """The process that held the run is dead, as far as its lease can tell."""
    (root / PLACES.lease).unlink(missing_ok=True)


def left_by_kill(root: Path, halt: HaltAt, act: Callable[[PosixStore], None]) -> set[str]:
    """The invariants that are broken after a process was killed."""
    with suppress(Halted):
        act(posix(root, halt))
        raise AssertionError("the point of the kill was not reached")
    dead(root)
    _, broken = examine(posix(root))
    return {problem.invariant for problem in broken}


def save_20(store: PosixStore) -> None:
    save_step(start(store), 20)


# --- the fence ----------------------------------------------------------------------------------------------------


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """Taking over only reads the ledger."""

    def only_look(store: Store, places: RunPlaces) -> tuple[Ledger, LedgerView]:
        view = read_ledger(store, places)
        opens = [e for e in view.entries.values() if isinstance(e, OpenEntry)]
        fenceless = Ledger(store, places, opens[-1], view.digests[view.highest])
        fenceless.last = fenceless.epoch = view.highest
        return fenceless, view

    patch.setattr(incarnation, "take_over", only_look)


def walk_past_others(patch: pytest.MonkeyPatch) -> None:
    """Finding one's number taken is answered by taking the next one."""
    append = Ledger.append

    def stubborn(self: Ledger, build: Callable[[int, str], LedgerEntry], barrier: Barrier) -> LedgerEntry:
        while True:
            try:
                return append(self, build, barrier)
            except Superseded:
                self._superseded = False
                self.last += 1

    patch.setattr(Ledger, "append", stubborn)
    patch.setattr(pipeline, "append_commit", commit_anywhere)


def commit_anywhere(own: Ledger, attempt: object, manifest: str, sums: str) -> LedgerEntry:
    from onward.save.commit import append_commit

    while True:
        try:
            return append_commit(own, attempt, manifest, sums)  # type: ignore[arg-type]
        except OnwardError:
            object.__setattr__(attempt, "sequence", own.next)


@take_away(no_fence, walk_past_others)
def test_nobody_commits_after_another_has_taken_over(
    templates: Templates, place: Path, monkeypatch: pytest.MonkeyPatch, rule: Rule, holds: bool
) -> None:
    rule(monkeypatch)
    root = copy_store(templates(10), place / "s")
    resumed_from: list[int] = []

    def overtake() -> None:
        dead(root)
        resumed_from.append(start(posix(root)).view.live()[-1].step)

    first = start(posix(root))
    between = Interruption(lambda call: "/ledger/." in call.path, overtake, posix(root).calls)
    first.store.calls = between  # type: ignore[attr-defined]
    with suppress(Superseded, SaveFailed):
        save_step(first, 20)
    assert resumed_from == [10]
    committed = [entry.step for entry in read_ledger(posix(root), PLACES).checkpoints()]
    assert committed == ([10] if holds else [10, 20])


# --- an error answers nothing ---------------------------------------------------------------------------------------


def believe_errors(patch: pytest.MonkeyPatch) -> None:
    """An error of the create is taken for the answer: nothing is read back."""

    def believing(store: Store, places: RunPlaces, number: int, data: bytes) -> bool:
        store.create(places.entry(number), data, content=Barrier.ENTRY, name=None)
        return True

    patch.setattr(ledger, "create_entry", believing)


@take_away(believe_errors)
def test_a_commit_whose_answer_was_lost_is_a_commit(
    templates: Templates, place: Path, monkeypatch: pytest.MonkeyPatch, rule: Rule, holds: bool
) -> None:
    rule(monkeypatch)
    lost = FailAt(2, errno.EIO, only=("link",), match="/ledger/", when="after")
    own = start(posix(copy_store(templates(10), place / "s"), lost))
    try:
        save_step(own, 20)
        acknowledged = True
    except OnwardError:
        acknowledged = False
    assert lost.hits
    assert acknowledged is holds


# --- an entry appears whole -----------------------------------------------------------------------------------------


def write_in_place(patch: pytest.MonkeyPatch) -> None:
    """An entry is created under its own name and then filled."""

    def in_place(self: PosixStore, path: str, data: bytes, *, content: Barrier, name: Barrier | None) -> None:
        sink = self.open_new(path)
        sink.write(data)
        sink.finish(content)

    patch.setattr(PosixStore, "create", in_place)


@take_away(write_in_place)
def test_a_kill_never_leaves_an_empty_ledger_entry(
    templates: Templates, place: Path, monkeypatch: pytest.MonkeyPatch, rule: Rule, holds: bool
) -> None:
    rule(monkeypatch)
    halt = HaltAt(1, only=("write",), match="/ledger/")
    broken = left_by_kill(copy_store(templates(10), place / "s"), halt, lambda store: start(store).end())
    assert ("readable" not in broken) is holds


# --- a delete is decided before a byte goes -------------------------------------------------------------------------


def bytes_first(patch: pytest.MonkeyPatch) -> None:
    """The files go before the entry is made."""
    append = Ledger.append

    def late(self: Ledger, build: Callable[[int, str], LedgerEntry], barrier: Barrier) -> LedgerEntry:
        entry = build(self.next, self._digest)
        if barrier is Barrier.LEDGER_DELETE and hasattr(entry, "folder"):
            remove_tree(self.store, self.places.checkpoint(entry.folder))
        return append(self, build, barrier)

    patch.setattr(deletion.Ledger, "append", late)


@take_away(bytes_first)
def test_a_kill_amid_a_delete_never_leaves_a_live_checkpoint_half_gone(
    templates: Templates, place: Path, monkeypatch: pytest.MonkeyPatch, rule: Rule, holds: bool
) -> None:
    rule(monkeypatch)
    halt = HaltAt(3, only=("unlink",), match="/checkpoints/")
    root = copy_store(templates(10, 12, 15), place / "s")
    broken = left_by_kill(root, halt, lambda store: delete_step(start(store), 10))
    assert (broken == set()) is holds


# --- the folder has its name before the entry names it --------------------------------------------------------------


def entry_first(patch: pytest.MonkeyPatch) -> None:
    """The commit comes before the rename."""
    late: list[Callable[[], None]] = []
    rename, append = PosixStore.rename_folder, pipeline.append_commit

    def put_off(self: PosixStore, path: str, to: str) -> None:
        late.append(lambda: rename(self, path, to))

    def commit(*args: object) -> object:
        entry = append(*args)  # type: ignore[arg-type]
        late.pop()()
        return entry

    patch.setattr(PosixStore, "rename_folder", put_off)
    patch.setattr(pipeline, "append_commit", commit)


@take_away(entry_first)
def test_a_kill_never_leaves_an_entry_whose_folder_is_not_there(
    templates: Templates, place: Path, monkeypatch: pytest.MonkeyPatch, rule: Rule, holds: bool
) -> None:
    rule(monkeypatch)
    halt = HaltAt(2, only=("unlink",), match="/ledger/")  # the commit's temporary name: the entry is there
    broken = left_by_kill(copy_store(templates(10), place / "s"), halt, lambda store: save_20(store))
    assert (broken == set()) is holds


# --- recovery leaves the younger alone ------------------------------------------------------------------------------


def roll_back_all(patch: pytest.MonkeyPatch) -> None:
    """Recovery takes every attempt for a dead one."""

    def greedy(own: Ledger, view: LedgerView, *, tier: str) -> list[AttemptOutcome]:
        for item in own.store.list(own.places.checkpoints):
            if parse_writing_folder(item.name):
                remove_tree(own.store, own.places.checkpoint(item.name))
        return []

    patch.setattr(recovery, "recover", greedy)


@take_away(roll_back_all)
def test_recovery_that_was_overtaken_leaves_the_newer_ones_attempt_alone(
    templates: Templates, place: Path, monkeypatch: pytest.MonkeyPatch, rule: Rule, holds: bool
) -> None:
    rule(monkeypatch)
    root = copy_store(templates(10), place / "s")
    slow = start(posix(root))
    dead(root)

    def wakes_up() -> None:
        recovery.recover(slow.ledger, slow.view, tier=slow.tier)

    between = Interruption(lambda call: call.path.endswith("layout.json"), wakes_up, posix(root).calls)
    newer = start(posix(root, between))
    saved = True
    try:
        save_step(newer, 20)
    except SaveFailed:
        saved = False
    assert between.done
    assert saved is holds


def test_the_schedules_notice_a_take_over_without_a_fence(
    warm: Warm, templates: Templates, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_fence(monkeypatch)
    for n in range(30, 95, 10):
        played = play(warm, copy_store(templates(10, 12, 15), place / str(n)), "saves", n)
        assert played is not None
        try:
            check(played)
        except (AssertionError, Broken, StorageError, Superseded):
            return
    pytest.fail("no schedule showed that the fence was missing")


def test_what_only_tests_use_is_imported_by_no_product_code() -> None:
    import onward

    package = Path(onward.__file__).parent
    sources = [path for path in package.rglob("*.py") if "testing" not in path.relative_to(package).parts]
    users = [str(path) for path in sources if "onward.testing" in path.read_text(encoding="utf-8")]
    assert users == []
    assert len(sources) > 50
