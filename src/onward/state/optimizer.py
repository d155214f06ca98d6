"""The optimizer, saved by parameter name and restored in place.

A parameter's position in the optimizer says nothing about which parameter it is: a rebuilt optimizer may list them
in another order or in other groups, and moments of equal shape would change places without an error. So everything
here is keyed by name. The optimizer is only read when saving: no helper of torch is called that could take a step
or create state that is not there.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from onward.errors import IncompatibleState, IncompleteState, UnsupportedState
from onward.state.component import Scope
from onward.state.optimizer_tree import (
    Difference,
    Group,
    SavedOptimizer,
    differing,
    half_states,
    hyper,
    listed,
    matched,
    parse,
    placed,
)

# Hyper-parameters that a scheduler moves, and the field that tells that one does.
_SCHEDULED = {
    "lr": ("initial_lr",),
    "betas": ("base_momentum", "max_momentum"),
    "momentum": ("base_momentum", "max_momentum"),
}


class OptimizerComponent:
    """An optimizer as a component.

    Args:
        name: The component's name.
        optimizer: Any object with ``state`` and ``param_groups`` as torch optimizers have them.
        named_parameters: Every parameter by its canonical name. A tied parameter may be listed under several
            names; it is saved under the first and found under each. A function is asked again when the optimizer
            holds a parameter that was not there before, such as that of a layer added on the way.
    """

    kind: str = "optimizer"
    scope: Scope = "global"
    order: int = 100

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        named_parameters: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self.name = name
        self.optimizer = optimizer
        self._ask = named_parameters if callable(named_parameters) else None
        self._named = named_parameters() if callable(named_parameters) else named_parameters

    def state(self) -> dict[str, object]:
        """The state by parameter name; tensors are the live ones.

        Raises:
            IncompleteState: A parameter has no name, is in no group, or has half a state.
            UnsupportedState: The class saves itself in a form that has no parameters.
        """
        names = self._names()
        values, extra, own = self._read(names)
        shapes = {name: tuple(parameter.shape) for parameter, name in names.items()}
        groups: list[Group] = [
            {**hyper(group), "params": [names[parameter] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        if problems := half_states(groups, values, shapes):
            raise IncompleteState(
                f"{self.name}: " + "; ".join(problems),
                next_step="mend or remove the state of the named parameters (`del optimizer.state[parameter]`)",
            )
        return {
            "class": _class_name(self.optimizer),
            "groups": groups,
            "state": values,
            # Absence is written down, so that a state lost on the way is not taken for one that never was.
            "stateless": [name for name in names.values() if name not in values],
            "shapes": shapes,
            "extra": extra,
            "own": own,
        }

    def counters(self) -> dict[str, int | float]:
        """``steps``: the highest step count of any parameter or group, where the optimizer counts."""
        holders: Iterable[Any] = [*self.optimizer.state.values(), *self.optimizer.param_groups]
        steps = [holder["step"] for holder in holders if isinstance(holder, Mapping) and "step" in holder]
        counted = [step.item() if isinstance(step, Tensor) else step for step in steps]
        numbers = [step for step in counted if isinstance(step, int | float)]
        return {"steps": int(max(numbers))} if numbers else {}

    def check(self, saved: object) -> list[str]:
        """Everything in ``saved`` that does not fit the live optimizer, by parameter name and by group."""
        tree = parse(saved)
        if isinstance(tree, str):
            return [f"{self.name}: {tree}"]
        problems = []
        if tree.class_name != (live := _class_name(self.optimizer)):
            problems.append(f"saved from {tree.class_name}, the live optimizer is {live}")
        live_names, known = self._names(), self._by_name()
        saved_names = [name for group in tree.groups for name in group["params"]]
        found = {known[name] for name in saved_names if name in known}
        if missing := [name for parameter, name in live_names.items() if parameter not in found]:
            problems.append(f"not in the checkpoint: {listed(missing)}")
        if unexpected := [name for name in saved_names if known.get(name) not in live_names]:
            problems.append(f"in the checkpoint but not in the live optimizer: {listed(unexpected)}")
        if len(found) < len({name for name in saved_names if name in known}):
            problems.append("parameters that were saved apart are tied to one now")
        if lost := [name for name in saved_names if name not in tree.state and name not in tree.stateless]:
            problems.append(f"state missing from the checkpoint: {listed(lost)}")
        if stray := [name for name in tree.state if name not in set(saved_names)]:
            problems.append(f"state of parameters that are in no saved group: {listed(stray)}")
        for name, shape in tree.shapes.items():
            if name in known and tuple(known[name].shape) != tuple(shape):
                problems.append(f"{name} was saved with shape {tuple(shape)}, it is {tuple(known[name].shape)} now")
        problems += half_states(tree.groups, tree.state, tree.shapes)
        problems += self._pairs(tree)[1]
        in_order = [id(known.get(name)) for name in saved_names] == [id(parameter) for parameter in live_names]
        if isinstance(self.optimizer, LBFGS) and not in_order:
            problems.append("LBFGS keeps one flat vector over all parameters, and their order has changed")
        return [f"{self.name}: {problem}" for problem in problems]

    def load(self, saved: object) -> None:
        """Applies ``saved`` in place: ``optimizer`` keeps its group objects, every moment keeps its own dtype.

        Raises:
            IncompatibleState: ``saved`` does not fit; the optimizer is untouched.
        """
        if problems := self.check(saved):
            raise IncompatibleState("; ".join(problems))
        tree = parse(saved)
        assert isinstance(tree, SavedOptimizer)
        pairs, _ = self._pairs(tree)
        if _overrides(self.optimizer, "load_state_dict"):
            self._load_own_way(tree, pairs)
        else:
            self._load_directly(tree, pairs)

    def differences(self, saved: object) -> list[Difference]:
        """The hyper-parameters that differ, as (field, live value, saved value); saved values win in ``load``.

        What a scheduler moves (the rate of a group with ``initial_lr``) is not compared, but where it began is.
        """
        tree = parse(saved)
        if isinstance(tree, str):
            raise IncompatibleState(f"{self.name}: {tree}")
        indexes = {id(group): index for index, group in enumerate(self.optimizer.param_groups)}
        found: list[Difference] = []
        for live, source in self._pairs(tree)[0]:
            for field, ours, theirs in differing(hyper(live), hyper(source)):
                if not any(marker in live and marker in source for marker in _SCHEDULED.get(field, ())):
                    found.append((f"groups[{indexes[id(live)]}].{field}", ours, theirs))
        return found

    # --- names ---------------------------------------------------------------------------------------------------

    def _names(self) -> dict[Tensor, str]:
        """The optimizer's parameters in its own order, each with its one name."""
        known = self._known()
        if self._ask is not None and any(p not in known for g in self.optimizer.param_groups for p in g["params"]):
            self._named = self._ask()
            known = self._known()
        names: dict[Tensor, str] = {}
        for index, group in enumerate(self.optimizer.param_groups):
            own = group.get("param_names", ())
            for position, parameter in enumerate(group["params"]):
                name = known.get(parameter, own[position] if position < len(own) else None)
                if name is None:
                    raise IncompleteState(
                        f"{self.name}: group {index} holds a parameter of shape {tuple(parameter.shape)} "
                        "that no registered model has",
                        next_step="register the model it belongs to, or build the optimizer from named_parameters()",
                    )
                names[parameter] = name
        if twice := [name for name, count in Counter(names.values()).items() if count > 1]:
            # Under one name, the moments of one of them would be lost.
            raise IncompleteState(f"{self.name}: several parameters go by the name {listed(twice)}")
        return names

    def _known(self) -> dict[Tensor, str]:
        known: dict[Tensor, str] = {}
        for canonical, parameter in self._named.items():
            known.setdefault(parameter, canonical)  # a tied parameter goes by its first name
        return known

    def _by_name(self) -> dict[str, Tensor]:
        return {**self._named, **{name: parameter for parameter, name in self._names().items()}}

    # --- reading -------------------------------------------------------------------------------------------------

    def _read(self, names: Mapping[Tensor, str]) -> tuple[dict[str, dict[Any, Any]], dict[Any, Any], dict[str, Any]]:
        """State by name, entries that belong to no parameter, and what a class adds in its own ``state_dict``."""
        entries: dict[Any, Any] = dict(self.optimizer.state)  # a copy: reading a defaultdict by key would add to it
        own: dict[str, Any] = {}
        if _overrides(self.optimizer, "state_dict"):
            saved = self.optimizer.state_dict()
            if not {"state", "param_groups"} <= saved.keys():
                raise UnsupportedState(
                    f"{self.name}: {_class_name(self.optimizer)} saves itself without 'state' and 'param_groups'",
                    next_step="register it as a component of your own, which keeps its state_dict as it is",
                )
            own = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            if len(numbers) != len(names):
                raise UnsupportedState(f"{self.name}: its state_dict has {len(numbers)} parameters of {len(names)}")
            by_number = dict(zip(numbers, names, strict=True))
            entries = {by_number.get(key, key): value for key, value in saved["state"].items()}
        values: dict[str, dict[Any, Any]] = {}
        extra: dict[Any, Any] = {}
        for key, value in entries.items():
            if not isinstance(key, Tensor):
                extra[key] = value
            elif not isinstance(value, Mapping):
                owner = names.get(key, "a parameter")
                raise UnsupportedState(f"{self.name}: the state of {owner} is a {_class_name(value)}, not a dict")
            elif key in names:
                values[names[key]] = dict(value)
            else:
                raise IncompleteState(
                    f"{self.name}: there is state for a parameter of shape {tuple(key.shape)} that is in no group",
                    next_step="add the parameter to a group, or delete its entry of optimizer.state",
                )
        return values, extra, own

    # --- applying ------------------------------------------------------------------------------------------------

    def _pairs(self, tree: SavedOptimizer) -> tuple[list[tuple[Group, Group]], list[str]]:
        return matched(self.optimizer.param_groups, tree.groups, self._by_name())

    def _load_directly(self, tree: SavedOptimizer, pairs: list[tuple[Group, Group]]) -> None:
        for group, source in pairs:
            for field, value in hyper(source).items():
                group[field] = _settled(group.get(field), value)
        state: dict[Any, Any] = self.optimizer.state
        state.clear()
        state.update(tree.extra)
        state.update(self._placed(tree, pairs))

    def _load_own_way(self, tree: SavedOptimizer, pairs: list[tuple[Group, Group]]) -> None:
        """Speaks to an overridden ``load_state_dict`` in its own terms: parameters numbered in the live order."""
        numbers = {parameter: number for number, parameter in enumerate(self._names())}
        groups = []
        for group, source in pairs:
            names = {"param_names": list(group["param_names"])} if "param_names" in group else {}
            groups.append({**hyper(source), **names, "params": [numbers[p] for p in group["params"]]})
        placed_state = self._placed(tree, pairs)
        state = {**{numbers[p]: values for p, values in placed_state.items()}, **tree.extra}
        before = list(self.optimizer.param_groups)
        self.optimizer.load_state_dict({**tree.own, "state": state, "param_groups": groups})
        after = self.optimizer.param_groups
        for index, (group, replacement) in enumerate(zip(before, after, strict=True)):
            if group is not replacement:  # torch's own makes new ones, and who held a group would look at the old one
                group.clear()
                group.update(replacement)
                after[index] = group
        for parameter, values in placed_state.items():
            live = self.optimizer.state.get(parameter, {})
            for key, value in values.items():
                # An override that hands on to torch's own gets float32 moments cast to the parameter's bfloat16.
                if isinstance(value, Tensor) and isinstance(live.get(key), Tensor) and live[key].dtype != value.dtype:
                    live[key] = value

    def _placed(self, tree: SavedOptimizer, pairs: list[tuple[Group, Group]]) -> dict[Tensor, dict[Any, Any]]:
        """The saved state by live parameter, each tensor where the optimizer expects it."""
        known = self._by_name()
        counts_on_device = {
            parameter: bool(source.get("capturable") or source.get("fused"))
            for group, source in pairs
            for parameter in group["params"]
        }
        return {
            known[name]: {
                # A step count on the device would make the optimizer wait for the device at every step.
                key: value if key == "step" and not counts_on_device[known[name]] else placed(value, known[name].device)
                for key, value in values.items()
            }
            for name, values in tree.state.items()
        }


def _settled(live: object, saved: object) -> object:
    """The saved value, written into the live tensor where it fits: a compiled step holds on to that tensor."""
    if (
        isinstance(live, Tensor)
        and isinstance(saved, Tensor)
        and live.dtype == saved.dtype
        and live.shape == saved.shape
    ):
        live.detach().copy_(saved)
        return live
    return copy.deepcopy(saved)  # two live groups may come from one saved group, and must not share its tensors


def _class_name(optimizer: object) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _overrides(optimizer: object, method: str) -> bool:
    return getattr(type(optimizer), method, None) is not getattr(Optimizer, method)
