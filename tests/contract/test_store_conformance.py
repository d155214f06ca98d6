"""Every store that is shipped does what every store must do."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Literal

import pytest

from onward.errors import Damaged
from onward.storage.base import Barrier, Store
from onward.storage.memory import MemoryStore
from onward.storage.posix import PosixStore
from onward.storage.wrappers import ReadOnlyStore
from onward.testing.conformance import ReadOnlyConformance, StoreConformance, fill


class _Disk:
    """Gives each store a folder of its own."""

    @pytest.fixture(autouse=True)
    def _folders(self, fast_path: Path) -> None:
        self.folders = (fast_path / str(number) for number in itertools.count())

    def folder(self) -> Path:
        """A new folder, with something beside it that no test may reach."""
        outer = next(self.folders)
        (outer / "store").mkdir(parents=True)
        (outer / "outside").write_bytes(b"not ours")
        return outer / "store"


class TestMemoryStore(StoreConformance):
    def make(self) -> Store:
        return MemoryStore("test")


class TestPosixStoreThatLinks(_Disk, StoreConformance):
    publish: Literal["link", "rename"] = "link"

    def make(self) -> PosixStore:
        return PosixStore(self.folder(), publish=self.publish)

    def test_a_link_inside_the_store_leads_nowhere(self) -> None:
        """Neither as a file nor as a folder on the way, for reading or for writing."""
        store = self.make()
        os.symlink("../outside", store.root / "file")
        os.symlink("..", store.root / "folder")
        for path in ("file", "folder/outside"):
            with pytest.raises(Damaged, match=r"store/(file|folder)"):
                store.read(path, limit=100)
        with pytest.raises(Damaged, match="folder"):
            store.create("folder/new", b"x", content=Barrier.META, name=None)
        with pytest.raises(Damaged, match="folder"):
            store.list("folder")
        store.remove("file")
        store.replace("folder", b"a file now")
        assert (store.root.parent / "outside").read_bytes() == b"not ours"
        assert sorted(os.listdir(store.root.parent)) == ["outside", "store"]

    def test_a_relative_root_is_kept_through_a_change_of_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """T19: the store is opened as ``store``, then the process goes elsewhere."""
        root = self.folder()
        monkeypatch.chdir(root.parent)
        store = PosixStore("store", publish=self.publish)
        store.create("file", b"x", content=Barrier.META, name=None)
        monkeypatch.chdir("/")
        assert store.read("file", limit=10) == b"x"
        assert (root / "file").exists()

    @pytest.mark.parametrize(("mode", "file", "folder"), [("private", 0o600, 0o700), ("group", 0o640, 0o2750)])
    def test_modes_do_not_depend_on_the_umask(self, mode: Literal["private", "group"], file: int, folder: int) -> None:
        """T67: whoever starts the job with whichever umask, the same people can read its checkpoints."""
        for umask in (0o022, 0o002, 0o077, 0o777):
            store = PosixStore(self.folder(), mode=mode, publish=self.publish)
            before = os.umask(umask)
            try:
                store.make_folder("folder")
                store.create("folder/file", b"x", content=Barrier.META, name=None)
                store.open_new("folder/other").finish(Barrier.SHARD)
            finally:
                os.umask(before)
            assert (store.root / "folder").stat().st_mode & 0o7777 == folder
            assert {p.stat().st_mode & 0o7777 for p in (store.root / "folder").iterdir()} == {file}


class TestPosixStoreThatRenames(TestPosixStoreThatLinks):
    publish: Literal["link", "rename"] = "rename"


class TestPosixStoreThatWritesDirectly(StoreConformance):
    """On a real disk: filesystems in memory have no O_DIRECT."""

    @pytest.fixture(autouse=True)
    def _folders(self, tmp_path: Path) -> None:
        self.folders = (tmp_path / str(number) for number in itertools.count())

    def make(self) -> PosixStore:
        root = next(self.folders)
        root.mkdir()
        return PosixStore(root, direct_io=True)


class TestReadOnlyMemory(ReadOnlyConformance):
    def filled(self) -> Store:
        inner = MemoryStore("test")
        fill(inner)
        return ReadOnlyStore(inner)


class TestReadOnlyDisk(_Disk, ReadOnlyConformance):
    def filled(self) -> Store:
        inner = PosixStore(self.folder())
        fill(inner)
        return ReadOnlyStore(inner)
