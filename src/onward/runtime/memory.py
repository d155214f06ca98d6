"""How much memory can still be had: the machine's own figure, and the limit of every enclosing cgroup."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, str]:
    """Bytes that can be had, and which limit says so; (None, "") when nothing does.

    A container's limit is not in /proc/meminfo: a job that reads only MemAvailable is killed at its cgroup's limit.
    """
    found: list[tuple[int, str]] = []
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append((int(line.split()[1]) * 1024, "MemAvailable"))
    found.extend(_cgroup_room(proc, cgroups))
    return min(found, default=(None, ""), key=lambda pair: pair[0] if pair[0] is not None else 0)


def _cgroup_room(proc: Path, cgroups: Path) -> list[tuple[int, str]]:
    rooms: list[tuple[int, str]] = []
    with suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                rooms.extend(_rooms(cgroups, path, "memory.max", "memory.current", "inactive_file"))
            elif "memory" in controllers.split(","):
                base = cgroups / "memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                rooms.extend(_rooms(base, path, *names))
    return rooms


def _rooms(base: Path, path: str, limit_file: str, usage_file: str, cache_field: str) -> list[tuple[int, str]]:
    rooms: list[tuple[int, str]] = []
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):  # the tightest limit may be any ancestor's
        folder = base.joinpath(*parts[:depth])
        with suppress(OSError, ValueError):
            text = (folder / limit_file).read_text().strip()
            if text == "max" or int(text) >= 1 << 60:
                continue
            usage = int((folder / usage_file).read_text())
            with suppress(OSError, ValueError):
                for line in (folder / "memory.stat").read_text().splitlines():
                    if line.startswith(f"{cache_field} "):
                        usage -= int(line.split()[1])  # cache that the kernel gives back when asked
            rooms.append((max(int(text) - usage, 0), f"the cgroup limit of {folder}"))
    return rooms
