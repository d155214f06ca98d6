"""Saving, as the training loop sees it: capture now or during the next step, then everything else elsewhere.

Chooses between the writer process and a thread, between a full copy and a small window, and between waiting and
skipping; keeps what outlives one save (staging memory, the process, the count of skipped saves).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from onward.catalog.incarnation import Home, Incarnation
from onward.catalog.ledger import reattach
from onward.errors import ConfigurationError, NoCapacity, OnwardError, SaveFailed
from onward.save.capture import Capture, Capturer
from onward.save.captured import Captured, SaveContext
from onward.save.pipeline import SaveResult, SaveSettings, save
from onward.save.remote import WriterProcess
from onward.save.writer import InFlight
from onward.state.component import Component
from onward.state.overlap import after_step, before_step, held_by, problem

log = logging.getLogger("onward")

Outcome = SaveResult | OnwardError


class Saver:
    """Saves the state of one incarnation, one save at a time.

    Args:
        components: What is registered.
        settings: How saves are written.
        reopenable: Whether another process can open the store by its URL.
    """

    def __init__(self, components: Sequence[Component], settings: SaveSettings, *, reopenable: bool) -> None:
        self._components, self._settings = components, settings
        self._overlap = settings.overlap
        self._use_process = reopenable and settings.writer == "process"
        self._capturer = Capturer(components, threads=settings.threads)
        self._flight = InFlight()
        self._capture: Capture | None = None
        self._home: Home | None = None
        self._writer: WriterProcess | None = None
        self._hooks: list[Any] = []
        self.skipped = 0
        self.stepped = False
        """Whether an optimizer has stepped since the last step boundary."""

    @property
    def writer_pid(self) -> int | None:
        """The writer process; None when a thread writes."""
        return self._writer.pid if self._writer is not None else None

    @property
    def writer_restarts(self) -> int:
        """How often the writer process was started again after it had died."""
        return self._writer.restarts if self._writer is not None else 0

    def prepare(self) -> None:
        """Looks at the state without copying it, and begins to bring staging memory in.

        Raises:
            UnsupportedState: Something cannot be saved exactly; names its path.
            ConfigurationError: Overlap was asked for, and cannot be used here.
        """
        self._capturer.prepare()
        if self._overlap and (reason := problem(self._components)) is not None:
            raise ConfigurationError(f"save.overlap cannot be used: {reason}", next_step="set save.overlap = false")

    def begin(self, incarnation: Incarnation) -> None:
        """Starts the writer; from here on saves belong to this incarnation."""
        self._home = incarnation
        if self._use_process:
            arena = self._capturer.arena
            self._writer = WriterProcess(
                incarnation,
                self._settings,
                memory=lambda: (arena.generation, arena.fd, arena.capacity),
                on_start=incarnation.lease.name_writer,
            )
            try:
                self._writer.start()
            except OSError as error:
                log.error("the writer process could not be started (%s); it is tried again", error)
        self._hooks = after_step(self._components, self._note_step)
        if self._overlap:
            self._hooks += before_step(self._components, self.settle)

    def submit(self, step: int, context: SaveContext, *, may_skip: bool) -> bool:
        """Captures the state and lets it be saved; whatever was in flight must have been collected, or is skipped for.

        Returns:
            Whether a save began; False when it was skipped because the one before is still being written.

        Raises:
            OnwardError: The capture failed, or the save by a small window did.
        """
        home = self._home
        assert home is not None
        if self._flight.busy and may_skip and self._settings.if_busy == "skip":
            self.skipped += 1
            log.warning("step %d: the save before is still being written; skipped", step)
            return False
        if self._overlap and (reason := problem(self._components)) is not None:
            # At a first start there are no moments to look at: only now can it be seen where they are kept.
            log.error("step %d: overlap is turned off: %s", step, reason)
            self._overlap = False
        later = held_by(self._components) if self._overlap else None
        try:
            self._capture = capture = self._capturer.capture(step, later=later)
        except NoCapacity as error:
            log.warning("step %d: %s; saving by a small window while training waits", step, error.message)
            self._flight.put(self._save_by_window(home, step, context))
            return True
        except MemoryError as error:
            raise SaveFailed(f"step {step} could not be captured: {error}") from error
        self._flight.submit(step, lambda: self._save(home, capture.finish(), context))
        return True

    def settle(self) -> None:
        """Waits until nothing that is still being copied can be changed; ``optimizer.step`` calls it."""
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.settle()

    def _note_step(self) -> None:
        self.stepped = True

    def collect(self, *, wait: bool) -> Outcome | None:
        """The outcome of the save in flight, once; None when there is none, or it is not over and ``wait`` is off."""
        return self._flight.collect(wait=wait)

    def look_after(self) -> None:
        """Starts the writer process again if it died while idle."""
        if self._writer is not None and (how := self._writer.look_after()) is not None:
            log.error("the writer process %s (no save was in flight)", how)

    def close(self) -> None:
        """Lets the writer end and gives the memory back."""
        for hook in self._hooks:
            hook.remove()
        if self._writer is not None:
            self._writer.close()
        self._capturer.close()

    def _save(self, home: Home, captured: Captured, context: SaveContext) -> SaveResult:
        if self._writer is not None:
            return self._writer.save(captured, context)
        return save(home, captured, context, self._settings)

    def _save_by_window(self, home: Home, step: int, context: SaveContext) -> SaveResult:
        captured = self._capturer.capture_by_window(step)
        if self._writer is None:
            return save(home, captured, context, self._settings)
        # The bytes are not in shared memory, so this process writes; and only one may append at a time.
        self._writer.end()
        ledger = reattach(home.store, home.places, epoch=home.ledger.epoch, incarnation=home.ledger.incarnation)
        return save(Home(store=home.store, tier=home.tier, ledger=ledger), captured, context, self._settings)
