"""Quarantine: a damaged checkpoint is no longer offered; its bytes stay where they are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from onward.catalog.receipts import read_receipts, write_receipt
from onward.format.names import RunPlaces
from onward.records import CheckpointEntry, CheckpointInfo, Finding, VerifyReport
from onward.storage.base import Store

_DAMAGE = frozenset({"damaged-file", "damaged", "format"})
_KEPT_FINDINGS = 50  # a receipt is small; the verification itself lists everything


def damage(report: VerifyReport) -> tuple[Finding, ...]:
    """The findings that prove damage; the others say that something could not be looked at, or is not ours."""
    return tuple(finding for finding in report.findings if finding.code in _DAMAGE)


def standing(store: Store, places: RunPlaces, folder: str) -> list[str]:
    """The digests of the quarantine receipts that stand now; a full verification that finds nothing lifts them."""
    receipts, _ = read_receipts(store, places, folder)
    return [receipt.sha256 for receipt in receipts if receipt.kind == "quarantined"]


def quarantine(
    store: Store,
    places: RunPlaces,
    checkpoint: CheckpointInfo | CheckpointEntry,
    findings: Sequence[Finding],
    *,
    tier: str,
) -> None:
    """Leaves the receipt that takes a checkpoint out of what is offered, with the findings that are the reason."""
    worst = findings[0]
    reason = f"{worst.file or checkpoint.folder}: {worst.message}"
    write_receipt(
        store,
        places,
        kind="quarantined",
        sequence=checkpoint.sequence,
        folder=checkpoint.folder,
        tier=tier,
        details={"reason": reason, "findings": [msgspec.to_builtins(f) for f in findings[:_KEPT_FINDINGS]]},
    )


def record_verification(
    store: Store,
    places: RunPlaces,
    checkpoint: CheckpointInfo | CheckpointEntry,
    report: VerifyReport,
    *,
    tier: str,
) -> None:
    """Leaves the receipt that a verification earned: ``verified``, or ``quarantined`` with what was found.

    A report that could not look (the store refused) earns neither: it says nothing about the checkpoint.
    """
    if found := damage(report):
        quarantine(store, places, checkpoint, found, tier=tier)
    elif report.ok:
        write_receipt(
            store,
            places,
            kind="verified",
            sequence=checkpoint.sequence,
            folder=checkpoint.folder,
            tier=tier,
            details={
                "ok": True,
                "method": report.method,
                # Named rather than dated: which of the two was later, no clock can say.
                "lifts": standing(store, places, checkpoint.folder) if report.method == "full" else [],
                "seconds": report.seconds,
                "coverage": msgspec.to_builtins(report.coverage),
            },
        )
