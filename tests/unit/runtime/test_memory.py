"""How much memory is left: the machine's figure or the tightest cgroup's, on made-up trees of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.runtime.memory import available

MIB = 1024 * 1024


class Machine:
    """A /proc and a /sys/fs/cgroup to be filled."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroups.mkdir()

    def meminfo(self, available_kb: int | str) -> None:
        text = f"MemTotal:       99999999 kB\nMemFree: 1 kB\nMemAvailable:   {available_kb} kB\nCached: 7 kB\n"
        (self.proc / "meminfo").write_text(text)

    def member(self, text: str) -> None:
        (self.proc / "self" / "cgroup").write_text(text)

    def group(self, path: str, **files: object) -> None:
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name.replace("__", ".")).write_text(f"{value}\n")

    def look(self) -> tuple[int | None, str]:
        return available(self.proc, self.cgroups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_limit_the_machines_own_figure_counts(machine: Machine) -> None:
    machine.meminfo(1024)
    assert machine.look() == (MIB, "MemAvailable")


def test_a_container_is_limited_by_its_cgroup_which_meminfo_does_not_show(machine: Machine) -> None:
    """Version 2: the limit minus what is used, cache that can be given back not counted."""
    machine.meminfo(64 * 1024 * 1024)
    machine.member("0::/job\n")
    stat = f"anon 5\ninactive_file {10 * MIB}\nactive_file 3"
    machine.group("job", memory__max=100 * MIB, memory__current=80 * MIB, memory__stat=stat)
    assert machine.look() == (30 * MIB, f"the cgroup limit of {machine.cgroups}/job")


def test_the_tightest_limit_may_be_an_ancestors(machine: Machine) -> None:
    machine.meminfo(64 * 1024 * 1024)
    machine.member("0::/slice/job/step\n")
    machine.group("slice", memory__max=50 * MIB, memory__current=45 * MIB)
    machine.group("slice/job", memory__max="max", memory__current=40 * MIB)
    machine.group("slice/job/step", memory__max=90 * MIB, memory__current=1)
    assert machine.look() == (5 * MIB, f"the cgroup limit of {machine.cgroups}/slice")


def test_inside_its_own_namespace_a_process_sees_its_group_as_the_root(machine: Machine) -> None:
    machine.meminfo(64 * 1024 * 1024)
    machine.member("0::/\n")
    machine.group("", memory__max=20 * MIB, memory__current=5 * MIB)
    assert machine.look()[0] == 15 * MIB


def test_version_one_is_understood(machine: Machine) -> None:
    machine.meminfo(64 * 1024 * 1024)
    machine.member("12:cpu,cpuacct:/\n7:memory:/docker/abc\n1:name=systemd:/x:y\n")
    files = {"memory__limit_in_bytes": 60 * MIB, "memory__usage_in_bytes": 50 * MIB}
    machine.group("memory/docker/abc", **files, memory__stat=f"cache 9\ntotal_inactive_file {20 * MIB}")
    machine.group("memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=50 * MIB)
    assert machine.look() == (30 * MIB, f"the cgroup limit of {machine.cgroups}/memory/docker/abc")


def test_a_group_over_its_limit_has_no_room_rather_than_a_negative_one(machine: Machine) -> None:
    machine.meminfo(1024)
    machine.member("0::/job\n")
    machine.group("job", memory__max=10, memory__current=20)
    assert machine.look()[0] == 0


@pytest.mark.parametrize(
    ("meminfo", "member"),
    [
        ("", ""),
        ("MemAvailable:\n", "nonsense\n"),
        ("MemAvailable: many kB\n", "0:\n0::\n:::\n"),
        ("MemTotal: 5 kB\n", "\n"),
    ],
)
def test_a_machine_that_says_nothing_sensible_limits_nothing(machine: Machine, meminfo: str, member: str) -> None:
    (machine.proc / "meminfo").write_text(meminfo)
    machine.member(member)
    assert machine.look() == (None, "")


def test_files_that_cannot_be_read_are_passed_over(machine: Machine) -> None:
    assert machine.look() == (None, "")
    machine.meminfo(1024)
    machine.member("0::/job\n")
    machine.group("job", memory__max="many", memory__current="x")
    assert machine.look() == (MIB, "MemAvailable")


def test_this_machine_has_some_memory_left() -> None:
    room, source = available()
    assert room is None or room > 0
    assert bool(source) == (room is not None)
