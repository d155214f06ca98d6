"""The seam to accelerators: how many this process sees, and the random state of each."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

_KNOWN = ("cuda", "xpu", "mps")  # a ROCm device goes by the name "cuda"


class Accelerator(Protocol):
    """One kind of accelerator, as far as random state is concerned."""

    name: str

    def count(self) -> int:
        """How many devices this process sees."""
        ...

    def random_states(self) -> list[Tensor]:
        """The state of each device's default generator, in order, on the CPU."""
        ...

    def set_random_states(self, states: list[Tensor]) -> None:
        """Sets the state of each device's default generator; one state per device."""
        ...


class TorchAccelerator:
    """An accelerator through its torch module (``torch.cuda`` and those made after it)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._module: Any = torch.get_device_module(name)

    def count(self) -> int:
        return int(self._module.device_count())

    def random_states(self) -> list[Tensor]:
        return [self._module.get_rng_state(device) for device in self._devices()]

    def set_random_states(self, states: list[Tensor]) -> None:
        for device, state in zip(self._devices(), states, strict=True):
            self._module.set_rng_state(state, device)

    def _devices(self) -> list[torch.device]:
        return [torch.device(self.name, index) for index in range(self.count())]


def visible() -> list[Accelerator]:
    """Every kind of accelerator that this process can use, those of other vendors' plug-ins included."""
    current = torch.accelerator.current_accelerator(check_available=True)
    names = dict.fromkeys([*_KNOWN, *([current.type] if current is not None else [])])
    return [TorchAccelerator(name) for name in names if _is_available(name)]


def _is_available(name: str) -> bool:
    try:
        return bool(torch.get_device_module(name).is_available())
    except (AttributeError, RuntimeError):  # this build of torch has no such module
        return False
