"""What the tests of the writer process share: a state of one number, a look at processes, waiting with a deadline."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch

import onward
from onward.catalog.lease import process_start
from onward.catalog.listing import read_catalog
from onward.catalog.reader import Place
from onward.catalog.stores import open_home
from onward.config import LeaseSettings
from onward.format.names import RunPlaces
from onward.storage.base import Store
from onward.upkeep.verify import verify

RUN, PLACES = "r", RunPlaces("r")
QUIET = onward.SaveSettings(verify_after_save="sizes")
SAVING_BY_THREAD = onward.SaveSettings(writer="thread")


@contextmanager
def running(
    store: str | Store,
    *,
    every: int | None = None,
    save: onward.SaveSettings | None = None,
    lease: float = 30.0,
    how: Mapping[str, Any] | None = None,
    **components: Any,
) -> Iterator[tuple[onward.Checkpointer, onward.Start]]:
    """A run that was resumed, and is closed at the end; ``how`` goes to ``Checkpointer.resume``."""
    config = onward.Config(
        store=store if isinstance(store, str) else store.url,
        run=RUN,
        triggers=onward.TriggerSettings(every_steps=every),
        save=save or onward.SaveSettings(),
        lease=LeaseSettings(seconds=lease),
    )
    ckpt = onward.Checkpointer(config, store=None if isinstance(store, str) else store, **components)
    start = ckpt.resume(**(how or {}))
    with ckpt:
        yield ckpt, start


def root(url: str) -> Path:
    """The folder of a store."""
    return Path(url.removeprefix("file://"))


def folder(url: str, step: int) -> Path:
    """The folder of the newest checkpoint of a step."""
    found = (root(url) / "runs" / RUN / "checkpoints").glob(f"step-{step:012d}-*")
    return max((p for p in found if "." not in p.name), key=lambda p: int(p.name.rpartition("-")[2]))


class State:
    """Tensors and plain values that all are the number of the step; or, bit by bit, drawn from it."""

    def __init__(self, mib: float = 1.0, tensors: int = 4) -> None:
        self.items = int(mib * (1 << 18) / tensors)
        self.box: dict[str, Any] = {"tensors": [torch.zeros(self.items) for _ in range(tensors)], "list": [0] * 20}
        self.go_to(0)

    def go_to(self, step: int) -> None:
        """Changes everything in place."""
        generator = torch.Generator().manual_seed(step)
        for tensor in self.box["tensors"]:
            tensor.fill_(step)
            tensor[: self.items // 16].copy_(torch.rand(self.items // 16, generator=generator))
        self.box["list"][:] = [step] * 20
        self.box["n"] = step

    def is_exactly(self, step: int) -> bool:
        """Whether every bit is of a step."""
        other = State(1, 1)
        other.items, other.box["tensors"] = self.items, [torch.zeros_like(each) for each in self.box["tensors"]]
        other.go_to(step)
        same = all(
            bool(torch.equal(a.view(torch.int32), b.view(torch.int32)))
            for a, b in zip(self.box["tensors"], other.box["tensors"], strict=True)
        )
        return same and self.box["list"] == other.box["list"] and self.box["n"] == step


def load(url: str, mib: float = 1.0, tensors: int = 4, **how: Any) -> int:
    """Takes the run over, loads, and checks that all of the state is of one step, bit for bit; that step, or 0."""
    state = State(mib, tensors)
    state.go_to(999_999)
    with running(url, save=SAVING_BY_THREAD, how={"allow_fresh_start": True, **how}, state=state.box) as (_, start):
        if start.checkpoint is None:
            return 0
        assert state.is_exactly(start.next_step), f"step {start.next_step} is not what it was"
        return start.next_step


def offered(url: str) -> list[int]:
    """The steps that can be resumed from, newest first; looks without taking over."""
    store, record = open_home(url)
    return [info.step for info in read_catalog(store, PLACES, record.tier).offered()]


def check_ledger(url: str) -> list[int]:
    """Every live checkpoint verifies fully, and nothing is wrong with ledger or receipts; their steps, newest first."""
    store, record = open_home(url)
    catalog = read_catalog(store, PLACES, record.tier)
    assert not catalog.findings, catalog.findings
    for info in catalog.offered():
        place = Place(store=store, root=PLACES.checkpoint(info.folder), tier=info.tier, name=info.folder)
        report = verify(place, info, run=RUN, threads=1)
        assert report.ok, report.findings
    return [info.step for info in catalog.offered()]


def numbers_in(folder: Path) -> set[float]:
    """The plain numbers and last items of a checkpoint, by stock safetensors and json alone."""
    state = json.loads((folder / "rank-00000/state.json").read_text())["components"]["state"]
    box = dict(state["$dict"]) if "$dict" in state else state
    found = {float(n) for n in box["list"]} | {float(box["n"])}
    for file in folder.glob("rank-*/*.safetensors"):
        for _, entry in safetensors.deserialize(file.read_bytes()):
            found.add(float(np.frombuffer(entry["data"], dtype=np.float32)[-1]))
    return found


def writing(url: str) -> list[str]:
    """The folders of saves in progress, or what is left of them."""
    with suppress(FileNotFoundError):
        return [p.name for p in (root(url) / "runs/r/checkpoints").iterdir() if ".writing-" in p.name]
    return []


# --- processes --------------------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """Returns the first true answer of ``condition``."""
    until = time.monotonic() + seconds
    while True:
        if answer := condition():
            return answer
        assert time.monotonic() < until, f"{what}: not within {seconds} s"
        time.sleep(0.0005)


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    return process_start(pid) is None


def stopped(pid: int) -> bool:
    """Whether a process is stopped by SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stop(pid: int) -> None:
    """Stops a process, and returns when it stands still."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: gone(pid) or stopped(pid), f"process {pid} stops")


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """A process is stopped meanwhile."""
    stop(pid)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident(pid: int) -> int:
    """Bytes of private memory: what is mapped from files, staging memory too, does not count."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not say")
