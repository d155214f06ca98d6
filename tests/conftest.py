"""Makes ``support`` importable from every test, and gives the fixtures that most of them use."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.catalog.incarnation import Incarnation
from onward.storage.memory import MemoryStore
from onward.storage.posix import PosixStore
from support import memory_store, posix_store, start

SHM = Path("/dev/shm")


@pytest.fixture
def store() -> MemoryStore:
    """An empty store in memory."""
    return memory_store()


@pytest.fixture(scope="session")
def _memory_disk() -> Iterator[Path]:
    """A folder on a filesystem where a barrier costs nothing, if the machine has one."""
    usable = SHM.is_dir() and os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free > 1 << 28
    folder = Path(tempfile.mkdtemp(prefix="onward-test-", dir=SHM if usable else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def fast_path(_memory_disk: Path) -> Iterator[Path]:
    """A temporary folder for tests that write much and cut no power."""
    folder = Path(tempfile.mkdtemp(dir=_memory_disk))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def disk(fast_path: Path) -> PosixStore:
    """An empty store in a folder."""
    return posix_store(fast_path / "store")


@pytest.fixture
def run(store: MemoryStore) -> Iterator[Incarnation]:
    """A run in memory that was taken over."""
    incarnation = start(store)
    yield incarnation
    incarnation.end()


@pytest.fixture
def run_on_disk(disk: PosixStore) -> Iterator[Incarnation]:
    """A run in a folder that was taken over."""
    incarnation = start(disk)
    yield incarnation
    incarnation.end()
