"""Adoption: a checkpoint folder that was copied in by hand becomes a checkpoint of the run, once it verifies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onward.catalog.incarnation import Incarnation
from onward.catalog.listing import read_catalog
from onward.catalog.quarantine import record_verification
from onward.catalog.reader import Place, open_folder
from onward.catalog.receipts import write_receipt
from onward.catalog.stamp import now
from onward.catalog.voids import step_over_taken_names
from onward.errors import Damaged, UsageError
from onward.format.names import checkpoint_folder
from onward.records import FORMAT, CheckpointEntry, LedgerEntry, VerifyReport
from onward.storage.base import Barrier, sync_tree
from onward.upkeep.verify import verify


@dataclass(frozen=True)
class Adopted:
    """A folder that is now a checkpoint of the run: its entry, and the verification that let it in."""

    entry: CheckpointEntry
    report: VerifyReport


def adopt(
    incarnation: Incarnation, folder: str, *, threads: int = 2, progress: Callable[[int], None] = lambda _: None
) -> Adopted:
    """Verifies a folder in ``checkpoints/`` that no entry names, gives it a name of its own, and commits it.

    The folder is renamed to its step and the ledger's next number, because no name may ever be used twice.

    Raises:
        UsageError: There is no such folder, or the ledger knows it already.
        Damaged: It does not verify; nothing was changed.
        Superseded: A newer incarnation has begun.
    """
    store, ledger, places, tier = incarnation.store, incarnation.ledger, incarnation.places, incarnation.tier
    catalog = read_catalog(store, places, tier)
    choice = [item.name for item in catalog.foreign if item.kind == "adoptable"]
    if folder not in choice:
        offered = f"adoptable are: {', '.join(choice)}" if choice else "the run has nothing to adopt"
        raise UsageError(f"{folder!r} cannot be adopted; {offered}", next_step="see `onward ls`")
    place = Place(store=store, root=places.checkpoint(folder), tier=tier, name=folder)
    report = verify(place, None, run=places.run, method="full", threads=threads, progress=progress)
    if not report.ok:
        worst = report.findings[0]
        raise Damaged(f"{folder} is not adopted: {worst.file}: {worst.message}")
    opened = open_folder(place)
    with ledger.lock:
        step = opened.manifest.global_step
        step_over_taken_names(ledger, step, besides=folder)
        sequence = ledger.next
        name = checkpoint_folder(step, sequence)
        # Copied in by hand, its files may never have been synced; each is, before the ledger vouches for it.
        sync_tree(store, place.root, Barrier.ADOPTED)
        if name != folder:
            store.rename_folder(place.root, places.checkpoint(name))
        store.sync_folder(places.checkpoints, Barrier.PUBLISHED)

        def build(number: int, previous: str) -> LedgerEntry:
            return CheckpointEntry(
                format=FORMAT,
                run=places.run,
                sequence=number,
                previous=previous,
                incarnation=ledger.incarnation,
                epoch=ledger.epoch,
                attempt=opened.manifest.attempt,
                folder=name,
                step=step,
                manifest_sha256=opened.manifest_sha256,
                sums_sha256=opened.sums_sha256,
                time=now(),
            )

        entry = ledger.append(build, Barrier.LEDGER_COMMIT)
    assert isinstance(entry, CheckpointEntry)
    write_receipt(
        store,
        places,
        kind="adopted",
        sequence=entry.sequence,
        folder=name,
        tier=tier,
        details={"from": folder, "run": opened.manifest.run, "sequence": opened.manifest.sequence},
    )
    record_verification(store, places, entry, report, tier=tier)
    return Adopted(entry=entry, report=report)
