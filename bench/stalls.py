"""How long training stands still for a save."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.limits import Memcpy
from bench.ours import Ours
from bench.rivals import RIVALS, remove
from bench.state import Size, build
from bench.training import due, train

_COPIES_PER_STEP = 1.5
_SETTLING = 1.0


def stall(folder: Path, size: Size, *, overlap: bool) -> dict[str, Any]:
    """Runs without saves and with saves, in turn; the process's first save is made before."""
    trainee = build(size)
    copy = Memcpy(trainee.tensors())
    pause = size.step_seconds
    if overlap:  # steps longer than the copy, which is what overlapping needs
        pause = max(pause, _COPIES_PER_STEP * copy.seconds())
    ours = Ours(folder, trainee, overlap=overlap)
    ours.resume()
    ours.step(save=True)
    ours.wait()
    saving = due(size.steps, size.saves)
    calls: list[float] = []

    def after(step: int) -> None:
        taken = ours.step(save=step in saving)
        if step in saving:
            calls.append(taken)

    rounds = []
    for _ in range(size.rounds):
        calls.clear()
        memcpy = copy.seconds()
        without = train(trainee, size.steps, pause)
        late = ours.late
        saved = train(trainee, size.steps, pause, after)
        ours.wait()
        rounds.append(
            {
                "memcpy": memcpy,
                "stall": (saved - without) / len(saving),
                "call": median(calls),
                "late": ours.late - late,
            }
        )
        ours.forget()
    ours.close()
    return {"rounds": rounds, "step_seconds": pause, "nbytes": trainee.nbytes, "saves": len(saving)}


def rival_stall(folder: Path, size: Size, *, name: str) -> dict[str, Any]:
    """The same for another library, in fewer and shorter rounds; and its save from call to end, its load."""
    trainee = build(size)
    copy = Memcpy(trainee.tensors())
    rival = RIVALS[name](trainee)
    pause = max(size.step_seconds, _COPIES_PER_STEP * copy.seconds())  # good for those that overlap
    folder.mkdir()
    steps, saves = max(size.steps // 4, 5), max(size.saves // 2, 1)
    saving = due(steps, saves)
    rounds = []
    for number in range(size.rival_rounds + 1):
        paths = [folder / f"{number}-{step}" for step in range(steps)]

        def after(step: int, paths: list[Path] = paths) -> None:
            if step in saving:
                rival.wait()
                rival.save(paths[step])

        last = folder / f"{number}-whole"
        started = time.perf_counter()
        rival.save(last)
        rival.wait()
        whole = time.perf_counter() - started
        memcpy = copy.seconds()
        without = train(trainee, steps, pause)
        saved = train(trainee, steps, pause, after, rival.update)
        rival.wait()
        rival.load(last)
        started = time.perf_counter()
        rival.load(last)
        loaded = time.perf_counter() - started
        if number:  # the first round fills caches and starts processes
            rounds.append(
                {"memcpy": memcpy, "stall": (saved - without) / len(saving), "whole": whole, "load": loaded}
            )
        for path in [*paths, last]:
            remove(path)
    rival.close()
    return {"rounds": rounds, "syncs": rival.syncs, "hashes": rival.hashes, "setting": rival.setting}


def first_save(folder: Path, size: Size) -> dict[str, Any]:
    """The first save of a fresh process, after a second of training, and three later ones."""
    trainee = build(size)
    ours = Ours(folder, trainee)
    ours.resume()
    train(trainee, round(_SETTLING / size.step_seconds), size.step_seconds, lambda step: ours.step())
    calls = []
    for _ in range(4):
        calls.append(ours.step(save=True))
        ours.wait()
        ours.forget()
    ours.close()
    return {"first": calls[0], "later": median(calls[1:])}
