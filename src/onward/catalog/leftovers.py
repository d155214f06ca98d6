"""What is unfinished in a run, who is at work on it, and what taking it over would clear up. Looks; never writes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from onward.catalog.lease import owner_state, read_lease, writer_lives
from onward.catalog.ledger import LedgerView
from onward.errors import OnwardError
from onward.format.codec import LIMITS, decode
from onward.format.names import INTENT, RunPlaces, parse_checkpoint_folder, parse_writing_folder
from onward.records import DeleteEntry, Intent, LeaseRecord
from onward.storage.base import Entry, NotFound, Store


@dataclass(frozen=True)
class Owner:
    """Who holds the run. ``unknown`` is an owner on another machine: only waiting for a beat can tell."""

    state: Literal["nobody", "alive", "dead", "unknown"]
    lease: LeaseRecord | None = None


@dataclass(frozen=True)
class AttemptFolder:
    """A save in progress, or what is left of one.

    ``abandoned``: it can never commit, or its writer is dead. ``in progress?``: its writer is on another machine.
    """

    name: str
    step: int
    sequence: int
    attempt: str
    state: Literal["in progress", "in progress?", "abandoned"]
    intent: Intent | None


@dataclass(frozen=True)
class RecoveryPlan:
    """What ``catalog/recovery.py`` would do, if the run were taken over now.

    Attributes:
        roll_back: Attempts that would be removed.
        remove: Links and files that bear an attempt's name.
        keep: Complete folders that no entry names and that nobody has told of yet; they would only get their story.
        finish: Deletes that were decided and are not done.
    """

    roll_back: tuple[AttemptFolder, ...]
    remove: tuple[str, ...]
    keep: tuple[str, ...]
    finish: tuple[DeleteEntry, ...]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to clear up."""
        return not (self.roll_back or self.remove or self.keep or self.finish)


def find_owner(store: Store, places: RunPlaces) -> Owner:
    """The lease, and whether its owner lives as far as this machine can see without waiting."""
    lease = read_lease(store, places)
    if lease is None:
        return Owner("nobody")
    return Owner("alive" if writer_lives(lease) else owner_state(lease), lease)


def find_attempts(store: Store, places: RunPlaces, view: LedgerView, owner: Owner) -> list[AttemptFolder]:
    """Every attempt's folder, oldest first."""
    return [
        attempt
        for item in _items(store, places.checkpoints)
        if item.kind == "folder" and (attempt := _attempt(store, places, item.name, view, owner)) is not None
    ]


def plan_recovery(store: Store, places: RunPlaces, view: LedgerView, owner: Owner) -> RecoveryPlan:
    """What would be cleared up; the fence would get the next number, and what is younger would not be touched."""
    fence = view.highest + 1
    items = _items(store, places.checkpoints)
    named = {entry.folder for entry in view.checkpoints()}
    told = {item.name for item in _items(store, places.attempts)}
    folders = {item.name for item in items if item.kind == "folder"}
    complete = {name: found for name in folders - named if (found := parse_checkpoint_folder(name))}
    return RecoveryPlan(
        roll_back=tuple(a for a in find_attempts(store, places, view, owner) if a.sequence <= fence),
        remove=tuple(
            item.name
            for item in items
            if item.kind != "folder" and (link := parse_writing_folder(item.name)) and link.sequence <= fence
        ),
        keep=tuple(sorted(n for n, (_, s) in complete.items() if s <= fence and f"folder-{n}.json" not in told)),
        finish=tuple(delete for delete in view.deletes.values() if delete.folder in folders),
    )


def _attempt(store: Store, places: RunPlaces, name: str, view: LedgerView, owner: Owner) -> AttemptFolder | None:
    parsed = parse_writing_folder(name)
    if parsed is None:
        return None
    # A number that is taken can never be committed under again: its writer, alive or not, has been superseded.
    state: Literal["in progress", "in progress?", "abandoned"] = "abandoned"
    if parsed.sequence > view.highest and owner.state in ("alive", "unknown"):
        state = "in progress" if owner.state == "alive" else "in progress?"
    intent: Intent | None = None
    with suppress(OnwardError):
        path = f"{places.checkpoint(name)}/{INTENT}"
        intent = decode(store.read(path, limit=LIMITS[INTENT]), Intent, path)
    return AttemptFolder(
        name=name, step=parsed.step, sequence=parsed.sequence, attempt=parsed.attempt, state=state, intent=intent
    )


def _items(store: Store, folder: str) -> list[Entry]:
    try:
        return store.list(folder)
    except NotFound:
        return []
