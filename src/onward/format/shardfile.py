"""Shard files: plain safetensors, whose header is built and read here, strictly.

An entry's name is the tensor's key; where the entry is only a part of the tensor, ``@`` and the offset of the
part follow, for example ``["model","wte.weight"]@1024,0``. The header is padded with blanks so that the tensor
bytes begin on a page, which lets them be written and read without copies.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from onward.errors import FormatError
from onward.records import Key

ALIGN = 4096
HEADER_LIMIT = 100 * 1000 * 1000  # the limit of the safetensors reference implementation
_LENGTH = 8
_LARGEST = 2**63


@dataclass(frozen=True)
class ShardEntry:
    """One entry of a header: ``begin`` and ``end`` count from the first tensor byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def entry_name(key: Key, offset: tuple[int, ...], is_whole: bool) -> str:
    """The name of a piece in a shard file."""
    return key if is_whole else f"{key}@{','.join(map(str, offset))}"


def build_header(entries: list[ShardEntry], metadata: dict[str, str]) -> bytes:
    """All bytes before the first tensor byte: the length, the JSON, and blanks up to a page.

    Raises:
        FormatError: The header would be larger than stock readers accept.
    """
    table: dict[str, object] = {"__metadata__": metadata}
    for entry in entries:
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    total = -(-(len(text) + _LENGTH) // ALIGN) * ALIGN
    if total - _LENGTH > HEADER_LIMIT:
        raise FormatError(f"the header of a shard file would have {total} bytes; stock readers take {HEADER_LIMIT}")
    return (total - _LENGTH).to_bytes(_LENGTH, "little") + text.ljust(total - _LENGTH)


def header_size(first: bytes, file_size: int, what: str) -> int:
    """Bytes before the first tensor byte, from the first 8 bytes of the file.

    Raises:
        FormatError: The length is impossible for a file of this size.
    """
    if len(first) < _LENGTH or file_size < _LENGTH:
        raise FormatError(f"{what} has {file_size} bytes: too short for a safetensors file")
    length = int.from_bytes(first[:_LENGTH], "little")
    if length > HEADER_LIMIT or length + _LENGTH > file_size:
        raise FormatError(f"{what} says its header has {length} bytes, but the file has {file_size}")
    return length + _LENGTH


def parse_header(
    head: bytes, file_size: int, what: str, item_bytes: Callable[[str], int]
) -> tuple[list[ShardEntry], dict[str, str]]:
    """Reads and judges a header.

    Args:
        head: All bytes before the first tensor byte.
        file_size: Size of the whole file; every tensor byte must belong to exactly one entry.
        what: How to name the file in an error.
        item_bytes: safetensors dtype → bytes an element; raises FormatError for an unknown one.

    Raises:
        FormatError: Says what is wrong: length, JSON, a doubled name, overlapping or missing bytes, a wrong size.
    """
    if header_size(head, file_size, what) != len(head):
        raise FormatError(f"{what}: the header is not {len(head)} bytes long")
    if head[_LENGTH : _LENGTH + 1] != b"{":
        raise FormatError(f"{what}: the header is not JSON: it does not begin with an object")
    try:
        table = json.loads(head[_LENGTH:].decode("utf-8"), object_pairs_hook=_no_doubles, parse_int=_natural)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: the header is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise FormatError(f"{what}: the header is not a JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{what}: __metadata__ is not a table of strings")
    for text in (*table, *metadata, *metadata.values()):
        if any(0xD800 <= ord(character) < 0xE000 for character in text):  # stock readers refuse half a pair too
            raise FormatError(f"{what}: the header has a text that is no Unicode")
    entries = [_entry(name, value, what, item_bytes) for name, value in table.items()]
    position = 0
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        if entry.begin != position:
            problem = "overlaps the one before" if entry.begin < position else "leaves bytes that belong to no tensor"
            raise FormatError(f"{what}: {entry.name} begins at {entry.begin}, not at {position}: it {problem}")
        position = entry.end
    if position + len(head) != file_size:
        raise FormatError(f"{what} has {file_size} bytes; its header accounts for {position + len(head)}")
    return entries, metadata


def _entry(name: str, value: object, what: str, item_bytes: Callable[[str], int]) -> ShardEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{what}: the entry {name[:200]!r} is not dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if (
        not isinstance(dtype, str)
        or not all(type(n) is int and 0 <= n < _LARGEST for n in numbers)
        or len(offsets) != 2
    ):
        raise FormatError(f"{what}: the entry {name[:200]!r} has an impossible dtype, shape or offset")
    begin, end = offsets
    if end - begin != prod(shape) * item_bytes(dtype):
        raise FormatError(f"{what}: {name[:200]} of {dtype} {shape} cannot have {end - begin} bytes")
    return ShardEntry(name=name, dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _natural(digits: str) -> int:
    if digits.startswith("-"):  # stock readers refuse -0 too
        raise ValueError(f"{digits} is not a natural number")
    return int(digits)


def _no_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands twice")
    return table
