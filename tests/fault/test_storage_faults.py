"""Faults of the medium and of its surroundings that are not a plain refusal of one call."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from onward.catalog.listing import read_catalog
from onward.catalog.reader import open_checkpoint
from onward.errors import SaveFailed
from onward.restore.load import CheckpointSource
from onward.save.pipeline import SaveSettings, save
from onward.save.plan import plan
from onward.state.tensors import as_bytes
from onward.testing.faults import FailAt, FlipAfterClose, LateFolders, ShortReads, ShortWrites

from . import lives
from .conftest import Templates
from .harness import (
    PLACES,
    check_checkpoint,
    check_second_recovery,
    copy_store,
    held_by,
    make_store,
    posix,
    save_step,
    start,
    take_over,
)
from .loading import check_loads
from .state import DEFAULT_SMALLEST_FILE, contents_of, context, handed_over, key, tiny_tensors
from .warm import Warm


@pytest.mark.parametrize("limit", [1, 4095])
def test_a_store_that_writes_a_few_bytes_at_a_time_gets_the_whole_content(
    templates: Templates, place: Path, limit: int
) -> None:
    root = copy_store(templates(10), place / "s")
    incarnation = start(posix(root, ShortWrites(limit)))
    save_step(incarnation, 20)
    incarnation.end()
    assert take_over(posix(root)).steps == (20, 10)


@pytest.mark.parametrize("limit", [7, 4095])
def test_a_store_that_gives_a_few_bytes_at_a_time_is_read_whole(templates: Templates, place: Path, limit: int) -> None:
    store = posix(copy_store(templates(10), place / "s"), ShortReads(limit))
    seen = take_over(store)
    assert seen.steps == (10,)
    check_loads(store, seen.catalog.offered()[0])


@pytest.mark.full
def test_a_tensor_beyond_two_gibibytes_comes_back_to_its_last_byte(tmp_path: Path) -> None:
    """One system call moves at most 2147479552 bytes."""
    count = (1 << 31) + 4096
    big = np.arange(count // 8, dtype=np.uint64)
    root = make_store(tmp_path / "s")
    incarnation = start(posix(root))
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("smallest", "largest"):
            patch.setitem(plan.__kwdefaults__, limit, 1 << 33)  # type: ignore[arg-type]
        state = handed_over(10, [("big", "uint8", (count,), memoryview(big).cast("B"))])
        save(incarnation, state, context(), SaveSettings())
    incarnation.end()
    store = posix(root)
    info = read_catalog(store, PLACES, "home").offered()[0]
    shard = f"{PLACES.checkpoint(info.folder)}/rank-00000/000.safetensors"
    assert store.stat(shard).size > 1 << 31
    tensor = CheckpointSource(open_checkpoint(store, PLACES, info)).fetch([key("big")])[key("big")]
    assert np.array_equal(np.frombuffer(as_bytes(tensor), dtype=np.uint64), big)


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Within it this process can open only so many files beyond those that are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_twenty_thousand_tiny_tensors_need_few_files_few_descriptors_and_few_syncs(
    warm: Warm, templates: Templates, place: Path
) -> None:
    root = copy_store(templates(), place / "s")
    ended = warm.run(lives.saves_thousands, root, 64, 20_000)
    assert ended.status == 0
    seconds, calls, verified = ended.told
    assert verified is True
    assert calls.count("fsync") < 40
    assert calls.count("open") < 40
    assert seconds < 60
    store = posix(root)
    info = read_catalog(store, PLACES, "home").offered()[0]
    with few_descriptors(32):
        fetched = CheckpointSource(open_checkpoint(store, PLACES, info)).fetch_all()
    due = tiny_tensors(20_000)
    assert {k: bytes(as_bytes(t)) for k, t in fetched.items()} == {
        p.key: bytes(due.region(f)[p.begin : p.begin + p.nbytes]) for f in due.plan.files for p in f.pieces
    }
    print(f"\n20000 tensors: {calls.count('open')} files made, {calls.count('fsync')} fsyncs, {seconds:.1f} s")


def test_nothing_is_ever_written_to_tmpdir_and_its_device_does_not_matter(
    warm: Warm, templates: Templates, place: Path, tmp_path: Path
) -> None:
    root = copy_store(templates(10), tmp_path / "s")
    for number, folder in enumerate((place / "tmp", place / "missing")):
        if number == 0:
            folder.mkdir()
        ended = warm.run(lives.with_tmpdir, copy_store(root, tmp_path / str(number)), folder)
        assert ended.status == 0
        assert take_over(posix(tmp_path / str(number))).steps == (20, 10)
    assert list((place / "tmp").iterdir()) == []
    assert not (place / "missing").exists()
    if place.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is only one filesystem to write to here; the rest was looked at")


MODES = {"private": (0o600, 0o700, False), "group": (0o640, 0o2750, False), "umask": (0o666, 0o777, True)}


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
@pytest.mark.parametrize("mode", sorted(MODES))
def test_files_and_folders_have_the_mode_that_the_store_was_created_with(
    warm: Warm, place: Path, mode: str, umask: int
) -> None:
    file_mode, folder_mode, masked = MODES[mode]
    mask = ~umask if masked else ~0
    root = place / "s"
    assert warm.run(lives.modes, root, mode, umask).status == 0
    items = [root, *root.rglob("*")]
    wrong = {
        str(item.relative_to(root)): oct(stat.S_IMODE(item.stat().st_mode))
        for item in items
        if stat.S_IMODE(item.stat().st_mode) != ((folder_mode if item.is_dir() else file_mode) & mask)
    }
    assert wrong == {}
    assert len(items) > 30


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another group needs root")
@pytest.mark.parametrize("mode", ["group", "umask"])
def test_a_setgid_folder_gives_its_group_to_everything_below(warm: Warm, place: Path, mode: str) -> None:
    root = place / "s"
    root.mkdir()
    os.chown(root, -1, 12345)
    root.chmod(0o2770)
    assert warm.run(lives.modes, root, mode, 0o022).status == 0
    assert {item.stat().st_gid for item in root.rglob("*")} == {12345}


def test_a_folder_that_was_made_but_reported_as_anothers_is_taken_for_what_it_is(
    templates: Templates, place: Path
) -> None:
    """A network filesystem repeats a request whose answer was lost, and then finds its own folder in the way."""
    root = copy_store(templates(10), place / "s")
    incarnation = start(posix(root, LateFolders()))
    save_step(incarnation, 20)
    incarnation.end()
    assert take_over(posix(root)).steps == (20, 10)


DAMAGED = ("000.safetensors", "003.safetensors", "index.json.zst", "state.json", "record.json", "layout.json")
DAMAGED += ("manifest.json", "manifest.sha256", "intent.json", "vocabulary.txt")


@pytest.mark.parametrize("file", DAMAGED)
def test_a_byte_that_changes_after_the_close_is_found_by_reading_back(
    templates: Templates, place: Path, file: str
) -> None:
    root = copy_store(templates(10), place / "s")
    lying = FlipAfterClose(root, file, -1)
    incarnation = start(posix(root, lying))
    with pytest.raises(SaveFailed, match=r"step 20 was committed, but did not read back .* quarantined") as failed:
        save_step(incarnation, 20)
    assert lying.flipped is not None
    assert file in str(failed.value)
    catalog = read_catalog(posix(root), PLACES, "home")
    assert [info.step for info in catalog.offered()] == [10]
    assert [(info.step, info.status) for info in catalog.checkpoints][-1] == (20, "quarantined")
    save_step(incarnation, 30)
    incarnation.end()
    assert take_over(posix(root)).steps == (30, 10)


def test_a_ledger_entry_that_changes_after_the_close_never_makes_a_checkpoint(
    templates: Templates, place: Path
) -> None:
    root = copy_store(templates(10), place / "s")
    lying = FlipAfterClose(root, "/ledger/.", 40)
    incarnation = start(posix(root))
    incarnation.store.calls = lying  # type: ignore[attr-defined]
    with pytest.raises(SaveFailed, match="taken by what is no entry"):
        save_step(incarnation, 20)
    assert lying.flipped is not None
    incarnation.end()
    again = start(posix(root))
    assert [info.step for info in read_catalog(again.store, PLACES, "home").offered()] == [10]
    save_step(again, 30)
    offered = read_catalog(again.store, PLACES, "home").offered()
    assert [info.step for info in offered] == [30, 10]
    for info in offered:
        check_checkpoint(again.store, info)
    again.end()


def test_a_full_disk_leaves_the_last_checkpoint_and_room_makes_the_next(templates: Templates, place: Path) -> None:
    """Also when not even the story of the failure can be written, nor anything be removed."""
    root = copy_store(templates(10), place / "s")
    fault = FailAt(1 << 60, errno.ENOSPC, "forever")
    store = posix(root, fault)
    incarnation = start(store)
    fault.arm(20)
    for step in (20, 21, 22):
        with pytest.raises(SaveFailed, match=f"step {step} .*No space left"):
            save_step(incarnation, step)
    seen = posix(root)
    assert held_by(seen, read_catalog(seen, PLACES, "home").offered()[0]) == contents_of(10)
    fault.clear()
    save_step(incarnation, 30)
    incarnation.end()
    assert take_over(posix(root)).steps == (30, 10)
    check_second_recovery(posix(root))


def test_the_default_size_of_a_file_is_not_that_of_these_tests() -> None:
    assert DEFAULT_SMALLEST_FILE >= 1 << 20
