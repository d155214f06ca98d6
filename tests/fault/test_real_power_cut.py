"""The same life on real filesystems whose power is really cut, at random moments: needs root and loop devices.

What is found after the cut keeps every promise, and is among what the model of ``test_power_cut.py`` allows.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from onward.testing.powercut import Disk, Tree
from onward.testing.recorder import Operation

from . import lives
from .aftermath import broken_after_cut, promised
from .harness import as_memory
from .powercut_life import Life
from .warm import Warm

pytestmark = [pytest.mark.full, pytest.mark.root]
SIZES = {"ext4": 64 << 20, "xfs": 320 << 20}
MAKE = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}
CUTS = 60


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)


def patiently(*command: str | Path, tries: int = 20) -> None:
    """The kernel gives a loop device back a little after the umount that freed it; until then its file is in use."""
    for _ in range(tries - 1):
        try:
            run(*command)
        except subprocess.CalledProcessError:
            time.sleep(0.25)
        else:
            return
    run(*command)


class Machine:
    """A filesystem in a file, that can be mounted, lose its power, and be mounted again."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.image, self.mount_point = kind, folder / f"{kind}.img", folder / f"{kind}.mnt"
        self.root = self.mount_point / "store"
        self.mount_point.mkdir()

    def fresh(self) -> None:
        """Makes the filesystem anew, with an empty and durable folder for the store."""
        self.image.unlink(missing_ok=True)
        with self.image.open("wb") as file:
            file.truncate(SIZES[self.kind])
        run(*MAKE[self.kind], self.image)
        with self.mounted():
            self.root.mkdir()
            os.sync()

    @contextmanager
    def mounted(self) -> Iterator[None]:
        patiently("mount", "-o", "loop", self.image, self.mount_point)
        try:
            yield
        finally:
            patiently("umount", self.mount_point)


@pytest.fixture(params=sorted(SIZES))
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    if shutil.which(MAKE[request.param][0]) is None:
        pytest.skip(f"{MAKE[request.param][0]} is not installed")
    machine = Machine(request.param, tmp_path)
    try:
        machine.fresh()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop mount here: {error.stderr.strip()}")
    return machine


def cut(machine: Machine, warm: Warm, n: int, sync: bool, log_file: Path) -> tuple[list[Operation], Tree]:
    """Lives until the power is cut before call ``n``. Returns what had been done, and what is found after it."""
    machine.fresh()
    with machine.mounted():
        ended = warm.run(lives.loses_power, machine.root, n, log_file, sync)
    assert ended.status == lives.POWER_LOST
    with machine.mounted():
        found = as_memory(machine.root)
    log: list[Operation] = pickle.loads(log_file.read_bytes())
    return log, Tree(found.files, frozenset(path for path in found.folders if path))


def forbidden(log: list[Operation], tree: Tree) -> list[str]:
    disk = Disk({}, [])
    for operation in log:
        disk.apply(operation)
    # A dead owner's lease is taken away behind the recorder's back; nothing rests on it.
    return [problem for problem in disk.forbids(tree) if "lease.json" not in problem]


def mutating_calls(place: Path, live: Callable[[Life], object]) -> int:
    life = Life(place)
    live(life)
    return sum(operation.name != "mark" for operation in life.log)


def test_a_real_power_cut_breaks_no_promise_and_leaves_what_the_model_allows(
    machine: Machine, warm: Warm, place: Path
) -> None:
    total = mutating_calls(place, lambda life: life.live())
    points = sorted(random.Random(machine.kind).sample(range(2, total + 1), CUTS))
    lost = 0
    for n in points:
        log, tree = cut(machine, warm, n, True, place.with_suffix(".log"))
        where = f"{machine.kind}, cut before call {n}"
        assert forbidden(log, tree) == [], where
        marks = [operation.path for operation in log if operation.name == "mark"]
        broken = broken_after_cut(tree, promised(marks), thorough=True)
        assert [str(problem) for problem in broken] == [], where
        lost += any(path not in tree.files for path in _written(log) if "lease" not in path)
    assert lost > 0, "no cut lost anything: the power was not really cut"
    print(
        f"\n{machine.kind}: {len(points)} real power cuts among {total} calls; {lost} of them lost something unsynced"
    )


def _written(log: list[Operation]) -> set[str]:
    """Files that were there when the power went, synced or not."""
    there: set[str] = set()
    for operation in log:
        if operation.name in ("open", "link"):
            there.add(operation.path)
        elif operation.name == "unlink":
            there.discard(operation.path)
        elif operation.name == "rename":
            old, new = operation.source or "", operation.path
            moved = {path for path in there if path == old or path.startswith(f"{old}/")}
            there = (there - moved) | {new + path[len(old) :] for path in moved}
    return there


def test_without_any_fsync_a_real_power_cut_loses_what_was_acknowledged(
    machine: Machine, warm: Warm, place: Path
) -> None:
    log, tree = cut(machine, warm, 0, False, place.with_suffix(".log"))
    marks = [operation.path for operation in log if operation.name == "mark"]
    broken = {problem.invariant for problem in broken_after_cut(tree, promised(marks), thorough=False)}
    print(f"\n{machine.kind} without any fsync: {sorted(broken)} broken")
    assert broken & {"store", "takes over", "acknowledged"}
