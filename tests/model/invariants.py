"""What must never happen, by name. An invariant is a function that is True of every good state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .world import State, at, attempt, commits, complete, live

Invariants = Mapping[str, Callable[[State], bool]]


def acknowledged_lost(state: State) -> bool:
    """What was reported as saved is in the ledger for ever (only a deletion that tidies may take it out)."""
    return all(_is_there(state, n, key) for n, key in state.acked)


def live_commit_incomplete(state: State) -> bool:
    """A live commit points to complete files: nobody removed, half removed, moved or lost them."""
    return all(complete(attempt(state, entry.ref)) for entry in live(state.ledger))


def fork(state: State) -> bool:
    """Between a commit and the commit it continues there is none that its writer did not know of."""
    found = commits(state.ledger)
    return not any(one.parent < other.n < one.n for one in found for other in found)


def believed_vanished(state: State) -> bool:
    """What a reader used, or a commit continues, does not disappear from the ledger afterwards."""
    read = state.reader
    if read.pc == "done" and not _is_there(state, read.n, read.key):
        return False
    return all(not entry.parent or _is_there(state, entry.parent) for entry in commits(state.ledger))


def nothing_left(state: State) -> bool:
    """Once anything was saved there is always something to resume from."""
    return not state.ever or any(complete(attempt(state, entry.ref)) for entry in live(state.ledger))


def ledger_hole(state: State) -> bool:
    """The entry before is there: each carries its digest, so a hole would read as damage."""
    numbers = [entry.n for entry in state.ledger if entry.n > 0]
    return numbers == list(range(1, len(numbers) + 1))


def _is_there(state: State, n: int, key: int | None = None) -> bool:
    if n in state.tidied:
        return True
    entry = at(state.ledger, n)
    return entry is not None and entry in commits(state.ledger) and (key is None or entry.ref == key)


def _not_marked(name: str) -> Callable[[State], bool]:
    return lambda state: state.bad != name


# Harm: a run loses something, or is told something untrue.
HARM: Invariants = {
    "acknowledged_lost": acknowledged_lost,
    "live_commit_incomplete": live_commit_incomplete,
    "fork": fork,
    "believed_vanished": believed_vanished,
    "nothing_left": nothing_left,
    "reader_mix": _not_marked("reader_mix"),  # a reader ended with bytes of two attempts, or of the wrong one
    "false_damage": _not_marked("false_damage"),  # a deleted checkpoint was reported as damaged
    "empty_entry_seen": _not_marked("empty_entry_seen"),  # somebody listed an entry that has no content
}

# Discipline: promises that keep harm away, watched in their own right.
DISCIPLINE: Invariants = {
    "superseded_deletes": _not_marked("superseded_deletes"),  # a superseded writer decided to delete
    "younger_touched": _not_marked("younger_touched"),  # recovery acted on an attempt that is not older
    "name_used_twice": _not_marked("name_used_twice"),
    "number_used_twice": _not_marked("number_used_twice"),
    "ledger_hole": ledger_hole,
}

ALL: Invariants = {**HARM, **DISCIPLINE}
