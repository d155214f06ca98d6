"""Training jobs whose every step is known, a copier that is slow on purpose, and a reader of what was saved.

Every value of ``Everywhere`` is the number of the step, so that a mix of two steps is seen at one glance.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from torch import nn

from onward.state.copying import Copy, HostCopier


class Slow(HostCopier):
    """Takes a moment before each tensor, so that training really goes on during the copy."""

    seconds = 0.002

    def start(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            if threading.current_thread().name == "onward-capture":  # not what is copied at the boundary
                time.sleep(self.seconds)
            super().start([copy])


@contextmanager
def slowly(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.002) -> Iterator[None]:
    """Captures made inside copy slowly beside training."""
    with monkeypatch.context() as patch:
        patch.setattr("onward.save.capture.copier", Slow)
        patch.setattr(Slow, "seconds", seconds)
        yield


class Numbered(torch.optim.Optimizer):
    """Sets parameters and moments to the number of the step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"count": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["count"] += 1.0
            for parameter in group["params"]:
                moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                for tensor in (parameter, moment):
                    self.write(tensor, group["count"])

    def write(self, tensor: torch.Tensor, value: float) -> None:
        tensor.fill_(value)


class Unseen(Numbered):
    """Changes them in a way that autograd does not count."""

    def write(self, tensor: torch.Tensor, value: float) -> None:
        tensor.data.fill_(value)


class Everywhere:
    """A job in which every tensor and every number is the step, and all of it is changed in place."""

    def __init__(self, optimizer: type[Numbered] = Numbered, tensors: int = 12, items: int = 30_000) -> None:
        self.model = nn.ParameterList([nn.Parameter(torch.zeros(items)) for _ in range(tensors)])
        self.model.register_buffer("statistics", torch.zeros(items))
        self.optimizer = optimizer(self.model.parameters())
        self.optimizer.step()
        self.box: dict[str, Any] = {}
        self.go_to(0)
        self.optimizer.param_groups[0]["count"] = 0.0

    def go_to(self, step: int) -> None:
        for tensor in (*self.model.parameters(), *(s["moment"] for s in self.optimizer.state.values())):
            tensor.data.fill_(step)
        self.outside(step)

    def outside(self, step: int) -> None:
        """What changes in forward, and the program's own state."""
        self.model.get_buffer("statistics").fill_(step)
        box = self.box
        box.setdefault("list", [])[:] = [step] * 50
        box.setdefault("tensor", torch.zeros(2000)).fill_(step)
        box.setdefault("array", np.zeros(2000)).fill(step)
        box.setdefault("deep", {}).setdefault("deeper", [{}])[0]["n"] = step
        box.setdefault("bytes", bytearray(4))[:] = step.to_bytes(4, "big")

    def step(self, step: int) -> None:
        """Step ``step`` of training: forward and whatever else first, the optimizer at the end."""
        self.outside(step)
        self.optimizer.step()

    def components(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "box": self.box}


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The tensors of a checkpoint, by stock safetensors alone."""
    parts: dict[str, dict[tuple[int, ...], bytes]] = {}
    for file in sorted(folder.glob("rank-*/*.safetensors")):
        for name, entry in safetensors.deserialize(file.read_bytes()):
            key, _, offset = name.rpartition("@") if name.rpartition("@")[0].endswith("]") else (name, "", "")
            place = tuple(map(int, offset.split(","))) if offset else ()
            parts.setdefault(key, {})[place] = bytes(entry["data"])
    return {key: b"".join(boxes[at] for at in sorted(boxes)) for key, boxes in parts.items()}


def numbers_of(folder: Path) -> set[float]:
    """Every number that a checkpoint of ``Everywhere`` holds, in tensors and in plain state."""
    found: set[float] = set()
    for key, data in tensors_of(folder).items():
        dtype = np.float64 if "array" in key else np.float32
        found |= set(np.frombuffer(data, dtype=dtype).tolist())
    state = json.loads((folder / "rank-00000/state.json").read_text())["components"]
    box = dict(state["box"]["$dict"])
    found |= {float(n) for n in box["list"]} | {float(box["deep"]["deeper"][0]["n"])}
    found.add(float(int.from_bytes(base64.b64decode(box["bytes"]["$bytearray"]), "big")))
    groups = dict(state["optimizer"]["$dict"])["groups"]
    return found | {float(group["count"]) for group in groups}
