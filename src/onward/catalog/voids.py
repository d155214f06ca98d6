"""Giving numbers up: a ``void`` entry takes a number out of the game before anything that it named is removed."""

from __future__ import annotations

from onward.catalog.ledger import Ledger
from onward.catalog.stamp import now, token
from onward.format.names import checkpoint_folder
from onward.records import FORMAT, LedgerEntry, VoidEntry
from onward.storage.base import Barrier


def give_up_number(ledger: Ledger, attempt: str, reason: str) -> None:
    """Wins the next number with a ``void`` entry, so that a late duplicate of the attempt's own can never count.

    Raises:
        Superseded: A newer incarnation has the number; nothing may be removed.
        StorageError: The store refuses; nothing may be removed.
    """

    def build(sequence: int, previous: str) -> LedgerEntry:
        return VoidEntry(
            format=FORMAT,
            run=ledger.places.run,
            sequence=sequence,
            previous=previous,
            incarnation=ledger.incarnation,
            epoch=ledger.epoch,
            attempt=attempt,
            reason=reason,
            time=now(),
        )

    ledger.append(build, Barrier.LEDGER_COMMIT)


def step_over_taken_names(ledger: Ledger, step: int, *, besides: str = "") -> None:
    """Gives up numbers whose folder name is taken by a folder that was copied in by hand; it stays as it is."""
    taken = {item.name for item in ledger.store.list(ledger.places.checkpoints)} - {besides}
    while checkpoint_folder(step, ledger.next) in taken:
        give_up_number(ledger, token(), "a folder that this run did not write bears the name")
