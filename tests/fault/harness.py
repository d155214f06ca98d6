"""What the fault tests share: a store with a run, one step of its life at a time, and what must hold afterwards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from onward.catalog.deletion import delete_checkpoint
from onward.catalog.incarnation import Incarnation, begin
from onward.catalog.ledger import read_ledger
from onward.catalog.listing import Catalog, read_catalog
from onward.catalog.reader import Place
from onward.catalog.stores import init_store
from onward.format.names import RunPlaces
from onward.records import CheckpointInfo
from onward.save.pipeline import SaveResult, SaveSettings, save
from onward.storage.base import NotFound, Store, walk_files
from onward.storage.memory import MemoryStore
from onward.storage.posix import PosixStore
from onward.storage.syscalls import Syscalls
from onward.upkeep.verify import verify

from .state import captured, contents_of, context, read_contents

RUN = "r"
PLACES = RunPlaces(RUN)
NO_BEATS = 86400.0
"""Lease time of the sweeps: no beat falls into a run, so that every run makes the same calls."""
READ_LIMIT = 1 << 30


def posix(root: Path | str, calls: Syscalls | None = None) -> PosixStore:
    """The store of a test, with faults in between."""
    return PosixStore(root, calls=calls)


def start(store: Store) -> Incarnation:
    """Takes the run over."""
    return begin(store, RUN, lease_seconds=NO_BEATS)


def save_step(incarnation: Incarnation, step: int, *, threads: int = 3) -> SaveResult:
    """Saves the state of a step."""
    return save(incarnation, captured(step), context(), SaveSettings(threads=threads))


def delete_step(incarnation: Incarnation, step: int) -> None:
    """Deletes the newest live checkpoint of a step."""
    view = read_ledger(incarnation.store, PLACES)
    victim = next(entry for entry in reversed(view.live()) if entry.step == step)
    delete_checkpoint(incarnation.ledger, view, victim, tier=incarnation.tier, reason="test")


def make_store(root: Path, *steps: int) -> Path:
    """A new store whose run has committed these steps."""
    init_store(f"file://{root}")
    if steps:
        incarnation = start(posix(root))
        for step in steps:
            save_step(incarnation, step)
        incarnation.end()
    return root


def copy_store(template: Path, to: Path) -> Path:
    """A copy of a store to be ruined."""
    shutil.copytree(template, to, symlinks=True)
    return to


# --- what must hold -----------------------------------------------------------------------------------------------


class Broken(AssertionError):
    """An invariant does not hold; ``invariant`` names it."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


@dataclass(frozen=True)
class Seen:
    """What a take-over found: the steps that can be loaded, newest first."""

    steps: tuple[int, ...]
    catalog: Catalog
    incarnation: Incarnation


def held_by(store: Store, info: CheckpointInfo) -> dict[str, bytes]:
    """The contents of a checkpoint, by the reader that is not Onward's."""
    folder = PLACES.checkpoint(info.folder)
    return dict(read_contents(lambda path: store.read(f"{folder}/{path}", limit=READ_LIMIT)))


def check_checkpoint(store: Store, info: CheckpointInfo) -> None:
    """A checkpoint that is offered holds exactly the state of its step, and verifies.

    Raises:
        Broken: *intact*.
    """
    place = Place(store=store, root=PLACES.checkpoint(info.folder), tier=info.tier, name=info.folder)
    report = verify(place, info, run=RUN, threads=1)
    if not report.ok:
        raise Broken("intact", f"{info.folder}: {report.findings[0].file}: {report.findings[0].message}")
    try:
        same = held_by(store, info) == dict(contents_of(info.step))
    except (AssertionError, KeyError, ValueError) as error:
        raise Broken("intact", f"{info.folder} verifies, but is not whole: {error}") from error
    if not same:
        raise Broken("intact", f"{info.folder} verifies, but holds another state")


def examine(store: Store) -> tuple[Seen | None, list[Broken]]:
    """Takes over what a fault has left, and checks all that is offered.

    Returns:
        What was found, and what is broken: *takes over*, *intact*, *readable* (a finding in ledger or receipts),
        *live* (the ledger and the listing disagree), *cleared* (leftovers).
    """
    broken: list[Broken] = []
    try:
        incarnation = start(store)
        catalog = read_catalog(store, PLACES, incarnation.tier)
    except Exception as error:
        found = Broken("takes over", f"{type(error).__name__}: {error}")
        found.__cause__ = error
        return None, [found]
    incarnation.end()
    broken += [Broken("readable", f"{f.code}: {f.file}: {f.message}") for f in catalog.findings]
    offered = catalog.offered()
    for info in offered:
        try:
            check_checkpoint(store, info)
        except Broken as problem:
            broken.append(problem)
    known = {info.folder for info in catalog.checkpoints if info.status in ("committed", "quarantined")}
    broken += [
        Broken("live", f"the ledger calls {entry.folder} live, but it is deleted, or half deleted")
        for entry in catalog.view.live()
        if entry.folder not in known
    ]
    left = [item.name for item in catalog.foreign if item.kind == "attempt"]
    left += [info.folder for info in catalog.checkpoints if info.status == "deleting"]
    broken += [Broken("cleared", f"left after recovery: {name}") for name in left]
    seen = Seen(steps=tuple(info.step for info in offered), catalog=catalog, incarnation=incarnation)
    return seen, broken


def take_over(store: Store) -> Seen:
    """What ``examine`` finds; raises the first thing that is broken."""
    seen, broken = examine(store)
    for problem in broken:
        raise problem
    assert seen is not None
    return seen


def temporary(store: Store) -> list[str]:
    """Temporary files that lie about."""
    return [path for path, _ in walk_files(store, PLACES.root) if path.endswith(".tmp")]


def snapshot(store: Store) -> dict[str, bytes]:
    """Every file of the run except the lease and the entries that a take-over must add."""
    opens = {PLACES.entry(n).removeprefix(f"{PLACES.root}/") for n, e in _entries(store) if e == "OpenEntry"}
    found: dict[str, bytes] = {}
    for path, entry in walk_files(store, PLACES.root):
        if entry.kind == "file" and path not in opens and path != "lease.json":
            found[path] = store.read(f"{PLACES.root}/{path}", limit=READ_LIMIT)
    return found


def _entries(store: Store) -> Iterable[tuple[int, str]]:
    return [(n, type(e).__name__) for n, e in read_ledger(store, PLACES).entries.items()]


def check_second_recovery(store: Store) -> None:
    """Recovering again changes nothing.

    Raises:
        Broken: *idempotent*.
    """
    before = snapshot(store)
    start(store).end()
    after = snapshot(store)
    if before != after:
        differ = sorted(set(before.items()) ^ set(after.items()))
        raise Broken("idempotent", f"a second recovery changed {differ[0][0]}")


def check_stories(store: Store) -> None:
    """The run's own record and every attempt's story can be read, and the manifest of everything that was deleted.

    Raises:
        Broken: *readable*, *described*.
    """
    if store.stat(PLACES.run_file).size == 0:
        raise Broken("readable", "run.json is empty")
    for name, item in walk_files(store, PLACES.attempts):
        if item.size == 0:
            raise Broken("readable", f"the story attempts/{name} is empty")
    for delete in read_ledger(store, PLACES).deletes.values():
        with suppress(NotFound):
            store.list(PLACES.checkpoint(delete.folder))
            continue
        try:
            data = store.read(f"{PLACES.deleted}/{delete.folder}.json", limit=READ_LIMIT)
        except NotFound:
            raise Broken("described", f"nothing is left of {delete.folder}, and no manifest of it") from None
        if b'"global_step"' not in data:
            raise Broken("described", f"the manifest of the deleted {delete.folder} is empty")


def as_memory(root: Path) -> MemoryStore:
    """A copy of a store on disk in memory: recovering it there costs no fsync."""
    store = MemoryStore(f"copy-of-{root}")
    for folder, folders, files in os.walk(root):
        inside = os.path.relpath(folder, root)
        prefix = "" if inside == "." else f"{inside}/"
        for name in folders:
            store.folders[prefix + name] = 0.0
        for name in files:
            store.files[prefix + name] = (Path(folder) / name).read_bytes()
    return store
