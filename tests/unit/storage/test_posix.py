"""The POSIX store against refusals of the kernel: nothing is left behind, every error says what and where."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from onward.errors import Damaged, StorageError
from onward.storage.base import AlreadyExists, Barrier, NotFound, walk_files
from onward.storage.posix import PosixStore
from onward.storage.syscalls import Syscalls


class Refusing(Syscalls):
    """Raises an error at the n-th call of one name, or cuts writes short."""

    def __init__(self, call: str = "", number: int = 0, *, at: int = 1, block: int = 0) -> None:
        self.call, self.number, self.at, self.block = call, number, at, block
        self.seen: list[tuple[str, str]] = []

    def before(self, call: str, path: str) -> None:
        self.seen.append((call, path))
        if call == self.call and sum(name == call for name, _ in self.seen) == self.at:
            raise OSError(self.number, os.strerror(self.number))

    def write(self, fd: int, data: Any, path: str) -> int:
        self.before("write", path)
        return os.write(fd, data[: self.block] if self.block else data)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def put(store: PosixStore, path: str = "file", data: bytes = b"content") -> None:
    store.create(path, data, content=Barrier.META, name=Barrier.RUN_FOLDER)


@pytest.mark.parametrize("publish", ["link", "rename"])
@pytest.mark.parametrize("call", ["open", "write", "fsync", "link", "rename", "unlink"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_refused_creation_leaves_no_descriptor_and_no_temporary_file(
    fast_path: Path, publish: Any, call: str, number: int
) -> None:
    """The name is there with all bytes or not at all, and a second try succeeds or finds it."""
    store = PosixStore(fast_path, publish=publish, calls=Refusing(call, number))
    before = open_files()
    if (publish, call) in {("link", "rename"), ("rename", "link")}:
        put(store)
        return
    refused = pytest.raises(StorageError, match=errno.errorcode[number])
    with refused:
        put(store)
    assert open_files() == before
    there = [item.name for item in store.list("")]
    if call == "unlink" or (call == "fsync" and there == ["file"]):
        assert "file" in there
    else:
        assert there == []
        put(store)
    assert store.read("file", limit=100) == b"content"


@pytest.mark.parametrize("call", ["open", "write", "rename"])
def test_a_refused_replacement_leaves_the_old_file_and_nothing_else(fast_path: Path, call: str) -> None:
    """A lease beats for weeks: on a full disk nothing may pile up, neither files nor descriptors."""
    put(PosixStore(fast_path))
    before = open_files()
    for _ in range(5):
        store = PosixStore(fast_path, calls=Refusing(call, errno.ENOSPC))
        with pytest.raises(StorageError, match="ENOSPC"):
            store.replace("file", b"new")
    assert open_files() == before
    assert os.listdir(fast_path) == ["file"]
    assert store.read("file", limit=100) == b"content"


@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_short_writes_are_continued_until_all_is_written(fast_path: Path, block: int) -> None:
    store = PosixStore(fast_path, calls=Refusing(block=block))
    put(store, data=b"0123456789" * 30)
    sink = store.open_new("other")
    sink.write(memoryview(b"0123456789" * 30))
    assert sink.finish(Barrier.SHARD) == 300
    assert store.read("file", limit=1000) == store.read("other", limit=1000) == b"0123456789" * 30


def test_a_failed_fsync_is_never_repeated_on_the_same_file(fast_path: Path) -> None:
    """After an error the kernel has dropped the dirty pages: a second fsync would report success for lost bytes."""
    calls = Refusing("fsync", errno.EIO)
    store = PosixStore(fast_path, calls=calls)
    sink = store.open_new("file")
    sink.write(b"x")
    with pytest.raises(StorageError, match="EIO"):
        sink.finish(Barrier.SHARD)
    sink.abandon()
    with pytest.raises(StorageError):
        put(PosixStore(fast_path, calls=Refusing("fsync", errno.EIO)), "entry")
    assert [path for call, path in calls.seen if call == "fsync"] == ["file"]
    assert [item.name for item in store.list("")] == ["file"]


def test_an_error_at_close_counts(fast_path: Path) -> None:
    """A network filesystem tells at close what went wrong with earlier writes."""

    class LateErrors(Syscalls):
        def close(self, fd: int, path: str) -> None:
            os.close(fd)
            raise OSError(errno.EDQUOT, "quota")

    store = PosixStore(fast_path, calls=LateErrors())
    sink = store.open_new("file")
    sink.write(b"x")
    with pytest.raises(StorageError, match="EDQUOT"):
        sink.finish(Barrier.SHARD)
    sink.abandon()
    with pytest.raises(StorageError, match="EDQUOT"):
        put(store, "other")
    assert [item.name for item in store.list("")] == ["file"]


def test_a_mkdir_that_took_effect_and_was_answered_with_exists_is_no_error(fast_path: Path) -> None:
    """T55: a distributed filesystem repeats a mkdir and reports its own folder; it may show it late."""

    class Twice(Syscalls):
        def mkdir(self, name: str, mode: int, dir_fd: int, path: str) -> None:
            os.mkdir(name, mode, dir_fd=dir_fd)
            os.mkdir(name, mode, dir_fd=dir_fd)

    store = PosixStore(fast_path, calls=Twice())
    store.make_folder("folder", exist_ok=True)
    with pytest.raises(AlreadyExists):
        store.make_folder("alone")
    assert {item.name for item in store.list("")} == {"folder", "alone"}


@pytest.mark.parametrize("what", ["fifo", "folder", "link", "socket", "dangling"])
def test_what_is_no_regular_file_is_not_read_and_never_waited_for(fast_path: Path, what: str) -> None:
    """Opening a FIFO would wait for a writer for ever."""
    store = PosixStore(fast_path)
    put(store, "target")
    path = fast_path / "odd"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            os.chdir(fast_path)
            server.bind("odd")
            os.chdir("/")
    else:
        path.symlink_to("target" if what == "link" else "nowhere")
    for act in (lambda: store.read("odd", limit=100), lambda: store.read_into("odd", 0, memoryview(bytearray(1)))):
        with pytest.raises((Damaged, StorageError), match="odd"):
            act()
    kind = {"fifo": "other", "socket": "other", "folder": "folder"}.get(what, "link")
    assert store.stat("odd").kind == kind
    assert {item.name: item.kind for item in store.list("")} == {"odd": kind, "target": "file"}


def test_a_folder_that_is_a_link_is_a_dead_end_at_every_depth(fast_path: Path) -> None:
    root, outside = fast_path / "store", fast_path / "outside"
    (root / "a").mkdir(parents=True)
    (outside / "b").mkdir(parents=True)
    (outside / "b" / "file").write_bytes(b"secret")
    (root / "a" / "b").symlink_to(outside / "b")
    store = PosixStore(root)
    for act in (
        lambda: store.read("a/b/file", limit=100),
        lambda: store.list("a/b"),
        lambda: store.make_folder("a/b/new"),
        lambda: put(store, "a/b/new"),
        lambda: store.remove("a/b/file"),
        lambda: store.sync_folder("a/b", Barrier.META),
    ):
        with pytest.raises(Damaged, match="a/b"):
            act()
    assert [path for path, _ in walk_files(store, "a")] == ["b"]
    store.remove("a/b")
    assert (outside / "b" / "file").read_bytes() == b"secret"


def test_the_root_itself_may_be_reached_through_a_link(fast_path: Path) -> None:
    """It is the user's choice: only what lies below the root is not believed."""
    (fast_path / "real").mkdir()
    (fast_path / "link").symlink_to("real")
    store = PosixStore(fast_path / "link")
    put(store)
    assert (fast_path / "real" / "file").read_bytes() == b"content"


def test_no_file_is_ever_written_elsewhere(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T68: TMPDIR is on another filesystem, from which a rename would fail; nothing goes there."""
    elsewhere = fast_path / "tmp"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    root = fast_path / "store"
    root.mkdir()
    calls = Refusing()
    store = PosixStore(root, calls=calls)
    put(store)
    store.replace("file", b"x")
    assert os.listdir(elsewhere) == []
    assert {os.path.dirname(path) for _, path in calls.seen} == {""}


def test_errors_name_the_file_and_the_code(fast_path: Path) -> None:
    store = PosixStore(fast_path, calls=Refusing("open", errno.EACCES))
    with pytest.raises(StorageError, match=r"create file:///.*/file: Permission denied \(EACCES\)"):
        store.open_new("file")
    with pytest.raises(NotFound, match=r"open file:///.*/nothing: not found"):
        PosixStore(fast_path).read("nothing", limit=1)


def test_private_is_the_default(fast_path: Path) -> None:
    before = os.umask(0)
    try:
        store = PosixStore(fast_path)
        store.make_folder("folder")
        put(store, "folder/file")
    finally:
        os.umask(before)
    assert stat.S_IMODE((fast_path / "folder").stat().st_mode) == 0o700
    assert stat.S_IMODE((fast_path / "folder" / "file").stat().st_mode) == 0o600
