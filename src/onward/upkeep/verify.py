"""Verification: quick (every file there, sizes, headers, digests of the small files) or full (every byte)."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import xxhash

from onward.catalog.reader import OpenCheckpoint, Place, as_findings, open_folder
from onward.errors import Damaged, OnwardError
from onward.format.names import MANIFEST, SHARD_SUFFIX, SUMS, rank_folder
from onward.records import CheckpointInfo, Coverage, Finding, VerifyReport
from onward.storage.base import NotFound, walk_files
from onward.storage.parallel import each
from onward.upkeep.shards import Chunk, ShardFile, check_header, chunks, require_whole, shard_files

Method = Literal["quick", "full"]
_METHODS: dict[Method, str] = {
    "full": "every byte, SHA-256 and XXH3-128",
    "quick": "sizes and headers; small files by SHA-256",
}
_BLOCK = 4 * 1024 * 1024
_RANK = re.compile(r"rank-([0-9]{5,9})/")
_HARMLESS = frozenset({"foreign-file"})


@dataclass
class _Work:
    """What one verification has seen so far."""

    place: Place
    progress: Callable[[int], None]
    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    bytes: int = 0

    def add(self, path: str, message: str, rank: int | None = None, tensor: str = "") -> None:
        self.findings.append(self.place.finding(path, message, rank, tensor))


def verify(
    place: Place,
    info: CheckpointInfo | None,
    *,
    run: str,
    method: Method = "full",
    threads: int = 2,
    drop_cache: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> VerifyReport:
    """Verifies one checkpoint; never writes.

    Args:
        place: Its folder.
        info: What the ledger says of it; None for a lone folder, which can vouch only for itself.
        run: The run's name, for the report.
        method: ``quick`` or ``full``.
        threads: How many files are hashed at once.
        drop_cache: Ask for the bytes on the medium rather than those in memory (after a save).
        progress: Told of each number of bytes that was hashed.

    Returns:
        The verdict, with everything that is wrong and how much was really looked at.
    """
    started = time.monotonic()
    work = _Work(place=place, progress=progress)
    total_files = total_bytes = 0
    try:
        digests = (info.manifest_sha256, info.sums_sha256) if info else (None, None)
        opened = open_folder(place, manifest_sha256=digests[0], sums_sha256=digests[1])
        if info and opened.manifest.global_step != info.step:
            work.add(MANIFEST, f"it is of step {opened.manifest.global_step}, the ledger's entry of step {info.step}")
        total_files, total_bytes = _check_all(opened, work, method, threads, drop_cache)
    except OnwardError as error:
        work.findings.extend(as_findings(error, place.tier, place.name))
    return VerifyReport(
        run=run,
        folder=place.name,
        tier=place.tier,
        ok=all(finding.code in _HARMLESS for finding in work.findings),
        method=method,
        coverage=Coverage(
            files=work.files,
            files_total=max(total_files, work.files),
            bytes=work.bytes,
            bytes_total=max(total_bytes, work.bytes),
            method="every byte, SHA-256 and XXH3-128"
            if method == "full"
            else "sizes and headers; small files by SHA-256",
        ),
        findings=tuple(work.findings),
        seconds=round(time.monotonic() - started, 6),
    )


def _check_all(opened: OpenCheckpoint, work: _Work, method: Method, threads: int, drop_cache: bool) -> tuple[int, int]:
    place = opened.place
    present = dict(walk_files(place.store, place.root))
    for path in sorted(set(present) - set(opened.sums) - {SUMS}):
        work.findings.append(
            Finding(
                code="foreign-file",
                message="no record names this file; it is not part of the checkpoint",
                tier=place.tier,
                checkpoint=place.name,
                file=path.encode("utf-8", "backslashreplace").decode(),
            )
        )
    sizes = {f"{rank_folder(r.rank)}/{file.path}": file.size for r in opened.records for file in r.files}
    sizes.update({asset.path: asset.size for asset in opened.manifest.assets})
    shards = _shards(opened, work)
    hashed: list[str] = []
    for path in opened.sums:
        entry = present.get(path)
        rank = _rank_of(path)
        if entry is None:
            work.add(path, "the file is missing", rank)
        elif entry.kind != "file":
            work.add(path, f"a {entry.kind} stands where a regular file is due", rank)
        elif path in sizes and entry.size != sizes[path]:
            work.add(path, f"it has {entry.size} bytes instead of {sizes[path]}", rank)
        elif method == "full" or not path.endswith(SHARD_SUFFIX):
            hashed.append(path)
        else:
            work.files += 1

    def look(path: str) -> _Hashed:
        return _hash(opened, path, shards.get(path), drop_cache, work.progress)

    told = {finding.file for finding in work.findings}
    for result in each(look, hashed, threads=threads):
        work.files += 1
        work.bytes += result.bytes
        if result.problem and result.path not in told:
            for tensor in result.tensors or ("",):
                work.add(result.path, result.problem, _rank_of(result.path), tensor)
    broken = {finding.file for finding in work.findings}
    for path, shard in shards.items():
        if path not in broken:
            try:
                check_header(place, path, shard.index, opened.tensors())
            except Damaged as error:
                work.add(path, error.message, shard.rank)
    total = sum(entry.size for path, entry in present.items() if path in opened.sums)
    return len(opened.sums), total


def _shards(opened: OpenCheckpoint, work: _Work) -> dict[str, ShardFile]:
    """The shard files by path, after a look at whether they make up every tensor. A verified checkpoint must load."""
    found: list[ShardFile] = []

    def passes(action: Callable[..., object], *arguments: object) -> bool:
        try:
            action(*arguments)
        except OnwardError as error:
            work.findings.extend(as_findings(error, opened.place.tier, opened.place.name))
            return False
        return True

    def index(rank: int) -> None:
        found.extend(shard_files(opened, rank))

    def count_chunks(file: ShardFile) -> None:
        for _ in chunks(file.index, opened.tensors()):
            pass

    # One by one: a damaged small file must not hide what the others say.
    whole = True
    for record in opened.records:
        passes(opened.state, record.rank)
        whole &= passes(index, record.rank)
    found[:] = [file for file in found if passes(count_chunks, file)]
    if whole:
        passes(require_whole, opened, found)
    return {shard.path: shard for shard in found}


@dataclass(frozen=True)
class _Hashed:
    path: str
    bytes: int
    problem: str = ""
    tensors: tuple[str, ...] = ()


def _hash(
    opened: OpenCheckpoint, path: str, shard: ShardFile | None, drop_cache: bool, progress: Callable[[int], None]
) -> _Hashed:
    """Reads a file once and checks both digests: SHA-256 of the whole, and XXH3-128 of each chunk of a shard."""
    store, full = opened.place.store, f"{opened.place.root}/{path}"
    digest = hashlib.sha256()
    parts = _ChunkDigests(chunks(shard.index, opened.tensors()) if shard is not None else iter(()))
    done = 0
    try:
        size = store.stat(full).size
        if drop_cache:
            store.drop_cache(full)
        block = memoryview(bytearray(min(size, _BLOCK)))
        while done < size:
            part = block[: min(_BLOCK, size - done)]
            store.read_into(full, done, part)
            digest.update(part)
            parts.update(part, done)
            done += len(part)
            progress(len(part))
    except NotFound:
        return _Hashed(path, done, "the file is missing")
    except Damaged as error:
        return _Hashed(path, done, error.message)
    altered = tuple(parts.altered)
    if digest.hexdigest() != opened.sums[path]:
        return _Hashed(path, done, f"it does not match its SHA-256 ({done} bytes)", altered)
    if altered:
        return _Hashed(path, done, "a chunk does not match the digest in the index", altered)
    return _Hashed(path, done)


class _ChunkDigests:
    """Compares the chunks of a file with their digests while the file goes by."""

    def __init__(self, waiting: Iterator[Chunk]) -> None:
        self._waiting = waiting
        self._chunk = next(waiting, None)
        self._digest = xxhash.xxh3_128()
        self.altered: dict[str, None] = {}

    def update(self, block: memoryview, start: int) -> None:
        stop = start + len(block)
        while (chunk := self._chunk) is not None and chunk.start < stop:
            end = chunk.start + chunk.nbytes
            self._digest.update(block[max(chunk.start - start, 0) : min(end, stop) - start])
            if end > stop:
                return
            if self._digest.hexdigest() != chunk.digest:
                self.altered[chunk.tensor] = None
            self._digest = xxhash.xxh3_128()
            self._chunk = next(self._waiting, None)


def _rank_of(path: str) -> int | None:
    found = _RANK.match(path)
    return int(found[1]) if found else None
