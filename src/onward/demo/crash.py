"""The kill: a save is watched through the store's directory alone, and the trainer dies at a random instant in it."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from onward.demo.process import DemoFailed, Trainer
from onward.format.names import INTENT, parse_checkpoint_folder, parse_writing_folder

POLL_SECONDS = 0.001


@dataclass(frozen=True)
class OpenSave:
    """A save that has begun and is not committed: its intent is on disk, its ledger entry is not.

    ``renamed`` tells its last instants, when all files are complete under the final name, from those before.
    """

    folder: Path
    step: int
    sequence: int
    renamed: bool


@dataclass(frozen=True)
class Kill:
    """What the kill hit, as found on disk after the process was dead.

    Attributes:
        save: The save that was cut off.
        files: How many files it had begun; ``bytes`` is their size.
        delay: Seconds from seeing the intent to the instant of the kill, drawn at random.
        usual: How long a save before it took, from intent to ledger entry: where ``delay`` was drawn from.
        misses: How often the instant fell after the commit, and the next save was tried.
        steps: Steps done when it died.
    """

    save: OpenSave
    files: int
    bytes: int
    delay: float
    usual: float
    misses: int
    steps: int


def open_save(run: Path) -> OpenSave | None:
    """The save that is under way in a run's folder, if one is between intent and ledger entry."""
    for name in os.listdir(run / "checkpoints") if (run / "checkpoints").is_dir() else ():
        if writing := parse_writing_folder(name):
            step, sequence = writing.step, writing.sequence
        elif final := parse_checkpoint_folder(name):
            step, sequence = final
        else:
            continue
        folder = run / "checkpoints" / name
        # The entry is looked for last: a save that commits while we look is not open.
        if (folder / INTENT).exists() and not (run / "ledger" / f"{sequence:09d}.json").exists():
            return OpenSave(folder, step, sequence, renamed=writing is None)
    return None


def kill_inside_save(
    trainer: Trainer, run: Path, *, earliest: int, chance: random.Random, tick: Callable[[], None]
) -> Kill:
    """Waits for a save at or after step ``earliest`` and kills the trainer at a random instant inside it.

    How long a save lasts is measured on those before. At the drawn instant the process group is frozen, the disk is
    looked at, and only if the intent is there and the entry is not, the frozen group is killed: to the disk that is
    the same as a kill at that instant. Otherwise the group goes on, and the next save is tried with half the range.

    Args:
        trainer: The process to kill.
        run: The run's folder in the store.
        earliest: No save before this step is touched.
        chance: Where the instant comes from.
        tick: Called while waiting, to show progress.

    Raises:
        DemoFailed: The run ended before a save was hit.
    """
    durations: list[float] = []
    misses = 0
    while trainer.running:
        save = open_save(run)
        if save is None:
            tick()
            time.sleep(POLL_SECONDS)
            continue
        began = time.monotonic()
        if save.step >= earliest and durations:
            usual = statistics.median(durations)
            delay = chance.uniform(0.0, usual / 2**misses)
            time.sleep(delay)
            if trainer.freeze() and _same(open_save(run), save):
                trainer.kill()
                left = open_save(run)
                if left is None or not _same(left, save):
                    raise DemoFailed(f"the save {save.folder.name} was committed by a process that was dead")
                sizes = [path.stat().st_size for path in left.folder.rglob("*") if path.is_file()]
                return Kill(left, len(sizes), sum(sizes), delay, usual, misses, len(trainer.losses()))
            misses += 1
            trainer.thaw()
        while _same(open_save(run), save) and trainer.running:
            time.sleep(POLL_SECONDS)
        durations.append(time.monotonic() - began)
    raise DemoFailed(f"the run ended before a save could be hit (tried {misses} times)")


def _same(found: OpenSave | None, wanted: OpenSave) -> bool:
    return found is not None and found.sequence == wanted.sequence
