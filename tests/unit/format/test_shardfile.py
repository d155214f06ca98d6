"""Shard headers: stock readers open what we write, and we accept nothing that the reference implementation refuses."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from onward.errors import FormatError
from onward.format.dtypes import SAFETENSORS_ITEMSIZE
from onward.format.shardfile import (
    ALIGN,
    HEADER_LIMIT,
    ShardEntry,
    build_header,
    entry_name,
    header_size,
    parse_header,
)

FUZZED = 4000
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


def item_bytes(dtype: str) -> int:
    if dtype not in SAFETENSORS_ITEMSIZE:
        raise FormatError(f"the file names the unknown dtype {dtype}")
    return SAFETENSORS_ITEMSIZE[dtype]


def ours(data: bytes) -> tuple[list[ShardEntry], dict[str, str]]:
    """What our parser makes of a whole file."""
    size = header_size(data[:8], len(data), "the file")
    return parse_header(data[:size], len(data), "the file", item_bytes)


def theirs(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """What the reference implementation makes of it."""
    return safetensors.deserialize(data)


def file_of(header: str | bytes, data: int = 0) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text + bytes(data)


def entries_of(shapes: dict[str, tuple[str, tuple[int, ...]]]) -> list[ShardEntry]:
    found: list[ShardEntry] = []
    begin = 0
    for name, (dtype, shape) in shapes.items():
        end = begin + SAFETENSORS_ITEMSIZE[dtype]
        for n in shape:
            end = begin + (end - begin) * n
        found.append(ShardEntry(name=name, dtype=dtype, shape=shape, begin=begin, end=end))
        begin = end
    return found


SHAPES = st.dictionaries(
    NAMES.filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(SAFETENSORS_ITEMSIZE)), st.lists(st.integers(0, 5), max_size=4).map(tuple)),
    max_size=6,
)


@given(SHAPES, st.dictionaries(NAMES, NAMES, max_size=3), st.randoms(use_true_random=False))
def test_stock_safetensors_opens_what_we_write(
    shapes: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str], source: random.Random
) -> None:
    """Names of any text, every dtype of the format, empty and 0-d tensors; bytes and shapes as they were written."""
    entries = entries_of(shapes)
    head = build_header(entries, metadata)
    assert len(head) % ALIGN == 0
    body = source.randbytes(max((entry.end for entry in entries), default=0))
    found = {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in theirs(head + body)}
    assert found == {e.name: (e.dtype, e.shape, body[e.begin : e.end]) for e in entries}
    again, said = ours(head + body)
    assert (sorted(again, key=lambda e: e.name), said) == (sorted(entries, key=lambda e: e.name), metadata)


def test_we_read_what_stock_safetensors_writes() -> None:
    import numpy as np

    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((0, 2), np.int8), "c": np.float64(2.0)}
    data = save({name: np.asarray(array) for name, array in arrays.items()}, {"made": "by the reference"})
    entries, metadata = ours(data)
    assert metadata == {"made": "by the reference"}
    assert {e.name: (e.dtype, e.shape) for e in entries} == {
        "a": ("F32", (2, 3)),
        "b": ("I8", (0, 2)),
        "c": ("F64", ()),
    }


def good() -> tuple[dict[str, Any], int]:
    table = {
        "__metadata__": {"k": "v"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "U8", "shape": [5], "data_offsets": [24, 29]},
        "e": {"dtype": "BF16", "shape": [0], "data_offsets": [29, 29]},
    }
    return table, 29


def changed(**entry: object) -> str:
    table, _ = good()
    table["a"] |= entry
    return json.dumps(table)


DEFECTS: dict[str, tuple[bytes, str]] = {
    "one byte short": (file_of(json.dumps(good()[0]), 28), "bytes; its header accounts for"),
    "one byte more": (file_of(json.dumps(good()[0]), 30), "bytes; its header accounts for"),
    "no header": (b"", "too short"),
    "seven bytes": (b"\0" * 7, "too short"),
    "a header longer than the file": (file_of(json.dumps(good()[0]), 29)[:40], "says its header has"),
    "a header of 2**63 bytes": ((2**63).to_bytes(8, "little") + b"{}", "says its header has"),
    "not JSON": (file_of("{]"), "not JSON"),
    "JSON that is cut": (file_of(json.dumps(good()[0])[:-1], 29), "not JSON"),
    "not UTF-8": (file_of(b'{"\xff":1}'), "not JSON"),
    "a list": (file_of("[]"), "not"),
    "a blank before it": (file_of(" " + json.dumps(good()[0]), 29), ""),
    "deep nesting": (file_of('{"a":' * 100_000), "not JSON"),
    "a name twice": (file_of('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' * 2 + '"b":{}}'), "not JSON"),
    "metadata that is no table": (file_of('{"__metadata__":[]}'), "__metadata__"),
    "metadata that is no text": (file_of('{"__metadata__":{"a":1}}'), "__metadata__"),
    "an entry that is no table": (file_of('{"a":7}'), "is not dtype, shape and data_offsets"),
    "a field too many": (file_of(changed(more=1), 29), "is not dtype, shape and data_offsets"),
    "an unknown dtype": (file_of(changed(dtype="F33"), 29), "F33"),
    "a wrong dtype size": (file_of(changed(dtype="F64"), 29), "cannot have 24 bytes"),
    "a wrong shape": (file_of(changed(shape=[2, 4]), 29), "cannot have 24 bytes"),
    "a negative size": (file_of(changed(shape=[-2, -3]), 29), "natural|impossible"),
    "a size that is no integer": (file_of(changed(shape=[2.0, 3]), 29), "impossible"),
    "a size that is true": (file_of(changed(shape=[True, 6]), 29), "impossible"),
    "three offsets": (file_of(changed(data_offsets=[0, 12, 24]), 29), "impossible"),
    "offsets the wrong way": (file_of(changed(data_offsets=[24, 0]), 29), ""),
    "overlapping tensors": (file_of(changed(data_offsets=[5, 29]), 29), ""),
    "a gap": (
        file_of(json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}), 3),
        "belong to no tensor",
    ),
    "a huge size beside none": (file_of(changed(shape=[0, 2**64], data_offsets=[0, 0]), 29), ""),
    "a product that overflows": (file_of(changed(shape=[2**40, 2**40, 0], data_offsets=[0, 0]), 29), ""),
    "a negative zero": (file_of(changed(shape=[0]).replace("[0]", "[-0]").replace("24", "0"), 0), ""),
    "half a surrogate pair": (file_of('{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), ""),
    "NaN": (file_of(changed(shape=[float("nan")]), 29), ""),
}


STRICTER = ("a name twice", "a field too many", "a blank before it")
"""What the reference lets pass: it believes the last of two, and looks away."""


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_is_named_and_the_reference_refuses_it_too(defect: str) -> None:
    """T148: cut, longer, header length, JSON, overlap, wrong dtype size: each has its own message."""
    data, reason = DEFECTS[defect]
    with pytest.raises(FormatError, match=reason or None) as caught:
        ours(data)
    assert "the file" in caught.value.message
    if defect not in STRICTER:
        with pytest.raises(safetensors.SafetensorError):
            theirs(data)


def mutated(source: random.Random) -> bytes:
    """A good file with one to three small changes of its text or its size."""
    table, size = good()
    text = bytearray(json.dumps(table, separators=(",", ":")), "utf-8")
    for _ in range(source.randint(1, 2)):
        at = source.randrange(len(text))
        choice = source.randrange(7)
        if choice == 0:
            text[at] ^= 1 << source.randrange(8)
        elif choice == 1:
            del text[at : at + source.randint(1, 4)]
        elif choice == 2:
            text[at:at] = source.choice([b"0", b"1", b"9", b"-", b".", b" ", b'"', b"[", b"]", b"{", b"}", b",", b"e"])
        elif choice == 3:
            digits = [n for n, c in enumerate(text) if 48 <= c < 58]
            text[source.choice(digits)] = source.choice(b"0123456789")
        elif choice == 4:
            names = [n for n, c in enumerate(text) if c in b"abe"]
            text[source.choice(names)] = source.choice(b"abexyz _@.")
        elif choice == 5:
            text += b" " * source.randint(1, 3)
        else:
            size = max(0, size + source.choice([-5, -1, 1, 5, 24]))
    return file_of(bytes(text), size)


def test_our_parser_accepts_no_header_that_the_reference_refuses() -> None:
    """Random changes of a good file; where the two differ, ours is the stricter, and for a reason that is listed."""
    source = random.Random(11)
    judged: Counter[str] = Counter()
    for _ in range(FUZZED):
        data = mutated(source)
        try:
            mine, reason = {e.name: (e.dtype, e.shape) for e in ours(data)[0]}, ""
        except FormatError as error:
            mine, reason = None, error.message
        try:
            reference = theirs(data)
        except safetensors.SafetensorError:
            assert mine is None, data
            judged["both refuse"] += 1
            continue
        if mine is not None:
            assert {n: (t["dtype"], tuple(t["shape"])) for n, t in reference} == mine
            judged["both accept"] += 1
        else:
            stricter = ("stands twice", "is not dtype, shape and data_offsets", "unknown dtype", "begin with")
            assert any(words in reason for words in stricter), (reason, data)
            judged["ours is stricter"] += 1
    print({**judged}, f"{FUZZED} headers")
    assert min(judged["both accept"], judged["both refuse"]) > 100


def test_a_header_larger_than_stock_readers_take_is_not_written() -> None:
    entry = ShardEntry(name="x" * HEADER_LIMIT, dtype="U8", shape=(0,), begin=0, end=0)
    with pytest.raises(FormatError, match="stock readers"):
        build_header([entry], {})


def test_a_part_of_a_tensor_is_named_by_its_offset() -> None:
    assert entry_name('["model","w"]', (1024, 0), False) == '["model","w"]@1024,0'
    assert entry_name('["model","w"]', (0, 0), True) == '["model","w"]'
