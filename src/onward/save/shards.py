"""Shards: one rank writes its part. Hashes are taken from the captured memory on the way to storage, so that a bad
write cannot bless itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import xxhash

from onward.format import codec
from onward.format.digests import sha256, xxh3
from onward.format.dtypes import itemsize, stored_dtype, stored_shape
from onward.format.names import INDEX, RECORD, STATE, rank_folder
from onward.format.shardfile import ShardEntry, build_header, entry_name
from onward.records import (
    CHUNK_BYTES,
    FORMAT,
    Index,
    IndexFile,
    Piece,
    RankRecord,
    StateFile,
    StoredFile,
)
from onward.save.captured import Captured, SaveContext
from onward.save.plan import PlannedFile
from onward.storage.base import Barrier, Sink, Store
from onward.storage.parallel import each
from onward.topology.boxes import nbytes, split

BLOCK = 4 * 1024 * 1024
"""Both digests and the write take a block while it is in the cache."""


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
    metadata = {"onward": str(FORMAT), "run": run, "step": str(captured.step), "rank": str(context.rank)}

    def write(file: PlannedFile) -> tuple[StoredFile, IndexFile]:
        return _write_shard(store, place, file, captured.region(file), metadata)

    written = each(write, captured.plan.files, threads=threads)
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
    store: Store, place: str, file: PlannedFile, data: memoryview, metadata: dict[str, str]
) -> tuple[StoredFile, IndexFile]:
    header = build_header(
        [
            ShardEntry(
                name=entry_name(piece.key, piece.box.offset, piece.box.shape == piece.shape),
                dtype=stored_dtype(piece.dtype),
                shape=stored_shape(piece.dtype, piece.box.shape),
                begin=piece.begin,
                end=piece.begin + piece.nbytes,
            )
            for piece in file.pieces
        ],
        metadata,
    )
    digest = hashlib.sha256(header)
    sink = store.open_new(f"{place}/{file.name}", direct=True)
    try:
        sink.write(header)
        chunks = _write_blocks(sink, data, file, digest)
        size = sink.finish(Barrier.SHARD)
    except BaseException:
        sink.abandon()
        raise
    pieces = tuple(
        Piece(
            tensor=piece.key,
            offset=piece.box.offset,
            shape=piece.box.shape,
            start=len(header) + piece.begin,
            nbytes=piece.nbytes,
            digests=tuple(digests),
        )
        for piece, digests in zip(file.pieces, chunks, strict=True)
    )
    stored = StoredFile(path=file.name, size=size, sha256=digest.hexdigest())
    index = IndexFile(path=file.name, size=size, header_bytes=len(header), header_xxh3=xxh3(header), pieces=pieces)
    return stored, index


def _write_blocks(sink: Sink, data: memoryview, file: PlannedFile, digest: hashlib._Hash) -> list[list[str]]:
    """Writes the tensor bytes block by block; each block is hashed for the file and for its chunks before it goes.

    Returns:
        The digests of the chunks of each piece.
    """
    digests: list[list[str]] = [[] for _ in file.pieces]
    chunks = _chunks(file)
    number, begin, end = next(chunks, (-1, 0, 0))
    partial = xxhash.xxh3_128()
    for start in range(0, len(data), BLOCK):
        stop = min(start + BLOCK, len(data))
        digest.update(data[start:stop])
        while number >= 0 and begin < stop:
            until = min(end, stop)
            partial.update(data[max(begin, start) : until])
            if until < end:
                break  # the chunk goes on in the next block
            digests[number].append(partial.hexdigest())
            partial = xxhash.xxh3_128()
            number, begin, end = next(chunks, (-1, 0, 0))
        sink.write(data[start:stop])
    return digests


def _chunks(file: PlannedFile) -> Iterator[tuple[int, int, int]]:
    """Every chunk of a file in byte order: its piece's number, its first byte and the one after its last."""
    for number, piece in enumerate(file.pieces):
        size = itemsize(piece.dtype)
        begin = piece.begin
        for box in split(piece.box, size, CHUNK_BYTES):
            end = begin + nbytes(box.shape, size)
            yield number, begin, end
            begin = end
