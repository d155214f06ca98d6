"""Load: bytes from a checkpoint into tensors of their own, every chunk checked on the way.

Nothing here touches the live state. A chunk whose digest is wrong ends the load, naming tier, file, tensor and rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from onward.catalog.reader import DamagedFile, OpenCheckpoint
from onward.errors import Damaged, TopologyMismatch
from onward.format.codec import LIMITS
from onward.format.digests import xxh3
from onward.format.dtypes import itemsize
from onward.format.names import INDEX, SHARD_SUFFIX, STATE, rank_folder
from onward.records import Box, IndexFile, Key, TensorLayout
from onward.restore.settings import DEFAULT_THREADS
from onward.state import tensors as exact
from onward.storage.base import NotFound
from onward.storage.parallel import each
from onward.topology.boxes import byte_offset, nbytes
from onward.upkeep.verify import check_header, chunk_boxes

_GATHER = 4 * 1024 * 1024  # small chunks that lie side by side are read together


@dataclass(frozen=True)
class _Chunk:
    """One chunk of a wanted tensor: where it lies in its file, and in the tensor's own bytes."""

    tensor: Key
    start: int
    nbytes: int
    digest: str
    into: int


class CheckpointSource:
    """The tensors of an open checkpoint, ready to be verified and fetched.

    Args:
        opened: A checkpoint whose records were found right.
        threads: Files that are read at once.

    Raises:
        DamagedFile: An index is damaged, or its pieces do not make up the tensors of the layout.
    """

    def __init__(self, opened: OpenCheckpoint, *, threads: int = DEFAULT_THREADS) -> None:
        self._opened, self._threads = opened, threads
        self.layout = opened.tensors()
        self._files: list[tuple[str, int, IndexFile]] = []
        for record in opened.records:
            folder = rank_folder(record.rank)
            self._files += [(f"{folder}/{f.path}", record.rank, f) for f in opened.index(record.rank).files]
        self._require_whole()

    def tensor_bytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(nbytes(t.shape, itemsize(t.dtype)) for t in self.layout.values() if t.tie is None)

    def meta(self, key: Key) -> torch.Tensor:
        """A tensor of the right dtype and shape without bytes, to be looked at before anything is read."""
        tensor = self.layout[key]
        return torch.empty(tensor.shape, dtype=exact.torch_dtype(tensor.dtype), device="meta")

    def verify(self) -> None:
        """Checks every chunk, every header and every small file, and keeps nothing.

        Raises:
            DamagedFile: Names what is damaged.
        """
        self._run(None)
        self._check_small_files()

    def fetch(self, keys: Collection[Key]) -> dict[Key, torch.Tensor]:
        """Reads and checks tensors into memory of their own. Tied tensors come back as one tensor.

        Raises:
            DamagedFile: Names what is damaged.
        """
        owners = {self.layout[key].tie or key for key in keys}
        tensors = {key: exact.empty(self.layout[key].dtype, self.layout[key].shape) for key in owners}
        self._run(tensors)
        return {key: tensors[self.layout[key].tie or key] for key in keys}

    def fetch_all(self) -> dict[Key, torch.Tensor]:
        """All tensors, and all that ``verify`` checks."""
        tensors = self.fetch(list(self.layout))
        self._check_small_files()
        return tensors

    # --- inside ------------------------------------------------------------------------------------------------

    def _run(self, into: dict[Key, torch.Tensor] | None) -> None:
        views = None if into is None else {key: exact.as_bytes(tensor) for key, tensor in into.items()}
        each(lambda file: self._read_file(*file, views), self._files, threads=self._threads, name="onward-load")

    def _read_file(self, path: str, rank: int, file: IndexFile, views: dict[Key, memoryview] | None) -> None:
        place = self._opened.place
        try:
            check_header(place, path, file, self.layout)
            wanted = [c for c in self._chunks(file) if views is None or c.tensor in views]
            for run in _gathered(wanted):
                self._read_run(path, rank, run, views)
        except DamagedFile:
            raise
        except NotFound as error:
            raise DamagedFile(place.finding(path, "the file is missing", rank)) from error
        except Damaged as error:
            raise DamagedFile(place.finding(path, error.message, rank)) from error

    def _read_run(self, path: str, rank: int, run: list[_Chunk], views: dict[Key, memoryview] | None) -> None:
        place = self._opened.place
        first, size = run[0], sum(chunk.nbytes for chunk in run)
        direct = views is not None and len(run) == 1
        if direct and views is not None:
            buffer = views[first.tensor][first.into : first.into + size]
        else:
            buffer = memoryview(bytearray(size))
        place.store.read_into(f"{place.root}/{path}", first.start, buffer)
        for chunk in run:
            begin = chunk.start - first.start
            part = buffer[begin : begin + chunk.nbytes]
            if xxh3(part) != chunk.digest:
                raise DamagedFile(
                    place.finding(
                        path, f"the chunk at byte {chunk.start} does not match its digest", rank, chunk.tensor
                    )
                )
            if views is not None and not direct:
                views[chunk.tensor][chunk.into : chunk.into + chunk.nbytes] = part

    def _chunks(self, file: IndexFile) -> Iterator[_Chunk]:
        for key, box, start, count, digest in chunk_boxes(file, self.layout):
            yield _Chunk(tensor=key, start=start, nbytes=count, digest=digest, into=self._offset(key, box))

    def _offset(self, key: Key, box: Box) -> int:
        tensor = self.layout[key]
        offset = byte_offset(box, tensor.shape, itemsize(tensor.dtype))
        if offset is None:
            raise TopologyMismatch(
                f"{key} is stored in boxes that are not contiguous; this version loads it on the saved layout only"
            )
        return offset

    def _require_whole(self) -> None:
        """Every stored tensor is covered once, without gap or overlap; else a load would leave garbage in it."""
        spans: dict[Key, list[tuple[int, int]]] = {}
        for _, _, file in self._files:
            for piece in file.pieces:
                begin = self._offset(piece.tensor, Box(offset=piece.offset, shape=piece.shape))
                spans.setdefault(piece.tensor, []).append((begin, begin + piece.nbytes))
        for tensor in self.layout.values():
            if tensor.tie is None and not _covers(spans.get(tensor.key, []), _size(tensor)):
                where = f"{rank_folder(0)}/{INDEX}"
                raise DamagedFile(
                    self._opened.place.finding(where, "the pieces do not make up the tensor", None, tensor.key)
                )

    def _check_small_files(self) -> None:
        place = self._opened.place
        for path, digest in self._opened.sums.items():
            name = path.rpartition("/")[2]
            if not path.endswith(SHARD_SUFFIX) and name not in (INDEX, STATE):
                place.read(path, digest, LIMITS.get(name, LIMITS[STATE]))


def _size(tensor: TensorLayout) -> int:
    return nbytes(tensor.shape, itemsize(tensor.dtype))


def _covers(spans: list[tuple[int, int]], size: int) -> bool:
    ordered = sorted(span for span in spans if span[0] != span[1])
    if not ordered:
        return size == 0 and bool(spans)
    joined = all(one[1] == other[0] for one, other in pairwise(ordered))
    return joined and ordered[0][0] == 0 and ordered[-1][1] == size


def _gathered(chunks: list[_Chunk]) -> Iterator[list[_Chunk]]:
    run: list[_Chunk] = []
    size = 0
    for chunk in sorted(chunks, key=lambda c: c.start):
        adjoins = bool(run) and run[-1].start + run[-1].nbytes == chunk.start
        if run and not (adjoins and size + chunk.nbytes <= _GATHER):
            yield run
            run, size = [], 0
        run.append(chunk)
        size += chunk.nbytes
    if run:
        yield run
