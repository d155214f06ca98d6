"""Load: bytes from a checkpoint into tensors of their own, every chunk checked on the way.

Nothing here touches the live state. A chunk whose digest is wrong ends the load, naming tier, file, tensor and rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from onward.catalog.reader import DamagedFile, OpenCheckpoint
from onward.errors import Damaged
from onward.format.codec import LIMITS
from onward.format.digests import xxh3
from onward.format.dtypes import itemsize
from onward.format.names import INDEX, SHARD_SUFFIX, STATE
from onward.records import Key
from onward.restore.settings import DEFAULT_THREADS
from onward.state import tensors as exact
from onward.state.staging import prefer_huge_pages
from onward.storage.base import NotFound
from onward.storage.parallel import each
from onward.topology.boxes import nbytes
from onward.upkeep.shards import Chunk, ShardFile, check_header, chunks, offset_in_tensor, require_whole, shard_files

_GATHER = 4 * 1024 * 1024  # small chunks that lie side by side are read together


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
        self._files = [file for record in opened.records for file in shard_files(opened, record.rank)]
        require_whole(opened, self._files)
        self._asset_sizes = {asset.path: asset.size for asset in opened.manifest.assets}

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
        for tensor in tensors.values():
            prefer_huge_pages(exact.as_bytes(tensor))
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
        each(lambda file: self._read_file(file, views), self._files, threads=self._threads)

    def _read_file(self, file: ShardFile, views: dict[Key, memoryview] | None) -> None:
        place, path, rank = self._opened.place, file.path, file.rank
        try:
            check_header(place, path, file.index, self.layout)
            wanted = [c for c in chunks(file.index, self.layout) if views is None or c.tensor in views]
            for run in _gathered(wanted):
                self._read_run(path, rank, run, views)
        except DamagedFile:
            raise
        except NotFound as error:
            raise DamagedFile(place.finding(path, "the file is missing", rank)) from error
        except Damaged as error:
            raise DamagedFile(place.finding(path, error.message, rank)) from error

    def _read_run(self, path: str, rank: int, run: list[Chunk], views: dict[Key, memoryview] | None) -> None:
        place = self._opened.place
        first, size = run[0], sum(chunk.nbytes for chunk in run)
        direct = views is not None and len(run) == 1
        if direct and views is not None:
            into = self._into(first)
            buffer = views[first.tensor][into : into + size]
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
                into = self._into(chunk)
                views[chunk.tensor][into : into + chunk.nbytes] = part

    def _into(self, chunk: Chunk) -> int:
        return offset_in_tensor(self.layout[chunk.tensor], chunk.box)

    def _check_small_files(self) -> None:
        place = self._opened.place
        for path, digest in self._opened.sums.items():
            name = path.rpartition("/")[2]
            if not path.endswith(SHARD_SUFFIX) and name not in (INDEX, STATE):
                data = place.read(path, digest, LIMITS.get(name, LIMITS[STATE]))
                if len(data) != self._asset_sizes.get(path, len(data)):
                    raise DamagedFile(place.finding(path, f"it has {len(data)} bytes, not what the manifest says"))


def _gathered(wanted: list[Chunk]) -> Iterator[list[Chunk]]:
    run: list[Chunk] = []
    size = 0
    for chunk in sorted(wanted, key=lambda c: c.start):
        adjoins = bool(run) and run[-1].start + run[-1].nbytes == chunk.start
        if run and not (adjoins and size + chunk.nbytes <= _GATHER):
            yield run
            run, size = [], 0
        run.append(chunk)
        size += chunk.nbytes
    if run:
        yield run
