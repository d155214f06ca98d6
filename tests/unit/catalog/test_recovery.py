"""Recovery: what older attempts left is rolled back, what belongs to others is left alone, deletes are finished."""

from __future__ import annotations

import os
import shutil
from collections import Counter

import pytest

from onward.catalog.attempts import read_outcomes
from onward.catalog.deletion import delete_checkpoint
from onward.catalog.incarnation import Incarnation
from onward.catalog.ledger import read_ledger
from onward.catalog.listing import read_catalog
from onward.catalog.receipts import read_receipts
from onward.errors import UsageError
from onward.format.names import checkpoint_folder, writing_folder
from onward.save.commit import begin_attempt, seal
from onward.save.shards import write_rank
from onward.storage.memory import MemoryStore
from onward.storage.posix import PosixStore
from recorder import resumed
from support import PLACES, RUN, TIER, captured, commit, content, context, die, start


def unfinished(run: Incarnation, step: int, *, sealed: bool = False) -> str:
    """A save that is cut off after its files were written, or after its folder got its final name."""
    state = captured(step)
    attempt = begin_attempt(run.store, run.ledger, step=step, world_size=1, pid=1)
    folder = PLACES.checkpoint(attempt.writing)
    record = write_rank(run.store, folder, state, context(), run=RUN, attempt=attempt.id, threads=1)
    if sealed:
        times = {"capture_started": "t", "epoch": None, "data_position": None}
        seal(run.store, run.ledger, attempt, [record], state.layout, context(), **times)
    return attempt.final if sealed else attempt.writing


def folders(store: MemoryStore) -> set[str]:
    return {item.name for item in store.list(PLACES.checkpoints)}


def test_an_attempt_of_a_dead_incarnation_is_rolled_back_and_its_story_told(store: MemoryStore) -> None:
    first = start(store)
    commit(first, 10)
    left = unfinished(first, 20)
    die(first)
    second = start(store)
    assert left not in folders(store)
    assert [(o.outcome, o.step, o.reason) for o in second.recovered] == [
        ("rolled-back", 20, "its writer ended before the commit")
    ]
    assert [o.attempt for o in read_outcomes(store, PLACES)] == [second.recovered[0].attempt]
    second.end()


def test_a_folder_of_the_same_step_is_no_obstacle_and_its_junk_no_part_of_the_next(store: MemoryStore) -> None:
    """T08: what a save of step 30 left behind does not stop the next save of step 30; two tries share no name."""
    first = start(store)
    names = {unfinished(first, 30), unfinished(first, 30)}
    assert len(names) == 2
    die(first)
    second = start(store)
    junk = writing_folder(30, second.ledger.next, "0" * 32)
    store.make_folder(PLACES.checkpoint(junk))
    store.files[f"{PLACES.checkpoint(junk)}/junk"] = b"junk"
    entry = commit(second, 30)
    assert not any("junk" in path for path in store.files if entry.folder in path and ".writing-" not in path)
    die(second)
    begun, part = resumed(store)
    assert part.bytes() == content(30)
    assert begun.next_step == 30
    assert folders(store) == {entry.folder}, "the junk was swept at the next start"


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling link", "fifo"])
def test_unfinished_items_of_every_kind_are_cleared_without_touching_what_a_link_points_to(
    disk: PosixStore, kind: str
) -> None:
    """T10: a file, a folder and a link under an attempt's name; the link's target is a good checkpoint."""
    first = start(disk)
    entry = commit(first, 10)
    die(first)
    base = disk.root / PLACES.checkpoints
    item = base / writing_folder(20, 2, "ab" * 16)
    if kind == "file":
        item.write_bytes(b"x")
    elif kind == "folder":
        (item / "rank-00000").mkdir(parents=True)
        (item / "rank-00000" / "link").symlink_to(base / entry.folder)
    elif kind == "fifo":
        os.mkfifo(item)
    else:
        item.symlink_to(base / entry.folder if kind == "link" else "nowhere")
    begun, part = resumed(disk)
    assert not os.path.lexists(item)
    assert part.bytes() == content(10)
    assert begun.next_step == 10


def test_a_folder_that_was_copied_in_is_shown_never_offered_and_never_deleted(disk: PosixStore) -> None:
    """T11: a plain recursive copy has no entry; it is adoptable, and unknown things are left alone."""
    run = start(disk)
    entry = commit(run, 10)
    run.end()
    base = disk.root / PLACES.checkpoints
    for name in ("copied", checkpoint_folder(77, 1), checkpoint_folder(78, 900)):
        shutil.copytree(base / entry.folder, base / name)
    (base / "notes").mkdir()
    (base / "README.txt").write_text("hands off")
    before = Counter(str(path) for path in base.rglob("*"))
    for _ in range(3):
        resumed(disk)
    assert Counter(str(path) for path in base.rglob("*")) == before
    catalog = read_catalog(disk, PLACES, TIER)
    kinds = {item.name: item.kind for item in catalog.foreign}
    assert kinds == {
        "copied": "adoptable",
        checkpoint_folder(77, 1): "adoptable",
        checkpoint_folder(78, 900): "adoptable",
        "notes": "unknown",
        "README.txt": "unknown",
    }
    assert [info.folder for info in catalog.offered()] == [entry.folder]


def test_a_complete_folder_without_an_entry_is_kept_with_its_bytes(store: MemoryStore) -> None:
    """Its writer died between the final name and the commit: not a checkpoint, but nothing is thrown away."""
    first = start(store)
    left = unfinished(first, 20, sealed=True)
    die(first)
    files = {path: data for path, data in store.files.items() if left in path}
    second = start(store)
    assert [(o.outcome, o.sequence, o.step) for o in second.recovered] == [("kept", 2, 20)]
    assert {path: store.files.get(path) for path in files} == files
    receipts, findings = read_receipts(store, PLACES, left)
    assert ([r.kind for r in receipts], findings) == (["quarantined"], [])
    die(second)
    third = start(store)
    assert third.recovered == (), "told once"
    assert read_catalog(store, PLACES, TIER).offered() == []
    third.end()


def test_an_attempt_of_a_younger_incarnation_is_not_touched(store: MemoryStore) -> None:
    """The one that is recovering was overtaken meanwhile: the attempt belongs to whoever overtook it."""
    first = start(store)
    die(first)
    younger = writing_folder(50, 9, "cd" * 16)
    store.make_folder(PLACES.checkpoint(younger))
    store.make_folder(PLACES.checkpoint(checkpoint_folder(60, 9)))
    second = start(store)
    assert folders(store) == {younger, checkpoint_folder(60, 9)}
    assert second.recovered == ()
    second.end()


def test_recovery_may_be_repeated(store: MemoryStore) -> None:
    first = start(store)
    commit(first, 10)
    unfinished(first, 20)
    unfinished(first, 30, sealed=True)
    die(first)
    die(start(store))
    files = {path: data for path, data in store.files.items() if "/ledger/" not in path and "lease" not in path}
    start(store).end()
    again = {path: data for path, data in store.files.items() if "/ledger/" not in path and "lease" not in path}
    assert again == files


def test_half_written_files_of_the_dead_are_swept_and_those_of_the_living_are_not(store: MemoryStore) -> None:
    run = start(store)
    commit(run, 10)
    die(run)
    swept = [
        f"{PLACES.ledger}/.000000002.json.ab.tmp",
        f"{PLACES.attempts}/.x.json.ab.tmp",
        f"{PLACES.root}/.lease.json.ab.tmp",
    ]
    kept = [f"{PLACES.ledger}/.000000009.json.ab.tmp", f"{PLACES.ledger}/notes.tmp", f"{PLACES.root}/notes"]
    for path in (*swept, *kept):
        store.files[path] = b"half"
    start(store).end()
    assert [path for path in (*swept, *kept) if path in store.files] == kept


# --- deletion ---------------------------------------------------------------------------------------------------


def test_a_delete_is_an_entry_first_and_leaves_a_description_and_a_receipt(store: MemoryStore) -> None:
    run = start(store)
    victim, other = commit(run, 10), commit(run, 20)
    manifest = store.files[f"{PLACES.checkpoint(victim.folder)}/manifest.json"]
    delete_checkpoint(run.ledger, read_ledger(store, PLACES), victim, tier=TIER, reason="thinned")
    view = read_ledger(store, PLACES)
    assert [e.sequence for e in view.live()] == [other.sequence]
    assert view.entries[victim.sequence] == victim, "the victim's entry stays for ever"
    assert (view.deletes[victim.sequence].reason, view.deletes[victim.sequence].folder) == ("thinned", victim.folder)
    assert folders(store) == {other.folder}
    assert store.files[f"{PLACES.deleted}/{victim.folder}.json"] == manifest
    receipts, _ = read_receipts(store, PLACES, victim.folder)
    assert receipts[-1].kind == "deleted"
    info = next(c for c in read_catalog(store, PLACES, TIER).checkpoints if c.sequence == victim.sequence)
    assert info.status == "deleted"
    run.end()


def test_a_checkpoint_is_deleted_once_and_only_if_it_is_live(store: MemoryStore) -> None:
    run = start(store)
    victim = commit(run, 10)
    delete_checkpoint(run.ledger, read_ledger(store, PLACES), victim, tier=TIER, reason="")
    with pytest.raises(UsageError, match="not a live checkpoint"):
        delete_checkpoint(run.ledger, read_ledger(store, PLACES), victim, tier=TIER, reason="")
    run.end()


def test_a_delete_that_was_cut_off_anywhere_is_finished_at_the_next_start(store: MemoryStore) -> None:
    """After the entry nothing of the victim is offered, however many of its files are left."""
    run = start(store)
    victim = commit(run, 10)
    commit(run, 20)
    view = read_ledger(store, PLACES)
    die(run)
    saved = dict(store.files), dict(store.folders)
    paths = sorted(path for path in store.files if victim.folder in path and "/checkpoints/" in path)
    for left in range(len(paths) + 1):
        store.files, store.folders = dict(saved[0]), dict(saved[1])
        run.ledger.last, run.ledger._digest = 3, view.digests[3]
        remove, store.remove = store.remove, lambda path: None  # type: ignore[method-assign]
        store.remove_folder = lambda path: None  # type: ignore[method-assign]
        delete_checkpoint(run.ledger, view, victim, tier=TIER, reason="cut off")
        del store.remove, store.remove_folder
        for path in paths[left:]:
            remove(path)
        assert [c.step for c in read_catalog(store, PLACES, TIER).offered()] == [20]
        start(store).end()
        assert not any(path.startswith(PLACES.checkpoint(victim.folder)) for path in (*store.files, *store.folders))
        assert [c.step for c in read_catalog(store, PLACES, TIER).offered()] == [20]
