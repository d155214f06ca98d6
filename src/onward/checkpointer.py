"""What a training loop holds. It composes the rooms below; decisions and work are theirs."""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch

from onward.catalog.incarnation import Incarnation, begin
from onward.catalog.listing import read_catalog
from onward.catalog.stamp import now
from onward.catalog.stores import open_home
from onward.config import Config, load_config
from onward.errors import ConfigurationError, MidStep, OnwardError, Superseded, UsageError
from onward.format.names import run_name
from onward.policy.compatibility import table
from onward.policy.triggers import due
from onward.records import CheckpointInfo, Description
from onward.restore.resume import Start, resume
from onward.restore.settings import Mode
from onward.save.captured import SaveContext
from onward.save.pipeline import SaveResult
from onward.save.saver import Saver
from onward.state.data import DataComponent
from onward.state.describe import RunDescription
from onward.state.model import ModelComponent
from onward.state.register import register
from onward.state.rng import RandomComponent
from onward.storage.base import Store

log = logging.getLogger("onward")
_LONGEST_REASON = 1000


@dataclass(frozen=True)
class StepOutcome:
    """What ``step`` did: whether a save began, and whether the loop should end."""

    saved: bool = False
    stop: bool = False


class Checkpointer:
    """Keeps a training run recoverable.

    Args:
        config: Path of an ``onward.toml``, a ``Config``, or None to look for one (see ``load_config``).
        run: The run's name; wins over the configuration.
        model: The model; its parameters name the optimizer's state.
        optimizer: A ``torch.optim.Optimizer``.
        scheduler: A learning rate scheduler.
        scaler: A ``torch.amp.GradScaler``.
        data: A loader that knows its position: ``onward.ResumableLoader``, torchdata's ``StatefulDataLoader``, or
            anything with ``state_dict`` and ``load_state_dict``.
        generators: Random generators of the program's own, by name. The global ones are always saved.
        describe: What the run is: ``onward.describe(...)``.
        store: A store object in place of the configured URL.
        components: The user's own state, by name.

    Raises:
        StoreMissing: There is no store at the place; never taken for a first start.
        ConfigurationError: A setting or an object is wrong.
    """

    def __init__(
        self,
        config: str | Path | Config | None = None,
        *,
        run: str | None = None,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        generators: Mapping[str, Any] | None = None,
        describe: RunDescription | None = None,
        store: Store | None = None,
        **components: Any,
    ) -> None:
        self._config = config if isinstance(config, Config) else load_config(config)
        self.run = run_name(run or self._config.run)
        self._described = describe or RunDescription(description=Description())
        # Read once: a file that is edited or removed later must change neither checkpoints nor training.
        self._assets = {name: _content(value) for name, value in self._described.assets.items()}
        self._components = register(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            data=data,
            generators=generators,
            others=components,
        )
        self._store, _ = open_home(store if store is not None else self._config.store)
        reopenable = store is None and self._store.capabilities.local
        self._saver = Saver(self._components, self._config.save, reopenable=reopenable)
        self._incarnation: Incarnation | None = None
        self._boundary = 0
        self._position: object = None
        self._random_state: object = None
        self._requested: str | None = None
        self._parent: int | None = None
        self._training_started = now()
        self._failures = 0
        self._unsaid: OnwardError | None = None
        self._closed = False

    # --- the way back -------------------------------------------------------------------------------------------

    def resume(
        self,
        mode: Mode = "strict",
        *,
        source_run: str | None = None,
        checkpoint: str = "newest",
        waive: Collection[str] = (),
        allow_fresh_start: bool = False,
    ) -> Start:
        """Takes the run over and loads the newest checkpoint that verifies. Must come before the first ``step``.

        Args:
            mode: ``strict`` continues the run; ``warm-start`` takes the weights only, and begins at step 0.
            source_run: Warm start from another run of the same store, while this one has no commit of its own.
            checkpoint: ``newest``, a step, ``seq:N`` or a folder name.
            waive: Components that may be missing, on either side; they stay as they are.
            allow_fresh_start: Begin at step 0 although commits exist or existed.

        Returns:
            Where to go on, and how that was decided.

        Raises:
            Busy: Another live process uses the run.
            NothingRecoverable: Commits exist or existed, but none can be used.
            OnwardError: The checkpoint does not fit this program; see ``onward.restore.resume.resume``.
        """
        if self._incarnation is not None:
            raise UsageError("resume was called before", next_step="make one Checkpointer for each incarnation")
        self._saver.prepare()  # what cannot be saved is told now, not after hours of training
        for component in self._components:
            if isinstance(component, ModelComponent) and component.name == "model":
                for untied in component.untied(self._described.ties):
                    warnings.warn(f"{untied}; each is saved and restored on its own", stacklevel=2)
        incarnation = begin(self._store, self.run, lease_seconds=self._config.lease.seconds, say=log.warning)
        settings = replace(self._config.resume, waive=(*self._config.resume.waive, *waive))
        try:
            with torch.inference_mode(False), torch.no_grad():  # moments made in it could never be stepped
                start = resume(
                    incarnation,
                    self._components,
                    self._described.description,
                    settings,
                    mode=mode,
                    source_run=source_run,
                    checkpoint=checkpoint,
                    allow_fresh_start=allow_fresh_start,
                    say=log.warning,
                )
        except BaseException:
            incarnation.end()
            raise
        self._incarnation = incarnation
        self._saver.begin(incarnation)
        self._boundary = start.next_step
        self._position = self._data_position()
        self._parent = start.checkpoint.sequence if start.checkpoint else None
        self._random_state = self._random().state()
        if start.differences:
            log.warning("the configuration differs from the checkpoint's:\n%s", table(start.differences))
        return start

    def finish_restore(self) -> None:
        """Puts the random state back once more, for set-up code after ``resume`` that seeds or draws."""
        if self._random_state is None:
            raise UsageError("finish_restore comes after resume")
        self._random().load(self._random_state)

    # --- the way out --------------------------------------------------------------------------------------------

    def step(self, step: int, *, save: bool = False, reason: str = "", **metrics: object) -> StepOutcome:
        """Tells that the step of index ``step`` is complete: its checkpoint is ``step + 1``. Saves when due.

        Args:
            step: Index of the step that has just ended (after ``optimizer.step``, before the next batch is drawn).
            save: Save now, whether due or not.
            reason: Why, for the manifest.
            metrics: Loss, learning rate and whatever else describes the step.

        Raises:
            SaveFailed: More saves in a row failed than ``save.tolerate_failures`` allows.
            Superseded: A newer incarnation runs; this one must end.
            UsageError: The step was told before.
        """
        self._taken_over()
        boundary = _whole(step) + 1
        if boundary <= self._boundary and not (boundary == self._boundary == 0):
            raise UsageError(
                f"step {step} was told before: {self._boundary} steps are complete",
                next_step="start the loop at resume().next_step and tell each step once",
            )
        self._saver.settle()
        is_due = due(self._config.triggers, self._boundary, boundary)
        # Before anything can raise: the step is complete, whatever became of the save before it.
        self._boundary, self._position = boundary, self._data_position()
        self._saver.stepped = False
        self._collect(wait=False)
        self._saver.look_after()
        reason = reason or self._requested or ("due" if is_due else "asked for")
        if not (is_due or save or self._requested is not None):
            return StepOutcome()
        return StepOutcome(saved=self._begin_save(reason=reason, birth_class="periodic" if is_due else "requested"))

    def save(self, step: int | None = None, *, reason: str = "asked for", wait: bool = False) -> None:
        """Saves the state of the step boundary at which training stands.

        Args:
            step: Completed steps, when they were not told with ``step``; by default those that were.
            reason: Why, for the manifest.
            wait: Return only when the checkpoint is committed and read back; raises if that failed.

        Raises:
            MidStep: Data was drawn since the last boundary; use ``request_save`` there.
        """
        self._taken_over()
        step = None if step is None else _whole(step)
        if step is not None and step < self._boundary:
            raise UsageError(f"{self._boundary} steps are complete; a checkpoint of step {step} cannot be made now")
        if step is None or step == self._boundary:
            if self._position != self._data_position():
                raise MidStep(
                    f"data was drawn since step {self._boundary} was complete: the state is between two steps"
                )
            if self._saver.stepped:
                raise MidStep(f"the optimizer has stepped since step {self._boundary} was complete")
        if step is not None:
            self._boundary, self._position = step, self._data_position()
        self._saver.stepped = False
        self._collect(wait=False)
        self._begin_save(reason=reason, birth_class="requested", may_skip=False)
        if wait:
            self.wait()

    def request_save(self, reason: str = "requested") -> None:
        """Asks for a save at the next step boundary; safe in hooks and signal handlers."""
        self._taken_over()
        self._requested = reason

    def wait(self) -> None:
        """Returns when no save is in flight; raises what went wrong with the last one, once."""
        self._collect(wait=True)
        unsaid, self._unsaid = self._unsaid, None
        if unsaid is not None:
            raise unsaid

    def close(self) -> None:
        """Waits for the save in flight and gives the run back; raises if the last save failed."""
        try:
            self.wait()
        finally:
            self._saver.close()
            if self._incarnation is not None:
                self._incarnation.end()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.close()
        except OnwardError as failure:
            if error is None:
                raise
            log.error("the last save failed too: %s", failure)  # the loop's own error is the one to be seen

    # --- looking ------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointInfo]:
        """What can be resumed from, newest first."""
        incarnation = self._taken_over()
        return read_catalog(incarnation.store, incarnation.places, incarnation.tier).offered()

    def latest(self) -> CheckpointInfo | None:
        """The newest checkpoint that is committed and not quarantined; a save in flight does not count."""
        return next(iter(self.checkpoints()), None)

    @property
    def writer_pid(self) -> int | None:
        """The writer process's id; None when a thread writes."""
        return self._saver.writer_pid

    @property
    def writer_restarts(self) -> int:
        """How often the writer process died and was started again."""
        return self._saver.writer_restarts

    @property
    def skipped_saves(self) -> int:
        """How many due saves were skipped because the one before was still being written."""
        return self._saver.skipped

    # --- inside -------------------------------------------------------------------------------------------------

    def _begin_save(self, *, reason: str, birth_class: str, may_skip: bool = True) -> bool:
        self._taken_over()
        if not (may_skip and self._config.save.if_busy == "skip"):
            self._collect(wait=True)
        self._requested = None
        try:
            return self._saver.submit(self._boundary, self._context(reason, birth_class), may_skip=may_skip)
        except OnwardError as error:
            self._failed(error)
            return False

    def _context(self, reason: str, birth_class: str) -> SaveContext:
        description = self._described.description
        started = description.training_started or self._training_started
        return SaveContext(
            description=msgspec.structs.replace(description, training_started=started),
            training_started=started,
            birth_class=birth_class,
            reason=reason.encode("utf-8", "replace").decode()[:_LONGEST_REASON],
            parent=self._parent,
            assets=self._assets,
        )

    def _collect(self, *, wait: bool) -> None:
        outcome = self._saver.collect(wait=wait)
        if isinstance(outcome, OnwardError):
            self._failed(outcome)
        elif outcome is not None:
            self._succeeded(outcome)

    def _succeeded(self, result: SaveResult) -> None:
        self._parent, self._failures, self._unsaid = result.entry.sequence, 0, None
        log.info("committed %s (%s)", result.entry.folder, result.seconds)

    def _failed(self, error: OnwardError) -> None:
        """A failed save is loud, but ends training only when it keeps failing, or when the run is another's."""
        self._failures += 1
        self._unsaid = error
        if isinstance(error, Superseded | ConfigurationError) or self._failures > self._config.save.tolerate_failures:
            self._unsaid = None
            raise error
        left = self._config.save.tolerate_failures - self._failures
        warnings.warn(f"{error}\n  training goes on; {left} more failures are tolerated", stacklevel=4)

    def _taken_over(self) -> Incarnation:
        if self._closed:
            raise UsageError(f"the run {self.run!r} was closed", next_step="make a new Checkpointer and resume it")
        if self._incarnation is None:
            raise UsageError(
                "nothing can be saved or listed before resume() has taken the run over",
                next_step="call `start = ckpt.resume()` before the loop; it also answers a first start",
            )
        return self._incarnation

    def _random(self) -> RandomComponent:
        return next(c for c in self._components if isinstance(c, RandomComponent))

    def _data_position(self) -> object:
        return [component.progress() for component in self._components if isinstance(component, DataComponent)]


def _whole(step: Any) -> int:
    """A step as a plain integer: loops count in numpy and torch too."""
    try:
        return operator.index(step)
    except TypeError:
        raise UsageError(f"the step is {step!r}, not a whole number") from None


def _content(asset: bytes | Path) -> bytes:
    if isinstance(asset, bytes):
        return asset
    try:
        return asset.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"the asset {asset} cannot be read: {error.strerror}") from error
