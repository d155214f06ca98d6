"""How tensors of each logical dtype are stored in safetensors files.

A logical dtype is named as torch names it, without ``torch.``. It is stored under a native safetensors name only
where the stock reader has known that name since version 0.5: one name a reader does not know makes it refuse the
*whole* file. All others are stored as ``U8``, their shape extended by a last dimension of one item's bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from onward.errors import FormatError, UnsupportedState

SAFETENSORS_ITEMSIZE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "U16": 2,
    "I16": 2,
    "U32": 4,
    "I32": 4,
    "U64": 8,
    "I64": 8,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "F64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
"""Bytes per item of every safetensors dtype that a shard file may name."""

_RAW = "U8"


class _Stored(NamedTuple):
    itemsize: int
    dtype: str


_NATIVE = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_RAW_ITEMSIZE = {
    "complex32": 4,  # safetensors has no name for it
    "complex64": 8,  # C64 is unknown to readers before 0.6, complex128 to all
    "complex128": 16,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "bits8": 1,
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
}
_TABLE = {
    **{name: _Stored(SAFETENSORS_ITEMSIZE[stored], stored) for name, stored in _NATIVE.items()},
    **{name: _Stored(size, _RAW) for name, size in _RAW_ITEMSIZE.items()},
}

DTYPES = tuple(sorted(_TABLE))
"""Every logical dtype that can be saved."""


def itemsize(name: str) -> int:
    """Bytes of one item of the logical dtype ``name``."""
    return _look_up(name).itemsize


def stored_dtype(name: str) -> str:
    """The safetensors dtype under which ``name`` is stored."""
    return _look_up(name).dtype


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape under which a tensor of logical dtype ``name`` and ``shape`` is stored."""
    return shape if name in _NATIVE else (*shape, itemsize(name))


def require_readable(name: str, where: str) -> None:
    """Refuses a dtype that a file names and this program does not know, as FormatError; ``where`` names the file."""
    if name not in _TABLE:
        raise FormatError(f"{where} names the unknown dtype {name[:80]!r}")


def _look_up(name: str) -> _Stored:
    try:
        return _TABLE[name]
    except KeyError:
        raise UnsupportedState(
            f"tensors of dtype {name[:80]!r} cannot be saved", next_step=f"convert it to one of {', '.join(DTYPES)}"
        ) from None
