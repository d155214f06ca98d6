"""Hostile bytes given straight to each decoder: refused by name, with a reason, without a large allocation."""

from __future__ import annotations

import pytest

from onward.errors import FormatError, OnwardError, UnknownFormat
from support import Image

from .decoders import DECODERS, KINDS, SEALED, example, little_memory, one_checkpoint, refused, written
from .forging import spell


@pytest.fixture(scope="module")
def world() -> Image:
    return one_checkpoint()


@pytest.mark.parametrize("kind", KINDS)
def test_the_untouched_example_is_accepted(world: Image, kind: str) -> None:
    """The control of all the refusals below."""
    DECODERS[kind][1](written(kind, example(world, kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_record_is_refused(world: Image, kind: str) -> None:
    good = written(kind, example(world, kind))
    for data in (
        b"",
        b"\n",
        b"{",
        b"[]\n",
        b"null\n",
        b"7\n",
        b'"text"\n',
        b"{}\n",
        b"\xff\xfe" + good,
        b"\xef\xbb\xbf" + good,
    ):
        refused(kind, data)
    for data in (
        good[:-1],
        good[:-2],
        good[: len(good) // 2],
        good + b"\n",
        good + b"{}\n",
        b" " + good,
        good * 2,
        b"\xff\xfe" + good,
    ):
        refused(kind, data)
    refused(kind, b"\x00" * 1000)
    refused(kind, b"\xef\xbb\xbf" + good)
    refused(kind, good.replace(b":", b": ", 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_doubled_key_is_refused(world: Image, kind: str) -> None:
    """Two readers could believe either; here the second spelling is a lie and comes first, then last."""
    good = spell(example(world, kind))
    refused(kind, b'{"format":1,' + good[1:])
    refused(kind, good[:-2] + b',"format":1}\n')


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_is_needed_and_no_other_is_taken(world: Image, kind: str) -> None:
    table = example(world, kind)
    optional = {"sha256", "counters", "replicas", "tie", "mesh", "placements", "boxes", "training_started"}
    for name in table.keys() - optional:
        # Of a field with a default only the spelling shows that it is missing.
        reason = "" if name == "type" else f"{name}|canonical"
        refused(kind, spell({k: v for k, v in table.items() if k != name}), reason)
    refused(kind, written(kind, {**table, "surprise": 1}), "surprise")


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_the_wrong_type_is_refused(world: Image, kind: str) -> None:
    table = example(world, kind)
    free = {"details", "probe", "data_position", "base", "epoch", "parent", "model_config_sha256", "sha256"}
    for name in table.keys() - free:
        for wrong in (True, [1], {"a": 1}, 1.5, "text", 7, None):
            if type(wrong) is type(table[name]) or (isinstance(wrong, dict) and name == "components"):
                continue
            if name == "lease_seconds" and wrong == 7:
                continue  # an integer is a good number of seconds; its spelling is not canonical
            refused(kind, written(kind, {**table, name: wrong}))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_any_size_end_in_a_refusal_or_a_record_never_in_another_error(world: Image, kind: str) -> None:
    table = example(world, kind)
    for name in [n for n, value in table.items() if type(value) is int]:
        for number in (-1, -(2**63), 2**63, 2**64, 10**30, 10**400):
            data = spell(table).replace(f'"{name}":{table[name]}'.encode(), f'"{name}":{number}'.encode())
            with little_memory():
                try:
                    DECODERS[kind][1](data)
                except OnwardError as error:
                    assert error.message


@pytest.mark.parametrize("kind", KINDS)
def test_deep_nesting_is_refused(world: Image, kind: str) -> None:
    """Around the depth at which Python's own stack ends, and far beyond it; free-form fields are the way in."""
    table = example(world, kind)
    ways = {"details", "probe", "data_position", "base", "components"} & table.keys()
    for depth in (*range(900, 1010), 100_000):
        if depth % 50 == 0:
            refused(kind, b'{"a":' * depth + b"1" + b"}" * depth + b"\n")
        for name in ways:
            nested = {"deep": "HERE"} if name == "components" else "HERE"
            data = spell({**table, name: nested}).replace(b'"HERE"', b"[" * depth + b"]" * depth)
            with little_memory():
                try:
                    DECODERS[kind][1](data)
                except FormatError as error:
                    assert error.message


@pytest.mark.parametrize("kind", KINDS)
def test_a_newer_format_is_told_from_damage(world: Image, kind: str) -> None:
    """A file of format 2 says "upgrade"; a version that never was, or one with a wrong digest, is damage."""
    table = example(world, kind)
    newer = {**table, "format": 2, "something": "new"}
    refused(kind, written(kind, newer), "is of format 2", UnknownFormat)
    refused(kind, written(kind, {**table, "format": 2}), "is of format 2", UnknownFormat)
    for never in (0, -1, -(2**40)):
        refused(kind, written(kind, {**table, "format": never}))
    if kind in SEALED:
        refused(kind, spell({**table, "format": 3}), "own digest")


@pytest.mark.parametrize("kind", SEALED)
def test_a_record_whose_own_digest_is_wrong_is_refused(world: Image, kind: str) -> None:
    table = example(world, kind)
    for name in ("", "0" * 64, "x", table["sha256"].upper()):
        refused(kind, spell({**table, "sha256": name}), "own digest")
