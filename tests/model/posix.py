"""The protocol on a POSIX directory: fsync, rename, link; and power cuts.

Steps that touch only what is the writer's own (write and fsync a file, rename and fsync `checkpoints/`) are one
action: a power cut between the two leaves nothing that a cut before them, or one after, does not leave too.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import disk
from .protocol import Ledger, Protocol, Steps
from .rules import Config
from .world import (
    Attempt,
    Entry,
    State,
    Writer,
    at,
    attempt,
    final_name,
    holder,
    mark,
    with_attempt,
    with_entry,
    writing_name,
)


class Posix(Protocol):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.program |= {
            "open, empty": self._fill,
            "commit, empty": self._fill,
            "delete, empty": self._fill,
            "void, empty": self._fill,
            "fence": self._sync_fence,
            "shard": self._write_shard,
            "manifest": self._write_manifest,
            "rename": self._rename,
            "acknowledge": self._acknowledge,
            "decided": self._sync_decision,
            "voided": self._sync_void,
        }

    def weather(self, s: State) -> Iterator[tuple[str, State]]:
        if s.cuts:
            for after in disk.power_cuts(s):
                yield "power cut", after

    def listings(self, s: State, i: int, sync: bool) -> list[tuple[Ledger, State]]:
        return [(s.ledger, disk.list_ledger(s, i, sync))]

    def entries_below_fence(self, s: State, i: int) -> list[tuple[Ledger, State]]:
        return self.listings(s, i, self.rules.fsync_ledger_before_resuming)

    # -- entries

    def create(self, s: State, w: Writer, entry: Entry) -> list[tuple[str, Writer, State]]:
        if not self.rules.entry_via_temp_and_link:
            return [("but it is empty yet", w._replace(pc=w.pc + ", empty"), with_entry(s, entry._replace(content="")))]
        # Its content was written, and synced, under a temporary name that nobody looks at.
        after = with_entry(s, entry._replace(content="d" if self.rules.fsync_entry else "c"))
        ways = [("ok", w, after)]
        if self.config.ambiguous and entry.n:
            asks = w._replace(pc=w.pc + "?")
            ways += [("done, but it is told an error", asks, after), ("an error, and nothing done", asks, s)]
        return ways

    def _fill(self, s: State, i: int, w: Writer) -> Steps:
        there = at(s.ledger, w.number)
        assert there is not None
        new, after = self.created(s, i, w._replace(pc=w.pc.removesuffix(", empty")))
        yield f"writes entry {there.n}", new, with_entry(after, there._replace(content="d"))

    def created(self, s: State, i: int, w: Writer) -> tuple[Writer, State]:
        pc = {"open": "fence", "commit": "acknowledge", "delete": "decided", "void": "voided"}[w.pc]
        return w._replace(pc=pc), s

    def _sync_fence(self, s: State, i: int, w: Writer) -> Steps:
        after = disk.sync_ledger(s) if self.rules.fsync_fence else s
        pc = "look" if self.rules.fence_before_resume else "ready"
        yield "syncs its open entry", w._replace(pc=pc, fence=w.number, last=w.number, number=0), after

    def _acknowledge(self, s: State, i: int, w: Writer) -> Steps:
        after = disk.sync_ledger(s) if self.rules.fsync_ledger_after_commit else s
        yield f"syncs the ledger, acknowledges {w.number}", *self.acknowledged(after, w)

    def _sync_decision(self, s: State, i: int, w: Writer) -> Steps:
        after = disk.sync_ledger(s) if self.rules.fsync_ledger_after_delete else s
        yield "syncs its delete entry", w._replace(pc="remove", last=w.number or w.last), after

    def _sync_void(self, s: State, i: int, w: Writer) -> Steps:
        after = disk.sync_ledger(s) if self.rules.fsync_ledger_after_void else s
        yield "syncs its void entry", w._replace(pc="undo", last=w.number), after

    # -- files

    def begin(self, s: State, i: int, w: Writer) -> tuple[Writer, State]:
        return w._replace(pc="shard"), with_attempt(s, self.new_attempt(i, w, "w"))

    def _folder(self, s: State, w: Writer) -> tuple[State, Attempt | None]:
        """My writing folder, if it is still there; made again, where the rule against that is off."""
        found = holder(s, self.rules, writing_name(w.attempt))
        if found is None and not self.rules.attempt_folder_never_recreated:
            found = attempt(s, w.attempt).moved("w")._replace(shard="-", manifest="-")
            s = mark(with_attempt(s, found), "name_used_twice")
        return s, found

    def _write_shard(self, s: State, i: int, w: Writer) -> Steps:
        s, found = self._folder(s, w)
        if found is None:
            yield "finds its folder gone", self.save_ended(w), s
            return
        file = "n" if self.rules.fsync_shards else "c"
        new = w._replace(pc="manifest")
        yield "writes shards", new, with_attempt(s, found._replace(shard=file))
        if w.fails:
            # After a failed fsync the kernel may drop the pages and call the next fsync a success.
            file = "n" if self.rules.failed_fsync_not_retried else "c"
            how = "under a new name" if self.rules.failed_fsync_not_retried else "by another fsync"
            after = with_attempt(s, found._replace(shard=file))
            yield f"fails to sync shards, tries again {how}", new._replace(fails=w.fails - 1), after

    def _write_manifest(self, s: State, i: int, w: Writer) -> Steps:
        if w.fails:
            yield "fails to save", w._replace(pc="undo", fails=w.fails - 1), s
        s, found = self._folder(s, w)
        if found is None:
            yield "finds its folder gone", self.save_ended(w), s
        else:
            found = found._replace(manifest="n" if self.rules.fsync_manifest else "c")
            found = disk.sync_folder(found) if self.rules.fsync_attempt_folder else found
            yield "writes the manifest", w._replace(pc="rename"), with_attempt(s, found)

    def _rename(self, s: State, i: int, w: Writer) -> Steps:
        found = holder(s, self.rules, writing_name(w.attempt))
        if found is None:
            yield "finds its folder gone", self.save_ended(w), s
            return
        name = "-".join(final_name(self.rules, found))
        after = disk.rename_to_final(self.rules, s, found)
        if after is None:
            yield f"finds {name} taken", self.save_ended(w), mark(s, "name_used_twice")
            return
        yield f"renames to {name}", w._replace(pc="commit"), after
        if w.fails:
            # The name was used, so its number must not be tried again: a `void` entry takes it.
            pc = "void" if self.rules.failed_name_is_voided else "undo"
            yield f"renames to {name}, then fails to save", w._replace(pc=pc, fails=w.fails - 1), after
