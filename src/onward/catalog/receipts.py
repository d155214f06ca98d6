"""Receipts: append-only records about committed checkpoints."""

from __future__ import annotations

import secrets
from contextlib import suppress

from onward.catalog.stamp import actor, compact_now, now
from onward.errors import OnwardError
from onward.format.codec import RECEIPT_LIMIT, decode_sealed, encode_sealed
from onward.format.names import RunPlaces
from onward.records import FORMAT, Finding, JsonTree, Receipt, ReceiptKind
from onward.storage.base import Barrier, NotFound, Store


def write_receipt(
    store: Store,
    places: RunPlaces,
    *,
    kind: ReceiptKind,
    sequence: int,
    folder: str,
    tier: str,
    details: JsonTree,
) -> Receipt:
    """Leaves a receipt about a checkpoint."""
    receipt = Receipt(
        format=FORMAT,
        run=places.run,
        sequence=sequence,
        folder=folder,
        kind=kind,
        time=now(),
        actor=actor(),
        tier=tier,
        details=details,
    )
    place = f"{places.receipts}/{folder}"
    store.make_folder(place, exist_ok=True)
    name = f"{compact_now()}-{kind}-{secrets.token_hex(4)}.json"
    try:
        store.create(f"{place}/{name}", encode_sealed(receipt), content=Barrier.RECEIPT, name=None)
    except NotFound:  # a new incarnation swept the half-written file away, taking it for a dead one's
        store.create(f"{place}/{name}", encode_sealed(receipt), content=Barrier.RECEIPT, name=None)
    return receipt


def read_receipts(store: Store, places: RunPlaces, folder: str) -> tuple[list[Receipt], list[Finding]]:
    """The receipts of one checkpoint, oldest first, and those that cannot be believed."""
    place = f"{places.receipts}/{folder}"
    receipts: list[Receipt] = []
    findings: list[Finding] = []
    with suppress(NotFound):
        for item in store.list(place):
            if not item.name.endswith(".json"):
                continue
            path = f"{place}/{item.name}"
            try:
                receipt = decode_sealed(store.read(path, limit=RECEIPT_LIMIT), Receipt, path)
            except OnwardError as error:
                findings.append(Finding(code="receipt-damaged", message=error.message, checkpoint=folder, file=path))
                continue
            if receipt.folder != folder or receipt.run != places.run:
                findings.append(
                    Finding(code="receipt-foreign", message="of another checkpoint", checkpoint=folder, file=path)
                )
                continue
            receipts.append(receipt)
    return receipts, findings
