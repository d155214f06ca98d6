"""When to save."""

from __future__ import annotations

from dataclasses import dataclass

from onward.errors import ConfigurationError


@dataclass(frozen=True)
class TriggerSettings:
    """When a save is due.

    Attributes:
        every_steps: A save at each multiple of this many completed steps; None for none.
    """

    every_steps: int | None = 500

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigurationError(
                f"save.every_steps is {self.every_steps}", next_step="give a number of steps, at least 1"
            )


def due(settings: TriggerSettings, before: int, now: int) -> bool:
    """Whether a multiple of ``every_steps`` lies after step ``before``, at or below step ``now``.

    Told apart by multiples rather than by ``now % every_steps``, so that a loop that does not report every step
    cannot step over a save.
    """
    every = settings.every_steps
    return every is not None and now // every > before // every
