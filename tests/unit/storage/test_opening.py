"""From a URL to a store, what a place can do, and telling a store from an empty mount point."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onward.catalog.stores import init_store, open_home, read_store_record
from onward.errors import ConfigurationError, Damaged, StoreMissing, StoreUnsuitable
from onward.storage.base import AlreadyExists, Barrier
from onward.storage.memory import MemoryStore
from onward.storage.posix import PosixStore
from onward.storage.probe import probe
from onward.storage.registry import open_store
from support import furnish


def test_a_url_or_a_path_names_a_folder(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for url, root in (
        ("file:///a/b", "/a/b"),
        ("file://localhost/a/b", "/a/b"),
        ("file:///a%20b/c", "/a b/c"),
        ("/a/b/", "/a/b"),
    ):
        store = open_store(url)
        assert isinstance(store, PosixStore)
        assert str(store.root) == root
    monkeypatch.chdir(fast_path)
    relative = open_store("below")
    assert isinstance(relative, PosixStore)
    assert relative.root == fast_path / "below"


@pytest.mark.parametrize("url", ["", "s3://bucket/key", "file://host/path", "http://x", "x://"])
def test_a_url_that_no_store_answers_to_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_store(url)
    assert caught.value.next_step


@pytest.mark.parametrize("url", ["file:///data/run#1", "file:///data/run?x=1", "file://", "file://localhost"])
def test_a_url_whose_part_would_be_lost_is_refused(url: str) -> None:
    """A fragment or a query is no part of a path: without it another folder would be used, without a word."""
    with pytest.raises(ConfigurationError):
        open_store(url)


def test_a_memory_store_is_one_store_by_name() -> None:
    assert open_store("memory://one") is open_store("memory://one")
    assert open_store("memory://one") is not open_store("memory://two")


def test_the_probe_finds_what_a_folder_can_do_and_leaves_nothing(fast_path: Path) -> None:
    found = probe(PosixStore(fast_path))
    assert (found.problems, found.publish, found.create_if_absent, found.folder_sync) == ((), "link", True, True)
    assert found.clock_skew_seconds == 0.0
    assert os.listdir(fast_path) == []
    assert found.as_dict()["problems"] == []
    assert probe(MemoryStore()).problems == ()


class NoLinks(PosixStore):
    """A filesystem without hard links, such as exFAT or some FUSE mounts."""

    def _give_name(self, temp: str, path: str) -> None:
        if self.publish == "link":
            from onward.errors import StorageError

            raise StorageError(f"publish {path}: EPERM")
        super()._give_name(temp, path)


def test_where_links_do_not_work_names_are_given_by_a_rename_that_replaces_nothing(fast_path: Path) -> None:
    store = NoLinks(fast_path)
    assert probe(store).publish == "rename"
    store.create("a", b"1", content=Barrier.ENTRY, name=None)
    with pytest.raises(AlreadyExists):
        store.create("a", b"2", content=Barrier.ENTRY, name=None)


class TwoWinners(MemoryStore):
    """A place that lets the last writer win, as an object store without conditions does."""

    def create(self, path: str, data: bytes, *, content: Barrier, name: Barrier | None) -> None:
        self.files[path] = data


def test_a_place_where_two_can_win_one_name_cannot_be_a_home() -> None:
    found = probe(TwoWinners())
    assert not found.create_if_absent
    assert "two jobs could commit one number" in found.problems[0]


def test_an_unsuitable_place_is_not_initialised(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.catalog.stores.open_store", lambda url, mode: TwoWinners())
    with pytest.raises(StoreUnsuitable, match="cannot be a home"):
        init_store("memory://two-winners")


def test_initialising_twice_is_refused_and_changes_nothing(fast_path: Path) -> None:
    url = f"file://{fast_path}/a/b"
    record, found = init_store(url, mode="group", tier="shared")
    assert found.problems == ()
    with pytest.raises(ConfigurationError, match="is a store already"):
        init_store(url)
    store, again = open_home(url)
    assert again == read_store_record(store)
    assert again.store == record.store
    assert isinstance(store, PosixStore)
    assert (again.tier, again.mode, store.mode, store.publish) == ("shared", "group", "group", "link")


def test_an_empty_folder_or_no_folder_is_not_a_store(fast_path: Path) -> None:
    """An unmounted filesystem looks like this: it must never be taken for a first start."""
    for url in (f"file://{fast_path}", f"file://{fast_path}/nowhere", "memory://nothing-there"):
        with pytest.raises(StoreMissing) as caught:
            open_home(url)
        assert "onward init" in caught.value.next_step


def test_a_damaged_store_file_is_refused_with_a_way_out() -> None:
    store = MemoryStore("test")
    furnish(store)
    store.files["onward.json"] = store.files["onward.json"].replace(b"private", b"umask")
    with pytest.raises(Damaged, match="own digest") as caught:
        open_home(store)
    assert "onward init" in caught.value.next_step
