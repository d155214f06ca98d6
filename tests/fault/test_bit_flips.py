"""One flipped bit in any file: found and named, the checkpoint before it used, no wrong bit ever in a live tensor."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import count

import pytest

from onward.catalog import incarnation as incarnation_module
from onward.catalog.deletion import delete_checkpoint
from onward.catalog.lease import acquire
from onward.catalog.ledger import read_ledger
from onward.catalog.listing import read_catalog
from onward.catalog.reader import open_folder
from onward.errors import OnwardError
from onward.format.names import STORE_FILE
from onward.restore.resume import Start
from onward.save.commit import begin_attempt
from onward.save.shards import write_rank
from onward.storage.memory import MemoryStore
from onward.upkeep.verify import verify
from recorder import Recorder, resumed
from support import (
    PLACES,
    RUN,
    TIER,
    Image,
    captured,
    commit,
    content,
    context,
    die,
    image,
    key,
    memory_store,
    place_of,
    start,
)

NEWEST, BEFORE = "step-000000000030-5", "step-000000000020-4"
UNUSED = "step-000000000040-6"  # truly damaged and quarantined, so that its receipt is what holds it back
SAMPLE, ALL = 400, 10_000

VOUCHED = (
    *("ledger open", "ledger checkpoint", "ledger delete", "manifest", "checksum list", "layout", "record", "index"),
    *("state", "shard header", "shard data", "asset", "committed intent", "receipt", "run record"),
)
"""Files that a digest vouches for: a flipped bit is always found."""
HARMLESS = ("store record", "intent of an attempt", "story of an attempt", "kept manifest", "lease")
"""Files on which no byte of a load rests: a flipped bit is refused by name, or changes nothing that is loaded."""


@dataclass(frozen=True)
class Spot:
    """One bit, and what kind of file it lies in."""

    kind: str
    path: str
    byte: int
    bit: int

    def flip(self, files: dict[str, bytes]) -> None:
        data = bytearray(files[self.path])
        data[self.byte] ^= 1 << self.bit
        files[self.path] = bytes(data)


@pytest.fixture(scope="module")
def world() -> Image:
    """Commits at 10, 20, 30; one deleted; one quarantined; an attempt cut off; stories, receipts and a dead lease."""
    store = memory_store()
    run = start(store)
    first = commit(run, 5)
    commit(run, 10, assets={"vocab.txt": b"a b c"})
    commit(run, 20, assets={"vocab.txt": b"a b c"})
    commit(run, 30, assets={"vocab.txt": b"a b c"})
    bad = commit(run, 40)
    delete_checkpoint(run.ledger, read_ledger(store, PLACES), first, tier=TIER, reason="test")
    attempt = begin_attempt(store, run.ledger, step=45, world_size=1, pid=1)
    die(run)
    shard = f"{PLACES.checkpoint(bad.folder)}/rank-00000/000.safetensors"
    Spot("", shard, len(store.files[shard]) - 1, 3).flip(store.files)
    resumed(store)  # rolls the attempt back (a story), quarantines 40 (a receipt)
    run = start(store)
    attempt = begin_attempt(store, run.ledger, step=50, world_size=1, pid=1)
    write_rank(
        store, PLACES.checkpoint(attempt.writing), captured(50), context(), run=RUN, attempt=attempt.id, threads=1
    )
    die(run)
    return image(store)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped host name makes a lease another machine's; the wait for its sign of life runs on a clock that jumps."""
    clock = count(0.0, 1e6)
    hurried = partial(acquire, sleep=lambda seconds: None, clock=lambda: next(clock))
    monkeypatch.setattr(incarnation_module, "acquire", hurried)


def kind_of(path: str) -> str:
    """The kind of a file, from where it lies."""
    name, below = path.rpartition("/")[2], path.removeprefix(f"{PLACES.root}/")
    if path == STORE_FILE:
        return "store record"
    if below in ("run.json", "lease.json"):
        return {"run.json": "run record", "lease.json": "lease"}[below]
    head = below.partition("/")[0]
    if head != "checkpoints":
        return {"receipts": "receipt", "attempts": "story of an attempt", "deleted": "kept manifest"}.get(head, head)
    if ".writing-" in path:
        return "intent of an attempt" if name == "intent.json" else "other file of an attempt"
    kinds = {
        "manifest.json": "manifest",
        "manifest.sha256": "checksum list",
        "layout.json": "layout",
        "record.json": "record",
        "index.json.zst": "index",
        "state.json": "state",
        "000.safetensors": "shard",
        "intent.json": "committed intent",
    }
    return kinds.get(name, "asset")


def territory(world: Image) -> dict[str, list[tuple[str, int, int]]]:
    """Kind → the byte ranges that belong to it: path, first byte, end."""
    store = world.restore()
    view = read_ledger(store, PLACES)
    found: dict[str, list[tuple[str, int, int]]] = {}
    for path, data in world.files.items():
        kind = kind_of(path)
        if f"/{UNUSED}/" in path and kind != "receipt":
            continue  # damaged already
        if kind == "ledger":
            entry = view.entries[int(path[-14:-5])]
            kind = f"ledger {type(entry).__name__.removesuffix('Entry').lower()}"
        if kind == "shard":
            head = 8 + int.from_bytes(data[:8], "little")
            found.setdefault("shard header", []).append((path, 0, head))
            found.setdefault("shard data", []).append((path, head, len(data)))
        elif kind != "other file of an attempt":
            found.setdefault(kind, []).append((path, 0, len(data)))
    return found


def tensor_at(world: Image, path: str, byte: int) -> str:
    """Whose byte that is, from the index."""
    folder = path.split("/")[3]
    for file in open_folder(place_of(world.restore(), folder)).index(0).files:
        for piece in file.pieces:
            if piece.start <= byte < piece.start + piece.nbytes:
                return piece.tensor
    raise AssertionError(f"byte {byte} of {path} belongs to no tensor")


def look(store: MemoryStore) -> dict[str, set[tuple[str, str, int | None]]]:
    """What listing and full verification find: path → tier, tensor and rank of each finding about it."""
    catalog = read_catalog(store, PLACES, TIER)
    found: dict[str, set[tuple[str, str, int | None]]] = {}
    for finding in catalog.findings:
        found.setdefault(finding.file, set()).add((finding.tier, finding.tensor, finding.rank))
    for info in catalog.checkpoints:
        if info.status == "committed":
            report = verify(place_of(store, info.folder), info, run=RUN, threads=1)
            assert report.ok == (not report.findings), report
            for finding in report.findings:
                path = f"{PLACES.checkpoint(info.folder)}/{finding.file}"
                found.setdefault(path, set()).add((finding.tier, finding.tensor, finding.rank))
    return found


def try_one(world: Image, spot: Spot) -> str:
    """Flips one bit and judges everything that follows; returns what happened, for the count."""
    store = world.restore()
    spot.flip(store.files)
    if spot.kind in VOUCHED:
        findings = look(store)
        assert spot.path in findings, f"{spot}: not found; found were {findings}"
        if spot.kind == "shard data":
            assert findings[spot.path] == {(TIER, tensor_at(world, spot.path, spot.byte), 0)}, spot
    part = Recorder()
    try:
        begun, part = resumed(store)
    except OnwardError as error:
        assert spot.kind == "store record", f"{spot}: {error}"
        assert STORE_FILE in error.message
        return "refused by name"
    assert begun.checkpoint is not None
    assert part.bytes() == content(begun.next_step), f"{spot}: a wrong bit in a live tensor"
    return check_choice(world, spot, begun)


def check_choice(world: Image, spot: Spot, begun: Start) -> str:
    """The newest checkpoint that the flip did not touch was used, and what was not used is told."""
    assert begun.checkpoint is not None
    relative = spot.path.removeprefix(f"{PLACES.checkpoint(NEWEST)}/")
    told = {finding.file for rejection in begun.rejected for finding in rejection.reasons}
    if relative != spot.path:
        assert begun.checkpoint.folder == BEFORE, spot
        assert relative in told, f"{spot}: told were {told}"
        newest = next(r for r in begun.rejected if r.folder == NEWEST)
        assert newest.quarantined
        assert all(finding.tier == TIER for finding in newest.reasons)
        if spot.kind == "shard data":
            found = newest.reasons[0]
            assert (found.tensor, found.rank) == (tensor_at(world, spot.path, spot.byte), 0)
        return "fell back"
    if spot.path == PLACES.entry(5):
        assert begun.checkpoint.folder == BEFORE, spot
        return "fell back"
    assert begun.checkpoint.folder == NEWEST, f"{spot}: {begun}"
    return "newest used"


def spots(world: Image, number: int, seed: int) -> list[Spot]:
    """Random bits, the kinds in turn so that each gets its share."""
    source = random.Random(seed)
    places = territory(world)
    assert sorted(places) == sorted((*VOUCHED, *HARMLESS)), "every kind of file has an example"
    kinds = sorted(places)
    chosen: list[Spot] = []
    for turn in range(number):
        kind = kinds[turn % len(kinds)]
        path, begin, end = source.choice(places[kind])
        chosen.append(Spot(kind, path, source.randrange(begin, end), source.randrange(8)))
    return chosen


def sweep(world: Image, number: int, seed: int) -> None:
    outcomes: Counter[tuple[str, str]] = Counter()
    for spot in spots(world, number, seed):
        outcomes[spot.kind, try_one(world, spot)] += 1
    for (kind, outcome), times in sorted(outcomes.items()):
        print(f"{kind:22} {outcome:16} {times:6}")
    print(f"{number} flipped bits in {len({k for k, _ in outcomes})} kinds of file: all found, none loaded")


def test_without_a_flip_the_newest_is_loaded_and_nothing_is_found(world: Image) -> None:
    """The control: what the sweep calls an effect of a flip is not there without one."""
    assert look(world.restore()) == {}
    begun, part = resumed(world.restore())
    assert begun.checkpoint is not None
    assert begun.checkpoint.folder == NEWEST
    assert begun.rejected == ()
    assert part.bytes() == content(30)
    assert part.bytes()["head"] == part.bytes()["weight"] != content(20)["weight"]
    assert key("weight") in tensor_at(world, f"{PLACES.checkpoint(NEWEST)}/rank-00000/000.safetensors", 4200)


def test_a_sample_of_flipped_bits_is_found_and_never_loaded(world: Image) -> None:
    sweep(world, SAMPLE, seed=1)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_ten_thousand_flipped_bits_are_found_and_never_loaded(world: Image) -> None:
    sweep(world, ALL, seed=2)


@pytest.mark.parametrize(
    "kind", ["ledger open", "ledger checkpoint", "ledger delete", "receipt", "story of an attempt"]
)
def test_a_flipped_bit_in_a_version_number_does_not_make_a_newer_format(world: Image, kind: str) -> None:
    """One bit turns format 1 into 0, 3, 5 or 9; that is damage to one file, not a reason to stop reading the run."""
    for path, _, _ in territory(world)[kind]:
        byte = world.files[path].index(b'"format":1') + len('"format":')
        for bit in range(8):
            try_one(world, Spot(kind, path, byte, bit))
