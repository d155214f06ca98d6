"""Verification: what it covers is what it says, and an unreadable store is not a damaged checkpoint."""

from __future__ import annotations

import pytest

from onward.catalog.incarnation import Incarnation
from onward.catalog.listing import read_catalog
from onward.errors import StorageError
from onward.format.codec import encode
from onward.format.names import SUMS
from onward.records import CheckpointInfo, VerifyReport
from onward.storage.base import Entry
from onward.storage.memory import MemoryStore
from onward.upkeep.verify import verify
from support import PLACES, RUN, TIER, commit, place_of

SHARD = "rank-00000/000.safetensors"


@pytest.fixture
def info(run: Incarnation) -> CheckpointInfo:
    commit(run, 10, assets={"vocab.txt": b"a b c"})
    return read_catalog(run.store, PLACES, TIER).checkpoints[0]


def look(store: MemoryStore, info: CheckpointInfo | None, method: str = "full", folder: str = "") -> VerifyReport:
    name = folder or (info.folder if info else "")
    return verify(place_of(store, name), info, run=RUN, method=method, threads=2)  # type: ignore[arg-type]


def files(store: MemoryStore, info: CheckpointInfo) -> dict[str, bytes]:
    base = f"{PLACES.checkpoint(info.folder)}/"
    return {path.removeprefix(base): data for path, data in store.files.items() if path.startswith(base)}


def alter(store: MemoryStore, info: CheckpointInfo, file: str, at: int = -1) -> None:
    path = f"{PLACES.checkpoint(info.folder)}/{file}"
    data = bytearray(store.files[path])
    data[at] ^= 1
    store.files[path] = bytes(data)


def test_a_full_verification_reads_every_byte_and_says_so(store: MemoryStore, info: CheckpointInfo) -> None:
    report = look(store, info)
    there = {path: len(data) for path, data in files(store, info).items() if path != SUMS}
    assert report.ok
    assert report.findings == ()
    assert (report.coverage.files, report.coverage.files_total) == (len(there), len(there))
    assert (report.coverage.bytes, report.coverage.bytes_total) == (sum(there.values()), sum(there.values()))
    assert report.coverage.method == "every byte, SHA-256 and XXH3-128"


def test_a_quick_verification_says_how_little_it_read(store: MemoryStore, info: CheckpointInfo) -> None:
    """Flipped tensor bytes are beyond it, and its coverage does not claim otherwise; sizes and small files are not."""
    alter(store, info, SHARD)
    quick = look(store, info, "quick")
    assert quick.ok
    assert quick.coverage.bytes < quick.coverage.bytes_total
    assert quick.coverage.method == "sizes and headers; small files by SHA-256"
    assert not look(store, info).ok
    for file in files(store, info):
        if file != SHARD:
            alter(store, info, file)
            report = look(store, info, "quick")
            assert file in {finding.file for finding in report.findings}, file
            alter(store, info, file)
    path = f"{PLACES.checkpoint(info.folder)}/{SHARD}"
    store.files[path] += b"\0"
    assert SHARD in {finding.file for finding in look(store, info, "quick").findings}


def test_every_damaged_file_is_listed_not_only_the_first(store: MemoryStore, info: CheckpointInfo) -> None:
    for file in ("rank-00000/state.json", SHARD, "assets/vocab.txt"):
        alter(store, info, file)
    findings = look(store, info).findings
    found = {finding.file: finding for finding in findings}
    assert len(findings) == len(found), "each once"
    assert set(found) == {"rank-00000/state.json", SHARD, "assets/vocab.txt"}
    assert (found[SHARD].rank, found["assets/vocab.txt"].rank) == (0, None)
    assert found[SHARD].tensor
    assert {finding.tier for finding in found.values()} == {TIER}


def test_a_lone_folder_vouches_only_for_itself_and_the_ledger_for_more(
    store: MemoryStore, info: CheckpointInfo
) -> None:
    """With every digest recomputed a folder agrees with itself; only the ledger's entry tells that it was changed."""
    base = PLACES.checkpoint(info.folder)
    changed = store.files[f"{base}/manifest.json"].replace(b'"reason":""', b'"reason":"forged"')
    assert changed != store.files[f"{base}/manifest.json"]
    from onward.format.digests import sha256

    old = sha256(store.files[f"{base}/manifest.json"]).encode()
    store.files[f"{base}/manifest.json"] = changed
    store.files[f"{base}/{SUMS}"] = store.files[f"{base}/{SUMS}"].replace(old, sha256(changed).encode())
    assert look(store, None, folder=info.folder).ok
    report = look(store, info)
    assert [finding.file for finding in report.findings] == ["manifest.json"]


def test_a_file_that_no_record_names_is_told_and_is_no_damage(store: MemoryStore, info: CheckpointInfo) -> None:
    store.files[f"{PLACES.checkpoint(info.folder)}/rank-00000/notes"] = b"mine"
    report = look(store, info)
    assert report.ok
    assert [(f.code, f.file) for f in report.findings] == [("foreign-file", "rank-00000/notes")]


def test_a_name_that_is_not_text_can_be_reported(store: MemoryStore, info: CheckpointInfo) -> None:
    store.files[f"{PLACES.checkpoint(info.folder)}/\udcff"] = b"?"
    encode(look(store, info))


def test_a_store_that_does_not_answer_is_an_error_not_a_verdict(store: MemoryStore, info: CheckpointInfo) -> None:
    """A stuck mount must not quarantine what it hides."""
    read_into = store.read_into

    def failing(path: str, start: int, view: memoryview) -> None:
        if path.endswith(SHARD):
            raise StorageError(f"read {path}: EIO")
        read_into(path, start, view)

    store.read_into = failing  # type: ignore[method-assign]
    report = look(store, info)
    assert not report.ok
    assert {finding.code for finding in report.findings} == {"storage"}


def test_folders_nested_without_end_are_refused(store: MemoryStore, info: CheckpointInfo) -> None:
    path = PLACES.checkpoint(info.folder)
    for _ in range(1500):
        path += "/d"
        store.folders[path] = 0.0
    deep = {path: store.folders[path] for path in store.folders}
    children: dict[str, list[Entry]] = {}
    for each in deep:
        children.setdefault(each.rpartition("/")[0], []).append(Entry(each.rpartition("/")[2], "folder", 0, 0.0))
    plain = store.list
    store.list = lambda folder: children[folder] if folder.endswith("/d") and folder in children else plain(folder)  # type: ignore[method-assign]
    report = look(store, info)
    assert not report.ok
    assert "nested" in report.findings[0].message


def test_progress_is_told_for_every_byte_that_is_hashed(store: MemoryStore, info: CheckpointInfo) -> None:
    told: list[int] = []
    report = verify(place_of(store, info.folder), info, run=RUN, threads=1, progress=told.append)
    assert sum(told) == report.coverage.bytes


def test_verification_writes_nothing(store: MemoryStore, info: CheckpointInfo) -> None:
    before = dict(store.files)
    look(store, info)
    alter(store, info, SHARD)
    damaged = dict(store.files)
    look(store, info)
    assert store.files == damaged
    assert before.keys() == damaged.keys()
