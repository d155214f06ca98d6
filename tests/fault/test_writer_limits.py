"""The writer runs out of disk, descriptors, memory, threads or time: one save fails by name, the next one is right."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import onward

from .driving import Run, handing
from .writers import State, check_ledger, gone, load, offered, root, running, standing_still, stop, wait_for, writing

__all__ = ["handing"]
MIB = 1 << 20
SIZE = 24.0
NO_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a small filesystem is mounted")


@pytest.fixture
def run(fast_path: Path) -> Iterator[Run]:
    url = f"file://{fast_path}/store"
    onward.init_store(url)
    state = State(SIZE)
    settings = onward.SaveSettings(threads=2, verify_after_save="sizes", deadline_seconds=8.0)
    with running(url, every=1, save=settings, state=state.box) as (ckpt, _):
        run = Run(ckpt, state)
        run.url = url
        run.step(wait=True)
        yield run


@contextmanager
def limited(pid: int, kind: int, soft: int) -> Iterator[None]:
    """A limit of another process, for a while."""
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (soft, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, kind, before)


def virtual(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


LIMITS: dict[str, tuple[int, Callable[[int], int], str]] = {
    "file size": (resource.RLIMIT_FSIZE, lambda pid: 1 * MIB, "EFBIG"),
    "no descriptor left": (resource.RLIMIT_NOFILE, lambda pid: len(os.listdir(f"/proc/{pid}/fd")), "EMFILE"),
    "no address space": (resource.RLIMIT_AS, virtual, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_fails_one_save_by_name_and_the_next_one_is_right(run: Run, name: str) -> None:
    kind, value, reason = LIMITS[name]
    pid = run.pid
    with limited(pid, kind, value(pid)):
        run.step()
        with pytest.warns(UserWarning, match=f"step 2 (?s:.)*{reason}"), pytest.raises(onward.errors.SaveFailed):
            run.ckpt.wait()
    for _ in range(2):
        run.step(wait=True)
    assert check_ledger(run.url) == [4, 3, 1] and not writing(run.url)
    run.ckpt.close()
    assert load(run.url, SIZE) == 4


def test_memory_that_runs_out_while_it_is_mapped_anew_fails_one_save(run: Run) -> None:
    """The state has grown, so there is other memory to map."""
    pid = run.pid
    with limited(pid, resource.RLIMIT_AS, virtual(pid)):
        run.state.box["more"] = [0.5] * 10
        run.state.box["tensors"].append(run.state.box["tensors"][0].repeat(4))
        with pytest.warns(UserWarning, match="step 2 "):
            run.ckpt.step(run.at)
            with suppress(onward.errors.SaveFailed):
                run.ckpt.wait()
        run.at += 1
    run.ckpt.step(run.at)
    run.ckpt.wait()
    assert offered(run.url)[0] == 3


def test_a_disk_without_the_room_is_refused_before_anything_is_written(run: Run) -> None:
    filler = root(run.url).parent / "filler"
    free = os.statvfs(root(run.url)).f_bavail * os.statvfs(root(run.url)).f_frsize
    if free > 1 << 34:
        pytest.skip(f"{free >> 30} GiB are free here: too many to be filled")
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - 30 * MIB)
    try:
        run.step()
        with pytest.warns(UserWarning, match="step 2 .*free"), pytest.raises(onward.errors.NoCapacity):
            run.ckpt.wait()
    finally:
        filler.unlink()
    run.step(wait=True)
    assert check_ledger(run.url) == [3, 1]


@NO_ROOT
@pytest.mark.root
def test_a_disk_that_fills_up_during_the_write_fails_one_save(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", place], capture_output=True)
    if mount.returncode != 0:
        pytest.skip(f"no filesystem can be mounted here: {mount.stderr.decode().strip()}")
    try:
        url = f"file://{place}/store"
        onward.init_store(url)
        state = State(SIZE)
        with running(url, every=1, save=onward.SaveSettings(threads=1), state=state.box) as (ckpt, _):
            run = Run(ckpt, state)
            run.step(wait=True)
            run.step()
            wait_for(lambda: writing(url), "the save begins")
            with standing_still(run.pid):
                assert offered(url) == [1], "the phase was hit"
                filler = place / "filler"
                with filler.open("wb") as file, suppress(OSError):
                    while file.write(bytes(64 * 1024)):
                        file.flush()
            with pytest.warns(UserWarning, match="step 2 (?s:.)*ENOSPC"), pytest.raises(onward.errors.SaveFailed):
                ckpt.wait()
            assert not writing(url), "its bytes were given back to the full disk"
            filler.unlink()
            run.step(wait=True)
        assert check_ledger(url) == [3, 1] and load(url, SIZE) == 3
    finally:
        subprocess.run(["umount", "-l", place], check=True)


SMALL_SHM = """
import os, subprocess, sys, torch, onward
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True)
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
url = sys.argv[1]
onward.init_store(url)
box = {"x": torch.full((30_000_000,), 7.0)}
config = onward.Config(store=url, run="r", triggers=onward.TriggerSettings(every_steps=1))
with onward.Checkpointer(config, state=box) as ckpt:
    ckpt.resume()
    ckpt.step(0)
    ckpt.wait()
    assert ckpt.writer_pid and ckpt.latest().step == 1
    print(os.statvfs("/dev/shm").f_bfree * os.statvfs("/dev/shm").f_frsize)
"""


@NO_ROOT
@pytest.mark.root
def test_a_shared_memory_folder_of_64_mb_does_not_matter(tmp_path: Path) -> None:
    """As containers have it; a write past its end would be a SIGBUS."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        pytest.skip("no mount namespace can be made here")
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", SMALL_SHM, f"file://{tmp_path}/store"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 64 << 20, "120 MB of state, and not a byte in /dev/shm"


FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.mark.skipif(os.geteuid() != 0 or not FREEZER.is_dir(), reason="needs root and the freezer of cgroup v1")
@pytest.mark.root
@pytest.mark.full
def test_a_writer_that_cannot_even_be_killed_holds_nobody_up(tmp_path: Path) -> None:
    """As one that waits for a dead NFS server: it takes its SIGKILL when the server is back; training does not wait."""
    cage = FREEZER / f"onward-{os.getpid()}"
    cage.mkdir()
    url = f"file://{tmp_path}/store"
    onward.init_store(url)
    state = State()
    settings = onward.SaveSettings(deadline_seconds=1.0, if_busy="skip", tolerate_failures=99)
    try:
        with running(url, every=1, save=settings, state=state.box) as (ckpt, _):
            run = Run(ckpt, state)
            run.step(wait=True)
            pid = run.pid
            (cage / "cgroup.procs").write_text(str(pid))
            (cage / "freezer.state").write_text("FROZEN")
            with pytest.warns(UserWarning, match="step 2 "):
                until, longest = time.monotonic() + 12, 0.0
                while time.monotonic() < until and ckpt._failures == 0:
                    started = time.monotonic()
                    run.step()
                    longest = max(longest, time.monotonic() - started)
                    time.sleep(0.02)
                assert ckpt._failures, "the save that cannot end is told as failed within a bounded time"
            assert longest < 1.0 and offered(url) == [1], "nobody appends while the old writer may wake up"
            (cage / "freezer.state").write_text("THAWED")
            wait_for(lambda: gone(pid), "it takes its SIGKILL")
            wait_for(lambda: run.step(wait=True).saved and offered(url)[0] == run.at, "saves go on")
        assert check_ledger(url)[0] == run.at
    finally:
        (cage / "freezer.state").write_text("THAWED")
        wait_for(lambda: not (cage / "cgroup.procs").read_text().strip(), "the cage is empty")
        cage.rmdir()


def test_a_writer_is_stopped_and_killed_in_every_phase_by_turns(run: Run) -> None:
    """No order of ills adds up: after each of them the next save is right."""
    ills: list[Callable[[int], None]] = [
        lambda pid: os.kill(pid, signal.SIGKILL),
        lambda pid: (stop(pid), os.kill(pid, signal.SIGKILL))[0],
        lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE, (4, 4096)),
        lambda pid: resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY)),
        lambda pid: os.kill(pid, signal.SIGSEGV),
        lambda pid: os.kill(pid, signal.SIGABRT),
    ]
    failed = 0
    for ill in ills:
        run.step()
        pid = run.pid
        ill(pid)
        with pytest.MonkeyPatch.context(), suppress(onward.errors.SaveFailed):
            import warnings

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    run.ckpt.wait()
                except onward.errors.SaveFailed:
                    failed += 1
        with suppress(ProcessLookupError):
            os.kill(run.pid, signal.SIGKILL)  # also a limit must not outlive its turn
        wait_for(lambda pid=run.pid: gone(pid), "it dies")
        run.step(wait=True)
        assert offered(run.url)[0] == run.at
    assert check_ledger(run.url)[0] == run.at and not writing(run.url)
    print(f"\n{len(ills)} ills of the writer, {failed} saves failed by them, {len(offered(run.url))} checkpoints stand")
