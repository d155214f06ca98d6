"""Which tensors may be copied after the step boundary, and what makes ``optimizer.step`` wait for the copy.

Only what nothing but ``optimizer.step`` changes: the parameters that an optimizer holds, and its moments. Buffers,
running statistics, scales, router state and averaged weights change in forward or between steps, and are copied at
the boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from onward.state.component import Component
from onward.state.optimizer import OptimizerComponent


def optimizers(components: Sequence[Component]) -> list[torch.optim.Optimizer]:
    """The registered optimizers."""
    return [component.optimizer for component in components if isinstance(component, OptimizerComponent)]


def problem(components: Sequence[Component]) -> str | None:
    """Why the copy must not overlap with training here; None when it may."""
    found = optimizers(components)
    if not found:
        return "no optimizer is registered, so nothing says when parameters change"
    for optimizer in found:
        name = type(optimizer).__name__
        if not callable(getattr(optimizer, "register_step_pre_hook", None)):
            return f"{name} has no step hooks, so its step could not wait for the copy"
        for parameter in _parameters(optimizer):
            hooks = ("_post_accumulate_grad_hooks", "_in_backward_optimizers")  # the user's own way, and torch's
            if any(getattr(parameter, hook, None) for hook in hooks):
                return f"{name} steps inside the backward pass (a parameter has a hook on its gradient)"
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor) and value.dim() and value.device != parameter.device:
                    return f"{name} keeps its state on {value.device} while parameters are on {parameter.device}"
    return None


def held_by(components: Sequence[Component]) -> Callable[[torch.Tensor], bool]:
    """Tells the tensors that an optimizer holds, as of now, from all others."""
    held: dict[int, int] = {}
    for optimizer in optimizers(components):
        for tensor in _tensors(optimizer):
            held[tensor.data_ptr()] = max(held.get(tensor.data_ptr(), 0), tensor.nbytes)
    held.pop(0, None)
    # By size too: a buffer whose first part is a parameter begins where that parameter begins.
    return lambda tensor: 0 < tensor.nbytes <= held.get(tensor.data_ptr(), 0)


def before_step(components: Sequence[Component], wait: Callable[[], None]) -> list[Any]:
    """Makes every optimizer's ``step`` call ``wait`` first; returns the handles that undo it."""
    return [optimizer.register_step_pre_hook(lambda *_: wait()) for optimizer in optimizers(components)]


def after_step(components: Sequence[Component], note: Callable[[], None]) -> list[Any]:
    """Makes every optimizer that can tell call ``note`` after its ``step``; returns the handles that undo it."""
    return [
        optimizer.register_step_post_hook(lambda *_: note())
        for optimizer in optimizers(components)
        if callable(getattr(optimizer, "register_step_post_hook", None))
    ]


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    yield from _parameters(optimizer)
    for state in optimizer.state.values():
        if isinstance(state, dict):
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    yield value
                elif isinstance(value, list | tuple):
                    yield from (each for each in value if isinstance(each, torch.Tensor))
