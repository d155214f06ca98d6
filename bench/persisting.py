"""How long it takes until captured bytes are safe, and what proving it costs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from bench.library import remove, sync
from bench.limits import RawWrite
from bench.ours import Ours
from bench.rivals import Dcp
from bench.state import Size, build, many

_FILES = (4, 8)


def committed(folder: Path, size: Size) -> dict[str, Any]:
    """Ours with and without reading back, the raw write and ``dcp.save``, in turn."""
    folder.mkdir()
    trainee = build(size)
    raw = RawWrite(folder / "raw", trainee.nbytes)
    rival = Dcp(trainee)
    full, sizes = Ours(folder / "full", trainee), Ours(folder / "sizes", trainee, verify="sizes")
    for ours in (full, sizes):
        ours.resume()
    rounds = []
    for number in range(size.rounds + 1):
        sample: dict[str, float] = {}
        for name, ours in (("full", full), ("sizes", sizes)):
            ours.step(save=True)
            phases = ours.wait()
            sample |= {f"{name} {phase}": seconds for phase, seconds in phases.items()}
            ours.forget()
            _settle()
        for files in _FILES:
            sample[f"raw {files}"] = raw.seconds(files)
            _settle()
        path = folder / f"dcp-{number}"
        started = time.perf_counter()
        rival.save(path)
        sample["dcp"] = time.perf_counter() - started
        remove(path)
        _settle()
        if number:  # the first round starts processes and brings memory in
            rounds.append(sample)
    for ours in (full, sizes):
        ours.close()
    return {"rounds": rounds, "nbytes": trainee.nbytes, "direct": raw.direct, "files": list(_FILES)}


def small_tensors(folder: Path, size: Size) -> dict[str, Any]:
    """A state of very many small tensors, against one that goes through ``torch.save`` and ``fsync``."""
    folder.mkdir()
    tensors = many(size.many)
    ours = Ours(folder / "ours", many=tensors)
    ours.resume()
    rounds = []
    for number in range(size.rounds + 1):
        call = ours.step(save=True)
        until = ours.committed()
        phases = ours.ended[-1]
        ours.forget()
        _settle()
        path = folder / f"{number}.pt"
        started = time.perf_counter()
        torch.save(tensors, path)
        sync(path)
        plain = time.perf_counter() - started
        remove(path)
        _settle()
        if number:
            rounds.append({"call": call, "whole": call + until, "torch.save": plain, **phases})
    ours.close()
    return {"rounds": rounds, "count": len(tensors), "nbytes": sum(tensor.nbytes for tensor in tensors.values())}


def _settle() -> None:
    """Lets the disk finish what was deleted, so that one side's leftovers are not the other's burden."""
    os.sync()
    time.sleep(0.1)
