"""One run's life, recorded for the power-cut model: every flow that makes a promise, with kills in between.

Marks in the log say what had been promised by then, each followed by the name of a checkpoint's folder:
``acknowledged`` (a save returned), ``deleting`` (a delete began), ``deleted`` (it returned), ``believed`` (somebody
chose it as the state to go on from); ``initialised`` (the store exists).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar
from unittest import mock

from onward.catalog import stores
from onward.catalog.incarnation import Incarnation
from onward.catalog.ledger import read_ledger, reattach
from onward.catalog.listing import read_catalog
from onward.catalog.stores import init_store
from onward.storage.posix import PosixStore
from onward.storage.probe import Probe
from onward.storage.syscalls import Syscalls
from onward.testing.faults import HaltAt, Halted
from onward.testing.recorder import Operation, Recorder
from onward.testing.seam import Call, Wrapper
from onward.upkeep.adopt import adopt

from .harness import PLACES, delete_step, save_step, start

T = TypeVar("T")
Leave = Callable[[Call], bool]
_PROBED = Probe(True, "link", True, True, True, 0.0, None, ())  # direct I/O wherever the filesystem has it


class WithoutSome(Wrapper):
    """Leaves out the fsyncs for which ``leave`` answers True."""

    def __init__(self, leave: Leave, inner: Syscalls) -> None:
        super().__init__(inner)
        self.leave = leave

    def around(self, call: Call, do: Callable[[], T]) -> T:
        if call.name == "fsync" and self.leave(call):
            return None  # type: ignore[return-value]
        return do()


class Interruption(Wrapper):
    """Calls ``act`` once, before the first call for which ``when`` answers True: another process gets in between."""

    def __init__(self, when: Leave, act: Callable[[], None], inner: Syscalls) -> None:
        super().__init__(inner)
        self.when, self.act, self.done = when, act, False

    def around(self, call: Call, do: Callable[[], T]) -> T:
        if not self.done and self.when(call):
            self.done = True
            self.act()
        return do()


class Life:
    """Records a life below ``root``, which must be an empty folder.

    Args:
        root: The store's root.
        leave: Which fsyncs are left out; none by default.
        calls: What performs the calls under the recorder.
    """

    def __init__(self, root: Path, leave: Leave = lambda _: False, calls: Syscalls | None = None) -> None:
        self.root, self.leave = root, leave
        self.recorder = Recorder(calls)

    @property
    def log(self) -> list[Operation]:
        """What was done, with the marks."""
        return self.recorder.log

    def mark(self, what: str, folder: str = "") -> None:
        self.recorder.mark(f"{what} {folder}".strip())

    def store(self, inner: Syscalls | None = None) -> PosixStore:
        return PosixStore(self.root, calls=WithoutSome(self.leave, inner or self.recorder))

    @contextmanager
    def killed(self, *, only: str, match: str, skip: Callable[[HaltAt], None] | None = None) -> Any:
        """Within it, the first such call after ``halt.arm(1)`` ends the process; its lease is that of a dead one."""
        halt = HaltAt(0, only=(only,), match=match, inner=self.recorder)
        with suppress(Halted):
            yield halt
            raise AssertionError(f"no {only} on {match} came")
        (self.root / PLACES.lease).unlink(missing_ok=True)

    def begin(self, halt: HaltAt | None = None) -> Incarnation:
        """Takes over, and believes in what is newest."""
        incarnation = start(self.store(halt))
        if newest := incarnation.view.live()[-1:]:
            self.mark("believed", newest[0].folder)
        if halt is not None:
            halt.arm(1)
        return incarnation

    def save(self, incarnation: Incarnation, step: int) -> None:
        self.mark("acknowledged", save_step(incarnation, step).entry.folder)

    def delete(self, incarnation: Incarnation, step: int) -> None:
        victim = next(e for e in reversed(read_ledger(self.store(), PLACES).live()) if e.step == step)
        self.mark("deleting", victim.folder)
        delete_step(incarnation, step)
        self.mark("deleted", victim.folder)

    def copy_in_by_hand(self, folder: str, to: str) -> None:
        """Somebody copies a checkpoint folder with ``cp -r``, which syncs nothing."""
        store = PosixStore(self.root, calls=self.recorder)
        source = self.root / PLACES.checkpoint(folder)
        store.make_folder(PLACES.checkpoint(to))
        for path in sorted(source.rglob("*")):
            target = f"{PLACES.checkpoint(to)}/{path.relative_to(source)}"
            if path.is_dir():
                store.make_folder(target)
            else:
                sink = store.open_new(target)
                sink.write(path.read_bytes())
                sink.close()

    # --- the flows ------------------------------------------------------------------------------------------------

    def live(self) -> None:
        """All of it."""
        self.first_start()
        self.killed_in_saves()
        self.killed_in_deletes()
        self.adoption()
        self.overtaken()

    def first_start(self) -> None:
        with (
            mock.patch.object(stores, "open_store", lambda url, **_: self.store()),
            mock.patch.object(stores, "probe", lambda _: _PROBED),
        ):
            init_store(f"file://{self.root}")
        self.mark("initialised")
        incarnation = self.begin()
        for step in (10, 20):
            self.save(incarnation, step)
        self.delete(incarnation, 10)
        incarnation.end()

    def killed_in_saves(self) -> None:
        with self.killed(only="open", match="layout.json") as halt:
            self.save(self.begin(halt), 30)
        with self.killed(only="unlink", match="/ledger/") as halt:  # its entry has a name that is not synced
            self.save(self.begin(halt), 30)
        with self.killed(only="unlink", match="/ledger/") as halt:
            self.save(self.begin(halt), 33)
        # Somebody only looks, and takes the weights away; whatever happens here, that checkpoint must stay.
        self.mark("believed", read_catalog(self.store(), PLACES, "home").offered()[0].folder)
        self.writer_killed()
        incarnation = self.begin()
        self.save(incarnation, 40)
        incarnation.end()

    def writer_killed(self) -> None:
        """The writer process dies right after its commit; the trainer, which lives on, finds and reports it."""
        halt = HaltAt(0, only=("unlink",), match="/ledger/", inner=self.recorder)
        incarnation = self.begin(halt)
        with suppress(Halted):
            save_step(incarnation, 35)
            raise AssertionError("the writer was not killed")
        mine = incarnation.ledger
        found = reattach(self.store(), PLACES, epoch=mine.epoch, incarnation=mine.incarnation)
        self.mark("acknowledged", found.entry(found.last).folder)
        (self.root / PLACES.lease).unlink()

    def killed_in_deletes(self) -> None:
        with self.killed(only="unlink", match="/ledger/") as halt:  # decided, but the decision is not synced
            self.delete(self.begin(halt), 20)
        self.begin().end()
        with self.killed(only="unlink", match="/deleted/") as halt:  # its manifest has a name that is not synced
            self.delete(self.begin(halt), 30)
        incarnation = self.begin()
        self.save(incarnation, 50)
        incarnation.end()

    def adoption(self) -> None:
        incarnation = self.begin()
        newest = read_ledger(self.store(), PLACES).live()[-1].folder
        self.copy_in_by_hand(newest, "copied-in")
        self.mark("acknowledged", adopt(incarnation, "copied-in").entry.folder)
        incarnation.end()

    def overtaken(self) -> None:
        """An incarnation commits while another is just taking over, between its look at the ledger and its fence."""
        with self.killed(only="unlink", match="/ledger/") as halt:
            first = self.begin(halt)
            (self.root / PLACES.lease).unlink()

            def commit() -> None:
                with suppress(Halted):
                    save_step(first, 60)

            between = Interruption(lambda c: c.name == "open" and "/ledger/." in c.path, commit, self.recorder)
            second = start(self.store(between))
            self.mark("believed", second.view.live()[-1].folder)
            self.delete(second, 40)
            self.save(second, 70)
            second.end()
            raise Halted


_KINDS = (
    (r"\.onward\.json\..*", "onward.json"),
    (r"runs", "runs/"),
    (r"runs/r", "the run's folder"),
    (r"runs/r/\.run\.json\..*", "run.json"),
    (r"runs/r/ledger", "ledger/"),
    (r"runs/r/ledger/\..*", "an entry"),
    (r"runs/r/receipts/.*/\..*", "a receipt"),
    (r"runs/r/attempts/\..*", "an attempt's story"),
    (r"runs/r/deleted", "deleted/"),
    (r"runs/r/deleted/\..*", "a manifest kept aside"),
    (r"runs/r/checkpoints", "checkpoints/"),
    (r"runs/r/checkpoints/[^/]+", "the checkpoint's folder"),
    (r"runs/r/checkpoints/[^/]+/(rank-\d+|assets)", "a folder in it"),
    (r"runs/r/checkpoints/[^/]+/.*\.safetensors", "a shard file"),
    (r"runs/r/checkpoints/[^/]+/(?:rank-\d+/)?(.*)", ""),
)


def site_of(call: Call) -> str:
    """Which fsync of the code this is: barrier, and what is synced. To be asked while the call is made."""
    assert call.barrier is not None
    if call.barrier == "LEDGER_BELIEVED":
        return f"{call.barrier}, {_listing()}"
    if call.path == "":
        return f"{call.barrier}, the root, {'with' if 'create' in _callers() else 'before'} the store's own file"
    for pattern, kind in _KINDS:
        if found := re.fullmatch(pattern, call.path):
            return f"{call.barrier}, {kind or found[1]}"
    raise AssertionError(f"a barrier on an unknown place: {call.path}")


def _callers() -> list[str]:
    frame: FrameType | None = sys._getframe()
    names: list[str] = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def _listing() -> str:
    """Who lists the ledger: few places in the code, that serve several purposes."""
    callers = _callers()
    if "reattach" in callers:
        return "the look after the writer's death"
    if "take_over" not in callers:
        return "any other listing"
    if "read_ledger" not in callers:
        return "walking past a taken number"
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "take_over":
        frame = frame.f_back
    assert frame is not None
    return "listing after the fence" if "fence" in frame.f_locals else "listing before the fence"
