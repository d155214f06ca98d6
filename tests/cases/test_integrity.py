"""Nothing altered is loaded, and nothing that is read can run. Beside it: locks of dead runs, and the end of a run."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onward

from .shared import (
    Box,
    commit,
    files,
    flip,
    folder,
    load,
    numbers,
    refused,
    root,
    round_trip,
    running,
    same,
    start_process,
)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_pickle_in_place_of_any_file_is_refused_and_does_not_run(url: str, tmp_path: Path) -> None:
    """T145."""
    commit(url, 10, 20)
    mark = tmp_path / "ran"
    bomb = pickle.dumps(Bomb(str(mark)))
    whole = tmp_path / "whole"
    shutil.copytree(root(url), whole)
    inside = [folder(url, 20).relative_to(root(url)) / name for name in files(folder(url, 20))]
    others = [Path("runs/r") / name for name in files(root(url) / "runs/r") if "checkpoints" not in name]
    for path in [*inside, *others, Path("onward.json")]:
        (root(url) / path).write_bytes(bomb)
        try:
            _, value = load(url)
        except onward.OnwardError:
            value = 0  # refused, by name
        assert not mark.exists(), path
        assert value in ((10,) if path in inside else (0, 10, 20)), path
        shutil.rmtree(root(url))
        shutil.copytree(whole, root(url))


def test_random_states_are_plain_data_and_fit_their_setters(url: str) -> None:
    """T146."""
    random.seed(1), np.random.seed(1)
    value = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "dict": np.random.get_state(legacy=False),
        "generator": np.random.default_rng(5).bit_generator.state,
        "philox": np.random.Philox(5).state,
        "torch": torch.get_rng_state(),
    }
    reference = random.random(), np.random.rand(), torch.rand(())
    loaded = round_trip(url, value)
    assert same(loaded, value)
    random.setstate(loaded["python"])
    np.random.set_state(loaded["numpy"])
    torch.set_rng_state(loaded["torch"])
    assert (random.random(), np.random.rand(), torch.rand(())) == reference
    generator = np.random.default_rng(6)
    generator.bit_generator.state = loaded["generator"]
    assert generator.random() == np.random.default_rng(5).random()
    for content in files(root(url)).values():
        assert b"\x80\x04" not in content[:2]


def test_random_state_that_cannot_be_restored_is_an_error_unless_waived(url: str) -> None:
    """T146."""
    generators = {"own": np.random.default_rng(1)}
    with running(url, generators=generators) as (ckpt, _):
        ckpt.save(1, wait=True)
    other = {"own": np.random.Generator(np.random.MT19937(1))}
    refused(onward.errors.IncompatibleState, "'own'", url, generators=other)
    with running(url, generators=other, how={"waive": ["rng"]}) as (_, start):
        assert start.next_step == 1


def test_every_decision_on_the_way_to_an_undamaged_step_is_in_the_report(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """T149, one tier: newest damaged, the one before deleted, the one before that altered too, and then a good one."""
    commit(url, 10, 20, 30, 40)
    flip(folder(url, 40) / "rank-00000/000.safetensors")
    shutil.rmtree(folder(url, 30))
    flip(folder(url, 20) / "rank-00000/state.json", 40)
    kept = {step: files(folder(url, step)) for step in (40, 20)}
    with caplog.at_level(logging.WARNING, "onward"):
        start, value = load(url)
    assert (value, [r.step for r in start.rejected]) == (10, [40, 30, 20])
    assert all(r.quarantined and r.reasons[0].tier == "home" for r in start.rejected)
    assert "x" in start.rejected[0].reasons[0].tensor
    for rejection in start.rejected:
        assert rejection.folder in caplog.text
        assert rejection.reasons[0].file in caplog.text
    assert {step: files(folder(url, step)) for step in (40, 20)} == kept, "the bytes of the damaged are kept"
    caplog.clear()
    with caplog.at_level(logging.WARNING, "onward"):
        again, value = load(url)
    assert (value, again.rejected) == (10, ())  # quarantined: not read once more at each start
    flip(folder(url, 10) / "rank-00000/000.safetensors")
    box = numbers(-1)
    error = refused(onward.errors.NothingRecoverable, "", url, state=box)
    assert all(f"step-{step:012d}" in str(error) for step in (10, 20, 30, 40))
    assert error.exit_code == 4
    assert same(box, numbers(-1)), "nothing of a damaged checkpoint reached the live state"


# --- T154, T155 -------------------------------------------------------------------------------------------------


def _forge(url: str, **fields: Any) -> None:
    """A lease as a run would have left it, with some fields changed."""
    held = multiprocessing.get_context("forkserver").Event()
    process = start_process(_hold, url, held)
    assert held.wait(60)
    place = root(url) / "runs/r/lease.json"
    lease = json.loads(place.read_text())
    process.kill()
    process.join(10)
    place.write_text(_canonical({**lease, **fields}))


def _canonical(record: object) -> str:
    return json.dumps(record, separators=(",", ":"), sort_keys=True) + "\n"


def _hold(url: str, held: Any, release: Any = None) -> None:
    with running(url, state=numbers(0)):
        held.set()
        (release.wait if release else time.sleep)(60)


@pytest.mark.parametrize("kind", ["dead", "reused", "rebooted", "empty", "garbled"])
def test_the_lock_of_a_dead_run_is_taken_over_with_a_warning(
    url: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """T154: dead pid; pid of another program by now; another boot; empty file; no lease at all in the file."""
    changed = {"reused": {"pid": os.getpid()}, "rebooted": {"boot": "another", "pid": os.getpid()}}
    _forge(url, **changed.get(kind, {}))
    place = root(url) / "runs/r/lease.json"
    if kind in ("empty", "garbled"):
        place.write_bytes(b"" if kind == "empty" else b"\xff" * 100)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "onward"), running(url, state=numbers(0)):
        assert time.monotonic() - began < 2
    if kind not in ("empty", "garbled"):
        assert "lease" in caplog.text


def test_the_lock_of_another_host_is_taken_over_when_it_stands_still(url: str) -> None:
    """T154."""
    _forge(url, host="elsewhere", lease_seconds=1.0)
    began = time.monotonic()
    with running(url, state=numbers(0)):
        assert 0.9 < time.monotonic() - began < 5


def test_the_lock_of_a_live_run_is_respected(url: str) -> None:
    """T154."""
    context = multiprocessing.get_context("forkserver")
    held, release = context.Event(), context.Event()
    process = start_process(_hold, url, held, release)
    assert held.wait(60)
    error = refused(onward.errors.Busy, f"pid {process.pid}", url, state=numbers(0))
    assert error.exit_code == 5
    release.set()
    process.join(10)
    with running(url, state=numbers(0)):
        pass


@pytest.mark.parametrize(("last", "steps"), [(100, 0), (90, 0), (101, 1)])
def test_resumed_at_or_past_the_last_step_nothing_is_trained_or_rewritten(url: str, last: int, steps: int) -> None:
    """T155."""
    commit(url, 100)
    before = files(folder(url, 100).parent)
    trained = 0
    box = numbers(0)
    with running(url, every=1, state=box) as (ckpt, start):
        for step in range(start.next_step, last):
            trained += 1
            ckpt.step(step)
    assert trained == steps
    after = files(folder(url, 100).parent)
    assert before.items() <= after.items()
    assert (after == before) is (steps == 0)


# --- further cases of the kind ---------------------------------------------------------------------------------


def test_files_of_another_step_or_run_are_not_taken_for_this_ones(url: str) -> None:
    """Equal in size and whole in themselves: swapped shards, a stale state, a whole folder of another run."""
    commit(url, 10, 20, 30)
    commit(url, 30, run="other")
    for name in ("rank-00000/000.safetensors", "rank-00000/state.json"):
        shutil.copy(folder(url, 10) / name, folder(url, 20) / name)
    shutil.rmtree(folder(url, 30))
    shutil.copytree(folder(url, 30, "other"), folder(url, 20).with_name(f"step-{30:012d}-4"))
    start, value = load(url)
    assert (value, [r.step for r in start.rejected]) == (10, [30, 20])


def test_a_checkpoint_that_vouches_for_itself_does_not_convince_the_ledger(url: str) -> None:
    """Somebody alters a shard and writes all digests anew, down to ``manifest.sha256``."""
    commit(url, 10, 20)
    place = folder(url, 20)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["reason"] = "trust me"
    (place / "manifest.json").write_text(_canonical(manifest))
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files(place).items()}
    sums = "".join(f"{digest}  {name}\n" for name, digest in digests.items() if name != "manifest.sha256")
    (place / "manifest.sha256").write_text(sums)
    start, value = load(url)
    assert (value, start.rejected[0].reasons[0].file) == (10, "manifest.json")


def test_a_damaged_receipt_is_reported_and_decides_nothing(url: str) -> None:
    """Receipts can be lost or garbled; what is live is the ledger's to say."""
    commit(url, 10, 20)
    for receipt in (root(url) / "runs/r/receipts").rglob("*.json"):
        flip(receipt, 30)
    box: Box = numbers(-1)
    with running(url, state=box) as (_, start):
        assert start.next_step == 20
    assert len(start.findings) >= 2


CLOCKS = ["29700101T000000.000000Z", "19700101T000000.000000Z"]


@pytest.mark.parametrize("clock", CLOCKS)
def test_quarantine_does_not_rest_on_the_clock(url: str, clock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that was set back, or is ahead: a damaged checkpoint is rejected once, and not offered again."""
    commit(url, 10, 20)
    flip(folder(url, 20) / "rank-00000/000.safetensors")
    monkeypatch.setattr("onward.catalog.receipts.compact_now", lambda: clock)
    start, value = load(url)
    assert (value, len(start.rejected)) == (10, 1)
    start, value = load(url)
    assert (value, len(start.rejected)) == (10, 0)
