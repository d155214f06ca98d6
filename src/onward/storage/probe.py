"""What a place really does, tried out rather than assumed.

A filesystem that loses a race for a name, or that forgets names at a power cut, cannot be a home, whatever its
manual says. The probe leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

from onward.errors import StorageError
from onward.storage.base import AlreadyExists, Barrier, Store, remove_tree
from onward.storage.posix import DIRECT_ALIGN, PosixStore

_RACERS = 8
_ROUNDS = 4


@dataclass(frozen=True)
class Probe:
    """What was found.

    Attributes:
        create_if_absent: Of racing creations of one name, exactly one won, in every round.
        publish: How names are given: ``link`` or ``rename`` (no-replace); None when neither works.
        folder_sync: A folder can be fsynced.
        direct_io: Files can be opened with O_DIRECT (used for speed only).
        case_sensitive: ``a`` and ``A`` are two names.
        clock_skew_seconds: The store's clock minus this machine's; None when it cannot be told.
        free_bytes: Free space.
        problems: Why the place cannot be a home; empty when it can.
    """

    create_if_absent: bool
    publish: Literal["link", "rename"] | None
    folder_sync: bool
    direct_io: bool
    case_sensitive: bool
    clock_skew_seconds: float | None
    free_bytes: int | None
    problems: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """The findings as plain data, for ``onward.json``."""
        return {**asdict(self), "problems": list(self.problems)}


def probe(store: Store) -> Probe:
    """Tries out ``store`` in a scratch folder of its root, and removes the folder.

    Raises:
        StorageError: The place cannot even be written to.
    """
    scratch = f".probe-{secrets.token_hex(8)}"
    store.make_folder(scratch)
    try:
        publish = _publish_mode(store, scratch)
        one_winner = publish is not None and _race(store, scratch)
        folder_sync = _works(lambda: store.sync_folder(scratch, Barrier.LEDGER_COMMIT))
        skew = _skew(store, scratch)
        case = _case_sensitive(store, scratch)
        direct = _direct_io(store, scratch)
        free = store.free_bytes()
    finally:
        with suppress(StorageError):
            remove_tree(store, scratch)
    problems: list[str] = []
    if publish is None:
        problems.append("a finished file can be given its name neither by hard link nor by a no-replace rename")
    elif not one_winner:
        problems.append("several writers can win the creation of one name, so two jobs could commit one number")
    if not folder_sync:
        problems.append("folders cannot be fsynced, so a commit may vanish at a power cut")
    return Probe(
        create_if_absent=one_winner,
        publish=publish,
        folder_sync=folder_sync,
        direct_io=direct,
        case_sensitive=case,
        clock_skew_seconds=skew,
        free_bytes=free,
        problems=tuple(problems),
    )


def _works(action: object) -> bool:
    try:
        action()  # type: ignore[operator]
    except StorageError:
        return False
    return True


def _create(store: Store, path: str) -> None:
    store.create(path, b"probe", content=Barrier.ENTRY, name=None)


def _publish_mode(store: Store, scratch: str) -> Literal["link", "rename"] | None:
    if not isinstance(store, PosixStore):
        return "link" if _works(lambda: _create(store, f"{scratch}/published")) else None
    modes: tuple[Literal["link", "rename"], ...] = ("link", "rename")
    for mode in modes:
        store.publish = mode
        if _works(lambda: _create(store, f"{scratch}/published")):
            return mode
    return None


def _race(store: Store, scratch: str) -> bool:
    for turn in range(_ROUNDS):
        path = f"{scratch}/race-{turn}"
        won: list[int] = []
        start = threading.Barrier(_RACERS)

        def racer(number: int, path: str = path, won: list[int] = won, start: threading.Barrier = start) -> None:
            start.wait()
            with suppress(AlreadyExists):
                _create(store, path)
                won.append(number)

        threads = [threading.Thread(target=racer, args=(n,)) for n in range(_RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(won) != 1:
            return False
    return True


def _skew(store: Store, scratch: str) -> float | None:
    before = time.time()
    _create(store, f"{scratch}/clock")
    seen = store.stat(f"{scratch}/clock").mtime
    after = time.time()
    if seen == 0.0:
        return None
    if before - 1 <= seen <= after + 1:
        return 0.0
    return round(seen - (before + after) / 2, 3)


def _case_sensitive(store: Store, scratch: str) -> bool:
    _create(store, f"{scratch}/case")
    return not _works(lambda: store.stat(f"{scratch}/CASE"))


def _direct_io(store: Store, scratch: str) -> bool:
    if not isinstance(store, PosixStore) or not hasattr(os, "O_DIRECT"):
        return False
    try:
        fd = os.open(store.local_path(f"{scratch}/direct"), os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        return os.write(fd, mmap.mmap(-1, DIRECT_ALIGN)) == DIRECT_ALIGN  # some take the flag and refuse the write
    except OSError:
        return False
    finally:
        os.close(fd)
