"""Forged checkpoints: one file is hostile, and every digest above it, up to the ledger entry, agrees with it.

What a digest would refuse is thus let through to the code that has to judge the content itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zstandard

from onward.format.digests import sha256, xxh3
from onward.storage.memory import MemoryStore
from support import PLACES, Image

Plain = dict[str, Any]
Edit = Callable[[Plain], object]


def plain(data: bytes) -> Plain:
    """A record as plain JSON."""
    table = msgspec.json.decode(data)
    assert isinstance(table, dict)
    return table


def spell(table: object) -> bytes:
    """Plain JSON in the canonical spelling."""
    return msgspec.json.encode(table, order="sorted") + b"\n"


def sealed(table: Plain) -> bytes:
    """A record with its own digest made right."""
    return spell({**table, "sha256": sha256(spell({**table, "sha256": ""}))})


def pack(data: bytes) -> bytes:
    """An index as it is stored."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def unpack(data: bytes) -> bytes:
    """The JSON of a stored index."""
    return zstandard.ZstdDecompressor().decompress(data)


def forge(
    world: Image,
    folder: str,
    number: int,
    edits: Mapping[str, Edit] | None = None,
    *,
    raw: Mapping[str, bytes] | None = None,
) -> MemoryStore:
    """A store whose checkpoint ``folder`` (ledger number ``number``, one rank) is hostile and agrees with itself.

    Args:
        world: A good store.
        folder: The checkpoint.
        number: Its ledger entry.
        edits: Stage → change of its plain JSON, made after the digests below it were put right: ``index``, ``state``,
            ``record``, ``layout``, ``manifest``, ``sums`` (path → digest), ``entry``.
        raw: File → bytes that replace it whole, instead of an edit.
    """
    edits, raw = edits or {}, raw or {}
    store = world.restore()
    base = PLACES.checkpoint(folder)
    files = {p.removeprefix(f"{base}/"): d for p, d in store.files.items() if p.startswith(f"{base}/")}
    files |= raw
    rank = "rank-00000"
    if "index" in edits:
        index = plain(unpack(files[f"{rank}/index.json.zst"]))
        edits["index"](index)
        files[f"{rank}/index.json.zst"] = pack(spell(index))
    for stage, path in (("state", f"{rank}/state.json"), ("layout", "layout.json")):
        if stage in edits:
            table = plain(files[path])
            edits[stage](table)
            files[path] = spell(table)
    if f"{rank}/record.json" not in raw:
        record = plain(files[f"{rank}/record.json"])
        record["layout_sha256"] = sha256(files["layout.json"])
        for file in record["files"]:
            data = files[f"{rank}/{file['path']}"]
            file |= {"size": len(data), "sha256": sha256(data)}
        edits.get("record", dict)(record)
        files[f"{rank}/record.json"] = spell(record)
        if "manifest.json" not in raw:
            manifest = plain(files["manifest.json"])
            size = sum(file["size"] for file in record["files"])
            manifest["layout_sha256"] = sha256(files["layout.json"])
            manifest["ranks"][0] |= {"sha256": sha256(files[f"{rank}/record.json"]), "bytes": size}
            manifest["total_bytes"] = size
            for asset in manifest["assets"]:
                data = files[asset["path"]]
                asset |= {"size": len(data), "sha256": sha256(data)}
            edits.get("manifest", dict)(manifest)
            files["manifest.json"] = spell(manifest)
    sums = {path: sha256(data) for path, data in files.items() if path != "manifest.sha256"}
    edits.get("sums", dict)(sums)
    if "manifest.sha256" not in raw:
        files["manifest.sha256"] = "".join(f"{sums[path]}  {path}\n" for path in sorted(sums)).encode()
    entry = plain(store.files[PLACES.entry(number)])
    entry["manifest_sha256"] = sha256(files["manifest.json"])
    entry["sums_sha256"] = sha256(files["manifest.sha256"])
    edits.get("entry", dict)(entry)
    store.files[PLACES.entry(number)] = sealed(entry)
    store.files.update({f"{base}/{path}": data for path, data in files.items()})
    return store


def reheaded(index: Plain, shard: bytes, header: bytes) -> bytes:
    """The shard with another header, the index told of its digest and of where the pieces now are."""
    file = index["files"][0]
    old = file["header_bytes"]
    moved = len(header) - old
    file |= {"header_bytes": len(header), "header_xxh3": xxh3(header), "size": len(shard) + moved}
    for piece in file["pieces"]:
        piece["start"] += moved
    return header + shard[old:]
