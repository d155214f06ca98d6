"""Boxes of tensors, and how they are cut."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from onward.records import Box


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is all of a tensor."""
    return Box(offset=(0,) * len(shape), shape=shape)


def nbytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes of a box of ``shape`` with ``itemsize`` bytes an element; a 0-d box has one element."""
    return prod(shape) * itemsize


def split(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Cuts a box into boxes of at most ``limit`` bytes, each contiguous in the C-ordered bytes of ``box``.

    The parts come in byte order and cover the box. An empty box yields nothing; an element larger than ``limit``
    yields itself.
    """
    total = nbytes(box.shape, itemsize)
    if total == 0:
        return
    axis = next((d for d, size in enumerate(box.shape) if size > 1), None)
    if total <= limit or axis is None:
        yield box
        return
    row = total // box.shape[axis]
    rows = max(1, limit // row)
    for begin in range(0, box.shape[axis], rows):
        count = min(rows, box.shape[axis] - begin)
        part = Box(
            offset=(*box.offset[:axis], box.offset[axis] + begin, *box.offset[axis + 1 :]),
            shape=(*box.shape[:axis], count, *box.shape[axis + 1 :]),
        )
        if count * row > limit:
            yield from split(part, itemsize, limit)
        else:
            yield part


def inside(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box lies within a tensor of ``shape``."""
    return len(box.offset) == len(box.shape) == len(shape) and all(
        o >= 0 and s >= 0 and o + s <= full for o, s, full in zip(box.offset, box.shape, shape, strict=True)
    )


def byte_offset(box: Box, shape: tuple[int, ...], itemsize: int) -> int | None:
    """Where a contiguous box begins in the C-ordered bytes of a tensor of ``shape``.

    Returns None when the box is not contiguous in the tensor, or not inside it.
    """
    if not inside(box, shape):
        return None
    partial = [d for d, (s, full) in enumerate(zip(box.shape, shape, strict=True)) if s != full]
    if partial and any(box.shape[d] != 1 for d in range(partial[-1])):
        return None
    offset = 0
    for o, full in zip(box.offset, shape, strict=True):
        offset = offset * full + o
    return offset * itemsize
