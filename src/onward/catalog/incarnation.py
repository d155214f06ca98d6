"""An incarnation of a run: from the lease and the fence to a cleared-up store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from onward.catalog.lease import Lease, acquire
from onward.catalog.ledger import Ledger, LedgerView, take_over
from onward.catalog.recovery import recover
from onward.catalog.stamp import actor, now
from onward.catalog.stores import open_home
from onward.errors import ConfigurationError, Damaged
from onward.format.codec import SMALL_LIMIT, decode_sealed, encode_sealed
from onward.format.names import RUNS, RunPlaces, run_name
from onward.records import FORMAT, AttemptOutcome, RunRecord
from onward.storage.base import AlreadyExists, Barrier, Store

DEFAULT_LEASE_SECONDS = 30.0


@dataclass(frozen=True)
class Home:
    """The run's first shared tier, and the right to append to its ledger: all that a save needs."""

    store: Store
    tier: str
    ledger: Ledger

    @property
    def places(self) -> RunPlaces:
        """Where the run's files are."""
        return self.ledger.places


@dataclass(frozen=True)
class Incarnation(Home):
    """A process that has taken a run over and may write to it."""

    view: LedgerView
    lease: Lease
    recovered: tuple[AttemptOutcome, ...]

    def end(self) -> None:
        """Gives the lease back; nothing else is needed."""
        self.lease.release()


def make_run(store: Store, places: RunPlaces) -> None:
    """Makes a run's folders, durably; does nothing to those that are there."""
    for folder in places.folders:
        store.make_folder(folder, exist_ok=True)
    record = RunRecord(format=FORMAT, run=places.run, created=now(), created_by=actor())
    try:
        store.create(places.run_file, encode_sealed(record), content=Barrier.META, name=None)
    except AlreadyExists:
        # Nothing rests on this file but the name: a damaged one must not stand between a run and its checkpoints.
        with suppress(Damaged):
            found = decode_sealed(store.read(places.run_file, limit=SMALL_LIMIT), RunRecord, places.run_file)
            if found.run != places.run:
                raise ConfigurationError(
                    f"{places.root} holds the run {found.run!r}", next_step="rename the folder back to its run's name"
                ) from None
    # Also when the folders were there: a start before this one may have been cut off before its own barrier.
    for folder in (RUNS, places.root):
        store.sync_folder(folder, Barrier.RUN_FOLDER)


def begin(
    store: Store | str,
    run: str,
    *,
    lease_seconds: float = DEFAULT_LEASE_SECONDS,
    say: Callable[[str], None] = lambda _: None,
) -> Incarnation:
    """Takes a run over: lease, fence, recovery. Only then may a resume point be chosen or anything be written.

    Args:
        store: The home, or its URL.
        run: The run's name; it is made when it does not exist.
        lease_seconds: See ``lease.acquire``.
        say: Told what happens, for people.

    Raises:
        StoreMissing: There is no store at the place.
        InvalidName: The run cannot be called so.
        Busy: Another live process uses the run.
    """
    home, record = open_home(store)
    places = RunPlaces(run_name(run))
    make_run(home, places)
    lease = acquire(home, places, lease_seconds=lease_seconds, say=say)
    try:
        ledger, view = take_over(home, places)
        outcomes = recover(ledger, view, tier=record.tier)
    except BaseException:
        lease.release()
        raise
    return Incarnation(
        store=home,
        tier=record.tier,
        ledger=ledger,
        view=view,
        lease=lease,
        recovered=tuple(outcomes),
    )
