"""The version of the code and the machine it runs on; what cannot be found out is left out."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from onward._version import __version__
from onward.format.digests import sha256
from onward.records import JsonTree

GIT_SECONDS = 0.8
"""Longest time that git may take in all, so that a huge or stuck working tree does not hold up a start."""

_MOST_UNTRACKED = 100


def code_version(script: Path | None = None) -> JsonTree:
    """The script's digest and, inside a git repository, commit, whether and how the working tree differs from it.

    Args:
        script: The program; by default the one that is running.
    """
    found = script or _main_script()
    version: dict[str, JsonTree] = {"script": None, "script_sha256": None, "git": None}
    if found is not None:
        try:
            version.update(script=found.name, script_sha256=sha256(found.read_bytes()))
        except OSError:  # a program run from a zip file, or deleted since it started
            version["script"] = found.name
    # No git, no repository, no commit yet, or too slow: the script's digest has to do.
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        version["git"] = _git_version(found.parent if found is not None else Path.cwd())
    return version


def _main_script() -> Path | None:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).absolute() if file else None


def _git_version(folder: Path) -> JsonTree:
    deadline = time.monotonic() + GIT_SECONDS
    # Set inside a git hook, GIT_DIR and its like would answer for another repository.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments: str) -> bytes:
        # Read-only, and runs nothing that the repository's configuration names: no lock on the index, no file
        # system monitor, no external diff.
        return subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=max(0.0, deadline - time.monotonic()),
            env={**clean, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
        ).stdout

    commit = git("rev-parse", "--verify", "HEAD").decode().strip()
    changes = git("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--full-index")
    listing = git("ls-files", "--others", "--exclude-standard", "--full-name", "-z", ":/")
    untracked = sorted(filter(None, listing.decode("utf-8", "replace").split("\0")))
    return {
        "commit": commit,
        "dirty": bool(changes or untracked),
        "diff_sha256": sha256(changes) if changes else None,
        "untracked": untracked[:_MOST_UNTRACKED],
        "untracked_count": len(untracked),
    }


def environment() -> JsonTree:
    """Versions and hardware; nothing that names the host or its user."""
    return {
        "onward": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "accelerator": _accelerator(),
    }


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not known on this system
        return None


def _accelerator() -> JsonTree:
    try:
        current = torch.accelerator.current_accelerator(check_available=True)
        if current is None:
            return None
        facts: dict[str, JsonTree] = {"kind": current.type, "count": torch.accelerator.device_count()}
        module = torch.get_device_module(current.type)
        if hasattr(module, "get_device_properties"):
            properties = module.get_device_properties(0)
            facts.update(name=properties.name, memory_bytes=properties.total_memory)
        return {**facts, "toolkit": torch.version.cuda or getattr(torch.version, "hip", None)}
    except (AttributeError, RuntimeError):  # a driver that does not answer must not stop a run
        return None
