"""Recovery: what a new incarnation clears up after those before it. Idempotent; may itself be interrupted anywhere.

Which attempts are older than mine follows from the name of their folder. An incarnation numbers an attempt with
its own last entry + 1, and every number from its ``open`` entry up to there is its own. So with my ``open`` entry
at ``m``, an attempt of sequence ``s`` is older than me exactly when ``s <= m``. Younger ones are not touched: their
owner has superseded me.
"""

from __future__ import annotations

from contextlib import suppress

from onward.catalog.attempts import record_outcome
from onward.catalog.deletion import finish_delete
from onward.catalog.ledger import Ledger, LedgerView
from onward.catalog.receipts import write_receipt
from onward.errors import StorageError
from onward.format.names import RunPlaces, parse_checkpoint_folder, parse_writing_folder
from onward.records import AttemptOutcome
from onward.storage.base import NotFound, Store, remove_tree
from onward.storage.posix import TEMP_SUFFIX

_KEPT = "its folder was complete, but the ledger does not name it; its bytes are kept (see `onward adopt`)"


def recover(ledger: Ledger, view: LedgerView, *, tier: str) -> list[AttemptOutcome]:
    """Rolls back what older incarnations left unfinished, and finishes their deletes.

    Args:
        ledger: The appending side, which proves that this incarnation has taken over.
        view: The ledger at or below the fence.
        tier: The tier's name, for receipts.

    Returns:
        The attempts that were rolled back or kept, with the reason for each.
    """
    store, places = ledger.store, ledger.places
    outcomes: list[AttemptOutcome] = []
    named = {entry.folder for entry in view.checkpoints()}
    for item in store.list(places.checkpoints):
        path = places.checkpoint(item.name)
        attempt = parse_writing_folder(item.name)
        if attempt is not None and attempt.sequence <= ledger.epoch:
            if item.kind != "folder":
                # A link or a file under an attempt's name: only the name goes, never what a link points to.
                store.remove(path)
                continue
            # The story is written first: a removal that is cut short is finished next time, untold it would be lost.
            outcomes.append(
                record_outcome(
                    store,
                    places,
                    attempt=attempt.attempt,
                    sequence=attempt.sequence,
                    step=attempt.step,
                    outcome="rolled-back",
                    reason="its writer ended before the commit",
                )
            )
            remove_tree(store, path)
        elif attempt is None and item.kind == "folder" and item.name not in named:
            kept = _keep(store, places, item.name, ledger.epoch, tier)
            if kept is not None:
                outcomes.append(kept)
    for delete in view.deletes.values():
        finish_delete(store, places, delete.victim, delete.folder, tier=tier, reason=delete.reason)
    _sweep_temps(store, places, ledger.epoch)
    return outcomes


def _keep(store: Store, places: RunPlaces, name: str, epoch: int, tier: str) -> AttemptOutcome | None:
    parsed = parse_checkpoint_folder(name)
    if parsed is None or parsed[1] > epoch:
        return None
    step, sequence = parsed
    story = f"folder-{name}"
    with suppress(NotFound):
        store.stat(f"{places.attempts}/{story}.json")
        return None  # told at an earlier start
    write_receipt(
        store,
        places,
        kind="quarantined",
        sequence=sequence,
        folder=name,
        tier=tier,
        details={"reason": _KEPT},
    )
    return record_outcome(store, places, attempt=story, sequence=sequence, step=step, outcome="kept", reason=_KEPT)


def _sweep_temps(store: Store, places: RunPlaces, epoch: int) -> None:
    """Removes half-written files of older incarnations.

    Ledger entries only up to the fence: their numbers are taken by now. Elsewhere a living process may be writing at
    this moment (a verification, its receipt): it notices, and writes again.
    """
    receipts = [f"{places.receipts}/{item.name}" for item in store.list(places.receipts) if item.kind == "folder"]
    for folder in (places.ledger, places.root, places.attempts, places.deleted, *receipts):
        for item in store.list(folder):
            if item.kind == "folder" or not item.name.startswith(".") or not item.name.endswith(TEMP_SUFFIX):
                continue
            number = item.name[1:].partition(".")[0]
            if folder != places.ledger or (number.isdecimal() and int(number) <= epoch):
                with suppress(StorageError):
                    store.remove(f"{folder}/{item.name}")
