"""The frozen records that travel between the stages of the journey.

A stage takes the record of the stage before it and returns the next. Records are plain data: they know nothing of
files, torch or the network, and each is decoded strictly (unknown or missing fields are refused).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FORMAT = 1
CHUNK_BYTES = 16 * 1024 * 1024
"""Largest chunk, the unit that is read and checked; 16 MiB."""

JsonTree = Any
"""Typed state encoded as JSON (see ``format/typedstate.py``)."""

Key = str
"""A tensor's key: canonical JSON of its typed path, for example ``["model","wte.weight"]``."""


class Frozen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=False):
    """Base of all records: immutable, by keyword, strict when decoded."""


# --- geometry and layout ---------------------------------------------------------------------------------------


class Box(Frozen, frozen=True, kw_only=True):
    """A rectangular part of a tensor: ``offset[d] <= index[d] < offset[d] + shape[d]``."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class TensorLayout(Frozen, frozen=True, kw_only=True):
    """One tensor of the global state: what it is and who holds which box of it.

    ``stored`` is the safetensors dtype of its bytes (``U8`` where safetensors lacks the logical ``dtype``).
    ``tie`` names the tensor whose bytes this one shares; a tied tensor is stored once, under the other key.
    ``boxes`` lists declared boxes; empty means the whole tensor, held by every rank and written by one owner.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]
    stored: str
    tie: Key | None = None
    mesh: int | None = None
    placements: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()


class Mesh(Frozen, frozen=True, kw_only=True):
    """A device mesh: its shape, dimension names, and the ranks in row-major order."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]


class Layout(Frozen, frozen=True, kw_only=True):
    """Who holds which box of which tensor; grows with tensors, not with ranks; equal from save to save."""

    format: int
    meshes: tuple[Mesh, ...]
    tensors: tuple[TensorLayout, ...]


# --- what one rank writes --------------------------------------------------------------------------------------


class Piece(Frozen, frozen=True, kw_only=True):
    """A box of a tensor stored contiguously (C order) in one shard file.

    ``start`` is the byte offset from the beginning of the file; ``digests`` holds the XXH3-128 of each chunk, in
    order, as hex; the chunk boundaries follow from the box, the item size and ``CHUNK_BYTES``.
    """

    tensor: Key
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    nbytes: int
    digests: tuple[str, ...]


class IndexFile(Frozen, frozen=True, kw_only=True):
    """The pieces in one shard file, and the digest of its safetensors header (bytes ``0 .. header_bytes``)."""

    path: str
    size: int
    header_bytes: int
    header_xxh3: str
    pieces: tuple[Piece, ...]


class Index(Frozen, frozen=True, kw_only=True):
    """Chunk → file, byte range, digest: all that one rank wrote."""

    format: int
    rank: int
    chunk_bytes: int
    files: tuple[IndexFile, ...]


class StoredFile(Frozen, frozen=True, kw_only=True):
    """A file of a checkpoint: path relative to the checkpoint folder, size in bytes, SHA-256 as hex."""

    path: str
    size: int
    sha256: str


class ComponentTag(Frozen, frozen=True, kw_only=True):
    """A component as captured: the step boundary it was captured at, and its own counters."""

    name: str
    kind: str
    scope: Literal["global", "rank"]
    step: int
    counters: dict[str, int | float] = {}


class RankRecord(Frozen, frozen=True, kw_only=True):
    """What one rank wrote; the coordinator needs nothing else to commit."""

    format: int
    run: str
    attempt: str
    step: int
    rank: int
    world_size: int
    layout_sha256: str
    files: tuple[StoredFile, ...]
    components: tuple[ComponentTag, ...]
    tensor_bytes: int
    global_state_sha256: str
    replicas: dict[Key, str] = {}


class StateFile(Frozen, frozen=True, kw_only=True):
    """``state.json``: the typed non-tensor state of one rank, component name → encoded tree."""

    format: int
    rank: int
    components: dict[str, JsonTree]


# --- the checkpoint --------------------------------------------------------------------------------------------


class RankEntry(Frozen, frozen=True, kw_only=True):
    """A rank's record as the manifest names it."""

    rank: int
    path: str
    sha256: str
    files: int
    bytes: int


class Description(Frozen, frozen=True, kw_only=True):
    """What the user says the run is; compared at resume, field by field."""

    model_config: JsonTree = None
    tokenizer: JsonTree = None
    dataset: JsonTree = None
    hyperparameters: JsonTree = None
    code: JsonTree = None
    environment: JsonTree = None
    training_started: str | None = None


class Manifest(Frozen, frozen=True, kw_only=True):
    """The immutable description of a checkpoint; the same bytes in every tier."""

    format: int
    run: str
    checkpoint: str
    sequence: int
    parent: int | None
    attempt: str
    incarnation: str
    global_step: int
    epoch: int | None
    data_position: JsonTree
    kind: Literal["full", "delta", "adapter"]
    base: JsonTree
    birth_class: str
    reason: str
    training_started: str
    capture_started: str
    save_started: str
    description: Description
    model_config_sha256: str | None
    world_size: int
    layout_sha256: str
    components: tuple[ComponentTag, ...]
    expected_ranks: int
    actual_ranks: int
    expected_files: int
    actual_files: int
    total_bytes: int
    ranks: tuple[RankEntry, ...]
    assets: tuple[StoredFile, ...]


class Intent(Frozen, frozen=True, kw_only=True):
    """The first file of an attempt: who is writing what."""

    format: int
    run: str
    attempt: str
    incarnation: str
    epoch: int
    sequence: int
    step: int
    world_size: int
    host: str
    pid: int
    started: str


class AttemptOutcome(Frozen, frozen=True, kw_only=True):
    """How a failed or abandoned attempt ended, and why."""

    format: int
    run: str
    attempt: str
    sequence: int
    step: int
    outcome: Literal["failed", "rolled-back", "kept", "superseded"]
    reason: str
    recorded: str
    recorded_by: str


# --- the ledger ------------------------------------------------------------------------------------------------


class OpenEntry(Frozen, frozen=True, kw_only=True, tag="open"):
    """An incarnation begins: the fence."""

    format: int
    run: str
    sequence: int
    previous: str
    incarnation: str
    time: str
    host: str
    pid: int
    sha256: str = ""


class CheckpointEntry(Frozen, frozen=True, kw_only=True, tag="checkpoint"):
    """A commit: from here on the checkpoint exists."""

    format: int
    run: str
    sequence: int
    previous: str
    incarnation: str
    epoch: int
    attempt: str
    folder: str
    step: int
    manifest_sha256: str
    sums_sha256: str
    time: str
    sha256: str = ""


class DeleteEntry(Frozen, frozen=True, kw_only=True, tag="delete"):
    """A decision to delete; the victim stops being live before a byte of it goes."""

    format: int
    run: str
    sequence: int
    previous: str
    incarnation: str
    epoch: int
    victim: int
    folder: str
    reason: str
    actor: str
    time: str
    sha256: str = ""


class VoidEntry(Frozen, frozen=True, kw_only=True, tag="void"):
    """A number given up, so that a late duplicate of the attempt's own entry can never take effect."""

    format: int
    run: str
    sequence: int
    previous: str
    incarnation: str
    epoch: int
    attempt: str
    reason: str
    time: str
    sha256: str = ""


LedgerEntry = OpenEntry | CheckpointEntry | DeleteEntry | VoidEntry


# --- receipts, lease, store -------------------------------------------------------------------------------------

ReceiptKind = Literal[
    "verified",
    "replicated",
    "loaded",
    "resumed",
    "drilled",
    "labelled",
    "superseded",
    "quarantined",
    "adopted",
    "deleted",
]


class Receipt(Frozen, frozen=True, kw_only=True):
    """An append-only record about a committed checkpoint. ``sha256`` is the digest of its own other fields."""

    format: int
    run: str
    sequence: int
    folder: str
    kind: ReceiptKind
    time: str
    actor: str
    tier: str
    details: JsonTree
    sha256: str = ""


class LeaseRecord(Frozen, frozen=True, kw_only=True):
    """For people, not for safety: who is running the run now. ``counter`` is advanced by its owner.

    ``writer_pid`` and ``writer_started`` name the writer process, 0 and empty without one: it may outlive the owner.
    """

    format: int
    run: str
    token: str
    host: str
    boot: str
    pid: int
    pid_started: str
    counter: int
    lease_seconds: float
    since: str
    writer_pid: int = 0
    writer_started: str = ""


class RunRecord(Frozen, frozen=True, kw_only=True):
    """``run.json``: the run's identity."""

    format: int
    run: str
    created: str
    created_by: str
    sha256: str = ""


class StoreRecord(Frozen, frozen=True, kw_only=True):
    """``onward.json``: this is a store, what tier it is and what the probe found."""

    format: int
    tier: str
    store: str
    created: str
    mode: Literal["private", "group", "umask"]
    probe: JsonTree
    sha256: str = ""


# --- what the way back reports ----------------------------------------------------------------------------------


class Finding(Frozen, frozen=True, kw_only=True):
    """One thing that is wrong, with where it is."""

    code: str
    message: str
    tier: str = ""
    checkpoint: str = ""
    file: str = ""
    tensor: str = ""
    rank: int | None = None


class CheckpointInfo(Frozen, frozen=True, kw_only=True):
    """A checkpoint as the catalogue knows it: the entry and what receipts say of it."""

    run: str
    sequence: int
    step: int
    folder: str
    tier: str
    status: Literal["committed", "quarantined", "deleting", "deleted"]
    verified: Literal["full", "quick", "no"]
    committed: str
    incarnation: str
    attempt: str
    manifest_sha256: str
    sums_sha256: str
    receipts: tuple[Receipt, ...] = ()
    reason: str = ""


class Rejection(Frozen, frozen=True, kw_only=True):
    """A checkpoint that was looked at on the way back and not used, with every reason."""

    sequence: int
    step: int
    folder: str
    reasons: tuple[Finding, ...]
    quarantined: bool


class Coverage(Frozen, frozen=True, kw_only=True):
    """How much was really looked at: files and bytes checked, out of all."""

    files: int
    files_total: int
    bytes: int
    bytes_total: int
    method: str


class VerifyReport(Frozen, frozen=True, kw_only=True):
    """The verdict of one verification of one checkpoint."""

    run: str
    folder: str
    tier: str
    ok: bool
    method: Literal["quick", "full"]
    coverage: Coverage
    findings: tuple[Finding, ...]
    seconds: float
