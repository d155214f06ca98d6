"""After a resume every sample comes once and in its order. One process; another world size waits for many ranks."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import onward

from .shared import refused, running


def _loader(length: int = 100, batch: int = 2, **options: Any) -> onward.ResumableLoader:
    return onward.ResumableLoader(range(length), batch, **{"shuffle": False, **options})


def _ids(batch: torch.Tensor) -> list[int]:
    return [int(i) for i in batch]


def _endless(loader: Any) -> Iterator[list[int]]:
    while True:
        yield from map(_ids, loader)


def _take(url: str, batches: int, loader: Any, **how: Any) -> list[list[int]]:
    """Trains for some batches, one a step, and leaves a checkpoint after the last."""
    with running(url, how=how, data=loader) as (ckpt, start):
        taken = []
        for step, batch in zip(range(start.next_step, start.next_step + batches), _endless(loader), strict=False):
            taken.append(batch)
            ckpt.step(step, save=len(taken) == batches)
        ckpt.save(wait=True)
    return taken


def test_samples_are_counted_and_not_steps(url: str) -> None:
    """T91: batches of 2, four of them to an optimizer step; saved after step 3."""
    loader = _loader()
    with running(url, every=3, data=loader) as (ckpt, _):
        batches = iter(loader)
        for step in range(4):
            for _ in range(4):
                next(batches)
            ckpt.step(step)
    fresh = _loader()
    with running(url, data=fresh) as (_, start):
        assert start.next_step == 3
        assert _ids(next(iter(fresh))) == [24, 25]


def test_asked_for_in_any_hook_the_save_falls_between_two_steps(url: str) -> None:
    """T92: in a hook after the step, in one before it, in a signal handler, and in the middle of a batch."""
    previous = signal.getsignal(signal.SIGUSR1)
    for number, moment in enumerate(("before", "after", "signal", "middle")):
        loader = _loader(20)
        first: list[int] = []
        with running(url, run=moment, data=loader) as (ckpt, _):
            signal.signal(signal.SIGUSR1, lambda *_, c=ckpt: c.request_save("signal"))
            for step, batch in enumerate(loader):
                if (moment, step) == ("before", 4):
                    ckpt.request_save("hook")
                if (moment, step) == ("middle", 4):
                    with pytest.raises(onward.errors.MidStep):
                        ckpt.save()
                    ckpt.request_save("in the middle")
                if (moment, step) == ("signal", 4):
                    os.kill(os.getpid(), signal.SIGUSR1)
                first += _ids(batch)
                outcome = ckpt.step(step)
                if (moment, step) == ("after", 4):
                    ckpt.save(wait=True)
                    break
                if outcome.saved:
                    break
        fresh = _loader(20)
        with running(url, run=moment, data=fresh) as (_, start):
            assert start.next_step == 5, (number, moment)
            rest = list(chain.from_iterable(map(_ids, fresh)))
        assert first + rest == list(range(20)), moment
    signal.signal(signal.SIGUSR1, previous)


def test_a_second_resume_in_an_epoch_goes_on_from_the_first(url: str) -> None:
    """T94."""
    taken = [_take(url, count, _loader(90)) for count in (30, 10, 5)]
    assert list(chain.from_iterable(chain.from_iterable(taken))) == list(range(90))


@pytest.mark.parametrize("seed", range(3))
def test_any_cuts_give_the_same_samples_in_the_same_order(url: str, seed: int) -> None:
    """T94, at random, over epochs, with workers that come and go."""
    draw = random.Random(seed)
    batch, length = draw.randint(1, 5), draw.randint(7, 20)
    options: dict[str, Any] = {"length": length, "batch": batch, "shuffle": True, "seed": seed}
    options["drop_last"] = draw.random() < 0.5
    cuts = [draw.randint(1, 7) for _ in range(5)]
    endless = _endless(_loader(**options))
    reference = [next(endless) for _ in range(sum(cuts))]
    taken = [_take(url, cut, _loader(**options, num_workers=draw.choice([0, 0, 1]))) for cut in cuts]
    assert list(chain.from_iterable(taken)) == reference


def test_a_later_epoch_goes_on_in_its_own_order(url: str) -> None:
    """T95."""
    options = {"length": 12, "shuffle": True, "seed": 4}
    endless = _endless(_loader(**options))
    reference = [next(endless) for _ in range(6 * 5)]
    assert len({tuple(chain.from_iterable(reference[e * 6 : e * 6 + 6])) for e in range(5)}) == 5
    assert _take(url, 15, _loader(**options)) == reference[:15]  # in the middle of epoch 2
    fresh = _loader(**options)
    assert _take(url, 15, fresh) == reference[15:]
    assert fresh.epoch == 5


@pytest.mark.parametrize("kind", ["onward", "torchdata"])
def test_what_was_prefetched_is_neither_lost_nor_given_twice(url: str, kind: str) -> None:
    """T97: a worker is three batches ahead."""

    def make() -> Any:
        if kind == "onward":
            return _loader(40, num_workers=1, prefetch_factor=3)
        return StatefulDataLoader(range(40), 2, num_workers=1, prefetch_factor=3)

    for consumed in (0, 1, 2, 3, 4, 7, 10) if kind == "onward" else (0, 5, 10):
        loader = make()
        with running(url, run=f"k{consumed}", data=loader) as (ckpt, _):
            batches = iter(loader)
            for _ in range(consumed):
                next(batches)
            ckpt.save(consumed + 1, wait=True)
        fresh = make()
        with running(url, run=f"k{consumed}", data=fresh):
            assert _ids(next(iter(fresh))) == [2 * consumed, 2 * consumed + 1]


@pytest.mark.parametrize("kind", ["onward", "torchdata"])
@pytest.mark.parametrize("workers", [0, 1])
def test_saved_at_the_end_of_an_epoch_and_right_after_a_resume(url: str, kind: str, workers: int) -> None:
    """T98: after the last batch; again with none and with one batch taken since the resume; then three more epochs."""

    def make() -> Any:
        if kind == "onward":
            return _loader(10, shuffle=True, seed=1, num_workers=workers)
        torch.manual_seed(3)
        return StatefulDataLoader(range(10), 2, shuffle=True, num_workers=workers)

    endless = _endless(make())
    reference = [next(endless) for _ in range(5 * 5)]
    taken: list[list[int]] = []
    for count in (5, 0, 1, 0, 4, 15):
        taken += _take_or_none(url, count, make())
    assert taken == reference
    for epoch in range(5):
        assert sorted(chain.from_iterable(taken[epoch * 5 : epoch * 5 + 5])) == list(range(10))


def _take_or_none(url: str, batches: int, loader: Any) -> list[list[int]]:
    if batches:
        return _take(url, batches, loader)
    with running(url, data=loader) as (ckpt, _):
        ckpt.save(reason="right after the resume", wait=True)
    return []


# --- further cases of the kind ---------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    """Knows where it stands."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 20:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_of_samples_goes_on_where_it_stood(url: str, workers: int) -> None:
    """Iterable datasets through torchdata's loader, twice in one pass."""
    taken: list[int] = []
    for _ in range(2):
        loader = StatefulDataLoader(Stream(), 2, num_workers=workers)
        taken += chain.from_iterable(_take(url, 3, loader))
    loader = StatefulDataLoader(Stream(), 2, num_workers=workers)
    with running(url, data=loader):
        taken += chain.from_iterable(map(_ids, loader))
    assert taken == list(range(20))


class Augmented(Dataset[Any]):
    """Samples with random augmentation of all three libraries."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


def test_augmentation_is_the_same_after_a_resume_whatever_the_workers(url: str) -> None:
    """Saved with two workers, resumed with none and with one: the random part of every sample is the same too."""

    def make(workers: int) -> onward.ResumableLoader:
        return onward.ResumableLoader(Augmented(), 2, seed=9, num_workers=workers)

    def values(batch: Any) -> list[list[float]]:
        return [part.tolist() for part in batch]

    reference = [values(batch) for batch in make(0)]
    loader = make(2)
    with running(url, data=loader) as (ckpt, _):
        batches = iter(loader)
        assert [values(next(batches)) for _ in range(2)] == reference[:2]
        ckpt.save(2, wait=True)
    for workers in (0, 1):
        fresh = make(workers)
        with running(url, data=fresh):
            assert [values(batch) for batch in fresh] == reference[2:]


def test_another_dataset_seed_or_shuffling_is_refused_and_another_batch_size_is_not(url: str) -> None:
    """A dataset that grew has another order; samples that were consumed would come again."""
    assert _take(url, 5, _loader(20, shuffle=True, seed=1))
    for changed, word in (
        ({"length": 21}, "20.*21"),
        ({"seed": 2}, "seed"),
        ({"shuffle": False}, "shuffle"),
    ):
        loader = _loader(**{"length": 20, "shuffle": True, "seed": 1, **changed})
        refused(onward.errors.IncompatibleState, word, url, data=loader)
        assert loader.position()["samples_total"] == 0
    order = list(chain.from_iterable(map(_ids, _loader(20, shuffle=True, seed=1))))
    fresh = _loader(20, batch=5, shuffle=True, seed=1)
    with running(url, data=fresh):
        assert list(chain.from_iterable(map(_ids, fresh))) == order[10:]


def test_another_kind_of_loader_or_number_of_stateful_workers_is_refused(url: str) -> None:
    """torchdata takes the state of another number of workers without a word, and loses samples."""
    _take(url, 3, StatefulDataLoader(range(20), 2, num_workers=1))
    for other in (StatefulDataLoader(range(20), 2, num_workers=0), _loader(20)):
        refused(onward.errors.IncompatibleState, "data", url, data=other)
    plain: Any = torch.utils.data.DataLoader(range(20))  # type: ignore[arg-type]
    refused(onward.errors.ConfigurationError, "ResumableLoader", url, run="plain", data=plain)


def test_in_the_middle_of_a_step_a_stateful_loader_is_noticed_too(url: str) -> None:
    """A batch of torchdata's loader was drawn and not yet trained on: saving now would lose it."""
    loader = StatefulDataLoader(range(20), 2)
    with running(url, data=loader) as (ckpt, _):
        batches = iter(loader)
        next(batches)
        ckpt.step(0)
        next(batches)
        with pytest.raises(onward.errors.MidStep):
            ckpt.save()
