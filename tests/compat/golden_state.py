"""The training state that the golden stores hold: a pure function, so that a reader knows every value by itself."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from math import prod
from typing import Any

import numpy as np
import torch

import onward
from onward.format.dtypes import DTYPES, itemsize
from onward.state import tensors as exact

STEPS = (10, 20, 30)
ASSETS = {"vocab.txt": b"the\nof\n\xff\x00", "config/model.json": b'{"n_heads":2}\n'}
SHAPES: tuple[tuple[int, ...], ...] = ((2, 3), (), (0, 4), (5,))


class Held:
    """An object of the user's own, with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def raw(name: str, step: int) -> bytes:
    """The bytes of one tensor: noise, NaN payloads and all."""
    dtype, shape = tensors()[name]
    return random.Random(f"{name}/{step}").randbytes(prod(shape) * itemsize(dtype))


def tensors() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name → dtype and shape: every dtype of the format that this torch has, in several shapes."""
    known = [name for name in DTYPES if hasattr(torch, name)]
    # Values of types that are no whole number of bytes wide, or that take two of a byte only, are noise as well.
    return {name: (name, SHAPES[number % len(SHAPES)]) for number, name in enumerate(known)}


def tensor(name: str, step: int) -> torch.Tensor:
    """One tensor, made from its bytes."""
    dtype, shape = tensors()[name]
    made = exact.empty(dtype, shape)
    exact.as_bytes(made)[:] = raw(name, step)
    return made


def values(step: int) -> dict[str, Any]:
    """Every kind of plain value that a state may hold."""
    counter: Counter[str] = Counter({"b": 2, "a": 1})
    default: defaultdict[str, list[int]] = defaultdict(list)
    default["x"].append(step)
    return {
        "none": None,
        "flags": [True, False],
        "integers": [0, -1, 2**53, 2**80, -(2**64)],
        "floats": [0.5, -0.0, float("inf"), float("-inf"), 1e-320],
        "text": ["", "\u00e9\u4e2d\U0001f680", "\n\t\x00", "$tag"],
        "bytes": [b"", b"\x00\xff", bytearray(b"ab")],
        "tuple": (1, (2, ()), [3]),
        "keys": {5: "int", "5": "str", True: "bool", (0, "a"): "tuple", None: "none", -1.5: "float"},
        "order": {"z": 1, "a": 2},
        "ordered": OrderedDict([("z", 1), ("a", 2)]),
        "sets": [{1, 2}, frozenset({"x"}), set()],
        "deque": deque([1, 2], maxlen=5),
        "counter": counter,
        "default": default,
        "complex": 1 - 2j,
        "range": range(1, 9, 3),
        "slice": None,
        "numpy": [np.float32(0.1), np.int64(-7), np.bool_(True)],
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "step": step,
        "size": torch.Size([2, 0]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:7"),
    }


def state(step: int) -> dict[str, Any]:
    """All of it: tensors, a tie, and plain values."""
    made: dict[str, Any] = {name: tensor(name, step) for name in tensors()}
    return {"tensors": made, "tied": made["float32"], "values": values(step)}


def training(url: str) -> tuple[onward.Checkpointer, torch.nn.Module, torch.optim.Optimizer, Any]:
    """A small real run: model, AdamW, schedule, random state."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    config = onward.Config(
        store=url,
        run="trained",
        triggers=onward.TriggerSettings(every_steps=None),
        save=onward.SaveSettings(writer="thread"),
    )
    saver = onward.Checkpointer(config, model=model, optimizer=optimizer, scheduler=scheduler)
    return saver, model, optimizer, scheduler


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[str]:
    """Some steps on random data; the losses as exact hexadecimal numbers."""
    losses: list[str] = []
    for _ in range(steps):
        loss = model(torch.randn(6, 5)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses
