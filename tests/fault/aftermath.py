"""What had been promised before a power cut, and what of it is broken after it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onward.errors import StoreMissing
from onward.storage.memory import MemoryStore
from onward.testing.powercut import Tree

from .harness import Broken, check_second_recovery, check_stories, examine


@dataclass(frozen=True)
class Promised:
    """What had been promised before a cut, from the marks of the log."""

    initialised: bool
    acknowledged: frozenset[str]
    believed: frozenset[str]
    deleting: frozenset[str]
    deleted: frozenset[str]


def promised(marks: Iterable[str]) -> Promised:
    by_kind: dict[str, set[str]] = {}
    for mark in marks:
        kind, _, folder = mark.partition(" ")
        by_kind.setdefault(kind, set()).add(folder)
    kinds = {kind: frozenset(by_kind.get(kind, ())) for kind in ("acknowledged", "believed", "deleting", "deleted")}
    return Promised("initialised" in by_kind, **kinds)


def broken_after_cut(tree: Tree, promise: Promised, *, thorough: bool) -> list[Broken]:
    """Takes over what the cut has left, and returns every invariant that is broken."""
    store = MemoryStore("after the cut")
    store.files.update(tree.files)
    store.folders.update(dict.fromkeys(tree.folders, 0.0))
    seen, broken = examine(store)
    if seen is None:
        if not isinstance(broken[0].__cause__, StoreMissing):
            return broken
        return [Broken("store", "the store itself is gone")] if promise.initialised else []
    offered = {info.folder for info in seen.catalog.offered()}
    for folder in promise.acknowledged - promise.deleting - offered:
        broken.append(Broken("acknowledged", f"{folder} was acknowledged and is not there"))
    for folder in promise.believed - promise.deleting - offered:
        broken.append(Broken("believed", f"{folder} was the ground of an incarnation and is not there"))
    for folder in promise.deleted & offered:
        broken.append(Broken("deleted", f"{folder} was deleted and is offered"))
    for check in (check_stories, check_second_recovery) if thorough else (check_stories,):
        try:
            check(store)
        except Broken as problem:
            broken.append(problem)
    return broken
