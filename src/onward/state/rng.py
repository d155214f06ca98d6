"""Random state: Python, numpy, torch on the CPU and on every accelerator, and generators registered by name.

Everything is plain data and byte tensors; nothing is pickled. It is restored last of all components, because setting
up the others may draw random numbers (a loader seeds its workers, a module initialises itself).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onward.errors import IncompatibleState, UnsupportedState
from onward.state.accelerators import Accelerator, visible
from onward.state.component import Scope

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""A source of random numbers that a program made for itself."""


# --- the host's global generators ----------------------------------------------------------------------------------


def host_state() -> dict[str, Any]:
    """The state of the three global generators of the host: Python, numpy (legacy), torch (CPU)."""
    return {
        "python": random.getstate(),
        # The dict form, for it knows every bit generator that numpy.random.set_bit_generator may have put there.
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }


def set_host_state(state: Mapping[str, Any]) -> None:
    """Sets what ``host_state`` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def seed_host(seed: int) -> None:
    """Seeds the three global generators of the host, and no accelerator: ``torch.manual_seed`` would seed those too."""
    # Each from a seed of its own: Python and numpy seed the same algorithm alike, and would draw the same numbers.
    random.seed(seed_from("python", seed))
    np.random.seed(words_of(seed_from("numpy", seed)))
    torch.default_generator.manual_seed(seed_from("torch", seed))


@contextmanager
def host_state_kept() -> Iterator[None]:
    """Leaves the host's global generators as they were, whatever is drawn inside."""
    before = host_state()
    try:
        yield
    finally:
        set_host_state(before)


def seed_from(*parts: int | str) -> int:
    """A seed of 63 bits from the parts; near parts give unrelated seeds, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def words_of(seed: int) -> list[int]:
    """A seed as numpy's legacy generator takes one of more than 32 bits."""
    return [seed & 0xFFFFFFFF, seed >> 32]


def derive(saved: object, rank: int, world: int) -> int:
    """The seed of a rank that has no random state of its own in a checkpoint.

    The rule for another number of ranks: a rank that was there when the checkpoint was saved gets its own state back.
    Every other rank seeds all its generators from ``derive(state of rank 0, rank, world size now)`` and says so in
    a warning. The seed is distinct for each rank and the same at each try; a copy of another rank's state would
    give both ranks the same dropout masks and augmentations.

    Args:
        saved: The saved random state of rank 0, as ``RandomComponent.state`` returned it.
        rank: The rank that needs a seed.
        world: How many ranks there are now.
    """
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, saved)
    _feed(digest, ("derived", rank, world))
    return int.from_bytes(digest.digest(), "big") >> 1


def _feed(digest: hashlib.blake2b, value: Any) -> None:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _feed(digest, key)
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}".encode())
        for element in value:
            _feed(digest, element)
    elif isinstance(value, Tensor):
        _feed(digest, value.cpu().numpy())
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype.str}{value.shape}".encode() + value.tobytes())
    else:
        digest.update(f"{type(value).__name__}:{value!r};".encode())


# --- the component -------------------------------------------------------------------------------------------------


class RandomComponent:
    """All random state of one rank.

    Args:
        generators: Generators of the program's own, by name.
        accelerators: The kinds of accelerator to include; by default all that this process can use.
    """

    name: str = "rng"
    kind: str = "rng"
    scope: Scope = "rank"
    order: int = 1000

    def __init__(
        self, generators: Mapping[str, Generator] | None = None, *, accelerators: Sequence[Accelerator] | None = None
    ) -> None:
        self._generators = dict(generators or {})
        self._accelerators = accelerators
        for name, generator in self._generators.items():
            _kind(name, generator)
            if isinstance(generator, random.SystemRandom):
                raise UnsupportedState(f"the generator {name!r} draws from the system and has no state")

    def state(self) -> dict[str, object]:
        """The state of every generator; all of it copies."""
        return {
            "host": host_state(),
            "accelerators": {each.name: each.random_states() for each in self._visible()},
            "generators": {
                name: {"kind": _kind(name, generator), "state": _get(generator)}
                for name, generator in self._generators.items()
            },
        }

    def counters(self) -> dict[str, int | float]:
        """None: random state does not count."""
        return {}

    def check(self, saved: object) -> list[str]:
        """What could not be restored; every saved state is tried on a generator that nobody else has."""
        if not isinstance(saved, Mapping) or not {"host", "accelerators", "generators"} <= saved.keys():
            return ["rng: the saved state is not random state"]
        problems = []
        numpys = _scratch_numpy(np.random.get_state(legacy=False))
        for kind, scratch in (("python", random.Random()), ("numpy", numpys), ("torch", torch.Generator())):
            problems += _tried(f"the state of {kind}", scratch, saved["host"].get(kind))
        live = {each.name: each.count() for each in self._visible()}
        for name in sorted({*live, *saved["accelerators"]}):
            before, now = len(saved["accelerators"].get(name, ())), live.get(name, 0)
            if before != now:
                problems.append(f"random state of {before} {name} device(s) was saved, this process sees {now}")
        for name in sorted({*self._generators, *saved["generators"]}):
            if name not in saved["generators"]:
                problems.append(f"the generator {name!r} is not in the checkpoint")
            elif name not in self._generators:
                problems.append(f"the checkpoint has a generator {name!r} that is not registered now")
            elif (kind := _kind(name, self._generators[name])) != (was := saved["generators"][name]["kind"]):
                problems.append(f"the generator {name!r} was a {was}, it is a {kind} now")
            else:
                state = saved["generators"][name]["state"]
                problems += _tried(f"the generator {name!r}", _scratch(self._generators[name]), state)
        return [f"rng: {problem}" for problem in problems]

    def load(self, saved: object) -> None:
        """Restores every generator.

        Raises:
            IncompatibleState: Something does not fit, or cannot be restored; never passed over.
        """
        if problems := self.check(saved):
            raise IncompatibleState("; ".join(problems))
        assert isinstance(saved, Mapping)
        what = "the host's random state"
        try:
            set_host_state(saved["host"])
            for accelerator in self._visible():
                what = f"the random state of {accelerator.name}"
                accelerator.set_random_states(saved["accelerators"][accelerator.name])
            for name, generator in self._generators.items():
                what = f"the generator {name!r}"
                _set(generator, saved["generators"][name]["state"])
        except Exception as error:  # a run that goes on with other random numbers would look restored
            raise IncompatibleState(f"rng: {what} could not be restored: {error}") from error

    def _visible(self) -> Sequence[Accelerator]:
        return visible() if self._accelerators is None else self._accelerators


def _kind(name: str, generator: Generator) -> str:
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, np.random.Generator):
        return f"numpy.random.Generator of {type(generator.bit_generator).__name__}"
    if isinstance(generator, np.random.RandomState):
        return "numpy.random.RandomState"
    if isinstance(generator, random.Random):
        return "random.Random"
    raise UnsupportedState(
        f"the generator {name!r} is a {type(generator).__qualname__}, which is not a known kind of generator",
        next_step="register it as a component of your own",
    )


def _get(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False) if isinstance(generator, np.random.RandomState) else generator.getstate()


def _set(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def _scratch(generator: Generator) -> Generator:
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device)
    if isinstance(generator, np.random.Generator):
        return np.random.Generator(type(generator.bit_generator)())
    if isinstance(generator, np.random.RandomState):
        return _scratch_numpy(generator.get_state(legacy=False))
    return random.Random()


def _scratch_numpy(live: Mapping[str, Any]) -> np.random.RandomState:
    return np.random.RandomState(getattr(np.random, live["bit_generator"])())


def _tried(what: str, scratch: Generator, state: Any) -> list[str]:
    if isinstance(state, Tensor) and state.is_meta:
        return []  # no bytes to try yet; load tries them
    try:
        _set(scratch, state)
    except Exception as error:  # whatever the library raises at a state it does not like
        return [f"{what} cannot be restored: {error}"]
    return []
