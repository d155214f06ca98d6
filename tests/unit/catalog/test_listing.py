"""What is offered, what is shown, and how a checkpoint is asked for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from onward.catalog.ledger import read_ledger
from onward.catalog.listing import list_runs, read_catalog
from onward.catalog.quarantine import quarantine, record_verification
from onward.catalog.receipts import read_receipts, write_receipt
from onward.errors import NothingRecoverable, StorageError
from onward.format.names import RunPlaces
from onward.records import CheckpointEntry, Finding
from onward.storage.memory import MemoryStore
from onward.storage.posix import PosixStore
from onward.upkeep.verify import verify
from recorder import resumed
from support import PLACES, RUN, TIER, commit, content, die, place_of, posix_store, start


@pytest.fixture
def written(store: MemoryStore) -> tuple[MemoryStore, dict[int, CheckpointEntry]]:
    run = start(store)
    entries = {step: commit(run, step) for step in (9, 10, 90, 200, 1000)}
    run.end()
    return store, entries


def test_the_list_is_in_order_of_commit_and_the_newest_is_the_last_committed(
    written: tuple[MemoryStore, dict[int, CheckpointEntry]],
) -> None:
    """T13: 9, 10, 90, 200, 1000 are in numeric order, and 1000 is the newest."""
    catalog = read_catalog(written[0], PLACES, TIER)
    assert [info.step for info in catalog.offered()] == [1000, 200, 90, 10, 9]
    assert [info.step for info in catalog.checkpoints] == [9, 10, 90, 200, 1000]
    newest = catalog.find("newest")
    assert newest is not None
    assert newest.step == 1000


def test_a_checkpoint_is_found_by_step_sequence_or_folder(
    written: tuple[MemoryStore, dict[int, CheckpointEntry]],
) -> None:
    store, entries = written
    run = start(store)
    again = commit(run, 90)  # the same step once more, after a rollback
    run.end()
    catalog = read_catalog(store, PLACES, TIER)
    for which, sequence in (
        ("90", again.sequence),
        (f"seq:{entries[90].sequence}", entries[90].sequence),
        (entries[9].folder, entries[9].sequence),
        ("newest", again.sequence),
    ):
        found = catalog.find(which)
        assert found is not None
        assert found.sequence == sequence
    for which in (
        "91",
        "seq:99",
        "seq:",
        "seq:x",
        "step-000000000090",
        "",
        "latest",
        "-1",
        "\u0661",
        "seq:\u00b2",
        "\u00b2",
    ):
        assert catalog.find(which) is None


def test_a_relative_root_works_after_a_change_of_folder_and_the_root_may_be_moved(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T19: nothing in a store holds the place where it lay."""
    monkeypatch.chdir(fast_path)
    posix_store(fast_path / "ck")
    run = start(PosixStore("ck"))
    monkeypatch.chdir("/")
    commit(run, 10)
    run.end()
    shutil.move(fast_path / "ck", fast_path / "moved")
    assert not any(str(fast_path).encode() in path.read_bytes() for path in (fast_path / "moved").rglob("*.json"))
    begun, part = resumed(PosixStore(fast_path / "moved"))
    assert (begun.next_step, part.bytes()) == (10, content(10))


def test_a_link_to_itself_or_to_a_checkpoint_is_shown_as_unknown_and_in_nobodys_way(disk: PosixStore) -> None:
    """T20: a hand-made 'latest', pointing at itself or at a checkpoint, is not followed and not removed."""
    run = start(disk)
    entry = commit(run, 10)
    run.end()
    base = disk.root / PLACES.checkpoints
    os.symlink("latest", base / "latest")
    os.symlink(entry.folder, base / "last")
    begun, part = resumed(disk)
    assert (begun.next_step, part.bytes()) == (10, content(10))
    foreign = {item.name: item.kind for item in read_catalog(disk, PLACES, TIER).foreign}
    assert foreign == {"latest": "unknown", "last": "unknown"}
    assert {p.name for p in base.iterdir() if p.is_symlink()} == {"latest", "last"}


def test_a_quarantined_checkpoint_is_listed_with_its_reason_and_not_offered(
    written: tuple[MemoryStore, dict[int, CheckpointEntry]],
) -> None:
    store, entries = written
    finding = Finding(code="damaged-file", message="altered", file="layout.json", checkpoint=entries[1000].folder)
    quarantine(store, PLACES, entries[1000], [finding], tier=TIER)
    catalog = read_catalog(store, PLACES, TIER)
    assert [info.step for info in catalog.offered()] == [200, 90, 10, 9]
    info = catalog.find("1000")
    assert info is not None
    assert (info.status, info.reason, info.verified) == ("quarantined", "layout.json: altered", "no")
    report = verify(place_of(store, entries[1000].folder), info, run=RUN, threads=1)
    record_verification(store, PLACES, info, report, tier=TIER)
    assert [info.step for info in read_catalog(store, PLACES, TIER).offered()] == [1000, 200, 90, 10, 9]


def test_a_quick_verification_does_not_lift_a_quarantine(
    written: tuple[MemoryStore, dict[int, CheckpointEntry]],
) -> None:
    """It did not look at every byte; the byte that was wrong may be one it never saw."""
    store, entries = written
    finding = Finding(code="damaged-file", message="altered", file="000.safetensors")
    quarantine(store, PLACES, entries[1000], [finding], tier=TIER)
    info = read_catalog(store, PLACES, TIER).checkpoints[-1]
    report = verify(place_of(store, info.folder), info, run=RUN, method="quick", threads=1)
    record_verification(store, PLACES, info, report, tier=TIER)
    assert read_catalog(store, PLACES, TIER).checkpoints[-1].status == "quarantined"


def test_receipts_are_kept_apart_by_checkpoint_and_each_vouches_for_itself(
    written: tuple[MemoryStore, dict[int, CheckpointEntry]],
) -> None:
    store, entries = written
    for kind in ("resumed", "labelled"):
        write_receipt(store, PLACES, kind=kind, sequence=2, folder=entries[9].folder, tier=TIER, details={"kind": kind})
    receipts, findings = read_receipts(store, PLACES, entries[9].folder)
    assert ([r.kind for r in receipts], findings) == (["verified", "resumed", "labelled"], [])
    assert [r.kind for r in read_receipts(store, PLACES, entries[10].folder)[0]] == ["verified"]
    path = next(p for p in store.files if entries[9].folder in p and "resumed" in p)
    other = path.replace(entries[9].folder, entries[10].folder)
    store.files[other] = store.files[path]
    store.files[path] = b"{}"
    assert [f.code for f in read_catalog(store, PLACES, TIER).findings] == ["receipt-damaged", "receipt-foreign"]


def test_one_receipt_that_the_disk_cannot_read_does_not_hide_the_others(
    written: tuple[MemoryStore, dict[int, CheckpointEntry]],
) -> None:
    store, entries = written
    read = store.read

    def failing(path: str, *, limit: int) -> bytes:
        if "/receipts/" in path and entries[9].folder in path:
            raise StorageError(f"read {path}: EIO")
        return read(path, limit=limit)

    store.read = failing  # type: ignore[method-assign]
    catalog = read_catalog(store, PLACES, TIER)
    assert len(catalog.offered()) == 5
    assert [entries[9].folder in finding.file for finding in catalog.findings] == [True]


def test_the_runs_of_a_store_are_listed(store: MemoryStore) -> None:
    assert list_runs(store) == []
    for name in ("b", "a"):
        start(store, name).end()
    store.files["runs/file"] = b""
    assert list_runs(store) == ["a", "b"]
    assert list_runs(MemoryStore()) == []


def test_two_runs_in_one_store_know_nothing_of_each_other(store: MemoryStore) -> None:
    """T61: each has its own ledger, checkpoints and lease."""
    one, other = start(store), start(store, "other")
    commit(one, 500)
    commit(other, 100)
    assert [info.step for info in read_catalog(store, RunPlaces("other"), TIER).offered()] == [100]
    one.end()
    other.end()
    begun, _ = resumed(store, run="other")
    assert begun.next_step == 100


def test_a_run_whose_checkpoints_were_all_deleted_does_not_begin_again_at_zero(
    written: tuple[MemoryStore, dict[int, CheckpointEntry]],
) -> None:
    from onward.catalog.deletion import delete_checkpoint

    store, entries = written
    run = start(store)
    for entry in entries.values():
        delete_checkpoint(run.ledger, read_ledger(store, PLACES), entry, tier=TIER, reason="all of them")
    die(run)
    with pytest.raises(NothingRecoverable, match="deleted"):
        resumed(store)
    begun, _ = resumed(store, allow_fresh_start=True)
    assert (begun.mode, begun.next_step) == ("first-start", 0)
