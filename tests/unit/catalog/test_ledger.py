"""The ledger: numbered, chained, append-only, and what an incarnation does when the store answers strangely."""

from __future__ import annotations

import msgspec
import pytest

from onward.catalog.ledger import read_ledger, take_over
from onward.errors import Damaged
from onward.format.codec import decode_entry, encode_sealed
from onward.format.digests import sha256
from onward.format.names import RunPlaces
from onward.records import CheckpointEntry, LedgerEntry
from onward.storage.base import Barrier, NotFound
from onward.storage.memory import MemoryStore
from support import PLACES, RUN, commit, die, start


def entry_of(store: MemoryStore, number: int) -> LedgerEntry:
    return decode_entry(store.files[PLACES.entry(number)], "entry")


def put(store: MemoryStore, number: int, entry: LedgerEntry) -> None:
    store.files[PLACES.entry(number)] = encode_sealed(entry)


def codes(store: MemoryStore) -> list[tuple[str, str]]:
    return [(finding.code, finding.file.rpartition("/")[2]) for finding in read_ledger(store, PLACES).findings]


@pytest.fixture
def written(store: MemoryStore) -> MemoryStore:
    """open 1, commits 2 and 3, open 4, commit 5."""
    first = start(store)
    commit(first, 10)
    commit(first, 20)
    die(first)
    second = start(store)
    commit(second, 30)
    die(second)
    return store


def test_numbers_follow_one_another_and_each_entry_vouches_for_the_one_before(written: MemoryStore) -> None:
    view = read_ledger(written, PLACES)
    assert [type(view.entries[n]).__name__ for n in sorted(view.entries)] == [
        *("OpenEntry", "CheckpointEntry", "CheckpointEntry", "OpenEntry", "CheckpointEntry")
    ]
    digests = [sha256(written.files[PLACES.entry(n)]) for n in range(1, 6)]
    assert [view.entries[n].previous for n in range(1, 6)] == ["", *digests[:-1]]
    assert (view.findings, view.highest) == ((), 5)
    assert [(e.sequence, e.step) for e in view.live()] == [(2, 10), (3, 20), (5, 30)]


def test_latest_means_highest_sequence_not_highest_step(store: MemoryStore) -> None:
    """T26: after a rollback a lower step is newer, and is what a resume takes."""
    run = start(store)
    for step in (1000, 90, 10):
        commit(run, step)
    run.end()
    assert [entry.step for entry in read_ledger(store, PLACES).live()] == [1000, 90, 10]


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_gap_is_found_and_costs_only_its_own_entry(written: MemoryStore, number: int) -> None:
    del written.files[PLACES.entry(number)]
    assert codes(written) == [("ledger-gap", f"{number:09d}.json")]
    assert sorted(read_ledger(written, PLACES).entries) == [n for n in range(1, 6) if n != number]


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_an_entry_changed_with_a_right_digest_is_found_by_the_next_one(written: MemoryStore, number: int) -> None:
    """Whoever can write the store can seal a forged entry; the chain still tells."""
    put(written, number, msgspec.structs.replace(entry_of(written, number), time="another"))
    found = read_ledger(written, PLACES)
    assert number not in found.entries
    assert ("ledger-chain", f"{number:09d}.json") in codes(written)
    assert [e.sequence for e in found.live()] == [n for n in (2, 3, 5) if n != number]


def test_an_entry_under_another_number_or_of_another_run_is_not_believed(written: MemoryStore) -> None:
    good = dict(written.files)
    written.files[PLACES.entry(6)] = good[PLACES.entry(5)]
    assert ("ledger-damaged", "000000006.json") in codes(written)
    written.files = dict(good)
    put(written, 5, msgspec.structs.replace(entry_of(written, 5), run="other"))
    assert ("ledger-damaged", "000000005.json") in codes(written)
    assert [e.sequence for e in read_ledger(written, PLACES).live()] == [2, 3]


def test_files_that_are_no_entries_are_not_looked_at(written: MemoryStore) -> None:
    for name in (".000000006.json.ab.tmp", "6.json", "000000006.json~", "000000006.json.bak", "README"):
        written.files[f"{PLACES.ledger}/{name}"] = b"whatever"
    assert codes(written) == []
    assert read_ledger(written, PLACES).highest == 5


def test_a_number_that_no_ledger_reaches_is_told_and_not_counted_up_to(written: MemoryStore) -> None:
    """A planted file must not make every start read a billion numbers, nor end the run at the largest one."""
    for name in ("999999999.json", "999999999999999999.json"):
        written.files[f"{PLACES.ledger}/{name}"] = b"{}"
    view = read_ledger(written, PLACES)
    assert view.highest == 5
    assert ("ledger-stray", "999999999.json") in codes(written)
    run = start(written)
    assert run.ledger.epoch == 6
    run.end()


def test_a_damaged_delete_does_not_remove_and_does_not_name_another_folder(written: MemoryStore) -> None:
    from onward.records import DeleteEntry

    last = entry_of(written, 5)
    delete = DeleteEntry(
        format=1,
        run=RUN,
        sequence=6,
        previous=sha256(written.files[PLACES.entry(5)]),
        incarnation=last.incarnation,
        epoch=4,
        victim=2,
        folder="step-000000000099-2",
        reason="",
        actor="",
        time="",
    )
    put(written, 6, delete)
    assert [e.sequence for e in read_ledger(written, PLACES).live()] == [2, 3, 5], "of another folder than the victim's"
    put(written, 6, msgspec.structs.replace(delete, folder="step-000000000010-2"))
    assert [e.sequence for e in read_ledger(written, PLACES).live()] == [3, 5]


def test_a_view_ends_at_the_fence_of_the_one_who_looks(written: MemoryStore) -> None:
    _, view = take_over(written, PLACES)
    assert view.highest == 6
    assert [e.sequence for e in view.until(3).checkpoints()] == [2, 3]


def test_a_takeover_walks_up_past_numbers_that_others_take_meanwhile(written: MemoryStore) -> None:
    """Two starts at once: both read the same highest number, one is first, the other stands above it."""
    create = written.create
    rivals = [b"rival six", b"rival seven"]

    def late(path: str, data: bytes, *, content: Barrier, name: Barrier | None) -> None:
        if path.startswith(PLACES.ledger) and rivals:
            written.files[path] = rivals.pop(0)
        create(path, data, content=content, name=name)

    written.create = late  # type: ignore[method-assign]
    ledger, view = take_over(written, PLACES)
    assert ledger.epoch == 8
    assert [e.sequence for e in view.live()] == [2, 3, 5]
    assert entry_of(written, 8).previous == sha256(b"rival seven")


def test_a_run_that_is_not_there_has_no_ledger(store: MemoryStore) -> None:
    with pytest.raises(NotFound):
        read_ledger(store, RunPlaces("nobody"))


def test_the_one_predicate_says_what_exists(written: MemoryStore) -> None:
    view = read_ledger(written, PLACES)
    entry = view.entries[2]
    assert isinstance(entry, CheckpointEntry)
    assert view.is_live(entry)
    assert not view.is_live(msgspec.structs.replace(entry, sequence=9))
    assert issubclass(Damaged, Exception)
