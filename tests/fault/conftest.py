from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onward.save.plan import plan

from . import lives
from .state import SMALL_FILES
from .warm import Warm

SHM = Path("/dev/shm")
Templates = Callable[..., Path]


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in this process several shard files are written, but only while these tests run."""
    monkeypatch.setitem(plan.__kwdefaults__, "smallest", SMALL_FILES)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    with Warm() as server:
        yield server


@pytest.fixture(scope="session")
def _fast() -> Iterator[Path]:
    """A folder where an fsync costs nothing: what a kill leaves does not depend on the medium."""
    usable = SHM.is_dir() and os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free > 1 << 28
    folder = Path(tempfile.mkdtemp(prefix="onward-fault-", dir=SHM if usable else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def place(_fast: Path, small_files: None) -> Iterator[Path]:
    """An empty folder for one test; what is saved there fills several shard files."""
    folder = Path(tempfile.mkdtemp(dir=_fast))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def templates(_fast: Path, warm: Warm) -> Templates:
    """Stores whose run has committed the given steps, each made once; to be copied, not changed."""
    made: dict[tuple[int, ...], Path] = {}

    def template(*steps: int) -> Path:
        if steps not in made:
            root = _fast / ("template" + "".join(f"-{step}" for step in steps))
            assert warm.run(lives.make, root, steps).status == 0
            made[steps] = root
        return made[steps]

    return template
