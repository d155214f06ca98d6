"""Which sample comes when: the order of an epoch, its cut into batches and ranks, the seed of each sample.

All of it is a function of (seed, epoch, position) alone. Nothing here has state that a checkpoint would need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onward.format.digests import xxh3
from onward.state.rng import host_state_kept, seed_from, seed_host, words_of

SampleKey = tuple[int, int]
"""(epoch, index into the dataset): all that a worker needs to make a sample, random augmentation included."""

Indices = Sequence[int] | np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Share:
    """How the order of an epoch is cut into batches, and which part of each batch is this rank's.

    A step of all ranks takes the next ``batch_size * world_size`` samples of the order, so what has been consumed is
    always a prefix of it, whatever the batch size. The last, smaller step is shared equally: up to
    ``world_size - 1`` samples at the end of an epoch are left out, for ranks with unequal counts wait for ever.
    """

    batch_size: int
    drop_last: bool
    rank: int
    world_size: int

    def count(self, total: int) -> int:
        """How many steps an epoch of ``total`` samples has."""
        full, rest = divmod(total, self.batch_size * self.world_size)
        return full + (not self.drop_last and rest >= self.world_size)

    def steps(self, start: int, total: int) -> Iterator[tuple[int, int]]:
        """(where the step begins in the order, samples for each rank), from ``start`` to the end of the epoch."""
        full = self.batch_size * self.world_size
        while total - start >= full:
            yield start, self.batch_size
            start += full
        if not self.drop_last and (each := (total - start) // self.world_size):
            yield start, each

    def batches(self, order: Indices, epoch: int, start: int) -> Iterator[list[SampleKey]]:
        """This rank's batches, from ``start`` to the end of the epoch."""
        for begin, each in self.steps(start, len(order)):
            mine = begin + self.rank * each
            yield [(epoch, int(index)) for index in order[mine : mine + each]]


class Order:
    """The order of each epoch; the one asked for last is kept.

    Args:
        length: How many samples the dataset has.
        shuffle: Whether each epoch has an order of its own.
        seed: What the orders follow from, together with the epoch.
        sampler: Gives the indices in its own order instead. It may draw from the global generators, which are
            seeded for it and put back after it; ``set_epoch`` is called where it has one.
    """

    def __init__(self, length: int, shuffle: bool, seed: int, sampler: Iterable[int] | None) -> None:
        self._length = length
        self._shuffle = shuffle
        self._seed = seed
        self._sampler = sampler
        self._kept: tuple[int, Indices] | None = None

    def length(self, epoch: int) -> int:
        """How many samples the epoch has."""
        return self._length if self._sampler is None else len(self.of(epoch))

    def of(self, epoch: int) -> Indices:
        """The indices of the epoch, in order."""
        if self._kept is None or self._kept[0] != epoch:
            self._kept = epoch, self._made(epoch)
        return self._kept[1]

    def digest(self, epoch: int) -> str:
        """Tells two orders apart: of a sampler that is not repeatable, or of another version of a library."""
        order = self.of(epoch)
        return f"range:{len(order)}" if isinstance(order, range) else xxh3(np.asarray(order).tobytes())

    def _made(self, epoch: int) -> Indices:
        seed = seed_from("order", self._seed, epoch)
        if self._sampler is not None:
            with host_state_kept():
                seed_host(seed)
                if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
                    set_epoch(epoch)
                return np.fromiter(self._sampler, dtype=np.int64)
        if not self._shuffle:
            return range(self._length)
        # The legacy generator, because numpy has frozen its stream: the newer one may shuffle otherwise after an
        # upgrade, in the middle of an epoch. Narrow integers halve what is the largest object of a big dataset.
        order = np.arange(self._length, dtype=np.uint32 if self._length <= 2**32 else np.int64)
        np.random.RandomState(words_of(seed)).shuffle(order)
        return order


class SeededSamples:
    """A dataset whose samples seed the global generators before they are made.

    Without it, a random augmentation would depend on which samples the same worker made before, which changes with
    every resume and with the number of workers. For everything else it stands in for the dataset: a
    ``worker_init_fn`` may read and set attributes through ``get_worker_info().dataset``.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        vars(self).update(_dataset=dataset, _seed=seed)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: SampleKey) -> Any:
        self._begin(key)
        return self._dataset[key[1]]

    def __getitems__(self, keys: list[SampleKey]) -> Any:
        """A whole batch; a dataset that makes its batches at once is seeded once for each, by the first sample."""
        at_once = getattr(self._dataset, "__getitems__", None)
        if at_once is None:
            return [self[key] for key in keys]
        self._begin(keys[0])
        return at_once([index for _, index in keys])

    def _begin(self, key: SampleKey) -> None:
        seed_host(seed_from("sample", self._seed, *key))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:  # the default would look for attributes before there is a dataset
        return SeededSamples, (self._dataset, self._seed)
