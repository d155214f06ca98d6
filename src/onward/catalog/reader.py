"""Opening a checkpoint: from its ledger entry down to the indexes, each file checked by the one that names it.

``ledger entry → manifest.json and manifest.sha256 → layout, records, assets → index, state, shard files``. Nothing
of a file is used before its digest was found right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from onward.errors import Damaged, FormatError, OnwardError, StorageError
from onward.format.codec import LIMITS, decode, decode_index, decode_layout, decode_manifest, decode_record, decode_sums
from onward.format.digests import sha256
from onward.format.dtypes import itemsize
from onward.format.names import INDEX, INTENT, LAYOUT, MANIFEST, RECORD, STATE, SUMS, RunPlaces, rank_folder
from onward.records import (
    Box,
    CheckpointInfo,
    Finding,
    Index,
    IndexFile,
    JsonTree,
    Key,
    Layout,
    Manifest,
    Piece,
    RankRecord,
    StateFile,
    TensorLayout,
)
from onward.storage.base import NotFound, Store
from onward.topology.boxes import inside, nbytes

T = TypeVar("T")


class DamagedFile(Damaged):
    """A file of a checkpoint is missing or altered; carries the finding that names tier, file, tensor and rank."""

    code = "damaged"

    def __init__(self, finding: Finding) -> None:
        where = f"{finding.tier}: {finding.checkpoint}/{finding.file}"
        tensor = f", tensor {finding.tensor}" if finding.tensor else ""
        rank = f", rank {finding.rank}" if finding.rank is not None else ""
        super().__init__(f"{where}{tensor}{rank}: {finding.message}")
        self.finding = finding


@dataclass(frozen=True)
class Place:
    """Where a checkpoint lies: its folder ``root`` in a store, and the names that findings give it."""

    store: Store
    root: str
    tier: str
    name: str

    def finding(self, path: str, message: str, rank: int | None = None, tensor: str = "") -> Finding:
        """A finding about a file of this checkpoint."""
        return Finding(
            code="damaged-file",
            message=message,
            tier=self.tier,
            checkpoint=self.name,
            file=path.encode("utf-8", "backslashreplace").decode(),  # a name on disk need not be text
            tensor=tensor,
            rank=rank,
        )

    def read(self, path: str, digest: str | None, limit: int) -> bytes:
        """A whole small file whose SHA-256 is ``digest`` (None: nothing vouches for it yet).

        Raises:
            DamagedFile: It is missing, too large, or not what the digest says.
        """
        try:
            data = self.store.read(f"{self.root}/{path}", limit=limit)
        except NotFound as error:
            raise DamagedFile(self.finding(path, "the file is missing")) from error
        except Damaged as error:
            raise DamagedFile(self.finding(path, error.message)) from error
        if digest is not None and sha256(data) != digest:
            what = "is empty" if not data else f"does not match its SHA-256 ({len(data)} bytes)"
            raise DamagedFile(self.finding(path, f"the file {what}"))
        return data

    def decoded(self, decoder: Callable[[bytes, str], T], data: bytes, path: str, rank: int | None = None) -> T:
        """The record in ``data``; a format error becomes a finding about ``path``."""
        try:
            return decoder(data, path)
        except FormatError as error:
            raise DamagedFile(self.finding(path, error.message, rank)) from error


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose manifest, checksum list, layout and records were found right.

    ``sums`` maps every stored file but the list itself to its SHA-256.
    """

    place: Place
    manifest: Manifest
    manifest_sha256: str
    sums: dict[str, str]
    sums_sha256: str
    layout: Layout
    records: tuple[RankRecord, ...]

    def tensors(self) -> dict[Key, TensorLayout]:
        """The layout by key."""
        return {tensor.key: tensor for tensor in self.layout.tensors}

    def index(self, rank: int) -> Index:
        """What one rank wrote, checked against its record and the layout.

        Raises:
            DamagedFile: The index is not what its rank's record says, or does not fit the layout.
        """
        path = f"{rank_folder(rank)}/{INDEX}"
        data = self._sized(rank, INDEX)
        index = self.place.decoded(decode_index, data, path, rank)
        if index.rank != rank:
            raise DamagedFile(self.place.finding(path, f"it is of rank {index.rank}", rank))
        sizes = {file.path: file.size for file in self.records[rank].files}
        layout = self.tensors()
        for file in index.files:
            if sizes.get(file.path) != file.size:
                raise DamagedFile(self.place.finding(path, f"it disagrees with the record about {file.path}", rank))
            for piece in file.pieces:
                problem = _piece_problem(piece, file, layout.get(piece.tensor))
                if problem:
                    raise DamagedFile(self.place.finding(path, problem, rank, piece.tensor))
        return index

    def state(self, rank: int) -> dict[str, JsonTree]:
        """The typed non-tensor state of one rank: component name → encoded tree."""
        path = f"{rank_folder(rank)}/{STATE}"
        data = self._sized(rank, STATE)
        state = self.place.decoded(lambda d, p: decode(d, StateFile, p), data, path, rank)
        if state.rank != rank:
            raise DamagedFile(self.place.finding(path, f"it is of rank {state.rank}", rank))
        return state.components

    def _sized(self, rank: int, name: str) -> bytes:
        """A small file of a rank, of exactly its recorded size; a larger one is refused before it is read."""
        path = f"{rank_folder(rank)}/{name}"
        size = next((file.size for file in self.records[rank].files if file.path == name), 0)
        data = self.place.read(path, self.sums.get(path, ""), min(LIMITS[name], size))
        if len(data) != size:
            raise DamagedFile(self.place.finding(path, f"it has {len(data)} bytes instead of {size}", rank))
        return data


def _piece_problem(piece: Piece, file: IndexFile, tensor: TensorLayout | None) -> str:
    if (
        tensor is None
        or tensor.tie is not None
        or not inside(Box(offset=piece.offset, shape=piece.shape), tensor.shape)
    ):
        return "a piece does not fit the layout"
    if piece.nbytes != nbytes(piece.shape, itemsize(tensor.dtype)):
        return "a piece has an impossible size"
    if piece.start < file.header_bytes or piece.start + piece.nbytes > file.size:
        return f"a piece lies outside {file.path}"
    return ""


def open_checkpoint(store: Store, places: RunPlaces, info: CheckpointInfo) -> OpenCheckpoint:
    """Opens a committed checkpoint.

    Raises:
        DamagedFile: A file is missing, altered, or not of the format; names it.
        StorageError: The store itself refuses.
    """
    place = Place(store=store, root=places.checkpoint(info.folder), tier=info.tier, name=info.folder)
    opened = open_folder(place, manifest_sha256=info.manifest_sha256, sums_sha256=info.sums_sha256)
    step = opened.manifest.global_step
    if step != info.step:
        raise DamagedFile(place.finding(MANIFEST, f"it is of step {step}, the ledger's entry of step {info.step}"))
    return opened


def open_folder(place: Place, *, manifest_sha256: str | None = None, sums_sha256: str | None = None) -> OpenCheckpoint:
    """Opens a checkpoint folder; without digests (a lone folder) it vouches only for itself.

    Raises:
        DamagedFile: A file is missing, altered, or not of the format; names it.
    """
    manifest_bytes = place.read(MANIFEST, manifest_sha256, LIMITS[MANIFEST])
    manifest = place.decoded(decode_manifest, manifest_bytes, MANIFEST)
    sums_bytes = place.read(SUMS, sums_sha256, LIMITS[SUMS])
    sums = place.decoded(decode_sums, sums_bytes, SUMS)
    if sums.get(MANIFEST) != sha256(manifest_bytes):
        raise DamagedFile(place.finding(SUMS, f"it does not name this {MANIFEST}"))
    layout_bytes = place.read(LAYOUT, manifest.layout_sha256, LIMITS[LAYOUT])
    layout = place.decoded(decode_layout, layout_bytes, LAYOUT)
    records: list[RankRecord] = []
    for entry in manifest.ranks:
        data = place.read(entry.path, entry.sha256, LIMITS[RECORD])
        record = place.decoded(decode_record, data, entry.path, entry.rank)
        problem = disagreement(record, manifest, entry.rank)
        if problem:
            raise DamagedFile(place.finding(entry.path, problem, entry.rank))
        records.append(record)
    named = {asset.path: asset.sha256 for asset in manifest.assets}
    for rank, record in enumerate(records):
        named.update({f"{rank_folder(rank)}/{file.path}": file.sha256 for file in record.files})
    own = {MANIFEST, LAYOUT, INTENT, *(entry.path for entry in manifest.ranks), *named}
    if stray := sorted(own ^ set(sums)):
        raise DamagedFile(place.finding(SUMS, f"it and the records disagree about whether there is {stray[0]}"))
    for path, digest in named.items():
        if sums.get(path) != digest:
            raise DamagedFile(place.finding(SUMS, f"it disagrees with the record about {path}"))
    return OpenCheckpoint(
        place=place,
        manifest=manifest,
        manifest_sha256=sha256(manifest_bytes),
        sums=sums,
        sums_sha256=sha256(sums_bytes),
        layout=layout,
        records=tuple(records),
    )


def disagreement(record: RankRecord, manifest: Manifest, rank: int) -> str:
    """What a rank's record and the manifest disagree about; empty when they agree."""
    pairs = (
        ("run", record.run, manifest.run),
        ("rank", record.rank, rank),
        ("world size", record.world_size, manifest.world_size),
        ("step", record.step, manifest.global_step),
        ("attempt", record.attempt, manifest.attempt),
        ("layout", record.layout_sha256, manifest.layout_sha256),
    )
    wrong = [f"its {what} is {has}, the manifest's {due}" for what, has, due in pairs if has != due]
    named = [[(tag.name, tag.kind, tag.scope, tag.step) for tag in each.components] for each in (record, manifest)]
    if named[0] != named[1]:
        wrong.append("its components are not the manifest's")
    return "; ".join(wrong)


def as_findings(error: OnwardError, tier: str, checkpoint: str) -> tuple[Finding, ...]:
    """An error of the way back as findings, for a report."""
    if isinstance(error, DamagedFile):
        return (error.finding,)
    code = "storage" if isinstance(error, StorageError) else error.code
    return (Finding(code=code, message=error.message, tier=tier, checkpoint=checkpoint),)
