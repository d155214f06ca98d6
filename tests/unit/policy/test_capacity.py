"""Room is judged before anything is written, with the numbers in the answer."""

from __future__ import annotations

import pytest

from onward.catalog.incarnation import Incarnation
from onward.errors import EXIT_NO_CAPACITY, NoCapacity
from onward.policy.capacity import MEMORY_MARGIN, METADATA_BYTES, SAFETY, human, require_memory, require_space
from onward.storage.memory import MemoryStore
from support import commit

GB = 10**9


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1_500_000, "1.5 MB"),
        (GB, "1.0 GB"),
        (10**12, "1.0 TB"),
        (10**16, "10000.0 TB"),
    ],
)
def test_bytes_are_shown_as_a_person_reads_them(count: int, shown: str) -> None:
    assert human(count) == shown


def test_a_tier_with_too_little_room_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        NoCapacity, match=r"the tier home has 1\.0 GB free; this checkpoint needs 2\.1 GB.*1\.1 GB"
    ) as caught:
        require_space(2 * GB, GB, "the tier home")
    assert caught.value.exit_code == EXIT_NO_CAPACITY
    need = int(2 * GB * SAFETY) + METADATA_BYTES
    require_space(2 * GB, need, "the tier home")
    with pytest.raises(NoCapacity):
        require_space(2 * GB, need - 1, "the tier home")


def test_a_tier_that_cannot_say_is_not_refused() -> None:
    require_space(10**18, None, "an object store")


def test_memory_that_is_held_already_needs_no_room() -> None:
    require_memory(0, 0, "MemAvailable")
    require_memory(GB, None, "")
    require_memory(GB, GB + MEMORY_MARGIN, "MemAvailable")
    with pytest.raises(NoCapacity, match=r"the cgroup limit of /x leaves 1\.3 GB") as caught:
        require_memory(GB, GB + MEMORY_MARGIN - 1, "the cgroup limit of /x")
    assert "before the save" in caught.value.next_step


def test_a_save_into_a_full_tier_writes_nothing(store: MemoryStore, run: Incarnation) -> None:
    before = dict(store.files)
    store.free_bytes = lambda: 1000  # type: ignore[method-assign]
    with pytest.raises(NoCapacity, match="the tier home"):
        commit(run, 10)
    assert store.files == before
    store.free_bytes = lambda: None  # type: ignore[method-assign]
    commit(run, 10)
