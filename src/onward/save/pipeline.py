"""The order of a save, and what happens when a stage of it fails. The only file that knows the order.

``capacity → attempt and intent → shards and record → seal → ledger entry → read back``
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from onward.catalog.attempts import record_outcome
from onward.catalog.incarnation import Home
from onward.catalog.ledger import Ledger
from onward.catalog.quarantine import damage, record_verification
from onward.catalog.reader import Place
from onward.catalog.voids import give_up_number, step_over_taken_names
from onward.errors import ConfigurationError, OnwardError, SaveFailed, StorageError, Superseded
from onward.format.codec import LIMITS, decode
from onward.format.names import ASSETS, INTENT, distinct_paths
from onward.policy.capacity import require_space
from onward.records import CheckpointEntry, CheckpointInfo, Intent, VerifyReport
from onward.save.captured import Captured, SaveContext
from onward.save.commit import Attempt, append_commit, begin_attempt, seal
from onward.save.plan import DEFAULT_THREADS
from onward.save.shards import write_rank
from onward.storage.base import Store, remove_tree
from onward.upkeep.verify import verify

log = logging.getLogger("onward")

VerifyAfterSave = Literal["full", "sizes"]


@dataclass(frozen=True)
class SaveSettings:
    """How a save is written.

    Attributes:
        threads: Shard files that are hashed and written at once.
        verify_after_save: ``full`` reads every byte back from the medium after the commit; ``sizes`` checks sizes,
                headers and the small files.
        if_busy: What to do when a save is due and the one before is still being written: ``wait`` or ``skip``.
        writer: ``process`` (it finishes a save even if the trainer dies) or ``thread`` of the trainer. A store that
            cannot be opened by its URL elsewhere is always written by a thread.
        overlap: Copy the optimizer's parameters and moments during the next forward and backward pass, instead of
            at the step boundary. Refused where something else than ``optimizer.step`` changes them.
        deadline_seconds: After how long a save that has not ended counts as stuck.
        tolerate_failures: How many saves in a row may fail with no more than a warning; the next one raises.
    """

    threads: int = DEFAULT_THREADS
    verify_after_save: VerifyAfterSave = "full"
    if_busy: Literal["wait", "skip"] = "wait"
    writer: Literal["process", "thread"] = "process"
    overlap: bool = False
    deadline_seconds: float = 1800.0
    tolerate_failures: int = 2

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigurationError(f"save.threads is {self.threads}; at least one thread must write")
        if not self.deadline_seconds > 0:
            raise ConfigurationError(f"save.deadline_seconds is {self.deadline_seconds}; it must be positive")
        if self.tolerate_failures < 0:
            raise ConfigurationError(f"save.tolerate_failures is {self.tolerate_failures}; it counts saves")


@dataclass(frozen=True)
class SaveResult:
    """A checkpoint that exists.

    Attributes:
        entry: Its ledger entry.
        seconds: Phase → wall seconds.
        report: What reading it back found.
    """

    entry: CheckpointEntry
    seconds: dict[str, float] = field(default_factory=dict)
    report: VerifyReport | None = None


def save(home: Home, captured: Captured, context: SaveContext, settings: SaveSettings) -> SaveResult:
    """Writes, commits and reads back one checkpoint of a single rank.

    Raises:
        SaveFailed: Says the step and the cause; the attempt is rolled back and its story recorded.
        Superseded: A newer incarnation has begun; nothing was deleted, this one must stop.
        NoCapacity: The tier has not the room; nothing was written.
    """
    store, ledger = home.store, home.ledger
    distinct_paths([f"{ASSETS}/{name}" for name in context.assets])
    require_space(captured.tensor_bytes, store.free_bytes(), f"the tier {home.tier} ({store.url})")
    with ledger.lock:
        started = time.perf_counter()
        seconds: dict[str, float] = {"capture": captured.seconds}
        attempt: Attempt | None = None
        try:
            ledger.settle()  # an answer that was lost before decides which number is the next
            step_over_taken_names(ledger, captured.step)
            attempt = begin_attempt(store, ledger, step=captured.step, world_size=context.world_size, pid=os.getpid())
            record = write_rank(
                store,
                ledger.places.checkpoint(attempt.writing),
                captured,
                context,
                run=ledger.places.run,
                attempt=attempt.id,
                threads=settings.threads,
            )
            seconds["write"] = time.perf_counter() - started
            digests = seal(
                store,
                ledger,
                attempt,
                [record],
                captured.layout,
                context,
                capture_started=captured.started,
                epoch=captured.epoch,
                data_position=captured.data_position,
            )
            entry = append_commit(ledger, attempt, *digests)
            seconds["commit"] = time.perf_counter() - started - seconds["write"]
        except Superseded as error:
            if attempt is not None:
                _tell(ledger, attempt, "superseded", error.message)
            raise
        except Exception as error:  # whatever it was: an attempt is never left without its story
            reason = error.message if isinstance(error, OnwardError) else f"{type(error).__name__}: {error}"
            if ledger.overtaken():
                # The newer one rolled this attempt back: to go on training would be for nothing.
                if attempt is not None:
                    _tell(ledger, attempt, "superseded", reason)
                raise Superseded(f"step {captured.step}: a newer incarnation has taken over ({reason})") from error
            if attempt is not None:
                _give_up(ledger, attempt, reason)
            raise SaveFailed(f"the save of step {captured.step} failed: {reason}") from error
    started = time.perf_counter()
    report = read_back(home, entry, settings)
    seconds["verify"] = time.perf_counter() - started
    return SaveResult(entry=entry, seconds=seconds, report=report)


def read_back(home: Home, entry: CheckpointEntry, settings: SaveSettings) -> VerifyReport:
    """Reads a fresh checkpoint back from the medium, and leaves the receipt that it earned.

    Raises:
        SaveFailed: The bytes that came back are not those that were written; the checkpoint is quarantined.
    """
    store, places, tier = home.store, home.places, home.tier
    report = verify(
        Place(store=store, root=places.checkpoint(entry.folder), tier=tier, name=entry.folder),
        _fresh(entry, tier),
        run=entry.run,
        method="full" if settings.verify_after_save == "full" else "quick",
        threads=settings.threads,
        drop_cache=True,
    )
    unreceipted = ""
    try:
        record_verification(store, places, entry, report, tier=tier)
    except StorageError as error:
        unreceipted = error.message
        # The checkpoint stands and was looked at; only the proof of it is missing, and can be made again.
        log.warning("step %d: the receipt of its verification could not be written: %s", entry.step, error.message)
    if not report.ok:
        found = damage(report)
        worst = (found or report.findings)[0]
        damaged = bool(found)
        raise SaveFailed(
            f"step {entry.step} was committed, but "
            + ("did not read back as it was written" if damaged else "could not be read back")
            + (", and is quarantined" if damaged and not unreceipted else "")
            + f": {worst.file}: {worst.message}",
            next_step="the medium or its driver alters bytes: check the disk, its cable and its memory"
            if damaged
            else "look at the store; `onward verify` makes up for it",
        )
    return report


def _fresh(entry: CheckpointEntry, tier: str) -> CheckpointInfo:
    return CheckpointInfo(
        run=entry.run,
        sequence=entry.sequence,
        step=entry.step,
        folder=entry.folder,
        tier=tier,
        status="committed",
        verified="no",
        committed=entry.time,
        incarnation=entry.incarnation,
        attempt=entry.attempt,
        manifest_sha256=entry.manifest_sha256,
        sums_sha256=entry.sums_sha256,
    )


def _give_up(ledger: Ledger, attempt: Attempt, reason: str) -> None:
    """Rolls a failed attempt back as far as that is safe, and tells its story. Best effort: the store is ill."""
    store, places = ledger.store, ledger.places
    try:
        ledger.settle()
    except OnwardError as error:
        _tell(ledger, attempt, "kept", f"whether it was committed cannot be told: {reason}; {error.message}")
        return
    if ledger.last >= attempt.sequence:
        # The entry is there, only its durability is in doubt. Losers delete nothing: a reader may have begun.
        _tell(ledger, attempt, "kept", f"its entry may not be durable: {reason}")
        return
    _tell(ledger, attempt, "failed", reason)
    with suppress(StorageError):
        remove_tree(store, places.checkpoint(attempt.writing))
    with suppress(OnwardError):
        if _is_own(store, places.checkpoint(attempt.final), attempt):
            # Already renamed: an answer of the store may have lied, so the number is taken out of the game first.
            give_up_number(ledger, attempt.id, reason)
            remove_tree(store, places.checkpoint(attempt.final))


def _is_own(store: Store, folder: str, attempt: Attempt) -> bool:
    """Whether a folder was made by this attempt; a copy put in its place by hand must survive the attempt."""
    try:
        intent = decode(store.read(f"{folder}/{INTENT}", limit=LIMITS[INTENT]), Intent, INTENT)
    except OnwardError:
        return False
    return intent.attempt == attempt.id


def _tell(ledger: Ledger, attempt: Attempt, outcome: Literal["failed", "superseded", "kept"], reason: str) -> None:
    with suppress(OnwardError):
        record_outcome(
            ledger.store,
            ledger.places,
            attempt=attempt.id,
            sequence=attempt.sequence,
            step=attempt.step,
            outcome=outcome,
            reason=reason,
        )
