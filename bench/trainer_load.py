"""What saving takes from a trainer that needs the processor and the memory itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench.library import remove
from bench.ours import Ours
from bench.rivals import DcpThread
from bench.state import Size, build
from bench.training import BusyTrainer, train

_ALONE = 1.0
_LONGEST = 4.0


def busy_ours(folder: Path, size: Size) -> dict[str, Any]:
    """Steps of a pure-Python trainer alone, and while a save of ours is in flight; the capture is left out."""
    trainee = build(size)
    trainer = BusyTrainer()
    ours = Ours(folder, trainee)
    ours.resume()
    ours.step(save=True)
    ours.wait()
    rounds = []
    for _ in range(size.rounds):
        alone, _ = trainer.seconds_per_step(lambda: True, _ALONE)

        def going() -> bool:
            ours.step()
            return ours.in_flight

        ours.step(save=True)
        started = time.perf_counter()
        saving, steps = trainer.seconds_per_step(going, _LONGEST)
        window = time.perf_counter() - started
        ended = not ours.in_flight
        ours.wait()
        rounds.append({"alone": alone, "saving": saving, "steps": steps, "window": window, "ended": ended})
        ours.forget()
    ours.close()
    return {"rounds": rounds}


def busy_dcp(folder: Path, size: Size) -> dict[str, Any]:
    """The same beside ``dcp.async_save`` in a thread; its staging is left out."""
    folder.mkdir()
    trainee = build(size)
    trainer = BusyTrainer()
    rival = DcpThread(trainee)
    rounds = []
    for number in range(size.rounds + 1):
        alone, _ = trainer.seconds_per_step(lambda: True, _ALONE)
        path = folder / f"{number}"
        rival.save(path)
        with rival.update():
            pass
        started = time.perf_counter()
        saving, steps = trainer.seconds_per_step(lambda: rival.busy, _LONGEST)
        window = time.perf_counter() - started
        ended = not rival.busy
        rival.wait()
        if number:
            rounds.append({"alone": alone, "saving": saving, "steps": steps, "window": window, "ended": ended})
        remove(path)
    rival.close()
    return {"rounds": rounds}


def peak(folder: Path, size: Size) -> dict[str, Any]:
    """A run with saves, whose memory somebody else samples; says when it stood at its base and when it saved."""
    trainee = build(size)
    train(trainee, 10, size.step_seconds)
    time.sleep(0.5)
    before = time.monotonic()
    ours = Ours(folder, trainee)
    ours.resume()
    for _ in range(4):
        train(trainee, 5, size.step_seconds, lambda step: ours.step())
        ours.step(save=True)
        ours.wait()
    after = time.monotonic()
    ours.close()
    return {"before": before, "after": after, "nbytes": trainee.nbytes}
