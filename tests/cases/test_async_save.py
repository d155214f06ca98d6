"""Saving beside training: what is saved is the state of the call, and no failure is lost."""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onward

from .shared import commit, faulty, in_process, load, numbers, root, running, same

WRITERS = ["thread", "process"]


def _slow(url: str, seconds: float = 0.02) -> Any:
    return faulty(url, lambda call, path: time.sleep(seconds) if call == "fsync" else None)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_tensor_filled_right_after_the_call_is_saved_as_it_was(url: str, writer: str) -> None:
    """T40."""
    box = {"x": torch.ones(5_000_000)}
    with running(_slow(url) if writer == "thread" else url, save={"writer": writer}, state=box) as (ckpt, _):
        ckpt.save(1)
        box["x"].fill_(2)
    fresh = {"x": torch.zeros(5_000_000)}
    with running(url, state=fresh):
        assert bool((fresh["x"] == 1).all())


def _lots(step: int) -> dict[str, Any]:
    """Everything in it holds the step, in every kind of container that can be changed in place."""
    return {
        "tensors": {str(i): torch.full((16,), float(step)) for i in range(200)},
        "list": [step] * 50,
        "dict": {"a": {"b": step}, step: "key"},
        "set": {step},
        "deque": deque([step] * 3, maxlen=3),
        "bytes": bytearray([step]),
        "small array": np.full(4, step),
        "large array": np.full(4096, step),
    }


def _count_up(state: dict[str, Any], step: int) -> None:
    for tensor in state["tensors"].values():
        tensor.fill_(step)
    state["list"][:] = [step] * 50
    state["dict"].pop(step - 1)
    state["dict"].update({"a": {"b": step}, step: "key"})
    state["set"].clear()
    state["set"].add(step)
    state["deque"].extend([step] * 3)
    state["bytes"][0] = step
    state["small array"].fill(step)
    state["large array"].fill(step)


@pytest.mark.parametrize("writer", WRITERS)
def test_every_saved_step_is_of_one_moment_everywhere(url: str, writer: str) -> None:
    """T41, with six rounds."""
    state = _lots(0)
    settings = {"verify_after_save": "sizes", "writer": writer}
    with running(_slow(url, 0.005) if writer == "thread" else url, every=1, save=settings, state=state) as (ckpt, _):
        for step in range(6):
            _count_up(state, step + 1)
            ckpt.step(step)
    for step in range(1, 7):
        fresh: dict[str, Any] = {}
        with running(url, how={"checkpoint": str(step)}, state=fresh):
            pass
        assert same(fresh, _lots(step))


def _failing(url: str, broken: dict[str, bool]) -> Any:
    def script(call: str, path: str) -> None:
        if broken["now"] and "/checkpoints/" in path and call == "write":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    return faulty(url, script)


def test_a_failure_in_the_background_is_told_once_with_step_and_cause(url: str) -> None:
    """T46, but for pruning."""
    commit(url, 10)
    broken = {"now": True}
    with running(_failing(url, broken), state=numbers(20)) as (ckpt, _):
        ckpt.save(20)
        with pytest.warns(UserWarning, match="step 20"), pytest.raises(onward.errors.SaveFailed, match="EIO"):
            ckpt.wait()
        ckpt.wait()  # told once
        assert [c.step for c in ckpt.checkpoints()] == [10]
    stories = list((root(url) / "runs/r/attempts").iterdir())
    assert len(stories) == 1
    assert b"EIO" in stories[0].read_bytes()


def test_failures_in_a_row_are_tolerated_counted_and_then_raised(url: str) -> None:
    """T47."""
    broken = {"now": True}
    box = numbers(0)
    settings = {"tolerate_failures": 2}

    def step(number: int) -> None:
        box["x"].fill_(number + 1)
        box["n"] = number + 1
        ckpt.step(number)
        while any(thread.name.startswith("onward-save") for thread in threading.enumerate()):
            time.sleep(0.005)

    with running(_failing(url, broken), every=1, save=settings, state=box) as (ckpt, _):
        step(0)
        with pytest.warns(UserWarning, match="step 1 .*(?s:.)*1 more"):
            step(1)
        with pytest.warns(UserWarning, match="step 2 .*(?s:.)*0 more"):
            step(2)
        with pytest.raises(onward.errors.SaveFailed, match="step 3 "):
            step(3)
        broken["now"] = False
        step(4)
        step(5)  # takes the success of 5: the count begins anew
        broken["now"] = True
        step(6)
        with pytest.warns(UserWarning, match="1 more"):
            step(7)
        broken["now"] = False
        with pytest.warns(UserWarning, match="0 more"):
            step(8)
    assert load(url)[1] == 9


def test_a_failure_of_the_last_save_is_always_raised(url: str) -> None:
    """T47."""
    broken = {"now": False}
    with (
        pytest.warns(UserWarning),
        pytest.raises(onward.errors.SaveFailed, match="step 1 "),
        running(_failing(url, broken), every=1, state=numbers(1)) as (ckpt, _),
    ):
        broken["now"] = True
        ckpt.step(0)


def test_what_was_restored_shares_no_memory_with_anything(url: str) -> None:
    """T50, as far as it concerns restores of one checkpoint."""

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def memory(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> set[int]:
        tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    model, optimizer = make()
    train(model, optimizer)
    with running(url, model=model, optimizer=optimizer) as (ckpt, _):
        ckpt.save(1, wait=True)
    first, second = make(), make()
    with running(url, model=first[0], optimizer=first[1]):
        pass
    before = [tensor.detach().clone() for tensor in first[0].parameters()]
    with running(url, model=second[0], optimizer=second[1]):
        pass
    assert len(memory(*first) | memory(*second)) == len(memory(*first)) + len(memory(*second))
    for _ in range(3):
        train(*second)
    assert all(map(same, before, first[0].parameters()))
    third = make()
    with running(url, model=third[0], optimizer=third[1]):
        assert all(map(same, before, third[0].parameters()))


# --- further cases of the kind ---------------------------------------------------------------------------------


def _leave(url: str, how: str, writer: str) -> None:
    ckpt = onward.Checkpointer(
        onward.Config(store=url, run="r", triggers=onward.TriggerSettings(every_steps=1)),
        store=_slow(url, 0.05) if writer == "thread" else None,
        state=numbers(1),
    )
    ckpt.resume()
    ckpt.step(0)
    if how == "exception":
        raise RuntimeError("training failed")
    if how == "exit":
        raise SystemExit(3)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("how", "code"), [("end", 0), ("exception", 1), ("exit", 3)])
def test_a_save_in_flight_is_finished_when_the_program_ends_without_close(
    url: str, how: str, code: int, writer: str
) -> None:
    """People forget ``close``, and programs end by exceptions."""
    assert in_process(_leave, url, how, writer) == code
    assert load(url)[1] == 1


@pytest.mark.parametrize("writer", WRITERS)
def test_staging_memory_does_not_grow_from_save_to_save(url: str, writer: str) -> None:
    """Forty saves of 20 MB: the buffer is taken once, and nothing is kept of the states that were written."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    box = {"x": torch.ones(5_000_000)}
    settings = {"verify_after_save": "sizes", "writer": writer}
    with running(url, save=settings, state=box) as (ckpt, _):
        for step in range(1, 4):
            ckpt.save(step, wait=True)
        before = resident()
        for step in range(4, 9):
            ckpt.save(step, wait=True)
        assert resident() < before + 15_000_000
    assert not [t for t in threading.enumerate() if t.name.startswith("onward-")]


def test_the_error_of_training_is_the_one_that_is_seen(url: str) -> None:
    """A save that fails too, while the loop's own error is on its way out, must not hide that error."""
    broken = {"now": False}
    with warnings.catch_warnings(), pytest.raises(ZeroDivisionError):
        warnings.simplefilter("ignore")
        with running(_failing(url, broken), every=1, state=numbers(1)) as (ckpt, _):
            broken["now"] = True
            ckpt.step(0)
            raise ZeroDivisionError


def _changes(step: int, box: dict[str, Any]) -> None:
    """One step of a state in which nothing but the keys stays: memory, shape, dtype, ties, strides."""
    box["replaced"] = torch.full((64,), float(step))
    box["grown"] = torch.full((step + 1, 3), float(step))
    box["other dtype"] = torch.full((8,), step, dtype=(torch.int32, torch.float16, torch.int64)[step % 3])
    box["handed over"].data = torch.full((16,), float(step))
    box["turned"] = torch.arange(12.0).mul(step).view(3, 4)
    box["turned"] = box["turned"].t() if step % 2 else box["turned"]
    box["one"] = torch.full((5,), float(step))
    box["tied now and then"] = box["one"] if step % 2 else torch.full((5,), float(step + 100))
    box["resized"].resize_(step + 1).fill_(step)
    box["comes and goes"] = {"x": torch.full((3,), float(step))} if step % 2 else {}
    box["list"] = [torch.full((2,), float(step))] * (step % 3)
    box["array"] = np.full(2000 + step, step)
    if step % 2:
        box["late"] = torch.full((1,), float(step))
    else:
        box.pop("late", None)


@pytest.mark.parametrize(
    "settings", [{}, {"writer": "process"}, {"overlap": True}], ids=["thread", "process", "overlap"]
)
def test_tensors_that_are_replaced_grow_or_vanish_between_saves_are_those_of_the_step(
    url: str, settings: dict[str, Any]
) -> None:
    """Nothing that a save remembers of the one before may stand for what is there now."""
    start = {"handed over": torch.zeros(16), "resized": torch.zeros(1)}
    box: dict[str, Any] = {name: tensor.clone() for name, tensor in start.items()}
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = {}
    save = {"verify_after_save": "sizes", **settings}
    with running(url, every=1, save=save, state=box, model=model, optimizer=optimizer) as (ckpt, _):
        for step in range(8):
            _changes(step, box)
            model.weight.grad = torch.ones(2, 2)
            optimizer.step()
            weights[step] = model.weight.detach().clone()
            ckpt.step(step)
    expected: dict[str, Any] = {name: tensor.clone() for name, tensor in start.items()}
    for step in range(8):
        _changes(step, expected)
        fresh: dict[str, Any] = {}
        how = {"checkpoint": str(step + 1)}
        with running(url, how=how, state=fresh, model=model, optimizer=optimizer):
            assert list(fresh) == list(expected)
            for name, value in expected.items():
                assert same(fresh[name], value), (step, name)
            assert same(model.weight, weights[step])
