"""Files that are missing, cut, swapped, foreign, replaced by something else, or turned into a pickle."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onward.catalog.listing import read_catalog
from onward.errors import NothingRecoverable, OnwardError
from onward.storage.posix import PosixStore
from onward.upkeep.adopt import adopt
from onward.upkeep.verify import verify
from recorder import reasons, resumed
from support import PLACES, RUN, TIER, commit, content, die, place_of, posix_store, start

NEWEST, BEFORE = "step-000000000020-3", "step-000000000010-2"
FILES = (
    *("intent.json", "layout.json", "manifest.json", "manifest.sha256", "assets/vocab.txt"),
    *("rank-00000/record.json", "rank-00000/index.json.zst", "rank-00000/state.json", "rank-00000/000.safetensors"),
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commits at 10 and 20, and the lease of a process that died."""
    root = tmp_path_factory.mktemp("original") / "store"
    run = start(posix_store(root))
    for step in (10, 20):
        # Each asset has its own bytes: a swap of two equal files would damage nothing.
        commit(run, step, assets={"vocab.txt": b"a b c %d" % step})
    die(run)
    return root


@pytest.fixture
def root(original: Path, fast_path: Path) -> Iterator[Path]:
    copy = fast_path / "store"
    shutil.copytree(original, copy)
    yield copy


def checkpoints(root: Path) -> Path:
    return root / PLACES.checkpoints


def tree(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder, by relative path; links by where they lead."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def _missing(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _minus_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _plus_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def _swapped(path: Path) -> None:
    """With the next file of the same checkpoint: both are there, whole, and under the wrong name."""
    home = next(parent for parent in path.parents if parent.name == NEWEST)
    other = home / partner(str(path.relative_to(home)))
    keep = other.read_bytes()
    other.write_bytes(path.read_bytes())
    path.write_bytes(keep)


def partner(file: str) -> str:
    return FILES[(FILES.index(file) + 1) % len(FILES)]


def _foreign(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def _link_to_its_own_bytes(path: Path) -> None:
    away = path.with_name(f"{path.name}.away")
    path.rename(away)
    path.symlink_to(away)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: tuple[Callable[[Path], None], ...] = (
    *(_missing, _empty, _half, _minus_a_byte, _plus_a_byte, _swapped, _foreign),
    *(_link_to_its_own_bytes, _folder, _fifo),
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_of_the_newest_gives_way_to_the_one_before(
    root: Path, file: str, damage: Callable[[Path], None]
) -> None:
    """T01: the step before is loaded, the damaged one is named with the reason, nothing is raised or deleted."""
    damage(checkpoints(root) / NEWEST / file)
    before = tree(checkpoints(root))
    store = PosixStore(root)
    info = next(c for c in read_catalog(store, PLACES, TIER).checkpoints if c.folder == NEWEST)
    report = verify(place_of(store, NEWEST), info, run=RUN, threads=1)
    assert not report.ok
    damaged = {file, partner(file)} if damage is _swapped else {file}
    assert damaged & {finding.file for finding in report.findings}
    begun, part = resumed(store)
    assert begun.next_step == 10
    assert part.bytes() == content(10)
    assert {f"{NEWEST}/{each}" for each in damaged} & set(reasons(begun))
    assert all(finding.message and finding.tier == TIER for r in begun.rejected for finding in r.reasons)
    assert tree(checkpoints(root)) == before, "nothing is deleted or changed"


@pytest.mark.parametrize("file", [name for name in FILES if name != "layout.json"])
def test_files_swapped_between_two_checkpoints_are_refused_in_both(root: Path, file: str) -> None:
    """Each is a whole file of the right kind and run; starting from step 0 is not an answer, and both are told."""
    one, other = (checkpoints(root) / folder / file for folder in (NEWEST, BEFORE))
    keep = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(keep)
    with pytest.raises(NothingRecoverable) as refused:
        resumed(PosixStore(root))
    assert all(f"{folder}: {file}" in refused.value.message for folder in (NEWEST, BEFORE))


LEDGER = tuple(f"ledger/{number:09d}.json" for number in (1, 2, 3))
AROUND = ("run.json", "lease.json")


def around(root: Path) -> list[str]:
    """Files of the run and the store that belong to no checkpoint."""
    below = [str(p.relative_to(root / PLACES.root)) for p in (root / PLACES.receipts).rglob("*.json")]
    return [*LEDGER, *AROUND, *below]


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d is not _swapped], ids=lambda f: f.__name__.strip("_"))
def test_damage_beside_the_checkpoints_never_loses_more_than_the_entry_that_it_hit(
    original: Path, fast_path: Path, damage: Callable[[Path], None]
) -> None:
    """Ledger entries, receipts, lease and run file: named, and never in the way of a start."""
    for number, file in enumerate(around(original)):
        root = fast_path / str(number)
        shutil.copytree(original, root)
        path = root / PLACES.root / file
        damage(path)
        store = PosixStore(root)
        found = {finding.file for finding in read_catalog(store, PLACES, TIER).findings}
        # A last entry or a receipt that is gone leaves no trace: what it said is simply not said any more.
        traceless = damage is _missing and (file == LEDGER[-1] or file.startswith("receipts/"))
        traceless |= damage is _missing and file == "run.json"  # it is written again at the next start
        if file != "lease.json" and not traceless:
            assert f"{PLACES.root}/{file}" in found, file
        if file == "lease.json" and damage is _folder:
            path.rmdir()  # the one thing that a rename cannot replace; an empty folder is no lease of anybody's
        begun, part = resumed(store)
        assert begun.next_step == (10 if file == LEDGER[-1] else 20), file
        assert part.bytes() == content(begun.next_step)


def test_a_foreign_thing_at_the_next_ledger_number_is_walked_past(root: Path) -> None:
    """A link, a FIFO or a folder planted where the next entry is due must not end the run."""
    for number, plant in enumerate((lambda p: p.symlink_to("/etc/hostname"), os.mkfifo, Path.mkdir)):
        plant(root / PLACES.entry(4 + 2 * number))
        begun, part = resumed(PosixStore(root))
        assert begun.next_step == 20
        assert part.bytes() == content(20)
        assert (root / PLACES.entry(5 + 2 * number)).is_file()


class _Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_in_place_of_any_file_is_never_run(original: Path, fast_path: Path) -> None:
    """T145: every file of the store in turn becomes a pickle that makes a folder; no operation makes it."""
    marker = fast_path / "ran"
    bomb = pickle.dumps(_Bomb(marker))
    pickle.loads(bomb)  # the control: the trap works
    marker.rmdir()
    files = [p.relative_to(original) for p in sorted(original.rglob("*")) if p.is_file()]
    assert len(files) == 2 * len(FILES) + 3 + 2 + 3
    for number, file in enumerate(files):
        root = fast_path / str(number)
        shutil.copytree(original, root)
        (root / file).write_bytes(bomb)
        shutil.copytree(checkpoints(root) / NEWEST, checkpoints(root) / "copied")
        store = PosixStore(root)
        for action in (lambda s=store: resumed(s), lambda s=store: everything(s)):
            try:
                action()
            except OnwardError as error:
                assert error.message
        assert not marker.exists(), f"{file} was unpickled"


def everything(store: PosixStore) -> None:
    """Lists, verifies both ways, and adopts."""
    read_catalog(store, PLACES, TIER)
    for method in ("quick", "full"):
        for folder in (NEWEST, BEFORE):
            verify(place_of(store, folder), None, run=RUN, method=method, threads=1)
    run = start(store, lease_seconds=0.05)
    try:
        adopt(run, "copied")
    finally:
        run.end()
