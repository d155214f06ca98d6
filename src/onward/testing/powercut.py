"""A disk as a power cut sees it: what of a recorded run is sure to survive, and what may or may not.

The rules are those that POSIX gives, and no more. Bytes of a file are sure after an fsync of the file; names in a
folder are sure after an fsync of that folder (not of the file, not of the folder above). Everything since then
survives or not: each change of a name by itself or only in order, each file's new bytes whole, in part, as zeros or
not at all. A rename is one change.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from onward.testing.recorder import Operation

Content = Literal["synced", "written", "part", "zeros"]


@dataclass(frozen=True)
class Tree:
    """What is found on a disk: files with their bytes, and folders, by path relative to the root."""

    files: Mapping[str, bytes]
    folders: frozenset[str]


@dataclass(frozen=True)
class Fate:
    """What becomes of everything that was not synced.

    Attributes:
        name: For messages.
        names: Which changes of names survive: ``none``, ``all``, in each folder a ``prefix`` (a journal), or ``any``
            subset (no order at all).
        content: What becomes of unsynced bytes: the first is certain, several are drawn from.
        seed: Where a choice is drawn, from this.
    """

    name: str
    names: Literal["none", "all", "prefix", "any"]
    content: tuple[Content, ...]
    seed: int = 0


NOTHING = Fate("nothing unsynced survives", "none", ("synced",))
EVERYTHING = Fate("everything survives", "all", ("written",))
NAMES_ONLY = Fate("names survive, unsynced bytes do not", "all", ("synced",))
ZEROS = Fate("names and sizes survive, unsynced bytes are zeros", "all", ("zeros",))
BYTES_ONLY = Fate("unsynced bytes survive, names do not", "none", ("written",))
PLAIN_FATES = (NOTHING, EVERYTHING, NAMES_ONLY, ZEROS, BYTES_ONLY)


def drawn_fates(seed: int, count: int) -> Iterator[Fate]:
    """Fates in which chance decides, half of them with the changes of each folder kept in order."""
    every: tuple[Content, ...] = ("synced", "written", "part", "zeros")
    for at in range(count):
        order: Literal["prefix", "any"] = "prefix" if at % 2 else "any"
        yield Fate(f"drawn, {order}, seed {seed + at}", order, every, seed + at)


Change = tuple[tuple[str, "Node | None"], ...]
"""One change of a folder: names and what they lead to from now on; None takes the name away."""


@dataclass(eq=False)
class Node:
    """A file or a folder, whatever names lead to it."""

    folder: bool
    synced: bytes = b""
    written: bytearray = field(default_factory=bytearray)
    sure: dict[str, Node] = field(default_factory=dict)
    now: dict[str, Node] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def change(self, *names: tuple[str, Node | None]) -> None:
        """Changes names in this folder, not durably."""
        _apply(self.now, names)
        self.pending.append(names)

    def sync(self) -> None:
        """What fsync promises."""
        self.synced = bytes(self.written)
        for change in self.pending:
            _apply(self.sure, change)
        self.pending.clear()


class Disk:
    """The model. Begins with a tree that is all durable; ``apply`` it a log; ask what a cut may leave."""

    def __init__(self, files: Mapping[str, bytes], folders: Iterable[str]) -> None:
        self.root = Node(folder=True)
        for path in sorted(path for path in folders if path):
            parent, name = self._parent(path)
            parent.change((name, Node(folder=True)))
        for path, data in files.items():
            parent, name = self._parent(path)
            parent.change((name, Node(folder=False, synced=data, written=bytearray(data))))
        for node in _nodes(self.root):
            node.sync()

    def apply(self, operation: Operation) -> None:
        """One recorded operation takes effect."""
        name, path = operation.name, operation.path
        if name in ("mark", "fchmod"):
            return
        if name in ("write", "fsync"):
            node = self._find(path)
            if name == "fsync":
                node.sync()
            else:
                node.written += operation.data
            return
        parent, last = self._parent(path)
        if name in ("open", "mkdir"):
            parent.change((last, Node(folder=name == "mkdir")))
        elif name in ("unlink", "rmdir"):
            parent.change((last, None))
        else:
            assert operation.source is not None
            old = operation.source.rpartition("/")[2]
            moved = self._find(operation.source)
            parent.change((last, moved), *([(old, None)] if name == "rename" else []))

    def after_cut(self, fate: Fate) -> Tree:
        """What is found after a power cut now, if unsynced effects have this fate."""
        draw = random.Random(fate.seed)
        files: dict[str, bytes] = {}
        folders: set[str] = set()
        # A file with two names has one fate.
        contents: dict[int, bytes] = {}

        def visit(node: Node, path: str) -> None:
            names = dict(node.sure)
            for change in _surviving(node.pending, fate, draw):
                _apply(names, change)
            for name, child in sorted(names.items()):
                where = f"{path}/{name}" if path else name
                if child.folder:
                    folders.add(where)
                    visit(child, where)
                else:
                    files[where] = contents.setdefault(id(child), _content(child, draw.choice(fate.content), draw))

        visit(self.root, "")
        return Tree(files, frozenset(folders))

    def forbids(self, found: Tree) -> list[str]:
        """Why a cut now could not have left this tree; empty when it could. A real cut is compared with it."""
        problems: list[str] = []

        def visit(node: Node, path: str) -> None:
            possible: dict[str, set[Node | None]] = {name: {child} for name, child in node.sure.items()}
            for change in node.pending:
                for name, child in change:
                    possible.setdefault(name, {None}).add(child)
            prefix = f"{path}/" if path else ""
            here = {p[len(prefix) :].partition("/")[0] for p in (*found.files, *found.folders) if p.startswith(prefix)}
            for name in sorted(here | set(possible)):
                where = prefix + name
                fitting = [n for n in possible.get(name, {None}) if n is None or n.folder == (where in found.folders)]
                if name not in here:
                    if None not in fitting:
                        problems.append(f"{where} is gone, though its name was synced")
                    continue
                nodes = [n for n in fitting if n is not None]
                if not nodes:
                    problems.append(f"{where} is there, though it was never made or its removal was synced")
                elif where in found.folders:
                    visit(nodes[-1], where)
                elif not any(_may_hold(n, found.files[where]) for n in nodes):
                    problems.append(f"{where} holds {len(found.files[where])} bytes that no cut can have left")

        visit(self.root, "")
        return problems

    def _find(self, path: str) -> Node:
        node = self.root
        for part in path.split("/"):
            if part not in ("", "."):
                node = node.now[part]
        return node

    def _parent(self, path: str) -> tuple[Node, str]:
        folder, _, name = path.rpartition("/")
        return self._find(folder), name


def _apply(names: dict[str, Node], change: Change) -> None:
    for name, child in change:
        if child is None:
            names.pop(name, None)
        else:
            names[name] = child


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node.now.values():
        yield from _nodes(child)


def _surviving(pending: list[Change], fate: Fate, draw: random.Random) -> list[Change]:
    if fate.names == "all":
        return pending
    if fate.names == "prefix":
        return pending[: draw.randint(0, len(pending))]
    if fate.names == "any":
        return [change for change in pending if draw.random() < 0.5]
    return []


def _content(node: Node, kind: Content, draw: random.Random) -> bytes:
    written, synced = bytes(node.written), node.synced
    if kind == "synced" or written == synced:
        return synced
    if kind == "zeros":
        return synced + bytes(len(written) - len(synced))
    if kind == "part":
        return written[: draw.randint(len(synced), len(written))]
    return written


def _may_hold(node: Node, data: bytes) -> bool:
    fresh = range(len(node.synced), len(data))
    return (
        len(node.synced) <= len(data) <= len(node.written)
        and data.startswith(node.synced)
        and all(data[at] in (0, node.written[at]) for at in fresh)
    )
