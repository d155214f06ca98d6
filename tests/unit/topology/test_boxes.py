"""Boxes are cut so that the parts are contiguous, in order, small enough, and cover the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.records import Box
from onward.topology.boxes import byte_offset, inside, nbytes, split, whole

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)
ITEMS = st.sampled_from([1, 2, 4, 8, 16])


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


def part(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))]


@given(SHAPES, ITEMS, st.integers(1, 200))
def test_the_parts_come_in_byte_order_and_cover_the_box_once(shape: tuple[int, ...], item: int, limit: int) -> None:
    array = numbered(shape)
    parts = list(split(whole(shape), item, limit))
    seen = [int(n) for box in parts for n in part(array, box).ravel()]
    assert seen == list(range(array.size))


@given(SHAPES, ITEMS, st.integers(1, 200))
def test_no_part_is_larger_than_the_limit_unless_one_item_is(shape: tuple[int, ...], item: int, limit: int) -> None:
    for box in split(whole(shape), item, limit):
        assert 0 < nbytes(box.shape, item) <= max(limit, item)


@given(SHAPES, ITEMS, st.integers(1, 200))
def test_every_part_lies_where_its_byte_offset_says(shape: tuple[int, ...], item: int, limit: int) -> None:
    position = 0
    for box in split(whole(shape), item, limit):
        assert byte_offset(box, shape, item) == position
        position += nbytes(box.shape, item)
    assert position == nbytes(shape, item)


@given(st.data(), SHAPES, ITEMS)
def test_a_byte_offset_is_given_exactly_for_contiguous_boxes(
    data: st.DataObject, shape: tuple[int, ...], item: int
) -> None:
    offset = tuple(data.draw(st.integers(0, size)) for size in shape)
    box = Box(
        offset=offset, shape=tuple(data.draw(st.integers(0, size - o)) for o, size in zip(offset, shape, strict=True))
    )
    found = byte_offset(box, shape, item)
    numbers = part(numbered(shape), box).ravel()
    if numbers.size:
        contiguous = bool((np.diff(numbers) == 1).all())
        assert (found is not None) == contiguous
        if found is not None:
            assert found == int(numbers[0]) * item


@given(SHAPES, ITEMS, st.integers(1, 60), st.integers(1, 60))
def test_parts_of_parts_cover_the_part(shape: tuple[int, ...], item: int, first: int, second: int) -> None:
    """A tensor is cut into files, each file's box into chunks; offsets count from the tensor's own beginning."""
    array = numbered(shape)
    for box in split(whole(shape), item, first):
        inner = [int(n) for chunk in split(box, item, second) for n in part(array, chunk).ravel()]
        assert inner == [int(n) for n in part(array, box).ravel()]


def test_a_box_is_inside_only_with_the_same_dimensions_and_no_negative_numbers() -> None:
    assert inside(Box(offset=(0, 1), shape=(2, 2)), (2, 3))
    assert inside(Box(offset=(), shape=()), ())
    assert inside(Box(offset=(2,), shape=(0,)), (2,))
    for offset, shape in (((0, 2), (2, 2)), ((-1, 0), (1, 1)), ((0, 0), (-1, 1)), ((0,), (2,)), ((0, 0, 0), (1, 1, 1))):
        assert not inside(Box(offset=offset, shape=shape), (2, 3))
        assert byte_offset(Box(offset=offset, shape=shape), (2, 3), 4) is None


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (5,), (1, 5, 1)])
def test_sizes_of_one_are_not_cut(shape: tuple[int, ...]) -> None:
    assert list(split(whole(shape), 4, 4 * math.prod(shape))) == [whole(shape)]


def test_an_empty_box_has_no_parts() -> None:
    """Only the plan of shards gives an empty tensor a piece; there is no chunk to be checked."""
    assert list(split(whole((0, 4)), 4, 100)) == []
    assert nbytes((0, 4), 4) == 0
    assert nbytes((), 8) == 8
