"""Names of a model's tensors that do not depend on how the model is wrapped.

``torch.compile``, DDP, FSDP and activation checkpointing each put a module around a module, and its attribute into
the middle of every name below. A wrapper is recognised by its class at that very place, never by the text of a name:
a model may have a real child called ``module``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from onward.errors import UnsupportedState

EXTRA_STATE = "_extra_state"
"""The last part of the name under which torch keeps what a module's ``get_extra_state`` returns."""


class _Wrapper(NamedTuple):
    """Where a wrapper class is defined, the attribute it adds, whether torch itself takes it out of some names."""

    module: str
    name: str
    attribute: str
    elided: bool


_WRAPPERS = (
    _Wrapper("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod", False),
    _Wrapper("torch.nn.parallel", "DistributedDataParallel", "module", False),
    _Wrapper("torch.nn.parallel", "DataParallel", "module", False),
    _Wrapper(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
        True,
    ),
    _Wrapper("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module", True),
)


class Place(NamedTuple):
    """A module where it stands: all raw prefixes torch may use for it, and its canonical prefix."""

    raw: tuple[str, ...]
    canonical: str
    module: nn.Module


def places(module: nn.Module) -> Iterator[Place]:
    """All modules below and including ``module``, at each place where they stand."""
    yield from _walk(Place(("",), "", module), _known_wrappers())


def canonical_names(module: nn.Module, others: Iterable[str] = ()) -> dict[str, str]:
    """Raw name → canonical name, of every parameter, buffer and extra state.

    A raw name is one that ``state_dict()``, ``named_parameters()`` or ``named_buffers()`` of the wrapped model may
    show; these differ, as some wrappers take themselves out of some of them.

    Args:
        module: The model, wrapped or not.
        others: Further raw names, such as what a hook adds to ``state_dict()``; they keep the part of the name that
            no module stands for.

    Raises:
        UnsupportedState: Two different entries would have one canonical name.
    """
    names: dict[str, str] = {}
    owners: dict[str, tuple[int, str]] = {}
    prefixes: dict[str, str] = {}
    for raw_prefixes, prefix, here in places(module):
        prefixes.update(dict.fromkeys(raw_prefixes, prefix))
        for entry in _entries(here):
            canonical = prefix + entry
            if owners.setdefault(canonical, (id(here), entry)) != (id(here), entry):
                raise _collision(canonical)
            for raw in raw_prefixes:
                if names.setdefault(raw + entry, canonical) != canonical:
                    raise _collision(raw + entry)
    for raw in others:
        if raw in names:
            continue
        dots = (at for at, character in enumerate(raw, 1) if character == ".")
        cut = max(at for at in (0, *dots) if raw[:at] in prefixes)  # 0 always is: the prefix of the model itself
        canonical = prefixes[raw[:cut]] + raw[cut:]
        if canonical in owners:
            raise _collision(canonical)
        owners[canonical] = (0, raw)
        names[raw] = canonical
    return names


def _entries(module: nn.Module) -> Iterator[str]:
    yield from (name for name, value in module._parameters.items() if value is not None)
    yield from (name for name, value in module._buffers.items() if value is not None)
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield EXTRA_STATE


def _known_wrappers() -> list[tuple[type, _Wrapper]]:
    # Looked up, not imported: an instance exists only if its module was imported, and some of them are slow to import.
    return [
        (getattr(module, wrapper.name), wrapper)
        for wrapper in _WRAPPERS
        if (module := sys.modules.get(wrapper.module)) is not None and hasattr(module, wrapper.name)
    ]


def _walk(place: Place, wrappers: list[tuple[type, _Wrapper]]) -> Iterator[Place]:
    yield place
    wrapper = next((known for kind, known in wrappers if isinstance(place.module, kind)), None)
    for name, child in place.module._modules.items():
        if child is None:
            continue
        raw = tuple(f"{prefix}{name}." for prefix in place.raw)
        canonical = f"{place.canonical}{name}."
        if wrapper is not None and name == wrapper.attribute:
            raw, canonical = (*raw, *place.raw) if wrapper.elided else raw, place.canonical
        yield from _walk(Place(raw, canonical, child), wrappers)


def _collision(name: str) -> UnsupportedState:
    return UnsupportedState(
        f"two entries of the model would both be called {name!r} once the wrappers are taken out of their names",
        next_step="rename one of them, or register the wrapped modules as components of their own",
    )
