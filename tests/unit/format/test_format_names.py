"""Names and places: what is accepted, what is not, and that order follows numbers and never text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import FormatError, InvalidName
from onward.format.names import (
    RunPlaces,
    checkpoint_folder,
    component_name,
    distinct_paths,
    parse_checkpoint_folder,
    parse_entry,
    parse_writing_folder,
    rank_folder,
    relative_path,
    run_name,
    shard_name,
    writing_folder,
)

NUMBERS = st.integers(0, 10**18 - 1)
SEQUENCES = st.integers(1, 10**18 - 1)


@given(NUMBERS, SEQUENCES)
def test_a_checkpoints_name_says_step_and_sequence_and_is_read_back(step: int, sequence: int) -> None:
    assert parse_checkpoint_folder(checkpoint_folder(step, sequence)) == (step, sequence)


@given(NUMBERS, SEQUENCES, st.binary(min_size=4, max_size=32))
def test_an_attempts_name_is_read_back_and_is_never_a_checkpoints(step: int, sequence: int, attempt: bytes) -> None:
    name = writing_folder(step, sequence, attempt.hex())
    found = parse_writing_folder(name)
    assert found is not None
    assert (found.step, found.sequence, found.attempt) == (step, sequence, attempt.hex())
    assert parse_checkpoint_folder(name) is None
    assert parse_writing_folder(checkpoint_folder(step, sequence)) is None


@pytest.mark.parametrize(
    "name",
    [
        *("", "step-10-2", "step-000000000010", "step-000000000010-", "step-000000000010-0", "step-000000000010-02"),
        *(
            "step-000000000010-2 ",
            " step-000000000010-2",
            "step-000000000010-2\n",
            "step-000000000010-2/",
            "handpicked",
        ),
        *("step--00000000010-2", "step-000000000010--2", "STEP-000000000010-2", "step-000000000010-2.tmp"),
        *("step-00000000001a-2", "step-\u0660\u0661\u0662\u0663\u0664\u0665\u0666\u0667\u0668\u0669\u0660\u0661-2"),
        *("step-" + "1" * 19 + "-2", "step-000000000010-" + "1" * 19, "100000", "0900000", "latest", "handpicked"),
    ],
)
def test_no_other_name_is_taken_for_a_checkpoint(name: str) -> None:
    """T14: a hand-named sibling is left alone, whatever numbers it holds."""
    assert parse_checkpoint_folder(name) is None


def test_order_follows_the_numbers_in_the_names_not_their_text() -> None:
    """T13: 500 does not win over 2500, nor 9000 over 10000; T14: nor do steps beyond the padding."""
    steps = [9, 10, 90, 200, 500, 1000, 2500, 9000, 10_000, 999_999_999_999, 1_000_000_000_000, 10**17]
    names = [checkpoint_folder(step, number + 1) for number, step in enumerate(steps)]
    shuffled = random.Random(7).sample(names, len(names))
    assert sorted(shuffled, key=lambda name: parse_checkpoint_folder(name) or (0, 0)) == names
    assert sorted(names) != names, "the control: as text they are in another order"


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("000000001.json", 1),
        ("000000042.json", 42),
        ("999999999.json", 999_999_999),
        ("1000000000.json", 10**9),
        *(
            (name, None)
            for name in ("1.json", "0000000001.json", "000000001.json~", "000000001", ".000000001.json.ab.tmp")
        ),
        *(
            (name, None)
            for name in ("-00000001.json", "00000000a.json", "\u0661" * 9 + ".json", "0" * 19 + ".json", "")
        ),
    ],
)
def test_a_ledger_entrys_number_has_one_spelling(name: str, number: int | None) -> None:
    assert parse_entry(name) == number


@given(st.integers(1, 10**18 - 1))
def test_the_place_of_an_entry_is_read_back(number: int) -> None:
    assert parse_entry(RunPlaces("r").entry(number).rpartition("/")[2]) == number


@pytest.mark.parametrize("name", ["a", "A", "0", "llama3-8b", "a.b_c-d", "x" * 128, "latest-run", "0-9"])
def test_plain_run_names_are_accepted(name: str) -> None:
    assert run_name(name) == name


@pytest.mark.parametrize("name", ["latest", "last", "newest", "current", "best", "Latest", "LAST"])
def test_names_that_people_use_for_a_pointer_are_refused_for_a_run(name: str) -> None:
    """T20: a run called 'latest' would look like a pointer to itself."""
    with pytest.raises(InvalidName):
        run_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".a",
        "-a",
        "_a",
        "a/b",
        "a\\b",
        "a b",
        "a\x00",
        "a\n",
        "a.",
        "x" * 129,
        "\u00e9",
        "a:b",
        "../a",
        "a\u0661",
    ],
)
def test_names_that_are_no_plain_names_are_refused_for_a_run(name: str) -> None:
    with pytest.raises(InvalidName) as caught:
        run_name(name)
    assert caught.value.next_step


def test_component_names_begin_with_a_letter_or_an_underscore() -> None:
    for name in ("model", "_ema", "a.b", "a-b", "x" * 128):
        assert component_name(name) == name
    for name in ("", "0model", "a/b", "a b", "x" * 129, "\u00e9", "model\n", ".."):
        with pytest.raises(InvalidName):
            component_name(name)


@given(st.text(max_size=60))
def test_a_path_that_is_accepted_stays_below_its_folder(path: str) -> None:
    """Whatever the text: it is refused, or its parts are plain names and joining them leads downwards only."""
    try:
        accepted = relative_path(path)
    except FormatError:
        return
    assert accepted == path
    parts = path.split("/")
    assert not path.startswith("/")
    assert all(part not in ("", ".", "..") for part in parts)
    assert not any(ord(c) < 32 or c == "\\" for c in path)


@given(st.lists(st.sampled_from(["a", "A", "b", "\u00df", "SS", "ss", "\u0130", "i", "x/y", "X/y"]), max_size=5))
def test_paths_are_distinct_also_to_a_filesystem_that_ignores_case(paths: list[str]) -> None:
    folded = [path.casefold() for path in paths]
    if len(set(folded)) == len(folded):
        distinct_paths(paths)
    else:
        with pytest.raises(FormatError, match="name one file"):
            distinct_paths(paths)


def test_the_places_of_a_run_are_what_the_format_says() -> None:
    places = RunPlaces("r")
    assert places.entry(42) == "runs/r/ledger/000000042.json"
    assert places.checkpoint(checkpoint_folder(10_000, 42)) == "runs/r/checkpoints/step-000000010000-42"
    assert (rank_folder(0), rank_folder(123_456), shard_name(0), shard_name(1000)) == (
        *("rank-00000", "rank-123456"),
        *("000.safetensors", "1000.safetensors"),
    )
    assert [places.run_file, places.lease] == ["runs/r/run.json", "runs/r/lease.json"]
    assert places.folders == (
        "runs/r",
        *(f"runs/r/{name}" for name in ("ledger", "checkpoints", "attempts", "receipts", "deleted")),
    )
