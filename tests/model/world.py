"""The state of a model: the ledger, the folders, the processes; and pure questions about them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .rules import Config, Rules

DEAD = 9  # the owner of what an initial history left behind
TOMBSTONE = 0  # the number of a deletion mark beside the ledger: it collides with nothing, nothing collides with it


class Entry(NamedTuple):
    """A numbered file of the ledger. The first four fields are what its creator wrote (or meant to)."""

    n: int
    kind: str  # open, checkpoint, delete, void
    owner: int
    ref: int = -1  # a checkpoint's attempt; a delete's victim (its number)
    parent: int = 0  # a checkpoint's: the highest checkpoint that its writer knew of
    durable: bool = False  # would its name survive a power cut?
    content: str = "d"  # d durable, c written but only in the cache, "" not written yet

    def same(self, other: Entry) -> bool:
        """The attempt token that a read back compares."""
        return self[:4] == other[:4]


class Attempt(NamedTuple):
    """One attempt at a checkpoint: a folder and two files that stand for all."""

    key: int
    step: int
    seq: int
    epoch: int
    # Where it is: w writing name, f final name, q quarantined, x removed. The last letter is what everybody sees;
    # those before it are what a power cut may bring back, because the directory was not synced since.
    places: str
    # Files: - absent, c cached, d content and name durable, n content durable, m name durable
    shard: str = "-"
    manifest: str = "-"
    final: bool = False  # has it ever had its final name?

    @property
    def owner(self) -> int:
        return self.key // 10

    @property
    def place(self) -> str:
        return self.places[-1]

    def moved(self, place: str) -> Attempt:
        before = "".join(sorted(set(self.places)))
        return self._replace(places=before + place, final=self.final or place == "f")


class Writer(NamedTuple):
    """An incarnation, described by the step it takes next and what it remembers.

    A crash needs no action of its own: it is a writer that is never scheduled again,
    and a pause is one that is not scheduled for a while. Every order of steps is explored.
    """

    pc: str = "idle"
    number: int = 0  # the number of the entry it is creating
    fence: int = 0  # the number of its `open`
    last: int = 0  # the number of its last entry
    known: int = 0  # the highest checkpoint it knows of
    step: int = 0
    attempt: int = -1
    victim: int = -1  # the number of the checkpoint it is deleting
    named: tuple[int, ...] = ()  # the attempts that the ledger names, as it was listed
    pending: tuple[int, ...] = ()  # the victims of decided deletions, as it was listed
    work: tuple[tuple[str, ...], ...] = ()  # what recovery still has to do: (what, name)
    saves: int = 0
    deletes: int = 0
    fails: int = 0


STOPPED = Writer(pc="stopped")  # one value for every way to end, so that states merge


class Reader(NamedTuple):
    pc: str = "idle"
    n: int = 0
    key: int = -1
    got: int = -1  # whose manifest it read


class State(NamedTuple):
    ledger: tuple[Entry, ...]  # by number
    attempts: tuple[Attempt, ...]  # by key
    writers: tuple[Writer, ...]
    reader: Reader
    cuts: int
    flying: tuple[Entry, ...] = ()  # object store: creates that timed out and may still land
    # What really happened, which no process can read. Invariants are checked against it.
    acked: tuple[tuple[int, int], ...] = ()  # (number, attempt) reported as saved, and not deleted by decision
    ever: bool = False  # was anything ever acknowledged?
    tidied: tuple[int, ...] = ()  # numbers that were removed from the ledger
    bad: str = ""  # the invariant that the action which led here broke


def at(ledger: tuple[Entry, ...], n: int) -> Entry | None:
    for entry in ledger:
        if entry.n == n:
            return entry
    return None


def top(ledger: tuple[Entry, ...]) -> int:
    return ledger[-1].n if ledger else 0


@lru_cache(maxsize=100_000)
def commits(ledger: tuple[Entry, ...]) -> tuple[Entry, ...]:
    return tuple(entry for entry in ledger if entry.kind == "checkpoint" and entry.content)


@lru_cache(maxsize=100_000)
def live(ledger: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The one predicate: committed, and no `delete` entry names it."""
    deleted = {entry.ref for entry in ledger if entry.kind == "delete"}
    return tuple(entry for entry in commits(ledger) if entry.n not in deleted)


def attempt(state: State, key: int) -> Attempt:
    for found in state.attempts:
        if found.key == key:
            return found
    raise KeyError(key)


def final_name(rules: Rules, found: Attempt) -> tuple[str, ...]:
    if rules.names_carry_sequence:
        return ("f", str(found.step), str(found.seq))
    return ("f", str(found.step))


def writing_name(key: int) -> tuple[str, ...]:
    return ("w", str(key))


def name_of(rules: Rules, found: Attempt) -> tuple[str, ...]:
    return writing_name(found.key) if found.place == "w" else final_name(rules, found)


def holder(state: State, rules: Rules, name: tuple[str, ...]) -> Attempt | None:
    """Who has this name now? Processes act on names, and may well find another's folder there."""
    for found in state.attempts:
        if found.place == name[0] and name_of(rules, found) == name:
            return found
    return None


def complete(found: Attempt) -> bool:
    return found.place == "f" and found.shard != "-" and found.manifest != "-"


def with_attempt(state: State, new: Attempt) -> State:
    others = [found for found in state.attempts if found.key != new.key]
    return state._replace(attempts=tuple(sorted([*others, new])))


def with_entry(state: State, new: Entry) -> State:
    others = [entry for entry in state.ledger if new.n == TOMBSTONE or entry.n != new.n]
    return state._replace(ledger=tuple(sorted([*others, new])))


def mark(state: State, broken: str) -> State:
    """The action under way breaks this invariant."""
    return state._replace(bad=broken)


def remove_file(state: State, key: int) -> State:
    """The first of two steps of a removal. Durable at once: the order that does most harm."""
    return with_attempt(state, attempt(state, key)._replace(shard="-"))


def remove_rest(state: State, key: int) -> State:
    return with_attempt(state, attempt(state, key)._replace(manifest="-").moved("x"))


def unlink(state: State, *numbers: int) -> State:
    """Only a deletion that tidies the ledger does this. Durable at once: the order that does most harm."""
    kept = tuple(entry for entry in state.ledger if entry.n not in numbers)
    acked = tuple(pair for pair in state.acked if pair[0] not in numbers)
    return state._replace(ledger=kept, acked=acked, tidied=tuple(sorted({*state.tidied, *numbers})))


def acknowledge(state: State, n: int, key: int) -> State:
    return state._replace(acked=tuple(sorted({*state.acked, (n, key)})), ever=True)


def superseded(state: State, writer: Writer) -> bool:
    return any(entry.kind == "open" and entry.n > writer.fence for entry in state.ledger)


def _past(n: int, kind: str, ref: int = -1, parent: int = 0) -> Entry:
    return Entry(n, kind, DEAD, ref, parent, durable=True)


def _saved(key: int, step: int, seq: int) -> Attempt:
    return Attempt(key, step, seq, 1, "f", "d", "d", final=True)


# What incarnations that are dead for good left behind: it saves the search their steps.
HISTORIES: dict[str, tuple[tuple[Entry, ...], tuple[Attempt, ...], tuple[tuple[int, int], ...]]] = {
    "empty": ((), (), ()),
    "uncommitted": ((_past(1, "open"),), (_saved(90, 1, 2),), ()),
    "one": ((_past(1, "open"), _past(2, "checkpoint", 90)), (_saved(90, 1, 2),), ((2, 90),)),
    "two": (
        (_past(1, "open"), _past(2, "checkpoint", 90), _past(3, "checkpoint", 91, 2)),
        (_saved(90, 1, 2), _saved(91, 2, 3)),
        ((2, 90), (3, 91)),
    ),
}


def initial(config: Config) -> State:
    ledger, attempts, acked = HISTORIES[config.history]
    writer = Writer(saves=config.saves, deletes=config.deletes, fails=config.failed_saves)
    reader = Reader() if config.reader else Reader("absent")
    return State(ledger, attempts, (writer,) * config.writers, reader, config.cuts, acked=acked, ever=bool(acked))
