"""A store's identity: creating it, and telling it from an empty mount point."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal, cast

from onward.catalog.stamp import now, token
from onward.errors import ConfigurationError, FormatError, StorageError, StoreMissing, StoreUnsuitable
from onward.format.codec import SMALL_LIMIT, decode_sealed, encode_sealed
from onward.format.names import RUNS, STORE_FILE
from onward.records import FORMAT, StoreRecord
from onward.storage.base import Barrier, NotFound, Store
from onward.storage.posix import FOLDER_MODES, Mode, PosixStore
from onward.storage.probe import Probe, probe
from onward.storage.registry import open_store


def init_store(url: str, *, mode: Mode = "private", tier: str = "home") -> tuple[StoreRecord, Probe]:
    """Creates a store at ``url`` after trying out what the place can do.

    The folder is made when it is not there. A place that is a store already is left as it is.

    Raises:
        StoreUnsuitable: The probe found that the place cannot be a home.
        ConfigurationError: A store is there already.
    """
    store = open_store(url, mode=mode)
    if isinstance(store, PosixStore):
        _make_root(store.root, FOLDER_MODES[mode])
    with suppress(StoreMissing):
        read_store_record(store)
        raise ConfigurationError(f"{store.url} is a store already", next_step="use it as it is")
    found = probe(store)
    if found.problems:
        raise StoreUnsuitable(f"{store.url} cannot be a home: {'; '.join(found.problems)}")
    record = StoreRecord(format=FORMAT, tier=tier, store=token(), created=now(), mode=mode, probe=found.as_dict())
    store.make_folder(RUNS, exist_ok=True)
    # Before the store's own file: a power cut between must not leave a store whose runs cannot be made.
    store.sync_folder("", Barrier.RUN_FOLDER)
    store.create(STORE_FILE, encode_sealed(record), content=Barrier.META, name=Barrier.RUN_FOLDER)
    return record, found


def _make_root(root: Path, mode: int) -> None:
    """Makes the folder and those above it, each durable in its parent before anything is built on it."""
    try:
        missing = [folder for folder in (root, *root.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=mode & 0o777 if folder == root else 0o777, exist_ok=True)
            if folder == root and mode != FOLDER_MODES["umask"]:
                folder.chmod(mode)  # past the umask, and with the group's bit: what is made below inherits the group
            parent = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(parent)
            finally:
                os.close(parent)
    except OSError as error:
        raise StorageError(f"{root} cannot be made: {error.strerror}") from error


def read_store_record(store: Store) -> StoreRecord:
    """``onward.json``; without it the place is not a store, however empty or full it looks.

    Raises:
        StoreMissing: The file, or the whole place, is not there.
    """
    try:
        data = store.read(STORE_FILE, limit=SMALL_LIMIT)
    except NotFound as error:
        raise StoreMissing(f"{store.url} is not a store: it has no {STORE_FILE}") from error
    try:
        return decode_sealed(data, StoreRecord, f"{store.url}/{STORE_FILE}")
    except FormatError as error:
        raise FormatError(
            error.message,
            next_step=f"the checkpoints are not touched by this: put {STORE_FILE} back from a copy, or move it away "
            "and run `onward init` on the same place, which keeps what is there",
        ) from error


def open_home(url: str | Store) -> tuple[Store, StoreRecord]:
    """Opens an existing store with the modes and the naming that its own record decides.

    Raises:
        StoreMissing: There is no store at the place.
    """
    store = open_store(url) if isinstance(url, str) else url
    record = read_store_record(store)
    if isinstance(store, PosixStore):
        store.mode = record.mode
        found = record.probe if isinstance(record.probe, dict) else {}
        publish = found.get("publish")
        store.direct_io = found.get("direct_io") is True
        if publish in ("link", "rename"):
            store.publish = cast(Literal["link", "rename"], publish)
    return store, record
