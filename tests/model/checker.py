"""Breadth-first search over the states of a model: all of them, or the shortest way to a broken invariant."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class Result:
    """What a search found. `violation` is None where every reached state kept every invariant."""

    states: int
    depth: int
    exhausted: bool
    violation: str | None
    trace: tuple[str, ...]

    def story(self) -> str:
        """The trace as numbered lines, for a person."""
        lines = [f"{number:3}. {action}" for number, action in enumerate(self.trace, 1)]
        return "\n".join([f"{self.violation or 'no violation'} after {len(self.trace)} actions", *lines])


def explore(
    initial: S,
    successors: Callable[[S], Iterable[tuple[str, S]]],
    invariants: Mapping[str, Callable[[S], bool]],
    max_states: int,
) -> Result:
    """Visit states in the order of their distance from `initial` until one breaks an invariant or none is left.

    Breadth first, so the first violation found has the shortest possible trace. `exhausted` is True only if
    every reachable state was visited; a search cut off at `max_states` proves nothing about the rest.
    """
    checks = tuple(invariants.items())
    found: list[S] = [initial]
    seen: set[S] = {initial}
    parents = array("q", [-1])
    actions: list[str] = [""]

    def trace_to(state: int) -> tuple[str, ...]:
        steps = []
        while state > 0:
            steps.append(actions[state])
            state = parents[state]
        return tuple(reversed(steps))

    for name, holds in checks:
        if not holds(initial):
            return Result(1, 0, False, name, ())
    position = 0
    while position < len(found):
        for action, state in successors(found[position]):
            here = len(found)
            seen.add(state)  # one look-up, not two: hashing a state is what costs
            if len(seen) == here:
                continue
            found.append(state)
            parents.append(position)
            actions.append(action)
            for name, holds in checks:
                if not holds(state):
                    trace = trace_to(here)
                    return Result(here + 1, len(trace), False, name, trace)
        position += 1
        if len(found) >= max_states:
            return Result(len(found), len(trace_to(len(found) - 1)), False, None, ())
    return Result(len(found), len(trace_to(len(found) - 1)), True, None, ())
