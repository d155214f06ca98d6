"""What a saved optimizer looks like, and what can be said of it without the live one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]
"""A parameter group: hyper-parameters by field, and ``params``, the names (saved) or tensors (live)."""

Difference = tuple[str, object, object]
"""A field that differs, with its live and its saved value."""

_FIELDS = {"class", "groups", "state", "stateless", "shapes", "extra", "own"}
_MOST_LISTED = 12


@dataclass(frozen=True)
class SavedOptimizer:
    """The tree that ``OptimizerComponent.state`` returns, after it was read back."""

    class_name: str
    groups: list[Group]
    state: dict[str, dict[Any, Any]]
    stateless: frozenset[str]
    shapes: dict[str, tuple[int, ...]]
    extra: dict[Any, Any]
    own: dict[str, Any]


def parse(saved: object) -> SavedOptimizer | str:
    """Reads a saved tree; answers with a sentence where it is not the state of an optimizer."""
    if not isinstance(saved, Mapping) or not saved.keys() >= _FIELDS:
        absent = _FIELDS - saved.keys() if isinstance(saved, Mapping) else _FIELDS
        return f"the saved state is not that of an optimizer: it lacks {listed(sorted(absent))}"
    return SavedOptimizer(
        class_name=saved["class"],
        groups=saved["groups"],
        state=saved["state"],
        stateless=frozenset(saved["stateless"]),
        shapes=saved["shapes"],
        extra=saved["extra"],
        own=saved["own"],
    )


def half_states(
    groups: Iterable[Group], state: Mapping[str, Mapping[Any, Any]], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Names parameters that have some, but not all of the moments that others of their group have.

    Compared are parameters of one group and one number of dimensions, since factored optimizers keep other moments
    for a matrix than for a vector. Only a moment of the parameter's shape, or a scalar, counts as missing:
    quantising optimizers rightly keep tables beside the moments of large parameters alone.
    """
    problems = []
    for index, group in enumerate(groups):
        examples: dict[tuple[int, frozenset[Any]], str] = {}
        for name in group["params"]:
            if keys := frozenset(state.get(name, ())):
                examples.setdefault((len(shapes[name]), keys), name)
        for name in group["params"]:
            keys = frozenset(state.get(name, ()))
            for (dimensions, more), other in examples.items():
                if not keys or dimensions != len(shapes[name]) or not keys < more:
                    continue
                if lacking := [key for key in more - keys if _is_moment(state[other][key], shapes[other])]:
                    lacks = ", ".join(sorted(map(str, lacking)))
                    problems.append(f"{name} (group {index}) has half a state: it lacks {lacks}, which {other} has")
                    break
    return problems


def _is_moment(value: object, shape: tuple[int, ...]) -> bool:
    return not isinstance(value, Tensor) or value.ndim == 0 or tuple(value.shape) == tuple(shape)


def differing(live: Group, saved: Group) -> list[Difference]:
    """The fields whose values differ; a field that one side lacks counts as None there."""
    fields = dict.fromkeys([*live, *saved])
    return [(f, live.get(f), saved.get(f)) for f in fields if not same(live.get(f), saved.get(f))]


def same(live: Any, saved: Any) -> bool:
    """Whether two values are equal, looking into containers and tensors; NaN equals NaN."""
    if isinstance(live, Tensor) or isinstance(saved, Tensor):
        if isinstance(live, Tensor) and isinstance(saved, Tensor) and live.shape != saved.shape:
            return False
        return bool(torch.equal(torch.as_tensor(live).cpu().double(), torch.as_tensor(saved).cpu().double()))
    if isinstance(live, list | tuple) and isinstance(saved, list | tuple):
        return len(live) == len(saved) and all(map(same, live, saved))
    if isinstance(live, Mapping) and isinstance(saved, Mapping):
        return live.keys() == saved.keys() and all(same(live[key], saved[key]) for key in live)
    if isinstance(live, float) and isinstance(saved, float) and math.isnan(live) and math.isnan(saved):
        return True
    return bool(live == saved)


def placed(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in it on ``device``, each with the dtype it was saved in."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: placed(element, device) for key, element in value.items()}
    if type(value) in (list, tuple):
        return type(value)(placed(element, device) for element in value)
    return value


def listed(names: Iterable[str]) -> str:
    """Names for a message: all of them, or the first dozen and how many more."""
    every = list(names)
    more = len(every) - _MOST_LISTED
    return ", ".join(every[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
