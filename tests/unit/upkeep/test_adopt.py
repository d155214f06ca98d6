"""Adoption: a folder that was copied in becomes a checkpoint of the run once every byte of it verifies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from onward.catalog.ledger import read_ledger
from onward.catalog.listing import read_catalog
from onward.catalog.receipts import read_receipts
from onward.errors import Damaged, NothingRecoverable, Superseded, UsageError
from onward.format.names import RunPlaces, checkpoint_folder
from onward.storage.posix import PosixStore
from onward.upkeep.adopt import adopt
from recorder import resumed
from support import PLACES, RUN, TIER, commit, content, die, posix_store, start


@pytest.fixture
def copied(disk: PosixStore, fast_path: Path) -> PosixStore:
    """A fresh store whose run has only what was copied from another: ``from-elsewhere``."""
    run = start(disk)
    entry = commit(run, 30, assets={"vocab.txt": b"a b c"})
    run.end()
    other = posix_store(fast_path / "other")
    start(other).end()
    source = disk.root / PLACES.checkpoint(entry.folder)
    shutil.copytree(source, other.root / PLACES.checkpoint("from-elsewhere"))
    return other


def test_a_copied_folder_is_not_a_first_start_and_is_named(copied: PosixStore) -> None:
    """T11: it cannot be resumed from as it is, and starting from zero beside it would be worse."""
    with pytest.raises(NothingRecoverable, match="from-elsewhere: not in the ledger; adoptable") as caught:
        resumed(copied)
    assert "onward adopt" in caught.value.next_step


def test_an_adopted_folder_gets_a_name_of_its_own_and_is_resumed_from(copied: PosixStore) -> None:
    run = start(copied)
    number = run.ledger.next
    adopted = adopt(run, "from-elsewhere")
    run.end()
    assert (adopted.entry.sequence, adopted.entry.step) == (number, 30)
    assert adopted.entry.folder == checkpoint_folder(30, number)
    assert adopted.report.ok
    assert adopted.report.coverage.files == adopted.report.coverage.files_total
    receipts, _ = read_receipts(copied, PLACES, adopted.entry.folder)
    assert [r.kind for r in receipts] == ["adopted", "verified"]
    assert receipts[0].details["from"] == "from-elsewhere"
    assert not (copied.root / PLACES.checkpoint("from-elsewhere")).exists()
    begun, part = resumed(copied)
    assert (begun.next_step, part.bytes()) == (30, content(30))


def test_a_folder_of_another_run_may_be_adopted_and_says_where_it_came_from(disk: PosixStore) -> None:
    source = start(disk, "other")
    entry = commit(source, 40)
    source.end()
    run = start(disk)
    shutil.copytree(disk.root / RunPlaces("other").checkpoint(entry.folder), disk.root / PLACES.checkpoint("taken"))
    adopted = adopt(run, "taken")
    run.end()
    receipts, _ = read_receipts(disk, PLACES, adopted.entry.folder)
    assert receipts[0].details["run"] == "other"
    begun, part = resumed(disk)
    assert (begun.next_step, part.bytes()) == (40, content(40))
    assert read_ledger(disk, RunPlaces("other")).live() == [entry], "the other run has lost nothing"


@pytest.mark.parametrize("file", ["manifest.json", "layout.json", "rank-00000/000.safetensors", "assets/vocab.txt"])
def test_a_damaged_folder_is_not_adopted_and_not_changed(copied: PosixStore, file: str) -> None:
    path = copied.root / PLACES.checkpoint("from-elsewhere") / file
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    run = start(copied)
    with pytest.raises(Damaged, match=f"from-elsewhere is not adopted: .*{Path(file).name}"):
        adopt(run, "from-elsewhere")
    run.end()
    assert path.read_bytes() == bytes(data)
    assert read_ledger(copied, PLACES).checkpoints() == []


def test_only_what_is_there_and_unknown_to_the_ledger_can_be_adopted(disk: PosixStore) -> None:
    run = start(disk)
    entry = commit(run, 10)
    (disk.root / PLACES.checkpoints / "empty").mkdir()
    for folder in (entry.folder, "empty", "nothing", "..", "../../other", ""):
        with pytest.raises(UsageError, match="cannot be adopted; the run has nothing to adopt"):
            adopt(run, folder)
    run.end()
    assert [c.step for c in read_catalog(disk, PLACES, TIER).offered()] == [10]


def test_a_folder_with_more_in_it_is_adopted_with_the_rest_left_in_place(copied: PosixStore) -> None:
    """A stray file is no part of the checkpoint and no damage; it is not thrown away either."""
    folder = copied.root / PLACES.checkpoint("from-elsewhere")
    (folder / "notes.txt").write_text("mine")
    run = start(copied)
    adopted = adopt(run, "from-elsewhere")
    run.end()
    assert [f.code for f in adopted.report.findings] == ["foreign-file"]
    assert (copied.root / PLACES.checkpoint(adopted.entry.folder) / "notes.txt").read_text() == "mine"


def test_a_superseded_incarnation_cannot_adopt(copied: PosixStore) -> None:
    old = start(copied)
    die(old)
    new = start(copied)
    with pytest.raises(Superseded):
        adopt(old, "from-elsewhere")
    assert read_ledger(copied, PLACES).checkpoints() == []
    new.end()


def test_the_same_folder_may_be_copied_and_adopted_twice(copied: PosixStore) -> None:
    """Each copy becomes a checkpoint of its own number: no name is used twice."""
    base = copied.root / PLACES.checkpoints
    shutil.copytree(base / "from-elsewhere", base / "again")
    run = start(copied)
    taken = checkpoint_folder(30, run.ledger.next)
    shutil.copytree(base / "from-elsewhere", base / taken)
    folders = [adopt(run, name).entry.folder for name in ("from-elsewhere", "again", taken)]
    run.end()
    assert len(set(folders)) == 3
    assert [c.folder for c in read_catalog(copied, PLACES, TIER).offered()] == folders[::-1]
    assert read_ledger(copied, PLACES).run == RUN
