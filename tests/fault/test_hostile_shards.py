"""Forged shard files: headers that lie, sizes that no machine has; and a manifest of a later format."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from onward.errors import OnwardError, UnknownFormat
from onward.format.digests import xxh3
from onward.format.shardfile import ShardEntry, build_header
from onward.upkeep.verify import verify
from recorder import resumed
from support import PLACES, RUN, key, place_of

from .forging import Plain, forge, pack, plain, reheaded, spell
from .judging import FOLDER, INDEX, NUMBER, SHARD, good, judge, shard_and_index


def entries_of(shard: bytes) -> tuple[list[ShardEntry], dict[str, str]]:
    """What a shard's header says."""
    table = plain(shard[8 : 8 + int.from_bytes(shard[:8], "little")])
    metadata = table.pop("__metadata__")
    return [ShardEntry(n, t["dtype"], tuple(t["shape"]), *t["data_offsets"]) for n, t in table.items()], metadata


@pytest.mark.parametrize("change", ["dtype", "shape", "name", "unknown", "longer"])
def test_a_shard_header_that_lies_about_its_tensors_is_refused(change: str) -> None:
    """A stock reader would see another dtype, shape or name than a load gives: the file is refused instead."""
    shard, index = shard_and_index()
    entries, metadata = entries_of(shard)
    place = next(n for n, entry in enumerate(entries) if entry.name == key("codes"))
    old = entries[place]
    entries[place] = {
        "dtype": ShardEntry(old.name, "I8", old.shape, old.begin, old.end),
        "shape": ShardEntry(old.name, old.dtype, (3, 11), old.begin, old.end),
        "name": ShardEntry('["part","other"]', old.dtype, old.shape, old.begin, old.end),
        "unknown": ShardEntry(old.name, "F8_E8M0", old.shape, old.begin, old.end),
        "longer": old,
    }[change]
    shard += b"\0" * (change == "longer")
    shard = reheaded(index, shard, build_header(entries, metadata))
    judge(forge(good(), FOLDER, NUMBER, raw={SHARD: shard, INDEX: pack(spell(index))}), SHARD)


def _longer_than_the_file(header: bytes) -> bytes:
    return (2**40).to_bytes(8, "little") + header[8:]


def _not_json(header: bytes) -> bytes:
    return header[:8] + header[8:].replace(b"{", b"<", 1)


def _overlapping(header: bytes) -> bytes:
    table = plain(header[8:])
    first, second = [name for name in table if name != "__metadata__" and table[name]["shape"]][:2]
    size = table[second]["data_offsets"][1] - table[second]["data_offsets"][0]
    begin = table[first]["data_offsets"][0]
    table[second]["data_offsets"] = [begin, begin + size]
    text = spell(table).rstrip()
    return header[:8] + text.ljust(len(header) - 8)


def _a_name_twice(header: bytes) -> bytes:
    text = header[8:].rstrip()
    first = text.index(b'"[', 1)
    entry = text[first : text.index(b"}", first) + 1]
    return header[:8] + (text[:-1] + b"," + entry + b"}").ljust(len(header) - 8)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_longer_than_the_file, "says its header has"),
        (_not_json, "not JSON"),
        (_overlapping, "overlaps|belong to no tensor"),
        (_a_name_twice, "twice"),
    ],
)
def test_a_header_that_is_none_is_named_by_verification_and_load(spoil: Callable[[bytes], bytes], reason: str) -> None:
    """T148: length too large, not JSON, overlapping offsets, a doubled name: the file and what is wrong with it."""
    shard, index = shard_and_index()
    file = index["files"][0]
    header = spoil(shard[: file["header_bytes"]])
    assert len(header) == file["header_bytes"]
    file["header_xxh3"] = xxh3(header)
    forged = {SHARD: header + shard[file["header_bytes"] :], INDEX: pack(spell(index))}
    store = forge(good(), FOLDER, NUMBER, raw=forged)
    report = verify(place_of(store, FOLDER), None, run=RUN, threads=1)
    found = [finding for finding in report.findings if finding.file == SHARD]
    assert re.search(reason, found[0].message)
    judge(forge(good(), FOLDER, NUMBER, raw=forged), SHARD)


@pytest.mark.parametrize("power", [36, 40, 54])
def test_a_tensor_that_claims_more_than_the_machine_holds_takes_no_memory(power: int) -> None:
    """Layout, index, record, manifest and header agree about 2**36 bytes and more; the file has some kB."""
    huge = 2**power
    shard, index = shard_and_index()
    entries, metadata = entries_of(shard)
    end = max(entry.end for entry in entries)
    name = '["part","huge"]'
    header = build_header([*entries, ShardEntry(name, "U8", (huge,), end, end + huge)], metadata)
    forged = reheaded(index, shard, header)
    claimed = len(header) + end + huge
    piece = {"tensor": name, "offset": [0], "shape": [huge], "start": claimed - huge, "nbytes": huge}
    index["files"][0]["size"] = claimed
    index["files"][0]["pieces"].append({**piece, "digests": ["0" * 32]})

    def larger(layout: Plain) -> None:
        like = layout["tensors"][0]
        layout["tensors"].append({**like, "key": name, "shape": [huge], "dtype": "uint8", "stored": "U8"})

    def claim(record: Plain) -> None:
        next(file for file in record["files"] if file["path"] == "000.safetensors")["size"] = claimed

    def total(manifest: Plain) -> None:
        size = manifest["total_bytes"] - len(forged) + claimed
        manifest |= {"total_bytes": size, "ranks": [{**manifest["ranks"][0], "bytes": size}]}

    edits = {"layout": larger, "record": claim, "manifest": total}
    judge(forge(good(), FOLDER, NUMBER, edits, raw={SHARD: forged, INDEX: pack(spell(index))}), SHARD, INDEX)


def test_a_checkpoint_of_a_newer_format_is_not_silently_fallen_back_from() -> None:
    """The right answer is to upgrade: an older checkpoint would lose steps that are there, whole."""
    manifest = plain(good().files[f"{PLACES.checkpoint(FOLDER)}/manifest.json"])
    store = forge(good(), FOLDER, NUMBER, raw={"manifest.json": spell({**manifest, "format": 2, "new": True})})
    with pytest.raises(UnknownFormat, match=r"manifest\.json is of format 2") as caught:
        resumed(store)
    assert isinstance(caught.value, OnwardError)
    assert "upgrade" in caught.value.next_step
