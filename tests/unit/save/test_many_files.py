"""A save in several shard files, written and read by several threads, and judged by tools that know nothing of it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors

from onward.catalog.reader import open_folder
from onward.format.dtypes import itemsize, stored_dtype
from onward.records import CheckpointEntry, Layout, TensorLayout
from onward.restore.load import CheckpointSource
from onward.save.captured import staged
from onward.save.pipeline import SaveSettings, save
from onward.save.plan import plan
from onward.state import tensors as exact
from onward.storage.posix import PosixStore
from onward.topology.boxes import nbytes
from support import PLACES, captured, context, place_of, start

TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {
    '["part","wide"]': ("float32", (40, 16)),
    '["part","scalar"]': ("float64", ()),
    '["part","none"]': ("int8", (0, 3)),
    '["part","mask"]': ("bool", (77,)),
    '["part","complex"]': ("complex128", (2, 5)),
    '["part","odd \u00e9\\" name"]': ("bfloat16", (3, 1, 5)),
}


def saved(disk: PosixStore, threads: int) -> tuple[CheckpointEntry, dict[str, bytes]]:
    """A checkpoint whose tensors are dealt out to files of 512 bytes."""
    source = random.Random(5)
    values = {name: source.randbytes(nbytes(shape, itemsize(dtype))) for name, (dtype, shape) in TENSORS.items()}
    layouts = [
        TensorLayout(key=name, dtype=dtype, shape=shape, stored=stored_dtype(dtype))
        for name, (dtype, shape) in TENSORS.items()
    ]
    planned = plan(layouts, threads=threads, smallest=512, largest=512)
    memory = bytearray(planned.arena_bytes)
    for piece in (piece for file in planned.files for piece in file.pieces):
        data = values[piece.key][piece.offset : piece.offset + piece.nbytes]
        memory[piece.start : piece.start + piece.nbytes] = data
    layout = Layout(format=1, meshes=(), tensors=tuple(sorted(layouts, key=lambda each: each.key)))
    run = start(disk)
    made = replace(captured(1), layout=layout, plan=planned, region=staged(memoryview(memory)))
    entry = save(run, made, context(assets={"a b.txt": b"", "sub/x": b"y"}), SaveSettings(threads=threads)).entry
    run.end()
    return entry, values


@pytest.fixture(params=[1, 3])
def checkpoint(disk: PosixStore, request: pytest.FixtureRequest) -> tuple[Path, CheckpointEntry, dict[str, bytes]]:
    entry, values = saved(disk, request.param)
    return disk.root / PLACES.checkpoint(entry.folder), entry, values


Made = tuple[Path, CheckpointEntry, dict[str, bytes]]


def test_cut_empty_and_0d_tensors_come_back_the_same(checkpoint: Made, disk: PosixStore) -> None:
    _, entry, values = checkpoint
    opened = open_folder(place_of(disk, entry.folder))
    files = opened.index(0).files
    assert len(files) > 4
    assert opened.manifest.expected_files == opened.manifest.actual_files == len(files)
    loaded = CheckpointSource(opened, threads=3).fetch_all()
    assert {name: bytes(exact.as_bytes(tensor)) for name, tensor in loaded.items()} == values
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == {n: s for n, (_, s) in TENSORS.items()}


def test_the_index_alone_leads_to_every_byte(checkpoint: Made, disk: PosixStore) -> None:
    """Whoever writes another reader needs the index and the shard files, nothing of ours."""
    folder, entry, values = checkpoint
    raw: dict[str, bytes] = {}
    for file in open_folder(place_of(disk, entry.folder)).index(0).files:
        data = (folder / "rank-00000" / file.path).read_bytes()
        for piece in file.pieces:
            raw[piece.tensor] = raw.get(piece.tensor, b"") + data[piece.start : piece.start + piece.nbytes]
    assert raw == values


def test_stock_safetensors_reads_every_shard(checkpoint: Made) -> None:
    """A whole tensor stands under its key; a part under its key, ``@`` and the offset of the part."""
    folder, _, values = checkpoint
    parts: dict[str, list[tuple[tuple[int, ...], bytes]]] = {}
    for path in sorted((folder / "rank-00000").glob("*.safetensors")):
        for name, entry in safetensors.deserialize(path.read_bytes()):
            key, _, offset = name.partition("]@")
            at = tuple(map(int, offset.split(","))) if offset else ()
            parts.setdefault(key if key.endswith("]") else f"{key}]", []).append((at, bytes(entry["data"])))
    assert {key: b"".join(data for _, data in sorted(found)) for key, found in parts.items()} == values
    with safetensors.safe_open(next((folder / "rank-00000").glob("*.safetensors")), "np") as opened:
        assert opened.metadata() == {"onward": "1", "run": "run", "step": "1", "rank": "0"}


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="coreutils are not installed")
def test_stock_sha256sum_verifies_a_checkpoint_and_finds_a_flipped_bit(checkpoint: Made) -> None:
    folder, _, _ = checkpoint
    check = ["sha256sum", "--check", "--strict", "--quiet", "manifest.sha256"]
    assert subprocess.run(check, cwd=folder, capture_output=True, check=False).returncode == 0
    listed = {line[66:] for line in (folder / "manifest.sha256").read_text().splitlines()}
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert listed == there - {"manifest.sha256"}, "every other file, and no more"
    shard = folder / "rank-00000" / "000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    found = subprocess.run(check, cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "rank-00000/000.safetensors: FAILED" in found.stdout


def test_the_manifest_is_plain_json_and_says_what_is_there(checkpoint: Made) -> None:
    """``jq`` reads it; sizes and digests are those of the files."""
    folder, entry, _ = checkpoint
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert (manifest["format"], manifest["run"], manifest["global_step"]) == (1, "run", 1)
    assert (manifest["checkpoint"], manifest["sequence"]) == (entry.folder, entry.sequence)
    record = json.loads((folder / "rank-00000" / "record.json").read_bytes())
    for file in [*record["files"], *({**a, "path": f"../{a['path']}"} for a in manifest["assets"])]:
        data = Path(os.path.normpath(folder / "rank-00000" / file["path"])).read_bytes()
        assert (file["size"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert manifest["total_bytes"] == sum(file["size"] for file in record["files"])
    assert manifest["actual_files"] == len(list((folder / "rank-00000").glob("*.safetensors")))


@pytest.mark.parametrize(
    "names", [["A", "a"], ["x", "x/y"], ["../x"], ["/x"], ["a\x00"], ["e\u0301"], ["a//b"], [""]], ids=ascii
)
def test_assets_that_no_reader_would_take_are_refused_before_anything_is_written(
    disk: PosixStore, names: list[str]
) -> None:
    """Two names of one file, a file that is also a folder, a way out: not committed first and found unreadable then."""
    from onward.errors import OnwardError
    from support import commit

    run = start(disk)
    before = sorted(disk.root.rglob("*"))
    with pytest.raises(OnwardError) as caught:
        commit(run, 10, assets=dict.fromkeys(names, b""))
    assert "altered" not in caught.value.message
    assert "medium" not in caught.value.next_step
    assert sorted(disk.root.rglob("*")) == before
    run.end()
