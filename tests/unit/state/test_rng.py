"""Every draw after a restore equals the draw that would have come."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from stored import stored
from torch import Tensor

from onward.errors import IncompatibleState, UnsupportedState
from onward.state.component import Component
from onward.state.rng import (
    RandomComponent,
    derive,
    host_state,
    host_state_kept,
    seed_from,
    seed_host,
    set_host_state,
)


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    with host_state_kept():
        yield


def draw() -> tuple[Any, ...]:
    return (
        random.random(),
        random.gauss(0, 1),  # keeps half of a pair for the next call, which is state too
        np.random.rand(3).tolist(),
        float(np.random.standard_normal()),
        torch.rand(3).tolist(),
        torch.randn(5).tolist(),
    )


class FakeAccelerator:
    """Two devices whose generators are on the CPU."""

    def __init__(self, count: int = 2, name: str = "fake") -> None:
        self.name = name
        self.generators = [torch.Generator().manual_seed(index) for index in range(count)]
        self.broken = False

    def count(self) -> int:
        return len(self.generators)

    def random_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self.generators]

    def set_random_states(self, states: list[Tensor]) -> None:
        if self.broken:
            raise RuntimeError("the device does not answer")
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    def draw(self) -> list[float]:
        return [float(torch.rand(1, generator=generator)) for generator in self.generators]


def own_generators() -> dict[str, Any]:
    return {
        "torch": torch.Generator().manual_seed(1),
        "pcg": np.random.default_rng(2),
        "mt": np.random.Generator(np.random.MT19937(3)),
        "philox": np.random.Generator(np.random.Philox(4)),
        "sfc": np.random.Generator(np.random.SFC64(4)),
        "legacy": np.random.RandomState(5),
        "legacy-pcg": np.random.RandomState(np.random.PCG64(5)),
        "python": random.Random(6),
    }


def draw_own(generators: dict[str, Any]) -> list[Any]:
    return [
        torch.rand(2, generator=generators["torch"]).tolist(),
        *(generators[name].integers(0, 7, 3, dtype=np.uint8).tolist() for name in ("pcg", "mt", "philox", "sfc")),
        *(generators[name].standard_normal(3).tolist() for name in ("pcg", "legacy", "legacy-pcg")),
        generators["python"].gauss(0, 1),
    ]


def test_all_draws_after_restore_equal_the_reference() -> None:
    """T146: python, numpy and torch, half-used pairs of normals included, through JSON."""
    component = RandomComponent(accelerators=[])
    draw()
    saved = stored(component)
    expected = [draw() for _ in range(3)]
    seed_host(999)
    assert component.check(saved) == []
    component.load(saved)
    assert [draw() for _ in range(3)] == expected


def test_registered_generators_come_back() -> None:
    """T146: torch.Generator, numpy Generators and RandomState, random.Random, by name."""
    generators = own_generators()
    draw_own(generators)
    saved = stored(RandomComponent(generators, accelerators=[]))
    expected = draw_own(generators)
    others = own_generators()
    component = RandomComponent(others, accelerators=[])
    assert component.check(saved) == []
    component.load(saved)
    assert draw_own(others) == expected


def test_nothing_in_the_state_needs_pickle() -> None:
    """T146: only plain values, numpy arrays and tensors, of exactly these types."""
    saved = stored(RandomComponent(own_generators(), accelerators=[FakeAccelerator()]))
    plain = (dict, list, tuple, int, float, str, bool, type(None), np.ndarray, Tensor)

    def walk(value: Any) -> None:
        assert type(value) in plain, type(value)
        for element in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            walk(element)

    walk(saved)


def test_the_state_is_a_copy() -> None:
    """Draws after a capture must not reach into it."""
    generators = own_generators()
    component = RandomComponent(generators, accelerators=[FakeAccelerator()])
    state = component.state()
    before = derive(state, 0, 1)
    draw(), draw_own(generators)
    assert derive(state, 0, 1) == before != derive(component.state(), 0, 1)


def test_every_accelerator_is_restored() -> None:
    fake = FakeAccelerator()
    component = RandomComponent(accelerators=[fake])
    fake.draw()
    saved = stored(component)
    expected = fake.draw()
    component.load(saved)
    assert fake.draw() == expected


class FakeModule:
    """What torch.cuda and its like offer, each call noted with its device."""

    def __init__(self) -> None:
        self.devices = [torch.Generator().manual_seed(index) for index in range(3)]

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.devices)

    def get_rng_state(self, device: torch.device) -> Tensor:
        return self.devices[device.index].get_state()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self.devices[device.index].set_state(state)


def test_accelerators_are_reached_through_their_torch_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """All devices of a process, not only the current one; kinds that this torch lacks are passed over."""
    module = FakeModule()

    def look_up(name: str) -> FakeModule:
        if name != "cuda":
            raise RuntimeError(f"no module {name}")
        return module

    monkeypatch.setattr(torch, "get_device_module", look_up)
    component = RandomComponent()
    saved: Any = stored(component)
    assert {name: len(states) for name, states in saved["accelerators"].items()} == {"cuda": 3}
    expected = [float(torch.rand(1, generator=generator)) for generator in module.devices]
    component.load(saved)
    assert [float(torch.rand(1, generator=generator)) for generator in module.devices] == expected


def test_another_number_of_accelerators_is_refused_with_both_counts() -> None:
    saved = stored(RandomComponent(accelerators=[FakeAccelerator(2)]))
    assert RandomComponent(accelerators=[FakeAccelerator(3)]).check(saved) == [
        "rng: random state of 2 fake device(s) was saved, this process sees 3"
    ]
    assert RandomComponent(accelerators=[]).check(saved) == [
        "rng: random state of 2 fake device(s) was saved, this process sees 0"
    ]
    assert RandomComponent(accelerators=[FakeAccelerator(name="other")]).check(saved) == [
        "rng: random state of 2 fake device(s) was saved, this process sees 0",
        "rng: random state of 0 other device(s) was saved, this process sees 2",
    ]


def test_a_failed_restore_is_an_error() -> None:
    """T146: never swallowed, for the run would look restored."""
    fake = FakeAccelerator()
    component = RandomComponent(accelerators=[fake])
    saved = stored(component)
    fake.broken = True
    with pytest.raises(IncompatibleState, match="state of fake could not be restored: the device does not answer"):
        component.load(saved)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s["host"].update(python=[1, 2]), "the state of python cannot be restored"),
        (lambda s: s["host"].update(numpy={"bit_generator": "PCG64"}), "the state of numpy cannot be restored"),
        (lambda s: s["host"].update(torch=torch.zeros(3, dtype=torch.uint8)), "the state of torch cannot be restored"),
        (lambda s: s["host"].pop("python"), "the state of python cannot be restored"),
        (lambda s: s["generators"].pop("mine"), "the generator 'mine' is not in the checkpoint"),
        (lambda s: s["generators"].update(old=0), "a generator 'old' that is not registered now"),
        (lambda s: s["generators"]["mine"].update(kind="x"), "the generator 'mine' was a x, it is a random.Random now"),
        (lambda s: s["generators"]["mine"].update(state=3), "the generator 'mine' cannot be restored"),
    ],
)
def test_what_cannot_be_restored_is_found_before_anything_is_touched(damage: Any, message: str) -> None:
    component = RandomComponent({"mine": random.Random(1)}, accelerators=[])
    saved: Any = stored(component)
    damage(saved)
    before = host_state()
    assert any(message in problem for problem in component.check(saved))
    with pytest.raises(IncompatibleState):
        component.load(saved)
    after = host_state()
    assert before["python"] == after["python"] and torch.equal(before["torch"], after["torch"])
    assert component.check("x") == ["rng: the saved state is not random state"]


def test_check_takes_tensors_without_bytes() -> None:
    saved: Any = stored(RandomComponent(accelerators=[]))
    saved["host"]["torch"] = saved["host"]["torch"].to("meta")
    assert RandomComponent(accelerators=[]).check(saved) == []


def test_generators_without_state_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedState, match="'os' draws from the system"):
        RandomComponent({"os": random.SystemRandom()})
    with pytest.raises(UnsupportedState, match="'x' is a BytesIO"):
        RandomComponent({"x": io.BytesIO()})  # type: ignore[dict-item]


class SetUp:
    """Stands for a loader whose set-up seeds every library."""

    name, kind, scope, order = "loader", "data", "rank", 400

    def state(self) -> object:
        return {}

    def counters(self) -> dict[str, int | float]:
        return {}

    def check(self, saved: object) -> list[str]:
        return []

    def load(self, saved: object) -> None:
        seed_host(0)


def restore(components: list[Component], saved: dict[str, object]) -> None:
    for component in components:
        component.load(saved[component.name])


def test_random_state_is_applied_after_every_other_component() -> None:
    """T89: a set-up step that seeds again does no harm in order of `order`; the control shows that it would."""
    components: list[Component] = [RandomComponent(accelerators=[]), SetUp()]  # type: ignore[list-item]
    draw()
    saved = {component.name: stored(component) for component in components}
    expected = draw()
    restore(sorted(components, key=lambda component: component.order), saved)
    assert draw() == expected
    restore(components, saved)
    assert draw() != expected


def test_restoring_only_part_is_seen_to_differ() -> None:
    """Negative control: without its random state a run draws other numbers."""
    saved: Any = stored(RandomComponent(accelerators=[]))
    expected = draw()
    seed_host(1)
    assert draw() != expected
    set_host_state(saved["host"])
    assert draw() == expected


def test_each_rank_gets_its_own_state_and_a_new_one_a_seed_of_its_own() -> None:
    """T88: two ranks get their own back; a third gets a distinct seed, the same at each try."""
    saved, expected = [], []
    for rank in range(2):
        seed_host(100 + rank)
        draw()
        saved.append(stored(RandomComponent(accelerators=[])))
        expected.append(draw())
    for rank in (1, 0):
        RandomComponent(accelerators=[]).load(saved[rank])
        assert draw() == expected[rank]
    seeds = {(rank, world): derive(saved[0], rank, world) for world in (3, 4) for rank in range(world)}
    assert len(set(seeds.values())) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds.values())
    assert derive(saved[0], 2, 3) == seeds[2, 3] != derive(saved[1], 2, 3)
    seed_host(seeds[2, 3])
    assert draw() not in expected


def test_derived_seeds_are_the_same_in_another_process() -> None:
    """Hashes of Python strings are not; a seed made of one would differ at each start."""
    code = (
        "from onward.state.rng import derive, seed_from; import torch, numpy;"
        "print(derive({'b': torch.arange(3), 'a': (1, numpy.ones(2)), 'c': [None, 2.5, 'x']}, 2, 3), seed_from('a', 1))"
    )
    result = subprocess.check_output([sys.executable, "-c", code], text=True)
    state = {"a": (1, np.ones(2)), "b": torch.arange(3), "c": [None, 2.5, "x"]}
    assert result == f"{derive(state, 2, 3)} {seed_from('a', 1)}\n"


def test_near_seeds_give_unrelated_draws_and_so_do_the_libraries() -> None:
    """Python and numpy run the same algorithm: seeded alike, they would draw the same numbers."""
    firsts = set()
    for index in range(200):
        seed_host(seed_from("sample", 0, 0, index))
        firsts.add((random.random(), float(np.random.rand()), float(torch.rand(1))))
    values = np.array(sorted(firsts))
    assert len(np.unique(values)) == 600 and np.all(np.abs(values.mean(0) - 0.5) < 0.1)


def test_host_state_kept_leaves_no_trace_even_of_an_error() -> None:
    before = host_state()
    with pytest.raises(KeyError), host_state_kept():
        seed_host(5)
        draw()
        raise KeyError
    expected = draw()
    set_host_state(before)
    assert draw() == expected
