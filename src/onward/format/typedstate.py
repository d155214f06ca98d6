"""Typed state: a tree of Python values to JSON and back, with every type exact.

Plain JSON means itself: null, booleans, strings, integers up to 2**53, finite floats, lists, and objects whose keys
do not begin with ``$``. Everything else is an object with one key, its tag: ``{"$tuple": [1, 2]}``. A dict whose keys
are not sorted is such an other thing, a list of pairs under ``$dict``: JSON objects have no order that survives a
canonical writer. Only exact types are encoded: a subclass may carry more than its base shows, and would come back as
something else.

What the codec does not know (tensors, and other types of torch) goes through a hook, the *leaf*. Decoding builds
only the types listed here; nothing in a tree can make it import, call or allocate anything else.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from onward.errors import FormatError, UnsupportedState
from onward.records import JsonTree, Key

TypedPath = tuple[object, ...]
"""Where a value is: the keys and indexes from the root, each of its own type."""

LeafEncoder = Callable[[object, TypedPath], JsonTree | None]
"""Encodes an object the codec does not know as ``{"$tag": ...}``, or returns None to refuse it."""

LeafDecoder = Callable[[str, JsonTree], object]
"""Decodes the payload of a tag (``"$tag"``) the codec does not know; raises FormatError to refuse it."""

MAX_DEPTH = 100
"""Deepest nesting of containers, either way; far below what would exhaust Python's stack."""

INLINE_LIMIT = 64 * 1024 * 1024
"""Most bytes that one value may put into the JSON; larger ones belong into tensors."""

OFFER_BYTES = 4096
"""numpy arrays of at least this size are offered to the leaf hook before they are written inline."""

_EXACT_INT = 2**53  # beyond it, JSON readers that hold numbers as doubles (jq, JavaScript) lose digits
_MAX_DIMENSIONS = 32
_NUMPY_PLAIN = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"])
_NUMPY_SCALARS = frozenset(np.dtype(code).type for code in _NUMPY_PLAIN)
_NUMPY_DTYPE = re.compile(r"[<>|](?:[a-z]\d{1,2}|[SU][1-9]\d{0,8})")
_BIG_INT = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
_FACTORIES: dict[str, Callable[[], object]] = {
    "list": list,
    "dict": dict,
    "int": int,
    "float": float,
    "set": set,
    "str": str,
    "tuple": tuple,
}


def encode(value: object, path: TypedPath, leaf: LeafEncoder) -> JsonTree:
    """Encodes ``value``, which lies at ``path``, as a JSON tree.

    Raises:
        UnsupportedState: It holds something that would not come back exactly; the message names where.
    """
    return _Encoder(leaf).value(value, path)


def decode(tree: JsonTree, leaf: LeafDecoder, path: TypedPath = ()) -> object:
    """Builds the value that was encoded as ``tree``; ``path`` only serves the messages.

    Raises:
        FormatError: The tree does not follow the format; the message names where.
    """
    return _Decoder(leaf).value(tree, path)


def key_of(path: TypedPath) -> Key:
    """The canonical compact JSON of a path: equal only for paths whose elements agree in type and value."""
    parts: list[str] = []
    for element in path:
        # Plain words and small numbers, which nearly all keys are made of, without an encoder for each.
        if type(element) is str and element.isascii():
            parts.append(_quoted(element))
        elif type(element) is int and -_EXACT_INT <= element <= _EXACT_INT:
            parts.append(str(element))
        else:
            encoder = _Encoder(_no_leaf)
            return _canonical([encoder.value(each, path) for each in path])
    return f"[{','.join(parts)}]"


def path_of(key: Key) -> TypedPath:
    """The path whose ``key_of`` is exactly ``key``; anything else is refused with FormatError."""
    try:
        tree = json.loads(key)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the tensor key {_short(key)} is not JSON") from error
    if type(tree) is not list:
        raise FormatError(f"the tensor key {_short(key)} is not a list")
    decoder = _Decoder(_no_tag)
    path = tuple(decoder.key(element, ("key",)) for element in tree)
    if key_of(path) != key:  # two spellings of one path would be two tensors of one name
        raise FormatError(f"the tensor key {_short(key)} is not in canonical form")
    return path


def readable(path: TypedPath) -> str:
    """A path for people: ``optimizer['state'][5]``."""
    if not path:
        return "the state"
    head = path[0]
    start = head if isinstance(head, str) and head.isprintable() and 0 < len(head) <= 80 else _short(head)
    return start + "".join(f"[{_short(element)}]" for element in path[1:])


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # an int of more digits than Python converts; a key whose class has a broken repr
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"


# Made once: json.dumps builds an encoder for every call that has options.
_canonical: Callable[[JsonTree], str] = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False
).encode
_quoted: Callable[[str], str] = json.encoder.encode_basestring


def _no_leaf(value: object, path: TypedPath) -> JsonTree | None:
    return None


def _no_tag(tag: str, payload: JsonTree) -> object:
    raise FormatError(f"unknown tag {_short(tag)}")


def _lone_surrogates(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _plain_key(key: object) -> bool:
    return type(key) is str and not key.startswith("$") and not _lone_surrogates(key)


def _is_object(value: dict[Any, object]) -> bool:
    """Whether a dict can be a JSON object: plain keys, in the order that a canonical writer gives them anyway."""
    keys = list(value)
    return all(map(_plain_key, keys)) and keys == sorted(keys)


# --- encoding --------------------------------------------------------------------------------------------------


def _base64(raw: bytes | bytearray) -> str:
    return base64.b64encode(raw).decode("ascii")


def _same(value: Any) -> JsonTree:
    return value


def _int(value: int) -> JsonTree:
    return value if -_EXACT_INT <= value <= _EXACT_INT else {"$int": hex(value)}


def _float(value: float) -> JsonTree:
    # The bit pattern: NaN payloads stay, and strict JSON parsers have no word for any of these.
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _str(value: str) -> JsonTree:
    return {"$str": _base64(value.encode("utf-8", "surrogatepass"))} if _lone_surrogates(value) else value


_ENCODE_SCALAR: dict[type, Callable[[Any], JsonTree]] = {
    type(None): _same,
    bool: _same,
    str: _str,
    int: _int,
    float: _float,
    complex: lambda value: {"$complex": [_float(value.real), _float(value.imag)]},
    range: lambda value: {"$range": [_int(value.start), _int(value.stop), _int(value.step)]},
}


class _Encoder:
    def __init__(self, leaf: LeafEncoder, inside: set[int] | None = None) -> None:
        self._leaf = leaf
        self._open = set() if inside is None else inside  # the containers we are inside of

    def value(self, value: Any, path: TypedPath) -> JsonTree:
        kind = type(value)
        if (scalar := _ENCODE_SCALAR.get(kind)) is not None:
            return scalar(value)
        if (container := _ENCODE_CONTAINER.get(kind)) is not None:
            if id(value) in self._open:
                raise UnsupportedState(f"{readable(path)} contains itself (a cycle of {kind.__name__})")
            if len(self._open) >= MAX_DEPTH:
                raise UnsupportedState(f"{readable(path)} is nested more than {MAX_DEPTH} levels deep")
            self._open.add(id(value))
            tree = container(self, value, path)
            self._open.discard(id(value))
            return tree
        if kind is bytes or kind is bytearray:
            return {f"${kind.__name__}": self._inline(value, path)}
        if isinstance(value, np.generic | np.ndarray) and (tree := self._numpy(value, path)) is not None:
            return tree
        if (tree := self._leaf(value, path)) is not None:
            return tree
        raise _unsupported(value, path)

    def items(self, values: Iterable[object], path: TypedPath) -> list[JsonTree]:
        # Scalars without the detour: a sample order of a million numbers is encoded while training waits.
        return [
            scalar(element)
            if (scalar := _ENCODE_SCALAR.get(type(element))) is not None
            else self.value(element, (*path, index))
            for index, element in enumerate(values)
        ]

    def pairs(self, value: Mapping[Any, object], path: TypedPath) -> list[JsonTree]:
        return [[self._key(key, path), self.value(element, (*path, key))] for key, element in value.items()]

    def dict_of(self, value: dict[Any, object], path: TypedPath) -> JsonTree:
        if _is_object(value):
            return {key: self.value(element, (*path, key)) for key, element in value.items()}
        return {"$dict": self.pairs(value, path)}

    def defaultdict_of(self, value: defaultdict[Any, object], path: TypedPath) -> JsonTree:
        factory = value.default_factory
        name = next((name for name, known in _FACTORIES.items() if known is factory), None)
        if name is None and factory is not None:
            raise UnsupportedState(
                f"{readable(path)} is a defaultdict whose factory {_short(factory)} cannot be saved",
                next_step=f"use one of {', '.join(_FACTORIES)} as factory, or convert the value to a dict",
            )
        return {"$defaultdict": {"factory": name, "items": self.pairs(value, path)}}

    def set_of(self, values: Iterable[object], path: TypedPath) -> list[JsonTree]:
        # Sorted by their encoding: hash order differs from process to process, and with it the digests of ranks.
        return sorted((self._key(element, path) for element in values), key=_canonical)

    def _key(self, key: object, path: TypedPath) -> JsonTree:
        # Without the leaf hook: a tensor as key is found by identity, which no copy of it has.
        return _Encoder(_no_leaf, self._open).value(key, (*path, key))

    def _numpy(self, value: Any, path: TypedPath) -> JsonTree | None:
        kind, dtype = type(value), value.dtype
        if kind is np.str_:  # str() would drop NULs at the end
            return {"$numpy.str": _str("".join([value]))}
        if kind is np.bytes_:
            return {"$numpy.bytes": self._inline(bytes(value), path)}
        if kind in _NUMPY_SCALARS:
            return {"$numpy.scalar": {"dtype": dtype.str, "base64": self._inline(value.tobytes(), path)}}
        known = dtype.str[1:] in _NUMPY_PLAIN or (dtype.kind in "SU" and dtype.itemsize > 0)
        if kind is not np.ndarray or not known or dtype.isbuiltin == 2 or value.ndim > _MAX_DIMENSIONS:
            return None
        if value.nbytes >= OFFER_BYTES and (tree := self._leaf(value, path)) is not None:
            return tree
        _fits_inline(value.nbytes, path)  # before the copy that tobytes makes
        data = _base64(value.tobytes(order="C"))
        return {"$numpy.array": {"dtype": dtype.str, "shape": list(value.shape), "base64": data}}

    def _inline(self, raw: bytes | bytearray, path: TypedPath) -> str:
        _fits_inline(len(raw), path)
        return _base64(raw)


_ENCODE_CONTAINER: dict[type, Callable[[_Encoder, Any, TypedPath], JsonTree]] = {
    list: _Encoder.items,
    dict: _Encoder.dict_of,
    defaultdict: _Encoder.defaultdict_of,
    tuple: lambda encoder, value, path: {"$tuple": encoder.items(value, path)},
    set: lambda encoder, value, path: {"$set": encoder.set_of(value, path)},
    frozenset: lambda encoder, value, path: {"$frozenset": encoder.set_of(value, path)},
    OrderedDict: lambda encoder, value, path: {"$ordereddict": encoder.pairs(value, path)},
    Counter: lambda encoder, value, path: {"$counter": encoder.pairs(value, path)},
    deque: lambda encoder, value, path: {"$deque": {"maxlen": value.maxlen, "items": encoder.items(value, path)}},
}


def _fits_inline(nbytes: int, path: TypedPath) -> None:
    if nbytes > INLINE_LIMIT:
        raise UnsupportedState(
            f"{readable(path)} holds {nbytes} bytes; at most {INLINE_LIMIT} (64 MiB) can be saved inside the state",
            next_step="hold large data in tensors of a component of global scope",
        )


def _unsupported(value: object, path: TypedPath) -> UnsupportedState:
    kind = type(value)
    what = f"{kind.__module__}.{kind.__qualname__}"
    base = next((known for known in kind.__mro__ if known in _ENCODE_SCALAR or known in _ENCODE_CONTAINER), None)
    if isinstance(value, np.ndarray):
        what += f" of dtype {value.dtype}"
    elif base is not None:
        what += f", a subclass of {base.__name__} that would come back as something else"
    return UnsupportedState(f"{readable(path)} is a {what}, which cannot be saved exactly")


# --- decoding --------------------------------------------------------------------------------------------------


class _Decoder:
    def __init__(self, leaf: LeafDecoder, depth: int = 0) -> None:
        self._leaf = leaf
        self._depth = depth

    def value(self, tree: JsonTree, path: TypedPath) -> Any:
        kind = type(tree)
        if tree is None or kind is bool:
            return tree
        if kind is int:
            return tree if -_EXACT_INT <= tree <= _EXACT_INT else _bad(path, "an integer beyond 2**53 without its tag")
        if kind is float:
            return tree if math.isfinite(tree) else _bad(path, "a float that is not finite without its tag")
        if kind is str:
            return _bad(path, "a string with lone surrogates without its tag") if _lone_surrogates(tree) else tree
        if kind is not list and kind is not dict:
            _bad(path, f"a {kind.__name__}, which JSON does not have")
        if self._depth > MAX_DEPTH:
            _bad(path, f"nested more than {MAX_DEPTH} levels deep")
        self._depth += 1
        if kind is list:
            value: object = self.items(tree, path)
        elif not all(map(_plain_key, tree)):
            value = self._tagged(tree, path)
        else:
            value = {key: self.value(element, (*path, key)) for key, element in tree.items()}
        self._depth -= 1
        return value

    def key(self, tree: JsonTree, path: TypedPath) -> Any:
        key = _Decoder(_no_tag, self._depth).value(tree, path)
        try:
            hash(key)
        except TypeError as error:
            raise FormatError(f"typed state: {readable(path)} uses a {type(key).__name__} as a key") from error
        return key

    def items(self, tree: JsonTree, path: TypedPath) -> list[Any]:
        if type(tree) is not list:
            _bad(path, "a list was expected")
        return [self.value(element, (*path, index)) for index, element in enumerate(tree)]

    def pairs(self, tree: JsonTree, path: TypedPath) -> dict[Any, Any]:
        if type(tree) is not list or not all(type(pair) is list and len(pair) == 2 for pair in tree):
            _bad(path, "a list of [key, value] pairs was expected")
        keys = [self.key(pair[0], path) for pair in tree]
        value = {key: self.value(pair[1], (*path, key)) for key, pair in zip(keys, tree, strict=True)}
        if len(value) != len(tree):
            _bad(path, "the same key twice")
        return value

    def dict_of(self, tree: JsonTree, path: TypedPath) -> dict[Any, Any]:
        value = self.pairs(tree, path)
        if _is_object(value):
            _bad(path, "$dict for keys that need no tag")
        return value

    def defaultdict_of(self, tree: JsonTree, path: TypedPath) -> defaultdict[Any, Any]:
        name, items = _fields(tree, path, "factory", "items")
        if name is not None and (type(name) is not str or name not in _FACTORIES):
            _bad(path, f"unknown defaultdict factory {_short(name)}")
        return defaultdict(None if name is None else _FACTORIES[name], self.pairs(items, path))

    def counter_of(self, tree: JsonTree, path: TypedPath) -> Counter[Any]:
        value: Counter[Any] = Counter()
        dict.update(value, self.pairs(tree, path))  # Counter's own update would add
        return value

    def deque_of(self, tree: JsonTree, path: TypedPath) -> deque[Any]:
        maxlen, items = _fields(tree, path, "maxlen", "items")
        elements = self.items(items, path)
        if maxlen is not None and (type(maxlen) is not int or not len(elements) <= maxlen <= 2**63 - 1):
            _bad(path, f"a deque of {len(elements)} elements cannot have maxlen {_short(maxlen)}")
        return deque(elements, maxlen)

    def set_of(self, tree: JsonTree, path: TypedPath) -> set[Any]:
        if type(tree) is not list:
            _bad(path, "a list was expected")
        value = {self.key(element, path) for element in tree}
        if len(value) != len(tree):
            _bad(path, "the same element twice in a set")
        return value

    def range_of(self, tree: JsonTree, path: TypedPath) -> range:
        parts = self.items(tree, path)
        if len(parts) != 3 or not all(type(part) is int for part in parts) or parts[2] == 0:
            _bad(path, "a range has three integers, the last not 0")
        return range(*parts)

    def complex_of(self, tree: JsonTree, path: TypedPath) -> complex:
        parts = self.items(tree, path)
        if len(parts) != 2 or not all(type(part) is float for part in parts):
            _bad(path, "a complex number has two floats")
        return complex(*parts)

    def numpy_str(self, tree: JsonTree, path: TypedPath) -> np.str_:
        value = self.value(tree, path)
        return np.str_(value) if type(value) is str else _bad(path, "a string was expected")

    def _tagged(self, tree: dict[Any, JsonTree], path: TypedPath) -> object:
        tag, payload = next(iter(tree.items()))
        if len(tree) != 1 or type(tag) is not str or not tag.startswith("$"):
            _bad(path, "a tag has other keys beside it, or a key is not a plain string")
        if (known := _DECODE.get(tag)) is not None:
            return known(self, payload, path)
        try:
            return self._leaf(tag, payload)
        except FormatError as error:
            raise FormatError(f"typed state: {readable(path)}: {error.message}") from error


def _bad(path: TypedPath, what: str) -> NoReturn:
    raise FormatError(f"typed state: {readable(path)}: {what}")


def _fields(tree: JsonTree, path: TypedPath, *names: str) -> list[JsonTree]:
    if type(tree) is not dict or set(tree) != set(names):
        _bad(path, f"an object with exactly {', '.join(names)} was expected")
    return [tree[name] for name in names]


def _bytes(tree: JsonTree, path: TypedPath) -> bytes:
    if type(tree) is not str:
        _bad(path, "base64 text was expected")
    try:
        return base64.b64decode(tree, validate=True)
    except (ValueError, binascii.Error):
        _bad(path, "bytes that are not base64")


def _tagged_int(tree: JsonTree, path: TypedPath) -> int:
    if type(tree) is not str or not _BIG_INT.fullmatch(tree) or -_EXACT_INT <= (value := int(tree, 16)) <= _EXACT_INT:
        _bad(path, "$int holds an integer beyond 2**53 as hexadecimal text")
    return value


def _tagged_float(tree: JsonTree, path: TypedPath) -> float:
    if type(tree) is not str or not re.fullmatch("[0-9a-f]{16}", tree):
        _bad(path, "$float holds the bits of a double as 16 hexadecimal digits")
    value: float = struct.unpack(">d", bytes.fromhex(tree))[0]
    return _bad(path, "$float for a finite number") if math.isfinite(value) else value


def _tagged_str(tree: JsonTree, path: TypedPath) -> str:
    try:
        value = _bytes(tree, path).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        _bad(path, "$str is not UTF-8")
    return value if _lone_surrogates(value) else _bad(path, "$str for a string that needs no tag")


def _numpy_dtype(name: JsonTree, path: TypedPath) -> np.dtype[Any]:
    if type(name) is not str or not _NUMPY_DTYPE.fullmatch(name):
        _bad(path, f"unknown numpy dtype {_short(name)}")
    if name[1] not in "SU" and name[1:] not in _NUMPY_PLAIN:
        _bad(path, f"unknown numpy dtype {_short(name)}")
    dtype = np.dtype(name)
    return dtype if dtype.str == name else _bad(path, f"numpy dtype {_short(name)} is not in canonical form")


def _numpy_scalar(tree: JsonTree, path: TypedPath) -> np.generic:
    name, text = _fields(tree, path, "dtype", "base64")
    dtype, raw = _numpy_dtype(name, path), _bytes(text, path)
    if dtype.kind in "SU" or not dtype.isnative or len(raw) != dtype.itemsize:
        _bad(path, f"{len(raw)} bytes are no numpy scalar of dtype {dtype}")
    scalar: np.generic = np.frombuffer(raw, dtype)[0]
    return scalar


def _numpy_array(tree: JsonTree, path: TypedPath) -> np.ndarray[Any, Any]:
    name, shape, text = _fields(tree, path, "dtype", "shape", "base64")
    dtype, raw = _numpy_dtype(name, path), _bytes(text, path)
    if type(shape) is not list or len(shape) > _MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        _bad(path, "a shape is a short list of sizes")
    if math.prod(shape) * dtype.itemsize != len(raw):  # before numpy allocates what the shape declares
        _bad(path, f"{len(raw)} bytes are no array of dtype {dtype} and shape {_short(shape)}")
    try:
        return np.frombuffer(raw, dtype).reshape(shape).copy()
    except (ValueError, OverflowError):  # an empty array with sizes that numpy cannot hold
        _bad(path, f"impossible array shape {_short(shape)}")


_DECODE: dict[str, Callable[[_Decoder, JsonTree, TypedPath], object]] = {
    "$tuple": lambda decoder, tree, path: tuple(decoder.items(tree, path)),
    "$set": _Decoder.set_of,
    "$frozenset": lambda decoder, tree, path: frozenset(decoder.set_of(tree, path)),
    "$dict": _Decoder.dict_of,
    "$ordereddict": lambda decoder, tree, path: OrderedDict(decoder.pairs(tree, path)),
    "$defaultdict": _Decoder.defaultdict_of,
    "$counter": _Decoder.counter_of,
    "$deque": _Decoder.deque_of,
    "$range": _Decoder.range_of,
    "$complex": _Decoder.complex_of,
    "$int": lambda decoder, tree, path: _tagged_int(tree, path),
    "$float": lambda decoder, tree, path: _tagged_float(tree, path),
    "$str": lambda decoder, tree, path: _tagged_str(tree, path),
    "$bytes": lambda decoder, tree, path: _bytes(tree, path),
    "$bytearray": lambda decoder, tree, path: bytearray(_bytes(tree, path)),
    "$numpy.str": _Decoder.numpy_str,
    "$numpy.bytes": lambda decoder, tree, path: np.bytes_(_bytes(tree, path)),
    "$numpy.scalar": lambda decoder, tree, path: _numpy_scalar(tree, path),
    "$numpy.array": lambda decoder, tree, path: _numpy_array(tree, path),
}
