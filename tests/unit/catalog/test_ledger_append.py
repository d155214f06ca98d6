"""Appending to the ledger: what an incarnation does when the store answers strangely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onward.catalog.incarnation import Incarnation
from onward.catalog.ledger import Ledger, create_entry, read_ledger
from onward.catalog.voids import give_up_number
from onward.errors import StorageError, Superseded
from onward.format.codec import encode_sealed
from onward.format.digests import sha256
from onward.records import LedgerEntry, OpenEntry, VoidEntry
from onward.storage.base import Barrier
from onward.storage.memory import MemoryStore
from support import PLACES, RUN, commit, die, start


def put(store: MemoryStore, number: int, entry: LedgerEntry) -> None:
    store.files[PLACES.entry(number)] = encode_sealed(entry)


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
