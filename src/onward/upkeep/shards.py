"""What the shard files of a checkpoint must be: headers, chunks, and tensors without gap or overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from onward.catalog.reader import DamagedFile, OpenCheckpoint, Place
from onward.errors import FormatError, TopologyMismatch
from onward.format.digests import xxh3
from onward.format.dtypes import SAFETENSORS_ITEMSIZE, itemsize, stored_dtype, stored_shape
from onward.format.names import INDEX, rank_folder
from onward.format.shardfile import entry_name, header_size, parse_header
from onward.records import CHUNK_BYTES, Box, IndexFile, Key, TensorLayout
from onward.topology.boxes import byte_offset, nbytes, split


@dataclass(frozen=True)
class ShardFile:
    """One shard file of an open checkpoint: its path in the folder, its rank, and what the index says of it."""

    path: str
    rank: int
    index: IndexFile


@dataclass(frozen=True)
class Chunk:
    """One chunk: where it lies in its file, and which digest it has."""

    tensor: Key
    box: Box
    start: int
    nbytes: int
    digest: str


def shard_files(opened: OpenCheckpoint, rank: int) -> list[ShardFile]:
    """The shard files of one rank.

    Raises:
        DamagedFile: The rank's index is damaged, or says what cannot be.
    """
    layout = opened.tensors()
    files: list[ShardFile] = []
    for file in opened.index(rank).files:
        for piece in file.pieces:
            due = nbytes(piece.shape, itemsize(layout[piece.tensor].dtype))
            if -(-due // CHUNK_BYTES) > len(piece.digests):  # a cheap look before anything is counted out
                raise DamagedFile(
                    opened.place.finding(f"{rank_folder(rank)}/{INDEX}", "a piece lacks digests", rank, piece.tensor)
                )
        files.append(ShardFile(path=f"{rank_folder(rank)}/{file.path}", rank=rank, index=file))
    return files


def chunks(file: IndexFile, layout: Mapping[Key, TensorLayout]) -> Iterator[Chunk]:
    """Every chunk of a shard file, piece by piece.

    Raises:
        FormatError: A piece has more or fewer digests than chunks.
    """
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
            yield Chunk(tensor=piece.tensor, box=box, start=start, nbytes=count, digest=digest)
            start += count
        if next(boxes, None) is not None:
            raise FormatError(f"{piece.tensor} has fewer digests than chunks")


def offset_in_tensor(tensor: TensorLayout, box: Box) -> int:
    """Where a stored box begins in the C-ordered bytes of its tensor.

    Raises:
        TopologyMismatch: The box is not contiguous in the tensor.
    """
    offset = byte_offset(box, tensor.shape, itemsize(tensor.dtype))
    if offset is None:
        raise TopologyMismatch(
            f"{tensor.key} is stored in boxes that are not contiguous; this version loads it on the saved layout only"
        )
    return offset


def require_whole(opened: OpenCheckpoint, files: Iterable[ShardFile]) -> None:
    """Every stored tensor is covered once, without gap or overlap; else a load would leave garbage in it.

    Raises:
        DamagedFile: Names the tensor and the index.
    """
    layout = opened.tensors()
    spans: dict[Key, list[tuple[int, int]]] = {}
    ranks: dict[Key, int] = {}
    for file in files:
        for piece in file.index.pieces:
            begin = offset_in_tensor(layout[piece.tensor], Box(offset=piece.offset, shape=piece.shape))
            spans.setdefault(piece.tensor, []).append((begin, begin + piece.nbytes))
            ranks[piece.tensor] = file.rank
    for tensor in layout.values():
        size = nbytes(tensor.shape, itemsize(tensor.dtype))
        if tensor.tie is None and not _covers(spans.get(tensor.key, []), size):
            rank = ranks.get(tensor.key, 0)
            where = f"{rank_folder(rank)}/{INDEX}"
            raise DamagedFile(opened.place.finding(where, "the pieces do not make up the tensor", rank, tensor.key))


def check_header(place: Place, path: str, file: IndexFile, layout: Mapping[Key, TensorLayout]) -> None:
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


def _covers(spans: list[tuple[int, int]], size: int) -> bool:
    ordered = sorted(span for span in spans if span[0] != span[1])
    if not ordered:
        return size == 0 and len(spans) == 1
    joined = all(one[1] == other[0] for one, other in pairwise(ordered))
    return joined and ordered[0][0] == 0 and ordered[-1][1] == size and len(ordered) == len(spans)


def _item_bytes(dtype: str) -> int:
    if dtype not in SAFETENSORS_ITEMSIZE:
        raise FormatError(f"the dtype {dtype!r} is not one of format 1")
    return SAFETENSORS_ITEMSIZE[dtype]
