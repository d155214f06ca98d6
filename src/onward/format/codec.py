"""Records ⇄ canonical JSON: sorted keys, no blanks, UTF-8; one record has one spelling.

Decoding is strict. Anything of the wrong type, too large, too deep, with a field too many or too few, or not in
canonical spelling (which is how a doubled key shows) is refused by name before it is used.
"""

from __future__ import annotations

from math import prod
from typing import TypeVar, cast

import msgspec
import zstandard

from onward.errors import FormatError, UnknownFormat
from onward.format.digests import sha256
from onward.format.dtypes import require_readable, stored_dtype
from onward.format.names import (
    INDEX,
    INTENT,
    LAYOUT,
    MANIFEST,
    RECORD,
    STATE,
    SUMS,
    checkpoint_folder,
    distinct_paths,
    parse_checkpoint_folder,
    relative_path,
)
from onward.records import (
    CHUNK_BYTES,
    FORMAT,
    Box,
    CheckpointEntry,
    DeleteEntry,
    Index,
    Layout,
    LedgerEntry,
    Manifest,
    OpenEntry,
    RankRecord,
    Receipt,
    RunRecord,
    StoredFile,
    StoreRecord,
    VoidEntry,
)

T = TypeVar("T")
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError)
_Sealed = OpenEntry | CheckpointEntry | DeleteEntry | VoidEntry | Receipt | RunRecord | StoreRecord
Sealed = TypeVar("Sealed", bound=_Sealed)

MIB = 1024 * 1024
LIMITS: dict[str, int] = {
    MANIFEST: 64 * MIB,
    SUMS: 256 * MIB,
    LAYOUT: 256 * MIB,
    RECORD: 64 * MIB,
    INDEX: 256 * MIB,
    STATE: 1024 * MIB,
    INTENT: MIB,
}
"""Largest acceptable size of each kind of file, in bytes; checked before anything is read."""
ENTRY_LIMIT = RECEIPT_LIMIT = SMALL_LIMIT = MIB
MAX_DIMS, MAX_ELEMENTS = 64, 1 << 56
INDEX_DECOMPRESSED_LIMIT = 1024 * MIB
_ZSTD_LEVEL = 3
_ZSTD_RATIO = 64


def encode(record: object) -> bytes:
    """Canonical JSON of a record, with a newline at the end."""
    return msgspec.json.encode(record, order="sorted") + b"\n"


def decode(data: bytes, kind: type[T], what: str) -> T:
    """The record in ``data``.

    Args:
        data: The bytes of the file.
        kind: The record's type.
        what: How to name the file in an error.

    Raises:
        UnknownFormat: The file is of a newer format.
        FormatError: It is not a record of this kind, in its canonical spelling.
    """
    try:
        record = msgspec.json.decode(data, type=kind, strict=True)
        canonical = encode(record)
    except _UNREADABLE as error:
        _refuse_newer(data, what)
        raise FormatError(f"{what}: {error}") from error
    if canonical != data:
        raise FormatError(f"{what} is not in canonical spelling (a doubled key, or edited by hand)")
    if getattr(record, "format", FORMAT) != FORMAT:
        _refuse_newer(data, what)
        raise FormatError(f"{what} is of format {getattr(record, 'format', None)}, which never was")
    return record


def _refuse_newer(data: bytes, what: str) -> None:
    """Tells a file of a later format from a damaged one: one flipped bit in the number must not say "upgrade"."""
    try:
        plain = msgspec.json.decode(data)
    except _UNREADABLE:
        return
    if not isinstance(plain, dict) or type(plain.get("format")) is not int or plain["format"] <= FORMAT:
        return
    if "sha256" in plain and plain["sha256"] != sha256(encode({**plain, "sha256": ""})):
        raise FormatError(f"{what} does not match its own digest")
    raise UnknownFormat(f"{what} is of format {plain['format']}; this program reads format {FORMAT}")


# --- records that carry their own digest ------------------------------------------------------------------------


def _sealed(record: Sealed) -> Sealed:
    blank = msgspec.structs.replace(record, sha256="")
    return msgspec.structs.replace(blank, sha256=sha256(encode(blank)))


def _check_seal(record: Sealed, what: str) -> Sealed:
    try:
        due = _sealed(record).sha256
    except RecursionError as error:
        raise FormatError(f"{what} is nested too deep") from error
    if due != record.sha256:
        raise FormatError(f"{what} does not match its own digest")
    return record


def decode_entry(data: bytes, what: str) -> LedgerEntry:
    """A ledger entry whose own digest is right."""
    entry = _check_seal(decode(data, cast(type[LedgerEntry], LedgerEntry), what), what)
    _require(entry.sequence >= 1 and getattr(entry, "epoch", 0) >= 0, what, "a number is impossible")
    if isinstance(entry, CheckpointEntry):
        # Folders are removed by these names: one that leads elsewhere must never get as far as that.
        due = entry.step >= 0 and entry.folder == checkpoint_folder(entry.step, entry.sequence)
        _require(due, what, f"it cannot be in the folder {entry.folder[:80]!r}")
    elif isinstance(entry, DeleteEntry):
        named = parse_checkpoint_folder(entry.folder)
        due = named is not None and named[1] == entry.victim < entry.sequence
        _require(due, what, f"{entry.folder[:80]!r} is not the folder of checkpoint {entry.victim}")
    return entry


def encode_sealed(record: Sealed) -> bytes:
    """A record with its own digest filled in."""
    return encode(_sealed(record))


def decode_sealed(data: bytes, kind: type[Sealed], what: str) -> Sealed:
    """A record whose own digest is right."""
    return _check_seal(decode(data, kind, what), what)


# --- records with conditions of their own -----------------------------------------------------------------------


def decode_manifest(data: bytes, what: str) -> Manifest:
    """A manifest whose counts and paths make sense."""
    manifest = decode(data, Manifest, what)
    ranks = [entry.rank for entry in manifest.ranks]
    if len(ranks) != manifest.world_size or not ranks or ranks != list(range(len(ranks))):
        raise FormatError(f"{what} names the ranks {ranks[:8]} of {manifest.world_size}")
    stray = any(tag.step != manifest.global_step for tag in manifest.components) or not manifest.components
    _require(not stray, what, "it has no components, or one of another step")
    distinct_paths([entry.path for entry in manifest.ranks] + [asset.path for asset in manifest.assets])
    numbers = (manifest.global_step, manifest.sequence, *(n for r in manifest.ranks for n in (r.files, r.bytes)))
    _require(min(numbers) >= 0 and all(asset.size >= 0 for asset in manifest.assets), what, "a number is negative")
    _require(manifest.total_bytes == sum(r.bytes for r in manifest.ranks), what, "its byte counts disagree")
    _require(manifest.expected_ranks == manifest.actual_ranks == manifest.world_size, what, "its rank counts disagree")
    _require(manifest.expected_files == manifest.actual_files, what, "its file counts disagree")
    return manifest


def decode_record(data: bytes, what: str) -> RankRecord:
    """A rank's record whose paths stay inside the rank's folder."""
    record = decode(data, RankRecord, what)
    distinct_paths([file.path for file in record.files])
    _require(0 <= record.rank < record.world_size, what, f"rank {record.rank} of {record.world_size} cannot be")
    _require(all(file.size >= 0 for file in record.files), what, "a size is negative")
    return record


def decode_layout(data: bytes, what: str) -> Layout:
    """A layout whose dtypes are known, whose shapes are possible and whose ties lead to stored tensors."""
    layout = decode(data, Layout, what)
    keys = {tensor.key: tensor for tensor in layout.tensors}
    _require(len(keys) == len(layout.tensors), what, "a tensor stands twice")
    for tensor in layout.tensors:
        _require(tensor.mesh is None or 0 <= tensor.mesh < len(layout.meshes), what, f"{tensor.key} has no such mesh")
        _require(all(_inside(box, tensor.shape) for box in tensor.boxes), what, f"{tensor.key} has a box outside of it")
        require_readable(tensor.dtype, what)
        sizes = tensor.shape
        _require(len(sizes) <= MAX_DIMS and all(n >= 0 for n in sizes), what, f"{tensor.key} has an impossible shape")
        _require(prod(max(n, 1) for n in sizes) < MAX_ELEMENTS, what, f"{tensor.key} is impossibly large")
        _require(tensor.stored == stored_dtype(tensor.dtype), what, f"{tensor.key} is stored under a wrong dtype")
        if tensor.tie is not None:
            other = keys.get(tensor.tie)
            fits = other is not None and other.tie is None and (other.dtype, other.shape) == (tensor.dtype, sizes)
            _require(fits, what, f"{tensor.key} is tied to something else than an equal stored tensor")
    return layout


def encode_index(index: Index) -> bytes:
    """An index as Zstandard-compressed canonical JSON."""
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compress(encode(index))


def decode_index(data: bytes, what: str) -> Index:
    """An index; a frame that would grow beyond the limit is refused before it is unpacked."""
    try:
        size = zstandard.frame_content_size(data)
        # Digests are noise, which does not compress: a real index never unpacks to much more than it is.
        if not 0 <= size <= min(INDEX_DECOMPRESSED_LIMIT, _ZSTD_RATIO * len(data) + MIB):
            raise FormatError(f"{what} would unpack to {size} bytes")
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
        _require(len(plain) == size, what, f"it unpacks to {len(plain)} bytes instead of {size}")
    except zstandard.ZstdError as error:
        raise FormatError(f"{what}: {error}") from error
    index = decode(plain, Index, what)
    _require(index.chunk_bytes == CHUNK_BYTES, what, f"its chunks have {index.chunk_bytes} bytes")
    distinct_paths([file.path for file in index.files])
    return index


# --- the checksum list -------------------------------------------------------------------------------------------


def encode_sums(digests: dict[str, str]) -> bytes:
    """``manifest.sha256``: one line a file, as ``sha256sum`` writes and checks it."""
    return "".join(f"{digests[path]}  {path}\n" for path in sorted(digests)).encode()


def decode_sums(data: bytes, what: str) -> dict[str, str]:
    """Path → SHA-256 of a checksum list; refuses anything that ``encode_sums`` would not write."""
    digests: dict[str, str] = {}
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{what}: {error}") from error
    for number, line in enumerate(lines[:-1], 1):
        digest, gap, path = line[:64], line[64:66], line[66:]
        if gap != "  " or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise FormatError(f"{what}, line {number}: not a line of sha256sum")
        digests[relative_path(path)] = digest
    distinct_paths(list(digests))
    if encode_sums(digests) != data:
        raise FormatError(f"{what} is not in canonical spelling (a doubled or unsorted line)")
    return digests


def stored(path: str, data: bytes) -> StoredFile:
    """The entry of a small file that is at hand as bytes."""
    return StoredFile(path=relative_path(path), size=len(data), sha256=sha256(data))


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(box.offset) == len(box.shape) == len(shape):
        return False
    return all(o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(box.offset, box.shape, shape, strict=True))


def _require(condition: bool, what: str, reason: str) -> None:
    if not condition:
        raise FormatError(f"{what}: {reason}")
