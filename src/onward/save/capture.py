"""Capture: the live state is copied into staging memory. The only part of a save for which training stands still."""

from __future__ import annotations

import time
from collections.abc import Sequence

from onward.catalog.stamp import now
from onward.policy.capacity import require_memory
from onward.runtime import memory
from onward.save.captured import Captured, StagedTensor
from onward.state import tensors as exact
from onward.state.component import Component
from onward.state.snapshot import take
from onward.state.staging import Arena

_ALIGN = 64  # tensors begin on a cache line, so that copies run at full speed


def capture(components: Sequence[Component], step: int, arena: Arena) -> Captured:
    """Copies the state of all components, as of one step boundary.

    Args:
        components: What is registered.
        step: Completed global optimizer steps.
        arena: Staging memory that nobody reads any more.

    Raises:
        UnsupportedState: Something cannot be saved exactly; names its path.
        IncompleteState: An optimizer holds half a state.
        NoCapacity: The machine has too little memory for the copy.
    """
    started, clock = now(), time.perf_counter()
    snapshot = take(components, step)
    staged: list[StagedTensor] = []
    end = 0
    for key, tensor in snapshot.tensors.items():
        start = -(-end // _ALIGN) * _ALIGN
        size = exact.nbytes(tensor)
        staged.append(
            StagedTensor(
                key=key, dtype=exact.dtype_name(tensor.dtype), shape=tuple(tensor.shape), start=start, nbytes=size
            )
        )
        end = start + size
    if end > arena.capacity:
        room, source = memory.available()
        require_memory(end - arena.capacity, room, source)
    view = arena.view(end)
    for place, tensor in zip(staged, snapshot.tensors.values(), strict=True):
        exact.copy_into(tensor, view[place.start : place.start + place.nbytes])
    position, epoch = _position(components)
    return Captured(
        step=step,
        layout=snapshot.layout,
        state=snapshot.state,
        tags=snapshot.tags,
        tensors=tuple(staged),
        memory=view,
        started=started,
        seconds=time.perf_counter() - clock,
        epoch=epoch,
        data_position=position,
    )


def _position(components: Sequence[Component]) -> tuple[dict[str, int] | None, int | None]:
    for component in components:
        place = getattr(component, "position", None)
        if component.kind == "data" and callable(place):
            found = place()
            if isinstance(found, dict):
                epoch = found.get("epoch")
                return found, epoch if isinstance(epoch, int) else None
    return None, None
