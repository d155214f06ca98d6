"""The ledger: the one truth about a run.

Entries are numbered files, each created only if absent and never removed. An incarnation fences the others with an
``open`` entry, and from then on appends at its own last number + 1 and nowhere else. Finding that number taken
means that a newer incarnation has begun: it stops for good and deletes nothing. Each rule here removes a
counterexample that the model in ``tests/model`` finds when the rule is taken away.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from onward.catalog.stamp import host, now, token
from onward.errors import Damaged, FormatError, OnwardError, StorageError, Superseded, UnknownFormat
from onward.format.codec import ENTRY_LIMIT, decode_entry, encode_sealed
from onward.format.digests import sha256
from onward.format.names import RunPlaces, parse_entry
from onward.records import FORMAT, CheckpointEntry, DeleteEntry, Finding, LedgerEntry, OpenEntry
from onward.storage.base import Barrier, NotFound, Store

_CREATE_TRIES = 3
_LARGEST_GAP = 1000


@dataclass(frozen=True)
class LedgerView:
    """The ledger as it was read: good entries by number, and what is wrong with the others."""

    run: str
    entries: dict[int, LedgerEntry]
    digests: dict[int, str]
    findings: tuple[Finding, ...] = ()
    highest: int = 0
    deletes: dict[int, DeleteEntry] = field(default_factory=dict)

    def checkpoints(self) -> list[CheckpointEntry]:
        """All commits, oldest first, live or not."""
        return [e for _, e in sorted(self.entries.items()) if isinstance(e, CheckpointEntry)]

    def is_live(self, entry: CheckpointEntry) -> bool:
        """The one predicate: a checkpoint exists from its entry on, until a delete entry names it."""
        return entry.sequence in self.entries and entry.sequence not in self.deletes

    def live(self) -> list[CheckpointEntry]:
        """Live checkpoints, oldest first; the newest is the one with the highest sequence, not step."""
        return [entry for entry in self.checkpoints() if self.is_live(entry)]

    def until(self, fence: int) -> LedgerView:
        """The part at or below a fence."""
        entries = {n: e for n, e in self.entries.items() if n <= fence}
        return _view(self.run, entries, {n: d for n, d in self.digests.items() if n <= fence}, self.findings, fence)


def read_ledger(store: Store, places: RunPlaces) -> LedgerView:
    """Reads and checks every entry.

    The folder is synced after it was listed: an entry that is seen but not durable may vanish with the power, and
    with it the ground under whatever was built on it.
    """
    numbers = _numbers(store, places)
    store.sync_folder(places.ledger, Barrier.LEDGER_BELIEVED)
    entries: dict[int, LedgerEntry] = {}
    digests: dict[int, str] = {}
    findings: list[Finding] = []
    highest = 0
    for number in numbers:
        if number - highest > _LARGEST_GAP:
            # Numbers are given one by one: a file so far off is nobody's entry, and must not be counted up to.
            findings.append(
                Finding(code="ledger-stray", message="no ledger reaches this number", file=places.entry(number))
            )
            break
        highest = number
    for number in range(1, highest + 1):
        path = places.entry(number)
        try:
            data = store.read(path, limit=ENTRY_LIMIT)
            digests[number] = sha256(data)
            entries[number] = _checked(decode_entry(data, path), places.run, number)
        except NotFound:
            findings.append(Finding(code="ledger-gap", message=f"entry {number} is missing", file=path))
        except Damaged as error:
            findings.append(Finding(code="ledger-damaged", message=error.message, file=path))
    for number, entry in list(entries.items()):
        before = digests.get(number - 1, "")
        if (number == 1 or number - 1 in digests) and entry.previous != before:
            # The later entry vouches for the earlier one: what it does not vouch for was changed after the fact.
            changed = max(number - 1, 1)
            entries.pop(changed, None)
            findings.append(
                Finding(
                    code="ledger-chain",
                    message=f"entry {number} vouches for another entry {number - 1} than the one that is there",
                    file=places.entry(changed),
                )
            )
    return _view(places.run, entries, digests, tuple(findings), highest)


def _numbers(store: Store, places: RunPlaces) -> list[int]:
    """The numbers that are taken, whatever stands there: a link or a folder takes a number as well as an entry."""
    found = [parse_entry(item.name) for item in store.list(places.ledger)]
    return sorted(number for number in found if number is not None)


def _checked(entry: LedgerEntry, run: str, number: int) -> LedgerEntry:
    if entry.run != run or entry.sequence != number:
        raise FormatError(f"entry {number} of {run!r} says it is entry {entry.sequence} of {entry.run!r}")
    return entry


def _view(
    run: str,
    entries: dict[int, LedgerEntry],
    digests: dict[int, str],
    findings: tuple[Finding, ...],
    highest: int,
) -> LedgerView:
    deletes = {
        e.victim: e
        for e in entries.values()
        if isinstance(e, DeleteEntry) and getattr(entries.get(e.victim), "folder", e.folder) == e.folder
    }
    return LedgerView(run=run, entries=entries, digests=digests, findings=findings, highest=highest, deletes=deletes)


class Ledger:
    """The appending side of the ledger, for one incarnation. Made by ``take_over`` only."""

    def __init__(self, store: Store, places: RunPlaces, fence: OpenEntry, digest: str) -> None:
        self.store, self.places = store, places
        self.incarnation = fence.incarnation
        self.epoch = fence.sequence
        self.last = fence.sequence
        self._digest = digest
        self._superseded = False
        self._spoilt = ""
        self._pending: tuple[int, bytes] | None = None
        self.lock = threading.RLock()

    @property
    def next(self) -> int:
        """The only number at which this incarnation may append."""
        return self.last + 1

    def append(self, build: Callable[[int, str], LedgerEntry], barrier: Barrier) -> LedgerEntry:
        """Appends the entry that ``build(sequence, previous)`` returns, and makes it durable.

        Raises:
            Superseded: The number is taken: a newer incarnation has begun.
            StorageError: The entry is not there, or is there and not known to be durable (``last`` tells which).
        """
        with self.lock:
            self.settle()
            if self._superseded:
                raise Superseded(f"{self.places.run}: this incarnation was superseded before")
            number = self.next
            data = encode_sealed(build(number, self._digest))
            self._pending = (number, data)
            self._take(number, data, self._find(number, data, create_entry))
            self.store.sync_folder(self.places.ledger, barrier)
            return decode_entry(data, self.places.entry(number))

    def entry(self, number: int) -> LedgerEntry:
        """An entry as it stands in the store."""
        path = self.places.entry(number)
        return decode_entry(self.store.read(path, limit=ENTRY_LIMIT), path)

    def overtaken(self) -> bool:
        """Whether a newer incarnation has begun, as far as the store says so now."""
        with suppress(OnwardError):
            return self.entry(self.next).incarnation != self.incarnation
        return False

    def settle(self) -> None:
        """Finds out how an append ended whose answer was lost.

        Without it an incarnation would find its own entry at its next number and take itself for superseded.

        Raises:
            StorageError: The store does not answer.
            Superseded: Another's entry is there.
        """
        with self.lock:
            if self._spoilt:
                raise self._unusable()
            if self._pending is not None:
                number, data = self._pending
                try:
                    self._take(number, data, self._find(number, data, _is_there))
                except NotFound:
                    self._pending = None

    def _find(self, number: int, data: bytes, look: Callable[[Store, RunPlaces, int, bytes], bool]) -> bool:
        try:
            return look(self.store, self.places, number, data)
        except Damaged as error:
            # This incarnation may append at this number only, and it is spoilt: it can commit nothing any more. That
            # is no other job's doing, so a restart is the way out: it takes over at the next number.
            self._spoilt = f"ledger number {number} is taken by what is no entry: {error.message}"
            raise self._unusable() from error

    def _unusable(self) -> StorageError:
        return StorageError(
            f"{self.places.run}: {self._spoilt}",
            next_step="restart the job: it takes over at the next number; check the disk that alters bytes",
        )

    def _take(self, number: int, data: bytes, mine: bool) -> None:
        self._pending = None
        if not mine:
            self._superseded = True
            raise Superseded(f"{self.places.run}: ledger number {number} belongs to a newer incarnation")
        self.last, self._digest = number, sha256(data)


def reattach(store: Store, places: RunPlaces, *, epoch: int, incarnation: str) -> Ledger:
    """The appending side of an incarnation's ledger in another process, as far as that incarnation has come.

    Two processes must never append for one incarnation at a time: the first one has ended, or only watches.

    Raises:
        Superseded: The fence is not there any more as this incarnation's.
    """
    store.sync_folder(places.ledger, Barrier.LEDGER_BELIEVED)
    data = store.read(places.entry(epoch), limit=ENTRY_LIMIT)
    fence = decode_entry(data, places.entry(epoch))
    if not isinstance(fence, OpenEntry) or fence.incarnation != incarnation:
        raise Superseded(f"{places.run}: entry {epoch} is not the fence of this incarnation")
    ledger = Ledger(store, places, fence, sha256(data))
    with suppress(NotFound):
        while True:
            data = store.read(places.entry(ledger.next), limit=ENTRY_LIMIT)
            if decode_entry(data, places.entry(ledger.next)).incarnation != incarnation:
                break  # a newer one's: the next append finds it and says so
            ledger.last, ledger._digest = ledger.next, sha256(data)
    return ledger


def create_entry(store: Store, places: RunPlaces, number: int, data: bytes) -> bool:
    """Creates entry ``number``; False when another's entry is there.

    An error answers nothing: the creation may have taken effect and only its answer been lost. So after every
    error the entry is read back: mine, absent (try again), or another's.

    Raises:
        StorageError: It is absent, or cannot be read back, after several tries.
    """
    path = places.entry(number)
    failure: StorageError | None = None
    for _ in range(_CREATE_TRIES):
        try:
            store.create(path, data, content=Barrier.ENTRY, name=None)
        except StorageError as error:
            failure = error
        try:
            return _is_there(store, places, number, data)
        except StorageError as error:
            failure = failure or error
    raise failure or StorageError(f"{path} was created, but is not there")


def _is_there(store: Store, places: RunPlaces, number: int, data: bytes) -> bool:
    """Whether entry ``number`` is mine; False when it is a newer incarnation's.

    Raises:
        NotFound: It is absent.
        Damaged: The number is taken by what is nobody's entry: altered bytes, a link, a folder.
    """
    path = places.entry(number)
    found = store.read(path, limit=ENTRY_LIMIT)
    if found == data:
        return True
    with suppress(UnknownFormat):  # a newer program's is whole too
        decode_entry(found, path)  # a whole entry of somebody else's; altered bytes are no sign of another job
    return False


def take_over(store: Store, places: RunPlaces) -> tuple[Ledger, LedgerView]:
    """Begins an incarnation: creates its ``open`` entry, then reads what stands at or below it.

    The fence comes first. Choosing a resume point or touching anything before it would race with a writer that
    was only paused.
    """
    view = read_ledger(store, places)
    number, before = view.highest + 1, view.digests.get(view.highest, "")
    while True:
        fence = OpenEntry(
            format=FORMAT,
            run=places.run,
            sequence=number,
            previous=before,
            incarnation=token(),
            time=now(),
            host=host(),
            pid=os.getpid(),
        )
        data = encode_sealed(fence)
        with suppress(Damaged):  # taken by what is no entry: its number is passed over like any taken one
            if create_entry(store, places, number, data):
                break
        before = ""
        with suppress(Damaged, NotFound):
            before = sha256(store.read(places.entry(number), limit=ENTRY_LIMIT))
        # Without this a power cut could keep the fence and lose the entry that it walked past: a hole in the chain.
        store.sync_folder(places.ledger, Barrier.LEDGER_BELIEVED)
        number += 1
    # The fence needs no barrier of its own: whatever is built on it syncs the same folder first, and if it is lost
    # together with all that, nothing was built on it.
    return Ledger(store, places, fence, sha256(data)), read_ledger(store, places).until(number)
