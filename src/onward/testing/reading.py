"""What every store must do that can be read: the part of the conformance suite that changes nothing.

See ``conformance.py`` for how the suite is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from onward.errors import Damaged, OnwardError, StorageError
from onward.storage.base import Barrier, NotFound, Store, remove_tree, walk_files

CONTENT = {
    "plain": b"0123456789",
    "empty": b"",
    "folder/inner": b"\x00\xff" * 500,
    "folder/deeper/last": b"z",
}
"""What ``ReadingConformance.filled`` must hold: path → bytes."""
LIMIT = 1 << 20


@contextmanager
def refused(kind: type[OnwardError] | tuple[type[OnwardError], ...], naming: str = "") -> Iterator[None]:
    """The block must raise ``kind``, and the message must name the path."""
    try:
        yield
    except kind as error:
        assert naming in error.message, f"{error.message!r} does not name {naming!r}"
    else:
        raise AssertionError(f"nothing was refused; {kind} was due")


def fill(store: Store) -> None:
    """Puts ``CONTENT`` into a store that can be written to."""
    store.make_folder("folder")
    store.make_folder("folder/deeper")
    for path, data in CONTENT.items():
        create(store, path, data)


def create(store: Store, path: str, data: bytes = b"x") -> None:
    """Creates a file whose name is durable."""
    store.create(path, data, content=Barrier.META, name=Barrier.RUN_FOLDER)


class ReadingConformance(ABC):
    """What can be asked of any store, also of one that nobody may write to."""

    @abstractmethod
    def filled(self) -> Store:
        """A store that holds ``CONTENT`` and nothing else."""

    def test_a_file_is_read_whole(self) -> None:
        store = self.filled()
        assert {path: store.read(path, limit=LIMIT) for path in CONTENT} == CONTENT

    def test_a_file_larger_than_the_limit_is_refused(self) -> None:
        store = self.filled()
        assert store.read("plain", limit=10) == CONTENT["plain"]
        with refused(Damaged, "plain"):
            store.read("plain", limit=9)

    def test_a_range_is_read_into_the_callers_memory(self) -> None:
        store = self.filled()
        memory = bytearray(b"........")
        store.read_into("plain", 3, memoryview(memory)[2:6])
        assert memory == b"..3456.."
        store.read_into("plain", 10, memoryview(memory)[:0])
        store.read_into("empty", 0, memoryview(memory)[:0])
        assert memory == b"..3456.."

    def test_a_range_beyond_the_end_is_damage(self) -> None:
        store = self.filled()
        for path, start in (("plain", 7), ("plain", 10), ("plain", 10**6), ("empty", 0)):
            with refused(Damaged, path):
                store.read_into(path, start, memoryview(bytearray(4)))

    def test_what_is_not_there_is_not_found(self) -> None:
        store = self.filled()
        for path, named in (("nothing", "nothing"), ("folder/nothing", "nothing"), ("nowhere/at/all", "nowhere")):
            with refused(NotFound, named):
                store.read(path, limit=LIMIT)
            with refused(NotFound, named):
                store.read_into(path, 0, memoryview(bytearray(1)))
            with refused(NotFound, named):
                store.stat(path)
            with refused(NotFound, named):
                store.list(path)

    def test_a_folder_is_no_file(self) -> None:
        store = self.filled()
        with refused(OnwardError, "folder"):
            store.read("folder", limit=LIMIT)
        with refused(OnwardError, "plain"):
            store.list("plain")
        with refused(OnwardError, "plain"):
            store.read("plain/below", limit=LIMIT)

    def test_facts_tell_kind_and_size(self) -> None:
        store = self.filled()
        facts = {path: store.stat(path) for path in (*CONTENT, "folder")}
        assert {path: fact.size for path, fact in facts.items() if fact.kind == "file"} == {
            path: len(data) for path, data in CONTENT.items()
        }
        assert facts["folder"].kind == "folder"
        assert facts["folder/inner"].name == "inner"

    def test_a_listing_is_sorted_and_not_deep(self) -> None:
        store = self.filled()
        assert [(item.name, item.kind) for item in store.list("folder")] == [("deeper", "folder"), ("inner", "file")]
        assert [item.name for item in store.list("")] == ["empty", "folder", "plain"]

    def test_a_walk_finds_every_file(self) -> None:
        store = self.filled()
        assert sorted(path for path, _ in walk_files(store, "folder")) == ["deeper/last", "inner"]

    def test_no_path_leads_out_of_the_store(self) -> None:
        store = self.filled()
        for path in ("../outside", "folder/../../outside", "..", "folder/..", "folder/\x00"):
            with refused(OnwardError):
                store.read(path, limit=LIMIT)
            with refused(OnwardError):
                store.list(path)
            with refused(OnwardError):
                store.stat(path)

    def test_free_space_is_a_number_or_unknown(self) -> None:
        free = self.filled().free_bytes()
        assert free is None or free >= 0

    def test_dropping_the_cache_changes_nothing(self) -> None:
        store = self.filled()
        store.drop_cache("plain")
        assert store.read("plain", limit=LIMIT) == CONTENT["plain"]


class ReadOnlyConformance(ReadingConformance):
    """Reading as above; every change is refused, and nothing changes."""

    def test_every_change_is_refused(self) -> None:
        store = self.filled()
        changes: tuple[Callable[[], object], ...] = (
            lambda: create(store, "new"),
            lambda: store.replace("plain", b"other"),
            lambda: store.open_new("new"),
            lambda: store.make_folder("new"),
            lambda: store.make_folder("folder", exist_ok=True),
            lambda: store.rename_folder("folder", "moved"),
            lambda: store.remove("plain"),
            lambda: store.remove_folder("folder/deeper"),
            lambda: remove_tree(store, "folder"),
        )
        for change in changes:
            with refused(StorageError):
                change()
        assert {path: store.read(path, limit=LIMIT) for path in CONTENT} == CONTENT
        assert [item.name for item in store.list("")] == ["empty", "folder", "plain"]

    def test_what_a_reader_syncs_may_be_synced(self) -> None:
        self.filled().sync_folder("folder", Barrier.LEDGER_BELIEVED)
