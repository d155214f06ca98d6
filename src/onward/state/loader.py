"""A loader of map-style datasets that can be resumed exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from onward.errors import ConfigurationError, IncompatibleState, UsageError
from onward.state.data_order import Order, SampleKey, SeededSamples, Share
from onward.state.rng import host_state_kept, seed_from

_WORDS = {
    "seed": "the seed of the order",
    "shuffle": "shuffle",
    "dataset_length": "the length of the dataset",
    "rank": "the rank",
    "world_size": "the number of ranks that share the data",
}
_FIELDS = {"epoch", "consumed", "total_consumed", "batch_size", "drop_last", "order", *_WORDS}


class ResumableLoader:
    """Batches of a map-style dataset, resumable at any batch of any epoch.

    Iterating gives the rest of the current epoch and then stops; iterating again gives the next epoch (or, after a
    ``break``, what is left of this one). A batch counts as consumed when it is handed out, however many the workers
    have prefetched. The position is the next sample to be handed out: after the last batch of epoch 3 it is the
    beginning of epoch 4.

    The order of an epoch follows from ``seed`` and the epoch, a sample's random augmentation (through the global
    generators of Python, numpy and torch) from ``seed``, the epoch and its index. Both are the same after a resume
    and for any number of workers, and the global generators of the training process are never drawn from. (Only a
    dataset with a generator of its own is beyond reach: register that one, and use no workers.)

    ``len()`` is the number of batches in a full epoch, wherever the loader stands.

    Args:
        dataset: A map-style dataset.
        batch_size: Samples in a batch of one rank. May be another one after a resume; samples are counted.
        shuffle: Whether each epoch has an order of its own; of no effect with a sampler.
        seed: The seed of order and augmentation; its own, independent of the model's.
        drop_last: Whether an epoch leaves out a last, smaller batch.
        num_workers: Worker processes, as in ``DataLoader``.
        collate_fn: As in ``DataLoader``.
        sampler: Gives the order of an epoch instead (of all ranks: each takes its part).
        rank: This process's number among those that share the data.
        world_size: How many processes share the data; each step takes ``batch_size`` samples for each.
        **dataloader_kwargs: Handed on to ``DataLoader`` (``pin_memory``, ``persistent_workers``, ...).
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sampler: Iterable[int] | None = None,
        rank: int = 0,
        world_size: int = 1,
        **dataloader_kwargs: Any,
    ) -> None:
        _require_suitable(dataset, batch_size, rank, world_size, dataloader_kwargs)
        self.dataset = dataset
        self._length = len(dataset)
        self._shuffle = shuffle and sampler is None
        self._seed = seed
        self._order = Order(self._length, self._shuffle, seed, sampler)
        self._share = Share(batch_size, drop_last, rank, world_size)
        self._epoch = self._consumed = self._total = 0
        self._turn = 0  # which iterator is the live one
        self._plan = _Plan()
        self._generator = torch.Generator()  # or DataLoader would draw the workers' base seed from the global one
        self._loader: DataLoader[Any] = DataLoader(
            SeededSamples(dataset, seed),  # type: ignore[arg-type]  # it has all that DataLoader asks of a dataset
            batch_sampler=self._plan,
            num_workers=num_workers,
            collate_fn=collate_fn,
            generator=self._generator,
            **dataloader_kwargs,
        )
        self._require_batches()

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self._epoch

    def __len__(self) -> int:
        return self._share.count(self._order.length(self._epoch))

    def __iter__(self) -> Iterator[Any]:
        self._require_batches()
        order = self._order.of(self._epoch)
        self._turn += 1
        self._plan.batches = self._share.batches(order, self._epoch, self._consumed)
        self._generator.manual_seed(seed_from("workers", self._seed, self._epoch, self._consumed))
        steps = self._share.steps(self._consumed, len(order))
        return _RestOfEpoch(self, self._turn, steps, iter(self._loader))

    def forever(self) -> Iterator[Any]:
        """Batches of the rest of this epoch, then of the next, and so on without end; counted like any other."""
        while True:
            yield from self

    def position(self) -> dict[str, int]:
        """Epoch, samples of it consumed by all ranks together, and samples consumed since training began."""
        return {"epoch": self._epoch, "samples_in_epoch": self._consumed, "samples_total": self._total}

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on; plain data. Counts are those of all ranks together."""
        return {
            "epoch": self._epoch,
            "consumed": self._consumed,
            "total_consumed": self._total,
            "batch_size": self._share.batch_size,
            "drop_last": self._share.drop_last,
            "order": self._order.digest(self._epoch),
            **self._identity(),
        }

    def problems(self, state: object) -> list[str]:
        """Why ``state`` cannot be resumed from by this loader; empty when it can."""
        if not isinstance(state, Mapping) or not state.keys() >= _FIELDS:
            return ["the saved state is not that of a ResumableLoader"]
        if found := [
            f"{_WORDS[field]} was {state[field]} when saved, it is {live} now"
            for field, live in self._identity().items()
            if state[field] != live
        ]:
            return found
        if self._order.digest(state["epoch"]) != state["order"]:
            return [f"the order of epoch {state['epoch']} is not the one that was saved: the sampler is not repeatable"]
        if not 0 <= state["consumed"] <= self._order.length(state["epoch"]):
            return [f"{state['consumed']} samples of an epoch of {self._order.length(state['epoch'])} were consumed"]
        return []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the saved position; an iterator that is still live ends.

        Raises:
            IncompatibleState: Seed, dataset length, shuffling or ranks are not those that were saved.
        """
        if problems := self.problems(state):
            raise IncompatibleState(
                "data position: " + "; ".join(problems),
                next_step="build the loader as it was when the checkpoint was saved; only the batch size may change",
            )
        self._epoch, self._consumed, self._total = state["epoch"], state["consumed"], state["total_consumed"]
        self._turn += 1
        self._turn_the_page()  # with another batch size, nothing may be left of the epoch

    def _identity(self) -> dict[str, int | bool]:
        """What must be the same when resuming, for the rest of the epoch to be the same."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "dataset_length": self._length,
            "rank": self._share.rank,
            "world_size": self._share.world_size,
        }

    def _require_batches(self) -> None:
        if len(self) == 0:  # a loop over epochs would spin for ever
            raise ConfigurationError(
                f"epoch {self._epoch} has {self._order.length(self._epoch)} samples, and no batch of "
                f"{self._share.batch_size} for each of {self._share.world_size} ranks",
                next_step="use a smaller batch size, or drop_last=False",
            )

    def _hand_out(self, samples_of_this_rank: int) -> None:
        samples = samples_of_this_rank * self._share.world_size
        self._consumed += samples
        self._total += samples
        self._turn_the_page()

    def _turn_the_page(self) -> None:
        if next(self._share.steps(self._consumed, self._order.length(self._epoch)), None) is None:
            self._epoch, self._consumed = self._epoch + 1, 0


class _Plan:
    """The batch sampler: what is to be loaded next, set before each iteration."""

    batches: Iterator[list[SampleKey]] = iter(())

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return self.batches


class _RestOfEpoch:
    """Iterates over what is left of one epoch, and counts what it hands out."""

    def __init__(
        self, loader: ResumableLoader, turn: int, steps: Iterator[tuple[int, int]], inner: Iterator[Any]
    ) -> None:
        self._loader = loader
        self._turn = turn
        self._steps = steps
        self._inner: Iterator[Any] | None = inner

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        if self._inner is None:
            raise StopIteration
        if self._turn != loader._turn:
            self._inner = None  # lets its workers go
            raise UsageError(
                "this iterator has ended: its loader was iterated anew, or resumed, or making a batch failed",
                next_step="use one iterator of a ResumableLoader at a time",
            )
        step = next(self._steps, None)
        if step is None:
            self._inner = None
            raise StopIteration
        try:
            # Without workers the samples are made here, and must leave no trace in the generators of the training.
            with nullcontext() if loader._loader.num_workers else host_state_kept():
                batch = next(self._inner)
        except BaseException as error:
            # DataLoader would go on with the batch after the one that failed, which would then be lost.
            loader._turn += 1
            # The error's traceback keeps the workers' iterator alive until the garbage collector comes by; ended
            # from there, torch waits five seconds for each worker.
            if not loader._loader.persistent_workers and (stop := getattr(self._inner, "_shutdown_workers", None)):
                stop()
            if isinstance(error, StopIteration):
                raise RuntimeError("the dataset raised StopIteration, which would end the epoch early") from error
            raise
        loader._hand_out(step[1])
        return batch


def _require_suitable(dataset: Any, batch_size: int, rank: int, world_size: int, others: Mapping[str, Any]) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigurationError(
            f"a {type(dataset).__name__} is not a map-style dataset (it needs __getitem__ and __len__)",
            next_step="use torchdata's StatefulDataLoader for iterable datasets",
        )
    if batch_size < 1:
        raise ConfigurationError(f"the batch size is {batch_size}")
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank {rank} is not one of {world_size} ranks")
    owned = {"batch_sampler": "the order is the loader's own", "generator": "the loader has its own"}
    if not others.get("in_order", True):
        owned["in_order"] = "samples are counted in order"
    if taken := [f"{key} ({reason})" for key, reason in owned.items() if key in others]:
        raise ConfigurationError(f"a ResumableLoader takes no {', '.join(taken)}")
