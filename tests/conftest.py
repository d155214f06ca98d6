"""Makes ``support`` importable from every test, and gives the fixtures that most of them use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.catalog.incarnation import Incarnation
from onward.storage.memory import MemoryStore
from onward.storage.posix import PosixStore
from support import memory_store, posix_store, start


@pytest.fixture
def store() -> MemoryStore:
    """An empty store in memory."""
    return memory_store()


@pytest.fixture
def disk(tmp_path: Path) -> PosixStore:
    """An empty store in a folder."""
    return posix_store(tmp_path / "store")


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
