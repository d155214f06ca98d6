"""A POSIX file system as a power cut sees it: what is visible, and what of it would survive."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from .rules import Rules
from .world import STOPPED, Attempt, Entry, Reader, State, commits, final_name, mark, with_attempt


def sync_ledger(state: State) -> State:
    """All names in ledger/ are durable. (The content of a file is not: that is the file's own fsync.)"""
    if all(entry.durable for entry in state.ledger):
        return state
    return state._replace(ledger=tuple(entry._replace(durable=True) for entry in state.ledger))


def list_ledger(state: State, observer: int, sync: bool) -> State:
    """List, then fsync the directory if the rule asks for it.

    One step stands for both. Entries that appear between the two would become durable without being seen; a
    power cut may always keep an entry that is not durable, so every outcome of that order is explored anyway.
    """
    if any(not entry.content and entry.owner != observer for entry in state.ledger):
        return mark(state, "empty_entry_seen")
    return sync_ledger(state) if sync else state


def sync_checkpoints(state: State) -> State:
    return state._replace(attempts=tuple(found._replace(places=found.place) for found in state.attempts))


def sync_folder(found: Attempt) -> Attempt:
    names = {"-": "-", "c": "m", "n": "d", "m": "m", "d": "d"}
    return found._replace(shard=names[found.shard], manifest=names[found.manifest])


def rename_to_final(rules: Rules, state: State, found: Attempt) -> State | None:
    """None if the name is taken: a rename onto a folder that is not empty fails."""
    name = final_name(rules, found)
    same = [other for other in state.attempts if other.key != found.key and final_name(rules, other) == name]
    if any(other.place == "f" for other in same):
        return None
    if any(other.final for other in same):
        state = mark(state, "name_used_twice")
    state = with_attempt(state, found.moved("f"))
    return sync_checkpoints(state) if rules.fsync_checkpoints_after_rename else state


def power_cuts(state: State) -> Iterator[State]:
    """Every state that a power cut may leave: each name and each content that was not synced is kept or lost."""
    named = {entry.ref for entry in commits(state.ledger)}
    entries = [_entry_after(entry) for entry in state.ledger]
    attempts = [_attempt_after(found, found.key in named) for found in state.attempts]
    writers = tuple(writer if writer.pc == "idle" else STOPPED for writer in state.writers)
    # A reader that ended keeps what it read: a node elsewhere goes on with it.
    reader = state.reader if state.reader.pc in ("done", "absent") else Reader()
    for kept in product(*entries):
        ledger = tuple(entry for entry in kept if entry is not None)
        for left in product(*attempts):
            # What never had its final name and was removed by a dead writer cannot matter any more.
            rest = tuple(found for found in left if found.place != "x" or found.final)
            yield state._replace(
                ledger=ledger, attempts=rest, writers=writers, reader=reader, cuts=state.cuts - 1, bad=""
            )


def _entry_after(entry: Entry) -> list[Entry | None]:
    contents = ["d", ""] if entry.content == "c" else [entry.content]
    kept: list[Entry | None] = [entry._replace(durable=True, content=content) for content in contents]
    return kept if entry.durable else [None, *kept]


def _attempt_after(found: Attempt, named: bool) -> list[Attempt]:
    # The files of an attempt that no entry names are read by nobody, and its writer is dead: they need no cases.
    shards = _file_after(found.shard) if named else ["-"]
    manifests = _file_after(found.manifest) if named else ["-"]
    after = []
    for place in sorted(set(found.places)):
        final = found.final and not (place == "w" and "w" in found.places)
        after += [
            found._replace(places=place, shard=shard, manifest=manifest, final=final)
            for shard in shards
            for manifest in manifests
        ]
    return after


def _file_after(file: str) -> list[str]:
    return [file] if file in "-d" else ["-", "d"]
