"""Every decoder of a stored file, an example of each file, and what a refusal must look like."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from onward.errors import FormatError, OnwardError
from onward.format import codec
from onward.records import Intent, LeaseRecord, Receipt, RunRecord, StateFile, StoreRecord
from support import PLACES, Image, commit, image, memory_store, start

from .forging import Plain, pack, plain, sealed, spell, unpack

FOLDER = "step-000000000010-2"
BASE = f"{PLACES.checkpoint(FOLDER)}"
FEW_BYTES = 24 * 1024 * 1024
"""What a decoder may take at most for a hostile file of some kB; the claims in the files are of GB and more."""

Decode = Callable[[bytes], object]


def _plainly(kind: type[Any]) -> Decode:
    return lambda data: codec.decode(data, kind, "the file")


DECODERS: dict[str, tuple[str, Decode]] = {
    "store record": ("onward.json", lambda d: codec.decode_sealed(d, StoreRecord, "the file")),
    "run record": (PLACES.run_file, lambda d: codec.decode_sealed(d, RunRecord, "the file")),
    "lease": (PLACES.lease, _plainly(LeaseRecord)),
    "open entry": (PLACES.entry(1), lambda d: codec.decode_entry(d, "the file")),
    "checkpoint entry": (PLACES.entry(2), lambda d: codec.decode_entry(d, "the file")),
    "receipt": (PLACES.receipts, lambda d: codec.decode_sealed(d, Receipt, "the file")),
    "intent": (f"{BASE}/intent.json", _plainly(Intent)),
    "layout": (f"{BASE}/layout.json", lambda d: codec.decode_layout(d, "the file")),
    "manifest": (f"{BASE}/manifest.json", lambda d: codec.decode_manifest(d, "the file")),
    "record": (f"{BASE}/rank-00000/record.json", lambda d: codec.decode_record(d, "the file")),
    "index": (f"{BASE}/rank-00000/index.json.zst", lambda d: codec.decode_index(pack(d), "the file")),
    "state": (f"{BASE}/rank-00000/state.json", _plainly(StateFile)),
}
SEALED = ("store record", "run record", "open entry", "checkpoint entry", "receipt")
KINDS = tuple(DECODERS)


@cache
def one_checkpoint() -> Image:
    """A store with one checkpoint at step 10."""
    store = memory_store()
    run = start(store)
    commit(run, 10, assets={"vocab.txt": b"a b c"})
    found = image(store)
    run.end()
    return found


def example(world: Image, kind: str) -> Plain:
    """A good file of a kind, as plain JSON."""
    path = DECODERS[kind][0]
    data = world.files[path] if path in world.files else next(d for p, d in world.files.items() if p.startswith(path))
    return plain(unpack(data) if kind == "index" else data)


def written(kind: str, table: Plain) -> bytes:
    """A table as a file of its kind; a hostile writer makes the file's own digest right."""
    return sealed(table) if kind in SEALED else spell(table)


@contextmanager
def little_memory() -> Iterator[None]:
    """Fails when more memory is taken at once than a file of this size can need."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < FEW_BYTES
    finally:
        tracemalloc.stop()


def refused(kind: str, data: bytes, reason: str = "", error: type[OnwardError] = FormatError) -> None:
    """The decoder refuses ``data``, naming the file or the path, with the reason."""
    with little_memory(), pytest.raises(error, match=reason or None) as caught:
        DECODERS[kind][1](data)
    assert "the file" in caught.value.message or "path" in caught.value.message
    assert len(caught.value.message) < 2000
