"""Checks that other programs make: the comparison without Onward, coreutils, and a bit that is flipped for real."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.demo import compare
from onward.demo.process import DemoFailed
from onward.errors import EXIT_FINDING
from onward.format.names import SHARD_SUFFIX, SUMS


@dataclass(frozen=True)
class Comparison:
    """What ``compare.py`` found, run as a process of its own that has not imported Onward."""

    command: str
    parts: dict[str, dict[str, Any]]

    def equal(self, part: str) -> bool:
        """Whether this part is equal to the last bit, over at least one thing that was compared."""
        return self.parts[part]["equal"] is True

    @property
    def all_equal(self) -> bool:
        """Whether every part is."""
        return all(self.equal(part) for part in self.parts)


@dataclass(frozen=True)
class Flip:
    """A single bit that was turned over."""

    file: str
    offset: int
    bit: int


@dataclass(frozen=True)
class Sums:
    """What ``sha256sum -c`` said of a checkpoint's folder."""

    command: str
    ok: bool
    files: int
    output: str


def compare_runs(reference: Path, other: Path, *, log_only: bool = False) -> Comparison:
    """Compares two logs, and the final states beside them unless ``log_only``.

    Raises:
        DemoFailed: The comparison did not run, or ran with Onward in its process.
    """
    options = ["--log-only"] if log_only else []
    command = [sys.executable, "-I", compare.__file__, *options, str(reference), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, EXIT_FINDING):
        raise DemoFailed(f"the comparison ended with {done.returncode}:\n{done.stderr}")
    answer = json.loads(done.stdout)
    if not answer["without_onward"]:
        raise DemoFailed("the comparing process has imported onward, so it is no independent witness")
    return Comparison(" ".join(command), answer["compared"])


def flip_bit(checkpoint: Path, chance: random.Random) -> Flip:
    """Turns over one random bit of tensor data in one random shard file."""
    path = chance.choice(sorted(checkpoint.rglob(f"*{SHARD_SUFFIX}")))
    with path.open("r+b") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
        offset = chance.randrange(header, path.stat().st_size)
        bit = chance.randrange(8)
        file.seek(offset)
        before = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([before ^ (1 << bit)]))
    return Flip(str(path.relative_to(checkpoint)), offset, bit)


def check_sums(checkpoint: Path) -> Sums:
    """Runs coreutils on a checkpoint's folder; every file in it but the list itself has to be on the list."""
    command = ["sha256sum", "--strict", "-c", SUMS]
    done = subprocess.run(command, cwd=checkpoint, capture_output=True, text=True, check=False)
    passed = {line.removesuffix(": OK") for line in done.stdout.splitlines() if line.endswith(": OK")}
    present = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()} - {SUMS}
    ok = done.returncode == 0 and passed == present and len(passed) > 0
    return Sums(f"cd {checkpoint} && {' '.join(command)}", ok, len(passed), done.stdout + done.stderr)
