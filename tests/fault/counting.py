"""How many mutating calls something makes: by the seam in the store, and by strace, which knows nothing of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from onward.testing.faults import CountingSyscalls
from onward.testing.seam import Call

from . import lives
from .warm import TESTS

PATH = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
TRACED = (
    "openat,open,creat,mkdirat,mkdir,write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,sync_file_range,linkat,link,"
    "symlinkat,symlink,renameat,renameat2,rename,unlinkat,unlink,rmdir,fchmod,fchmodat,chmod,ftruncate,truncate,"
    "fallocate,copy_file_range,sendfile,utimensat,fsetxattr"
)
SCRIPT = """
import pathlib, sys
from fault import lives, state
state.many_small_files()
lives.LIVES[sys.argv[1]](print, pathlib.Path(sys.argv[2]), lives.Syscalls)
"""
SYSTEM_CALLS = {"open": "openat", "mkdir": "mkdirat", "link": "linkat", "unlink": "unlinkat", "rmdir": "unlinkat"}
"""The seam's names of calls whose system calls have others."""


def calls_of(life: str, root: Path) -> list[Call]:
    """The mutating calls of a life that ends well, as the seam sees them."""
    counting = CountingSyscalls()
    lives.LIVES[life](lambda _: None, root, lambda: counting)
    return counting.log


def strace(log: Path) -> list[str]:
    """The start of a command that is to be watched."""
    return ["strace", "-f", "-y", "-qq", "-s", "0", "-o", str(log), "-e", f"trace={TRACED}"]


def strace_count(life: str, root: Path, log: Path) -> dict[str, int]:
    """The system calls with which a life touches its store to change it, as strace sees them."""
    command = [*strace(log), sys.executable, "-c", SCRIPT, life, str(root)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": PATH}, capture_output=True)
    return count_changes(log, root)


def count_changes(log: Path, root: Path) -> dict[str, int]:
    """The system calls in an strace log that change something below ``root``, by name; also those that failed."""
    counts: dict[str, int] = {}
    for line in log.read_text(errors="replace").splitlines():
        found = re.match(r"\d+ +(\w+)\((.*)", line)
        if found is None or str(root) not in found[2] or (found[1] == "openat" and "O_CREAT" not in found[2]):
            continue
        name = "renameat" if found[1] == "renameat2" else found[1]
        counts[name] = counts.get(name, 0) + 1
    return counts


def by_system_call(calls: list[Call]) -> dict[str, int]:
    """The seam's calls counted under the names that strace gives them."""
    counts: dict[str, int] = {}
    for call in calls:
        name = {"rename": "renameat"}.get(call.name, SYSTEM_CALLS.get(call.name, call.name))
        counts[name] = counts.get(name, 0) + 1
    return counts
