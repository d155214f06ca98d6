"""Records that are well-formed and lie: paths, checksum lists, compressed sizes, tensors, counts, folders."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zstandard

from onward.errors import FormatError
from onward.format import codec
from support import Image

from .decoders import FOLDER, example, little_memory, one_checkpoint, refused
from .forging import Plain, pack, sealed, spell


@pytest.fixture(scope="module")
def world() -> Image:
    return one_checkpoint()


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
    with pytest.raises(FormatError, match=r"the file|the path"):
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
