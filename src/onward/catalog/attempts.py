"""How attempts ended that did not become checkpoints."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from onward.catalog.stamp import actor, now
from onward.errors import OnwardError
from onward.format.codec import SMALL_LIMIT, decode, encode
from onward.format.names import RunPlaces
from onward.records import FORMAT, AttemptOutcome
from onward.storage.base import AlreadyExists, Barrier, NotFound, Store


def record_outcome(
    store: Store,
    places: RunPlaces,
    *,
    attempt: str,
    sequence: int,
    step: int,
    outcome: Literal["failed", "rolled-back", "kept", "superseded"],
    reason: str,
) -> AttemptOutcome:
    """Writes the story of an attempt, once: the first one to tell it is believed."""
    story = AttemptOutcome(
        format=FORMAT,
        run=places.run,
        attempt=attempt,
        sequence=sequence,
        step=step,
        outcome=outcome,
        reason=reason,
        recorded=now(),
        recorded_by=actor(),
    )
    with suppress(AlreadyExists):
        store.create(f"{places.attempts}/{attempt}.json", encode(story), content=Barrier.RECEIPT, name=None)
    return story


def read_outcomes(store: Store, places: RunPlaces) -> list[AttemptOutcome]:
    """All stories that can be read, oldest first."""
    stories: list[AttemptOutcome] = []
    with suppress(NotFound):
        for item in store.list(places.attempts):
            path = f"{places.attempts}/{item.name}"
            if item.name.endswith(".json") and not item.name.startswith("."):
                with suppress(OnwardError):
                    stories.append(decode(store.read(path, limit=SMALL_LIMIT), AttemptOutcome, path))
    return sorted(stories, key=lambda story: story.recorded)
