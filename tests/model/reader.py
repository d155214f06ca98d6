"""A reader: lists the ledger, takes the newest live checkpoint, reads its files, and looks again if one is missing."""

from __future__ import annotations

from collections.abc import Iterator

from . import disk
from .rules import Config
from .world import Entry, Reader, State, attempt, final_name, holder, live, mark


def steps(config: Config, state: State) -> Iterator[tuple[str, State]]:
    read = state.reader
    if read.pc == "idle":
        yield from _list(config, state)
    elif read.pc in ("manifest", "shard"):
        yield from _read_file(config, state)
    elif read.pc == "missing":
        yield from _look_again(config, state)


def _list(config: Config, state: State) -> Iterator[tuple[str, State]]:
    # A stale LIST answers as of an earlier moment: some entries at the end are not in it yet.
    ends = range(1, len(state.ledger) + 1) if config.stale else [len(state.ledger)]
    after = disk.list_ledger(state, -1, config.rules.fsync_ledger_before_believing)
    for newest in sorted({found[-1] for end in ends if (found := live(after.ledger[:end]))}):
        yield f"lists the ledger, chooses {newest.n}", _at(after, "manifest", newest)


def _at(state: State, pc: str, entry: Entry) -> State:
    return state._replace(reader=Reader(pc, entry.n, entry.ref))


def _read_file(config: Config, state: State) -> Iterator[tuple[str, State]]:
    read = state.reader
    found = holder(state, config.rules, final_name(config.rules, attempt(state, read.key)))
    here = found is not None and getattr(found, read.pc) != "-"
    wrong = found is not None and config.rules.reader_checks_digests and found.key != read.key
    if found is None or not here or wrong:
        yield f"finds the {read.pc} missing or not as named", state._replace(reader=read._replace(pc="missing"))
    elif read.pc == "manifest":
        yield "reads the manifest", state._replace(reader=read._replace(pc="shard", got=found.key))
    else:
        mixed = not read.key == read.got == found.key
        after = mark(state, "reader_mix") if mixed else state
        yield f"reads the shards, uses {read.n}", after._replace(reader=read._replace(pc="done", got=-1))


def _look_again(config: Config, state: State) -> Iterator[tuple[str, State]]:
    rules, read = config.rules, state.reader
    here = next(i for i, entry in enumerate(state.ledger) if entry.n == read.n) if _entry_there(state) else 0
    ends = [len(state.ledger)]
    if config.stale and not rules.reader_gets_when_missing:
        ends = list(range(here + 1, len(state.ledger) + 1))
    if not rules.look_again_when_missing:
        ends = [here + 1]
    really = any(entry.n == read.n for entry in live(state.ledger))
    for seen in sorted({any(entry.n == read.n for entry in live(state.ledger[:end])) for end in ends}):
        if seen:
            after = state if really else mark(state, "false_damage")
            yield f"calls {read.n} damaged", after._replace(reader=Reader("ended"))
        else:
            yield f"looks again: {read.n} was deleted", state._replace(reader=Reader())


def _entry_there(state: State) -> bool:
    return any(entry.n == state.reader.n for entry in state.ledger)
