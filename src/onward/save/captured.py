"""What a capture hands to the writer: plain bytes and records, nothing of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from onward.records import ComponentTag, Description, JsonTree, Layout
from onward.save.plan import Plan, PlannedFile


@dataclass(frozen=True)
class Captured:
    """The whole state of one rank at one step boundary, no longer connected to the live state.

    Attributes:
        step: Completed global optimizer steps.
        layout: All tensors of the global state.
        plan: Where each part of each stored tensor lies in staging memory, and in which file it belongs.
        state: Component name → typed tree.
        tags: One per component; all of one step.
        region: The tensor bytes of a planned file; good until the save has ended.
        started: When the capture began, ISO 8601.
        seconds: How long training stood still for it.
        epoch: The data epoch, if known.
        data_position: The data position, if known.
    """

    step: int
    layout: Layout
    plan: Plan
    state: dict[str, JsonTree]
    tags: tuple[ComponentTag, ...]
    region: Callable[[PlannedFile], memoryview]
    started: str
    seconds: float
    epoch: int | None = None
    data_position: JsonTree = None

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all stored tensors."""
        return self.plan.tensor_bytes


def staged(memory: memoryview) -> Callable[[PlannedFile], memoryview]:
    """The tensor bytes of files that lie in staging memory as their plan says."""
    return lambda file: memory[file.start : file.start + file.nbytes]


@dataclass(frozen=True)
class SaveContext:
    """What is said about a checkpoint beside its state.

    ``assets`` maps a plain file name to its bytes; ``parent`` is the sequence of the checkpoint this one's training
    started from or that was saved before it.
    """

    description: Description
    training_started: str
    birth_class: str = "periodic"
    reason: str = ""
    parent: int | None = None
    rank: int = 0
    world_size: int = 1
    assets: Mapping[str, bytes] = field(default_factory=dict)
