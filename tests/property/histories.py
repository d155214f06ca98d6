"""The model of a run that the state machine is compared with, and what must always hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from faulty_store import FaultyStore
from hypothesis.stateful import RuleBasedStateMachine, invariant

from onward.catalog.incarnation import Incarnation
from onward.catalog.ledger import read_ledger
from onward.catalog.listing import read_catalog
from onward.format.codec import encode
from onward.format.names import parse_writing_folder
from onward.records import CheckpointEntry, CheckpointInfo
from support import PLACES, TIER, dead_lease, die, memory_store, start

Done: Counter[str] = Counter()


@dataclass
class Known:
    """A checkpoint as the model knows it; ``files`` are the bytes that must be there as long as it is live."""

    step: int
    salt: int
    folder: str
    files: dict[str, bytes]
    whole: dict[str, bytes]
    quarantined: bool = False
    deleted: bool = False

    @property
    def damaged(self) -> bool:
        return self.files != self.whole

    @property
    def offered(self) -> bool:
        return not (self.deleted or self.quarantined)


@dataclass
class Pending:
    """What an operation that may fail anywhere is about to do."""

    step: int = 0
    salt: int = 0
    victim: int = 0
    source: Known | None = None
    folders: list[str] = field(default_factory=list)


class Histories(RuleBasedStateMachine):
    """The store, the model beside it, and what must hold after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = memory_store()
        self.store = FaultyStore(self.disk)
        self.known: dict[int, Known] = {}
        self.ledger: dict[str, bytes] = {}
        self.strangers: dict[str, dict[str, bytes]] = {}
        self.run: Incarnation | None = None
        self.old: list[Incarnation] = []
        self.salt = 0

    # --- what the rules share -----------------------------------------------------------------------------------

    def files_of(self, folder: str) -> dict[str, bytes]:
        base = f"{PLACES.checkpoint(folder)}/"
        return {p.removeprefix(base): d for p, d in self.disk.files.items() if p.startswith(base)}

    def leave(self) -> None:
        """The incarnation before is not there any more, or seems so; what it does later must come to nothing."""
        self.store.disarm()
        if self.run is not None:
            die(self.run)
            self.old.append(self.run)
            self.run = None
        if PLACES.lease in self.disk.files:
            self.disk.replace(PLACES.lease, encode(dead_lease()))

    def begin(self) -> Incarnation:
        """Takes over from whoever was there, alive or not."""
        self.leave()
        return start(self.store, lease_seconds=1e6)

    def learn(self, pending: Pending) -> None:
        """After an operation that may have been cut off: it took effect whole or not at all."""
        view = read_ledger(self.disk, PLACES) if PLACES.ledger in self.disk.folders else None
        for entry in view.checkpoints() if view else []:
            if entry.sequence not in self.known:
                assert entry.step == pending.step
                self.meet(entry, pending)
        for victim in view.deletes if view else ():
            assert self.known[victim].deleted or victim == pending.victim
            self.known[victim].deleted = True
        named = {known.folder for known in self.known.values()}
        for item in self.disk.list(PLACES.checkpoints) if PLACES.checkpoints in self.disk.folders else []:
            if item.name not in named and parse_writing_folder(item.name) is None:
                self.strangers.setdefault(item.name, self.files_of(item.name))

    def meet(self, entry: CheckpointEntry, pending: Pending) -> None:
        """A checkpoint that is new to the model: its number was never used, and is the highest."""
        assert entry.sequence > max(self.known, default=0)
        assert f"{entry.sequence:09d}" not in "".join(self.ledger), "a number was used twice"
        files = self.files_of(entry.folder)
        source = pending.source
        whole = dict(files) if source is None else dict(source.whole)
        step, salt = (pending.step, pending.salt) if source is None else (source.step, source.salt)
        self.known[entry.sequence] = Known(step, salt, entry.folder, files, whole)
        self.strangers.pop(entry.folder, None)
        for folder in pending.folders:
            self.strangers.pop(folder, None)

    def copy_by_hand(self, known: Known, folder: str) -> None:
        """Copies a checkpoint's folder as a person would, if the name is free."""
        old, new = PLACES.checkpoint(known.folder), PLACES.checkpoint(folder)
        if new in self.disk.folders:
            return
        for path in [p for p in self.disk.folders if p == old or p.startswith(f"{old}/")]:
            self.disk.folders[new + path[len(old) :]] = 0.0
        for path, data in known.files.items():
            self.disk.files[f"{new}/{path}"] = data
        self.strangers[folder] = self.files_of(folder)

    def pick(self, which: int, *, live: bool = True) -> tuple[int, Known] | None:
        choice = [(n, k) for n, k in sorted(self.known.items()) if not (live and k.deleted)]
        return choice[which % len(choice)] if choice else None

    def running(self) -> bool:
        return self.run is not None

    def new_pending(self, step: int) -> Pending:
        self.salt += 1
        return Pending(step=step, salt=self.salt)

    def offered_or_not(self) -> tuple[CheckpointInfo, ...]:
        return read_catalog(self.disk, PLACES, TIER).checkpoints

    # --- what always holds --------------------------------------------------------------------------------------

    @invariant()
    def what_is_offered_is_what_the_model_says(self) -> None:
        if PLACES.ledger not in self.disk.folders:
            return
        catalog = read_catalog(self.disk, PLACES, TIER)
        offered = [info.sequence for info in catalog.offered()]
        assert offered == sorted((n for n, known in self.known.items() if known.offered), reverse=True)
        newest = catalog.find("newest")
        assert (newest.sequence if newest else None) == max(offered, default=None)

    @invariant()
    def nothing_is_removed_or_changed_that_is_not_deleted(self) -> None:
        for known in self.known.values():
            if not known.deleted:
                assert self.files_of(known.folder) == known.files
        for folder, files in self.strangers.items():
            assert self.files_of(folder) == files, f"{folder} was copied in by hand, and touched"

    @invariant()
    def the_ledger_only_grows(self) -> None:
        now = {p: d for p, d in self.disk.files.items() if p.startswith(f"{PLACES.ledger}/0")}
        assert {path: now.get(path) for path in self.ledger} == self.ledger
        assert sorted(int(path[-14:-5]) for path in now) == list(range(1, len(now) + 1))
        self.ledger = now

    def teardown(self) -> None:
        for incarnation in [*self.old, *([self.run] if self.run else [])]:
            incarnation.lease._stop.set()
