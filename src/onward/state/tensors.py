"""Tensors as exact bytes: what can be saved, copying out and in, shared memory.

Values never pass through numpy or a conversion: every copy is of integers as wide as one item, so NaN payloads,
negative zeros and dtypes for which torch has no arithmetic survive, whatever the strides.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from onward.errors import UnsupportedState
from onward.format import dtypes
from onward.format.typedstate import TypedPath, readable
from onward.records import Key

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in dtypes.DTYPES if hasattr(torch, name)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_supported(path: TypedPath, tensor: torch.Tensor) -> None:
    """Refuses, by name, a tensor whose bytes alone are not all of it.

    Raises:
        UnsupportedState: A subclass, a layout other than strided, or a tensor without memory of its own.
    """
    kind = type(tensor)
    if (
        (kind is torch.Tensor or kind is torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.dtype in _NAMES
        and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and _last_byte(tensor) <= tensor.untyped_storage().nbytes()
    ):
        return  # the path is put into words for a refusal only: this runs for every tensor while training waits
    _refuse(readable(path), tensor)


def _refuse(where: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise UnsupportedState(
            f"{where} is a lazy parameter or buffer that has no shape yet",
            next_step="run one forward pass on an example batch before saving or resuming",
        )
    if _is_dtensor(tensor):
        raise UnsupportedState(f"{where} is a DTensor; sharded tensors cannot be saved yet")
    if tensor.is_nested:
        raise UnsupportedState(f"{where} is a nested tensor, which cannot be saved")
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        kind = type(tensor)
        raise UnsupportedState(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, a tensor subclass whose inner state is unknown",
            next_step="save its inner tensors under names of their own (from a state_dict of the component)",
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise UnsupportedState(f"{where} is a tensor inside torch.func (vmap, grad); save outside of the transform")
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").lstrip("_")
        raise UnsupportedState(f"{where} has the layout {layout}; only dense (strided) tensors can be saved")
    if tensor.is_quantized:
        raise UnsupportedState(f"{where} is a quantized tensor; save its int_repr(), scale and zero point instead")
    if tensor.is_meta:
        raise UnsupportedState(
            f"{where} is on the meta device and has no data", next_step="materialise the model (to_empty) first"
        )
    if tensor.dtype not in _NAMES:
        raise UnsupportedState(f"{where} has the dtype {tensor.dtype}, which cannot be saved")
    if _last_byte(tensor) > tensor.untyped_storage().nbytes():  # FSDP frees the storage of unsharded parameters
        raise UnsupportedState(f"{where} has had its memory freed; save when its values are there")


def dtype_name(dtype: torch.dtype) -> str:
    """The logical name of a dtype: torch's own, without ``torch.``."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise UnsupportedState(f"tensors of dtype {dtype} cannot be saved") from None


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a logical name; refuses names that are unknown, or newer than this torch."""
    dtypes.itemsize(name)
    try:
        return _DTYPES[name]
    except KeyError:
        raise UnsupportedState(f"torch {torch.__version__} has no dtype {name}", next_step="upgrade torch") from None


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of all items, each counted once: expanded items too, gaps between items not."""
    return tensor.numel() * tensor.element_size()


def empty(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A new contiguous CPU tensor of a logical dtype, its contents undefined; ValueError if it cannot exist."""
    if prod(max(size, 1) for size in shape) >= 2**63 or min(shape, default=0) < 0:
        raise ValueError(f"no tensor can have the shape {shape}")
    # Not torch.empty: with deterministic algorithms on it fills the memory, which takes long and fails for some dtypes.
    memory = torch.UntypedStorage(prod(shape) * dtypes.itemsize(dtype), device="cpu")  # type: ignore[no-untyped-call]
    return _over(memory, torch_dtype(dtype), shape)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes: no copy; it keeps the memory alive."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError("only contiguous CPU tensors can be seen as bytes")
    if nbytes(tensor) == 0:
        return memoryview(bytearray())
    # Not through numpy, which marks the storage as not resizable for ever; these tensors are the user's to keep.
    buffer = (ctypes.c_ubyte * nbytes(tensor)).from_address(tensor.data_ptr())
    buffer.tensor = tensor  # type: ignore[attr-defined]  # the view keeps the memory alive through it
    return memoryview(buffer).cast("B")


def copy_into(tensor: torch.Tensor, dest: memoryview | torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copies the items of ``tensor``, in C order, bit for bit into ``dest``.

    Args:
        tensor: Any supported tensor, of any strides, on any device.
        dest: Writable contiguous host memory of exactly ``nbytes(tensor)`` bytes, of any alignment.
        non_blocking: Return before a copy from an accelerator is over; its stream says when it is.
    """
    view = as_bytes(dest) if isinstance(dest, torch.Tensor) else dest
    if view.nbytes != nbytes(tensor) or view.readonly:
        kind = "read-only" if view.readonly else "writable"
        raise ValueError(f"{nbytes(tensor)} bytes of tensor cannot be copied into {view.nbytes} {kind} bytes")
    if view.nbytes:
        target = torch.from_numpy(np.frombuffer(view, dtype=np.uint8))
        _copy_bits(tensor, _over(target.untyped_storage(), tensor.dtype, tuple(tensor.shape)), non_blocking)


def target_of(view: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Host memory as the tensor that ``copy_all`` fills: of integers as wide as one item, over ``view``."""
    carrier = _CARRIERS.get(dtypes.itemsize(dtype), torch.int64)
    if dtypes.itemsize(dtype) not in _CARRIERS:
        shape = (*shape, 2)
    if not len(view):
        return torch.empty(shape, dtype=carrier)
    return torch.from_numpy(np.frombuffer(view, dtype=np.uint8)).view(carrier).view(shape)


def copy_all(copies: Sequence[tuple[torch.Tensor, torch.Tensor]], *, non_blocking: bool = False) -> None:
    """Copies detached tensors, bit for bit, each into the target that ``target_of`` made for it.

    One call for all of them: the interpreter's lock is let go of once, not taken again for every tensor.
    """
    sources = [
        tensor.view(target.dtype)
        if target.itemsize == tensor.itemsize and not tensor.is_conj() and not tensor.is_neg()
        else _bits(tensor)
        for tensor, target in copies
    ]
    if sources:
        torch._foreach_copy_([target for _, target in copies], sources, non_blocking)


def write_bytes(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Overwrites the items of ``tensor`` in place with those of ``source``, bit for bit.

    Both have the same dtype and shape; they may differ in strides and device. Items of ``tensor`` must not overlap
    (see ``overlaps_itself``).
    """
    if tensor.dtype != source.dtype or tensor.shape != source.shape:
        raise ValueError(f"{source.dtype} {tuple(source.shape)} into {tensor.dtype} {tuple(tensor.shape)}")
    if tensor.is_conj() or tensor.is_neg():  # the memory holds the other sign; torch turns it over on the way in
        with torch.no_grad():
            tensor.copy_(source)
    elif tensor.numel():
        _copy_bits(source, tensor)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit; ``torch.equal`` is false for NaN and true for 0.0 and -0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(torch.equal(_bits(one).cpu(), _bits(other).cpu()))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two items may lie at one place, as in an expanded tensor; such memory cannot be filled item by item."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def find_ties(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, Key]:
    """Which tensors are the very same items of the same memory: tied key → the first key that has them.

    Tensors without memory are never tied, although torch gives all of them the address 0.
    """
    # Most addresses belong to one tensor; only those that share one are compared in full.
    sharing: dict[int, list[Key]] = {}
    for key, tensor in tensors.items():
        if (address := tensor.data_ptr()) and tensor.numel():
            sharing.setdefault(address, []).append(key)
    ties: dict[Key, Key] = {}
    for keys in sharing.values():
        first: dict[object, Key] = {}
        for key in keys if len(keys) > 1 else ():
            owner = first.setdefault(_place(tensors[key]), key)
            if owner != key:
                ties[key] = owner
    return ties


def find_conflicts(live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Pairs of live tensors in one memory that ``saved`` would fill with values that contradict each other.

    Saved tensors without data (on the meta device) are left out. Live ones that overlap themselves are compared
    with those tied to them only.
    """
    ties = find_ties(live)
    known = [name for name in live if nbytes(live[name]) and not saved[name].is_meta]
    conflicts = [
        (ties[name], name)
        for name in known
        if name in ties and saved[name] is not saved[ties[name]] and not same_bytes(saved[name], saved[ties[name]])
    ]
    memories: dict[int, list[str]] = {}
    for name in known:
        if name not in ties and not overlaps_itself(live[name]):
            memories.setdefault(live[name].untyped_storage().data_ptr(), []).append(name)
    for names in memories.values():
        names.sort(key=lambda name: _extent(live[name]))
        cluster, end = names[:1], _extent(live[names[0]])[1]
        for name in names[1:]:
            start, stop = _extent(live[name])
            if start >= end:
                conflicts += _replay(cluster, live, saved)
                cluster = []
            cluster.append(name)
            end = max(end, stop)
        conflicts += _replay(cluster, live, saved)
    return conflicts


def _replay(
    names: list[str], live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]
) -> list[tuple[str, str]]:
    """Fills a copy of the memory that ``names`` share, to see which value another one would spoil."""
    if len(names) < 2:
        return []
    start = _extent(live[names[0]])[0] // 16 * 16  # a multiple of every item size
    scratch = torch.empty(max(_extent(live[name])[1] for name in names) - start, dtype=torch.uint8, device="cpu")
    views = {}
    for name in names:
        tensor = live[name]
        offset = (_extent(tensor)[0] - start) // tensor.element_size()
        view = _blank(tensor.dtype)
        views[name] = view.set_(scratch.untyped_storage(), offset, tuple(tensor.shape), tensor.stride())
        write_bytes(views[name], saved[name])
    return [(name, names[-1]) for name in names if not same_bytes(views[name], saved[name])]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte in its storage, of a tensor that has items."""
    return int(tensor.storage_offset()) * tensor.element_size(), _last_byte(tensor)


def _place(tensor: torch.Tensor) -> object:
    # The stride of a dimension of size 1 says nothing; conj and neg views share memory but not values.
    strides = tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    signs = (tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), strides, signs


def _is_dtensor(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # not imported, so there is none; the import is slow
    return module is not None and isinstance(tensor, module.DTensor)


def _last_byte(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as one row of bytes."""
    start = tensor.storage_offset() * tensor.element_size()
    row = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return row.set_(tensor.untyped_storage(), start, (nbytes(tensor),), (1,))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same items as integers of the same width: the same memory, except for conj and neg views."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    carrier = _CARRIERS.get(tensor.element_size())
    if carrier is None:  # complex128: no integer is as wide, so two of half the width
        carrier, shape, offset = torch.int64, (*shape, 2), 2 * offset
        strides = (*(2 * stride for stride in strides), 1)
    return torch.empty(0, dtype=carrier, device=tensor.device).set_(tensor.untyped_storage(), offset, shape, strides)


def _over(memory: torch.UntypedStorage, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous CPU tensor of the given dtype and shape from the beginning of a storage."""
    strides = [1] * len(shape)
    for dimension in range(len(shape) - 2, -1, -1):
        strides[dimension] = strides[dimension + 1] * max(shape[dimension + 1], 1)
    return _blank(dtype).set_(memory, 0, shape, tuple(strides))


def _blank(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype).data  # see ``empty``


def _copy_bits(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> None:
    if source.is_contiguous() and target.is_contiguous() and not source.is_conj() and not source.is_neg():
        _flat(target).copy_(_flat(source), non_blocking)  # one run of bytes
    else:
        _bits(target).copy_(_bits(source), non_blocking)
