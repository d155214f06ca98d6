"""What a writer does, whatever it writes to: take over, recover, save, delete; each step visible to everybody else.

`posix.Posix` and `objects.Objects` say how a listing, an entry and a file behave there. A writer's state names the
step it takes next (`Writer.pc`); a step yields what it may lead to: (what happened, the writer, the world).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from . import reader
from .rules import Config
from .world import (
    STOPPED,
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
    mark,
    name_of,
    remove_file,
    remove_rest,
    superseded,
    top,
    unlink,
    with_attempt,
    writing_name,
)

Steps = Iterator[tuple[str, Writer, State]]
Step = Callable[[State, int, Writer], Steps]
Ledger = tuple[Entry, ...]
ENTRY_KINDS = {"open": "open", "commit": "checkpoint", "delete": "delete", "void": "void"}


class Protocol(ABC):
    """A model for `checker.explore`: the `successors` of `world.initial(config)`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rules = config.rules
        self.program: dict[str, Step] = {
            "idle": self._start,
            "look": self._look,
            "scan": self._scan,
            "work": self._recover,
            "ready": self._ready,
            "undo": self._undo,
            "remove": self._remove,
            "remove rest": self._remove_rest,
            "tidy": self._tidy,
            **dict.fromkeys(ENTRY_KINDS, self._create),
            **{kind + "?": self._read_back for kind in ENTRY_KINDS},
        }

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        if state.bad:
            state = state._replace(bad="")
        for i, writer in enumerate(state.writers):
            # Writers are alike: only the first of those that have not started may start.
            if writer.pc == "stopped" or (writer.pc == "idle" and i and state.writers[i - 1].pc == "idle"):
                continue
            for action, new, after in self.program[writer.pc](state, i, writer):
                if new.pc == "ready" and not new.saves and not new.deletes:
                    new = STOPPED
                writers = (*after.writers[:i], new, *after.writers[i + 1 :])
                yield f"{'ABC'[i]} {action}", after._replace(writers=writers)
        for action, after in reader.steps(self.config, state):
            yield f"reader {action}", after
        yield from self.weather(state)

    # -- what differs between a directory and an object store

    @abstractmethod
    def weather(self, s: State) -> Iterator[tuple[str, State]]:
        """What happens without anybody doing it."""

    @abstractmethod
    def listings(self, s: State, i: int, sync: bool) -> list[tuple[Ledger, State]]:
        """What a listing of the ledger may show, and the world after it (fsynced if the rule asks for it)."""

    @abstractmethod
    def entries_below_fence(self, s: State, i: int) -> list[tuple[Ledger, State]]:
        """The same for the listing that a resume point is chosen from."""

    @abstractmethod
    def create(self, s: State, w: Writer, entry: Entry) -> list[tuple[str, Writer, State]]:
        """Create an entry whose number is free: every way in which that may turn out."""

    @abstractmethod
    def created(self, s: State, i: int, w: Writer) -> tuple[Writer, State]:
        """What a writer does once it knows that its entry is there."""

    @abstractmethod
    def begin(self, s: State, i: int, w: Writer) -> tuple[Writer, State]:
        """Start an attempt: `w.attempt` is its key."""

    # -- taking over

    def _start(self, s: State, i: int, w: Writer) -> Steps:
        first = "open" if self.rules.fence_before_resume else "look"
        for ledger, after in self.listings(s, i, self.rules.fsync_first_listing):
            yield f"lists the ledger up to {top(ledger)}", w._replace(pc=first, number=top(ledger) + 1), after

    def _look(self, s: State, i: int, w: Writer) -> Steps:
        for ledger, after in self.entries_below_fence(s, i):
            if self.rules.resume_at_or_below_fence and self.rules.fence_before_resume:
                ledger = tuple(entry for entry in ledger if entry.n <= w.fence)
            known = max((entry.n for entry in commits(ledger)), default=0)
            point = live(ledger)[-1:]
            step = attempt(s, point[0].ref).step if point else 0
            # The snapshot that recovery acts on: the attempts named, and the victims of decided deletions.
            named = tuple(sorted(entry.ref for entry in commits(ledger)))
            pending = tuple(sorted(entry.ref for entry in ledger if entry.kind == "delete"))
            new = w._replace(pc="scan", known=known, step=step, named=named, pending=pending)
            yield f"looks, resumes from {point[0].n if point else 'nothing'}", new, after

    # -- recovery

    def _scan(self, s: State, i: int, w: Writer) -> Steps:
        mine = w.fence or w.number  # without the fence rule: the number it is going to take
        work: list[tuple[str, ...]] = []
        for found in s.attempts:
            # My open entry is m; an attempt of sequence s is older exactly if s <= m.
            older = found.seq <= mine if self.rules.names_carry_sequence else found.epoch < mine
            touch = older or not self.rules.touch_only_older_attempts
            if found.place in "wf" and found.key not in w.named and touch:
                work.append(name_of(self.rules, found))
        for number in w.pending:
            victim = at(s.ledger, number)
            if victim and (found := attempt(s, victim.ref)).place == "f":
                work.append(("delete", *final_name(self.rules, found)))
        new = w._replace(named=(), pending=(), work=tuple(work))
        yield f"lists the attempts, {len(work)} to clean", self._next_work(new), s

    def _next_work(self, w: Writer) -> Writer:
        if w.work:
            return w._replace(pc="work")
        return w._replace(pc="ready" if self.rules.fence_before_resume else "open")

    def _recover(self, s: State, i: int, w: Writer) -> Steps:
        item, rest = w.work[0], w.work[1:]
        decided = item[0] == "delete"
        name = item[1:] if decided else item
        found = holder(s, self.rules, name)
        done = self._next_work(w._replace(work=rest))
        if found is None:
            yield f"finds {'-'.join(name)} gone", done, s
            return
        if not decided and found.epoch > (w.fence or w.number):
            s = mark(s, "younger_touched")
        if item[0] == "f" and self.quarantines:
            yield f"quarantines {'-'.join(name)}", done, with_attempt(s, found.moved("q"))
        elif found.shard != "-":
            yield f"removes files of {'-'.join(name)}", w, remove_file(s, found.key)
        else:
            yield f"removes {'-'.join(name)}", done, remove_rest(s, found.key)

    quarantines = True  # is an attempt under its final name moved aside with its bytes?

    # -- creating an entry: `open`, a commit, a deletion, a `void`

    def entry(self, i: int, w: Writer, purpose: str) -> Entry:
        ref = {"commit": w.attempt, "delete": w.victim}.get(purpose, -1)
        return Entry(w.number, ENTRY_KINDS[purpose], i, ref, w.known if purpose == "commit" else 0)

    def _create(self, s: State, i: int, w: Writer) -> Steps:
        if w.pc != "open":
            last = w.last if self.rules.append_at_own_last_plus_one else top(s.ledger)
            w = w._replace(number=last + 1)
        if w.pc == "delete" and not self.rules.delete_decision_is_an_entry:
            w = w._replace(number=0)
        entry = self.entry(i, w, w.pc)
        if entry.n and at(s.ledger, entry.n) is not None:
            yield from self._taken(s, i, w)
            return
        if entry.n in s.tidied:
            s = mark(s, "number_used_twice")
        if w.pc == "delete" and superseded(s, w):
            s = mark(s, "superseded_deletes")
        for how, new, after in self.create(s, w, entry):
            if how == "ok":
                new, after = self.created(after, i, new)
            yield f"creates {entry.kind} {entry.n or 'tombstone'}: {how}", new, after

    def _taken(self, s: State, i: int, w: Writer) -> Steps:
        """The number has an entry: my own (I was told an error, or nothing), or another's."""
        there = at(s.ledger, w.number)
        assert there is not None
        for purpose in (w.pc, "commit") if w.pc == "void" else (w.pc,):
            if there.same(self.entry(i, w, purpose)):
                new, after = self.created(s, i, w._replace(pc=purpose))
                yield f"finds its own {there.kind} at {there.n}", new, after
                return
        if w.pc == "open":
            for _, after in self.listings(s, i, self.rules.fsync_taken_number)[:1]:
                yield f"finds {there.n} taken", w._replace(number=there.n + 1), after
        elif not self.rules.losers_delete_nothing and w.pc == "commit":
            yield f"finds {there.n} taken, clears away", w._replace(pc="undo", saves=1, deletes=0), s
        else:
            yield f"finds {there.n} taken, stops", STOPPED, s

    def _read_back(self, s: State, i: int, w: Writer) -> Steps:
        purpose = w.pc.rstrip("?")
        if not self.rules.read_back_on_error:
            # The error is believed: what was not created needs no files.
            pc = {"open": "stopped", "commit": "undo", "void": "undo", "delete": "ready"}[purpose]
            yield "takes the error for a failure", w._replace(pc=pc, deletes=w.deletes - (purpose == "delete")), s
        elif at(s.ledger, w.number) is not None:
            yield from self._taken(s, i, w._replace(pc=purpose))
        else:
            yield f"reads back {w.number}: absent", w._replace(pc=purpose), s
            if purpose == "commit" and self.gives_up:
                pc = "void" if self.rules.give_up_only_after_void else "undo"
                yield f"reads back {w.number}: absent, gives up", w._replace(pc=pc), s

    gives_up = False  # may a commit that is absent be given up?

    # -- saving, as far as it is the same

    def _ready(self, s: State, i: int, w: Writer) -> Steps:
        if w.saves:
            new, after = self.begin(s, i, w._replace(attempt=i * 10 + w.saves))
            yield f"starts step {w.step + 1} as {w.last + 1}", new, after
        if w.deletes:
            for _, after in self.listings(s, i, self.rules.fsync_before_choosing_victims)[-1:]:
                alive = live(after.ledger)
                if len(alive) > 1:
                    yield f"chooses to delete {alive[0].n}", w._replace(pc="delete", victim=alive[0].n), after

    def new_attempt(self, i: int, w: Writer, place: str) -> Attempt:
        return Attempt(w.attempt, w.step + 1, w.last + 1, w.fence, place)

    def save_ended(self, w: Writer) -> Writer:
        return w._replace(pc="ready", saves=w.saves - 1, attempt=-1, number=0)

    def acknowledged(self, s: State, w: Writer) -> tuple[Writer, State]:
        new = self.save_ended(w)._replace(last=w.number, known=w.number, step=w.step + 1)
        return new, acknowledge(s, w.number, w.attempt)

    def _undo(self, s: State, i: int, w: Writer) -> Steps:
        """A save that failed takes its own files back."""
        mine = next((found for found in s.attempts if found.key == w.attempt), None)
        name = final_name(self.rules, mine) if mine and mine.final else writing_name(w.attempt)
        found = holder(s, self.rules, name)
        if found is None:
            yield "has nothing to clear away", self.save_ended(w), s
        elif found.shard != "-":
            yield "clears its files away", w, remove_file(s, found.key)
        else:
            yield "clears its attempt away", self.save_ended(w), remove_rest(s, found.key)

    # -- deleting

    def _victim(self, s: State, w: Writer) -> Attempt | None:
        """Whoever has the victim's name now."""
        entry = at(s.ledger, w.victim)
        return holder(s, self.rules, final_name(self.rules, attempt(s, entry.ref))) if entry else None

    def _remove(self, s: State, i: int, w: Writer) -> Steps:
        found = self._victim(s, w)
        after = remove_file(s, found.key) if found else s
        yield "removes files of its victim", w._replace(pc="remove rest"), after

    def _remove_rest(self, s: State, i: int, w: Writer) -> Steps:
        found = self._victim(s, w)
        after = remove_rest(s, found.key) if found else s
        new = w._replace(pc="ready", victim=-1, number=0, deletes=w.deletes - 1)
        if not self.rules.nothing_removed_from_ledger:
            new = w._replace(pc="tidy", deletes=w.deletes - 1)
        yield "removes its victim", new, after

    def _tidy(self, s: State, i: int, w: Writer) -> Steps:
        after = unlink(s, w.victim, w.number)
        yield f"removes entries {w.victim} and {w.number}", w._replace(pc="ready", victim=-1, number=0), after
