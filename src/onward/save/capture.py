"""Capture: the live state is copied into staging memory. The only part of a save for which training stands still.

Everything is read at the step boundary, except, with ``overlap``, the tensors that only ``optimizer.step`` changes:
those are copied during the next forward and backward pass, and ``optimizer.step`` waits for the copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from onward.catalog.stamp import now
from onward.errors import SaveFailed
from onward.policy.capacity import require_memory, window_bytes
from onward.records import Key, Layout
from onward.runtime import memory
from onward.save.captured import Captured, staged
from onward.save.plan import DEFAULT_THREADS, Plan, PlannedFile, PlannedPiece, plan
from onward.state import tensors as exact
from onward.state.component import Component
from onward.state.copying import Copier, Copy, copier
from onward.state.snapshot import Snapshot, take
from onward.state.staging import Arena


class Capturer:
    """Captures one run's state, save after save; keeps the plan and the memory from one to the next.

    Args:
        components: What is registered.
        threads: How many shard files will be written at once.
        engine: How tensors get to the host.
    """

    def __init__(
        self, components: Sequence[Component], *, threads: int = DEFAULT_THREADS, engine: Copier | None = None
    ) -> None:
        self._components = components
        self._threads = threads
        self._engine = engine or copier()
        self.arena = Arena(self._engine)
        self._layout: Layout | None = None
        self._plan: Plan | None = None

    def prepare(self) -> None:
        """Looks at the state without copying it, and begins to bring staging memory in.

        Raises:
            UnsupportedState: Something cannot be saved exactly; names its path.
        """
        planned = self._planned(take(self._components, 0).layout)
        room, _ = memory.available()
        if room is None or room > 2 * planned.arena_bytes:  # else the first save decides, when memory is needed
            self.arena.prefault(planned.arena_bytes)

    def capture(self, step: int, *, later: Callable[[torch.Tensor], bool] | None = None) -> Capture:
        """Captures the state of one step boundary.

        Args:
            step: Completed global optimizer steps.
            later: Which tensors may be copied after this returns, until ``Capture.settle``; None for none.

        Raises:
            UnsupportedState: Something cannot be saved exactly; names its path.
            IncompleteState: An optimizer holds half a state.
            NoCapacity: There is no memory for a full copy; ``capture_by_window`` needs less.
        """
        started, clock = now(), time.perf_counter()
        snapshot = take(self._components, step)
        planned = self._planned(snapshot.layout)
        if planned.arena_bytes > self.arena.capacity:
            room, source = memory.available()
            require_memory(planned.arena_bytes - self.arena.capacity, room, source)
        view = self.arena.view(planned.arena_bytes)
        at_once: list[Copy] = []
        afterwards: list[tuple[Key, torch.Tensor, Copy]] = []
        for file in planned.files:
            for piece in file.pieces:
                tensor = snapshot.tensors[piece.key]
                copy = (_part(tensor, piece), view[piece.start : piece.start + piece.nbytes])
                if later is not None and later(tensor):
                    afterwards.append((piece.key, tensor, copy))
                else:
                    at_once.append(copy)
        self._engine.start(at_once)
        self._engine.finish()
        captured = self._captured(snapshot, planned, step, started, clock, staged(view))
        return Capture(captured, self._engine, afterwards)

    def capture_by_window(self, step: int) -> Captured:
        """Captures without a full copy: each file's bytes are copied when it is written, while training waits.

        For machines where the state fits once but not twice. The result is only good until training goes on.

        Raises:
            NoCapacity: There is no memory even for a small window.
        """
        started, clock = now(), time.perf_counter()
        snapshot = take(self._components, step)
        room, source = memory.available()
        window = window_bytes(room, source)
        planned = plan(snapshot.layout.tensors, threads=1, largest=window)

        def region(file: PlannedFile) -> memoryview:
            buffer = memoryview(bytearray(file.nbytes))
            for piece in file.pieces:
                target = buffer[piece.begin : piece.begin + piece.nbytes]
                exact.copy_into(_part(snapshot.tensors[piece.key], piece), target)
            return buffer

        return self._captured(snapshot, planned, step, started, clock, region)

    def close(self) -> None:
        """Gives staging memory back."""
        self.arena.close()

    def _planned(self, layout: Layout) -> Plan:
        if self._plan is None or self._layout != layout:
            self._layout, self._plan = layout, plan(layout.tensors, threads=self._threads)
        return self._plan

    def _captured(
        self,
        snapshot: Snapshot,
        planned: Plan,
        step: int,
        started: str,
        clock: float,
        region: Callable[[PlannedFile], memoryview],
    ) -> Captured:
        position, epoch = _position(self._components)
        return Captured(
            step=step,
            layout=snapshot.layout,
            plan=planned,
            state=snapshot.state,
            tags=snapshot.tags,
            region=region,
            started=started,
            seconds=time.perf_counter() - clock,
            epoch=epoch,
            data_position=position,
        )


class Capture:
    """A capture that may still be copying. ``settle`` must return before anything may change what it copies."""

    def __init__(self, captured: Captured, engine: Copier, afterwards: list[tuple[Key, torch.Tensor, Copy]]) -> None:
        self.captured = captured
        self._engine = engine
        self._copies = [copy for _, _, copy in afterwards]
        self._versions = [(key, tensor, tensor._version) for key, tensor, _ in afterwards]
        self._copied = threading.Event()
        self._error: BaseException | None = None
        if not afterwards:
            self._copied.set()
            return
        threading.Thread(target=self._copy, name="onward-capture", daemon=True).start()

    def settle(self) -> None:
        """Waits until the copy can no longer be disturbed. Called before ``optimizer.step``."""
        self._copied.wait()
        self._engine.protect()

    def finish(self) -> Captured:
        """Waits for all bytes, and makes sure that they are of one step.

        Raises:
            SaveFailed: A tensor was changed by something else than ``optimizer.step`` while it was copied.
        """
        self._copied.wait()
        if self._error is not None:
            raise SaveFailed(f"step {self.captured.step}: the capture failed: {self._error}") from self._error
        self._engine.finish()
        return self.captured

    def _copy(self) -> None:
        try:
            self._engine.start(self._copies)
            # Autograd counts every change in place; one during the copy means bytes of two steps.
            changed = [key for key, tensor, version in self._versions if tensor._version != version]
            if changed:
                raise SaveFailed(
                    f"{changed[0]} and {len(changed) - 1} more were changed before optimizer.step",
                    next_step="turn overlap off for this model: its forward or backward pass changes parameters",
                )
        except BaseException as error:  # told by finish, in the thread that saves
            self._error = error
        finally:
            self._copied.set()


def _part(tensor: torch.Tensor, piece: PlannedPiece) -> torch.Tensor:
    if piece.box.shape == piece.shape:
        return tensor
    for axis, (offset, size) in enumerate(zip(piece.box.offset, piece.box.shape, strict=True)):
        tensor = tensor.narrow(axis, offset, size)
    return tensor


def _position(components: Sequence[Component]) -> tuple[dict[str, int] | None, int | None]:
    for component in components:
        place = getattr(component, "position", None)
        if component.kind == "data" and callable(place):
            found = place()
            if isinstance(found, dict):
                epoch = found.get("epoch")
                return found, epoch if isinstance(epoch, int) else None
    return None, None
