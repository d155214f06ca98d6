"""How loops really call: counts of other types, modes in force, objects with names of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch

import onward

from .shared import numbers, round_trip, running, same


@pytest.mark.parametrize("kind", [np.int64, np.int32, torch.tensor])
def test_a_step_may_be_any_integer(url: str, kind: Any) -> None:
    """As a loop has it that counts in numpy, or in a tensor."""
    with running(url, every=2, state=numbers(0)) as (ckpt, _):
        for step in range(4):
            ckpt.step(kind(step))
        ckpt.save(kind(7), wait=True)
        assert [c.step for c in ckpt.checkpoints()] == [7, 4, 2]


@pytest.mark.parametrize("step", [1.0, "1", None])
def test_a_step_that_is_no_integer_is_refused(url: str, step: Any) -> None:
    """At once, and not by a save that fails later."""
    with running(url, every=2, state=numbers(0)) as (ckpt, _), pytest.raises(onward.errors.UsageError):
        ckpt.step(step)


MODES: dict[str, AbstractContextManager[Any]] = {
    "no_grad": torch.no_grad(),
    "another default device": torch.device("meta"),
    "inference": torch.inference_mode(),
}


@pytest.mark.parametrize("mode", ["no_grad", "another default device", "inference"])
def test_whatever_mode_torch_is_in(url: str, mode: str) -> None:
    """Saved and resumed inside of it, trained on outside."""

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(2, 2)
        return model, torch.optim.Adam(model.parameters())

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    train(model, optimizer)
    with MODES[mode], running(url, model=model, optimizer=optimizer) as (ckpt, _):
        ckpt.save(1, wait=True)
    fresh, other = make()
    with MODES[mode], running(url, model=fresh, optimizer=other):
        pass
    train(model, optimizer)
    train(fresh, other)
    assert same(dict(model.state_dict()), dict(fresh.state_dict()))


def test_another_default_dtype_changes_nothing(url: str) -> None:
    value = {"x": torch.ones(2), "y": torch.tensor(1.5), "c": torch.complex(torch.ones(1), torch.ones(1))}
    torch.set_default_dtype(torch.float64)
    try:
        assert same(round_trip(url, value), value)
    finally:
        torch.set_default_dtype(torch.float32)


class Own:
    """A loader of somebody's own."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.count = answer, 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.count += 1
            yield self.count - 1

    def position(self, *needed: Any) -> Any:
        if self.answer is TypeError:
            raise TypeError("position() misses an argument")
        return self.answer

    def problems(self, state: Any) -> Any:
        return None

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("answer", [TypeError, 5, {"epoch": np.int64(1)}])
def test_a_loader_may_have_a_position_of_its_own(url: str, answer: Any) -> None:
    """What other classes mean by a name is their affair."""
    loader = Own(answer)
    with running(url, data=loader) as (ckpt, _):
        assert [x for x, _ in zip(loader, range(3), strict=False)]
        ckpt.step(0)
        ckpt.save(wait=True)
    fresh = Own(answer)
    with running(url, data=fresh):
        assert fresh.count == loader.count


def test_open_files_and_threads_do_not_pile_up(url: str) -> None:
    """Forty saves leave nothing behind."""
    with running(url, save={"verify_after_save": "sizes"}, state=numbers(0)) as (ckpt, _):
        for step in range(1, 41):
            ckpt.save(step, wait=True)
            if step == 5:
                before = len(os.listdir("/proc/self/fd")), threading.active_count()
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_what_was_restored_can_be_resized(url: str) -> None:
    """As buffers that grow, and states that are moved elsewhere to save memory."""
    value = round_trip(url, {"buffer": torch.ones(4)})["buffer"]
    value.resize_(9)
    assert value.shape == (9,)
