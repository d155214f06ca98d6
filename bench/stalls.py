"""How long training stands still for a save."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.library import Rival, remove
from bench.limits import Memcpy
from bench.ours import Ours
from bench.rivals import RIVALS
from bench.state import Size, build
from bench.training import due, train

_COPIES_PER_STEP = 1.3
_BETWEEN_SAVES = 1.6
_SHORT_STEP = 0.02
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
    folder.mkdir()
    whole = [_whole(rival, folder / f"whole-{number}") for number in range(size.rival_rounds + 1)]
    # Long enough for those that copy during the step, and for their writing to end before the next save.
    pause = max(_SHORT_STEP, _COPIES_PER_STEP * copy.seconds()) if rival.background else _SHORT_STEP
    every = round(_BETWEEN_SAVES / pause) if rival.background else 3
    saves = min(size.saves, 3)
    saving = due(every * saves, saves)
    rounds = []
    for number in range(size.rival_rounds):

        def after(step: int, number: int = number) -> None:
            if step in saving:
                rival.wait()
                rival.save(folder / f"{number}-{step}")

        memcpy = copy.seconds()
        without = train(trainee, every * saves, pause)
        saved = train(trainee, every * saves, pause, after, rival.update)
        rival.wait()
        for step in saving:
            remove(folder / f"{number}-{step}")
        rounds.append({"memcpy": memcpy, "stall": (saved - without) / len(saving), **whole[number + 1]})
    rival.close()
    return {"rounds": rounds, "syncs": rival.syncs, "hashes": rival.hashes, "setting": rival.setting}


def _whole(rival: Rival, path: Path) -> dict[str, float]:
    """A save from the call to its end, and a load of it, the second one: warm."""
    started = time.perf_counter()
    rival.save(path)
    rival.wait()
    saved = time.perf_counter() - started
    rival.load(path)
    started = time.perf_counter()
    rival.load(path)
    loaded = time.perf_counter() - started
    remove(path)
    return {"whole": saved, "load": loaded}


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
