"""Shards: one rank writes its part. Hashes are taken from the captured memory on the way to storage, so that a bad
write cannot bless itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from onward.format import codec
from onward.format.digests import sha256, xxh3
from onward.format.dtypes import itemsize, stored_dtype, stored_shape
from onward.format.names import INDEX, RECORD, STATE, rank_folder, shard_name
from onward.format.shardfile import ShardEntry, build_header, entry_name
from onward.records import (
    CHUNK_BYTES,
    FORMAT,
    Box,
    Index,
    IndexFile,
    Piece,
    RankRecord,
    StateFile,
    StoredFile,
)
from onward.save.captured import Captured, SaveContext, StagedTensor
from onward.storage.base import Barrier, Sink, Store
from onward.storage.parallel import each
from onward.topology.boxes import byte_offset, nbytes, split, whole

BLOCK = 4 * 1024 * 1024
"""Both digests and the write take a block while it is in the cache."""
DEFAULT_THREADS = 4
_FILES_PER_THREAD = 2
_SMALLEST_FILE = 16 * 1024 * 1024
LARGEST_FILE = 1024 * 1024 * 1024


@dataclass(frozen=True)
class PlannedPiece:
    """A box of a tensor, and where its bytes lie in staging memory."""

    tensor: StagedTensor
    box: Box
    start: int
    nbytes: int


def plan(tensors: Iterable[StagedTensor], *, threads: int, largest: int = LARGEST_FILE) -> list[list[PlannedPiece]]:
    """Deals the tensors out to shard files of bounded and similar size, large tensors cut into boxes.

    Args:
        tensors: What is to be stored.
        threads: How many files are written at once; there are about twice as many.
        largest: Bytes after which a file is closed.

    Returns:
        The pieces of each file; at least one file, even without tensors. Tensors of wide items come first in a file,
        so that every one begins at a multiple of its item size.
    """
    tensors = list(tensors)
    total = sum(tensor.nbytes for tensor in tensors)
    target = min(max(-(-total // (threads * _FILES_PER_THREAD)), _SMALLEST_FILE), largest)
    files: list[list[PlannedPiece]] = [[]]
    filled = 0
    for tensor in sorted(tensors, key=lambda t: -itemsize(t.dtype)):
        size = itemsize(tensor.dtype)
        boxes = list(split(whole(tensor.shape), size, target)) or [whole(tensor.shape)]
        for box in boxes:
            count = nbytes(box.shape, size)
            if files[-1] and filled + count > target:
                files.append([])
                filled = 0
            offset = byte_offset(box, tensor.shape, size) or 0
            files[-1].append(PlannedPiece(tensor=tensor, box=box, start=tensor.start + offset, nbytes=count))
            filled += count
    return files


def write_rank(
    store: Store, folder: str, captured: Captured, context: SaveContext, *, run: str, attempt: str, threads: int
) -> tuple[RankRecord, str]:
    """Writes all files of one rank below ``folder``, its record last, each made durable.

    Returns:
        The record and its SHA-256.

    Raises:
        StorageError: The store refused something; nothing of it counts.
    """
    place = f"{folder}/{rank_folder(context.rank)}"
    store.make_folder(place, exist_ok=True)
    planned = plan(captured.tensors, threads=threads)
    metadata = {"onward": str(FORMAT), "run": run, "step": str(captured.step), "rank": str(context.rank)}

    def write(numbered: tuple[int, list[PlannedPiece]]) -> tuple[StoredFile, IndexFile]:
        number, pieces = numbered
        return _write_shard(store, place, shard_name(number), pieces, captured.memory, metadata)

    written = each(write, enumerate(planned), threads=threads, name="onward-shard")
    files = [file for file, _ in written]
    index = Index(format=FORMAT, rank=context.rank, chunk_bytes=CHUNK_BYTES, files=tuple(entry for _, entry in written))
    state = StateFile(format=FORMAT, rank=context.rank, components=captured.state)
    for name, data in ((INDEX, codec.encode_index(index)), (STATE, codec.encode(state))):
        write_file(store, f"{place}/{name}", data)
        files.append(codec.stored(name, data))
    shared = {tag.name: captured.state[tag.name] for tag in captured.tags if tag.scope == "global"}
    record = RankRecord(
        format=FORMAT,
        run=run,
        attempt=attempt,
        step=captured.step,
        rank=context.rank,
        world_size=context.world_size,
        layout_sha256=sha256(codec.encode(captured.layout)),
        files=tuple(files),
        components=captured.tags,
        tensor_bytes=captured.tensor_bytes,
        global_state_sha256=sha256(codec.encode(shared)),
    )
    data = codec.encode(record)
    write_file(store, f"{place}/{RECORD}", data)
    store.sync_folder(place, Barrier.ATTEMPT_FOLDER)
    return record, sha256(data)


def write_file(store: Store, path: str, data: bytes) -> None:
    """Writes one small file of an attempt, durably."""
    sink = store.open_new(path)
    try:
        sink.write(data)
        sink.finish(Barrier.META)
    except BaseException:
        sink.abandon()
        raise


def _write_shard(
    store: Store, place: str, name: str, pieces: list[PlannedPiece], memory: memoryview, metadata: dict[str, str]
) -> tuple[StoredFile, IndexFile]:
    entries: list[ShardEntry] = []
    begin = 0
    for piece in pieces:
        is_whole = piece.box.shape == piece.tensor.shape
        entries.append(
            ShardEntry(
                name=entry_name(piece.tensor.key, piece.box.offset, is_whole),
                dtype=stored_dtype(piece.tensor.dtype),
                shape=stored_shape(piece.tensor.dtype, piece.box.shape),
                begin=begin,
                end=begin + piece.nbytes,
            )
        )
        begin += piece.nbytes
    header = build_header(entries, metadata)
    digest = hashlib.sha256(header)
    sink = store.open_new(f"{place}/{name}")
    try:
        sink.write(header)
        indexed: list[Piece] = []
        for piece, entry in zip(pieces, entries, strict=True):
            view = memory[piece.start : piece.start + piece.nbytes]
            indexed.append(
                Piece(
                    tensor=piece.tensor.key,
                    offset=piece.box.offset,
                    shape=piece.box.shape,
                    start=len(header) + entry.begin,
                    nbytes=piece.nbytes,
                    digests=_write_piece(sink, view, piece, digest),
                )
            )
        size = sink.finish(Barrier.SHARD)
    except BaseException:
        sink.abandon()
        raise
    stored = StoredFile(path=name, size=size, sha256=digest.hexdigest())
    index = IndexFile(path=name, size=size, header_bytes=len(header), header_xxh3=xxh3(header), pieces=tuple(indexed))
    return stored, index


def _write_piece(sink: Sink, view: memoryview, piece: PlannedPiece, digest: hashlib._Hash) -> tuple[str, ...]:
    digests: list[str] = []
    size = itemsize(piece.tensor.dtype)
    start = 0
    for box in split(piece.box, size, CHUNK_BYTES):
        end = start + nbytes(box.shape, size)
        chunk = xxhash.xxh3_128()
        for at in range(start, end, BLOCK):
            block = view[at : min(at + BLOCK, end)]
            digest.update(block)
            chunk.update(block)
            sink.write(block)
        digests.append(chunk.hexdigest())
        start = end
    return tuple(digests)
