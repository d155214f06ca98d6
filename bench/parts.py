"""The measurements of saving and loading, each turned into figures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from bench import child
from bench.figures import Figure
from bench.memory import Sampler
from bench.rivals import available
from bench.state import Size

_MARGIN = 256 * 1000 * 1000
_RECOVERED = "select, verify every byte, place it in the live state"

BLOCKING, OVERLAPPED = "stall of a save, blocking", "stall of a save, overlapped"
WARM, COMMITTED = "load and verify, warm process", "captured to committed, trainer idle"
STALL, WHOLE, LOAD = "stall of a save", "save, from the call to its end, idle", "load, warm process"
"""Names of figures that the table of libraries puts side by side."""

Rounds = list[dict[str, float]]


class Bench:
    """All measurements of saving.

    Args:
        scratch: A folder on the filesystem that is measured; everything in it is removed again.
        size: How large everything is.
        say: Told what is measured next.
    """

    def __init__(self, scratch: Path, size: Size, say: Callable[[str], None]) -> None:
        self._scratch, self._size, self._say = scratch, size, say
        self._number = 0

    def parts(self) -> dict[str, Callable[[], list[Figure]]]:
        """Name → a group of measurements, in the order of the table."""
        return {
            "blocking": lambda: self.stall(overlap=False),
            "overlapped": lambda: self.stall(overlap=True),
            "first": self.first,
            "committed": self.committed,
            "loading": self.loading,
            "busy": self.busy,
            "many": self.many,
            "memory": self.memory,
            "rivals": self.rivals,
        }

    def stall(self, *, overlap: bool) -> list[Figure]:
        """Blocking or overlapped stall, against a copy of the state."""
        found = self._run("stalls:stall", overlap=overlap)
        rounds = found["rounds"]
        return [
            Figure(
                figure=OVERLAPPED if overlap else BLOCKING,
                unit="s",
                samples=_each(rounds, "stall"),
                reference_samples=_each(rounds, "memcpy"),
                against="memcpy of the state",
                bar=0.1 if overlap else 1.3,
                note=f"(wall of {self._size.steps} steps with {found['saves']} saves - without) / saves, from the "
                f"second save on; the accelerator is imitated by {found['step_seconds']:.3f} s of sleep a step, and "
                "the optimizer's work by a change of one small parameter; "
                f"the call itself: {_shown(rounds, 'call')} s; {sum(_each(rounds, 'late')):.0f} saves were due while "
                f"one was still being written; {found['nbytes'] / 1e9:.3f} GB of bf16 parameters and fp32 moments",
            )
        ]

    def first(self) -> list[Figure]:
        """The first save of a process."""
        rounds = [self._run("stalls:first_save") for _ in range(self._size.rounds)]
        return [
            Figure(
                figure="first save of a process",
                unit="s",
                samples=_each(rounds, "first"),
                reference_samples=_each(rounds, "later"),
                against="its later saves (median of three)",
                bar=2.0,
                note="blocking; a process each, the first save after a second of training",
            )
        ]

    def committed(self) -> list[Figure]:
        """From captured to committed; what reading back costs."""
        found = self._run("persisting:committed")
        rounds = found["rounds"]
        until = [sample["full end"] - sample["full verify"] for sample in rounds]
        raw = [min(sample[f"raw {files}"] for files in found["files"]) for sample in rounds]
        how = "O_DIRECT + fsync" if found["direct"] else "buffered + fsync (no O_DIRECT on this filesystem)"
        hashed = "the writer takes SHA-256 and XXH3-128 of every byte and syncs files and folders"
        return [
            Figure(
                figure=COMMITTED,
                unit="s",
                samples=until,
                reference_samples=raw,
                against=f"raw write, {how}, 4 or 8 files, 4 threads",
                bar=1.4,
                note=f"{hashed}; of it writing {_shown(rounds, 'full write')} s, "
                f"commit {_shown(rounds, 'full commit')} s, the rest is the way to the writer and back",
            ),
            Figure(
                figure="captured to committed, beside dcp.save",
                unit="s",
                samples=until,
                reference_samples=_each(rounds, "dcp"),
                against="dcp.save, which hashes nothing",
                bar=1.0,
                note="dcp.save with 4 threads and a cached plan; it syncs data files, not its record, not folders",
            ),
            Figure(
                figure="background work with verify_after_save = full",
                unit="s",
                samples=_each(rounds, "full end"),
                reference_samples=_each(rounds, "sizes end"),
                against="verify_after_save = sizes",
                note=f"reads every byte back from the medium: {_shown(rounds, 'full verify')} s more, after the commit",
            ),
        ]

    def loading(self) -> list[Figure]:
        """Loading with verification, warm and in fresh processes."""
        folder = self._scratch / "loading"
        self._say("loading: a checkpoint by each side")
        child.run("loading:prepare", folder, self._size)
        self._say("loading: warm process")
        warm: Rounds = child.run("loading:warm", folder, self._size)["rounds"]
        ours, theirs = [], []
        for number in range(self._size.rounds):
            self._say(f"loading: fresh processes, pair {number + 1}")
            ours.append(child.run("loading:fresh", folder, self._size, side="ours"))
            theirs.append(child.run("loading:fresh", folder, self._size, side="dcp"))
        shutil.rmtree(folder)
        verified = "dcp.load, which verifies nothing"
        return [
            Figure(
                figure=WARM,
                unit="s",
                samples=_each(warm, "load"),
                reference_samples=_each(warm, "dcp"),
                against=verified,
                bar=0.7,
                note=f"{_RECOVERED}; the whole resume() takes {_shown(warm, 'whole')} s, taking the run over and "
                f"starting the writer included; reading the page cache alone {_shown(warm, 'read')} s",
            ),
            Figure(
                figure="load and verify, fresh process",
                unit="s",
                samples=_each(ours, "load"),
                reference_samples=_each(theirs, "load"),
                against=f"{verified}, likewise",
                bar=1.0,
                note=f"page cache warm, a tiny load before takes imports out of the time; the whole resume() takes "
                f"{_shown(ours, 'whole')} s",
            ),
            Figure(
                figure="resume() as a whole, warm process",
                unit="s",
                samples=_each(warm, "whole"),
                reference_samples=_each(warm, "dcp"),
                against=verified,
                note="with lease, fence, recovery, receipt and the start of the writer process",
            ),
        ]

    def busy(self) -> list[Figure]:
        """What a pure-Python trainer loses while a save is in flight."""
        figures = []
        for name, where in (("saving", "ours"), ("dcp.async_save THREAD", "dcp")):
            rounds = self._run(f"trainer_load:busy_{where}")["rounds"]
            lost = [100 * (sample["saving"] / sample["alone"] - 1) for sample in rounds]
            ended = sum(bool(sample["ended"]) for sample in rounds)
            figures.append(
                Figure(
                    figure=f"step of a pure-Python trainer while {name}",
                    unit="s",
                    samples=_each(rounds, "saving"),
                    reference_samples=_each(rounds, "alone"),
                    against="the same trainer alone",
                    bar=1.1 if where == "ours" else None,
                    note=f"slower by {', '.join(f'{one:.1f}' for one in lost)} %; from the end of the capture until "
                    f"the save has ended, {_shown(rounds, 'window')} s (looked at for 4 s at most: {ended} of "
                    f"{len(rounds)} saves ended in it)",
                )
            )
        return figures

    def many(self) -> list[Figure]:
        """Very many small tensors."""
        found = self._run("persisting:small_tensors")
        rounds = found["rounds"]
        return [
            Figure(
                figure=f"{found['count']:,} tensors of 16 kB, from the call to committed",
                unit="s",
                samples=_each(rounds, "whole"),
                reference_samples=_each(rounds, "torch.save"),
                against="torch.save + fsync",
                bar=1.0,
                note=f"of it training stands still for {_shown(rounds, 'call')} s, for torch.save the whole time; "
                f"writing {_shown(rounds, 'write')} s, commit {_shown(rounds, 'commit')} s",
            )
        ]

    def memory(self) -> list[Figure]:
        """Peak memory of trainer and writer above the state."""
        samples, limits, nbytes = [], [], 0
        for _ in range(min(self._size.rounds, 3)):
            sampler = Sampler()
            found = self._run("trainer_load:peak", watch=sampler)
            nbytes = found["nbytes"]
            samples.append(sampler.above(found["before"], found["after"]) / 1e6)
            limits.append((nbytes + _MARGIN) / 1e6)
        return [
            Figure(
                figure="peak memory above the state",
                unit="MB",
                samples=samples,
                reference_samples=limits,
                against="one staging copy + 256 MB",
                bar=1.0,
                note=f"proportional set sizes of trainer and writer together, over four saves; the state has "
                f"{nbytes / 1e6:.0f} MB",
            )
        ]

    def rivals(self) -> list[Figure]:
        """A row for each other library."""
        figures = []
        for name in available():
            rounds = self._run("stalls:rival_stall", name=name)["rounds"]
            figures.append(
                Figure(
                    figure=f"{name}: {STALL}",
                    unit="s",
                    samples=_each(rounds, "stall"),
                    reference_samples=_each(rounds, "memcpy"),
                    against="memcpy of the state",
                )
            )
            figures += [
                Figure(figure=f"{name}: {what}", unit="s", samples=_each(rounds, key))
                for what, key in ((WHOLE, "whole"), (LOAD, "load"))
            ]
        return figures

    def _run(self, where: str, **arguments: Any) -> dict[str, Any]:
        self._number += 1
        self._say(" ".join([where.partition(":")[2], *(str(v) for v in arguments.values() if isinstance(v, str))]))
        folder = self._scratch / f"{self._number:03d}"
        try:
            return child.run(where, folder, self._size, **arguments)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()


def _each(rounds: Iterable[dict[str, Any]], name: str) -> list[float]:
    return [float(sample[name]) for sample in rounds]


def _shown(rounds: Iterable[dict[str, Any]], name: str) -> str:
    return f"{median(_each(rounds, name)):.3f}"
