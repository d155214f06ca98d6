"""Onward, driven as a training loop drives it: through the Checkpointer alone."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any, Literal

import onward
from bench.state import Trainee

RUN = "bench"


class _Outcomes(logging.Handler):
    """Collects what the Checkpointer says of each save that has ended: phase → seconds."""

    def __init__(self) -> None:
        super().__init__(level=logging.INFO)
        self.seconds: list[dict[str, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("committed") and isinstance(record.args, tuple):
            seconds: Any = record.args[1]
            self.seconds.append(dict(seconds))


class Ours:
    """A Checkpointer with a store of its own.

    Args:
        folder: Where the store is made, or is.
        trainee: What is saved.
        overlap: Copy during the next step.
        verify: What the writer does after the commit.
        components: More state, or all of it when there is no trainee.
    """

    def __init__(
        self,
        folder: Path,
        trainee: Trainee | None = None,
        *,
        overlap: bool = False,
        verify: Literal["full", "sizes"] = "full",
        **components: Any,
    ) -> None:
        url = f"file://{folder.resolve()}"
        if not folder.exists():
            onward.init_store(url)
        self._folder, self._trainee, self._components = folder, trainee, components
        self._config = onward.Config(
            store=url,
            run=RUN,
            triggers=onward.TriggerSettings(every_steps=None),
            save=onward.SaveSettings(overlap=overlap, verify_after_save=verify, tolerate_failures=0),
        )
        self._log = logging.getLogger("onward")
        self._outcomes = _Outcomes()
        self._log.addHandler(self._outcomes)
        self._log.setLevel(logging.INFO)
        self._log.propagate = False
        self._step = 0
        self._begun = 0
        self.late = 0
        self.checkpointer = self._made()
        self.start: Any = None

    @property
    def ended(self) -> list[dict[str, float]]:
        """Phase → seconds of every save that has ended and was collected."""
        return self._outcomes.seconds

    @property
    def in_flight(self) -> bool:
        """Whether a save was begun and its end has not been told."""
        return self._begun > len(self.ended)

    def resume(self) -> float:
        """Takes the run over and loads what is there; seconds of the whole call."""
        started = time.perf_counter()
        self.start = self.checkpointer.resume()
        taken = time.perf_counter() - started
        self._step = self.start.next_step
        return taken

    def step(self, *, save: bool = False) -> float:
        """Tells of a step; the seconds that this takes of the training loop."""
        if save:
            self.late += self.in_flight
            self._begun += 1
        started = time.perf_counter()
        self.checkpointer.step(self._step, save=save)
        taken = time.perf_counter() - started
        self._step += 1
        return taken

    def wait(self) -> dict[str, float]:
        """Waits for the save in flight; its phases, and ``end``, the seconds waited."""
        started = time.perf_counter()
        self.checkpointer.wait()
        return {**self.ended[-1], "end": time.perf_counter() - started}

    def committed(self) -> float:
        """Waits for the save in flight; the seconds until it was committed, reading back left out."""
        phases = self.wait()
        return phases["end"] - phases["verify"]

    def renew(self) -> None:
        """Another Checkpointer on the same store, as after a restart, without another process."""
        self.checkpointer.close()
        self.checkpointer = self._made()

    def forget(self) -> None:
        """Removes the bytes of all checkpoints so far, so that a long measurement does not fill the disk."""
        for folder in (self._folder / "runs" / RUN / "checkpoints").glob("step-*"):
            shutil.rmtree(folder)
        os.sync()

    def files(self) -> list[Path]:
        """The shard files of all checkpoints."""
        return sorted((self._folder / "runs" / RUN / "checkpoints").glob("step-*/rank-*/*.safetensors"))

    def close(self, *, keep: bool = False) -> None:
        """Ends the run and removes the store."""
        self.checkpointer.close()
        self._log.removeHandler(self._outcomes)
        if not keep:
            shutil.rmtree(self._folder)
            os.sync()

    def _made(self) -> onward.Checkpointer:
        parts: dict[str, Any] = dict(self._components)
        if self._trainee is not None:
            parts |= {"model": self._trainee.model, "optimizer": self._trainee.optimizer}
        return onward.Checkpointer(self._config, **parts)
