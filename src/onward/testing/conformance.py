"""What every store must do, as a suite that the author of a store subclasses.

    class TestMyStore(StoreConformance):
        def make(self) -> Store:
            return MyStore(...)

Each test makes an empty store of its own. A store that can only be read subclasses ``ReadOnlyConformance`` and fills
its store in ``filled``. Nothing here needs a test framework; any runner that calls ``test_*`` methods will do.
"""

from __future__ import annotations

import mmap
import threading
from abc import abstractmethod
from collections.abc import Callable

from onward.errors import OnwardError, StorageError
from onward.storage.base import AlreadyExists, Barrier, NotFound, Store, remove_tree, sync_tree
from onward.testing.reading import CONTENT, LIMIT, ReadingConformance, ReadOnlyConformance, create, fill, refused

__all__ = ["ReadOnlyConformance", "ReadingConformance", "StoreConformance", "fill"]

ODD_NAMES = ("a b", "quote'\"", "emoji-\U0001f680", "\u4e2d\u6587", ".hidden", "-dash", "semi;colon", "50%", "x" * 200)
_RACERS = 8
_PAGE = 4096


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
        assert {path: store.read(path, limit=LIMIT) for path in CONTENT} == CONTENT

    def test_a_creation_leaves_nothing_beside_the_file(self) -> None:
        store = self.make()
        create(store, "one")
        with refused(AlreadyExists):
            create(store, "one")
        store.replace("one", b"two")
        store.replace("new", b"three")
        assert [item.name for item in store.list("")] == ["new", "one"]
        assert store.read("one", limit=LIMIT) == b"two"

    def test_a_file_needs_its_folder(self) -> None:
        store = self.filled()
        for path in ("nowhere/file", "nowhere/at/all"):
            with refused(NotFound, "nowhere"):
                create(store, path)
            with refused(NotFound, "nowhere"):
                store.open_new(path)
            with refused(NotFound, "nowhere"):
                store.replace(path, b"x")
            with refused(NotFound, "nowhere"):
                store.make_folder(path)

    def test_of_racing_creations_one_wins_whole(self) -> None:
        """Create-if-absent has one winner, and nobody ever sees an empty or a mixed file."""
        store = self.make()
        for turn in range(4):
            path = f"entry-{turn}"
            won, lost = race(lambda number, path=path: create(store, path, bytes([number]) * 1000))  # type: ignore[misc]
            assert len(won) == 1
            assert all(isinstance(error, AlreadyExists) for error in lost), lost
            assert store.read(path, limit=LIMIT) == bytes(won) * 1000

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
        for name in ODD_NAMES:
            create(store, name, name.encode())
        assert {item.name for item in store.list("")} == set(ODD_NAMES)
        assert all(store.read(name, limit=LIMIT) == name.encode() for name in ODD_NAMES)

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
        assert store.read("file", limit=LIMIT) == b"abcd\x01\x00\x02\x00z"

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

    def test_a_direct_file_is_the_same_file(self) -> None:
        """Whether or not the store can write past the cache: aligned memory, odd memory, odd lengths, in any order."""
        store = self.make()
        aligned = memoryview(mmap.mmap(-1, 4 * _PAGE))
        aligned[:] = bytes(range(256)) * (4 * _PAGE // 256)
        orders: tuple[tuple[memoryview | bytes, ...], ...] = (
            (aligned,),
            (bytes(aligned[:_PAGE]), aligned[_PAGE:]),
            (aligned[: 2 * _PAGE], aligned[2 * _PAGE : 3 * _PAGE + 5], aligned[3 * _PAGE + 5 :]),
            (aligned[:7], aligned[7:]),
            (b"", aligned[:_PAGE], b"", aligned[_PAGE : 2 * _PAGE], aligned[2 * _PAGE :]),
        )
        for number, parts in enumerate(orders):
            sink = store.open_new(f"file-{number}", direct=True)
            for part in parts:
                sink.write(part)
            assert sink.finish(Barrier.SHARD) == len(aligned)
            assert store.read(f"file-{number}", limit=LIMIT) == bytes(aligned)

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
        assert store.read("folder/inner", limit=LIMIT) == CONTENT["folder/inner"]

    def test_a_folder_is_renamed_with_all_that_is_in_it(self) -> None:
        store = self.filled()
        store.rename_folder("folder", "moved")
        assert store.read("moved/deeper/last", limit=LIMIT) == CONTENT["folder/deeper/last"]
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
        assert store.read("folder/inner", limit=LIMIT) == CONTENT["folder/inner"]
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
        assert store.read("folder/inner", limit=LIMIT) == b"new"

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
