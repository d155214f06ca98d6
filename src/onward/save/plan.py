"""Which bytes go into which shard file, and where each lies in staging memory.

The plan follows from the layout alone: every process computes the same one. Staging memory mirrors the files (each
file's tensor bytes begin on a page and lie side by side), so that they can be written straight from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import msgspec

from onward.format.digests import xxh3
from onward.format.dtypes import itemsize
from onward.format.names import shard_name
from onward.format.shardfile import ALIGN
from onward.records import Box, Key, TensorLayout
from onward.topology.boxes import byte_offset, nbytes, split, whole

DEFAULT_THREADS = 4
_FILES_PER_THREAD = 2
_SMALLEST_FILE = 16 * 1024 * 1024
LARGEST_FILE = 1024 * 1024 * 1024


@dataclass(frozen=True)
class PlannedPiece:
    """A box of a tensor, contiguous in the tensor's bytes.

    Attributes:
        key: The tensor.
        dtype: Its logical dtype.
        shape: The shape of the whole tensor.
        box: Which part of it.
        begin: First byte in the file, counted from the first tensor byte.
        start: First byte in staging memory.
        offset: First byte in the C-ordered bytes of the tensor.
        nbytes: Size.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]
    box: Box
    begin: int
    start: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class PlannedFile:
    """One shard file: its pieces, in file order, and its region of staging memory."""

    name: str
    start: int
    nbytes: int
    pieces: tuple[PlannedPiece, ...]


@dataclass(frozen=True)
class Plan:
    """All shard files of one rank; ``arena_bytes`` of staging memory hold them."""

    files: tuple[PlannedFile, ...]
    arena_bytes: int
    tensor_bytes: int

    @cached_property
    def digest(self) -> str:
        """Tells plans apart: what one process put in a place must be what another reads there."""
        places = [(f.name, f.start, f.nbytes, [(p.key, p.start, p.nbytes) for p in f.pieces]) for f in self.files]
        return xxh3(msgspec.msgpack.encode(places))


def plan(
    tensors: Iterable[TensorLayout],
    *,
    threads: int = DEFAULT_THREADS,
    largest: int = LARGEST_FILE,
    smallest: int = _SMALLEST_FILE,
) -> Plan:
    """Deals the stored tensors out to shard files of bounded and similar size, large tensors cut into boxes.

    Args:
        tensors: The layout's tensors; tied ones are left out.
        threads: How many files are written at once; there are about twice as many.
        largest: Bytes after which a file is closed.
        smallest: Bytes below which no further file is begun.

    Returns:
        At least one file, even without tensors. Tensors of wide items come first in a file, so that every one begins
        at a multiple of its item size.
    """
    stored = [tensor for tensor in tensors if tensor.tie is None]
    total = sum(nbytes(tensor.shape, itemsize(tensor.dtype)) for tensor in stored)
    target = min(max(-(-total // (threads * _FILES_PER_THREAD)), smallest), largest)
    files: list[PlannedFile] = []
    pieces: list[PlannedPiece] = []
    start = filled = 0

    def close() -> None:
        nonlocal start, filled, pieces
        files.append(PlannedFile(name=shard_name(len(files)), start=start, nbytes=filled, pieces=tuple(pieces)))
        start += -(-filled // ALIGN) * ALIGN
        pieces, filled = [], 0

    for tensor in sorted(stored, key=lambda t: -itemsize(t.dtype)):
        size = itemsize(tensor.dtype)
        for box in list(split(whole(tensor.shape), size, target)) or [whole(tensor.shape)]:
            count = nbytes(box.shape, size)
            if pieces and filled + count > target:
                close()
            offset = byte_offset(box, tensor.shape, size)
            assert offset is not None, "split yields contiguous boxes"
            pieces.append(
                PlannedPiece(
                    key=tensor.key,
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    box=box,
                    begin=filled,
                    start=start + filled,
                    offset=offset,
                    nbytes=count,
                )
            )
            filled += count
    if pieces or not files:
        close()
    return Plan(files=tuple(files), arena_bytes=start, tensor_bytes=total)
