"""Memory of a process and all that it started, seen from outside. Shared pages count once."""

from __future__ import annotations

import time
from pathlib import Path


class Sampler:
    """Samples proportional set sizes; call it with the process's id, again and again."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []

    def __call__(self, pid: int) -> None:
        self.samples.append((time.monotonic(), sum(map(_pss, _family(pid)))))

    def above(self, before: float, after: float) -> int:
        """Bytes at the highest sample between two instants, above the last sample before the first of them."""
        base = [size for instant, size in self.samples if instant <= before][-1]
        return max(size for instant, size in self.samples if before < instant <= after) - base


def _family(pid: int) -> list[int]:
    found = [pid]
    for parent in found:  # grows while it is walked
        for task in _listed(Path(f"/proc/{parent}/task")):
            try:
                text = (task / "children").read_text()
            except OSError:
                continue
            # Between its fork and its exec a child is its parent still, and shares all of its memory.
            found += [int(child) for child in text.split() if _command(int(child)) != _command(parent)]
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0
