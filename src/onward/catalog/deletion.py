"""The deletion protocol: the decision is an entry, durable before a byte goes."""

from __future__ import annotations

from contextlib import suppress

from onward.catalog.ledger import Ledger, LedgerView
from onward.catalog.receipts import write_receipt
from onward.catalog.stamp import actor, now
from onward.errors import Damaged, UsageError
from onward.format.codec import LIMITS
from onward.format.names import MANIFEST, RunPlaces
from onward.records import FORMAT, CheckpointEntry, DeleteEntry, LedgerEntry
from onward.storage.base import AlreadyExists, Barrier, NotFound, Store, remove_tree


def delete_checkpoint(ledger: Ledger, view: LedgerView, victim: CheckpointEntry, *, tier: str, reason: str) -> None:
    """Deletes a checkpoint for good: entry, manifest kept aside, files, folder.

    ``view`` is the ledger as it was read *and synced* before the victim was chosen: an entry that is not durable
    must not be the reason for which another checkpoint goes.

    Raises:
        UsageError: The victim is not a live checkpoint of this ledger.
        Superseded: A newer incarnation has begun; nothing was deleted.
    """
    if not view.is_live(victim):
        raise UsageError(f"{victim.folder} is not a live checkpoint", next_step="choose from `onward ls`")

    def build(sequence: int, previous: str) -> LedgerEntry:
        return DeleteEntry(
            format=FORMAT,
            run=victim.run,
            sequence=sequence,
            previous=previous,
            incarnation=ledger.incarnation,
            epoch=ledger.epoch,
            victim=victim.sequence,
            folder=victim.folder,
            reason=reason,
            actor=actor(),
            time=now(),
        )

    ledger.append(build, Barrier.LEDGER_DELETE)
    finish_delete(ledger.store, ledger.places, victim.sequence, victim.folder, tier=tier, reason=reason)


def finish_delete(store: Store, places: RunPlaces, sequence: int, name: str, *, tier: str, reason: str) -> bool:
    """Removes what is left of a checkpoint that a delete entry names. May be repeated, after any interruption.

    Returns:
        Whether there was anything left to remove.
    """
    folder = places.checkpoint(name)
    try:
        store.list(folder)
    except NotFound:
        return False
    with suppress(NotFound, Damaged, AlreadyExists):
        manifest = store.read(f"{folder}/{MANIFEST}", limit=LIMITS[MANIFEST])
        store.create(
            f"{places.deleted}/{name}.json",
            manifest,
            content=Barrier.DELETED_MANIFEST,
            name=None,
        )
    # Also when it was there: a delete before this one may have been cut off before its own barrier.
    store.sync_folder(places.deleted, Barrier.DELETED_MANIFEST)
    remove_tree(store, folder)
    write_receipt(
        store,
        places,
        kind="deleted",
        sequence=sequence,
        folder=name,
        tier=tier,
        details={"reason": reason},
    )
    return True
