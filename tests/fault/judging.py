"""A good store to forge, and what must happen to every forgery."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from onward.catalog.listing import read_catalog
from onward.errors import Damaged
from onward.storage.memory import MemoryStore
from onward.upkeep.adopt import adopt
from onward.upkeep.verify import verify
from recorder import resumed
from support import PLACES, RUN, TIER, Image, commit, content, die, image, memory_store, place_of, start

from .forging import Plain, plain, unpack

FOLDER, NUMBER = "step-000000000020-3", 3
RANK = "rank-00000"
INDEX, STATE, RECORD, SHARD = (
    f"{RANK}/{name}" for name in ("index.json.zst", "state.json", "record.json", "000.safetensors")
)
ROOM = 1 << 30
"""Address space that a refusal may take beyond what the process has: threads and their arenas."""


@cache
def good() -> Image:
    """Checkpoints at 10 and 20, and a dead lease."""
    store = memory_store()
    run = start(store)
    for step in (10, 20):
        commit(run, step, assets={"vocab.txt": b"a b c %d" % step})
    die(run)
    return image(store)


def shard_and_index() -> tuple[bytes, Plain]:
    """The shard file of the newest checkpoint, and its index as plain JSON."""
    base = PLACES.checkpoint(FOLDER)
    return good().files[f"{base}/{SHARD}"], plain(unpack(good().files[f"{base}/{INDEX}"]))


@contextmanager
def bounded() -> Iterator[None]:
    """A large allocation fails here, whoever makes it: Python, numpy, torch or a thread."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def judge(store: MemoryStore, *files: str) -> None:
    """Verification names one of ``files``; a load names one and takes the checkpoint before; adoption refuses."""
    with bounded():
        info = next((c for c in read_catalog(store, PLACES, TIER).checkpoints if c.folder == FOLDER), None)
        report = verify(place_of(store, FOLDER), info, run=RUN, threads=1)
        assert not report.ok, "verification found nothing"
        assert {finding.file for finding in report.findings} & set(files), report.findings
        copy_folder(store, FOLDER, "copied")
        begun, part = resumed(store)
        assert begun.next_step == 10, "the forged checkpoint was loaded"
        assert part.bytes() == content(10)
        told = [finding for rejection in begun.rejected for finding in rejection.reasons]
        assert {finding.file for finding in told} & set(files), told
        assert all(finding.message and finding.tier == TIER for finding in told)
        run = start(store)
        with pytest.raises(Damaged, match="copied is not adopted"):
            adopt(run, "copied")
        run.end()


def copy_folder(store: MemoryStore, folder: str, name: str) -> None:
    """A checkpoint's folder copied by hand."""
    old, new = PLACES.checkpoint(folder), PLACES.checkpoint(name)
    for path in [p for p in store.folders if p == old or p.startswith(f"{old}/")]:
        store.folders[new + path[len(old) :]] = 0.0
    for path in [p for p in store.files if p.startswith(f"{old}/")]:
        store.files[new + path[len(old) :]] = store.files[path]
