"""Verification: quick (every file there, sizes, headers, digests of the small files) or full (every byte)."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from onward.catalog.reader import OpenCheckpoint, Place, as_findings, open_folder
from onward.errors import Damaged, FormatError, OnwardError
from onward.format.digests import xxh3
from onward.format.dtypes import SAFETENSORS_ITEMSIZE, itemsize, stored_dtype, stored_shape
from onward.format.names import MANIFEST, SHARD_SUFFIX, SUMS, rank_folder
from onward.format.shardfile import entry_name, header_size, parse_header
from onward.records import CHUNK_BYTES, Box, CheckpointInfo, Coverage, Finding, IndexFile, TensorLayout, VerifyReport
from onward.storage.base import NotFound, walk_files
from onward.storage.parallel import each
from onward.topology.boxes import nbytes, split

Method = Literal["quick", "full"]
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
            method="every byte, SHA-256" if method == "full" else "sizes and headers; small files by SHA-256",
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
    results = each(lambda p: _hash(opened, p, drop_cache, work.progress), hashed, threads=threads, name="onward-verify")
    for path, size, problem in results:
        work.files += 1
        work.bytes += size
        if problem:
            rank = _rank_of(path)
            for tensor in _altered_tensors(opened, path) or [""]:
                work.add(path, problem, rank, tensor)
    _check_headers(opened, work, present.keys())
    total = sum(entry.size for path, entry in present.items() if path in opened.sums)
    return len(opened.sums), total


def _hash(opened: OpenCheckpoint, path: str, drop_cache: bool, progress: Callable[[int], None]) -> tuple[str, int, str]:
    store, full = opened.place.store, f"{opened.place.root}/{path}"
    digest = hashlib.sha256()
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
            done += len(part)
            progress(len(part))
    except NotFound:
        return path, done, "the file is missing"
    except Damaged as error:
        return path, done, error.message
    if digest.hexdigest() != opened.sums[path]:
        return path, done, f"it does not match its SHA-256 ({done} bytes)"
    return path, done, ""


def _rank_of(path: str) -> int | None:
    found = _RANK.match(path)
    return int(found[1]) if found else None


def _index_file(opened: OpenCheckpoint, path: str) -> IndexFile | None:
    rank = _rank_of(path)
    if rank is None or not path.endswith(SHARD_SUFFIX):
        return None
    with suppress(OnwardError):
        for file in opened.index(rank).files:
            if f"{rank_folder(rank)}/{file.path}" == path:
                return file
    return None


def chunk_boxes(file: IndexFile, layout: dict[str, TensorLayout]) -> Iterator[tuple[str, Box, int, int, str]]:
    """Every chunk of a shard file: tensor, box, first byte in the file, size, XXH3-128."""
    for piece in file.pieces:
        size = itemsize(layout[piece.tensor].dtype)
        start = piece.start
        boxes = split(Box(offset=piece.offset, shape=piece.shape), size, CHUNK_BYTES)
        # One by one: a hostile piece can claim more chunks than memory has room to list.
        for digest in piece.digests:
            box = next(boxes, None)
            if box is None:
                raise FormatError(f"{piece.tensor} has more digests than chunks")
            count = nbytes(box.shape, size)
            yield piece.tensor, box, start, count, digest
            start += count
        if next(boxes, None) is not None:
            raise FormatError(f"{piece.tensor} has fewer digests than chunks")


def _altered_tensors(opened: OpenCheckpoint, path: str) -> list[str]:
    """Which tensors of a shard file have altered chunks; empty when the header was altered, or nothing can be told."""
    file = _index_file(opened, path)
    altered: dict[str, None] = {}
    if file is not None:
        for tensor, _, start, count, digest in chunk_boxes(file, opened.tensors()):
            chunk = memoryview(bytearray(count))
            try:
                opened.place.store.read_into(f"{opened.place.root}/{path}", start, chunk)
            except OnwardError:
                altered[tensor] = None
                continue
            if xxh3(chunk) != digest:
                altered[tensor] = None
    return list(altered)


def _check_headers(opened: OpenCheckpoint, work: _Work, present: object) -> None:
    """The header of each shard file is well-formed and says the same as the index."""
    layout = opened.tensors()
    broken = {finding.file for finding in work.findings}
    for record in opened.records:
        try:
            index = opened.index(record.rank)
        except OnwardError as error:
            found = as_findings(error, opened.place.tier, opened.place.name)
            work.findings.extend(f for f in found if f.file not in broken)
            continue
        for file in index.files:
            path = f"{rank_folder(record.rank)}/{file.path}"
            if path not in broken:
                try:
                    check_header(opened.place, path, file, layout)
                except Damaged as error:
                    work.add(path, error.message, record.rank)


def check_header(place: Place, path: str, file: IndexFile, layout: dict[str, TensorLayout]) -> None:
    """Reads and judges the header of one shard file against the index.

    Raises:
        Damaged: Says what is wrong.
    """
    full = f"{place.root}/{path}"
    there = place.store.stat(full)
    if there.kind != "file" or there.size != file.size:
        raise FormatError(f"it is a {there.kind} of {there.size} bytes instead of a file of {file.size}")
    first = memoryview(bytearray(8))
    place.store.read_into(full, 0, first)
    size = header_size(bytes(first), file.size, path)
    if size != file.header_bytes:
        raise FormatError(f"its header has {size} bytes, the index says {file.header_bytes}")
    head = memoryview(bytearray(size))
    place.store.read_into(full, 0, head)
    if xxh3(head) != file.header_xxh3:
        raise FormatError("its header does not match its digest")
    entries, _ = parse_header(bytes(head), file.size, path, _item_bytes)
    said = {(e.name, e.dtype, e.shape, e.begin + size, e.end + size) for e in entries}
    due = set()
    for piece in file.pieces:
        tensor = layout[piece.tensor]
        name = entry_name(piece.tensor, piece.offset, piece.shape == tensor.shape)
        shape = stored_shape(tensor.dtype, piece.shape)
        due.add((name, stored_dtype(tensor.dtype), shape, piece.start, piece.start + piece.nbytes))
    if said != due:
        raise FormatError("its header and the index disagree about what it holds")


def _item_bytes(dtype: str) -> int:
    if dtype not in SAFETENSORS_ITEMSIZE:
        raise FormatError(f"the dtype {dtype!r} is not one of format 1")
    return SAFETENSORS_ITEMSIZE[dtype]
