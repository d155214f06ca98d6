"""What every store must do, as a suite that the author of a store subclasses.

    class TestMyStore(StoreConformance):
        def make(self) -> Store:
            return MyStore(...)

Each test makes an empty store of its own. A store that can only be read subclasses ``ReadingConformance`` and fills
its store in ``filled``. Nothing here needs a test framework; any runner that calls ``test_*`` methods will do.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from onward.errors import Damaged, OnwardError, StorageError
from onward.storage.base import AlreadyExists, Barrier, NotFound, Store, remove_tree, sync_tree, walk_files

CONTENT = {
    "plain": b"0123456789",
    "empty": b"",
    "folder/inner": b"\x00\xff" * 500,
    "folder/deeper/last": b"z",
}
"""What ``ReadingConformance.filled`` must hold: path → bytes."""
ODD_NAMES = ("a b", "quote'\"", "emoji-\U0001f680", "\u4e2d\u6587", ".hidden", "-dash", "x" * 255, "semi;colon", "50%")
_LIMIT = 1 << 20
_RACERS = 8


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


def race(action: Callable[[int], object]) -> tuple[list[int], list[OnwardError]]:
    """Calls ``action`` from several threads at once: who came through, and the errors of the others."""
    won: list[int] = []
    lost: list[OnwardError] = []
    start = threading.Barrier(_RACERS)

    def racer(number: int) -> None:
        start.wait()
        try:
            action(number)
            won.append(number)
        except OnwardError as error:
            lost.append(error)

    threads = [threading.Thread(target=racer, args=(number,)) for number in range(_RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won, lost


class ReadingConformance(ABC):
    """What can be asked of any store, also of one that nobody may write to."""

    @abstractmethod
    def filled(self) -> Store:
        """A store that holds ``CONTENT`` and nothing else."""

    def test_a_file_is_read_whole(self) -> None:
        store = self.filled()
        assert {path: store.read(path, limit=_LIMIT) for path in CONTENT} == CONTENT

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
        for path in ("nothing", "folder/nothing", "nowhere/at/all"):
            with refused(NotFound, path):
                store.read(path, limit=_LIMIT)
            with refused(NotFound, path):
                store.read_into(path, 0, memoryview(bytearray(1)))
            with refused(NotFound, path):
                store.stat(path)
            with refused(NotFound, path):
                store.list(path)

    def test_a_folder_is_no_file(self) -> None:
        store = self.filled()
        with refused(OnwardError, "folder"):
            store.read("folder", limit=_LIMIT)
        with refused(OnwardError, "plain"):
            store.list("plain")
        with refused(OnwardError, "plain"):
            store.read("plain/below", limit=_LIMIT)

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
                store.read(path, limit=_LIMIT)
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
        assert store.read("plain", limit=_LIMIT) == CONTENT["plain"]


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
        assert {path: store.read(path, limit=_LIMIT) for path in CONTENT} == CONTENT
        assert [item.name for item in store.list("")] == ["empty", "folder", "plain"]

    def test_what_a_reader_syncs_may_be_synced(self) -> None:
        self.filled().sync_folder("folder", Barrier.LEDGER_BELIEVED)


class StoreConformance(ReadingConformance):
    """All that a home must do."""

    @abstractmethod
    def make(self) -> Store:
        """An empty store."""

    def filled(self) -> Store:
        store = self.make()
        fill(store)
        return store

    # --- creating at once ---------------------------------------------------------------------------------------

    def test_a_name_is_given_once(self) -> None:
        store = self.filled()
        for path in (*CONTENT, "folder"):
            with refused(AlreadyExists, path):
                create(store, path, b"other")
            with refused(AlreadyExists, path):
                store.open_new(path)
        assert {path: store.read(path, limit=_LIMIT) for path in CONTENT} == CONTENT

    def test_a_creation_leaves_nothing_beside_the_file(self) -> None:
        store = self.make()
        create(store, "one")
        with refused(AlreadyExists):
            create(store, "one")
        store.replace("one", b"two")
        store.replace("new", b"three")
        assert [item.name for item in store.list("")] == ["new", "one"]
        assert store.read("one", limit=_LIMIT) == b"two"

    def test_a_file_needs_its_folder(self) -> None:
        store = self.filled()
        for path in ("nowhere/file", "nowhere/at/all"):
            with refused(NotFound, path):
                create(store, path)
            with refused(NotFound, path):
                store.open_new(path)
            with refused(NotFound, path):
                store.replace(path, b"x")
            with refused(NotFound, path):
                store.make_folder(path)

    def test_of_racing_creations_one_wins_whole(self) -> None:
        """Create-if-absent has one winner, and nobody ever sees an empty or a mixed file."""
        store = self.make()
        for turn in range(4):
            path = f"entry-{turn}"
            won, lost = race(lambda number, path=path: create(store, path, bytes([number]) * 1000))  # type: ignore[misc]
            assert len(won) == 1
            assert all(isinstance(error, AlreadyExists) for error in lost), lost
            assert store.read(path, limit=_LIMIT) == bytes(won) * 1000

    def test_of_racing_openings_one_wins(self) -> None:
        store = self.make()
        won, lost = race(lambda number: store.open_new("file").finish(Barrier.SHARD))
        assert len(won) == 1
        assert all(isinstance(error, AlreadyExists) for error in lost), lost

    def test_of_racing_foldermakers_one_wins_and_all_may_share(self) -> None:
        store = self.make()
        won, lost = race(lambda number: store.make_folder("alone"))
        assert len(won) == 1
        assert all(isinstance(error, AlreadyExists) for error in lost), lost
        won, lost = race(lambda number: store.make_folder("shared", exist_ok=True))
        assert (len(won), lost) == (_RACERS, [])

    def test_odd_names_are_names(self) -> None:
        store = self.make()
        for name in ODD_NAMES[:-3]:
            create(store, name, name.encode())
        assert {item.name for item in store.list("")} == set(ODD_NAMES[:-3])
        assert all(store.read(name, limit=_LIMIT) == name.encode() for name in ODD_NAMES[:-3])

    # --- writing in parts ---------------------------------------------------------------------------------------

    def test_a_file_is_written_in_parts_of_any_kind(self) -> None:
        store = self.make()
        sink = store.open_new("file")
        sink.write(b"ab")
        sink.write(bytearray(b"cd"))
        sink.write(memoryview(bytearray(b"\x01\x00\x02\x00")).cast("H"))
        sink.write(memoryview(b"zyxw")[::1][:1])
        sink.write(b"")
        assert sink.finish(Barrier.SHARD) == 9
        assert store.read("file", limit=_LIMIT) == b"abcd\x01\x00\x02\x00z"

    def test_a_large_part_is_written_whole(self) -> None:
        store = self.make()
        data = bytes(range(256)) * (40 * 1024)  # larger than any block in which a store may write
        sink = store.open_new("file")
        sink.write(data)
        assert sink.finish(Barrier.SHARD) == len(data)
        assert store.read("file", limit=len(data)) == data
        tail = memoryview(bytearray(256))
        store.read_into("file", len(data) - 256, tail)
        assert tail == data[-256:]

    def test_an_abandoned_file_promises_nothing_and_raises_nothing(self) -> None:
        store = self.make()
        sink = store.open_new("file")
        sink.write(b"half")
        sink.abandon()
        sink.abandon()
        store.remove("file")
        assert store.list("") == []

    # --- folders ------------------------------------------------------------------------------------------------

    def test_a_folder_is_made_once_unless_it_may_be_there(self) -> None:
        store = self.filled()
        with refused(AlreadyExists, "folder"):
            store.make_folder("folder")
        store.make_folder("folder", exist_ok=True)
        with refused(AlreadyExists, "plain"):
            store.make_folder("plain", exist_ok=True)
        assert store.read("folder/inner", limit=_LIMIT) == CONTENT["folder/inner"]

    def test_a_folder_is_renamed_with_all_that_is_in_it(self) -> None:
        store = self.filled()
        store.rename_folder("folder", "moved")
        assert store.read("moved/deeper/last", limit=_LIMIT) == CONTENT["folder/deeper/last"]
        with refused(NotFound):
            store.list("folder")
        store.make_folder("folder")
        assert store.list("folder") == []

    def test_a_folder_is_never_renamed_over_something(self) -> None:
        """Not over a file, a full folder, or an empty folder, which rename(2) would replace without a word."""
        store = self.filled()
        store.make_folder("vacant")
        store.make_folder("full")
        create(store, "full/file")
        for target in ("vacant", "full", "plain"):
            with refused(AlreadyExists, target):
                store.rename_folder("folder", target)
        with refused(NotFound):
            store.rename_folder("nothing", "somewhere")
        assert store.read("folder/inner", limit=_LIMIT) == CONTENT["folder/inner"]
        assert store.list("vacant") == []

    def test_only_an_empty_folder_is_removed(self) -> None:
        store = self.filled()
        with refused(StorageError, "folder"):
            store.remove_folder("folder")
        store.remove("folder/deeper/last")
        store.remove_folder("folder/deeper")
        store.remove_folder("folder/deeper")
        assert [item.name for item in store.list("folder")] == ["inner"]

    def test_removing_what_is_not_there_is_no_error(self) -> None:
        store = self.filled()
        store.remove("nothing")
        store.remove("nowhere/at/all")
        store.remove_folder("nothing")
        remove_tree(store, "nothing")

    def test_a_tree_is_removed_and_its_name_is_free_again(self) -> None:
        store = self.filled()
        remove_tree(store, "folder")
        assert [item.name for item in store.list("")] == ["empty", "plain"]
        store.make_folder("folder")
        create(store, "folder/inner", b"new")
        assert store.read("folder/inner", limit=_LIMIT) == b"new"

    # --- barriers -----------------------------------------------------------------------------------------------

    def test_files_and_folders_can_be_synced(self) -> None:
        store = self.filled()
        store.sync_folder("folder", Barrier.LEDGER_COMMIT)
        store.sync_file("folder/inner", Barrier.ADOPTED)
        sync_tree(store, "folder", Barrier.ADOPTED)
        for path in ("nothing", "folder/nothing"):
            with refused(NotFound, path):
                store.sync_folder(path, Barrier.LEDGER_COMMIT)
            with refused(NotFound, path):
                store.sync_file(path, Barrier.ADOPTED)

    def test_nothing_is_written_out_of_the_store(self) -> None:
        store = self.filled()
        for path in ("../outside", "folder/../../outside", "..", "folder/.."):
            with refused(OnwardError):
                create(store, path)
            with refused(OnwardError):
                store.open_new(path)
            with refused(OnwardError):
                store.make_folder(path)
            with refused(OnwardError):
                store.rename_folder("folder", path)
            with refused(OnwardError):
                store.replace(path, b"x")
        assert [item.name for item in store.list("")] == ["empty", "folder", "plain"]
