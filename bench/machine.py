"""What a result was measured on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "torch_checkpointing", "safetensors", "numpy", "xxhash", "msgspec", "onward")


def machine(folder: Path) -> dict[str, object]:
    """Processor, memory, kernel, and the filesystem of the folder that is written to."""
    return {
        "processor": _field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "kernel": platform.release(),
        "filesystem": filesystem(folder),
        "load_at_start": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Versions of everything that was measured."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if found["onward"] == "not installed":
        from onward import __version__

        found["onward"] = __version__
    return found


def today() -> str:
    """The time of the measurement, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def filesystem(folder: Path) -> str:
    """The type of the filesystem that holds a folder."""
    best, kind = "", "unknown"
    real = str(folder.resolve())
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        place, found = line.split()[1:3]
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, found
    return kind


def _field(path: Path, name: str) -> str | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
