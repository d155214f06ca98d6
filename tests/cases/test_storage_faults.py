"""The storage refuses, runs out, or is set up otherwise than one thinks. Further faults: tests of the store itself."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import time
from pathlib import Path

import pytest
import torch

import onward

from .shared import Box, commit, faulty, flip, folder, in_process, load, numbers, root, running

MODES = [
    ("umask", 0o022, 0o644, 0o755),
    ("umask", 0o002, 0o664, 0o775),
    ("umask", 0o077, 0o600, 0o700),
    ("private", 0o022, 0o600, 0o700),
    ("private", 0o777, 0o600, 0o700),
    ("group", 0o022, 0o640, 0o2750),
    ("group", 0o077, 0o640, 0o2750),
]


@pytest.mark.parametrize(("mode", "mask", "file_mode", "folder_mode"), MODES)
def test_files_and_folders_have_the_modes_that_were_asked_for(
    tmp_path: Path, mode: str, mask: int, file_mode: int, folder_mode: int
) -> None:
    """T67."""
    place = tmp_path / "store"
    place.mkdir()  # its own mode is its maker's affair
    before = os.umask(mask)
    try:
        onward.init_store(f"file://{place}", mode=mode)  # type: ignore[arg-type]
        commit(f"file://{place}", 1)
        commit(f"file://{place}", 2)  # the lease is written over
    finally:
        os.umask(before)
    for item in place.rglob("*"):
        wanted = folder_mode if item.is_dir() else file_mode
        assert stat.S_IMODE(item.stat().st_mode) == wanted, f"{item} has {stat.S_IMODE(item.stat().st_mode):o}"


@pytest.mark.parametrize("mode", ["umask", "group"])
def test_a_shared_folder_keeps_its_group(tmp_path: Path, mode: str) -> None:
    """T67: what is made in a setgid folder belongs to its group."""
    place = tmp_path / "store"
    place.mkdir()
    others = [group for group in os.getgroups() if group != os.getegid()] or ([12345] if os.geteuid() == 0 else [])
    if not others:
        pytest.skip("this user has only one group")
    os.chown(place, -1, others[0])
    place.chmod(0o2775)
    onward.init_store(f"file://{place}", mode=mode)  # type: ignore[arg-type]
    commit(f"file://{place}", 1)
    assert {item.stat().st_gid for item in place.rglob("*")} == {others[0]}


def _save_with_temp_elsewhere(url: str, temp: str) -> None:
    os.environ["TMPDIR"] = temp
    commit(url, 1, 2)


def test_nothing_is_ever_written_to_the_temporary_folder(url: str) -> None:
    """T68: on another filesystem than the store, so that a rename from there would fail."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == root(url).stat().st_dev:
        pytest.skip("no second filesystem")
    temp = memory / f"onward-test-{os.getpid()}"
    temp.mkdir()
    try:
        created = temp.stat().st_mtime_ns
        assert in_process(_save_with_temp_elsewhere, url, str(temp)) == 0
        assert temp.stat().st_mtime_ns == created, "something was made in TMPDIR, though it is gone again"
    finally:
        shutil.rmtree(temp)
    assert load(url)[1] == 2


def _many_tensors(url: str, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    values = {f"layer.{i}.weight": torch.full((1 + i % 8,), float(i)) for i in range(count)}
    began = time.monotonic()
    with running(url, state=values) as (ckpt, _):
        ckpt.save(1, wait=True)
    fresh: Box = {}
    with running(url, state=fresh):
        pass
    assert time.monotonic() - began < 60
    assert list(fresh) == list(values)
    assert all(torch.equal(fresh[name], values[name]) for name in values)


@pytest.mark.parametrize("count", [4_000, pytest.param(20_000, marks=pytest.mark.full)])
def test_many_thousand_tensors_with_64_open_files(url: str, count: int) -> None:
    """T76."""
    assert in_process(_many_tensors, url, count) == 0
    assert len(list(folder(url, 1).rglob("*.safetensors"))) <= 8


@pytest.mark.parametrize("name", ["000.safetensors", "state.json", "manifest.json"])
def test_bytes_that_change_on_the_medium_are_found_by_reading_them_back(url: str, name: str) -> None:
    """T77: one bit, after the file was written; found at once, and the next save makes up for it."""
    commit(url, 10)
    altered = False

    def script(call: str, path: str) -> None:
        nonlocal altered
        writing = [p for p in folder(url, 10).parent.iterdir() if ".writing-" in p.name]
        if call == "rename" and "checkpoints" in path and not altered:
            flip(next(writing[0].rglob(name)))
            altered = True

    box = numbers(0)
    with running(faulty(url, script), state=box) as (ckpt, _):
        with pytest.warns(UserWarning, match=name), pytest.raises(onward.errors.SaveFailed, match="quarantined"):
            ckpt.save(20, wait=True)
        latest = ckpt.latest()
        assert altered
        assert latest is not None
        assert latest.step == 10
        box["x"].fill_(30)
        box["n"] = 30
        ckpt.save(30, wait=True)
    start, value = load(url)
    assert (value, start.rejected) == (30, ())


# --- further cases of the kind ---------------------------------------------------------------------------------


def test_a_store_that_vanishes_and_returns_costs_the_saves_in_between(url: str) -> None:
    """A mount that drops away: nothing is made at the empty place, training goes on, and saving begins again."""
    away = root(url).with_name("away")
    box = numbers(0)
    with running(url, state=box) as (ckpt, _):
        ckpt.save(10, wait=True)
        root(url).rename(away)
        root(url).mkdir()
        with pytest.warns(UserWarning, match="not found"), pytest.raises(onward.OnwardError):
            ckpt.save(20, wait=True)
        assert not list(root(url).iterdir())
        with pytest.raises(onward.errors.StoreMissing), running(url, state=numbers(0)):
            pass
        root(url).rmdir()
        away.rename(root(url))
        box["x"].fill_(30)
        box["n"] = 30
        ckpt.save(30, wait=True)
    assert load(url)[1] == 30


@pytest.mark.parametrize("name", ["with blank", "ünïcode", "per%20cent", "c++#?&"])
def test_a_store_lies_wherever_its_path_says(tmp_path: Path, name: str) -> None:
    """Blanks, signs that mean something in a URL, and letters that are not ASCII."""
    place = str(tmp_path / name)
    onward.init_store(place)
    assert (tmp_path / name / "onward.json").is_file()
    commit(place, 3)
    assert load(place)[1] == 3


def test_a_disk_that_turns_read_only_is_told_with_its_cause(url: str) -> None:
    """As ext4 does after an error: all writes fail, what is there can still be read."""
    commit(url, 10)
    broken = False

    def script(call: str, path: str) -> None:
        if broken and call != "fsync":  # which answers on a disk that cannot be written too
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with running(faulty(url, script), state=numbers(20)) as (ckpt, _):
        broken = True
        with pytest.warns(UserWarning, match="EROFS"), pytest.raises(onward.errors.SaveFailed, match="step 20"):
            ckpt.save(20, wait=True)
        assert [c.step for c in ckpt.checkpoints()] == [10]
        broken = False
    assert load(url)[1] == 10


def test_assets_are_those_of_the_start_whatever_becomes_of_their_files(url: str, tmp_path: Path) -> None:
    """A tokenizer that is edited, and then deleted, while the run goes on with what it has read."""
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text('{"a": 1}')
    described = onward.describe(tokenizer=str(vocabulary), code=False)
    with running(url, state=numbers(0), describe=described) as (ckpt, _):
        for step in (1, 2, 3):
            ckpt.save(step, wait=True)
            assert (folder(url, step) / "assets/tokenizer/vocab.json").read_text() == '{"a": 1}'
            if step == 1:
                vocabulary.write_text('{"a": 2}')
            else:
                vocabulary.unlink(missing_ok=True)
