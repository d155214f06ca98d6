"""The protocol on a POSIX directory: take over, recover, save, delete, each step visible to everybody else.

Steps that touch only what is the writer's own (write and fsync a file, rename and fsync `checkpoints/`) are one
action: a power cut between the two leaves nothing that a cut before them, or one after, does not leave too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import disk, reader
from .rules import Config
from .world import (
    STOPPED,
    TOMBSTONE,
    Attempt,
    Entry,
    State,
    Writer,
    acknowledge,
    at,
    attempt,
    commits,
    final_name,
    holder,
    live,
    name_of,
    superseded,
    top,
    with_attempt,
    writing_name,
)

Steps = Iterator[tuple[str, Writer, State]]
ENTRY_KINDS = {"open": "open", "commit": "checkpoint", "delete": "delete"}


class Posix:
    """A model for `checker.explore`: `successors` of `world.initial(config)`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rules = config.rules
        self.program: dict[str, Callable[[State, int, Writer], Steps]] = {
            "idle": self._start,
            "open": self._create,
            "commit": self._create,
            "delete": self._create,
            "fill": self._fill,
            "open?": self._read_back,
            "commit?": self._read_back,
            "delete?": self._read_back,
            "fence": self._sync_fence,
            "look": self._look,
            "scan": self._scan,
            "work": self._recover,
            "ready": self._ready,
            "shard": self._write_shard,
            "manifest": self._write_manifest,
            "rename": self._rename,
            "acknowledge": self._acknowledge,
            "undo": self._undo,
            "decided": self._sync_decision,
            "remove": self._remove,
            "remove rest": self._remove_rest,
            "tidy": self._tidy,
        }

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        state = state._replace(bad="")
        for i, writer in enumerate(state.writers):
            # Writers are alike: only the first of those that have not started may start.
            if writer.pc == "stopped" or (writer.pc == "idle" and i and state.writers[i - 1].pc == "idle"):
                continue
            for action, new, after in self.program[writer.pc.split(" of ")[0]](state, i, writer):
                if new.pc == "ready" and not new.saves and not new.deletes:
                    new = STOPPED
                writers = (*after.writers[:i], new, *after.writers[i + 1 :])
                yield f"{'ABC'[i]} {action}", after._replace(writers=writers)
        for action, after in reader.steps(self.config, state):
            yield f"reader {action}", after
        if state.cuts:
            for after in disk.power_cuts(self.config, state):
                yield "power cut", after

    # -- taking over

    def _start(self, s: State, i: int, w: Writer) -> Steps:
        s = disk.list_ledger(s, i, self.rules.fsync_first_listing)
        first = "open" if self.rules.fence_before_resume else "look"
        yield f"lists the ledger, up to {top(s.ledger)}", w._replace(pc=first, number=top(s.ledger) + 1), s

    def _sync_fence(self, s: State, i: int, w: Writer) -> Steps:
        s = disk.sync_ledger(s) if self.rules.fsync_fence else s
        after = "look" if self.rules.fence_before_resume else "ready"
        yield "syncs its open entry", w._replace(pc=after, fence=w.number, last=w.number, number=0), s

    def _look(self, s: State, i: int, w: Writer) -> Steps:
        s = disk.list_ledger(s, i, self.rules.fsync_ledger_before_believing)
        ledger = s.ledger
        if self.rules.resume_at_or_below_fence and self.rules.fence_before_resume:
            ledger = tuple(entry for entry in ledger if entry.n <= w.fence)
        known = max((entry.n for entry in commits(ledger)), default=0)
        point = live(ledger)[-1:]
        step = attempt(s, point[0].ref).step if point else 0
        # The snapshot that recovery acts on. Victims of decided deletions are numbers below zero.
        named = [entry.ref for entry in commits(ledger)]
        pending = [~entry.ref for entry in ledger if entry.kind == "delete" and at(ledger, entry.ref)]
        found = f"resumes from {point[0].n}" if point else "finds nothing to resume from"
        yield f"lists the ledger, {found}", w._replace(
            pc="scan", known=known, step=step, named=tuple(sorted([*named, *pending]))
        ), s

    # -- recovery

    def _scan(self, s: State, i: int, w: Writer) -> Steps:
        mine = w.fence or w.number  # without the fence rule the number it is going to take
        work: list[tuple[str, ...]] = []
        for found in s.attempts:
            # My open entry is m; an attempt of sequence s is older exactly if s <= m.
            older = found.seq <= mine if self.rules.names_carry_sequence else found.epoch < mine
            if found.place in "wf" and found.key not in w.named:
                if older or not self.rules.touch_only_older_attempts:
                    work.append(name_of(self.rules, found))
        for number in (~coded for coded in w.named if coded < 0):
            victim = at(s.ledger, number)
            if victim and (found := attempt(s, victim.ref)).place == "f":
                work.append(("delete", *final_name(self.rules, found)))
        yield "lists checkpoints/", self._next_work(w._replace(named=(), work=tuple(work))), s

    def _next_work(self, w: Writer) -> Writer:
        if w.work:
            return w._replace(pc="work")
        return w._replace(pc="ready" if self.rules.fence_before_resume else "open")

    def _recover(self, s: State, i: int, w: Writer) -> Steps:
        item, rest = w.work[0], w.work[1:]
        name = item[1:] if item[0] == "delete" else item
        found = holder(s, self.rules, name)
        done = self._next_work(w._replace(work=rest))
        if found is None:
            yield f"finds {'-'.join(name)} gone", done, s
            return
        if item[0] != "delete" and found.epoch > (w.fence or w.number):
            s = disk.mark(s, "younger_touched")
        if item[0] == "f":
            yield f"quarantines {'-'.join(name)}", done, with_attempt(s, found.moved("q"))
        elif found.shard != "-":
            yield f"removes files of {'-'.join(name)}", w, disk.remove_file(s, found.key)
        else:
            yield f"removes {'-'.join(name)}", done, disk.remove_rest(s, found.key)

    # -- creating an entry: `open`, a commit, a deletion

    def _entry(self, s: State, i: int, w: Writer) -> Entry:
        kind = w.pc.rstrip("?").split(" of ")[-1]
        ref = {"open": -1, "commit": w.attempt, "delete": w.victim}[kind]
        return Entry(w.number, ENTRY_KINDS[kind], i, ref, w.known if kind == "commit" else 0)

    def _create(self, s: State, i: int, w: Writer) -> Steps:
        tombstone = w.pc == "delete" and not self.rules.delete_decision_is_an_entry
        if tombstone:
            w = w._replace(number=TOMBSTONE)
        elif w.pc != "open":
            last = w.last if self.rules.append_at_own_last_plus_one else top(s.ledger)
            w = w._replace(number=last + 1)
        entry = self._entry(s, i, w)
        after = disk.link(self.rules, s, entry)
        what = f"{entry.kind} {'tombstone' if tombstone else w.number}"
        if after is None:
            yield from self._taken(s, i, w, entry)
            return
        if w.pc == "delete" and superseded(s, w):
            after = disk.mark(after, "superseded_deletes")
        if not self.rules.entry_via_temp_and_link:
            yield f"creates {what}, still empty", w._replace(pc=f"fill of {w.pc}"), after
            return
        yield f"creates {what}", self._created(w), after
        if self.config.ambiguous and not tombstone:
            yield f"creates {what}, but is told an error", w._replace(pc=w.pc + "?"), after
            yield f"fails to create {what}", w._replace(pc=w.pc + "?"), s

    def _created(self, w: Writer) -> Writer:
        return w._replace(pc={"open": "fence", "commit": "acknowledge", "delete": "decided"}[w.pc])

    def _fill(self, s: State, i: int, w: Writer) -> Steps:
        entry = at(s.ledger, w.number)
        assert entry is not None
        ledger = tuple(e._replace(content="d") if e == entry else e for e in s.ledger)
        yield f"writes entry {w.number}", self._created(w._replace(pc=w.pc[8:])), s._replace(ledger=ledger)

    def _taken(self, s: State, i: int, w: Writer, entry: Entry) -> Steps:
        there = at(s.ledger, w.number)
        assert there is not None
        if there.same(entry):
            yield f"finds its own entry at {w.number}", self._created(w), s
        elif w.pc == "open":
            s = disk.list_ledger(s, i, self.rules.fsync_taken_number)
            yield f"finds {w.number} taken", w._replace(number=w.number + 1), s
        elif not self.rules.losers_delete_nothing and w.pc == "commit":
            yield f"finds {w.number} taken, clears away", w._replace(pc="undo", saves=0, deletes=0), s
        else:
            yield f"finds {w.number} taken, stops", STOPPED, s

    def _read_back(self, s: State, i: int, w: Writer) -> Steps:
        purpose = w.pc.rstrip("?")
        if not self.rules.read_back_on_error:
            # The error is believed: the save failed, its files go.
            after = {"open": "stopped", "commit": "undo", "delete": "ready"}[purpose]
            saves, deletes = w.saves - (purpose == "commit"), w.deletes - (purpose == "delete")
            yield "takes the error for a failure", w._replace(pc=after, saves=saves, deletes=deletes), s
            return
        w = w._replace(pc=purpose)
        if at(s.ledger, w.number) is None:
            yield f"reads back {w.number}: absent", w, s
        else:
            yield from self._taken(s, i, w, self._entry(s, i, w))

    # -- saving

    def _ready(self, s: State, i: int, w: Writer) -> Steps:
        if w.saves:
            # Two attempts of one writer have different keys, even where both failed before the commit.
            key = i * 10 + w.saves
            seq = w.last + 1
            yield f"starts step {w.step + 1} as {seq}", w._replace(pc="shard", attempt=key), with_attempt(
                s, Attempt(key, w.step + 1, seq, w.fence, "w")
            )
        if w.deletes:
            s = disk.list_ledger(s, i, self.rules.fsync_before_choosing_victims)
            alive = live(s.ledger)
            if len(alive) > 1:
                yield f"chooses to delete {alive[0].n}", w._replace(pc="delete", victim=alive[0].n), s

    def _folder(self, s: State, w: Writer) -> tuple[State, Attempt | None]:
        """My writing folder, if it is still there, or made again where the rule against that is off."""
        found = holder(s, self.rules, writing_name(w.attempt))
        if found is None and not self.rules.attempt_folder_never_recreated:
            old = attempt(s, w.attempt)
            found = old.moved("w")._replace(shard="-", manifest="-")
            s = disk.mark(with_attempt(s, found), "name_used_twice")
        return s, found

    def _failed(self, w: Writer) -> Writer:
        return w._replace(pc="ready", saves=w.saves - 1, attempt=-1)

    def _write_shard(self, s: State, i: int, w: Writer) -> Steps:
        s, found = self._folder(s, w)
        if found is None:
            yield "finds its folder gone", self._failed(w), s
            return
        file = "n" if self.rules.fsync_shards else "c"
        yield "writes shards", w._replace(pc="manifest"), with_attempt(s, found._replace(shard=file))

    def _write_manifest(self, s: State, i: int, w: Writer) -> Steps:
        if w.fails:
            yield "fails to save", w._replace(pc="undo", saves=w.saves - 1, fails=w.fails - 1), s
        s, found = self._folder(s, w)
        if found is None:
            yield "finds its folder gone", self._failed(w), s
            return
        found = found._replace(manifest="n" if self.rules.fsync_manifest else "c")
        found = disk.sync_folder(found) if self.rules.fsync_attempt_folder else found
        yield "writes the manifest", w._replace(pc="rename"), with_attempt(s, found)

    def _rename(self, s: State, i: int, w: Writer) -> Steps:
        found = holder(s, self.rules, writing_name(w.attempt))
        if found is None:
            yield "finds its folder gone", self._failed(w), s
            return
        name = "-".join(final_name(self.rules, found))
        after = disk.rename_to_final(self.rules, s, found)
        if after is None:
            yield f"finds {name} taken", self._failed(w), disk.mark(s, "name_used_twice")
        else:
            yield f"renames to {name}", w._replace(pc="commit"), after

    def _acknowledge(self, s: State, i: int, w: Writer) -> Steps:
        s = disk.sync_ledger(s) if self.rules.fsync_ledger_after_commit else s
        n = w.number
        new = w._replace(pc="ready", saves=w.saves - 1, last=n, known=n, step=w.step + 1, number=0, attempt=-1)
        yield f"syncs the ledger, acknowledges {n}", new, acknowledge(s, n, w.attempt)

    def _undo(self, s: State, i: int, w: Writer) -> Steps:
        """Take back what a failed save wrote. (Only an error that is not read back gets here after the commit.)"""
        name = "-".join(name_of(self.rules, attempt(s, w.attempt)))
        found = attempt(s, w.attempt)
        done = w._replace(pc="ready", attempt=-1, number=0)
        if found.place not in "wf":
            yield "finds its folder gone", done, s
        elif found.shard != "-":
            yield f"removes files of {name}", w, disk.remove_file(s, found.key)
        else:
            yield f"removes {name}", done, disk.remove_rest(s, found.key)

    # -- deleting

    def _sync_decision(self, s: State, i: int, w: Writer) -> Steps:
        s = disk.sync_ledger(s) if self.rules.fsync_ledger_after_delete else s
        last = w.last if w.number == TOMBSTONE else w.number
        yield "syncs its delete entry", w._replace(pc="remove", last=last), s

    def _victim(self, s: State, w: Writer) -> Attempt | None:
        entry = at(s.ledger, w.victim)
        if entry is None:
            return None
        return holder(s, self.rules, final_name(self.rules, attempt(s, entry.ref)))

    def _remove(self, s: State, i: int, w: Writer) -> Steps:
        found = self._victim(s, w)
        new = w._replace(pc="remove rest")
        yield "removes files of its victim", new, disk.remove_file(s, found.key) if found else s

    def _remove_rest(self, s: State, i: int, w: Writer) -> Steps:
        found = self._victim(s, w)
        after = "ready" if self.rules.nothing_removed_from_ledger else "tidy"
        new = w._replace(pc=after, deletes=w.deletes - 1)
        new = new if after == "tidy" else new._replace(victim=-1, number=0)
        yield "removes its victim", new, disk.remove_rest(s, found.key) if found else s

    def _tidy(self, s: State, i: int, w: Writer) -> Steps:
        new = w._replace(pc="ready", victim=-1, number=0)
        yield f"removes entries {w.victim} and {w.number}", new, disk.unlink(s, w.victim, w.number)
