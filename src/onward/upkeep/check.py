"""Checking a committed checkpoint: verification, a second look at the ledger, and the receipt that was earned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from onward.catalog.ledger import read_ledger
from onward.catalog.quarantine import damage, quarantine, record_verification
from onward.catalog.reader import Place
from onward.errors import Damaged, StorageError
from onward.format.names import RunPlaces
from onward.records import CheckpointInfo, VerifyReport
from onward.storage.base import Store
from onward.upkeep.verify import Method, verify

Verdict = Literal["verified", "damaged", "not read", "deleted"]


@dataclass(frozen=True)
class Checked:
    """The outcome for one checkpoint.

    Attributes:
        info: What the ledger said before.
        report: What was found.
        verdict: ``not read`` when something refused to be looked at, which says nothing about the bytes;
            ``deleted`` when the checkpoint was deleted meanwhile.
        receipt: What was left in the store; empty for nothing.
        receipt_problem: Why a receipt that was due could not be left.
    """

    info: CheckpointInfo
    report: VerifyReport
    verdict: Verdict
    receipt: Literal["verified", "quarantined", ""] = ""
    receipt_problem: str = ""


def verdict_of(report: VerifyReport) -> Verdict:
    """What a report says about the bytes."""
    if report.ok:
        return "verified"
    return "damaged" if damage(report) else "not read"


def check(
    store: Store,
    places: RunPlaces,
    info: CheckpointInfo,
    *,
    method: Method = "full",
    leave_receipt: bool = True,
    threads: int = 2,
    progress: Callable[[int], None] = lambda _: None,
) -> Checked:
    """Verifies one checkpoint of the ledger. Needs no lease: a run may be checked while it is trained.

    Args:
        store: The tier; written to only for the receipt.
        places: The run.
        info: The checkpoint.
        method: ``quick`` or ``full``.
        leave_receipt: Leave a ``verified`` or ``quarantined`` receipt.
        threads: Files that are hashed at once.
        progress: Told of each number of bytes that was hashed.
    """
    place = Place(store=store, root=places.checkpoint(info.folder), tier=info.tier, name=info.folder)
    report = verify(place, info, run=places.run, method=method, threads=threads, progress=progress)
    verdict = verdict_of(report)
    # Before it is called damaged: it may have been deleted while it was read.
    if not report.ok and all(entry.sequence != info.sequence for entry in read_ledger(store, places).live()):
        return Checked(info, report, "deleted")
    if not leave_receipt or verdict == "not read":
        return Checked(info, report, verdict)
    try:
        if verdict == "verified":
            record_verification(store, places, info, report, tier=info.tier)
        else:
            quarantine(store, places, info, damage(report), tier=info.tier)
    except (StorageError, Damaged) as error:
        return Checked(info, report, verdict, receipt_problem=error.message)
    return Checked(info, report, verdict, receipt="verified" if verdict == "verified" else "quarantined")
