"""From the user's objects to components: which adapter fits which object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from onward.errors import ConfigurationError
from onward.format.names import component_name
from onward.state.component import Component
from onward.state.data import DataComponent
from onward.state.model import ModelComponent, ObjectComponent
from onward.state.names import canonical_names
from onward.state.optimizer import OptimizerComponent
from onward.state.rng import RandomComponent
from onward.state.scheduler import ScalerComponent, SchedulerComponent

RESERVED = frozenset({"rng"})


def register(
    *,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    generators: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
) -> list[Component]:
    """The components of a run; random state is always one of them.

    Args:
        model: Its parameters name the optimizer's state.
        optimizer: Any ``torch.optim.Optimizer``.
        scheduler: Anything with ``state_dict`` and ``load_state_dict``.
        scaler: A ``torch.amp.GradScaler``.
        data: A loader that knows its position.
        generators: Random generators of the program's own, by name.
        others: The user's own, by name: modules, optimizers, or anything with ``state_dict``/``load_state_dict``.

    Raises:
        ConfigurationError: An object cannot be a component, or a name is taken.
    """
    others = dict(others or {})
    for name in others:
        component_name(name)
        if name in RESERVED:
            raise ConfigurationError(f"the component name {name!r} is taken", next_step="choose another name")
    modules = {"model": model} if model is not None else {}
    modules.update({name: each for name, each in others.items() if isinstance(each, torch.nn.Module)})

    def parameters() -> Mapping[str, torch.Tensor]:
        return _parameters(modules)

    components: list[Component] = [ModelComponent(name, module) for name, module in modules.items()]
    if optimizer is not None:
        components.append(OptimizerComponent("optimizer", optimizer, parameters))
    if scheduler is not None:
        components.append(SchedulerComponent("scheduler", scheduler))
    if scaler is not None:
        components.append(ScalerComponent("scaler", scaler))
    for name, each in others.items():
        if name not in modules:
            components.append(_adapted(name, each, parameters))
    if data is not None:
        components.append(DataComponent("data", data))
    components.append(RandomComponent(generators))
    return components


def _adapted(name: str, each: Any, parameters: Callable[[], Mapping[str, torch.Tensor]]) -> Component:
    if isinstance(each, torch.optim.Optimizer):
        return OptimizerComponent(name, each, parameters)
    if isinstance(each, torch.optim.lr_scheduler.LRScheduler):
        return SchedulerComponent(name, each)
    if isinstance(each, torch.amp.GradScaler):
        return ScalerComponent(name, each)
    return ObjectComponent(name, each)


def _parameters(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Parameters by canonical name; those of a second module carry the module's name and a colon in front.

    A colon, because a part of the model may be called like the second module: ``ema.weight`` is the model's own.
    """
    found: dict[str, torch.nn.Parameter] = {}
    for name, module in modules.items():
        canonical = canonical_names(module)
        prefix = "" if name == "model" else f"{name}:"
        for raw, parameter in module.named_parameters():
            found[prefix + canonical[raw]] = parameter
    return found
