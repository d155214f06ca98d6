"""Typed state: what goes in comes back with every type exact; what cannot is refused with its path."""

from __future__ import annotations

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from onward.errors import FormatError, UnsupportedState
from onward.format import typedstate
from onward.format.typedstate import decode, encode, key_of, path_of, readable
from onward.records import JsonTree


def no_leaf(value: object, path: typedstate.TypedPath) -> JsonTree | None:
    return None


def no_tag(tag: str, payload: JsonTree) -> object:
    raise FormatError(f"unknown tag {tag!r}")


def round_trip(value: object) -> Any:
    tree = encode(value, ("state",), no_leaf)
    text = json.dumps(tree, allow_nan=False, sort_keys=True)  # the order of a dict must survive a canonical writer
    parsed = json.loads(text)
    assert msgspec.json.decode(msgspec.json.encode(tree)) == parsed == tree
    return decode(parsed, no_tag)


def bits(value: float) -> bytes:
    return struct.pack(">d", value)


def same(one: Any, other: Any) -> bool:
    """Equal in value, exact type and order, all the way down; NaN payloads and signs of zero count."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and not isinstance(one, np.generic):
        return bits(one) == bits(other)
    if isinstance(one, complex) and not isinstance(one, np.generic):
        return bits(one.real) == bits(other.real) and bits(one.imag) == bits(other.imag)
    if isinstance(one, np.str_ | np.bytes_):
        return len(one) == len(other) and list(one) == list(other)
    if isinstance(one, np.generic | np.ndarray):
        return one.dtype.str == other.dtype.str and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, defaultdict) and one.default_factory is not other.default_factory:
        return False
    if isinstance(one, deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one, other)) and all(map(same, one.values(), other.values()))
    if isinstance(one, set | frozenset):
        return len(one) == len(other) and all(any(same(a, b) for b in other) for a in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# --- properties ------------------------------------------------------------------------------------------------

any_text = st.text(st.characters(codec=None), max_size=12) | st.sampled_from(["$tuple", "$", "", "\ud800", "a\0b"])
any_int = st.integers() | st.sampled_from([2**53, 2**53 + 1, -(2**53) - 1, 2**64, -(2**200)])
nan_bits = st.integers(0, 2**64 - 1).map(lambda n: struct.unpack(">d", n.to_bytes(8, "big"))[0])
scalars = (
    st.none()
    | st.booleans()
    | any_int
    | st.floats()
    | nan_bits
    | any_text
    | st.binary(max_size=12)
    | st.complex_numbers()
    | st.builds(range, st.integers(), st.integers(), st.integers().filter(bool))
)
numpy_dtypes = st.sampled_from("?bBhHiIlLefdFD")
numpy_scalars = st.builds(
    lambda code, raw: np.frombuffer(raw[: np.dtype(code).itemsize], np.dtype(np.dtype(code).str))[0],
    numpy_dtypes.filter(lambda code: code != "?"),
    st.binary(min_size=16, max_size=16),
)
numpy_arrays = st.builds(
    lambda code, swap, shape, seed: (
        np.random.default_rng(seed)
        .integers(0, 256, math.prod(shape) * np.dtype(code).itemsize, np.uint8)
        .view(np.dtype(code).newbyteorder() if swap else np.dtype(code))
        .reshape(shape)
    ),
    numpy_dtypes.filter(lambda code: code != "?"),
    st.booleans(),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 2**32),
)
keys = st.recursive(
    scalars | numpy_scalars, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3)
)
factories = st.sampled_from([None, list, dict, int, float, set, str, tuple])


def bounded_deque(items: list[Any], room: int | None) -> deque[Any]:
    return deque(items, None if room is None else len(items) + room)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(any_text | keys, inner, max_size=4)
    lists = st.lists(inner, max_size=4)
    return (
        lists
        | lists.map(tuple)
        | st.dictionaries(any_text, inner, max_size=4)
        | dicts
        | dicts.map(OrderedDict)
        | dicts.map(lambda value: Counter(value))
        | st.builds(defaultdict, factories, dicts)
        | st.builds(bounded_deque, lists, st.none() | st.integers(0, 9))
    )


leaves = scalars | numpy_scalars | numpy_arrays | st.sets(keys, max_size=4) | st.binary(max_size=9).map(bytearray)
values = st.recursive(leaves, containers, max_leaves=20)
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(values)
def test_every_value_comes_back_with_exact_types_and_order(value: object) -> None:
    assert same(round_trip(value), value)


@relaxed
@given(values)
def test_encoding_is_a_function_of_the_value(value: object) -> None:
    tree = encode(value, ("state",), no_leaf)
    assert encode(decode(tree, no_tag), ("state",), no_leaf) == tree


@relaxed
@given(st.lists(keys, max_size=5).map(tuple))
@example(("model", "wte.weight"))
def test_a_key_is_the_exact_inverse_of_its_path(path: tuple[Any, ...]) -> None:
    key = key_of(path)
    assert same(path_of(key), path)
    assert key_of(path_of(key)) == key
    key.encode()


json_keys = any_text | st.sampled_from(["dtype", "shape", "base64", "factory", "items"])
json_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text | st.just("AAAA"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(json_keys, inner, max_size=3)
        | st.builds(lambda tag, payload: {tag: payload}, st.sampled_from(sorted(typedstate._DECODE)), inner)
    ),
    max_leaves=15,
)


@settings(relaxed, max_examples=300)
@given(json_trees)
def test_any_json_is_decoded_or_refused_by_name(tree: JsonTree) -> None:
    try:
        value = decode(tree, no_tag)
    except FormatError as error:
        assert "typed state" in error.message
    else:
        assert same(round_trip(value), value)


@settings(relaxed, max_examples=300)
@given(st.text() | json_trees.map(json.dumps))
def test_any_text_is_a_key_or_refused_by_name(text: str) -> None:
    try:
        path = path_of(text)
    except FormatError as error:
        assert "key" in error.message
    else:
        assert key_of(path) == text


# --- the cases -------------------------------------------------------------------------------------------------


def test_keys_of_every_type_stay_beside_their_text_twins() -> None:
    """T127: an integer key came back as text beside the old one."""
    value = {5: 1, "5": 2, True: 3, (0, "a"): 4, -1: 5, None: 6, 2.5: 7, b"5": 8}
    assert same(round_trip(value), value)
    paths = {key_of(("s", key)) for key in value}
    assert len(paths) == len(value)
    assert key_of(("s", 1)) != key_of(("s", True)) != key_of(("s", 1.0))
    assert key_of(("s", 0.0)) != key_of(("s", -0.0))


def test_scheduler_milestones_stay_a_counter() -> None:
    """T127: MultiStepLR keeps its milestones in a Counter keyed by integers; some were doubled."""
    milestones = Counter({30: 1, 80: 2, 5: 0, 7: -1})
    assert same(round_trip({"milestones": milestones}), {"milestones": milestones})


def test_a_list_is_returned_whole() -> None:
    """T128."""
    value = {"k": [{"a": 1}, {"b": 2}], "empty": [], "none": None}
    assert same(round_trip(value), value)


ODD_NAMES = [
    "val/loss",
    "../../etc/x",
    "/abs",
    "con",
    "x" * 300,
    "梯度",
    "\U0001f525",
    "a\nb",
    'a"b',
    "a\0b",
    "caf\u00e9",
    "cafe\u0301",
    "",
    "$tensor",
    "\ud800",
    "a.b",
    "\u2028",
]


def test_odd_names_are_kept_and_stay_apart() -> None:
    """T130: slashes made sub-folders; NFC and NFD twins fell together."""
    value = {name: index for index, name in enumerate(ODD_NAMES)}
    assert same(round_trip(value), value)
    keys = [key_of(("model", name)) for name in ODD_NAMES]
    assert len(set(keys)) == len(ODD_NAMES)
    assert [path_of(key)[1] for key in keys] == ODD_NAMES


def test_joined_names_do_not_collide() -> None:
    """T130: names joined by a separator would be one and the same."""
    assert key_of(("a", "b.c")) != key_of(("a.b", "c")) != key_of(("a", "b", "c"))


def test_plain_values_keep_value_and_type() -> None:
    """T131."""
    value = {"epoch": 20, "lr": 0.01, "s": "x", "n": None, "t": (1, 2), "flag": True, "one": 1.0, "zero": -0.0}
    assert same(round_trip(value), value)
    assert encode({"epoch": 20, "lr": 0.01}, (), no_leaf) == {"epoch": 20, "lr": 0.01}


Point = namedtuple("Point", "x y")


class MyList(list[int]):
    pass


class MyStr(str):
    pass


class Colour(enum.IntEnum):
    RED = 1


class MyFloat(np.float64):
    pass


class MyArray(np.ndarray):
    pass


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def nested_frozenset(depth: int) -> object:
    value: Any = 1
    for _ in range(depth):
        value = frozenset([value])
    return value


CYCLE: list[object] = [1]
CYCLE.append({"again": CYCLE})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Point(1, 2), "Point, a subclass of tuple"),
        (MyList([1]), "MyList, a subclass of list"),
        (MyStr("x"), "MyStr, a subclass of str"),
        (Colour.RED, "Colour, a subclass of int"),
        (MyFloat(1.0), "MyFloat, a subclass of float"),
        (object(), "builtins.object"),
        (open, "builtin_function_or_method"),
        (int, "builtins.type"),
        (np.array([object()]), "ndarray of dtype object"),
        (np.zeros(2, [("a", "f4")]), "ndarray of dtype"),
        (np.zeros(2, "M8[s]"), "ndarray of dtype datetime64"),
        (np.zeros(2, np.longdouble), "ndarray of dtype"),
        (np.zeros(2).view(MyArray), "MyArray of dtype float64"),
        (defaultdict(lambda: 3), "factory"),
        (CYCLE, "contains itself"),
        (nested(101), "nested more than 100"),
        (nested_frozenset(101), "nested more than 100"),
        ({frozenset([Point(1, 2)]): 1}, "Point"),
        (bytes(64 * 1024 * 1024 + 1), "64 MiB"),
        (np.zeros(64 * 1024 * 1024 + 1, "S1"), "64 MiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_not_come_back_is_refused_with_its_path(value: object, said: str) -> None:
    """T133: containers of configuration libraries sneaked in, or came back as another type."""
    with pytest.raises(UnsupportedState) as caught:
        encode({"extra": [0, value]}, ("loader",), no_leaf)
    assert "loader['extra'][1]" in caught.value.message
    assert said in caught.value.message
    assert caught.value.next_step


def test_containers_keep_their_type() -> None:
    """T133."""
    value = [
        OrderedDict([("b", 1), ("a", 2)]),
        defaultdict(dict, {"x": {}}),
        Counter("abca"),
        deque([1, 2], maxlen=5),
        deque([1, 2]),
        {1, "1", (1,)},
        frozenset([b"x"]),
        range(3, 9, 2),
        np.float32(1.5),
        np.int64(3),
        np.bool_(True),
        np.str_("a\0"),
        np.bytes_(b"a\0"),
        np.array(["ab", "c"]),
        np.array([[True, False]]),
        np.array(3.0),
        np.zeros((0, 3), "i2"),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        bytearray(b"x"),
    ]
    back = round_trip(value)
    assert same(back, value)
    back[1]["new"]["y"] = 1
    back[13][0] = "cd"


def test_the_order_of_a_set_does_not_show() -> None:
    assert encode({"b", "a", "c"}, (), no_leaf) == encode({"c", "b", "a"}, (), no_leaf)


def test_one_object_in_two_places_is_no_cycle() -> None:
    shared = [1]
    assert round_trip({"a": shared, "b": [shared, shared]}) == {"a": [1], "b": [[1], [1]]}


def test_deepest_allowed_nesting_comes_back() -> None:
    assert round_trip(nested(100)) == nested(100)
    value: object = 1j
    for _ in range(99):
        value = {1: value}
    assert round_trip([value]) == [value]


def test_the_leaf_sees_unknown_objects_with_their_path_and_large_arrays_first() -> None:
    seen: list[typedstate.TypedPath] = []

    def leaf(value: object, path: typedstate.TypedPath) -> JsonTree | None:
        seen.append(path)
        return {"$mine": "payload"} if not isinstance(value, np.ndarray) else None

    tree = encode({"a": [object()], 3: np.zeros(4096, "u1"), "c": np.zeros(4095, "u1")}, ("x",), leaf)
    assert seen == [("x", "a", 0), ("x", 3)]
    assert decode(tree, lambda tag, payload: (tag, payload))["a"] == [("$mine", "payload")]


@pytest.mark.parametrize(
    "tree",
    [
        {"$unknown": 1},
        {"$tuple": [1], "x": 1},
        {"x": 1, "$tuple": [1]},
        {"$tuple": 3},
        {"$set": [1, 1]},
        {"$set": [[1]]},
        {"$dict": [["a", 1]]},
        {"$dict": [[1, 1], [1, 2]]},
        {"$dict": [[1, 1, 1]]},
        {"$dict": [[{"$bytearray": "AA=="}, 1]]},
        {"$defaultdict": {"factory": "eval", "items": []}},
        {"$defaultdict": {"factory": ["list"], "items": []}},
        {"$deque": {"maxlen": 1, "items": [1, 2]}},
        {"$deque": {"maxlen": 2**53, "items": [1], "more": 1}},
        {"$deque": {"maxlen": True, "items": [1]}},
        {"$range": [1, 2, 0]},
        {"$range": [1, 2]},
        {"$range": [1, 2, True]},
        {"$bytes": "not base64!"},
        {"$bytes": "AA"},
        {"$bytes": "\u00e9"},
        {"$complex": [1, 2]},
        {"$float": "3ff0000000000000"},
        {"$float": "inf"},
        {"$int": "0x1"},
        {"$int": "9" * 5000},
        {"$str": "YQ=="},
        {"$str": "/w=="},
        {"$numpy.array": {"dtype": "<f4", "shape": [2**40], "base64": "AAAA"}},
        {"$numpy.array": {"dtype": "<f4", "shape": [0, 2**62, 2**62], "base64": ""}},
        {"$numpy.array": {"dtype": "<f4", "shape": [-1], "base64": "AAAAAA=="}},
        {"$numpy.array": {"dtype": "|O", "shape": [1], "base64": "AAAAAAAAAAA="}},
        {"$numpy.array": {"dtype": "|f4", "shape": [1], "base64": "AAAAAA=="}},
        {"$numpy.array": {"dtype": "f4,f4", "shape": [1], "base64": "AAAAAAAAAAA="}},
        {"$numpy.array": {"dtype": "<f4", "shape": [1] * 40, "base64": "AAAAAA=="}},
        {"$numpy.scalar": {"dtype": "<U1", "base64": "AAAAAA=="}},
        {"$numpy.scalar": {"dtype": "<f4", "base64": "AAAA"}},
        {"$numpy.str": 3},
        2**53 + 1,
        math.nan,
        math.inf,
        "\ud800",
        {"\ud800": 1},
        {1: 2},
        (1, 2),
        b"x",
        nested(200),
    ],
    ids=lambda tree: str(tree)[:40],
)
def test_hostile_trees_are_refused_with_their_path(tree: Any) -> None:
    with pytest.raises(FormatError) as caught:
        decode({"a": [tree]}, no_tag, ("model",))
    assert "model['a'][0]" in caught.value.message


def test_deep_keys_are_refused_before_the_stack_ends() -> None:
    tree: Any = 1
    for _ in range(5000):
        tree = {"$frozenset": [tree]}
    with pytest.raises(FormatError, match="nested"):
        decode(tree, no_tag)
    with pytest.raises(FormatError):
        path_of("[" * 100_000 + "]" * 100_000)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "{}",
        '"a"',
        '["a", "b"]',
        '["\\u0061"]',
        "[1e0]",
        "[01]",
        "[NaN]",
        "[1e999]",
        "[[1]]",
        '[{"a":1}]',
        '[{"$tuple":[1],"$tuple":[1]}]',
        '[{"$tensor":"x"}]',
        '[{"$frozenset":[2,1]}]',
        '["\\ud800"]',
        f"[{'9' * 5000}]",
    ],
)
def test_keys_that_are_not_canonical_are_refused(key: str) -> None:
    with pytest.raises(FormatError):
        path_of(key)


def test_paths_read_like_python() -> None:
    assert readable(("optimizer", "state", 5, ("a", 1))) == "optimizer['state'][5][('a', 1)]"
    assert readable(()) == "the state"
    assert len(readable(("m", "x" * 1000))) < 100
    assert "\n" not in readable(("a\nb", "c\nd"))
    readable((10**5000,))
