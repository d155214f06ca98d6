"""The protocol on an object store: create-if-absent with ambiguous answers, LIST that may be stale, no power cuts.

What a PUT stored is durable and complete. A PUT that timed out may be stored, may be stored later (it is `flying`),
or never. GET of one key is exact.
"""

from __future__ import annotations

from collections.abc import Iterator

from .protocol import Ledger, Protocol, Steps
from .rules import Config
from .world import Entry, State, Writer, at, attempt, final_name, holder, mark, with_attempt, with_entry


class Objects(Protocol):
    gives_up = True
    quarantines = False  # there is no rename: what no entry names is removed

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.program |= {"shard": self._put_shard, "manifest": self._put_manifest, "check": self._check}

    def weather(self, s: State) -> Iterator[tuple[str, State]]:
        for entry in s.flying:
            if at(s.ledger, entry.n) is None:
                after = mark(s, "number_used_twice") if entry.n in s.tidied else s
                yield f"the late {entry.kind} {entry.n} lands", self._land(after, entry)

    def listings(self, s: State, i: int, sync: bool) -> list[tuple[Ledger, State]]:
        """The last is the exact one; before it, if LIST may be stale, as of every earlier moment."""
        ends = range(len(s.ledger) + 1) if self.config.stale else [len(s.ledger)]
        return [(s.ledger[:end], s) for end in ends]

    def entries_below_fence(self, s: State, i: int) -> list[tuple[Ledger, State]]:
        views = self.listings(s, i, False)
        return views[-1:] if self.rules.recovery_gets_every_number else views

    # -- entries

    def create(self, s: State, w: Writer, entry: Entry) -> list[tuple[str, Writer, State]]:
        after = self._land(s, entry)
        ways = [("ok", w, after)]
        if self.config.ambiguous and entry.n:
            asks = w._replace(pc=w.pc + "?")
            ways.append(("timeout, but done", asks, after))
            flying = s._replace(flying=tuple(sorted({*s.flying, entry})))
            ways.append(("timeout, still on its way", asks, flying))
        return ways

    def _land(self, s: State, entry: Entry) -> State:
        s = with_entry(s, entry)
        if self.rules.nothing_removed_from_ledger:
            # A duplicate, or a rival, of what is there will never be stored: forget it.
            return s._replace(flying=tuple(other for other in s.flying if other.n != entry.n))
        # Clients and proxies send twice: the same entry may come once more, if its number is ever free again.
        return s._replace(flying=tuple(sorted({*s.flying, entry}))) if entry.n not in s.tidied else s

    def created(self, s: State, i: int, w: Writer) -> tuple[Writer, State]:
        if w.pc == "commit":
            return self.acknowledged(s, w)
        new = w._replace(last=w.number or w.last)
        if w.pc == "open":
            pc = "look" if self.rules.fence_before_resume else "ready"
            return new._replace(pc=pc, fence=w.number, number=0), s
        return new._replace(pc="undo" if w.pc == "void" else "remove"), s

    # -- files

    def begin(self, s: State, i: int, w: Writer) -> tuple[Writer, State]:
        return w._replace(pc="shard"), s

    def _put_shard(self, s: State, i: int, w: Writer) -> Steps:
        found = self.new_attempt(i, w, "f")
        name = final_name(self.rules, found)
        if holder(s, self.rules, name) is not None:
            yield f"finds {'-'.join(name)} taken", self.save_ended(w), mark(s, "name_used_twice")
            return
        if any(other.final and final_name(self.rules, other) == name for other in s.attempts):
            s = mark(s, "name_used_twice")
        new = w._replace(pc="manifest")
        yield f"puts shards of {'-'.join(name)}", new, with_attempt(s, found._replace(shard="d", final=True))
        if self.config.ambiguous:
            yield "puts shards, which are not stored", new, with_attempt(s, found._replace(final=True))

    def _put_manifest(self, s: State, i: int, w: Writer) -> Steps:
        # There are no folders: a PUT succeeds whether or not the other objects are still there.
        found = attempt(s, w.attempt)._replace(places="f", manifest="d")
        pc = "check" if self.rules.every_object_read_back else "commit"
        yield "puts the manifest", w._replace(pc=pc), with_attempt(s, found)

    def _check(self, s: State, i: int, w: Writer) -> Steps:
        found = attempt(s, w.attempt)
        if found.place == "f" and found.shard != "-" and found.manifest != "-":
            yield "reads every object back", w._replace(pc="commit"), s
        else:
            # The name was used, so its number must not be tried again.
            pc = "void" if self.rules.give_up_only_after_void else "undo"
            yield "reads back, misses an object, gives up", w._replace(pc=pc), s
