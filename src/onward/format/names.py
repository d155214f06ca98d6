"""Names and places: every path that format 1 knows, and which names are acceptable.

Numbers are taken from names by exact match, never by sorting text: ``step-…500`` must not win over ``step-…2500``.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from onward.errors import FormatError, InvalidName

STORE_FILE = "onward.json"
RUNS = "runs"
MANIFEST, SUMS, LAYOUT, INTENT = "manifest.json", "manifest.sha256", "layout.json", "intent.json"
RECORD, INDEX, STATE, ASSETS = "record.json", "index.json.zst", "state.json", "assets"
SHARD_SUFFIX = ".safetensors"

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_COMPONENT = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}", re.ASCII)
_FOLDER = re.compile(r"step-(\d{12,18})-([1-9]\d{0,17})", re.ASCII)
_WRITING = re.compile(r"step-(\d{12,18})-([1-9]\d{0,17})\.writing-([0-9a-f]{8,64})", re.ASCII)
_ENTRY = re.compile(r"(\d{9,18})\.json", re.ASCII)
_RESERVED = frozenset({"latest", "last", "newest", "current", "best"})
_MAX_PART, _MAX_PATH = 255, 1024


@dataclass(frozen=True)
class RunPlaces:
    """The places of one run, relative to the store's root."""

    run: str

    @property
    def root(self) -> str:
        return f"{RUNS}/{self.run}"

    @property
    def run_file(self) -> str:
        return f"{self.root}/run.json"

    @property
    def lease(self) -> str:
        return f"{self.root}/lease.json"

    @property
    def ledger(self) -> str:
        return f"{self.root}/ledger"

    @property
    def checkpoints(self) -> str:
        return f"{self.root}/checkpoints"

    @property
    def attempts(self) -> str:
        return f"{self.root}/attempts"

    @property
    def receipts(self) -> str:
        return f"{self.root}/receipts"

    @property
    def deleted(self) -> str:
        return f"{self.root}/deleted"

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders that a new run has, parents first."""
        return (self.root, self.ledger, self.checkpoints, self.attempts, self.receipts, self.deleted)

    def entry(self, sequence: int) -> str:
        """The ledger entry of this number."""
        return f"{self.ledger}/{sequence:09d}.json"

    def checkpoint(self, folder: str) -> str:
        """A checkpoint's folder."""
        return f"{self.checkpoints}/{folder}"


@dataclass(frozen=True)
class WritingName:
    """What the name of an attempt's folder says. Its sequence dates it: see ``catalog/recovery.py``."""

    step: int
    sequence: int
    attempt: str


def run_name(name: str) -> str:
    """Returns ``name`` if a run may be called so.

    Raises:
        InvalidName: It is not a plain name, or is one that people use for a pointer.
    """
    if not _RUN.fullmatch(name) or name.lower() in _RESERVED or name.endswith("."):
        raise InvalidName(f"a run cannot be called {name!r}")
    return name


def component_name(name: str) -> str:
    """Returns ``name`` if a component may be called so; raises InvalidName otherwise."""
    if not _COMPONENT.fullmatch(name):
        raise InvalidName(f"a component cannot be called {name!r}")
    return name


def checkpoint_folder(step: int, sequence: int) -> str:
    """The folder of a checkpoint: step and sequence, so that no name is ever used twice."""
    return f"step-{step:012d}-{sequence}"


def parse_checkpoint_folder(name: str) -> tuple[int, int] | None:
    """Step and sequence of a checkpoint folder's name; None for any other name."""
    found = _FOLDER.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def writing_folder(step: int, sequence: int, attempt: str) -> str:
    """The folder of an attempt in progress."""
    return f"{checkpoint_folder(step, sequence)}.writing-{attempt}"


def parse_writing_folder(name: str) -> WritingName | None:
    """What an attempt folder's name says; None for any other name."""
    found = _WRITING.fullmatch(name)
    return WritingName(step=int(found[1]), sequence=int(found[2]), attempt=found[3]) if found else None


def parse_entry(name: str) -> int | None:
    """The number of a ledger entry's file name; None for any other name."""
    found = _ENTRY.fullmatch(name)
    if not found or (found[1].startswith("0") and len(found[1]) > 9):
        return None
    return int(found[1])


def rank_folder(rank: int) -> str:
    """The folder of what one rank wrote."""
    return f"rank-{rank:05d}"


def shard_name(number: int) -> str:
    """The name of a rank's n-th shard file."""
    return f"{number:03d}{SHARD_SUFFIX}"


def relative_path(path: str) -> str:
    """Returns ``path`` if it may stand in a manifest, a record or a checksum list.

    Raises:
        FormatError: It could lead out of the checkpoint, or two systems could read it differently.
    """
    if not path or len(path.encode("utf-8", "surrogatepass")) > _MAX_PATH:
        raise FormatError(f"the path {path[:80]!r} is empty or too long")
    if unicodedata.normalize("NFC", path) != path:
        raise FormatError(f"the path {path!r} is not in Unicode normal form C")
    for part in path.split("/"):
        if part in ("", ".", "..") or len(part.encode("utf-8", "surrogatepass")) > _MAX_PART:
            raise FormatError(f"the path {path!r} is not a plain relative path")
        if any(ord(c) < 32 or ord(c) == 127 or c == "\\" or 0xD800 <= ord(c) < 0xE000 for c in part):
            raise FormatError(f"the path {path!r} has a character that no path of a checkpoint may have")
    return path


def distinct_paths(paths: list[str]) -> None:
    """Refuses two paths that one filesystem would take for one.

    Raises:
        FormatError: Two paths are equal, or differ in case only, or one is a folder of another.
    """
    seen: dict[str, str] = {}
    for path in paths:
        folded = relative_path(path).casefold()
        if folded in seen:
            raise FormatError(f"the paths {seen[folded]!r} and {path!r} name one file")
        seen[folded] = path
    for path in paths:
        for at, character in enumerate(path):
            if character == "/" and path[:at].casefold() in seen:
                raise FormatError(f"the path {path!r} has the file {path[:at]!r} as its folder")
