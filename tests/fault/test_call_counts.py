"""There are as many crash points as strace counts system calls: nothing changes the disk behind the seam's back."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.storage.syscalls import MUTATING, Syscalls
from onward.testing.seam import Wrapper

from . import lives
from .conftest import Templates
from .counting import by_system_call, calls_of, strace_count
from .harness import copy_store
from .warm import Warm


@pytest.mark.parametrize("life", ["saves", "deletes", "recovers"])
def test_there_are_as_many_crash_points_as_strace_counts_system_calls(
    life: str, templates: Templates, place: Path, tmp_path: Path
) -> None:
    template = templates(10, 12, 15)
    seam = calls_of(life, copy_store(template, place / "count"))
    counted = strace_count(life, copy_store(template, tmp_path / "traced"), tmp_path / "strace.log")
    assert counted == by_system_call(seam)
    assert sum(counted.values()) == len(seam) > 20
    print(f"\n{life}: {len(seam)} mutating calls, {sum(counted.values())} system calls in strace: {counted}")


def test_there_are_as_many_where_every_folder_needs_its_mode_set(warm: Warm, place: Path, tmp_path: Path) -> None:
    """In a store for a group each new folder takes one more call."""
    template = place / "group"
    assert warm.run(lives.modes, template, "group", 0o022).status == 0
    seam = calls_of("saves", copy_store(template, place / "count"))
    counted = strace_count("saves", copy_store(template, tmp_path / "traced"), tmp_path / "strace.log")
    assert counted == by_system_call(seam)
    assert counted["fchmod"] > 3


def test_faults_can_be_put_around_every_call_that_the_seam_has() -> None:
    seam = {name for name in vars(Syscalls) if not name.startswith("_")}
    assert seam == {*MUTATING, "open_new", "before", "rename_noreplace", "set_direct", "close", "pread"} - {"open"}
    assert {name for name in vars(Wrapper) if not name.startswith("_")} == (seam - {"before"}) | {"around"}
