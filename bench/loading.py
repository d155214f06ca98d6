"""How long a load takes that checks every byte, against one that checks none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from bench.limits import Memcpy, PageCacheRead
from bench.ours import Ours
from bench.rivals import Dcp
from bench.state import Size, Trainee, build

_TINY = Size(
    width=16,
    layers=1,
    vocabulary=64,
    steps=1,
    saves=1,
    step_seconds=0.0,
    rounds=1,
    rival_rounds=1,
    many=1,
)


def prepare(folder: Path, size: Size) -> dict[str, Any]:
    """Writes a checkpoint by each side, and a tiny one, and leaves all of them in the page cache."""
    folder.mkdir()
    for name, of in (("tiny", _TINY), ("state", size)):
        trainee = build(of)
        ours = Ours(folder / f"{name}-ours", trainee)
        ours.resume()
        ours.step(save=True)
        ours.wait()
        files = ours.files()
        ours.close(keep=True)
        Dcp(trainee).save(folder / f"{name}-dcp")
        PageCacheRead([*files, *(folder / f"{name}-dcp").iterdir()])
    return {}


def warm(folder: Path, size: Size) -> dict[str, Any]:
    """Loads in a process that has loaded before, in turn."""
    trainee = build(size)
    ours = Ours(folder / "state-ours", trainee)
    rival = Dcp(trainee)
    read = PageCacheRead(ours.files())
    copy = Memcpy(trainee.tensors())
    rounds = []
    for number in range(size.rounds + 1):
        sample = {**_ours(ours), "dcp": _dcp(rival, folder / "state-dcp"), "read": read.seconds()}
        ours.renew()
        sample["memcpy"] = copy.seconds()
        if number:
            rounds.append(sample)
    ours.close(keep=True)
    return {"rounds": rounds}


def fresh(folder: Path, size: Size, *, side: str) -> dict[str, Any]:
    """One load in a process that has never loaded this state. A tiny load before it takes imports out of the time."""
    _one(folder, "tiny", build(_TINY), side)
    return _one(folder, "state", build(size), side)


def _one(folder: Path, name: str, trainee: Trainee, side: str) -> dict[str, float]:
    if side == "dcp":
        return {"load": _dcp(Dcp(trainee), folder / f"{name}-dcp")}
    ours = Ours(folder / f"{name}-ours", trainee)
    sample = _ours(ours)
    ours.close(keep=True)
    return sample


def _ours(ours: Ours) -> dict[str, float]:
    whole = ours.resume()
    return {"load": sum(ours.start.seconds.values()), "whole": whole, **ours.start.seconds}


def _dcp(rival: Dcp, path: Path) -> float:
    started = time.perf_counter()
    rival.load(path)
    taken = time.perf_counter() - started
    assert torch.is_tensor(next(rival.trainee.tensors()))
    return taken
