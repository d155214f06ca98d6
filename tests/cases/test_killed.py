"""Killed at random instants, a run goes on from its newest commit: of the kind *half-written*, with real training."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from .shared import root, running, start_process
from .training import KINDS, Job


def _train_for_ever(url: str, seed: int, writer: str, mark: str) -> None:
    job = KINDS["accumulation"](seed)
    with running(url, every=1, save={"writer": writer}, **job.components()) as (ckpt, start):
        for number in itertools.count(start.next_step):
            job.step(number)
            ckpt.step(number)
            if number == start.next_step:
                ckpt.wait()  # the writer is at work by now
                Path(mark + ".new").write_text(str(ckpt.writer_pid or 0))
                os.rename(mark + ".new", mark)


class Reference:
    """The state of every step of a run that nothing interrupted."""

    def __init__(self) -> None:
        self.job: Job = KINDS["accumulation"](0)
        self.digests = [self.job.digests()]
        self.drawn = _random_state()

    def at(self, step: int) -> dict[str, str]:
        for part, state in zip(_GENERATORS, self.drawn, strict=True):  # others have drawn meanwhile
            part[1](state)
        while len(self.digests) <= step:
            self.job.step(len(self.digests) - 1)
            self.digests.append(self.job.digests())
        self.drawn = _random_state()
        return self.digests[step]


_GENERATORS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
]


def _random_state() -> list[Any]:
    return [get() for get, _ in _GENERATORS]


def _committed(url: str) -> list[int]:
    entries = [json.loads(p.read_text()) for p in sorted((root(url) / "runs/r/ledger").glob("0*.json"))]
    return [entry["step"] for entry in entries if entry["type"] == "checkpoint"]


@pytest.mark.parametrize("victims", ["the trainer, whose thread writes", "the trainer alone", "trainer and writer"])
@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.full)])
def test_killed_at_any_instant_a_run_goes_on_from_its_newest_commit(
    url: str, tmp_path: Path, rounds: int, victims: str
) -> None:
    """A writer process that survives finishes its save; the next start waits for it, and finds what it committed."""
    writer = "thread" if "thread" in victims else "process"
    draw, reference, newest, inside = random.Random(), Reference(), 0, 0
    for number in range(rounds):
        mark = tmp_path / f"mark-{number}"
        process = start_process(_train_for_ever, url, number if _committed_or_none(url) else 0, writer, str(mark))
        while not mark.exists():
            time.sleep(0.002)
            assert process.is_alive()
        time.sleep(draw.uniform(0, 0.3))
        while number % 2 and not _in_a_save(url):  # every other kill falls into a save for certain
            assert process.is_alive()
        if victims == "trainer and writer" and draw.random() < 0.5:
            os.kill(int(mark.read_text()), signal.SIGKILL)  # first, so that the trainer may see it die
        inside += _in_a_save(url)
        process.kill()
        if victims == "trainer and writer":
            _kill_if_alive(int(mark.read_text()))
        process.join(10)
        job = KINDS["accumulation"](99 if _committed_or_none(url) else 0)
        with running(url, **job.components()) as (_, start):
            committed = _committed(url)
            assert start.next_step == (committed[-1] if committed else 0) >= newest
            assert start.rejected == ()
            if committed:
                assert job.digests() == reference.at(start.next_step)
            newest = start.next_step
    assert newest >= rounds
    assert inside >= rounds // 2


def _in_a_save(url: str) -> bool:
    return any(".writing-" in p.name for p in (root(url) / "runs/r/checkpoints").iterdir())


def _committed_or_none(url: str) -> bool:
    return (root(url) / "runs/r/ledger").is_dir() and bool(_committed(url))


def _kill_if_alive(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
