"""The Checkpointer as a training loop meets it: its answers, its refusals, and kills at any instant."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from cases.shared import commit, faulty, files, flip, folder, load, numbers, refused, root, running
from onward.storage.posix import PosixStore


@pytest.fixture
def url(tmp_path: Path) -> str:
    onward.init_store(f"file://{tmp_path}/store")
    return f"file://{tmp_path}/store"


def _checkpointer(url: str, **components: Any) -> onward.Checkpointer:
    return onward.Checkpointer(onward.Config(store=url, run="r"), **components)


# --- where a run stands -------------------------------------------------------------------------------------------


def test_first_start_nothing_recoverable_and_no_store_are_three_answers(url: str, tmp_path: Path) -> None:
    start, value = load(url)
    assert (start.next_step, start.mode, start.checkpoint, value) == (0, "first-start", None, -1)
    commit(url, 10)
    flip(folder(url, 10) / "manifest.json")
    lost = refused(onward.errors.NothingRecoverable, r"manifest\.json", url, state=numbers(0))
    assert (lost.code, lost.exit_code) == ("nothing-recoverable", 4)
    assert "allow_fresh_start" in str(lost)
    for place in (tmp_path / "nowhere", tmp_path / "mount"):
        if place.name == "mount":
            place.mkdir()
        missing = refused(onward.errors.StoreMissing, str(place), f"file://{place}", state=numbers(0))
        assert (missing.code, missing.exit_code) == ("store-missing", 78)
        assert not place.exists() or not list(place.iterdir())
    start, value = load(url, allow_fresh_start=True)
    assert (start.next_step, start.mode, value) == (0, "first-start", -1)
    assert [r.step for r in start.rejected] in ([10], [])


def test_a_loop_that_never_resumed_is_refused_at_once(url: str) -> None:
    with _checkpointer(url, state=numbers(0)) as ckpt:
        for call in (ckpt.save, ckpt.checkpoints, ckpt.latest, ckpt.finish_restore, lambda: ckpt.step(0)):
            with pytest.raises(onward.errors.UsageError, match="resume") as caught:
                call()
            assert caught.value.exit_code == 2
    assert not (root(url) / "runs").exists() or not list((root(url) / "runs").iterdir())


def test_resume_is_called_once_and_after_close_nothing_is(url: str) -> None:
    ckpt = _checkpointer(url, state=numbers(0))
    ckpt.resume()
    with pytest.raises(onward.errors.UsageError, match="resume was called"):
        ckpt.resume()
    ckpt.close()
    ckpt.close()
    assert not (root(url) / "runs/r/lease.json").exists()


def test_a_closed_run_is_not_written_to(url: str) -> None:
    ckpt = _checkpointer(url, state=numbers(0))
    ckpt.resume()
    ckpt.close()
    with pytest.raises(onward.errors.UsageError, match="close"):
        ckpt.save(1, wait=True)


def test_a_refused_resume_leaves_the_run_to_the_next_try(url: str) -> None:
    commit(url, 10)
    ckpt = _checkpointer(url, other=numbers(0))
    with pytest.raises(onward.errors.IncompleteState, match="'state'"):
        ckpt.resume()
    assert not (root(url) / "runs/r/lease.json").exists()
    assert ckpt.resume(waive=["state", "other"]).next_step == 10
    ckpt.close()


def test_a_second_live_job_is_told_who_is_busy(url: str) -> None:
    with running(url, state=numbers(0)) as (ckpt, _):
        busy = refused(onward.errors.Busy, f"pid {os.getpid()}", url, state=numbers(0))
        assert (busy.code, busy.exit_code) == ("busy", 5)
        with running(url, run="another", state=numbers(0)):
            pass
        ckpt.save(1, wait=True)  # the first was not disturbed


# --- steps --------------------------------------------------------------------------------------------------------


def test_a_step_is_told_once_and_never_backwards(url: str) -> None:
    commit(url, 10)
    with running(url, state=numbers(0)) as (ckpt, start):
        with pytest.raises(onward.errors.UsageError, match="10 steps are complete"):
            ckpt.step(start.next_step - 1)
        ckpt.step(10)
        for told in (10, 3):
            with pytest.raises(onward.errors.UsageError, match=f"step {told} was told before"):
                ckpt.step(told)
        with pytest.raises(onward.errors.UsageError, match="checkpoint of step 5"):
            ckpt.save(5)
        ckpt.step(11)


def test_saves_fall_on_multiples_even_when_steps_are_left_out(url: str) -> None:
    with running(url, every=5, state=numbers(0)) as (ckpt, _):
        saved = [step for step in (0, 3, 4, 5, 7, 12, 13, 14, 21) if ckpt.step(step).saved]
        ckpt.wait()
        assert saved == [4, 12, 14, 21]
        assert [c.step for c in ckpt.checkpoints()] == [22, 15, 13, 5]
        assert ckpt.step(22, save=True, reason="before a change").saved
    assert b"before a change" in (folder(url, 23) / "manifest.json").read_bytes()


def test_in_the_middle_of_a_step_a_save_is_refused_and_can_be_asked_for(url: str) -> None:
    loader = onward.ResumableLoader(range(10), 1)
    with running(url, data=loader) as (ckpt, _):
        batches = iter(loader)
        next(batches)
        with pytest.raises(onward.errors.MidStep, match="request_save") as caught:
            ckpt.save()
        assert caught.value.exit_code == 78
        ckpt.request_save("a hook")
        outcome = ckpt.step(0)
        assert (outcome.saved, outcome.stop) == (True, False)
        ckpt.save(wait=True)
        assert [c.step for c in ckpt.checkpoints()] == [1, 1]


# --- saves that fail, or come too fast ----------------------------------------------------------------------------


def test_a_failed_save_is_loud_on_disk_and_made_up_for_at_the_next_trigger(url: str) -> None:
    broken = True

    def script(call: str, path: str) -> None:
        if broken and call == "fsync" and path.endswith(".safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with running(faulty(url, script), every=1, state=numbers(0)) as (ckpt, _):
        ckpt.step(0)
        _until_written()
        broken = False
        with pytest.warns(UserWarning, match="step 1 .*EIO"):
            assert ckpt.step(1).saved
    stories = [json.loads(p.read_text()) for p in (root(url) / "runs/r/attempts").iterdir()]
    assert [(s["step"], s["outcome"]) for s in stories] == [(1, "failed")]
    assert "EIO" in stories[0]["reason"]
    assert load(url)[0].next_step == 2


def _until_written() -> None:
    while any(thread.name.startswith("onward-save") for thread in threading.enumerate()):
        time.sleep(0.005)


@pytest.mark.parametrize("policy", ["skip", "wait"])
def test_a_save_that_is_due_too_early_is_skipped_and_counted_or_waited_for(url: str, policy: Any) -> None:
    gate = threading.Event()
    slow = faulty(url, lambda call, path: gate.wait(30) and None if path.endswith(".safetensors") else None)
    with running(slow, every=1, save={"if_busy": policy}, state=numbers(0)) as (ckpt, _):
        assert ckpt.step(0).saved
        if policy == "wait":
            threading.Timer(0.2, gate.set).start()
            assert ckpt.step(1).saved
            assert gate.is_set()
        else:
            assert not ckpt.step(1).saved
            assert not ckpt.step(2).saved
            gate.set()
            ckpt.wait()
            assert ckpt.step(3).saved
        ckpt.wait()
        assert ckpt.skipped_saves == (2 if policy == "skip" else 0)
        assert [c.step for c in ckpt.checkpoints()] == ([4, 1] if policy == "skip" else [2, 1])


@pytest.mark.parametrize("last", ["fails", "succeeds"])
def test_close_raises_if_and_only_if_the_last_save_failed(url: str, last: str) -> None:
    broken = last == "succeeds"

    def script(call: str, path: str) -> None:
        if broken and path.endswith("layout.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    ckpt = onward.Checkpointer(onward.Config(store=url, run="r"), store=faulty(url, script), state=numbers(0))
    ckpt.resume()
    with pytest.warns(UserWarning, match=r"layout\.json"):
        ckpt.step(0, save=True)
        _until_written()
        broken = not broken
        ckpt.step(1, save=True)
        _until_written()
        broken = False
        if last == "fails":
            ckpt.step(2)  # many steps may lie between the last save and the end
            with pytest.raises(onward.errors.SaveFailed, match="step 2 "):
                ckpt.close()
        else:
            ckpt.close()
    assert not (root(url) / "runs/r/lease.json").exists()


def test_state_that_cannot_be_saved_is_told_before_the_first_step(url: str) -> None:
    error = refused(onward.errors.UnsupportedState, r"state\['lock'\]", url, state={"lock": threading.Lock()})
    assert error.exit_code == 78


def test_an_object_that_cannot_give_its_state_fails_the_save_and_not_the_training(url: str) -> None:
    class Moody:
        calls = 0

        def state_dict(self) -> dict[str, int]:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("dictionary changed size during iteration")
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    with running(url, every=1, moody=Moody()) as (ckpt, _):
        with pytest.warns(UserWarning, match="moody"):
            ckpt.step(0)
        assert ckpt.step(1).saved


# --- room ---------------------------------------------------------------------------------------------------------


class Counting(PosixStore):
    """Counts the bytes that are read of shard files, and has as much room as it is told."""

    read_bytes = 0
    room: int | None = None

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        if path.endswith(".safetensors"):
            self.read_bytes += len(view)
        super().read_into(path, start, view)

    def free_bytes(self) -> int | None:
        return super().free_bytes() if self.room is None else self.room


def test_with_little_memory_it_loads_in_two_passes_and_saves_by_a_window_or_refuses(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {"x": torch.randn(1000, 1000), "y": [torch.randn(10)]}
    with running(url, state=saved, model=torch.nn.Linear(2, 2)) as (ckpt, _):
        ckpt.save(10, wait=True)
        ckpt.save(20, wait=True)
    monkeypatch.setattr("onward.runtime.memory.available", lambda *_: (5_000_000, "a limit of the test"))
    store = Counting(root(url))
    fresh: dict[str, Any] = {}
    with running(store, state=fresh, model=torch.nn.Linear(2, 2)) as (ckpt, start):
        assert start.next_step == 20
        assert store.read_bytes > 2 * 4_000_000, "every byte is checked before the first is used"
        assert torch.equal(fresh["x"], saved["x"])
        assert torch.equal(fresh["y"][0], saved["y"][0])
        words = r"at least 16\.8 MB.*a limit of the test leaves 5\.0 MB"
        with pytest.warns(UserWarning, match=words), pytest.raises(onward.errors.NoCapacity, match=words) as caught:
            ckpt.save(30, wait=True)
        assert caught.value.exit_code == 69
        monkeypatch.setattr("onward.runtime.memory.available", lambda *_: (50_000_000, "a limit of the test"))
        ckpt.save(40, wait=True)
        assert [c.step for c in ckpt.checkpoints()] == [40, 20, 10]
    again: dict[str, Any] = {}
    with running(url, state=again, model=torch.nn.Linear(2, 2)) as (_, start):
        assert (start.next_step, torch.equal(again["x"], saved["x"])) == (40, True)
    shard = folder(url, 40) / "rank-00000/000.safetensors"
    flip(shard, shard.stat().st_size - 10)
    fresh = {}
    with running(store, state=fresh, model=torch.nn.Linear(2, 2)) as (_, start):
        assert (start.next_step, start.rejected[0].step) == (20, 40)


def test_a_tier_that_is_too_full_is_told_with_numbers_before_anything_is_written(url: str) -> None:
    store = Counting(root(url))
    with running(store, state={"x": torch.zeros(2_500_000)}) as (ckpt, _):
        store.room = 5_000_000
        words = r"has 5\.0 MB free.*needs 27\.0 MB.*22\.0 MB are missing"
        with pytest.warns(UserWarning, match=words), pytest.raises(onward.errors.NoCapacity, match=words) as caught:
            ckpt.save(1, wait=True)
        assert caught.value.exit_code == 69
        assert not files(root(url) / "runs/r/checkpoints")
        store.room = None
        ckpt.save(2, wait=True)
