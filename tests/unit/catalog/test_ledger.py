"""The ledger: numbered, chained, append-only, and what an incarnation does when the store answers strangely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from onward.catalog.incarnation import Incarnation
from onward.catalog.ledger import Ledger, create_entry, read_ledger, take_over
from onward.catalog.voids import give_up_number
from onward.errors import Damaged, StorageError, Superseded
from onward.format.codec import decode_entry, encode_sealed
from onward.format.digests import sha256
from onward.format.names import RunPlaces
from onward.records import CheckpointEntry, LedgerEntry, OpenEntry, VoidEntry
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


# --- appending ---------------------------------------------------------------------------------------------------


def test_an_incarnation_appends_at_its_own_last_number_and_nowhere_else(run: Incarnation) -> None:
    assert (run.ledger.epoch, run.ledger.next) == (1, 2)
    give_up_number(run.ledger, "a", "test")
    assert (run.ledger.last, run.ledger.next) == (2, 3)


def test_an_incarnation_that_finds_its_number_taken_stops_for_good(store: MemoryStore) -> None:
    first = start(store)
    commit(first, 10)
    die(first)
    second = start(store)
    for _ in range(2):
        with pytest.raises(Superseded):
            give_up_number(first.ledger, "a", "test")
    commit(second, 20)
    assert [e.step for e in read_ledger(store, PLACES).live()] == [10, 20]
    second.end()


def test_a_view_ends_at_the_fence_of_the_one_who_looks(written: MemoryStore) -> None:
    _, view = take_over(written, PLACES)
    assert view.highest == 6
    assert [e.sequence for e in view.until(3).checkpoints()] == [2, 3]


RIVAL = encode_sealed(
    OpenEntry(format=1, run=RUN, sequence=1, previous="", incarnation="rival", time="t", host="h", pid=1)
)
DONE, NOT_DONE, RIVALS, GARBLED = "done, answered with an error", "not done", "another was there", "garbled"


class Strange(MemoryStore):
    """A store whose answers to ledger writes follow a script; reads fail when told to."""

    def __init__(self, *script: str) -> None:
        super().__init__("strange")
        self.script, self.reads = list(script), 0
        for folder in ("runs", *PLACES.folders):
            self.make_folder(folder)

    def create(self, path: str, data: bytes, *, content: Barrier, name: Barrier | None) -> None:
        answer = self.script.pop(0) if self.script else ""
        if not answer:
            super().create(path, data, content=content, name=name)
            return
        if answer != NOT_DONE:
            self.files[path] = {RIVALS: RIVAL, GARBLED: data[:-9] + b"x" * 9}.get(answer, data)
        if answer.isdecimal():
            self.reads = int(answer)
        raise StorageError(f"EIO ({answer})")

    def read(self, path: str, *, limit: int) -> bytes:
        if self.reads > 0:
            self.reads -= 1
            raise StorageError("EIO on reading")
        return super().read(path, limit=limit)


@pytest.mark.parametrize(
    ("script", "mine"),
    [
        ([DONE], True),
        ([NOT_DONE], True),
        ([NOT_DONE, NOT_DONE], True),
        ([NOT_DONE, DONE], True),
        ([RIVALS], False),
        ([NOT_DONE, RIVALS], False),
        (["1"], True),  # done, and unreadable once
        (["2"], True),
    ],
)
def test_after_every_error_the_entry_is_read_back(script: list[str], mine: bool) -> None:
    """Mine: go on. Absent: try again. Another's: superseded. An answer alone decides nothing."""
    store = Strange(*script)
    assert create_entry(store, PLACES, 1, b"mine") is mine
    assert store.files[PLACES.entry(1)] == (b"mine" if mine else RIVAL)


def test_a_store_that_never_takes_the_entry_is_an_error() -> None:
    with pytest.raises(StorageError, match="EIO"):
        create_entry(Strange(*[NOT_DONE] * 9), PLACES, 1, b"mine")


def _ledger(store: MemoryStore) -> Ledger:
    fence = OpenEntry(format=1, run=RUN, sequence=1, previous="", incarnation="i", time="t", host="h", pid=1)
    put(store, 1, fence)
    return Ledger(store, PLACES, fence, sha256(store.files[PLACES.entry(1)]))


def _append(ledger: Ledger, build: Callable[[int, str], LedgerEntry] | None = None) -> LedgerEntry:
    def void(sequence: int, previous: str) -> LedgerEntry:
        common: dict[str, Any] = {"format": 1, "run": RUN, "incarnation": "i", "epoch": 1, "time": "t"}
        return VoidEntry(**common, sequence=sequence, previous=previous, attempt="a", reason="r")

    return ledger.append(build or void, Barrier.LEDGER_COMMIT)


def test_an_entry_that_could_not_be_read_back_does_not_make_its_own_writer_superseded() -> None:
    """Created, answered with an error, and unreadable for a while: the next append finds that it was its own."""
    store = Strange()
    ledger = _ledger(store)
    store.script = ["9"]
    with pytest.raises(StorageError):
        _append(ledger)
    store.reads = 0
    assert _append(ledger).sequence == 3
    assert sorted(store.files) == [PLACES.entry(n) for n in (1, 2, 3)]
    assert read_ledger(store, PLACES).findings == ()


def test_an_entry_that_was_not_written_leaves_its_number_to_the_next() -> None:
    store = Strange()
    ledger = _ledger(store)
    store.script = [NOT_DONE] * 9
    with pytest.raises(StorageError):
        _append(ledger)
    store.script = []
    assert _append(ledger).sequence == 2


def test_a_number_that_holds_garbled_bytes_ends_this_incarnation_but_names_no_other_job() -> None:
    """The disk altered the entry: nothing can be appended any more, and a restart, not another job, is the answer."""
    store = Strange(GARBLED)
    ledger = _ledger(store)
    for _ in range(2):
        with pytest.raises(StorageError, match="no entry") as caught:
            _append(ledger)
        assert "restart" in caught.value.next_step
    assert sorted(store.files) == [PLACES.entry(1), PLACES.entry(2)]


def test_an_entry_of_a_later_format_at_its_number_means_superseded() -> None:
    """A newer program has taken over; the one before must stop, whatever it can read of the entry."""
    store = Strange()
    ledger = _ledger(store)
    store.files[PLACES.entry(2)] = b'{"format":2,"kind":"open"}\n'
    with pytest.raises(Superseded):
        _append(ledger)


def test_an_entry_whose_barrier_failed_keeps_its_number() -> None:
    """It is there, and may or may not survive a power cut; the next entry must not take its number."""
    store = Strange()
    ledger = _ledger(store)
    sync = store.sync_folder
    store.sync_folder = lambda path, barrier: (_ for _ in ()).throw(StorageError("EIO"))  # type: ignore[method-assign]
    with pytest.raises(StorageError):
        _append(ledger)
    assert ledger.last == 2
    store.sync_folder = sync  # type: ignore[method-assign]
    assert _append(ledger).sequence == 3


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
