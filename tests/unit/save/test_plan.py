"""The plan of shard files: follows from the layout alone, covers every byte once, on pages, in bounded files."""

from __future__ import annotations

import random
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.format.dtypes import itemsize, stored_dtype
from onward.format.names import shard_name
from onward.records import TensorLayout
from onward.save.plan import LARGEST_FILE, Plan, plan
from onward.topology.boxes import byte_offset

PAGE = 4096
DTYPES = ("float32", "bfloat16", "uint8", "float64", "complex128", "float8_e4m3fn", "bool", "int16")


def layout(name: str, dtype: str, shape: tuple[int, ...], tie: str | None = None) -> TensorLayout:
    return TensorLayout(key=f'["model","{name}"]', dtype=dtype, shape=shape, stored=stored_dtype(dtype), tie=tie)


def size(tensor: TensorLayout) -> int:
    return prod(tensor.shape) * itemsize(tensor.dtype)


tensors = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=4).map(tuple)), min_size=0, max_size=12
).map(lambda made: [layout(str(n), dtype, shape) for n, (dtype, shape) in enumerate(made)])


def check(planned: Plan, given: list[TensorLayout], target: int) -> None:
    """Everything that those who write, capture and read rely on."""
    stored = {tensor.key: tensor for tensor in given if tensor.tie is None}
    assert planned.tensor_bytes == sum(map(size, stored.values()))
    assert [file.name for file in planned.files] == [shard_name(n) for n in range(len(planned.files))]
    end = 0
    covered: dict[str, list[tuple[int, int]]] = {key: [] for key in stored}
    for file in planned.files:
        assert file.start % PAGE == 0 and file.start >= end
        end, begin = file.start + file.nbytes, 0
        for piece in file.pieces:
            tensor, item = stored[piece.key], itemsize(piece.dtype)
            assert (piece.dtype, piece.shape) == (tensor.dtype, tensor.shape)
            assert piece.begin == begin and piece.start == file.start + begin, "pieces lie side by side"
            assert piece.begin % item == 0, "every tensor begins at a multiple of its item size"
            assert piece.nbytes == prod(piece.box.shape) * item
            assert piece.offset == byte_offset(piece.box, piece.shape, item)
            covered[piece.key].append((piece.offset, piece.nbytes))
            begin += piece.nbytes
        assert begin == file.nbytes
        assert file.nbytes <= target or len(file.pieces) == 1, "bounded, but for one item that is larger"
    assert planned.arena_bytes >= end and planned.arena_bytes % PAGE == 0
    for key, parts in covered.items():
        at = 0
        for offset, count in sorted(parts):
            assert offset == at, f"{key} has a gap or an overlap at byte {at}"
            at += count
        assert at == size(stored[key])


@settings(max_examples=250, deadline=None)
@given(tensors, st.integers(1, 6), st.integers(16, 4000), st.integers(1, 4000))
def test_every_byte_has_exactly_one_place(given: list[TensorLayout], threads: int, largest: int, smallest: int) -> None:
    planned = plan(given, threads=threads, largest=largest, smallest=smallest)
    total = sum(map(size, given))
    check(planned, given, min(max(-(-total // (2 * threads)), smallest), largest))


@settings(max_examples=50, deadline=None)
@given(tensors, st.randoms())
def test_the_same_layout_gives_the_same_plan_in_every_process(
    given: list[TensorLayout], shuffle: random.Random
) -> None:
    first = plan(given, threads=2, smallest=64)
    assert plan(list(given), threads=2, smallest=64) == first


def test_tied_tensors_are_stored_once() -> None:
    owner = layout("wte", "float32", (10, 10))
    planned = plan([owner, layout("head", "float32", (10, 10), tie=owner.key)])
    assert [piece.key for file in planned.files for piece in file.pieces] == [owner.key]
    assert planned.tensor_bytes == 400


def test_a_state_without_tensors_still_has_a_file() -> None:
    planned = plan([])
    assert len(planned.files) == 1 and planned.files[0].pieces == () and planned.arena_bytes == 0


def test_empty_and_scalar_tensors_have_a_piece_each() -> None:
    given = [layout("empty", "float32", (0, 7)), layout("scalar", "float64", ())]
    planned = plan(given)
    assert {piece.key: piece.nbytes for piece in planned.files[0].pieces} == {given[0].key: 0, given[1].key: 8}


@pytest.mark.parametrize("threads", [1, 2, 4, 8])
def test_there_are_about_twice_as_many_files_as_threads_and_they_are_similar(threads: int) -> None:
    mib = 1024 * 1024
    given = [layout(str(n), "float32", (3 * mib // 4, 100)) for n in range(4)]  # 300 MiB each
    planned = plan(given, threads=threads)
    sizes = [file.nbytes for file in planned.files]
    assert 2 * threads <= len(sizes) <= 3 * threads + 2
    assert max(sizes) <= -(-1200 * mib // (2 * threads)) and sorted(sizes)[len(sizes) // 2] >= max(sizes) // 2


def test_small_states_are_not_scattered() -> None:
    given = [layout(str(n), "float32", (64, 64)) for n in range(200)]  # 3.2 MB
    assert len(plan(given, threads=8).files) == 1


def test_no_file_is_larger_than_the_bound_however_large_the_state() -> None:
    planned = plan([layout("huge", "bfloat16", (40_000, 1_000_000))], threads=2)  # 80 GB
    assert max(file.nbytes for file in planned.files) <= LARGEST_FILE
    assert sum(file.nbytes for file in planned.files) == 80_000_000_000


def test_twenty_thousand_small_tensors_are_planned_in_well_under_a_second() -> None:
    import time

    given = [layout(str(n), "float32", (4096,)) for n in range(20_000)]
    started = time.perf_counter()
    planned = plan(given)
    assert time.perf_counter() - started < 5
    assert sum(len(file.pieces) for file in planned.files) >= 20_000
