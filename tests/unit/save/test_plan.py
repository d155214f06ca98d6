"""How tensors are dealt out to shard files: every byte once, large ones cut, empty and 0-d ones there, all aligned."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.catalog.incarnation import Incarnation
from onward.catalog.reader import open_folder
from onward.format.dtypes import itemsize
from onward.records import FORMAT, ComponentTag, Layout, TensorLayout
from onward.save import shards
from onward.save.captured import Captured, StagedTensor
from onward.save.pipeline import SaveSettings, save
from onward.save.shards import LARGEST_FILE, PlannedPiece, plan
from onward.topology.boxes import byte_offset, nbytes
from support import PLACES, context, place_of

MIB = 1024 * 1024
TENSORS = st.lists(
    st.tuples(st.sampled_from(["float32", "bfloat16", "uint8", "complex128"]), st.lists(st.integers(0, 9), max_size=3)),
    max_size=8,
)


def staged(*tensors: tuple[str, tuple[int, ...]]) -> list[StagedTensor]:
    found: list[StagedTensor] = []
    start = 0
    for number, (dtype, shape) in enumerate(tensors):
        size = nbytes(shape, itemsize(dtype))
        found.append(StagedTensor(key=f'["{number}"]', dtype=dtype, shape=shape, start=start, nbytes=size))
        start += size
    return found


def sizes(files: list[list[PlannedPiece]]) -> list[int]:
    return [sum(piece.nbytes for piece in file) for file in files]


@given(TENSORS, st.integers(1, 4), st.integers(64, 4096))
def test_every_byte_of_every_tensor_is_planned_exactly_once(
    tensors: list[tuple[str, list[int]]], threads: int, largest: int
) -> None:
    wanted = staged(*((dtype, tuple(shape)) for dtype, shape in tensors))
    files = plan(wanted, threads=threads, largest=largest)
    assert files, "at least one file, even without tensors"
    covered: Counter[int] = Counter()
    for piece in (piece for file in files for piece in file):
        assert piece.nbytes == nbytes(piece.box.shape, itemsize(piece.tensor.dtype))
        offset = byte_offset(piece.box, piece.tensor.shape, itemsize(piece.tensor.dtype))
        assert piece.start == piece.tensor.start + (offset or 0)
        covered.update(range(piece.start, piece.start + piece.nbytes))
    assert covered == Counter(range(sum(tensor.nbytes for tensor in wanted)))
    planned = {piece.tensor.key for file in files for piece in file}
    assert planned == {tensor.key for tensor in wanted}, "the empty ones too"


@given(TENSORS, st.integers(1, 4), st.integers(64, 4096))
def test_no_file_is_larger_than_asked_and_wide_items_come_first(
    tensors: list[tuple[str, list[int]]], threads: int, largest: int
) -> None:
    """So every tensor begins at a multiple of its item size, which a mapped reader needs."""
    files = plan(staged(*((d, tuple(s)) for d, s in tensors)), threads=threads, largest=largest)
    assert all(size <= largest for size in sizes(files))
    for file in files:
        position = 0
        for piece in file:
            assert position % itemsize(piece.tensor.dtype) == 0
            position += piece.nbytes


def test_without_tensors_there_is_one_empty_file() -> None:
    assert plan([], threads=4) == [[]]


def test_small_tensors_share_one_file_and_large_ones_are_spread_over_about_two_files_a_thread() -> None:
    assert len(plan(staged(("float32", (100,)), ("float32", (5,))), threads=4)) == 1
    files = plan(staged(*[("float32", (16 * MIB,))] * 8), threads=2)
    assert len(files) == 4
    assert max(sizes(files)) <= 128 * MIB


def test_a_tensor_larger_than_a_file_is_cut_into_boxes() -> None:
    tensor = ("float32", (300, MIB))
    files = plan(staged(tensor), threads=1, largest=256 * MIB)
    assert [file[0].box.shape for file in files] == [(64, MIB)] * 4 + [(44, MIB)]
    assert [file[0].box.offset[0] for file in files] == [0, 64, 128, 192, 256]
    assert max(sizes(plan(staged(*[("uint8", (3 * LARGEST_FILE,))]), threads=1))) <= LARGEST_FILE


def test_a_row_larger_than_a_file_is_cut_within_the_row() -> None:
    files = plan(staged(("uint8", (2, 40 * MIB))), threads=1, largest=16 * MIB)
    assert {file[0].box.shape for file in files} == {(1, 16 * MIB), (1, 8 * MIB)}
    assert len(files) == 6


@pytest.mark.parametrize("threads", [1, 3])
def test_a_save_in_many_files_with_cut_empty_and_0d_tensors_comes_back_the_same(
    run: Incarnation, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Written by several threads, read back by the index alone, and by the load."""
    from onward.restore.load import CheckpointSource
    from onward.state import tensors as exact

    monkeypatch.setattr(shards, "_SMALLEST_FILE", 512)
    wanted = staged(("float32", (40, 16)), ("float64", ()), ("int8", (0, 3)), ("bool", (77,)), ("complex128", (2, 5)))
    memory = bytes(range(256)) * (sum(t.nbytes for t in wanted) // 256 + 1)
    names = {"float32": "F32", "float64": "F64", "int8": "I8", "bool": "BOOL", "complex128": "U8"}
    layout = Layout(
        format=FORMAT,
        meshes=(),
        tensors=tuple(TensorLayout(key=t.key, dtype=t.dtype, shape=t.shape, stored=names[t.dtype]) for t in wanted),
    )
    tag = ComponentTag(name="part", kind="object", scope="global", step=1)
    state = Captured(
        step=1,
        layout=layout,
        state={"part": {}},
        tags=(tag,),
        tensors=tuple(wanted),
        memory=memoryview(memory),
        started="t",
        seconds=0.0,
    )
    entry = save(run, state, context(), SaveSettings(threads=threads)).entry
    opened = open_folder(place_of(run.store, entry.folder))
    files = opened.index(0).files
    assert len(files) > 3
    assert opened.manifest.expected_files == opened.manifest.actual_files == len(files)
    loaded = CheckpointSource(opened, threads=threads).fetch_all()
    for tensor in wanted:
        assert bytes(exact.as_bytes(loaded[tensor.key])) == memory[tensor.start : tensor.start + tensor.nbytes]
        pieces = sorted((p for f in files for p in f.pieces if p.tensor == tensor.key), key=lambda p: p.offset)
        owners = {p.tensor: f.path for f in files for p in f.pieces}
        raw = b"".join(
            run.store.files[f"{PLACES.checkpoint(entry.folder)}/rank-00000/{path}"][p.start : p.start + p.nbytes]
            for p in pieces
            for path in [next(f.path for f in files if p in f.pieces)]
        )
        assert raw == memory[tensor.start : tensor.start + tensor.nbytes]
        assert owners
