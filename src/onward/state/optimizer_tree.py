"""What a saved optimizer looks like, and what can be said of it without the live one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
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
    if unknown := [name for group in saved["groups"] for name in group["params"] if name not in saved["shapes"]]:
        return f"the saved state has no shape for {listed(unknown)}"
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


def matched(
    live: list[Group], saved: list[Group], known: Mapping[str, Tensor]
) -> tuple[list[tuple[Group, Group]], list[str]]:
    """Each live group with the saved group that its hyper-parameters come from, and what stands against it.

    Groups are told apart by the parameters in them, never by their place.
    """
    origin = {known[name]: index for index, group in enumerate(saved) for name in group["params"] if name in known}
    empty = iter([index for index, group in enumerate(saved) if not group["params"]])
    pairs: list[tuple[Group, Group]] = []
    problems: list[str] = []
    for index, group in enumerate(live):
        sources = list(dict.fromkeys(origin[p] for p in group["params"] if p in origin))
        if not group["params"]:  # a group of no parameters still has fields; only its place can tell which it was
            sources = [number for number in (next(empty, None),) if number is not None]
            if not sources:
                problems.append(f"group {index} is empty, and the checkpoint has no empty group for it")
        if not sources:
            continue
        first, *others = sources
        pairs.append((group, saved[first]))
        problems += [
            f"group {index} joins the saved groups {first} and {other}, whose {field} differ ({a!r}, {b!r})"
            for other in others
            for field, a, b in differing(hyper(saved[first]), hyper(saved[other]))
        ]
    problems += [f"the saved group {number} is empty and has no empty live group" for number in empty]
    return pairs, problems


def hyper(group: Group) -> Group:
    """A group's fields without its parameters: names follow the live parameters, not the checkpoint."""
    return {field: value for field, value in group.items() if field not in ("params", "param_names")}


def differing(live: Group, saved: Group) -> list[Difference]:
    """The fields whose values differ; a field that one side lacks counts as None there."""
    fields = dict.fromkeys([*live, *saved])
    return [(f, live.get(f), saved.get(f)) for f in fields if not same(live.get(f), saved.get(f))]


def same(live: Any, saved: Any) -> bool:
    """Whether two values are equal, looking into containers and tensors; NaN equals NaN."""
    if isinstance(live, Tensor) and isinstance(saved, Tensor):
        if (live.dtype, live.shape) != (saved.dtype, saved.shape):
            return False
        # On the meta device there are no values yet; what differs then is found when they are there.
        return live.is_meta or saved.is_meta or torch.equal(live.cpu(), saved.cpu())
    if isinstance(live, Tensor | np.ndarray) or isinstance(saved, Tensor | np.ndarray):
        return type(live) is type(saved) and np.array_equal(live, saved)
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
