"""What a capture hands to the writer: plain bytes and records, nothing of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onward.records import ComponentTag, Description, JsonTree, Key, Layout


@dataclass(frozen=True)
class StagedTensor:
    """One tensor's bytes in staging memory, C order, from ``start`` on."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Captured:
    """The whole state of one rank at one step boundary, no longer connected to the live state.

    Attributes:
        step: Completed global optimizer steps.
        layout: All tensors of the global state.
        state: Component name → typed tree.
        tags: One per component; all of one step.
        tensors: Where each stored tensor lies in ``memory``.
        memory: The staging buffer; belongs to the writer until the save has ended.
        started: When the capture began, ISO 8601.
        seconds: How long training stood still for it.
    """

    step: int
    layout: Layout
    state: dict[str, JsonTree]
    tags: tuple[ComponentTag, ...]
    tensors: tuple[StagedTensor, ...]
    memory: memoryview
    started: str
    seconds: float
    epoch: int | None = None
    data_position: JsonTree = None

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


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
