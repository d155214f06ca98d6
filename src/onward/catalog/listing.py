"""Listing: what the ledger, the receipts and the folders say together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from onward.catalog.ledger import LedgerView, read_ledger
from onward.catalog.receipts import read_receipts
from onward.errors import OnwardError, StorageError
from onward.format.codec import SMALL_LIMIT, decode_sealed
from onward.format.names import RUNS, RunPlaces, parse_writing_folder
from onward.records import CheckpointEntry, CheckpointInfo, Finding, Receipt, RunRecord
from onward.storage.base import Entry, NotFound, Store


@dataclass(frozen=True)
class ForeignItem:
    """Something in ``checkpoints/`` that no ledger entry names. Never offered, never deleted as if it were known.

    ``kind`` is ``attempt`` (a save in progress or left over), ``adoptable`` (a folder with a manifest) or
    ``unknown``.
    """

    name: str
    kind: Literal["attempt", "adoptable", "unknown"]


@dataclass(frozen=True)
class Catalog:
    """All that exists of one run in one tier."""

    run: str
    tier: str
    view: LedgerView
    checkpoints: tuple[CheckpointInfo, ...]
    foreign: tuple[ForeignItem, ...]
    findings: tuple[Finding, ...]

    def offered(self) -> list[CheckpointInfo]:
        """What may be resumed from, best first: live and not quarantined, highest sequence first."""
        return sorted((c for c in self.checkpoints if c.status == "committed"), key=lambda c: -c.sequence)

    def find(self, which: str) -> CheckpointInfo | None:
        """A checkpoint by ``newest``, folder name, ``seq:N``, or step (the newest of that step)."""
        alive = [c for c in self.checkpoints if c.status != "deleted"]
        if which == "newest":
            return next(iter(self.offered()), None)
        if which.startswith("seq:") and _is_number(which[4:]):
            return next((c for c in alive if c.sequence == int(which[4:])), None)
        if _is_number(which):
            return max((c for c in alive if c.step == int(which)), key=lambda c: c.sequence, default=None)
        return next((c for c in alive if c.folder == which), None)


def list_runs(store: Store) -> list[str]:
    """The names of the runs in a store."""
    with suppress(NotFound):
        return [item.name for item in store.list(RUNS) if item.kind == "folder"]
    return []


def read_catalog(store: Store, places: RunPlaces, tier: str, view: LedgerView | None = None) -> Catalog:
    """Reads everything about a run; never writes.

    Raises:
        NotFound: The run does not exist in this store.
    """
    view = view if view is not None else read_ledger(store, places)
    findings = [*view.findings, *_run_file(store, places, tier)]
    in_deleted = _names(store, places.deleted)
    items = _items(store, places.checkpoints)
    present = {item.name for item in items if item.kind == "folder"}
    checkpoints: list[CheckpointInfo] = []
    for entry in view.checkpoints():
        receipts, bad = read_receipts(store, places, entry.folder)
        findings.extend(bad)
        # The second test covers a delete entry that was itself damaged: a half-deleted folder is never offered.
        gone = not view.is_live(entry) or f"{entry.folder}.json" in in_deleted
        checkpoints.append(_info(entry, receipts, tier, gone=gone, present=entry.folder in present))
    known = {entry.folder for entry in view.checkpoints()}
    foreign = [_foreign(store, places, item) for item in items if item.name not in known]
    return Catalog(
        run=places.run,
        tier=tier,
        view=view,
        checkpoints=tuple(checkpoints),
        foreign=tuple(foreign),
        findings=tuple(findings),
    )


def _info(
    entry: CheckpointEntry, receipts: Sequence[Receipt], tier: str, *, gone: bool, present: bool
) -> CheckpointInfo:
    status: Literal["committed", "quarantined", "deleting", "deleted"] = "committed"
    reason = ""
    lifted: set[object] = set()
    methods: set[object] = set()
    for receipt in receipts:
        details = receipt.details if isinstance(receipt.details, dict) else {}
        if receipt.kind == "verified" and details.get("ok") is True:
            methods.add(details.get("method"))
            lifts = details.get("lifts")
            lifted.update(each for each in (lifts if isinstance(lifts, list) else []) if isinstance(each, str))
    for receipt in receipts:
        if receipt.kind == "quarantined" and receipt.sha256 not in lifted:
            details = receipt.details if isinstance(receipt.details, dict) else {}
            status, reason = "quarantined", str(details.get("reason", ""))
    verified: Literal["full", "quick", "no"] = "full" if "full" in methods else "quick" if methods else "no"
    if status == "quarantined":
        verified = "no"
    if gone:
        status = "deleting" if present else "deleted"
    return CheckpointInfo(
        run=entry.run,
        sequence=entry.sequence,
        step=entry.step,
        folder=entry.folder,
        tier=tier,
        status=status,
        verified=verified,
        committed=entry.time,
        incarnation=entry.incarnation,
        attempt=entry.attempt,
        manifest_sha256=entry.manifest_sha256,
        sums_sha256=entry.sums_sha256,
        receipts=tuple(receipts),
        reason=reason,
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()  # isdigit alone is true of superscripts, which int refuses


def _run_file(store: Store, places: RunPlaces, tier: str) -> list[Finding]:
    try:
        decode_sealed(store.read(places.run_file, limit=SMALL_LIMIT), RunRecord, places.run_file)
    except OnwardError as error:
        return [Finding(code="run-file-damaged", message=error.message, tier=tier, file=places.run_file)]
    return []


def _items(store: Store, folder: str) -> list[Entry]:
    try:
        return store.list(folder)
    except NotFound:
        return []


def _names(store: Store, folder: str) -> set[str]:
    return {item.name for item in _items(store, folder)}


def _foreign(store: Store, places: RunPlaces, item: Entry) -> ForeignItem:
    if parse_writing_folder(item.name):
        return ForeignItem(name=item.name, kind="attempt")
    if item.kind == "folder":
        with suppress(StorageError):
            store.stat(f"{places.checkpoint(item.name)}/manifest.json")
            return ForeignItem(name=item.name, kind="adoptable")
    return ForeignItem(name=item.name, kind="unknown")
