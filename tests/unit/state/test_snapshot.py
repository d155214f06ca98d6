"""A snapshot: trees that refer to tensors by key, tensors noted once, everything rebuilt with exact types."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from onward.errors import ConfigurationError, FormatError, UnsupportedState
from onward.format.typedstate import key_of
from onward.records import Key
from onward.state import tensors
from onward.state.component import Scope
from onward.state.snapshot import Snapshot, rebuild, take, tensor_keys


@dataclass
class Part:
    tree: object
    name: str = "part"
    kind: str = "object"
    scope: Scope = "global"
    order: int = 300
    numbers: dict[str, int | float] = field(default_factory=dict)

    def state(self) -> object:
        return self.tree

    def counters(self) -> dict[str, int | float]:
        return self.numbers

    def check(self, saved: object) -> list[str]:
        return []

    def load(self, saved: object) -> None:
        self.tree = saved


def stored(snapshot: Snapshot) -> Callable[[Key], torch.Tensor]:
    """Tensors as a reader makes them: new memory on the CPU, from the bytes of whichever key holds them."""
    layout = {entry.key: entry for entry in snapshot.layout.tensors}

    def tensor_of(key: Key) -> torch.Tensor:
        entry = layout[key]
        tensor = tensors.empty(entry.dtype, entry.shape)
        tensors.copy_into(snapshot.tensors[entry.tie or key], tensors.as_bytes(tensor))
        return tensor

    return tensor_of


def round_trip(tree: object, scope: Scope = "global") -> Any:
    snapshot = take([Part(tree, scope=scope)], 1)
    return rebuild(json.loads(json.dumps(snapshot.state["part"])), stored(snapshot))


def test_tensors_are_noted_under_their_typed_path_without_being_copied() -> None:
    weight = torch.nn.Parameter(torch.randn(2, 3))
    snapshot = take([Part({"w": weight, 5: [torch.tensor(1)]}, name="model", kind="model", numbers={"n": 3})], 7)
    assert list(snapshot.tensors) == ['["model","w"]', '["model",5,0]']
    assert snapshot.tensors['["model","w"]'].data_ptr() == weight.data_ptr()
    assert [(entry.key, entry.dtype, entry.shape) for entry in snapshot.layout.tensors] == [
        ('["model","w"]', "float32", (2, 3)),
        ('["model",5,0]', "int64", ()),
    ]
    assert [(tag.name, tag.kind, tag.scope, tag.step, tag.counters) for tag in snapshot.tags] == [
        ("model", "model", "global", 7, {"n": 3})
    ]


def test_the_layout_is_sorted_and_does_not_depend_on_the_order_of_the_state() -> None:
    one = {"b": torch.zeros(2), "a": torch.ones(3)}
    other = dict(reversed(one.items()))
    assert take([Part(one)], 1).layout == take([Part(other)], 1).layout


def test_tied_tensors_are_noted_once_and_named_in_the_layout() -> None:
    shared = torch.randn(4)
    empty = torch.empty(0)
    snapshot = take([Part({"wte": shared, "head": shared.view(4), "e": empty, "f": empty, "like": shared.clone()})], 1)
    assert list(snapshot.tensors) == [key_of(("part", name)) for name in ("wte", "e", "f", "like")]
    ties = {entry.key: entry.tie for entry in snapshot.layout.tensors if entry.tie}
    assert ties == {'["part","head"]': '["part","wte"]'}
    back = rebuild(snapshot.state["part"], stored(snapshot))
    assert torch.equal(back["head"], shared)


def test_ties_between_components_are_found() -> None:
    shared = torch.randn(4)
    snapshot = take([Part(shared, name="a"), Part(shared, name="b")], 1)
    assert list(snapshot.tensors) == ['["a"]']
    assert snapshot.layout.tensors[1].tie == '["a"]'


def test_a_dtype_that_safetensors_lacks_is_named_with_its_stored_form() -> None:
    """T113."""
    entry = take([Part(torch.zeros(2, 3, dtype=torch.complex64))], 1).layout.tensors[0]
    assert (entry.dtype, entry.shape, entry.stored) == ("complex64", (2, 3), "U8")


def test_views_of_one_memory_keep_their_types() -> None:
    """T115."""
    x = torch.randn(5)
    back = round_trip({"x": x, "y": x.view(torch.int32), "z": x.view(torch.uint8)})
    assert (back["x"].dtype, back["y"].dtype, back["z"].dtype) == (torch.float32, torch.int32, torch.uint8)
    assert tensors.same_bytes(back["x"].view(torch.int32), back["y"])
    assert tensors.same_bytes(back["x"].view(torch.uint8), back["z"])


def test_slices_do_not_bring_their_whole_memory() -> None:
    """T116."""
    big = torch.zeros(1_000_000)
    snapshot = take([Part({"a": big[:10], "chunks": list(torch.zeros(1000).chunk(10))})], 1)
    assert sum(tensors.nbytes(tensor) for tensor in snapshot.tensors.values()) == 40 + 4000


@pytest.mark.parametrize("scope", ["global", "rank"])
def test_types_of_torch_come_back(scope: Scope) -> None:
    """T133, T125: a device is data, never a place to put a tensor."""
    value = [
        torch.Size([2, 3]),
        torch.Size([]),
        torch.float8_e5m2,
        torch.qint8,
        torch.device("cuda:7"),
        torch.device("cpu"),
    ]
    back = round_trip(value, scope)
    assert back == value
    assert [type(each) for each in back] == [type(each) for each in value]


@pytest.mark.parametrize("scope", ["global", "rank"])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.tensor([float("nan"), -0.0]),
        torch.randn(3).expand(2, 3),
        torch.tensor([1, 2, 65535], dtype=torch.uint16),
        torch.randn(2, dtype=torch.complex64).conj(),
    ],
)
def test_tensors_come_back_bit_equal_in_either_scope(tensor: torch.Tensor, scope: Scope) -> None:
    """T121 for the expanded one: it is packed on the way."""
    back = round_trip({"t": tensor}, scope)["t"]
    assert tensors.same_bytes(back, tensor)
    assert back.is_contiguous()
    assert back.device.type == "cpu"


@pytest.mark.parametrize("scope", ["global", "rank"])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(5000.0),
        np.asfortranarray(np.arange(6000, dtype=np.int16).reshape(60, 100)),
        np.arange(5000, dtype=">f4"),
        np.arange(5000, dtype=np.uint64)[::2],
        np.array(["word"] * 2000),
        np.zeros(5000, np.bool_),
        np.arange(5000) * 1j,
        np.frombuffer(bytes(5000), np.uint8),
        np.arange(3, dtype=np.float16),
    ],
    ids=lambda array: array.dtype.str + str(array.flags.writeable),
)
def test_numpy_arrays_come_back_exactly_and_writable(array: np.ndarray[Any, Any], scope: Scope) -> None:
    """T133."""
    back = round_trip([array], scope)[0]
    assert type(back) is np.ndarray
    assert back.dtype.str == array.dtype.str
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    back[...] = back


def test_large_numpy_arrays_go_to_the_shard_files() -> None:
    snapshot = take([Part({"order": np.arange(1000), "small": np.arange(3), "swapped": np.zeros(4096, ">u2")})], 1)
    assert list(snapshot.tensors) == ['["part","order"]']
    assert not take([Part(np.arange(1000), scope="rank")], 1).tensors


def test_a_state_can_be_looked_at_without_its_bytes() -> None:
    snapshot = take([Part({"t": torch.zeros(2, 3), "a": np.zeros((50, 50), np.float32)})], 1)
    seen: Any = rebuild(snapshot.state["part"], lambda key: snapshot.tensors[key].to("meta"))
    assert seen["t"].is_meta
    assert (seen["a"].shape, seen["a"].dtype) == ((50, 50), np.float32)


def test_the_tensors_of_a_tree_are_listed() -> None:
    tree = {"a": torch.zeros(1), "$b": [torch.zeros(2), np.zeros(4096)], "s": torch.Size([1])}
    snapshot = take([Part(tree)], 1)
    assert tensor_keys(snapshot.state["part"]) == list(snapshot.tensors)
    assert tensor_keys(take([Part(tree["a"], scope="rank")], 1).state["part"]) == []
    with pytest.raises(FormatError, match="two places"):
        tensor_keys([{"$tensor": '["a"]'}, {"$tensor": '["a"]'}])


class Mine(torch.Tensor):
    pass


@pytest.mark.parametrize("scope", ["global", "rank"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.Generator(), "torch.Generator"),
        (torch.nn.Linear(1, 1), "a module (Linear)"),
        (torch.zeros(2).as_subclass(Mine), "Mine, a tensor subclass"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.strided, "torch.layout"),
        ({torch.zeros(1): 1}, "Tensor"),
        (OrderedDict(x={torch.zeros(1)}), "Tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_saved_is_refused_with_its_path(value: object, said: str, scope: Scope) -> None:
    """T112, T133."""
    with pytest.raises(UnsupportedState) as caught:
        take([Part({"k": (0, value)}, name="optimizer", scope=scope)], 1)
    assert "optimizer['k'][1]" in caught.value.message
    assert said in caught.value.message
    assert caught.value.next_step


def test_large_tensors_of_rank_scope_are_refused_with_the_limit() -> None:
    with pytest.raises(UnsupportedState, match=r"part\['t'\].*67108865 bytes.*64 MiB"):
        take([Part({"t": torch.empty(64 * 1024 * 1024 + 1, dtype=torch.uint8)}, scope="rank")], 1)


def test_one_name_for_two_things_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the name part"):
        take([Part(1), Part(2)], 1)
    with pytest.raises(UnsupportedState, match="one path"):
        take([Part({float("nan"): torch.zeros(1), float("nan"): torch.zeros(1)})], 1)


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": 3},
        {"$tensor": "not a key"},
        {"$tensor": '["absent"]'},
        {"$ndarray": '["there"]'},
        {"$ndarray": {"tensor": '["there"]', "dtype": "<i4"}},
        {"$ndarray": {"tensor": '["there"]', "dtype": "object"}},
        {"$ndarray": {"tensor": '["there"]', "dtype": ["<f4"]}},
        {"$torch.tensor": {"dtype": "float32", "shape": [2**50], "base64": "AAAAAA=="}},
        {"$torch.tensor": {"dtype": "float32", "shape": [0, 2**62, 2**62], "base64": ""}},
        {"$torch.tensor": {"dtype": "float32", "shape": [-1], "base64": "AAAAAA=="}},
        {"$torch.tensor": {"dtype": "float32", "shape": [True], "base64": "AAAAAA=="}},
        {"$torch.tensor": {"dtype": "load", "shape": [], "base64": "AAAAAA=="}},
        {"$torch.tensor": {"dtype": "qint8", "shape": [1], "base64": "AA=="}},
        {"$torch.tensor": {"dtype": "float32", "shape": [], "base64": "?"}},
        {"$torch.tensor": {"dtype": "float32", "shape": []}},
        {"$torch.size": ["1"]},
        {"$torch.size": [2**70]},
        {"$torch.dtype": "load"},
        {"$torch.device": "cuda:7; import os"},
        {"$torch.device": "teapot"},
        {"$torch.device": None},
        {"$unknown": 1},
    ],
    ids=str,
)
def test_hostile_trees_are_refused_with_their_path(tree: object) -> None:
    there = {'["there"]': torch.zeros(2)}
    with pytest.raises(FormatError) as caught:
        rebuild({"a": [tree]}, there.__getitem__)
    assert "['a'][0]" in caught.value.message or "a[0]" in caught.value.message
    with pytest.raises(FormatError):
        tensor_keys([tree, {"$unknown": 1}])
