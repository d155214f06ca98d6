"""Every dtype has a stored form that stock safetensors readers open."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import safetensors
import torch

from onward.errors import FormatError, UnsupportedState
from onward.format import dtypes

QUANTIZED = {"qint8", "qint32", "quint8", "quint4x2", "quint2x4"}


def write(path: Path, dtype: str, shape: tuple[int, ...], data: bytes) -> None:
    entries = {
        "a": {"dtype": dtype, "shape": list(shape), "data_offsets": [0, len(data)]},
        "b": {"dtype": "U8", "shape": [1], "data_offsets": [len(data), len(data) + 1]},
    }
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data + b"\x07")


def test_the_table_knows_every_dtype_of_torch_but_the_quantized() -> None:
    """T113."""
    names = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert names - QUANTIZED <= set(dtypes.DTYPES)


@pytest.mark.parametrize("name", [name for name in dtypes.DTYPES if hasattr(torch, name)])
def test_the_item_size_is_that_of_torch(name: str) -> None:
    assert dtypes.itemsize(name) == getattr(torch, name).itemsize


@pytest.mark.parametrize("name", dtypes.DTYPES)
def test_stock_safetensors_reads_the_stored_form(name: str, tmp_path: Path) -> None:
    """T113: raw bytes equal, read by a reader that does not know onward."""
    data = bytes(range(1, 1 + 6 * dtypes.itemsize(name)))
    if name == "bool":
        data = b"\1\0\1\0\0\1"
    shape = dtypes.stored_shape(name, (2, 3))
    write(tmp_path / "x", dtypes.stored_dtype(name), shape, data)
    with safetensors.safe_open(tmp_path / "x", "pt") as reader:
        tensor = reader.get_tensor("a")
    assert tuple(tensor.shape) == shape
    assert bytes(tensor.view(torch.uint8).numpy().tobytes()) == data
    if tensor.dtype != torch.uint8:
        assert tensor.dtype == getattr(torch, name)
    with safetensors.safe_open(tmp_path / "x", "np") as reader:  # a dtype numpy lacks must not spoil its neighbours
        assert reader.get_tensor("b").tolist() == [7]


@pytest.mark.parametrize("stored", dtypes.SAFETENSORS_ITEMSIZE)
def test_stored_item_sizes_are_those_of_safetensors(stored: str, tmp_path: Path) -> None:
    write(tmp_path / "x", stored, (2,), bytes(2 * dtypes.SAFETENSORS_ITEMSIZE[stored]))
    with safetensors.safe_open(tmp_path / "x", "pt") as reader:
        assert tuple(reader.get_tensor("a").shape) == (2,)


@pytest.mark.parametrize("name", dtypes.DTYPES)
def test_the_stored_bytes_are_the_logical_bytes(name: str) -> None:
    stored = dtypes.stored_dtype(name)
    for shape in [(), (0,), (3, 0), (2, 3)]:
        count = 1
        for size in dtypes.stored_shape(name, shape):
            count *= size
        logical = dtypes.itemsize(name)
        for size in shape:
            logical *= size
        assert count * dtypes.SAFETENSORS_ITEMSIZE[stored] == logical


def test_unknown_names_are_refused() -> None:
    for call in (dtypes.itemsize, dtypes.stored_dtype, lambda name: dtypes.stored_shape(name, (1,))):
        with pytest.raises(UnsupportedState, match="'quint8'"):
            call("quint8")
    with pytest.raises(FormatError, match=r"layout.json names the unknown dtype '__class__'"):
        dtypes.require_readable("__class__", "layout.json")
    dtypes.require_readable("bfloat16", "layout.json")
