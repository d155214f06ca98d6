"""Canonical spelling, seals and the rules between fields; the hostile side is in the fault tests."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import FormatError, UnknownFormat
from onward.format import codec
from onward.format.digests import EMPTY_SHA256, sha256, xxh3
from onward.records import (
    CheckpointEntry,
    DeleteEntry,
    Index,
    IndexFile,
    Layout,
    OpenEntry,
    Piece,
    Receipt,
    StateFile,
    TensorLayout,
    VoidEntry,
)

TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def entries(text: str) -> list[OpenEntry | CheckpointEntry | DeleteEntry | VoidEntry]:
    common = {"format": 1, "run": "r", "previous": "", "incarnation": text, "time": "t"}
    later = {**common, "epoch": 1}
    name = "step-000000000007-3"
    return [
        OpenEntry(**common, sequence=1, host=text, pid=7),
        CheckpointEntry(
            **later, sequence=3, attempt="a", folder=name, step=7, manifest_sha256="", sums_sha256=EMPTY_SHA256
        ),
        DeleteEntry(**later, sequence=4, victim=3, folder=name, reason=text, actor=text),
        VoidEntry(**later, sequence=5, attempt="a", reason=text),
    ]


@given(TREES.filter(lambda tree: "\\ud" not in json.dumps(tree)))
def test_what_is_encoded_is_decoded_the_same_and_has_one_spelling(tree: object) -> None:
    record = StateFile(format=1, rank=0, components={"a": tree})
    data = codec.encode(record)
    found = codec.decode(data, StateFile, "state")
    assert codec.encode(found) == data
    assert json.loads(data)["components"] == {"a": tree}


@given(TEXT)
def test_a_sealed_entry_comes_back_with_its_digest(text: str) -> None:
    for entry in entries(text):
        data = codec.encode_sealed(entry)
        found = codec.decode_entry(data, "entry")
        assert type(found) is type(entry)
        assert msgspec.structs.replace(found, sha256="") == entry
        assert codec.encode_sealed(found) == data


def test_canonical_json_is_what_jq_would_sort() -> None:
    """Sorted keys, no blanks, UTF-8, one newline: any program can write the same bytes."""
    data = codec.encode(StateFile(format=1, rank=0, components={"b": "\u00e9\u4e2d", "a": [1, 2.5, None, True]}))
    plain = json.loads(data)
    assert data == (json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n").encode()


@pytest.mark.parametrize(
    "spelling",
    [
        '{"rank":0,"format":1,"components":{}}\n',
        '{"components":{},"format":1,"rank":0}',
        '{"components":{},"format":1,"rank":0}\n\n',
        '{"components": {},"format":1,"rank":0}\n',
        '{"components":{"a":"\\u00e9"},"format":1,"rank":0}\n',
        '{"components":{"a":1e0},"format":1,"rank":0}\n',
        '{"components":{"a":1.50},"format":1,"rank":0}\n',
        '{"components":{"a":-0},"format":1,"rank":0}\n',
        '{"components":{"a":1,"a":1},"format":1,"rank":0}\n',
        '{"components":{},"format":1,"rank":0.0}\n',
    ],
)
def test_another_spelling_of_a_good_record_is_refused(spelling: str) -> None:
    with pytest.raises(FormatError, match="state"):
        codec.decode(spelling.encode(), StateFile, "state")


def test_a_newer_format_says_upgrade_before_it_says_anything_else() -> None:
    newer = b'{"format":2,"other":"fields"}\n'
    for decoder in (codec.decode_manifest, codec.decode_record, codec.decode_layout, codec.decode_entry):
        with pytest.raises(UnknownFormat, match="the file is of format 2; this program reads format 1") as caught:
            decoder(newer, "the file")
        assert caught.value.next_step == "upgrade onward"


def test_an_index_is_compressed_checked_and_read_back() -> None:
    piece = Piece(tensor='["a"]', offset=(0,), shape=(4,), start=4096, nbytes=4, digests=("0" * 32,))
    file = IndexFile(path="000.safetensors", size=4100, header_bytes=4096, header_xxh3="1" * 32, pieces=(piece,))
    index = Index(format=1, rank=0, chunk_bytes=16 * 1024 * 1024, files=(file,))
    data = codec.encode_index(index)
    assert codec.decode_index(data, "index") == index
    for at in range(0, len(data), 3):
        broken = bytearray(data)
        broken[at] ^= 0x10
        with pytest.raises((FormatError, UnknownFormat)):
            codec.decode_index(bytes(broken), "index")


def test_a_layout_of_every_dtype_is_accepted_with_its_own_stored_type() -> None:
    from onward.format.dtypes import DTYPES, stored_dtype

    layout = Layout(
        format=1,
        meshes=(),
        tensors=tuple(
            TensorLayout(key=f'["{d}"]', dtype=d, shape=(2,), stored=stored_dtype(d)) for d in sorted(DTYPES)
        ),
    )
    assert codec.decode_layout(codec.encode(layout), "layout") == layout


@given(
    st.dictionaries(st.sampled_from(["a", "b/c", "d e", "\u00e9", "rank-00000/000.safetensors"]), st.binary(max_size=3))
)
def test_a_checksum_list_is_read_back_and_sorted(contents: dict[str, bytes]) -> None:
    digests = {path: sha256(data) for path, data in contents.items()}
    data = codec.encode_sums(digests)
    assert codec.decode_sums(data, "sums") == digests
    assert data.decode().splitlines() == sorted(data.decode().splitlines(), key=lambda line: line[66:])


def test_the_two_digests_are_those_of_the_stock_tools() -> None:
    """SHA-256 of the empty string, and XXH3-128 as ``xxh128sum`` prints it."""
    assert EMPTY_SHA256 == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert xxh3(b"") == "99aa06d3014798d86001c324468d497f"
    assert xxh3(memoryview(b"abc")) == xxh3(bytearray(b"abc")) == "06b05ab6733a618578af5f94892f3950"


def test_a_receipt_cannot_be_moved_to_another_time_or_kind() -> None:
    receipt = Receipt(
        format=1,
        run="r",
        sequence=2,
        folder="f",
        kind="verified",
        time="t",
        actor="a",
        tier="home",
        details={"ok": True},
    )
    data = codec.encode_sealed(receipt)
    assert msgspec.structs.replace(codec.decode_sealed(data, Receipt, "receipt"), sha256="") == receipt
    for old, new in ((b'"verified"', b'"resumed"'), (b'"ok":true', b'"ok":false'), (b'"sequence":2', b'"sequence":3')):
        with pytest.raises(FormatError, match="own digest"):
            codec.decode_sealed(data.replace(old, new), Receipt, "receipt")
