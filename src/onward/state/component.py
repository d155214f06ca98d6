"""What a registered part of the training state can do."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

Scope = Literal["global", "rank"]


@runtime_checkable
class Component(Protocol):
    """A named part of the state, as the journey sees it.

    ``state`` returns a tree of plain values and *live* tensors (references, not copies); the caller copies them
    before training goes on. ``check`` looks at a saved tree, whose tensors may be on the meta device, and lists
    what does not fit, without touching anything live. ``load`` applies a saved tree whose tensors are on the CPU
    and belong to nobody else, so it may keep them.

    ``scope`` is ``"global"`` for state that all ranks share (its tensors go to shard files) and ``"rank"`` for
    state that every rank has of its own, such as random state and data position.
    ``order`` decides the order of ``load``: lower first; random state is last (1000), so that no later set-up
    can draw from it.
    """

    name: str
    kind: str
    scope: Scope
    order: int

    def state(self) -> object:
        """The live state as a tree; tensors are references."""
        ...

    def counters(self) -> dict[str, int | float]:
        """The component's own idea of progress, such as a scheduler's ``last_epoch``."""
        ...

    def check(self, saved: object) -> list[str]:
        """Everything in ``saved`` that does not fit the live object; empty when it fits."""
        ...

    def load(self, saved: object) -> None:
        """Applies ``saved``; only called after every component's ``check`` came back empty."""
        ...
