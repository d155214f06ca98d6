"""What recovery would do is told beforehand, and is what it then does; looking changes nothing."""

from __future__ import annotations

import pytest

from onward.catalog.deletion import delete_checkpoint
from onward.catalog.incarnation import Incarnation
from onward.catalog.ledger import read_ledger
from onward.catalog.leftovers import find_attempts, find_owner, plan_recovery
from onward.catalog.listing import read_catalog
from onward.catalog.manifests import manifest_in, manifest_of
from onward.catalog.reader import DamagedFile
from onward.format.codec import encode
from onward.format.names import checkpoint_folder, writing_folder
from onward.storage.memory import MemoryStore
from support import PLACES, TIER, commit, dead_lease, die, place_of, start


@pytest.fixture
def left(store: MemoryStore) -> MemoryStore:
    """An attempt, a complete folder without an entry, a file under an attempt's name, a delete that was cut off."""
    run = start(store)
    victim = commit(run, 10)
    commit(run, 20)
    store.remove = lambda path: None  # type: ignore[method-assign]
    store.remove_folder = lambda path: None  # type: ignore[method-assign]
    delete_checkpoint(run.ledger, read_ledger(store, PLACES), victim, tier=TIER, reason="thinned")
    del store.remove, store.remove_folder
    store.make_folder(PLACES.checkpoint(writing_folder(30, 5, "ab" * 16)))
    store.make_folder(PLACES.checkpoint(checkpoint_folder(40, 5)))
    store.files[PLACES.checkpoint(writing_folder(50, 5, "cd" * 16))] = b""
    store.make_folder(PLACES.checkpoint(writing_folder(60, 99, "ef" * 16)))
    die(run)
    return store


def test_the_plan_is_what_recovery_then_does(left: MemoryStore) -> None:
    before = dict(left.files), dict(left.folders)
    view = read_ledger(left, PLACES)
    plan = plan_recovery(left, PLACES, view, find_owner(left, PLACES))
    assert (left.files, left.folders) == before
    assert [attempt.step for attempt in plan.roll_back] == [30]
    assert plan.remove == (writing_folder(50, 5, "cd" * 16),)
    assert plan.keep == (checkpoint_folder(40, 5),)
    assert [delete.victim for delete in plan.finish] == [2]
    run = start(left)
    assert sorted((o.outcome, o.step) for o in run.recovered) == [("kept", 40), ("rolled-back", 30)]
    there = {item.name for item in left.list(PLACES.checkpoints)}
    assert there == {"step-000000000020-3", checkpoint_folder(40, 5), writing_folder(60, 99, "ef" * 16)}
    after = plan_recovery(left, PLACES, read_ledger(left, PLACES), find_owner(left, PLACES))
    assert after.empty
    run.end()


def test_an_attempt_is_in_progress_only_while_its_owner_may_live_and_its_number_is_free(store: MemoryStore) -> None:
    run = start(store)
    store.make_folder(PLACES.checkpoint(writing_folder(10, run.ledger.next, "ab" * 16)))
    view = read_ledger(store, PLACES)

    def state() -> str:
        return find_attempts(store, PLACES, view, find_owner(store, PLACES))[0].state

    assert (find_owner(store, PLACES).state, state()) == ("alive", "in progress")
    die(run)
    assert (find_owner(store, PLACES).state, state()) == ("dead", "abandoned")
    store.replace(PLACES.lease, encode(dead_lease(host="elsewhere")))
    assert (find_owner(store, PLACES).state, state()) == ("unknown", "in progress?")
    store.remove(PLACES.lease)
    assert (find_owner(store, PLACES).state, state()) == ("nobody", "abandoned")


def test_an_attempt_that_was_overtaken_is_abandoned_whoever_lives(store: MemoryStore) -> None:
    run = start(store)
    store.make_folder(PLACES.checkpoint(writing_folder(10, 1, "ab" * 16)))
    attempt = find_attempts(store, PLACES, read_ledger(store, PLACES), find_owner(store, PLACES))[0]
    assert (attempt.state, attempt.intent) == ("abandoned", None)
    run.end()


def test_the_manifest_is_read_also_of_what_was_deleted(run: Incarnation, store: MemoryStore) -> None:
    victim = commit(run, 10)
    commit(run, 20)
    delete_checkpoint(run.ledger, read_ledger(store, PLACES), victim, tier=TIER, reason="thinned")
    deleted, kept = read_catalog(store, PLACES, TIER).checkpoints
    assert manifest_of(store, PLACES, deleted).global_step == 10
    assert manifest_of(store, PLACES, kept) == manifest_in(place_of(store, kept.folder))
    path = f"{PLACES.deleted}/{deleted.folder}.json"
    store.files[path] = store.files[path].replace(b'"global_step":10', b'"global_step":11')
    with pytest.raises(DamagedFile, match=deleted.folder):
        manifest_of(store, PLACES, deleted)
