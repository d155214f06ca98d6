"""Hostile bytes given straight to each decoder: refused by name, with a reason, without a large allocation."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zstandard

from onward.errors import FormatError, OnwardError, UnknownFormat
from onward.format import codec
from onward.records import Intent, LeaseRecord, RunRecord, StateFile
from support import PLACES, Image, commit, image, memory_store, start

from .forging import Plain, pack, plain, sealed, spell, unpack

FOLDER = "step-000000000010-2"
BASE = f"{PLACES.checkpoint(FOLDER)}"
FEW_BYTES = 24 * 1024 * 1024
"""What a decoder may take at most for a hostile file of some kB; the claims in the files are of GB and more."""

Decode = Callable[[bytes], object]


def _plainly(kind: type[Any]) -> Decode:
    return lambda data: codec.decode(data, kind, "the file")


DECODERS: dict[str, tuple[str, Decode]] = {
    "store record": ("onward.json", lambda d: codec.decode_store_record(d, "the file")),
    "run record": (PLACES.run_file, _plainly(RunRecord)),
    "lease": (PLACES.lease, _plainly(LeaseRecord)),
    "open entry": (PLACES.entry(1), lambda d: codec.decode_entry(d, "the file")),
    "checkpoint entry": (PLACES.entry(2), lambda d: codec.decode_entry(d, "the file")),
    "receipt": (PLACES.receipts, lambda d: codec.decode_receipt(d, "the file")),
    "intent": (f"{BASE}/intent.json", _plainly(Intent)),
    "layout": (f"{BASE}/layout.json", lambda d: codec.decode_layout(d, "the file")),
    "manifest": (f"{BASE}/manifest.json", lambda d: codec.decode_manifest(d, "the file")),
    "record": (f"{BASE}/rank-00000/record.json", lambda d: codec.decode_record(d, "the file")),
    "index": (f"{BASE}/rank-00000/index.json.zst", lambda d: codec.decode_index(pack(d), "the file")),
    "state": (f"{BASE}/rank-00000/state.json", _plainly(StateFile)),
}
SEALED = ("store record", "open entry", "checkpoint entry", "receipt")
KINDS = tuple(DECODERS)


@pytest.fixture(scope="module")
def world() -> Image:
    store = memory_store()
    run = start(store)
    commit(run, 10, assets={"vocab.txt": b"a b c"})
    found = image(store)
    run.end()
    return found


def example(world: Image, kind: str) -> Plain:
    """A good file of a kind, as plain JSON."""
    path = DECODERS[kind][0]
    data = world.files[path] if path in world.files else next(d for p, d in world.files.items() if p.startswith(path))
    return plain(unpack(data) if kind == "index" else data)


def written(kind: str, table: Plain) -> bytes:
    """A table as a file of its kind; a hostile writer makes the file's own digest right."""
    return sealed(table) if kind in SEALED else spell(table)


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < FEW_BYTES
    finally:
        tracemalloc.stop()


def refused(kind: str, data: bytes, reason: str = "", error: type[OnwardError] = FormatError) -> None:
    with little_memory(), pytest.raises(error, match=reason) as caught:
        DECODERS[kind][1](data)
    assert "the file" in caught.value.message or "path" in caught.value.message
    assert len(caught.value.message) < 2000


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
    for data in (good[:-1], good[:-2], good[: len(good) // 2], good + b"\n", good + b"{}\n", b" " + good, good * 2):
        refused(kind, data)
    refused(kind, b"\x00" * 1000)
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
        refused(kind, spell({k: v for k, v in table.items() if k != name}), name if name != "type" else "")
    refused(kind, written(kind, {**table, "surprise": 1}), "surprise")


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_the_wrong_type_is_refused(world: Image, kind: str) -> None:
    table = example(world, kind)
    free = {"details", "probe", "data_position", "base", "epoch", "parent", "model_config_sha256"}
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
        refused(kind, b'{"a":' * depth + b"1" + b"}" * depth + b"\n") if depth % 50 == 0 else None
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


BAD_PATHS = (
    *("", ".", "..", "../x", "x/../y", "/etc/passwd", "//x", "x//y", "x/", "./x", "x/.", "x\x00y", "x\ny", "x\\y"),
    *("\x7f", "e\u0301", "a" * 256, "/".join(["a" * 200] * 6)),
)


@pytest.mark.parametrize("path", BAD_PATHS, ids=ascii)
def test_a_path_that_could_lead_elsewhere_is_refused_wherever_it_stands(world: Image, path: str) -> None:
    """Absolute, with '..', with control characters, too long, not normalised: in every file that names files."""
    manifest, record, index = (example(world, kind) for kind in ("manifest", "record", "index"))
    manifest["assets"][0]["path"] = path
    refused("manifest", spell(manifest))
    manifest = example(world, "manifest")
    manifest["ranks"][0]["path"] = path
    refused("manifest", spell(manifest))
    record["files"][0]["path"] = path
    refused("record", spell(record))
    index["files"][0]["path"] = path
    refused("index", spell(index))
    with pytest.raises(FormatError):
        codec.decode_sums(f"{'0' * 64}  {path}\n".encode(), "the file")


def test_two_names_of_one_file_are_refused(world: Image) -> None:
    """Equal, or equal to a filesystem that ignores case."""
    record = example(world, "record")
    first = record["files"][0]
    for twin in (first["path"], first["path"].upper()):
        refused("record", spell({**record, "files": [first, {**first, "path": twin}]}), "name one file")
    sums = [f"{'0' * 64}  {name}\n" for name in ("ALPHA", "alpha")]
    with pytest.raises(FormatError, match="name one file"):
        codec.decode_sums("".join(sums).encode(), "the file")


@pytest.mark.parametrize(
    "line",
    [
        "0" * 63 + "  a\n",
        "0" * 64 + " a\n",
        "0" * 64 + " *a\n",
        "G" * 64 + "  a\n",
        "A" * 64 + "  a\n",
        "0" * 64 + "  a",
        "0" * 64 + "  a\r\n",
        "\n",
        "\\" + "0" * 64 + "  a\n",
        "0" * 64 + "  b\n" + "0" * 64 + "  a\n",
        "0" * 64 + "  a\n" + "0" * 64 + "  a\n",
    ],
)
def test_a_line_that_sha256sum_would_not_have_written_is_refused(line: str) -> None:
    with pytest.raises(FormatError, match="the file"):
        codec.decode_sums(line.encode(), "the file")
    with pytest.raises(FormatError):
        codec.decode_sums(line.encode() + b"\xff", "the file")


def test_a_compressed_bomb_is_refused_before_it_is_unpacked() -> None:
    """33 kB that unpack to 1 GiB; a frame of unknown size; bytes after the frame; a cut frame; no frame at all."""
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    good = pack(b'{"chunk_bytes":16777216,"files":[],"format":1,"rank":0}\n')
    codec.decode_index(good, "the file")
    stream = zstandard.ZstdCompressor(write_content_size=False)
    unknown = stream.compress(b"x" * 1000)
    for data in (bomb, unknown, good + b"\0", good + good, good[:-1], good[:5], b"", b"\0" * 100, good[1:], b"{}"):
        with little_memory(), pytest.raises(FormatError, match="the file"):
            codec.decode_index(data, "the file")


def _layout(**changes: Any) -> Plain:
    tensor = {"key": '["a"]', "dtype": "float32", "shape": [2, 3], "stored": "F32", "tie": None, "mesh": None}
    tensor |= {"placements": [], "boxes": []} | changes
    return {"format": 1, "meshes": [], "tensors": [tensor]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float33"}, "unknown dtype"),
        ({"dtype": "__class__"}, "unknown dtype"),
        ({"stored": "F64"}, "wrong dtype"),
        ({"stored": "U8"}, "wrong dtype"),
        ({"shape": [-1, 3]}, "impossible shape"),
        ({"shape": [1] * 65}, "impossible shape"),
        ({"shape": [2**40, 2**40]}, "impossibly large"),
        ({"shape": [0, 2**60]}, "impossibly large"),
        ({"tie": '["a"]'}, "tied"),
        ({"tie": '["nowhere"]'}, "tied"),
        ({"mesh": 0}, "mesh"),
        ({"boxes": [{"offset": [0, 0], "shape": [3, 3]}]}, "box"),
    ],
)
def test_an_impossible_tensor_is_refused(changes: Plain, reason: str) -> None:
    refused("layout", spell(_layout(**changes)), reason)


def test_ties_in_a_circle_or_to_an_unlike_tensor_are_refused() -> None:
    def pair(first: Plain, second: Plain) -> bytes:
        one = _layout(key='["a"]', **first)["tensors"][0]
        other = _layout(key='["b"]', **second)["tensors"][0]
        return spell({"format": 1, "meshes": [], "tensors": [one, other]})

    codec.decode_layout(pair({}, {"tie": '["a"]'}), "the file")
    for first, second in (
        ({"tie": '["b"]'}, {"tie": '["a"]'}),
        ({}, {"tie": '["a"]', "shape": [3, 2]}),
        ({}, {"tie": '["a"]', "dtype": "int32", "stored": "I32"}),
    ):
        refused("layout", pair(first, second), "tied")
    twice = _layout()
    refused("layout", spell({**twice, "tensors": twice["tensors"] * 2}), "twice")


@pytest.mark.parametrize("world_size", [0, -1, 2, 2**31, 10**12])
def test_a_number_of_ranks_that_the_manifest_does_not_name_is_refused(world: Image, world_size: int) -> None:
    """The count is compared before anything of that size is made."""
    manifest = example(world, "manifest")
    counts = {"world_size": world_size, "expected_ranks": world_size, "actual_ranks": world_size}
    refused("manifest", spell({**manifest, **counts}))
    record = example(world, "record")
    if world_size < 1:
        refused("record", spell({**record, "world_size": world_size}))


def test_a_sealed_ledger_entry_that_names_another_folder_than_its_own_is_refused(world: Image) -> None:
    """Folders are read, and removed, by these names."""
    entry = example(world, "checkpoint entry")
    bad = (
        "",
        ".",
        "..",
        "../../../../x",
        "/etc",
        "step-000000000010-3",
        "step-000000000011-2",
        f"{FOLDER}/..",
        f"{FOLDER}\x00",
    )
    for folder in bad:
        refused("checkpoint entry", sealed({**entry, "folder": folder}), "folder")
    delete = {k: entry[k] for k in ("format", "run", "sequence", "previous", "incarnation", "epoch", "time")}
    delete |= {"type": "delete", "sequence": 3, "victim": 2, "folder": FOLDER, "reason": "", "actor": ""}
    codec.decode_entry(sealed(delete), "the file")
    for folder in bad:
        if folder != "step-000000000011-2":
            refused("checkpoint entry", sealed({**delete, "folder": folder}), "folder")
    for victim in (3, 4, 0, -2, 1):
        refused("checkpoint entry", sealed({**delete, "victim": victim}), "folder")
    assert msgspec.json.decode(sealed(delete))["folder"] == FOLDER
