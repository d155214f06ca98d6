"""What every store can do, and the facts about it that others read before they rely on it.

Paths are relative, ``/``-separated, and have passed ``format/names.py``; a store never follows a link inside its
root. Every barrier (fsync) carries the failure that it prevents, so that a test can remove each one and see that
failure happen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, runtime_checkable

from onward.errors import Damaged, StorageError

Bytes = bytes | bytearray | memoryview


class NotFound(StorageError):
    """The file or folder is not there."""

    code = "not-found"


class AlreadyExists(StorageError):
    """Create-if-absent lost: the name is taken."""

    code = "already-exists"


class Barrier(StrEnum):
    """Every fsync that is made, by the failure that it prevents."""

    SHARD = "a committed checkpoint whose tensor bytes never reached the disk"
    META = "a committed checkpoint whose record, index, state, layout or manifest is empty after a power cut"
    ATTEMPT_FOLDER = "a committed checkpoint whose files have no name after a power cut"
    PUBLISHED = "a ledger entry that names a folder which is still called .writing after a power cut"
    ENTRY = "a ledger entry that is there and empty after a power cut"
    LEDGER_COMMIT = "an acknowledged checkpoint that is gone after a power cut"
    LEDGER_DELETE = "a checkpoint still listed, but half deleted, after a power cut"
    LEDGER_BELIEVED = "work built on an entry that vanishes with the power"
    RUN_FOLDER = "a run whose folders vanish with the power, and its commits with them"
    ADOPTED = "an adopted checkpoint whose copied bytes never reached the disk"
    RECEIPT = "a receipt or an attempt's story that is there and empty after a power cut"
    DELETED_MANIFEST = "a deleted checkpoint of which no description is left"


@dataclass(frozen=True)
class Capabilities:
    """Facts about a store, declared or probed.

    Attributes:
        folders: Has real folders that can be renamed in one act.
        create_if_absent: Of many concurrent creations of one name, exactly one wins.
        durable: A barrier puts bytes and names on stable storage.
        local: Files have a path on this machine (``sha256sum`` and hard links work).
    """

    folders: bool
    create_if_absent: bool
    durable: bool
    local: bool


@dataclass(frozen=True)
class Entry:
    """One item of a folder. ``mtime`` is seconds since the epoch, for people; nothing is decided by it."""

    name: str
    kind: Literal["file", "folder", "link", "other"]
    size: int
    mtime: float


class Sink(Protocol):
    """A new file being written. Nothing of it counts before ``finish`` has returned."""

    def write(self, data: Bytes) -> None:
        """Appends all of ``data``; raises StorageError when the store refuses any of it."""
        ...

    def finish(self, barrier: Barrier) -> int:
        """Makes the bytes durable, checks and returns the size, and closes the file."""
        ...

    def abandon(self) -> None:
        """Closes the file without any promise; never raises."""
        ...


@runtime_checkable
class Store(Protocol):
    """Bytes by path. All methods raise ``StorageError`` (or ``NotFound``, ``AlreadyExists``) that names the path."""

    url: str
    capabilities: Capabilities

    def read(self, path: str, *, limit: int) -> bytes:
        """The whole file; refuses one larger than ``limit`` bytes before it allocates anything."""
        ...

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        """Fills ``view`` from byte ``start``; a file too short for it is an error."""
        ...

    def stat(self, path: str) -> Entry:
        """Facts of one item; a link is not followed."""
        ...

    def list(self, folder: str) -> list[Entry]:
        """The items of a folder, sorted by name; ``NotFound`` when there is no such folder."""
        ...

    def create(self, path: str, data: bytes, *, content: Barrier, name: Barrier | None) -> None:
        """Creates a file at once with all its bytes, if and only if the name is free.

        ``content`` is the barrier on the bytes, ``name`` the one on the folder that holds the name; None leaves
        the name to a later ``sync_folder``.
        """
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Puts a file in place of another in one act, without barriers. Only for what no promise rests on."""
        ...

    def open_new(self, path: str, *, direct: bool = False) -> Sink:
        """Opens a file that must not exist yet, for writing.

        ``direct`` asks for writes past the page cache; for large files, where the store can do it.
        """
        ...

    def make_folder(self, path: str, *, exist_ok: bool = False) -> None:
        """Makes one folder; its parent must be there."""
        ...

    def sync_folder(self, path: str, barrier: Barrier) -> None:
        """Makes the names in a folder durable."""
        ...

    def sync_file(self, path: str, barrier: Barrier) -> None:
        """Makes the bytes of a file durable that somebody else has written."""
        ...

    def rename_folder(self, path: str, to: str) -> None:
        """Renames a folder in one act; ``AlreadyExists`` when the target is there."""
        ...

    def remove(self, path: str) -> None:
        """Removes a file or a link (never its target); nothing happens when it is not there."""
        ...

    def remove_folder(self, path: str) -> None:
        """Removes an empty folder; nothing happens when it is not there."""
        ...

    def drop_cache(self, path: str) -> None:
        """Asks that the next read comes from the medium, not from memory; a request, not a promise."""
        ...

    def free_bytes(self) -> int | None:
        """Free space for this process, in bytes; None when the store cannot say."""
        ...


DEEPEST = 64
"""Folders below a checkpoint's are at most a few deep; one planted deeper must not exhaust the stack."""


def remove_tree(store: Store, folder: str, depth: int = 0) -> None:
    """Removes a folder with all that is in it. Links are removed, never followed.

    Raises:
        Damaged: Folders are nested deeper than any checkpoint's.
    """
    _require_shallow(folder, depth)
    try:
        entries = store.list(folder)
    except NotFound:
        return
    for entry in entries:
        path = f"{folder}/{entry.name}"
        if entry.kind == "folder":
            remove_tree(store, path, depth + 1)
        else:
            store.remove(path)
    store.remove_folder(folder)


def sync_tree(store: Store, folder: str, barrier: Barrier, depth: int = 0) -> None:
    """Makes a folder durable that somebody else has written, with all that is in it."""
    _require_shallow(folder, depth)
    for entry in store.list(folder):
        path = f"{folder}/{entry.name}"
        if entry.kind == "folder":
            sync_tree(store, path, barrier, depth + 1)
        elif entry.kind == "file":
            store.sync_file(path, barrier)
    store.sync_folder(folder, barrier)


def walk_files(store: Store, folder: str, prefix: str = "", depth: int = 0) -> list[tuple[str, Entry]]:
    """Every item below a folder that is not a folder, with its path relative to it."""
    _require_shallow(folder, depth)
    found: list[tuple[str, Entry]] = []
    for entry in store.list(folder):
        relative = f"{prefix}{entry.name}"
        if entry.kind == "folder":
            found.extend(walk_files(store, f"{folder}/{entry.name}", f"{relative}/", depth + 1))
        else:
            found.append((relative, entry))
    return found


def _require_shallow(folder: str, depth: int) -> None:
    if depth > DEEPEST:
        raise Damaged(f"{folder[:200]}… is nested more than {DEEPEST} folders deep")
