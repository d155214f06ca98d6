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
from onward.errors import OnwardError, SaveFailed
from onward.policy.capacity import require_memory, window_bytes
from onward.records import Key, Layout
from onward.runtime import memory
from onward.save.captured import Captured, staged
from onward.save.plan import DEFAULT_THREADS, Plan, PlannedFile, PlannedPiece, plan
from onward.state import tensors as exact
from onward.state.component import Component
from onward.state.copying import Copier, Copy, copier
from onward.state.snapshot import Memory, Snapshot, take
from onward.state.staging import Arena

_SAMPLES = 64


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
        self._memory = Memory()
        # Views of the memory file: dropped before it grows, else the old one and the new would live at once.
        self._placed: tuple[Plan, int, list[tuple[PlannedPiece, torch.Tensor]]] | None = None

    def prepare(self) -> None:
        """Looks at the state without copying it, and begins to bring staging memory in.

        Raises:
            UnsupportedState: Something cannot be saved exactly; names its path.
        """
        planned = self._planned(take(self._components, 0, self._memory).layout)
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
        snapshot = take(self._components, step, self._memory)
        planned = self._planned(snapshot.layout)
        if planned.arena_bytes > self.arena.capacity:
            room, source = memory.available()
            require_memory(planned.arena_bytes - self.arena.capacity, room, source)
        if planned.arena_bytes > self.arena.capacity:
            self._placed = None
        view = self.arena.view(planned.arena_bytes)
        at_once: list[Copy] = []
        afterwards: list[tuple[Key, torch.Tensor, Copy]] = []
        for piece, target in self._targets(planned, view):
            tensor = snapshot.tensors[piece.key]
            copy = (_part(tensor, piece), target)
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
        snapshot = take(self._components, step, self._memory)
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
        self._placed = None
        self.arena.close()

    def _planned(self, layout: Layout) -> Plan:
        if self._plan is None or (self._layout is not layout and self._layout != layout):
            self._layout, self._plan = layout, plan(layout.tensors, threads=self._threads)
        return self._plan

    def _targets(self, planned: Plan, view: memoryview) -> list[tuple[PlannedPiece, torch.Tensor]]:
        """Where each piece goes; the same from save to save while plan and memory are the same."""
        if self._placed is None or self._placed[0] is not planned or self._placed[1] != self.arena.generation:
            places = [
                (piece, exact.target_of(view[piece.start : piece.start + piece.nbytes], piece.dtype, piece.box.shape))
                for file in planned.files
                for piece in file.pieces
            ]
            self._placed = (planned, self.arena.generation, places)
        return self._placed[2]

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
    """A capture that may still be copying. ``settle`` must return before ``optimizer.step`` changes anything.

    What is copied late must not change before ``settle``. Two things tell that it did: autograd's count of changes in
    place, and, for changes through ``.data`` that autograd does not count, a sample of each tensor taken at the
    boundary and compared with the copy. A change of a few single elements through ``.data`` is not found.
    """

    def __init__(self, captured: Captured, engine: Copier, afterwards: list[tuple[Key, torch.Tensor, Copy]]) -> None:
        self.captured = captured
        self._engine = engine
        self._late = afterwards
        self._versions = [(key, tensor, tensor._version) for key, tensor, _ in afterwards]
        self._samples = [_sample(*copy) for _, _, copy in afterwards]
        self._copied = threading.Event()
        self._lock = threading.Lock()
        self._settled = False
        self._error: BaseException | None = None
        if not afterwards:
            self._copied.set()
            self._settled = True
            return
        threading.Thread(target=self._copy, name="onward-capture", daemon=True).start()

    def settle(self) -> None:
        """Waits until the copy can no longer be disturbed. Called before ``optimizer.step``."""
        self._copied.wait()
        self._look_for_changes(last=True)
        self._engine.protect()

    def finish(self) -> Captured:
        """Waits for all bytes, and makes sure that they are of one step.

        Raises:
            SaveFailed: A tensor was changed by something else than ``optimizer.step`` while it was copied.
        """
        self._copied.wait()
        if self._error is None:
            self._engine.finish()
            self._look_for_changes(last=True)
        self._compare_samples()
        if isinstance(self._error, OnwardError):
            raise SaveFailed(
                f"step {self.captured.step}: {self._error.message}", next_step=self._error.next_step
            ) from self._error
        if self._error is not None:
            raise SaveFailed(f"step {self.captured.step}: the capture failed: {self._error}") from self._error
        return self.captured

    def _copy(self) -> None:
        try:
            self._engine.start([copy for _, _, copy in self._late])
        except BaseException as error:  # told by finish, in the thread that saves
            self._error = error
        finally:
            self._copied.set()

    def _look_for_changes(self, *, last: bool) -> None:
        """Compares the counts, until the step is let go on: after that, changes are the optimizer's."""
        with self._lock:
            if not self._settled:
                self._settled = last
                self._note([key for key, tensor, version in self._versions if tensor._version != version])

    def _compare_samples(self) -> None:
        changed = [
            key
            for (key, _, (_, target)), sample in zip(self._late, self._samples, strict=True)
            if sample is not None and not torch.equal(_few(target), sample)
        ]
        self._note(changed)

    def _note(self, changed: Sequence[Key]) -> None:
        if changed and self._error is None:
            more = f" and {len(changed) - 1} more were" if len(changed) > 1 else " was"
            self._error = SaveFailed(
                f"{changed[0]}{more} changed between the step boundary and optimizer.step, while being copied",
                next_step="set save.overlap = false: something else than optimizer.step changes parameters here",
            )


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """A few items of a contiguous tensor, spread over it."""
    return tensor.view(-1)[:: max(1, tensor.numel() // _SAMPLES)].clone()


def _sample(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """A few items, as the copy will have them; None on an accelerator, where reading them would stall."""
    plain = tensor.is_contiguous() and tensor.itemsize == target.itemsize and not (tensor.is_conj() or tensor.is_neg())
    return _few(tensor.view(target.dtype)) if tensor.device.type == "cpu" and plain else None


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
