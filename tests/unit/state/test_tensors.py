"""Tensors as exact bytes: every dtype, stride and view; what has no exact bytes is refused by name."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from onward.errors import UnsupportedState
from onward.format import dtypes
from onward.state import tensors

NAMES = [name for name in dtypes.DTYPES if hasattr(torch, name)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls several dtypes experimental
        yield


def filled(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    tensor = tensors.empty(name, shape)
    raw = np.random.default_rng(seed).integers(0, 256, tensors.nbytes(tensor), np.uint8)
    tensors.as_bytes(tensor)[:] = raw.tobytes()
    return tensor


def item_by_item(tensor: torch.Tensor) -> bytes:
    """The bytes of a CPU tensor in C order, read from its storage by the definition of strides."""
    memory = bytes(tensor.untyped_storage())
    size = tensor.element_size()
    out = b""
    for index in itertools.product(*map(range, tensor.shape)):
        at = tensor.storage_offset() + sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True))
        out += memory[at * size : (at + 1) * size]
    return out


def copied(tensor: torch.Tensor) -> bytes:
    dest = bytearray(tensors.nbytes(tensor))
    tensors.copy_into(tensor, memoryview(dest))
    return bytes(dest)


VIEWS: dict[str, Any] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.t(),
    "row": lambda t: t[1],
    "columns": lambda t: t[:, 1:],
    "every other": lambda t: t[:, ::2],
    "one item": lambda t: t[1, 2],
    "empty": lambda t: t[:0],
    "expanded": lambda t: t[:1].expand(4, 3),
    "overlapping": lambda t: t.as_strided((2, 3), (1, 1)),
    "added dimensions": lambda t: t[:, None, :, None],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_and_view_is_copied_bit_for_bit(name: str, view: str) -> None:
    """T113: bf16, all float8, packed float4, uint16/32/64, complex, random bits (so NaN payloads, subnormals, -0.0)."""
    tensor = VIEWS[view](filled(name, (2, 3)))
    tensors.require_supported(("x",), tensor)
    assert copied(tensor) == item_by_item(tensor)


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_is_written_back_bit_for_bit_into_any_strides(name: str) -> None:
    """T113."""
    source = filled(name, (3, 4), seed=1)
    for target in (filled(name, (3, 4)), filled(name, (4, 3)).t(), filled(name, (3, 8))[:, ::2]):
        tensors.write_bytes(target, source)
        assert item_by_item(target) == item_by_item(source)
        assert tensors.same_bytes(target, source)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("float32", "7fc12345"),
        ("float32", "7f812345"),
        ("float32", "80000000"),
        ("float32", "00000001"),
        ("float64", "7ff0000000000001"),
        ("float16", "7e55"),
        ("bfloat16", "7f81"),
        ("float8_e5m2", "7d"),
    ],
)
def test_nan_payloads_negative_zero_and_subnormals_are_kept(name: str, word: str) -> None:
    """T113."""
    raw = bytes.fromhex(word)[::-1] * 64
    tensor = tensors.empty(name, (8, 8))
    tensors.as_bytes(tensor)[:] = raw
    assert copied(tensor) == copied(tensor.t()) == raw


def test_comparison_is_of_bits() -> None:
    """T113: torch.equal is False for NaN, and True for 0.0 and -0.0."""
    nan = torch.tensor([float("nan"), 0.0])
    assert tensors.same_bytes(nan, nan.clone())
    assert not tensors.same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not tensors.same_bytes(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not tensors.same_bytes(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("name", ["complex32", "complex64", "complex128"])
def test_lazily_conjugated_and_negated_views_are_resolved(name: str) -> None:
    tensor = filled(name, (2, 3))
    conj = tensor.conj()
    assert conj.is_conj()
    assert copied(conj) == item_by_item(conj.resolve_conj())
    assert copied(conj.t()) == item_by_item(conj.t().resolve_conj())
    negative = torch.view_as_real(tensor).clone()[..., 1]
    lazily = torch._neg_view(negative)
    assert lazily.is_neg()
    assert copied(lazily) == item_by_item(lazily.resolve_neg())
    target = filled(name, (2, 3), seed=3).conj()
    tensors.write_bytes(target, tensor)
    assert tensors.same_bytes(target, tensor)
    target = torch._neg_view(negative.clone())
    tensors.write_bytes(target, negative)
    assert tensors.same_bytes(target, negative)


def test_one_memory_seen_as_three_types_gives_three_copies() -> None:
    """T115: save refused, or load gave the type of whichever came first."""
    x = torch.randn(5)
    views = {"x": x, "y": x.view(torch.int32), "z": x.view(torch.uint8)}
    assert tensors.find_ties(views) == {}
    assert copied(views["x"]) == copied(views["y"]) == copied(views["z"]) == item_by_item(x)


def test_a_slice_copies_only_itself() -> None:
    """T116: the whole base memory was written with it."""
    big = torch.zeros(1_000_000)
    assert tensors.nbytes(big[:10]) == len(copied(big[:10])) == 40
    assert sum(tensors.nbytes(part) for part in big.chunk(10)) == tensors.nbytes(big)


def test_tensors_without_memory_are_not_tied() -> None:
    """T119: all of them have the address 0."""
    real = torch.randn(3)
    state = {
        "a": torch.empty(0),
        "b": torch.empty(0),
        "c": torch.empty(2, 0),
        "d": torch.tensor(1.0),
        "e": real,
        "f": real.view(3),
    }
    assert tensors.find_ties(state) == {"f": "e"}
    assert tensors.find_ties({"a": state["a"], "b": state["a"]}) == {}


def test_ties_are_found_by_memory_and_by_nothing_else() -> None:
    """T118: names and shapes said tied, memory said not."""
    base = torch.randn(4, 4)
    parameter = torch.nn.Parameter(base)
    complex_base = torch.randn(2, dtype=torch.complex64)
    state = {
        "base": base,
        "parameter": parameter,
        "detached": parameter.detach(),
        "numpy": torch.from_numpy(base.numpy()),
        "equal": base.clone(),
        "transposed": base.t(),
        "row": base[0],
        "later row": base[1],
        "flat": base.view(16),
        "bits": base.view(torch.int32),
        "one": base[:1],
        "one again": base[:1].as_strided((1, 4), (9, 1)),
        "complex": complex_base,
        "conjugated": complex_base.conj(),
    }
    assert tensors.find_ties(state) == {
        "parameter": "base",
        "detached": "base",
        "numpy": "base",
        "one again": "one",
    }


class Mine(torch.Tensor):
    pass


class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("the refusal ran an operator of the subclass")


def freed() -> torch.Tensor:
    tensor = torch.randn(4)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, tuple[Any, str]] = {
    "subclass": (lambda: Wrapped(torch.zeros(2)), "Wrapped, a tensor subclass"),
    "plain subclass": (
        lambda: torch.zeros(2).as_subclass(Mine),
        "Mine, a tensor subclass",
    ),
    "sparse": (lambda: torch.eye(2).to_sparse(), "layout sparse_coo"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "layout sparse_csr"),
    "mkldnn": (lambda: torch.zeros(2).to_mkldnn(), "layout mkldnn"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "quantized"),
    "meta": (lambda: torch.zeros(2, device="meta"), "meta device"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        "nested",
    ),
    "lazy": (lambda: torch.nn.LazyLinear(2).weight, "lazy parameter"),
    "lazy buffer": (lambda: torch.nn.parameter.UninitializedBuffer(), "lazy parameter or buffer"),
    "freed": (freed, "memory freed"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_without_exact_bytes_are_refused_by_name(kind: str) -> None:
    """T112: a cast error at load, or no save at all, noticed only at the end of training."""
    make, said = REFUSED[kind]
    with pytest.raises(UnsupportedState) as caught:
        tensors.require_supported(("model", "layer.weight"), make())
    assert caught.value.message.startswith("model['layer.weight'] ")
    assert said in caught.value.message
    assert caught.value.next_step


def test_tensors_inside_a_transform_are_refused() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedState, match=r"torch\.func"):
            tensors.require_supported(("x",), x)
        return x

    torch.func.vmap(body)(torch.zeros(2, 3))


def test_distributed_tensors_are_refused_as_not_yet() -> None:
    from torch.distributed.tensor import DTensor

    with pytest.raises(UnsupportedState, match=r"DTensor.*yet"):
        tensors.require_supported(("x",), torch.empty(0).as_subclass(DTensor))


def test_eight_bit_optimizer_state_is_supported() -> None:
    """T112: uint8 codes with fp32 scales."""
    for tensor in (torch.arange(64, dtype=torch.uint8), torch.arange(64) / 64, torch.nn.Buffer(torch.zeros(2))):
        tensors.require_supported(("x",), tensor)
        assert copied(tensor) == item_by_item(tensor)


def test_the_destination_may_be_unaligned_and_must_fit() -> None:
    tensor = torch.randn(3, 3).t()
    dest = bytearray(41)
    tensors.copy_into(tensor, memoryview(dest)[3:39])
    assert bytes(dest) == bytes(3) + item_by_item(tensor) + bytes(2)
    row = torch.zeros(36, dtype=torch.uint8)
    tensors.copy_into(tensor, row)
    assert bytes(tensors.as_bytes(row)) == item_by_item(tensor)
    for wrong in (bytearray(35), bytearray(37)):
        with pytest.raises(ValueError, match="36 bytes"):
            tensors.copy_into(tensor, memoryview(wrong))
    with pytest.raises(ValueError, match="read-only"):
        tensors.copy_into(tensor, memoryview(bytes(36)))


def test_byte_views_share_the_memory_and_outlive_the_tensor() -> None:
    tensor = torch.zeros(2, 2, dtype=torch.bfloat16)
    view = tensors.as_bytes(tensor[1:])
    view[:] = b"\x80\x3f\x80\x3f"
    assert tensor.tolist() == [[0, 0], [1, 1]]
    del tensor
    assert bytes(view) == b"\x80\x3f\x80\x3f"
    assert len(tensors.as_bytes(torch.tensor(1.0))) == 4
    assert tensors.as_bytes(torch.empty(0, 3)).nbytes == 0
    for wrong in (torch.zeros(2, 2).t(), torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.complex64).conj()):
        with pytest.raises(ValueError, match="contiguous CPU"):
            tensors.as_bytes(wrong)


def test_the_default_device_and_dtype_do_not_matter() -> None:
    source = torch.randn(4)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        assert tensors.empty("float32", (2,)).device.type == "cpu"
        assert copied(source) == item_by_item(source)
        assert tensors.empty("float32", (2,)).dtype == torch.float32
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_deterministic_algorithms_do_not_matter(name: str) -> None:
    """T113: torch then fills new memory, which it cannot for every dtype."""
    torch.use_deterministic_algorithms(True)
    try:
        tensor = filled(name, (2, 3))
        assert copied(tensor.t()) == item_by_item(tensor.t())
        target = tensors.empty(name, (2, 3))
        tensors.write_bytes(target, tensor)
        assert item_by_item(target) == item_by_item(tensor)
    finally:
        torch.use_deterministic_algorithms(False)


def test_copying_needs_no_grad_and_leaves_no_trace() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    assert copied(parameter) == item_by_item(parameter)
    tensors.write_bytes(parameter, torch.ones(3))
    assert parameter.tolist() == [1, 1, 1]
    assert parameter.grad_fn is None
    assert parameter.is_leaf
    with torch.inference_mode():
        inference = torch.randn(3)
    assert copied(inference) == item_by_item(inference)


@pytest.mark.parametrize(
    ("tensor", "overlaps"),
    [
        (torch.zeros(2, 3), False),
        (torch.zeros(2, 3).t(), False),
        (torch.zeros(4, 6)[::2, ::3], False),
        (torch.zeros(3).expand(2, 3), True),
        (torch.zeros(1).expand(1), False),
        (torch.zeros(0, 3), False),
        (torch.zeros(0).expand(5, 0), False),
        (torch.tensor(1.0), False),
        (torch.zeros(8).as_strided((3, 3), (1, 2)), True),
        (torch.zeros(8).unfold(0, 3, 1), True),
        (torch.zeros(2, 2, 4, 4).to(memory_format=torch.channels_last), False),
    ],
)
def test_memory_that_overlaps_itself_is_recognised(tensor: torch.Tensor, overlaps: bool) -> None:
    """T121: an expanded buffer cannot be filled item by item."""
    assert tensors.overlaps_itself(tensor) is overlaps


def test_dtype_names_are_those_of_torch_without_the_prefix() -> None:
    assert tensors.dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"
    assert tensors.dtype_name(torch.double) == "float64"
    assert tensors.torch_dtype("complex32") is torch.chalf
    with pytest.raises(UnsupportedState, match="qint8"):
        tensors.dtype_name(torch.qint8)
    with pytest.raises(UnsupportedState, match="'load'"):
        tensors.torch_dtype("load")


@pytest.mark.parametrize("shape", [(0, 2**62, 2**62), (2**40, 2**40), (-1,), (2, -1)])
def test_impossible_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no tensor can have the shape"):
        tensors.empty("float32", shape)


def test_new_tensors_are_independent_and_contiguous() -> None:
    tensor = tensors.empty("bfloat16", (2, 0, 3))
    assert tensor.is_contiguous()
    tensor = tensors.empty("float32", (2, 3))
    assert tensor.is_contiguous()
    assert tensor._base is None
    assert tensor.untyped_storage().nbytes() == 24
    assert tensor.requires_grad_().is_leaf


def test_writing_refuses_another_dtype_or_shape() -> None:
    with pytest.raises(ValueError, match="float32"):
        tensors.write_bytes(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="int32"):
        tensors.write_bytes(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
