"""Commit: the coordinator checks every rank's record and makes the checkpoint exist, in one act."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from onward.catalog.attempts import record_outcome
from onward.catalog.ledger import Ledger
from onward.catalog.stamp import host, now, token
from onward.errors import IncompleteState, OnwardError
from onward.format import codec
from onward.format.digests import sha256
from onward.format.names import (
    ASSETS,
    INTENT,
    LAYOUT,
    MANIFEST,
    RECORD,
    SHARD_SUFFIX,
    SUMS,
    checkpoint_folder,
    rank_folder,
    writing_folder,
)
from onward.records import (
    FORMAT,
    CheckpointEntry,
    Intent,
    JsonTree,
    Layout,
    LedgerEntry,
    Manifest,
    RankEntry,
    RankRecord,
    StoredFile,
)
from onward.save.captured import SaveContext
from onward.save.shards import write_file
from onward.storage.base import Barrier, Store, remove_tree


@dataclass(frozen=True)
class Attempt:
    """A save in progress: its folder, and the ledger number that only its incarnation may use."""

    id: str
    step: int
    sequence: int
    intent_sha256: str
    started: str

    @property
    def writing(self) -> str:
        """The folder's name while the save is in progress."""
        return writing_folder(self.step, self.sequence, self.id)

    @property
    def final(self) -> str:
        """The folder's name once it is complete."""
        return checkpoint_folder(self.step, self.sequence)


def begin_attempt(store: Store, ledger: Ledger, *, step: int, world_size: int, pid: int) -> Attempt:
    """Makes the attempt's folder, with its intent as the first file.

    The folder is made once and never again: an attempt that finds it gone was rolled back by a newer incarnation.
    """
    attempt, sequence, started = token(), ledger.next, now()
    intent = Intent(
        format=FORMAT,
        run=ledger.places.run,
        attempt=attempt,
        incarnation=ledger.incarnation,
        epoch=ledger.epoch,
        sequence=sequence,
        step=step,
        world_size=world_size,
        host=host(),
        pid=pid,
        started=started,
    )
    data = codec.encode(intent)
    begun = Attempt(id=attempt, step=step, sequence=sequence, intent_sha256=sha256(data), started=started)
    folder = ledger.places.checkpoint(begun.writing)
    try:
        # A network filesystem may repeat a mkdir and call its own folder another's; with 128 random bits in its name
        # a folder that is there can only be mine, and each file in it is created only if absent.
        store.make_folder(folder, exist_ok=True)
        write_file(store, f"{folder}/{INTENT}", data)
    except Exception as error:
        with suppress(OnwardError):
            record_outcome(
                store,
                ledger.places,
                attempt=attempt,
                sequence=sequence,
                step=step,
                outcome="failed",
                reason=getattr(error, "message", f"{type(error).__name__}: {error}"),
            )
            remove_tree(store, folder)
        raise
    return begun


def check_records(records: Sequence[RankRecord], *, attempt: str, step: int, world_size: int, layout: str) -> None:
    """Refuses a set of records that is not one complete state of one step.

    Raises:
        IncompleteState: Names the ranks that are missing, doubled, of another step, attempt or layout, or that lack
            a component.
    """
    problems: list[str] = []
    have = [record.rank for record in records]
    if missing := sorted(set(range(world_size)) - set(have)):
        problems.append(f"no record of rank {', '.join(map(str, missing))} of {world_size}")
    if doubled := sorted({rank for rank in have if have.count(rank) > 1}):
        problems.append(f"several records of rank {', '.join(map(str, doubled))}")
    for record in records:
        wrong = [
            f"{what} {has} instead of {due}"
            for what, has, due in (
                ("step", record.step, step),
                ("world size", record.world_size, world_size),
                ("attempt", record.attempt, attempt),
                ("layout", record.layout_sha256[:12], layout[:12]),
            )
            if has != due
        ]
        if stray := [tag.name for tag in record.components if tag.step != step]:
            wrong.append(f"components of another step: {', '.join(stray)}")
        if wrong:
            problems.append(f"rank {record.rank} has {'; '.join(wrong)}")
    names = {record.rank: frozenset(tag.name for tag in record.components) for record in records}
    everything = frozenset().union(*names.values())
    problems += [
        f"rank {rank} lacks the component {', '.join(sorted(everything - has))}"
        for rank, has in sorted(names.items())
        if has != everything
    ]
    shared = {record.global_state_sha256 for record in records}
    if len(shared) > 1:
        problems.append("the ranks disagree about the shared non-tensor state")
    if problems:
        raise IncompleteState(f"step {step} cannot be committed: {' | '.join(problems)}")


def seal(
    store: Store,
    ledger: Ledger,
    attempt: Attempt,
    records: Sequence[tuple[RankRecord, str]],
    layout: Layout,
    context: SaveContext,
    *,
    capture_started: str,
    epoch: int | None,
    data_position: JsonTree,
) -> tuple[str, str]:
    """Writes layout, assets, manifest and checksum list, and gives the folder its final name.

    Args:
        store: The home.
        ledger: The appending side of the run's ledger.
        attempt: The save in progress, whose rank folders are complete.
        records: Every rank's record with the SHA-256 of its file.
        layout: The layout that all ranks named.
        context: What is said about the checkpoint beside its state.
        capture_started: When the capture began.
        epoch: The data epoch, if known.
        data_position: The data position, if known.

    Returns:
        The SHA-256 of the manifest and of the checksum list: what the ledger entry vouches for.

    Raises:
        IncompleteState: The records are not one complete state.
        StorageError: The store refused; the checkpoint does not exist.
    """
    layout_bytes = codec.encode(layout)
    layout_sha256 = sha256(layout_bytes)
    ordered = sorted(records, key=lambda pair: pair[0].rank)
    plain = [record for record, _ in ordered]
    check_records(plain, attempt=attempt.id, step=attempt.step, world_size=context.world_size, layout=layout_sha256)
    folder = ledger.places.checkpoint(attempt.writing)
    write_file(store, f"{folder}/{LAYOUT}", layout_bytes)
    assets = _write_assets(store, folder, context)
    expected_files = sum(file.path.endswith(SHARD_SUFFIX) for record in plain for file in record.files)
    actual_files = sum(_count_shards(store, folder, record) for record in plain)
    ranks = tuple(
        RankEntry(
            rank=record.rank,
            path=f"{rank_folder(record.rank)}/{RECORD}",
            sha256=digest,
            files=len(record.files),
            bytes=sum(file.size for file in record.files),
        )
        for record, digest in ordered
    )
    description = context.description
    manifest = Manifest(
        format=FORMAT,
        run=ledger.places.run,
        checkpoint=attempt.final,
        sequence=attempt.sequence,
        parent=context.parent,
        attempt=attempt.id,
        incarnation=ledger.incarnation,
        global_step=attempt.step,
        epoch=epoch,
        data_position=data_position,
        kind="full",
        base=None,
        birth_class=context.birth_class,
        reason=context.reason,
        training_started=context.training_started,
        capture_started=capture_started,
        save_started=attempt.started,
        description=description,
        model_config_sha256=None
        if description.model_config is None
        else sha256(codec.encode(description.model_config)),
        world_size=context.world_size,
        layout_sha256=layout_sha256,
        components=plain[0].components,
        expected_ranks=context.world_size,
        actual_ranks=len(plain),
        expected_files=expected_files,
        actual_files=actual_files,
        total_bytes=sum(rank.bytes for rank in ranks),
        ranks=ranks,
        assets=assets,
    )
    manifest_bytes = codec.encode(manifest)
    write_file(store, f"{folder}/{MANIFEST}", manifest_bytes)
    digests = {
        INTENT: attempt.intent_sha256,
        LAYOUT: layout_sha256,
        MANIFEST: sha256(manifest_bytes),
        **{asset.path: asset.sha256 for asset in assets},
        **{rank.path: rank.sha256 for rank in ranks},
        **{f"{rank_folder(r.rank)}/{file.path}": file.sha256 for r in plain for file in r.files},
    }
    sums = codec.encode_sums(digests)
    write_file(store, f"{folder}/{SUMS}", sums)
    store.sync_folder(folder, Barrier.ATTEMPT_FOLDER)
    store.rename_folder(folder, ledger.places.checkpoint(attempt.final))
    store.sync_folder(ledger.places.checkpoints, Barrier.PUBLISHED)
    return sha256(manifest_bytes), sha256(sums)


def append_commit(ledger: Ledger, attempt: Attempt, manifest_sha256: str, sums_sha256: str) -> CheckpointEntry:
    """The commit itself: from this entry on the checkpoint exists.

    Raises:
        Superseded: A newer incarnation has begun; the checkpoint does not exist, and nothing may be removed.
        StorageError: See ``Ledger.append``.
    """

    def build(sequence: int, previous: str) -> LedgerEntry:
        if sequence != attempt.sequence:
            raise IncompleteState(
                f"the save of step {attempt.step} holds number {attempt.sequence}, but the ledger is at {sequence}"
            )
        return CheckpointEntry(
            format=FORMAT,
            run=ledger.places.run,
            sequence=sequence,
            previous=previous,
            incarnation=ledger.incarnation,
            epoch=ledger.epoch,
            attempt=attempt.id,
            folder=attempt.final,
            step=attempt.step,
            manifest_sha256=manifest_sha256,
            sums_sha256=sums_sha256,
            time=now(),
        )

    entry = ledger.append(build, Barrier.LEDGER_COMMIT)
    assert isinstance(entry, CheckpointEntry)
    return entry


def _count_shards(store: Store, folder: str, record: RankRecord) -> int:
    """Counts a rank's shard files as they stand in the store, after comparing every file with the record."""
    place = f"{folder}/{rank_folder(record.rank)}"
    there = {entry.name: entry.size for entry in store.list(place) if entry.kind == "file"}
    due = {file.path: file.size for file in record.files}
    there.pop(RECORD, None)
    if there != due:
        wrong = sorted(name for name in {*there, *due} if there.get(name) != due.get(name))
        raise IncompleteState(
            f"step {record.step} cannot be committed: rank {record.rank} recorded other files than the store has: "
            + ", ".join(f"{name} ({there.get(name, 'missing')} of {due.get(name, 'none')} bytes)" for name in wrong[:8])
        )
    return sum(name.endswith(SHARD_SUFFIX) for name in there)


def _write_assets(store: Store, folder: str, context: SaveContext) -> tuple[StoredFile, ...]:
    if not context.assets:
        return ()
    names = [f"{ASSETS}/{name}" for name in sorted(context.assets)]
    places = sorted({name[:at] for name in names for at, c in enumerate(name) if c == "/"})  # parents come first
    for place in places:
        store.make_folder(f"{folder}/{place}", exist_ok=True)
    stored: list[StoredFile] = []
    for name in names:
        data = context.assets[name.removeprefix(f"{ASSETS}/")]
        stored.append(codec.stored(name, data))
        write_file(store, f"{folder}/{name}", data)
    for place in places:
        store.sync_folder(f"{folder}/{place}", Barrier.ATTEMPT_FOLDER)
    return tuple(stored)
