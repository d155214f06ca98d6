"""A half-written or half-deleted checkpoint is never taken as good, and stands in nobody's way."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import onward
from onward.catalog.incarnation import begin
from onward.upkeep.adopt import adopt

from .shared import commit, faulty, files, folder, in_process, load, numbers, root, running

DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "cut to nothing": lambda file: os.truncate(file, 0),
    "cut to half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "last byte dropped": lambda file: os.truncate(file, file.stat().st_size - 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_any_file_of_the_newest_missing_or_cut_gives_way_to_the_one_before(url: str, damage: str) -> None:
    """T01."""
    commit(url, 10, 20)
    whole = root(url).with_name("whole")
    shutil.copytree(root(url), whole)
    names = sorted(files(folder(url, 20)))
    assert len(names) >= 8
    for name in names:
        DAMAGE[damage](folder(url, 20) / name)
        before = files(folder(url, 20))
        start, value = load(url)
        assert (start.next_step, value) == (10, 10)
        assert [(r.step, r.reasons[0].file, r.quarantined) for r in start.rejected] == [(20, name, True)]
        assert start.rejected[0].reasons[0].message
        assert files(folder(url, 20)) == before, "the bytes of a damaged checkpoint were changed"
        shutil.rmtree(root(url))
        shutil.copytree(whole, root(url))


def _die_at(url: str, number: int, counted: str | None = None) -> None:
    """Resumes, and saves step 20; ends at the n-th call that changes the disk since the save began."""
    calls: list[str] = []
    counting = False

    def script(call: str, path: str) -> None:
        if counting:
            calls.append(call)
            if len(calls) == number:
                os._exit(9)

    box = numbers(0)
    with running(faulty(url, script), state=box) as (ckpt, _):
        box["x"].fill_(20)
        box["n"] = 20
        counting = True
        ckpt.save(20, wait=True)
        counting = False
    if counted:
        Path(counted).write_text(str(len(calls)))


def test_killed_at_any_call_of_a_save_the_old_or_the_new_state_is_there(url: str, tmp_path: Path) -> None:
    """T02, a sample; the whole sweep is a test of its own."""
    commit(url, 10)
    whole = tmp_path / "whole"
    shutil.copytree(root(url), whole)
    assert in_process(_die_at, url, 0, str(tmp_path / "count")) == 0
    total = int((tmp_path / "count").read_text())
    seen = set()
    for number in [1, 2, *range(5, total, max(total // 9, 1)), total - 2, total - 1, total]:
        shutil.rmtree(root(url))
        shutil.copytree(whole, root(url))
        assert in_process(_die_at, url, number) == 9
        start, value = load(url)
        assert start.next_step == value
        seen.add(value)
    assert seen == {10, 20}


def test_a_full_disk_at_the_second_of_three_files_publishes_nothing(url: str) -> None:
    """T05, one process."""
    commit(url, 10)
    earlier = files(folder(url, 10))

    def script(call: str, path: str) -> None:
        if call == "write" and path.endswith("001.safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    big = {name: torch.ones(4 * 2**20) for name in "abc"}  # 16 MiB each: a file of its own
    with running(faulty(url, script), how={"waive": ["state", "big"]}, state=numbers(1), big=big) as (ckpt, _):
        with pytest.warns(UserWarning, match="ENOSPC"), pytest.raises(onward.errors.SaveFailed, match="step 20"):
            ckpt.save(20, wait=True)
        assert [c.step for c in ckpt.checkpoints()] == [10]
    assert [p.name for p in folder(url, 10).parent.iterdir()] == [folder(url, 10).name]
    assert files(folder(url, 10)) == earlier
    assert load(url)[1] == 10


def test_dying_while_a_step_is_saved_again_leaves_its_first_save(url: str) -> None:
    """T07."""
    commit(url, 20)
    first = files(folder(url, 20))
    for number in (8, 14, 20):  # between the first shard file and the last small one
        assert in_process(_die_at, url, number) == 9
        writing = [p for p in folder(url, 20).parent.iterdir() if ".writing-" in p.name]
        assert len(writing) == 1
        assert len(files(writing[0])) < len(first)
        start, value = load(url)
        assert (start.next_step, value) == (20, 20)
        assert [o.outcome for o in start.recovered] == ["rolled-back"]
        assert files(folder(url, 20)) == first


def test_junk_under_the_names_of_temporaries_is_in_nobodys_way(url: str) -> None:
    """T08."""
    commit(url, 10)
    run = root(url) / "runs/r"
    for sequence in (3, 5):  # the number that the next save will take, and one of the future
        junk = run / f"checkpoints/step-000000000030-{sequence}.writing-{'ab' * 16}"
        (junk / "rank-00000").mkdir(parents=True)
        (junk / "rank-00000/000.safetensors").write_bytes(b"junk")
        (run / f"ledger/.{sequence:09d}.json.{'cd' * 8}.tmp").write_bytes(b"junk")
    with running(url, state=numbers(30)) as (ckpt, _):
        ckpt.save(30, wait=True)
        ckpt.save(30, wait=True)  # and once more, for the other number
    assert all(b"junk" not in content for content in files(folder(url, 30)).values())
    commit(url, 40)  # two starts later every number has been passed
    assert load(url)[1] == 40
    assert not [p for p in run.rglob("*") if ".writing-" in p.name or p.name.endswith(".tmp")]


def test_left_overs_that_are_files_or_links_are_cleared_and_their_targets_kept(url: str) -> None:
    """T10."""
    commit(url, 10)
    good, place = folder(url, 10), folder(url, 10).parent
    before = files(good)
    for number, attempt in enumerate(("aa" * 8, "bb" * 8, "cc" * 8, "dd" * 8)):
        left = place / f"step-00000000002{number}-1.writing-{attempt}"
        if number == 0:
            left.write_bytes(b"a file")
        elif number == 1:
            left.symlink_to(good)
        elif number == 2:
            left.symlink_to("nowhere")
        else:
            left.mkdir()
            (left / "rank-00000").symlink_to(good / "rank-00000")
    start, value = load(url)
    assert (start.next_step, value) == (10, 10)
    assert [p.name for p in place.iterdir()] == [good.name]
    assert files(good) == before


def test_a_checkpoint_copied_elsewhere_is_adoptable_and_never_deleted(url: str, tmp_path: Path) -> None:
    """T11."""
    commit(url, 10, 20)
    other = f"file://{tmp_path}/other"
    onward.init_store(other)
    with running(other, state=numbers(0)):
        pass  # a run without a commit
    place = root(other) / "runs/r/checkpoints"
    shutil.copytree(folder(url, 20), place / folder(url, 20).name)
    (place / "my notes").mkdir()
    (place / "my notes" / "diary.txt").write_text("mine")
    before = files(place)
    with pytest.raises(onward.errors.NothingRecoverable, match=f"{folder(url, 20).name}.*adoptable"):
        load(other)  # not taken for a first start
    assert files(place) == before
    incarnation = begin(other, "r")
    adopt(incarnation, folder(url, 20).name)
    incarnation.end()
    assert load(other)[1] == 20
    assert (place / "my notes" / "diary.txt").read_text() == "mine"


# --- further cases of the kind ---------------------------------------------------------------------------------


def test_a_copied_folder_whose_name_a_save_comes_to_is_not_deleted(url: str, tmp_path: Path) -> None:
    """A folder copied in by hand may bear the very name that a later save of this run would take."""
    commit(url, 10)
    other = f"file://{tmp_path}/other"
    onward.init_store(other)
    with running(other, state=numbers(0)) as (ckpt, _):
        mine = folder(url, 10)
        copy = root(other) / "runs/r/checkpoints" / mine.name
        shutil.copytree(mine, copy)
        before = files(copy)
        ckpt.save(10, wait=True)
        assert ckpt.latest() is not None
    assert files(copy) == before


def test_a_folder_that_is_gone_or_never_got_its_name_gives_way(url: str) -> None:
    """Removed by hand, or its rename lost with the power although the ledger's entry stayed."""
    commit(url, 10, 20, 30)
    shutil.rmtree(folder(url, 30))
    lost = folder(url, 20)
    lost.rename(lost.with_name(f"{lost.name}.writing-{'ab' * 16}"))
    start, value = load(url)
    assert (start.next_step, value) == (10, 10)
    assert [r.step for r in start.rejected] == [30, 20]


def test_things_that_are_no_files_in_a_checkpoint_neither_hang_nor_pass(url: str) -> None:
    """A named pipe, a folder, a link to the right bytes: each stands where a regular file is due."""
    commit(url, 10, 20, 30, 40)
    for step, name in ((40, "rank-00000/000.safetensors"), (30, "manifest.json"), (20, "rank-00000/state.json")):
        file = folder(url, step) / name
        elsewhere = root(url).with_name(f"kept-{step}")
        file.rename(elsewhere)
        if step == 40:
            os.mkfifo(file)
        elif step == 30:
            file.mkdir()
        else:
            file.symlink_to(elsewhere)
    start, value = load(url)
    assert (start.next_step, value) == (10, 10)
    assert [r.step for r in start.rejected] == [40, 30, 20]


def test_files_that_others_leave_in_a_checkpoint_do_not_spoil_it(url: str) -> None:
    """Editors, network filesystems and file managers leave their own files beside others'."""
    commit(url, 10, 20)
    for name in (".nfs0000000001", "rank-00000/.DS_Store", "rank-00000/001.safetensors", "manifest.json~"):
        (folder(url, 20) / name).write_bytes(b"not of the checkpoint")
    start, value = load(url)
    assert (start.next_step, value, start.rejected) == (20, 20, ())
