"""The newest checkpoint is the one the ledger says, whatever names, times, pointers and listings suggest."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

import onward
from onward.storage.base import Entry
from onward.storage.posix import PosixStore

from .shared import commit, faulty, files, folder, in_process, load, numbers, root, running, start_process


class Shuffled(PosixStore):
    """Lists folders in no order at all, as some filesystems do."""

    def list(self, folder: str) -> list[Entry]:
        return random.sample(found := super().list(folder), len(found))


def test_steps_are_ordered_as_numbers_however_the_folders_are_listed(url: str) -> None:
    """T13, but for pruning."""
    steps = [9, 10, 90, 200, 1000]
    commit(url, *steps)
    store = Shuffled(root(url))
    assert load(store)[1] == 1000
    with running(store, state=numbers(0)) as (ckpt, _):
        assert [c.step for c in ckpt.checkpoints()] == steps[::-1]
        latest = ckpt.latest()
        assert latest is not None
        assert latest.step == 1000


def test_folders_named_by_hand_or_padded_otherwise_do_not_count(url: str) -> None:
    """T14."""
    commit(url, 100000, 900000)
    place = folder(url, 900000).parent
    for name in ("100000", "0900000", "09000000", "handpicked", "step-000009000000-99", "step-9000000"):
        shutil.copytree(folder(url, 100000), place / name)
    before = files(place)
    start, value = load(url)
    assert (start.next_step, value, start.rejected) == (900000, 900000, ())
    assert files(place) == before


def _save_slowly(url: str, marks: str) -> None:
    """Saves step 20 through a store that takes two seconds, and says on the way what is the latest."""

    def script(call: str, path: str) -> None:
        if path.endswith(".safetensors") and call == "fsync":
            Path(marks, "writing").touch()
            time.sleep(2)

    with running(faulty(url, script), state=numbers(20)) as (ckpt, _):
        ckpt.save(20)
        while not Path(marks, "writing").exists():
            time.sleep(0.01)
        latest = ckpt.latest()
        assert latest is not None
        Path(marks, "latest").write_text(str(latest.step))
        Path(marks, "asked").touch()
        ckpt.wait()
        latest = ckpt.latest()
        assert latest is not None
        Path(marks, "after").write_text(str(latest.step))


def test_until_a_save_is_committed_the_one_before_is_the_latest(url: str, tmp_path: Path) -> None:
    """T16."""
    commit(url, 10)
    process = start_process(_save_slowly, url, str(tmp_path))
    while not (tmp_path / "asked").exists():
        time.sleep(0.01)
        assert process.is_alive()
    assert (tmp_path / "latest").read_text() == "10"
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    assert not (tmp_path / "after").exists(), "the kill came after the save"
    start, value = load(url)
    assert (value, [o.step for o in start.recovered]) == (10, [20])
    assert in_process(_save_slowly, url, str(tmp_path)) == 0
    assert (tmp_path / "after").read_text() == "20"


def test_a_relative_store_survives_a_change_of_folder_and_a_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T19."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    onward.init_store("ck")
    box = numbers(10)
    with running("ck", state=box) as (ckpt, _):
        monkeypatch.chdir(tmp_path / "elsewhere")
        ckpt.save(10, wait=True)
        assert not list((tmp_path / "elsewhere").iterdir())
        assert [c.step for c in ckpt.checkpoints()] == [10]
    (tmp_path / "new" / "parent").mkdir(parents=True)
    (tmp_path / "ck").rename(tmp_path / "new" / "parent" / "ck")
    assert load("../new/parent/ck")[1] == 10
    assert load(f"file://{tmp_path}/new/parent/ck")[1] == 10


def test_no_pointer_can_point_at_itself(url: str) -> None:
    """T20: saved twice, names that people use for pointers, links that somebody made in a loop."""
    commit(url, 10)
    with running(url, state=numbers(10)) as (ckpt, _):
        ckpt.save(10, wait=True)
        assert [c.step for c in ckpt.checkpoints()] == [10, 10]
        assert len({c.folder for c in ckpt.checkpoints()}) == 2
    for name in ("latest", "LAST", "newest", "best", "current", "..", "a/b", ""):
        with pytest.raises(onward.errors.InvalidName), running(url, run=name or "-", state=numbers(0)):
            pass
    place = folder(url, 10).parent
    (place / "latest").symlink_to("latest")
    (place / "one").symlink_to("two")
    (place / "two").symlink_to("one")
    assert load(url)[1] == 10
    newest = folder(url, 10)
    shutil.rmtree(newest)
    newest.symlink_to(newest.name)
    start, value = load(url)
    assert (value, len(start.rejected)) == (10, 1)
    assert "link" in start.rejected[0].reasons[0].message
    (root(url) / "runs/loop").symlink_to("loop")
    with pytest.raises(onward.OnwardError):
        load(url, run="loop")


def test_a_quota_that_hits_only_the_last_small_write_loses_one_save_and_no_more(url: str) -> None:
    """T22: here the last small write is the ledger's entry, and the commit itself."""
    commit(url, 10)
    full = True

    def script(call: str, path: str) -> None:
        if full and call == "write" and "/ledger/" in path:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    began = time.monotonic()
    box = numbers(20)
    full = False
    with running(faulty(url, script), state=box) as (ckpt, _):
        full = True
        box.update(numbers(20))
        with pytest.warns(UserWarning, match="EDQUOT"), pytest.raises(onward.errors.SaveFailed):
            ckpt.save(20, wait=True)
        full = False
    assert load(url)[1] == 10
    commit(url, 20)
    assert load(url)[1] == 20
    assert time.monotonic() - began < 20


def test_a_quota_that_hits_only_the_receipt_leaves_the_checkpoint_newest(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """T22, the write after the commit: what is in the ledger counts, and saving the step again is no trouble."""
    commit(url, 10)
    full = False

    def script(call: str, path: str) -> None:
        if full and call == "write" and "/receipts/" in path:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    box = numbers(0)
    with running(faulty(url, script), state=box) as (ckpt, _):
        full = True
        box["x"].fill_(20)
        box["n"] = 20
        ckpt.save(20, wait=True)
        assert "EDQUOT" in caplog.text
        full = False
        assert [c.step for c in ckpt.checkpoints()] == [20, 10]
    assert load(url)[1] == 20
    commit(url, 20)
    assert load(url)[1] == 20


def test_step_and_state_are_those_of_the_call_however_training_goes_on(url: str) -> None:
    """T23."""

    class Tracker:
        step = 10

        def state_dict(self) -> dict[str, object]:
            return vars(self)

        def load_state_dict(self, state: dict[str, object]) -> None:
            vars(self).update(state)

    tracker = Tracker()
    tracker.step = 10
    slow = faulty(url, lambda call, path: time.sleep(0.02) if call == "fsync" else None)
    with running(slow, tracker=tracker) as (ckpt, _):
        ckpt.save(10)
        tracker.step = 13
        ckpt.wait()
    assert folder(url, 10).name.startswith("step-000000000010-")
    assert b'"global_step":10' in (folder(url, 10) / "manifest.json").read_bytes().replace(b" ", b"")
    fresh = Tracker()
    with running(url, tracker=fresh) as (_, start):
        assert (start.next_step, fresh.step) == (10, 10)


def _train(url: str, steps: int) -> None:
    box = numbers(0)
    with running(url, every=1, state=box) as (ckpt, start):
        for step in range(start.next_step, start.next_step + steps):
            box["x"].fill_(step + 1)
            box["n"] = step + 1
            ckpt.step(step)
            ckpt.wait()


def test_a_new_process_counts_on_from_the_old_one(url: str) -> None:
    """T25."""
    assert in_process(_train, url, 5) == 0
    place = folder(url, 1).parent
    before = files(place)
    assert in_process(_train, url, 1) == 0
    assert load(url)[1] == 6
    assert before.items() <= files(place).items()
    assert len(list(place.iterdir())) == 6


def test_a_step_whose_commit_failed_is_in_no_list_and_refuses_no_later_save(url: str) -> None:
    """T26."""
    full = False

    def script(call: str, path: str) -> None:
        if full and "/ledger/" in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    commit(url, 10)
    with running(faulty(url, script), state=numbers(20)) as (ckpt, _):
        full = True
        with pytest.warns(UserWarning), pytest.raises(onward.errors.SaveFailed, match="step 20"):
            ckpt.save(20, wait=True)
        full = False
        latest = ckpt.latest()
        assert latest is not None
        assert latest.step == 10
    commit(url, 15, how={"checkpoint": "10"})
    assert load(url)[1] == 15


# --- further cases of the kind ---------------------------------------------------------------------------------


def test_after_a_rollback_the_new_branch_wins_over_higher_steps_and_later_times(url: str) -> None:
    """Rolled back from 30 to 10 and gone on: 15 is the newest, though 30 is higher and its files may seem younger."""
    commit(url, 10, 20, 30)
    commit(url, 15, how={"checkpoint": "10"})
    for place, when in ((folder(url, 15), 0), (folder(url, 30), 2**31)):
        for item in [*place.rglob("*"), place]:
            os.utime(item, (when, when))
    assert load(url)[1] == 15
    assert load(url, checkpoint="30")[1] == 30
    assert load(url, checkpoint=f"seq:{folder(url, 20).name.rpartition('-')[2]}")[1] == 20
    with pytest.raises(onward.errors.NothingRecoverable, match="12"):
        load(url, checkpoint="12")


def test_copies_and_damage_in_the_ledger_neither_win_nor_start_from_zero(url: str) -> None:
    """What lies beside the entries does not count; entries that cannot be read are never taken for no commits."""
    commit(url, 10, 20)
    ledger = root(url) / "runs/r/ledger"
    entries = {number: ledger / f"{number:09d}.json" for number in (1, 2, 3)}
    for name in ("000000009.json.bak", "000000009 (copy).json", "9.json", "0000000009.json", ".000000009.json.ab.tmp"):
        shutil.copy(entries[2], ledger / name)
    assert load(url)[1] == 20
    entries[3].write_bytes(entries[3].read_bytes()[:-20])
    assert load(url)[1] == 10
    entries[2].unlink()
    with pytest.raises(onward.errors.NothingRecoverable) as caught:
        load(url)
    assert caught.value.exit_code == 4


def test_a_first_start_beside_other_runs_says_so(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt name of a run is a first start like any other; it must not be a silent one."""
    commit(url, 10, run="llama3")
    caplog.clear()
    assert load(url, run="lama3")[0].mode == "first-start"
    assert "'lama3'" in caplog.text
    assert "llama3" in caplog.text.replace("'lama3'", "")
