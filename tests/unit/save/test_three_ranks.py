"""The records of three ranks through the coordinator's functions: committed when complete, refused by rank when not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from onward.catalog.incarnation import Incarnation
from onward.catalog.ledger import read_ledger
from onward.catalog.listing import read_catalog
from onward.catalog.reader import open_folder
from onward.errors import IncompleteState
from onward.format import codec
from onward.format.digests import sha256
from onward.records import CheckpointEntry, ComponentTag, RankRecord
from onward.restore.load import CheckpointSource
from onward.save.captured import Captured
from onward.save.commit import Attempt, append_commit, begin_attempt, seal
from onward.save.shards import write_rank
from onward.state import tensors as exact
from onward.storage.memory import MemoryStore
from onward.upkeep.verify import verify
from support import PLACES, RUN, SHAPES, TIER, captured, content, context, key, place_of

RANKS = 3
STEP = 70


@dataclass
class Job:
    """Three ranks that have written their files and left their records; a test may spoil any of it before the seal."""

    run: Incarnation
    attempt: Attempt
    states: list[Captured] = field(default_factory=list)
    records: list[tuple[RankRecord, str]] = field(default_factory=list)

    @property
    def folder(self) -> str:
        return PLACES.checkpoint(self.attempt.writing)

    def write(self, state: Captured, rank: int, *, world_size: int = RANKS, attempt: str = "") -> None:
        self.states.append(state)
        self.records.append(
            write_rank(
                self.run.store,
                self.folder,
                state,
                context(rank=rank, world_size=world_size),
                run=RUN,
                attempt=attempt or self.attempt.id,
                threads=2,
            )
        )

    def edit(self, place: int, **changes: Any) -> None:
        """Rewrites a rank's record, as a rank would have that did something else."""
        record = msgspec.structs.replace(self.records[place][0], **changes)
        data = codec.encode(record)
        self.run.store.files[f"{self.folder}/rank-{place:05d}/record.json"] = data  # type: ignore[attr-defined]
        self.records[place] = (record, sha256(data))

    def commit(self) -> CheckpointEntry:
        digests = seal(
            self.run.store,
            self.run.ledger,
            self.attempt,
            self.records,
            self.states[0].layout,
            context(world_size=RANKS, assets={"vocab.txt": b"a b c"}),
            capture_started="t",
            epoch=None,
            data_position=None,
        )
        return append_commit(self.run.ledger, self.attempt, *digests)


def owned(state: Captured) -> set[str]:
    """The tensors that a rank stores."""
    return {piece.key for file in state.plan.files for piece in file.pieces}


@pytest.fixture
def job(run: Incarnation) -> Job:
    job = Job(run, begin_attempt(run.store, run.ledger, step=STEP, world_size=RANKS, pid=1))
    for rank in range(RANKS):
        job.write(captured(STEP, rank=rank, world_size=RANKS), rank)
    return job


def test_three_ranks_are_one_checkpoint_that_verifies(job: Job, store: MemoryStore) -> None:
    entry = job.commit()
    info = read_catalog(store, PLACES, TIER).offered()[0]
    report = verify(place_of(store, entry.folder), info, run=RUN, threads=2)
    assert report.ok
    assert report.findings == ()
    opened = open_folder(place_of(store, entry.folder))
    assert [record.rank for record in opened.records] == [0, 1, 2]
    assert (opened.manifest.world_size, opened.manifest.expected_ranks, opened.manifest.actual_ranks) == (3, 3, 3)
    assert opened.manifest.total_bytes == sum(file.size for record in opened.records for file in record.files)
    assert [opened.state(rank)["own"] for rank in range(RANKS)] == [{"rank": rank} for rank in range(RANKS)]
    print(f"three ranks: {report.coverage.files} files, {report.coverage.bytes} bytes verified")


def test_the_tensors_of_three_ranks_come_back_together(job: Job, store: MemoryStore) -> None:
    """Each rank wrote other tensors; a reader puts them together by the layout."""
    owners = [owned(state) for state in job.states]
    assert not set.intersection(*owners)
    assert set.union(*owners) == {key(name) for name in SHAPES}
    entry = job.commit()
    source = CheckpointSource(open_folder(place_of(store, entry.folder)))
    loaded = source.fetch_all()
    assert {k: bytes(exact.as_bytes(tensor)) for k, tensor in loaded.items()} == {
        key(name): data for name, data in content(STEP).items()
    }


def test_damage_to_one_rank_names_it(job: Job, store: MemoryStore) -> None:
    entry = job.commit()
    shard = f"{PLACES.checkpoint(entry.folder)}/rank-00002/000.safetensors"
    data = bytearray(store.files[shard])
    data[-1] ^= 1
    store.files[shard] = bytes(data)
    report = verify(place_of(store, entry.folder), None, run=RUN, threads=1)
    assert [(f.file, f.rank) for f in report.findings] == [("rank-00002/000.safetensors", 2)]
    assert report.findings[0].tensor in owned(job.states[2])


def _without(job: Job, *ranks: int) -> None:
    job.records = [pair for pair in job.records if pair[0].rank not in ranks]


def _doubled(job: Job) -> None:
    job.records.append(job.records[1])


def _strange_rank(job: Job) -> None:
    job.edit(2, rank=7)


def _of_another_attempt(job: Job) -> None:
    job.edit(2, attempt="0" * 32)


def _of_another_world(job: Job) -> None:
    job.edit(0, world_size=4)


def _of_another_layout(job: Job) -> None:
    job.edit(1, layout_sha256="f" * 64)


def _of_another_step(job: Job) -> None:
    """T58: one rank saved step 70, another 71."""
    job.edit(1, step=71, components=tuple(_tagged(job, 1, 71)))


def _with_a_stray_component(job: Job) -> None:
    tags = _tagged(job, 1, STEP)
    tags[0] = msgspec.structs.replace(tags[0], step=69)
    job.edit(1, components=tuple(tags))


def _without_a_component(job: Job) -> None:
    job.edit(2, components=tuple(_tagged(job, 2, STEP)[:1]))


def _with_other_shared_state(job: Job) -> None:
    """T107: a list that all ranks should share has another length on one of them."""
    job.edit(2, global_state_sha256="0" * 64)


def _tagged(job: Job, rank: int, step: int) -> list[ComponentTag]:
    return [msgspec.structs.replace(tag, step=step) for tag in job.records[rank][0].components]


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda job: _without(job, 1), "no record of rank 1 of 3"),
        (lambda job: _without(job, 0, 2), "no record of rank 0, 2 of 3"),
        (_doubled, "several records of rank 1"),
        (_strange_rank, "no record of rank 2 of 3"),
        (_of_another_attempt, "rank 2 has attempt"),
        (_of_another_world, "rank 0 has world size 4 instead of 3"),
        (_of_another_layout, "rank 1 has layout ffffffffffff instead of"),
        (_of_another_step, "rank 1 has step 71 instead of 70"),
        (_with_a_stray_component, "rank 1 has components of another step: part"),
        (_without_a_component, "rank 2 lacks the component own"),
        (_with_other_shared_state, "the ranks disagree about the shared non-tensor state"),
    ],
)
def test_an_incomplete_set_of_records_is_refused_naming_the_ranks(
    job: Job, store: MemoryStore, spoil: Callable[[Job], None], named: str
) -> None:
    spoil(job)
    with pytest.raises(IncompleteState, match="step 70 cannot be committed") as caught:
        job.commit()
    assert named in caught.value.message
    assert read_ledger(store, PLACES).checkpoints() == []
    assert store.stat(job.folder).kind == "folder", "still an attempt, under its own name"


def test_every_fault_is_told_at_once(job: Job) -> None:
    _of_another_step(job)
    _without(job, 2)
    with pytest.raises(IncompleteState) as caught:
        job.commit()
    assert "rank 1 has step 71" in caught.value.message
    assert "no record of rank 2" in caught.value.message


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (
            lambda files, path: files.pop(path),
            r"rank 1 recorded other files .*000\.safetensors \(missing of \d+ bytes\)",
        ),
        (lambda files, path: files.update({path: files[path][:-1]}), r"rank 1 .*000\.safetensors \(\d+ of \d+ bytes\)"),
        (
            lambda files, path: files.update({f"{path}.bak": b"x"}),
            r"rank 1 .*000\.safetensors\.bak \(1 of none bytes\)",
        ),
    ],
)
def test_files_that_are_not_as_recorded_are_refused_naming_rank_and_file(
    job: Job, store: MemoryStore, spoil: Callable[[dict[str, bytes], str], object], named: str
) -> None:
    """A rank's record was written, and its file has gone, was cut, or is not alone: seen before the commit."""
    spoil(store.files, f"{job.folder}/rank-00001/000.safetensors")
    with pytest.raises(IncompleteState, match=named):
        job.commit()
    assert read_ledger(store, PLACES).checkpoints() == []


def test_ranks_that_share_state_agree_about_it_by_digest(run: Incarnation) -> None:
    """The digest covers what is shared, not what each rank has of its own."""
    job = Job(run, begin_attempt(run.store, run.ledger, step=STEP, world_size=RANKS, pid=1))
    for rank in range(RANKS):
        job.write(captured(STEP, rank=rank, world_size=RANKS, note="same" if rank < 2 else "another"), rank)
    digests = [record.global_state_sha256 for record, _ in job.records]
    assert digests[0] == digests[1] != digests[2]
    with pytest.raises(IncompleteState, match="shared non-tensor state"):
        job.commit()
