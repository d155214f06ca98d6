"""What the cases share: runs and boxes of state, an exact comparison of its own, processes, scriptable faults."""

from __future__ import annotations

import multiprocessing
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

import onward
from onward.storage.base import Store
from onward.storage.posix import PosixStore
from onward.storage.syscalls import Syscalls

Box = dict[Any, Any]


@contextmanager
def running(
    store: str | Store,
    *,
    run: str = "r",
    every: int | None = None,
    save: Mapping[str, Any] | None = None,
    resume: onward.ResumeSettings | None = None,
    how: Mapping[str, Any] | None = None,
    **components: Any,
) -> Iterator[tuple[onward.Checkpointer, onward.Start]]:
    """A run that was resumed, and is closed at the end; ``how`` goes to ``Checkpointer.resume``.

    A thread writes unless ``save`` says otherwise: a process of its own for each of hundreds of runs takes minutes.
    """
    config = onward.Config(
        store=store if isinstance(store, str) else store.url,
        run=run,
        triggers=onward.TriggerSettings(every_steps=every),
        save=onward.SaveSettings(**{"writer": "thread", **(save or {})}),
        resume=resume or onward.ResumeSettings(),
    )
    ckpt = onward.Checkpointer(config, store=None if isinstance(store, str) else store, **components)
    start = ckpt.resume(**(how or {}))
    with ckpt:
        yield ckpt, start


def commit(store: str | Store, *steps: int, run: str = "r", how: Mapping[str, Any] | None = None) -> None:
    """Commits steps one after another; every value in the state of a step is the step itself."""
    box = numbers(0)
    with running(store, run=run, how=how, state=box) as (ckpt, _):
        for step in steps:
            box["x"].fill_(step)
            box["n"] = step
            ckpt.save(step, wait=True)


def numbers(value: int) -> Box:
    """The state that ``commit`` saves, at one value."""
    return {"x": torch.full((8, 8), float(value)), "n": value}


def load(store: str | Store, *, run: str = "r", **how: Any) -> tuple[onward.Start, int]:
    """Resumes in fresh objects; the one value that the whole state has, which must not be a mix."""
    box = numbers(-1)
    with running(store, run=run, how=how, state=box) as (_, start):
        values = {*box["x"].flatten().tolist(), float(box["n"])}
    assert len(values) == 1, f"a mix of several states was loaded: {sorted(values)}"
    return start, int(values.pop())


E = TypeVar("E", bound=onward.OnwardError)


def refused(kind: type[E], match: str, store: str | Store, **options: Any) -> E:
    """Resumes, in vain: the error, of this kind and with these words."""
    with pytest.raises(kind, match=match or None) as caught, running(store, **options):
        pass
    return caught.value


def round_trip(url: str, value: Any, *, run: str = "r", into: Any = None) -> Any:
    """``value`` after it was saved and loaded into a fresh box that held ``into`` before."""
    with running(url, run=run, state={"value": value}) as (ckpt, _):
        ckpt.save(1, wait=True)
    box: Box = {"value": into}
    with running(url, run=run, state=box):
        return box["value"]


# --- looking at the store without onward ----------------------------------------------------------------------


def root(url: str) -> Path:
    """The store's folder."""
    return Path(url.removeprefix("file://"))


def folder(url: str, step: int, run: str = "r") -> Path:
    """The folder of the newest checkpoint of a step."""
    found = [p for p in (root(url) / "runs" / run / "checkpoints").iterdir() if p.name.startswith(f"step-{step:012d}-")]
    return max((p for p in found if "." not in p.name), key=lambda p: int(p.name.rpartition("-")[2]))


def files(place: Path) -> dict[str, bytes]:
    """Every file below a folder, with its content."""
    return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


def flip(path: Path, at: int = -1) -> None:
    """Flips one bit of a file; in the last byte, unless told where."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(bytes(data))


# --- comparing ------------------------------------------------------------------------------------------------


def raw(tensor: torch.Tensor) -> bytes:
    """The items of a tensor as bytes: ``torch.equal`` is false for NaN, and true for 0.0 and -0.0."""
    # A copy, for memory that numpy has seen can never be resized again.
    flat = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(one: Any, other: Any) -> bool:
    """Whether two trees agree in every type, key, order, dtype, shape and bit."""
    if isinstance(one, torch.nn.Parameter):
        one = one.detach()
    if isinstance(other, torch.nn.Parameter):
        other = other.detach()
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and raw(one) == raw(other)
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    if isinstance(one, float | complex):
        return struct.pack("2d", one.real, one.imag) == struct.pack("2d", other.real, other.imag)
    if isinstance(one, Mapping):
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, set | frozenset):
        return {(type(e), e) for e in one} == {(type(e), e) for e in other}
    if isinstance(one, list | tuple) or hasattr(one, "maxlen"):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# --- processes and faults --------------------------------------------------------------------------------------


def start_process(target: Callable[..., None], *arguments: Any) -> Any:
    """Starts ``target`` in a process of its own: a fork of one that has done nothing but imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["onward.checkpointer", "torch._dynamo", "torchdata.stateful_dataloader", "pytest"])
    process = context.Process(target=_alone, args=(target, *arguments), daemon=False)
    process.start()
    return process


def in_process(target: Callable[..., None], *arguments: Any, seconds: float = 60) -> int:
    """Runs ``target`` in a process of its own, and returns its exit code."""
    process = start_process(target, *arguments)
    process.join(seconds)
    assert process.exitcode is not None, f"{target.__name__} did not end within {seconds} s"
    return int(process.exitcode)


def _alone(target: Callable[..., None], *arguments: Any) -> None:
    multiprocessing.set_start_method("fork", force=True)  # else a loader's workers would be served, and import torch
    torch.set_num_threads(1)
    target(*arguments)


class Script(Syscalls):
    """Asks a function before every call that changes the disk; it may raise OSError, wait, or end the process."""

    def __init__(self, script: Callable[[str, str], None]) -> None:
        self.script = script

    def before(self, call: str, path: str) -> None:
        self.script(call, path)


def faulty(url: str, script: Callable[[str, str], None]) -> PosixStore:
    """The store at ``url``, whose calls go through a script."""
    return PosixStore(root(url), calls=Script(script))
