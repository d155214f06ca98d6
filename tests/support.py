"""Stores, states and checkpoints for tests, made through the product's own stages but without a training loop.

The state of a step is a pure function of the step and a salt, so that a test knows every byte that a load must give.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from onward.catalog.incarnation import Incarnation, begin
from onward.catalog.reader import Place
from onward.format.codec import encode, encode_sealed
from onward.format.dtypes import itemsize, stored_dtype
from onward.format.names import RUNS, STORE_FILE, RunPlaces
from onward.format.typedstate import key_of
from onward.records import (
    FORMAT,
    CheckpointEntry,
    ComponentTag,
    Description,
    JsonTree,
    Layout,
    LeaseRecord,
    StoreRecord,
    TensorLayout,
    VerifyReport,
)
from onward.save.captured import Captured, SaveContext, staged
from onward.save.pipeline import SaveSettings, save
from onward.save.plan import plan
from onward.storage.base import Barrier, Store
from onward.storage.memory import MemoryStore
from onward.storage.posix import PosixStore
from onward.topology.boxes import nbytes
from onward.upkeep.verify import verify

RUN, TIER = "run", "home"
PLACES = RunPlaces(RUN)
COMPONENT = "part"
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "weight": ("float32", (12, 8)),
    "half": ("bfloat16", (7, 3)),
    "codes": ("uint8", (33,)),
    "scalar": ("float64", ()),
    "empty": ("float32", (0, 4)),
    "phase": ("complex64", (5,)),
}
TIES = {"head": "weight"}


def key(name: str) -> str:
    """The key of a tensor of the test component."""
    return key_of((COMPONENT, name))


def content(step: int, salt: int = 0) -> dict[str, bytes]:
    """Name → bytes of every tensor at a step, ties included."""
    source = random.Random(f"{step}/{salt}")
    made = {name: source.randbytes(nbytes(shape, itemsize(dtype))) for name, (dtype, shape) in SHAPES.items()}
    return made | {name: made[other] for name, other in TIES.items()}


def captured(step: int, salt: int = 0, *, rank: int = 0, world_size: int = 1, note: object = None) -> Captured:
    """What the capture of a step hands over; of several ranks each holds every ``world_size``-th tensor."""
    values = content(step, salt)
    tensors = tuple(
        TensorLayout(
            key=key(name),
            dtype=SHAPES[TIES.get(name, name)][0],
            shape=SHAPES[TIES.get(name, name)][1],
            stored=stored_dtype(SHAPES[TIES.get(name, name)][0]),
            tie=key(TIES[name]) if name in TIES else None,
        )
        for name in sorted(values)
    )
    by_key = {layout.key: layout for layout in tensors}
    planned = plan([by_key[key(name)] for number, name in enumerate(SHAPES) if number % world_size == rank])
    memory = bytearray(planned.arena_bytes)
    contents = {key(name): data for name, data in values.items()}
    for piece in (piece for file in planned.files for piece in file.pieces):
        data = contents[piece.key][piece.offset : piece.offset + piece.nbytes]
        memory[piece.start : piece.start + piece.nbytes] = data
    tree: JsonTree = {name: {"$tensor": key(name)} for name in sorted(values)} | {"step": step, "note": note}
    return Captured(
        step=step,
        layout=Layout(format=FORMAT, meshes=(), tensors=tensors),
        plan=planned,
        state={COMPONENT: tree, "own": {"rank": rank}},
        tags=(
            ComponentTag(name=COMPONENT, kind="object", scope="global", step=step),
            ComponentTag(name="own", kind="object", scope="rank", step=step),
        ),
        region=staged(memoryview(memory)),
        started="2026-01-01T00:00:00.000000Z",
        seconds=0.0,
    )


def context(*, assets: Mapping[str, bytes] | None = None, **changes: Any) -> SaveContext:
    """What is said about a test checkpoint."""
    return SaveContext(
        description=changes.pop("description", Description(model_config={"n_heads": 2})),
        training_started="2026-01-01T00:00:00.000000Z",
        assets=assets or {},
        **changes,
    )


def commit(incarnation: Incarnation, step: int, salt: int = 0, *, assets: Mapping[str, bytes] | None = None,
           settings: SaveSettings | None = None) -> CheckpointEntry:  # fmt: skip
    """Saves the state of a step through the whole pipeline."""
    settings = settings or SaveSettings(threads=1)
    return save(incarnation, captured(step, salt), context(assets=assets), settings).entry


# --- stores -----------------------------------------------------------------------------------------------------


def store_record(**changes: Any) -> StoreRecord:
    """An ``onward.json`` without the probe."""
    record = StoreRecord(format=FORMAT, tier=TIER, store="0" * 32, created="t", mode="private", probe=None)
    return msgspec.structs.replace(record, **changes)


def furnish(store: Store) -> Store:
    """Turns an empty place into a store, without the probe (which has tests of its own)."""
    store.make_folder(RUNS)
    store.create(STORE_FILE, encode_sealed(store_record()), content=Barrier.META, name=None)
    return store


def memory_store() -> MemoryStore:
    """A store in memory."""
    store = MemoryStore("test")
    furnish(store)
    return store


def posix_store(root: Path) -> PosixStore:
    """A store in a folder."""
    root.mkdir()
    store = PosixStore(root)
    furnish(store)
    return store


@dataclass(frozen=True)
class Image:
    """The content of a ``MemoryStore`` at one moment."""

    files: dict[str, bytes]
    folders: dict[str, float]

    def restore(self) -> MemoryStore:
        """A store of its own with this content."""
        store = MemoryStore("test")
        store.files, store.folders = dict(self.files), dict(self.folders)
        return store


def image(store: MemoryStore) -> Image:
    """Remembers what a store holds."""
    return Image(dict(store.files), dict(store.folders))


# --- incarnations -----------------------------------------------------------------------------------------------


def start(store: Store, run: str = RUN, *, lease_seconds: float = 30.0) -> Incarnation:
    """Takes a run over."""
    return begin(store, run, lease_seconds=lease_seconds)


def die(incarnation: Incarnation) -> None:
    """Leaves an incarnation as a killed process would: nothing is tidied up, and its lease names a dead process."""
    incarnation.lease._stop.set()
    incarnation.lease._thread.join()
    incarnation.store.replace(incarnation.places.lease, encode(dead_lease()))


def dead_lease(**changes: Any) -> LeaseRecord:
    """The lease of a process of this machine that is no longer there."""
    from onward.catalog.lease import boot_id
    from onward.catalog.stamp import host

    record = LeaseRecord(
        format=FORMAT,
        run=RUN,
        token="f" * 32,
        host=host(),
        boot=boot_id(),
        pid=2**22 + 1,  # above the largest pid that Linux gives
        pid_started="1",
        counter=3,
        lease_seconds=5.0,
        since="t",
    )
    return msgspec.structs.replace(record, **changes)


def place_of(store: Store, folder: str) -> Place:
    """A checkpoint's place, for verification."""
    return Place(store=store, root=PLACES.checkpoint(folder), tier=TIER, name=folder)


def verified(store: Store, folder: str, **options: Any) -> VerifyReport:
    """The verdict on one checkpoint, as a lone folder."""
    return verify(place_of(store, folder), None, run=RUN, threads=1, **options)
