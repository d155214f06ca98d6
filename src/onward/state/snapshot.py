"""The state of all components at one step: a JSON tree each, and the live tensors they refer to.

A tensor of a component that all ranks share becomes ``{"$tensor": key}``: its bytes go to the shard files. A tensor
of a rank's own state is small and stays inline.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from onward.errors import ConfigurationError, FormatError, OnwardError, SaveFailed, UnsupportedState
from onward.format import dtypes
from onward.format.typedstate import INLINE_LIMIT, TypedPath, decode, encode, key_of, path_of, readable
from onward.records import FORMAT, ComponentTag, JsonTree, Key, Layout, TensorLayout
from onward.state import tensors as exact
from onward.state.component import Component

_ALL_DTYPES = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_DEVICE = re.compile(r"[a-z]+(?::\d{1,3})?")
_NUMPY_TO_TORCH = {
    np.dtype(getattr(np, name)): name
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
_MAX_DIMENSIONS = 64


@dataclass(frozen=True)
class Snapshot:
    """What is to be saved; its tensors are live and must be copied before training goes on.

    Attributes:
        state: Component name → encoded tree, of both scopes.
        tensors: Tensors of global scope by key, in the order met; tied ones only under their first key.
        layout: All tensors of global scope, the tied ones too, sorted by key.
        tags: One per component, in the order given.
    """

    state: dict[str, JsonTree]
    tensors: dict[Key, torch.Tensor]
    layout: Layout
    tags: tuple[ComponentTag, ...]


class Known(NamedTuple):
    """A tensor as it was met before: while all of this holds, it need not be looked at again."""

    tensor: torch.Tensor
    path: TypedPath
    key: Key
    alias: torch.Tensor
    address: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def holds(self, tensor: torch.Tensor, path: TypedPath) -> bool:
        """Whether ``tensor`` at ``path`` is what it was."""
        return (
            self.tensor is tensor
            and self.path == path
            and self.address == tensor.data_ptr() != 0
            and self.dtype is tensor.dtype
            and self.shape == tensor.shape
            and self.stride == tensor.stride()
        )


class Memory:
    """What one snapshot tells the next, so that what did not change is not worked out again while training waits."""

    def __init__(self) -> None:
        self.known: dict[int, Known] = {}
        self.keys: list[Key] = []
        self.layout: Layout | None = None
        self.ties: dict[Key, Key] = {}


def take(components: Sequence[Component], step: int, memory: Memory | None = None) -> Snapshot:
    """Asks every component for its state and encodes it; copies no tensor.

    Args:
        components: What is registered.
        step: Completed global optimizer steps.
        memory: Carried from one snapshot of these components to the next; None to begin anew.

    Raises:
        UnsupportedState: Something in a state cannot be saved exactly; the message names its path.
        SaveFailed: A component cannot give its state.
    """
    memory = Memory() if memory is None else memory
    names = [component.name for component in components]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(f"two components have the name {', '.join(twice)}", next_step="rename one of them")
    shared = _SharedLeaf(memory.known)
    state: dict[str, JsonTree] = {}
    for component in components:
        leaf = shared if component.scope == "global" else _InlineLeaf()
        state[component.name] = encode(_state_of(component), (component.name,), leaf)
    memory.known = shared.met  # and no more: what is not met any more must not be kept alive
    found = shared.found
    if memory.layout is None or shared.changed or memory.keys != list(found):
        memory.keys, memory.ties = list(found), exact.find_ties(found)
        memory.layout = Layout(
            format=FORMAT,
            meshes=(),
            tensors=tuple(_layout(key, found[key], memory.ties.get(key)) for key in sorted(found)),
        )
    return Snapshot(
        state=state,
        tensors={key: tensor for key, tensor in found.items() if key not in memory.ties},
        layout=memory.layout,
        tags=tuple(
            ComponentTag(name=each.name, kind=each.kind, scope=each.scope, step=step, counters=each.counters())
            for each in components
        ),
    )


def _state_of(component: Component) -> object:
    try:
        return component.state()
    except OnwardError:
        raise
    except Exception as error:  # whatever a user's own state_dict raises: it fails the save, not the training
        raise SaveFailed(
            f"the component {component.name!r} could not give its state: {type(error).__name__}: {error}",
            next_step="mend its state_dict()",
        ) from error


def rebuild(tree: JsonTree, tensor_of: Callable[[Key], torch.Tensor]) -> object:
    """The value that a component's tree encodes, its tensors supplied by ``tensor_of``.

    The tensors may be on the meta device, to look at a state without its bytes. A device in the tree is data only.

    Raises:
        FormatError: The tree does not follow the format.
    """
    return decode(tree, _Builder(tensor_of))


def tensor_keys(tree: JsonTree) -> list[Key]:
    """The keys of the tensors that a component's tree refers to, in order."""
    keys: list[Key] = []

    def note(tag: str, payload: JsonTree) -> object:
        if tag == "$tensor":
            keys.append(_key(payload))
        elif tag == "$ndarray":
            keys.append(_key(_fields(payload, "tensor", "dtype")[0]))
        elif tag not in _BUILD:
            raise FormatError(f"unknown tag {tag[:80]!r}")
        return None

    decode(tree, note)
    if len(set(keys)) != len(keys):
        raise FormatError("the state refers to one tensor from two places")
    return keys


def _layout(key: Key, tensor: torch.Tensor, tie: Key | None) -> TensorLayout:
    dtype = exact.dtype_name(tensor.dtype)
    return TensorLayout(key=key, dtype=dtype, shape=tuple(tensor.shape), stored=dtypes.stored_dtype(dtype), tie=tie)


# --- encoding --------------------------------------------------------------------------------------------------


def _small(value: object, path: TypedPath) -> JsonTree | None:
    """The types of torch that are not tensors."""
    if type(value) is torch.Size:
        return {"$torch.size": list(value)}
    if isinstance(value, torch.dtype):
        return {"$torch.dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$torch.device": str(value)}
    if isinstance(value, torch.Generator):
        raise UnsupportedState(
            f"{readable(path)} is a torch.Generator", next_step="register the generator as a component of its own"
        )
    if isinstance(value, torch.nn.Module):
        raise UnsupportedState(
            f"{readable(path)} is a module ({type(value).__qualname__})",
            next_step="register it as a component of its own, or save its state_dict()",
        )
    return None


class _SharedLeaf:
    """Global scope: tensors and large numpy arrays are noted under their key, for the shard files."""

    def __init__(self, known: dict[int, Known]) -> None:
        self._known = known
        self.found: dict[Key, torch.Tensor] = {}
        self.met: dict[int, Known] = {}
        self.changed = False

    def __call__(self, value: object, path: TypedPath) -> JsonTree | None:
        if isinstance(value, torch.Tensor):
            known = self._known.get(id(value))
            if known is not None and known.holds(value, path) and known.key not in self.found:
                self.found[known.key] = known.alias
                self.met[id(value)] = known
                return {"$tensor": known.key}
            self.changed = True
            exact.require_supported(path, value)
            key = self._note(value, path)
            if all(type(element) is str for element in path):  # 1 and True are equal, but not one path
                self.met[id(value)] = Known(
                    value, path, key, self.found[key], value.data_ptr(), value.dtype, value.shape, value.stride()
                )
            return {"$tensor": key}
        if isinstance(value, np.ndarray):
            if type(value) is not np.ndarray or value.dtype not in _NUMPY_TO_TORCH or not value.dtype.isnative:
                return None
            # A copy of its own: torch cannot take read-only arrays, nor arrays of all strides.
            key = self._note(torch.from_numpy(value.copy("C")), path)
            return {"$ndarray": {"tensor": key, "dtype": value.dtype.str}}
        return _small(value, path)

    def _note(self, tensor: torch.Tensor, path: TypedPath) -> Key:
        key = key_of(path)
        if key in self.found:  # two NaN keys in one dict: different to Python, one name on disk
            raise UnsupportedState(f"two tensors have the one path {readable(path)}")
        self.found[key] = tensor.detach()
        return key


class _InlineLeaf:
    """Rank scope: tensors are written into the state itself."""

    def __call__(self, value: object, path: TypedPath) -> JsonTree | None:
        if not isinstance(value, torch.Tensor):
            return _small(value, path)
        exact.require_supported(path, value)
        if exact.nbytes(value) > INLINE_LIMIT:
            raise UnsupportedState(
                f"{readable(path)} is a tensor of {exact.nbytes(value)} bytes in a state of rank scope, where at most "
                f"{INLINE_LIMIT} (64 MiB) can be saved",
                next_step="hold large tensors in a component of global scope",
            )
        raw = bytearray(exact.nbytes(value))
        exact.copy_into(value, memoryview(raw))
        return {
            "$torch.tensor": {
                "dtype": exact.dtype_name(value.dtype),
                "shape": list(value.shape),
                "base64": base64.b64encode(raw).decode("ascii"),
            }
        }


# --- decoding --------------------------------------------------------------------------------------------------


class _Builder:
    def __init__(self, tensor_of: Callable[[Key], torch.Tensor]) -> None:
        self._tensor_of = tensor_of

    def __call__(self, tag: str, payload: JsonTree) -> object:
        if tag not in _BUILD:
            raise FormatError(f"unknown tag {tag[:80]!r}")
        return _BUILD[tag](self, payload)

    def tensor(self, payload: JsonTree) -> torch.Tensor:
        key = _key(payload)
        try:
            return self._tensor_of(key)
        except KeyError:
            raise FormatError(f"the state refers to {readable(path_of(key))}, which the layout does not have") from None

    def array(self, payload: JsonTree) -> np.ndarray[Any, Any]:
        key, name = _fields(payload, "tensor", "dtype")
        tensor = self.tensor(key)
        dtype = next((known for known in _NUMPY_TO_TORCH if known.str == name), None)
        if dtype is None or tensor.dtype != getattr(torch, _NUMPY_TO_TORCH[dtype]):
            raise FormatError(f"a numpy array of dtype {str(name)[:80]!r} does not fit its tensor of {tensor.dtype}")
        if tensor.is_meta:  # only to be looked at: one item, seen everywhere
            return np.broadcast_to(np.zeros((), dtype), tuple(tensor.shape))
        array: np.ndarray[Any, Any] = tensor.numpy()
        return array

    def inline(self, payload: JsonTree) -> torch.Tensor:
        dtype, sizes, text = _fields(payload, "dtype", "shape", "base64")
        if type(dtype) is not str or type(text) is not str:
            raise FormatError("an inline tensor has a dtype and base64 text")
        dtypes.require_readable(dtype, "an inline tensor")
        shape = _shape(sizes)
        try:
            raw = base64.b64decode(text, validate=True)
        except (ValueError, binascii.Error):
            raise FormatError("an inline tensor holds bytes that are not base64") from None
        items = 1
        for size in shape:
            items *= size
        if items * dtypes.itemsize(dtype) != len(raw):  # before torch allocates what the shape declares
            raise FormatError(f"{len(raw)} bytes are no tensor of dtype {dtype} and shape {shape}")
        try:
            tensor = exact.empty(dtype, shape)
        except ValueError:  # an empty tensor with sizes that torch cannot hold
            raise FormatError(f"impossible tensor shape {shape}") from None
        exact.as_bytes(tensor)[:] = raw
        return tensor

    def size(self, payload: JsonTree) -> torch.Size:
        return torch.Size(_shape(payload))

    def dtype(self, payload: JsonTree) -> torch.dtype:
        if type(payload) is not str or payload not in _ALL_DTYPES:
            raise FormatError(f"unknown torch dtype {str(payload)[:80]!r}")
        return _ALL_DTYPES[payload]

    def device(self, payload: JsonTree) -> torch.device:
        try:
            if type(payload) is str and _DEVICE.fullmatch(payload):
                return torch.device(payload)
        except RuntimeError:  # a kind of device that this torch does not know
            pass
        raise FormatError(f"unknown torch device {str(payload)[:80]!r}")


_BUILD: dict[str, Callable[[_Builder, JsonTree], object]] = {
    "$tensor": _Builder.tensor,
    "$ndarray": _Builder.array,
    "$torch.tensor": _Builder.inline,
    "$torch.size": _Builder.size,
    "$torch.dtype": _Builder.dtype,
    "$torch.device": _Builder.device,
}


def _key(payload: JsonTree) -> Key:
    if type(payload) is not str:
        raise FormatError("a tensor is referred to by its key")
    path_of(payload)
    return payload


def _fields(payload: JsonTree, *names: str) -> list[JsonTree]:
    if type(payload) is not dict or set(payload) != set(names):
        raise FormatError(f"an object with exactly {', '.join(names)} was expected")
    return [payload[name] for name in names]


def _shape(payload: JsonTree) -> tuple[int, ...]:
    if (
        type(payload) is not list
        or len(payload) > _MAX_DIMENSIONS
        or not all(type(size) is int and 0 <= size < 2**63 for size in payload)
    ):
        raise FormatError("a shape is a short list of sizes")
    return tuple(payload)
