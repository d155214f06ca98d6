"""Learning rate schedulers and gradient scalers.

A scheduler's own ``state_dict`` mixes two things: how far it has come, and the shape of the schedule. The first is
restored; a difference in the second means that somebody changed the plan, and torch would let the checkpoint
override it without a word. Both are therefore kept apart here, and differences are reported for a policy to decide.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch

from onward.errors import IncompatibleState, MidStep, UnsupportedState, UsageError
from onward.state.component import Scope
from onward.state.optimizer_tree import Difference, same

_PROGRESS = frozenset(
    {
        *("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "verbose"),
        *("best", "num_bad_epochs", "cooldown_counter"),  # ReduceLROnPlateau
        *("T_cur", "T_i"),  # CosineAnnealingWarmRestarts
    }
)
_PLAIN = (bool, int, float, str, types.NoneType)


class Stateful(Protocol):
    """Anything that can be saved the way torch's own objects are."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


class SchedulerComponent:
    """A learning rate scheduler as a component; restored after the optimizer whose rate it moves.

    Create it together with the scheduler: a field that has changed since then is progress, one that has not is part
    of the schedule's shape. (For torch's own schedulers the fields of progress are known in any case.)
    """

    kind: str = "scheduler"
    scope: Scope = "global"
    order: int = 200

    def __init__(self, name: str, scheduler: Stateful) -> None:
        self.name = name
        self._scheduler = scheduler
        self._shape_at_first = {field: self._copied(field, value) for field, value in _fields(scheduler).items()}

    def state(self) -> dict[str, object]:
        """The scheduler's own state, its classes, and the fields that fix the schedule's shape."""
        return {
            "class": _classes(self._scheduler),
            "state": self._scheduler.state_dict(),
            "shape": {
                field: value
                for field, value in _fields(self._scheduler).items()
                if field in self._shape_at_first and same(value, self._shape_at_first[field])
            },
        }

    def counters(self) -> dict[str, int | float]:
        """``last_epoch`` and ``_step_count``, where the scheduler has them."""
        found = {field: getattr(self._scheduler, field, None) for field in ("last_epoch", "_step_count")}
        return {field: value for field, value in found.items() if isinstance(value, int | float)}

    def check(self, saved: object) -> list[str]:
        """What makes the saved state unusable; a changed schedule is a matter of ``static_differences``."""
        if not isinstance(saved, Mapping) or not {"class", "state", "shape"} <= saved.keys():
            return [f"{self.name}: the saved state is not that of a scheduler"]
        if saved["class"] != (live := _classes(self._scheduler)):
            return [f"{self.name}: saved from {saved['class']}, the live scheduler is {live}"]
        problems = []
        for field, value in _fields(self._scheduler).items():
            if field.rpartition(".")[2] in ("base_lrs", "min_lrs") and len(saved["shape"].get(field, value)) != len(
                value
            ):
                problems.append(
                    f"{self.name}: {field} was saved for {len(saved['shape'][field])} parameter groups, "
                    f"the optimizer has {len(value)} now"
                )
        return problems

    def static_differences(self, saved: object) -> list[Difference]:
        """The fields in which the live schedule has another shape than the saved one: (field, live, saved).

        ``load`` takes the saved value of each, unless told to keep the live one. What a lambda computes is compared
        as far as it can be seen: its name, and the plain values that it contains, closes over, names or is bound to.
        """
        if problems := self.check(saved):
            raise IncompatibleState("; ".join(problems))
        assert isinstance(saved, Mapping)
        live = _fields(self._scheduler)
        return [
            (field, live.get(field), value)
            for field, value in saved["shape"].items()
            if not same(live.get(field), value)
        ]

    def load(self, saved: object, *, keep: Collection[str] = ()) -> None:
        """Applies ``saved``; the fields named in ``keep`` (of ``static_differences``) stay as they are live."""
        if problems := self.check(saved):
            raise IncompatibleState("; ".join(problems))
        assert isinstance(saved, Mapping)
        live = _fields(self._scheduler)
        if unknown := sorted(set(keep) - live.keys() - saved["shape"].keys()):
            raise UsageError(f"{self.name}: no field {', '.join(unknown)} to keep")
        kept = {
            field: (owner, name, getattr(owner, name))
            for field in keep
            for owner, name in _owner(self._scheduler, field)
        }
        self._scheduler.load_state_dict(dict(saved["state"]))  # a copy: CyclicLR takes entries out of what it is given
        for owner, name, value in kept.values():
            setattr(owner, name, value)
        self._shape_at_first.update({field: value for field, value in saved["shape"].items() if field not in keep})

    def _copied(self, field: str, value: object) -> object:
        try:
            return copy.deepcopy(value)
        except Exception as error:  # whatever an object that refuses to be copied may raise
            raise UnsupportedState(f"{self.name}: the scheduler's field {field} cannot be copied: {error}") from error


def _children(scheduler: object) -> list[Any]:
    """The schedulers inside a SequentialLR or ChainedScheduler."""
    return list(getattr(scheduler, "_schedulers", ()))


def _classes(scheduler: object) -> str:
    name = f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"
    inside = ", ".join(map(_classes, _children(scheduler)))
    return f"{name}[{inside}]" if inside else name


def _fields(scheduler: Any) -> dict[str, Any]:
    """Every field that may be part of the schedule's shape, by its path: ``T_max``, ``_schedulers.0.total_iters``."""
    hidden = _PROGRESS | {"_schedulers", "lr_lambdas", "_scale_fn_custom"}
    fields: dict[str, Any] = {key: value for key, value in scheduler.state_dict().items() if key not in hidden}
    functions = {f"lr_lambdas.{index}": each for index, each in enumerate(getattr(scheduler, "lr_lambdas", ()))}
    if (custom := getattr(scheduler, "_scale_fn_custom", None)) is not None:
        functions["_scale_fn_custom"] = custom
    for path, function in functions.items():
        fields.update({f"{path}.{key}": value for key, value in _seen_of(function).items()})
    for index, child in enumerate(_children(scheduler)):
        fields.update({f"_schedulers.{index}.{field}": value for field, value in _fields(child).items()})
    return fields


def _owner(scheduler: Any, field: str) -> list[tuple[Any, str]]:
    """The object that has the field and its name there; none for what is seen of a function, which is never loaded."""
    *path, name = field.split(".")
    owner = scheduler
    for part in path:
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part, None)
    return [(owner, name)] if name in getattr(owner, "__dict__", {}) else []


def _seen_of(function: Any) -> dict[str, Any]:
    """What can be seen of a function without calling it."""
    if isinstance(function, functools.partial):
        return {
            **_seen_of(function.func),
            "args": [_plain(value) for value in function.args],
            "keywords": {key: _plain(value) for key, value in function.keywords.items()},
        }
    if isinstance(function, types.FunctionType):
        used = inspect.getclosurevars(function)
        names = {**used.globals, **used.nonlocals}
        return {
            "function": function.__qualname__,
            "names": {key: _plain(value) for key, value in names.items() if not isinstance(value, types.ModuleType)},
            "defaults": [_plain(value) for value in function.__defaults__ or ()],
            # Small integers are left out: newer Pythons keep them in the bytecode, older ones among the constants.
            "constants": [c for c in function.__code__.co_consts if type(c) is float or (type(c) is int and c > 255)],
        }
    return {"function": type(function).__qualname__, **{key: _plain(value) for key, value in vars(function).items()}}


def _plain(value: object) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return getattr(value, "__qualname__", type(value).__qualname__)


class ScalerComponent:
    """A gradient scaler (``torch.amp.GradScaler``) as a component; a disabled one is saved as disabled."""

    kind: str = "scaler"
    scope: Scope = "global"
    order: int = 250

    def __init__(self, name: str, scaler: torch.amp.GradScaler) -> None:
        self.name = name
        self._scaler = scaler

    def state(self) -> dict[str, object]:
        """Scale and growth tracker.

        Raises:
            MidStep: ``scaler.update()`` has not been called yet: what was found in this step's gradients is not in
                the state, and a resumed run would take the step that this one skips.
        """
        stages = getattr(self._scaler, "_per_optimizer_states", {}).values()
        if any(entry["stage"].name != "READY" for entry in stages):
            raise MidStep(
                f"{self.name}: gradients were unscaled, but `scaler.update()` has not been called yet",
                next_step="save after `scaler.update()`",
            )
        return {"enabled": self._scaler.is_enabled(), "state": self._scaler.state_dict()}

    def counters(self) -> dict[str, int | float]:
        """``growth_tracker``: steps in a row that were not skipped."""
        state = self._scaler.state_dict()
        return {"growth_tracker": state["_growth_tracker"]} if "_growth_tracker" in state else {}

    def check(self, saved: object) -> list[str]:
        """Whether ``saved`` is a scaler's state, of one that was enabled as the live one is."""
        if not isinstance(saved, Mapping) or not {"enabled", "state"} <= saved.keys():
            return [f"{self.name}: the saved state is not that of a gradient scaler"]
        live = self._scaler.is_enabled()
        if saved["enabled"] != live:
            word = {True: "enabled", False: "disabled"}
            return [f"{self.name}: the scaler was {word[saved['enabled']]} when saved, it is {word[live]} now"]
        lacking = sorted(self._scaler.state_dict().keys() - saved["state"].keys())
        return [f"{self.name}: the saved scaler lacks {', '.join(lacking)}"] if lacking else []

    def load(self, saved: object) -> None:
        """Applies ``saved``; growth and backoff factors come from the checkpoint too, as in torch."""
        if problems := self.check(saved):
            raise IncompatibleState("; ".join(problems))
        assert isinstance(saved, Mapping)
        self._scaler.load_state_dict(saved["state"])
