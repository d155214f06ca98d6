"""Models, and any other object or plain container, as components.

A model's tensors are written in place, bit for bit: whoever holds a parameter (the optimizer, a compiled graph) keeps
the one it has. Nothing is written before all of it has been checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
import xxhash
from torch import nn

from onward.errors import ConfigurationError, IncompatibleState, UnsupportedState
from onward.format.typedstate import TypedPath, readable
from onward.state import tensors as exact
from onward.state.component import Scope
from onward.state.names import EXTRA_STATE, canonical_names, places

_COUNTERS = ("last_epoch", "_step_count", "step", "global_step", "epoch", "n_averaged")


class ModelComponent:
    """An ``nn.Module``: parameters, persistent buffers and extra state, under canonical names.

    Args:
        name: The component's name.
        module: The model, wrapped or not.
    """

    kind = "model"
    scope: Scope = "global"
    order = 0

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module

    def state(self) -> dict[str, Any]:
        """Canonical name → the very parameter or buffer of the model, or extra state."""
        raw = self.module.state_dict(keep_vars=True)
        names = canonical_names(self.module, raw)
        own = {id(tensor): tensor for tensor in (*self.module.parameters(), *self.module.buffers())}
        extra = self._extra_states()
        for name, value in raw.items():
            if names[name] not in extra and id(value) not in own and not _is_view(value, own.values()):
                raise UnsupportedState(
                    f"{self._at(names[name])} is made by a state_dict hook and is no memory of the model, so it cannot "
                    "be restored in place",
                    next_step="register the model as an object with state_dict and load_state_dict (ObjectComponent)",
                )
        return {names[name]: value for name, value in raw.items()}

    def counters(self) -> dict[str, int | float]:
        """A model counts nothing itself."""
        return {}

    def check(self, saved: object) -> list[str]:
        """Missing and unexpected names, shapes, dtypes, and shared memory that would be given two values."""
        if not isinstance(saved, dict):
            return [f"{self.name}: the saved state is a {type(saved).__name__}, not the entries of a model"]
        live = self.state()
        if (live or saved) and not live.keys() & saved.keys():
            return [
                f"{self.name}: none of the {len(saved)} saved names ({_examples(saved)}) is among the {len(live)} of "
                f"the live model ({_examples(live)})"
            ]
        problems = [f"{self._at(name)} is not in the checkpoint" for name in live if name not in saved]
        problems += [f"{self._at(name)} is in the checkpoint, not in the model" for name in saved if name not in live]
        settable = self._extra_states()
        for name, value in live.items():
            if name in saved and (problem := self._misfit(name, value, saved[name], settable)):
                problems.append(problem)
        return problems or [
            f"{self._at(one)} and {self._at(other)} share memory in the model, but their saved values differ"
            for one, other in exact.find_conflicts(_shared_values(live, settable), saved)
        ]

    def load(self, saved: object) -> None:
        """Overwrites the live tensors with the saved bytes, then hands over the extra state.

        Raises:
            IncompatibleState: ``check`` found something, which it may not see before tensors have their data; then
                nothing live was changed.
        """
        if problems := self.check(saved):
            raise IncompatibleState("; ".join(problems))
        assert isinstance(saved, dict)
        settable = self._extra_states()
        live = _shared_values(self.state(), settable)
        ties = exact.find_ties(live)
        with torch.no_grad():
            for name, tensor in live.items():
                if exact.overlaps_itself(tensor):
                    # One item seen many times, as in an expanded buffer, cannot hold many values: memory of its own.
                    owner = ties.get(name)
                    tensor.data = live[owner].data if owner is not None else saved[name].to(tensor.device)
                elif name not in ties:
                    exact.write_bytes(tensor, saved[name])
        for name, module in settable.items():
            if module is not None:
                module.set_extra_state(saved[name])

    def untied(self, groups: Iterable[Iterable[str]]) -> list[str]:
        """Which groups of names that are meant to be one tensor are not, in words.

        Raises:
            ConfigurationError: A name is not one of the model's.
        """
        live = {name: value for name, value in self.state().items() if isinstance(value, torch.Tensor)}
        said: list[str] = []
        for group in map(tuple, groups):
            if missing := [name for name in group if name not in live]:
                raise ConfigurationError(
                    f"{', '.join(missing)} of a declared tie is not in the model", next_step="mend describe(ties=...)"
                )
            ties = exact.find_ties({name: live[name] for name in group})
            if any(name not in ties for name in group[1:]):
                said.append(f"{', '.join(group)} are declared to be one tensor, but do not share memory")
        return said

    def _at(self, name: str) -> str:
        return readable((self.name, name))

    def _extra_states(self) -> dict[str, nn.Module | None]:
        """Canonical name → the module that takes that extra state back; None if it can only give it."""
        return {
            place.canonical + EXTRA_STATE: (
                place.module if type(place.module).set_extra_state is not nn.Module.set_extra_state else None
            )
            for place in places(self.module)
            if type(place.module).get_extra_state is not nn.Module.get_extra_state
        }

    def _misfit(self, name: str, live: object, saved: object, settable: Mapping[str, nn.Module | None]) -> str | None:
        if name in settable:
            if settable[name] is None:
                return f"{self._at(name)} was saved by get_extra_state, but the module has no set_extra_state"
            return None
        if isinstance(live, torch.Tensor):
            try:
                exact.require_supported((self.name, name), live)
            except UnsupportedState as error:
                return error.message
        return _difference((self.name, name), live, saved)


class ObjectComponent:
    """Anything with ``state_dict`` and ``load_state_dict``, or a dict or list that is updated in place.

    What was saved is loaded whole: a dict or list gets exactly the saved keys, elements and types, also where it
    has others now. Only tensors of equal dtype and shape, and dicts and lists inside, stay the same objects.

    Args:
        name: The component's name.
        target: The object, or the dict or list itself.
        kind: What it is, for the manifest.
        scope: ``"global"`` if all ranks share it, ``"rank"`` if every rank has its own.
        order: When it is loaded; see ``Component``.
        strict: Refuse to load where structure, types, dtypes or shapes differ from those the target has now.
    """

    def __init__(
        self,
        name: str,
        target: object,
        *,
        kind: str = "object",
        scope: Scope = "global",
        order: int = 300,
        strict: bool = False,
    ) -> None:
        self.name = name
        self.kind = kind
        self.scope: Scope = scope
        self.order = order
        self._target: Any = target
        self._strict = strict
        self._by_value = not hasattr(target, "state_dict")
        whole = callable(getattr(target, "state_dict", None)) and callable(getattr(target, "load_state_dict", None))
        if not whole and not (self._by_value and isinstance(target, MutableMapping | list)):
            raise ConfigurationError(
                f"{name} ({type(target).__qualname__}) cannot be restored: it has no state_dict and load_state_dict",
                next_step="give it both methods, or pass its state as a dict that the program reads back",
            )

    def state(self) -> object:
        """The object's ``state_dict()``, or the container itself."""
        return self._target if self._by_value else self._target.state_dict()

    def counters(self) -> dict[str, int | float]:
        """The usual counters that the object has as plain numbers, such as ``last_epoch`` of a scheduler."""
        lookup = self._target if isinstance(self._target, Mapping) else None
        found = {
            name: lookup.get(name) if lookup is not None else getattr(self._target, name, None) for name in _COUNTERS
        }
        return {name: value for name, value in found.items() if type(value) is int or type(value) is float}

    def check(self, saved: object) -> list[str]:
        """Whether a dict or list was saved where one is now; with ``strict``, every difference in structure."""
        if self._strict:
            return _differences((self.name,), self.state(), saved)
        if self._by_value and not isinstance(saved, list if isinstance(self._target, list) else dict):
            return [f"{self.name}: saved a {type(saved).__name__}, live a {type(self._target).__name__}"]
        return []

    def load(self, saved: object) -> None:
        """Hands the saved tree over whole; it belongs to the object from now on."""
        if not self._by_value:
            self._target.load_state_dict(saved)
            return
        if problems := self.check(saved):
            raise IncompatibleState("; ".join(problems))
        _refill(self._target, saved)


def digest_of(tensor: torch.Tensor) -> str:
    """XXH3-128, as hex, of the exact bytes of a tensor in C order."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        packed = exact.empty(exact.dtype_name(tensor.dtype), tuple(tensor.shape))
        exact.copy_into(tensor, exact.as_bytes(packed))
        tensor = packed
    return xxhash.xxh3_128_hexdigest(exact.as_bytes(tensor))


def verify_live(module: nn.Module, digests: Mapping[str, str]) -> list[str]:
    """What differs between a live model and the digests of its tensors by canonical name; empty if nothing does."""
    state = ModelComponent("model", module).state()
    live = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    problems = [f"{name!r} is not in the model" for name in digests if name not in live]
    problems += [f"{name!r} has no digest" for name in live if name not in digests]
    problems += [
        f"{name!r} has other bytes" for name in live if name in digests and digest_of(live[name]) != digests[name]
    ]
    return problems or ([] if live else ["the model has no tensors"])


def _shared_values(live: Mapping[str, Any], settable: Mapping[str, object]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in live.items() if name not in settable and isinstance(value, torch.Tensor)}


def _is_view(value: object, own: Iterable[torch.Tensor]) -> bool:
    """Whether what is written into ``value``, made by a ``state_dict`` hook, reaches one of the model's tensors."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or exact.overlaps_itself(value):
        return False
    plain = (tensor for tensor in own if tensor.layout is torch.strided and not tensor.is_meta)
    return value.untyped_storage().data_ptr() in {tensor.untyped_storage().data_ptr() for tensor in plain}


def _examples(names: Mapping[str, object]) -> str:
    return ", ".join(repr(name) for name in list(names)[:3]) or "none"


def _difference(path: TypedPath, live: object, saved: object) -> str | None:
    """How two values that are no containers differ in type, dtype or shape; says both."""
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        one, other = f"{saved.dtype} {tuple(saved.shape)}", f"{live.dtype} {tuple(live.shape)}"
    else:
        one, other = type(saved).__name__, type(live).__name__
    return (
        None
        if one == other
        else f"{readable(path)}: saved {one.removeprefix('torch.')}, live {other.removeprefix('torch.')}"
    )


def _differences(path: TypedPath, live: object, saved: object) -> list[str]:
    if isinstance(live, dict) and type(live) is type(saved):
        assert isinstance(saved, dict)
        problems = [f"{readable((*path, key))} is not in the checkpoint" for key in live if key not in saved]
        problems += [f"{readable((*path, key))} is in the checkpoint, not live" for key in saved if key not in live]
        for key in live:
            if key in saved:
                problems += _differences((*path, key), live[key], saved[key])
        return problems
    if isinstance(live, list | tuple) and type(live) is type(saved):
        assert isinstance(saved, list | tuple)
        if len(live) != len(saved):
            return [f"{readable(path)}: saved {len(saved)} elements, live {len(live)}"]
        return [
            problem
            for index, (one, other) in enumerate(zip(live, saved, strict=True))
            for problem in _differences((*path, index), one, other)
        ]
    difference = _difference(path, live, saved)
    return [difference] if difference else []


def _refill(live: Any, saved: Any) -> None:
    """Makes a container equal to the saved one, keeping the objects inside that others may hold."""
    if isinstance(live, list):
        live[:] = [_kept(live[index] if index < len(live) else None, value) for index, value in enumerate(saved)]
        return
    entries = {key: _kept(live.get(key), value) for key, value in saved.items()}
    live.clear()
    for key, value in entries.items():
        live[key] = value


def _kept(live: Any, saved: Any) -> Any:
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        if live.dtype == saved.dtype and live.shape == saved.shape and not exact.overlaps_itself(live):
            with torch.no_grad():
                exact.write_bytes(live, saved)
            return live
        return saved.to(live.device)
    if type(live) is type(saved) and isinstance(live, dict | list):
        _refill(live, saved)
        return live
    return saved
