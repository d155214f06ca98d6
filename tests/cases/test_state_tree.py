"""The tree of the state is the same: keys, containers, scalars, odd names."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

import onward

from .shared import Box, files, refused, root, round_trip, running, same

Point = namedtuple("Point", "x y")


def test_keys_keep_their_types_and_their_order(url: str) -> None:
    """T127."""
    value = {5: 1, "5": 2, True: 3, (0, "a"): 4, -1: 5, 2.5: 6, None: 7, b"5": 8, "": 9}
    assert same(round_trip(url, value), value)


def test_milestones_are_not_doubled(url: str) -> None:
    """T127: a scheduler whose state has integer keys, saved and resumed three times."""

    def make() -> dict[str, Any]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4], 0.5)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    for step in range(3):
        parts = make()
        with running(url, **parts) as (ckpt, start):
            assert start.next_step == step
            assert parts["scheduler"].milestones == Counter({2: 2, 4: 1})
            parts["optimizer"].step()
            parts["scheduler"].step()
            ckpt.save(step + 1, wait=True)
    assert parts["optimizer"].param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("target", [[], [{}], None, "a text", {"other": 1}, [{"a": 9, "c": 9}, 1, 2]])
def test_what_was_saved_comes_back_whatever_stands_in_its_place(url: str, target: Any) -> None:
    """T128."""
    saved = [{"a": 1}, {"b": torch.ones(2)}]
    assert same(round_trip(url, saved, into=target), saved)


def test_a_container_of_another_kind_at_the_top_is_refused(url: str) -> None:
    """T128: here the object that is to be filled is the user's own."""
    with running(url, state=[1, 2]) as (ckpt, _):
        ckpt.save(1, wait=True)
    target: Box = {"a": 1}
    refused(onward.errors.IncompatibleState, "state: saved a list, live a dict", url, state=target)
    assert target == {"a": 1}


NAMES = [
    "val/loss",
    "../../etc/x",
    "/abs",
    "con",
    "a" * 300,
    "损失",
    "🔥",
    "new\nline",
    "quo\"te'",
    "nul\0byte",
    "caf\u00e9",
    "cafe\u0301",
    "$tensor",
    "half \ud800 pair",
    "@0,0",
    "__metadata__",
    " ",
    ".",
]


def test_names_are_only_names(url: str) -> None:
    """T130."""
    value = {name: {"tensor": torch.full((2,), float(i)), "number": i} for i, name in enumerate(NAMES)}
    assert same(round_trip(url, value), value)
    outside = [path for path in root(url).parent.rglob("*") if root(url) not in path.parents and path != root(url)]
    assert not outside
    known = {"manifest.json", "manifest.sha256", "layout.json", "intent.json"}
    for name in files(root(url) / "runs/r/checkpoints"):
        assert name.split("/", 1)[1] in known or name.split("/")[1] == "rank-00000"


def test_parameters_with_odd_names_come_back(url: str) -> None:
    """T130: all but a dot is allowed in the name of a parameter."""

    def make() -> torch.nn.Module:
        model = torch.nn.Module()
        for name in NAMES:
            if "." not in name and not any(0xD800 <= ord(c) < 0xE000 for c in name):
                model.register_parameter(name, torch.nn.Parameter(torch.randn(2)))
        return model

    model, fresh = make(), make()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, fresh)]
    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizers[0].step()
    with running(url, model=model, optimizer=optimizers[0]) as (ckpt, _):
        ckpt.save(1, wait=True)
    with running(url, model=fresh, optimizer=optimizers[1]):
        assert same(dict(model.state_dict()), dict(fresh.state_dict()))
        assert same(optimizers[0].state_dict(), optimizers[1].state_dict())


@pytest.mark.parametrize("name", ["a/b", "..", "a b", "", "1x", "é", "rng", "x" * 200])
def test_a_component_cannot_be_called_anything(url: str, name: str) -> None:
    """T130: names of components stand in manifests and messages."""
    with pytest.raises(onward.errors.ConfigurationError), running(url, **{name: {}}):
        pass


def test_plain_values_are_the_saved_ones(url: str) -> None:
    """T131."""
    saved: Box = {"epoch": 20, "lr": 0.01, "s": "x", "n": None, "t": (1, 2), "gone": 1}
    with running(url, state=saved) as (ckpt, _):
        ckpt.save(1, wait=True)
    live: Box = {"epoch": 0, "lr": 1.0, "s": "old", "n": 5, "t": (9,), "extra": 7}
    with running(url, state=live):
        assert same(live, saved)


KEPT: dict[str, Any] = {
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "default": defaultdict(dict, {"a": {"b": 1}}),
    "counter": Counter({5: 2, "a": -1}),
    "deque": deque([1, 2], maxlen=3),
    "set": {1, "1", (1,)},
    "frozen": frozenset({1.5, None}),
    "range": range(1, 10, 3),
    "tuple": ((), (1,), [()]),
    "numpy scalar": np.float32(1.1),
    "numpy int": np.int64(2**62),
    "numpy bool": np.bool_(True),
    "numpy array": np.arange(6, dtype=">i4").reshape(2, 3),
    "large array": np.arange(5000, dtype=np.int16),
    "strings": np.array(["a", "ß"]),
    "size": torch.Size([1, 2]),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "bytes": b"\0\xff",
    "bytearray": bytearray(b"ab"),
    "complex": complex(math.nan, -0.0),
    "nested": {"a": [{"b": ({1: [torch.ones(1)]},)}]},
}


def test_containers_and_scalars_keep_their_kind(url: str) -> None:
    """T133."""
    loaded = round_trip(url, KEPT)
    assert list(loaded) == list(KEPT)
    for name, value in KEPT.items():
        assert same(loaded[name], value), name
        for field in ("maxlen", "default_factory"):
            assert getattr(loaded[name], field, None) == getattr(value, field, None), name


class Config(list):  # type: ignore[type-arg]
    """Stands for the lists of configuration libraries."""


class Colour(enum.IntEnum):
    RED = 1


REFUSED: dict[str, Any] = {
    "namedtuple": Point(1, 2),
    "list subclass": Config([1]),
    "enum": Colour.RED,
    "str subclass": type("Text", (str,), {})("x"),
    "object": object(),
    "function": len,
    "factory": defaultdict(lambda: 1),
    "masked": np.ma.masked_array([1, 2], [True, False]),  # type: ignore[no-untyped-call]
    "objects": np.array([object()]),
    "generator": torch.Generator(),
    "module": torch.nn.Linear(1, 1),
    "tensor as key": {torch.ones(1): 1},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_come_back_exactly_is_refused_with_its_path(url: str, name: str) -> None:
    """T133: when the run begins."""
    refused(onward.errors.UnsupportedState, r"state\['deep'\]\[1\]", url, state={"deep": [0, REFUSED[name]]})


# --- further cases of the kind ---------------------------------------------------------------------------------


def test_numbers_that_json_cannot_hold_come_back(url: str) -> None:
    """NaN with its payload, infinities, negative zero, subnormals, integers of any size, true beside one."""
    payload = np.frombuffer(bytes.fromhex("010000000000f87f"), dtype=np.float64)[0]
    value = [float(payload), math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1 + 0.2]
    value += [2**53 + 1, -(2**64), 10**400, True, 1, 1.0, False, 0, "1", "true", "NaN", "null", ""]
    assert same(round_trip(url, value), value)


def test_order_of_keys_depth_and_cycles(url: str) -> None:
    """A dict keeps its order; ninety levels come back; what contains itself is refused by its path."""
    value: Any = {"z": 1, "a": 2, "m": 3}
    for level in range(90):
        value = [value] if level % 2 else {"k": value}
    assert same(round_trip(url, value), value)
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    for bad, word in ((cycle, "contains itself"), (_nested(200), "nested more than")):
        refused(onward.errors.UnsupportedState, word, url, run="bad", state={"x": bad})


def _nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def test_state_that_becomes_unsaveable_on_the_way_is_told_at_the_next_save(url: str) -> None:
    """Not known when the run began: named, and the checkpoint before stays as it is."""
    state: Box = {"x": 1}
    with running(url, state=state) as (ckpt, _):
        ckpt.save(1, wait=True)
        state["x"] = Point(1, 2)
        with pytest.raises(onward.errors.UnsupportedState, match=r"state\['x'\]"):
            ckpt.save(2, wait=True)
        state["x"] = 3
        ckpt.save(3, wait=True)
        assert [c.step for c in ckpt.checkpoints()] == [3, 1]


def test_one_value_in_two_places_comes_back_in_both(url: str) -> None:
    """A list, a tensor and an array that the state refers to twice."""
    items, tensor, array = [1, 2], torch.ones(2), np.arange(3)
    value = {"a": items, "b": items, "c": tensor, "d": {"e": tensor}, "f": array, "g": array}
    loaded = round_trip(url, value)
    assert same(loaded, value)
    assert loaded["c"].data_ptr() == loaded["d"]["e"].data_ptr(), "a tie of tensors is tied again"
