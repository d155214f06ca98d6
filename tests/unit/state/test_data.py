"""No sample is lost or seen twice, wherever the run was cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import stored
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from onward.errors import ConfigurationError, IncompatibleState, UsageError
from onward.state.data import DataComponent, ResumableLoader
from onward.state.rng import RandomComponent, host_state, host_state_kept, seed_host


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Numbers):
    """Samples with a random part from each library."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), float(torch.rand(1))


class AtOnce(Augmented):
    """Makes whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [super(AtOnce, self).__getitem__(index) for index in indices]


def as_list(batch: list[Any]) -> list[Any]:
    return batch


def loader(length: int = 20, batch_size: int = 3, **kwargs: Any) -> ResumableLoader:
    kwargs.setdefault("collate_fn", as_list)
    dataset = kwargs.pop("dataset", None)
    return ResumableLoader(Numbers(length) if dataset is None else dataset, batch_size, **kwargs)


def endless(each: ResumableLoader) -> Iterator[list[Any]]:
    while True:
        yield from each


def take(each: ResumableLoader, batches: int) -> list[list[Any]]:
    source = endless(each)
    return [next(source) for _ in range(batches)]


def resumed(from_loader: ResumableLoader, **kwargs: Any) -> ResumableLoader:
    """A fresh loader at the other's position, by way of the component and JSON."""
    fresh = loader(**kwargs)
    component = DataComponent("data", fresh)
    saved = stored(DataComponent("data", from_loader))
    assert component.check(saved) == []
    component.load(saved)
    return fresh


def flat(batches: list[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(batches))


WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 1},
    {"num_workers": 2, "prefetch_factor": 3},
    {"num_workers": 2, "persistent_workers": True},
]


# --- one epoch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", WORKERS)
def test_prefetched_batches_are_not_counted(kwargs: dict[str, Any]) -> None:
    """T97: the workers are ahead of the consumer; what was handed out counts, for every k."""
    reference = take(loader(), 8)
    source = loader(**kwargs)
    batches = endless(source)
    for k in range(8):
        assert flat(take(resumed(source), 8 - k)) == flat(reference[k:])
        assert next(batches) == reference[k]


def test_accumulation_counts_samples_not_steps() -> None:
    """T91: 100 samples, batch 2, 4 batches a step, saved after step 3: the next sample is number 24."""
    source = loader(100, 2, shuffle=False)
    batches = endless(source)
    for _step in range(3):
        for _micro in range(4):
            next(batches)
    assert source.position() == {"epoch": 0, "samples_in_epoch": 24, "samples_total": 24}
    assert take(resumed(source, length=100, batch_size=2, shuffle=False), 1) == [[24, 25]]


def test_asking_for_the_state_at_any_time_changes_nothing() -> None:
    """T92: from a hook before or after a batch, or several times in a row."""
    reference = take(loader(), 20)
    source = loader()
    seen = []
    source.state_dict()
    for batch in take(source, 7):
        source.state_dict()
        seen.append(batch)
        assert source.state_dict() == source.state_dict()
    other = resumed(source)
    assert seen + take(other, 13) == reference


def test_second_and_third_resume_in_one_epoch_go_on_in_order() -> None:
    """T94: 30 + 10 + 5 samples over three processes are 0..44 in order."""
    seen: list[Any] = []
    current = loader(100, 5, shuffle=False)
    for batches in (6, 2, 1):
        seen += flat(take(current, batches))
        current = resumed(current, length=100, batch_size=5, shuffle=False)
    assert seen == list(range(45))


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 25),
    batch_size=st.integers(1, 8),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    cuts=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    seed=st.integers(0, 3),
)
def test_any_cuts_give_the_reference(
    length: int, batch_size: int, shuffle: bool, drop_last: bool, cuts: list[int], seed: int
) -> None:
    """T94, T98: any number of resumes, at random batches, over several epochs."""
    options = {"length": length, "batch_size": min(batch_size, length), "shuffle": shuffle, "drop_last": drop_last}
    reference = take(loader(**options, seed=seed), sum(cuts))
    seen: list[Any] = []
    current = loader(**options, seed=seed)
    for batches in cuts:
        seen += take(current, batches)
        current = resumed(current, **options, seed=seed)
    assert seen == reference


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(8, 40),
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=6),
)
def test_changing_the_batch_size_loses_no_sample(length: int, sizes: list[tuple[int, int]]) -> None:
    """Samples are counted, not batches: the order is the same, whatever the batches."""
    reference = flat(take(loader(length, 1), sum(size * batches for size, batches in sizes)))
    seen: list[Any] = []
    current = loader(length, sizes[0][0])
    for size, batches in sizes:
        current = resumed(current, length=length, batch_size=size)
        seen += flat(take(current, batches))
    assert seen == reference[: len(seen)]


def test_with_a_larger_batch_nothing_may_be_left_of_the_epoch() -> None:
    """With drop_last, the tail that no longer fills a batch is dropped, and the next epoch begins."""
    source = loader(10, 2, drop_last=True)
    take(source, 4)
    after = resumed(source, length=10, batch_size=4, drop_last=True)
    assert after.position() == {"epoch": 1, "samples_in_epoch": 0, "samples_total": 8}
    assert len(list(after)) == 2


# --- epochs ----------------------------------------------------------------------------------------------------------


def test_every_epoch_has_its_own_order_and_all_samples() -> None:
    each = loader()
    orders = [flat(list(each)) for _ in range(4)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert flat(take(loader(seed=1), 7)) != orders[0]


def test_the_order_of_an_epoch_never_changes() -> None:
    """The order is part of the format of a position: another one would lose and repeat samples after an upgrade."""
    each = loader(10, 5)
    assert [flat(list(each)) for _ in range(2)] == [[2, 9, 6, 3, 4, 5, 8, 1, 7, 0], [1, 6, 2, 5, 3, 8, 7, 0, 9, 4]]


def test_a_resume_in_a_later_epoch_has_that_epochs_order() -> None:
    """T95: saved in the middle of epoch 2: the rest of it, then epoch 3, equal the reference."""
    reference = loader()
    epochs = [list(reference) for _ in range(4)]
    source = loader()
    for _ in range(2):
        list(source)
    take(source, 3)
    after = resumed(source)
    assert after.epoch == 2
    assert list(after) == epochs[2][3:]
    assert list(after) == epochs[3]


@pytest.mark.parametrize("batches_after", [0, 1])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_state_saved_at_the_end_of_an_epoch_neither_drops_nor_repeats_one(
    batches_after: int, drop_last: bool
) -> None:
    """T98: saved after the last batch, again 0 and 1 batches after the resume; then 3 whole epochs."""
    options = {"length": 20, "batch_size": 3, "drop_last": drop_last}
    reference = loader(**options)
    epochs = [list(reference) for _ in range(5)]
    source = loader(**options)
    seen = []
    iterator = iter(source)
    for _ in range(len(source)):
        seen.append(next(iterator))  # the StopIteration is still to come
    assert source.position()["epoch"] == 1 and source.position()["samples_in_epoch"] == 0
    first = resumed(source, **options)
    seen += take(first, batches_after)
    second = resumed(first, **options)
    later = [list(second) for _ in range(3)]
    assert seen + later[0] == epochs[0] + epochs[1]
    assert later[1:] == epochs[2:4]
    assert [len(epoch) for epoch in later[1:]] == [len(source)] * 2
    assert next(iterator, None) is None and list(source) == epochs[1]


def test_breaking_off_and_iterating_again_goes_on() -> None:
    each = loader(shuffle=False)
    for batch in each:
        if 3 in batch:
            break
    assert next(iter(each)) == [6, 7, 8]


def test_len_is_that_of_a_full_epoch() -> None:
    each = loader(20, 3)
    take(each, 4)
    assert len(each) == len(resumed(each)) == 7 and len(loader(20, 3, drop_last=True)) == 6


# --- iterators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", WORKERS)
def test_a_second_iterator_ends_the_first(kwargs: dict[str, Any]) -> None:
    """Two live iterators would count into one position."""
    each = loader(shuffle=False, **kwargs)
    first = iter(each)
    next(first)
    second = iter(each)
    with pytest.raises(UsageError, match="this iterator has ended"):
        next(first)
    with pytest.raises(StopIteration):
        next(first)
    assert next(second) == [3, 4, 5]
    each.load_state_dict(loader(shuffle=False).state_dict())
    with pytest.raises(UsageError):
        next(second)
    assert flat(list(each)) == list(range(20))


def test_an_exhausted_iterator_stays_exhausted() -> None:
    each = loader()
    first = iter(each)
    list(first)
    next(iter(each))
    assert list(first) == []


class FailsOnce(Numbers):
    """Sample 7 cannot be read while the flag is there."""

    broken = True

    def __getitem__(self, index: int) -> int:
        if index == 7 and self.broken:
            raise OSError("disk trouble")
        if index == 9 and self.broken is None:
            raise StopIteration
        return index


@pytest.mark.parametrize("kwargs", WORKERS[:3])
def test_a_batch_that_could_not_be_made_is_not_skipped(kwargs: dict[str, Any]) -> None:
    """DataLoader alone would go on with the batch after it."""
    dataset = FailsOnce()
    each = loader(dataset=dataset, shuffle=False, **kwargs)
    iterator = iter(each)
    assert [next(iterator), next(iterator)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(OSError, match="disk trouble"):
        next(iterator)
    with pytest.raises(UsageError):
        next(iterator)
    dataset.broken = False
    assert flat(list(each)) == list(range(6, 20))


def test_a_dataset_that_raises_stop_iteration_does_not_end_the_epoch() -> None:
    dataset = FailsOnce()
    dataset.broken = None  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(loader(dataset=dataset, shuffle=False))


# --- random numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", WORKERS)
def test_the_global_generators_are_never_drawn_from(kwargs: dict[str, Any]) -> None:
    """T97: a draw at the beginning of an iteration would shift every dropout mask after a resume."""
    before = host_state()
    each = loader(dataset=Augmented(), **kwargs)
    take(each, 9)
    resumed(each, dataset=Augmented(), **kwargs)
    after = host_state()
    assert before["python"] == after["python"] and torch.equal(before["torch"], after["torch"])
    assert np.array_equal(before["numpy"]["state"]["key"], after["numpy"]["state"]["key"])
    assert before["numpy"]["state"]["pos"] == after["numpy"]["state"]["pos"]


@pytest.mark.parametrize("kwargs", WORKERS)
@pytest.mark.parametrize("dataset", [Augmented, AtOnce])
def test_augmentation_is_exact_after_a_resume(dataset: type, kwargs: dict[str, Any]) -> None:
    """Random parts of a sample depend on (seed, epoch, index) alone: not on workers, prefetching or the cut."""
    reference = take(loader(dataset=dataset()), 10)
    source = loader(dataset=dataset(), **kwargs)
    seen = take(source, 4)
    with host_state_kept():
        seed_host(4711)  # nor on the random state of the process
        seen += take(resumed(source, dataset=dataset(), **kwargs), 6)
    assert seen == reference
    values = [value for batch in reference for sample in batch for value in sample[1:]]
    assert len(set(values)) == len(values)  # nor is any drawn twice, in the other epoch either


@pytest.mark.parametrize("kwargs", WORKERS)
def test_several_resumes_with_workers_over_several_epochs(kwargs: dict[str, Any]) -> None:
    """T94, T97: cut in the first epoch, at its end, at the beginning of the next, twice at once."""
    reference = take(loader(dataset=Augmented()), 22)
    current, seen = loader(dataset=Augmented(), **kwargs), []
    for batches in (2, 5, 0, 1, 9, 5):
        seen += take(current, batches)
        current = resumed(current, dataset=Augmented(), **kwargs)
    assert seen == reference


def random_collate(batch: list[int]) -> tuple[list[int], float]:
    return batch, random.random()


@pytest.mark.parametrize("kwargs", WORKERS)
def test_random_draws_of_the_collate_function_are_exact_too(kwargs: dict[str, Any]) -> None:
    """Masking is often drawn there."""
    reference = take(loader(collate_fn=random_collate), 6)
    source = loader(collate_fn=random_collate, **kwargs)
    seen = take(source, 2)
    assert seen + take(resumed(source, collate_fn=random_collate, **kwargs), 4) == reference


class Opened(Numbers):
    """Needs something that only a worker can open."""

    file = "closed"

    def __getitem__(self, index: int) -> Any:
        return self.file


def open_in_worker(worker: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    info.dataset.file = f"{info.dataset.file} then open"


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_worker_init_functions_reach_the_dataset(start: str) -> None:
    each = loader(dataset=Opened(6), num_workers=1, worker_init_fn=open_in_worker, multiprocessing_context=start)
    assert flat(list(each)) == ["closed then open"] * 6


# --- samplers --------------------------------------------------------------------------------------------------------


def test_a_sampler_that_draws_from_the_global_generator_becomes_repeatable() -> None:
    """torch's RandomSampler without a generator: another order at each epoch, the same after a resume."""
    dataset = Numbers()

    def sampled() -> dict[str, Any]:
        return {"sampler": torch.utils.data.RandomSampler(dataset)}

    with host_state_kept():
        before = torch.get_rng_state()
        reference = take(loader(**sampled()), 12)
        source = loader(**sampled())
        seen = take(source, 9)
        seed_host(5)
        seen += take(resumed(source, **sampled()), 3)
        assert seen == reference and flat(reference[:7]) != flat(reference[7:])
        seed_host(0)
        assert not torch.equal(before, torch.get_rng_state())


class Weighted:
    """A sampler told the epoch, over a part of the dataset."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(3 * index + self.epoch) % 20 for index in range(9)])


def test_a_sampler_is_told_the_epoch() -> None:
    each = loader(sampler=Weighted())
    assert [flat(list(each)) for _ in range(2)] == [[(3 * i + e) % 20 for i in range(9)] for e in range(2)]
    assert len(each) == 3


def test_a_sampler_that_is_not_repeatable_is_refused() -> None:
    """Its own generator has gone on; the rest of the epoch would be other samples."""

    def sampled() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(3)
        return {"sampler": torch.utils.data.RandomSampler(Numbers(), generator=generator)}

    source = loader(**sampled())
    take(source, 16)
    saved = stored(DataComponent("data", source))
    problems = DataComponent("data", loader(**sampled())).check(saved)
    assert problems == ["data: the order of epoch 2 is not the one that was saved: the sampler is not repeatable"]


# --- ranks -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 40),
    batch_size=st.integers(1, 5),
    world=st.integers(1, 4),
    drop_last=st.booleans(),
    cut=st.integers(0, 6),
)
def test_ranks_share_an_epoch_equally_and_without_overlap(
    length: int, batch_size: int, world: int, drop_last: bool, cut: int
) -> None:
    """Each rank has as many batches; together they are a prefix of the order, after a resume too."""
    if length < world * (batch_size if drop_last else 1):
        return
    options = {"length": length, "batch_size": batch_size, "drop_last": drop_last, "world_size": world}
    whole = flat(list(loader(length, 1)))
    ranks = []
    for rank in range(world):
        source = loader(**options, rank=rank)
        before = take(source, min(cut, len(source) - 1))
        after = resumed(source, **options, rank=rank)
        assert after.position()["samples_in_epoch"] == sum(map(len, before)) * world
        ranks.append(before + list(after))
    assert len({tuple(map(len, batches)) for batches in ranks}) == 1
    together = [sample for step in zip(*ranks, strict=True) for batch in step for sample in batch]
    assert together == whole[: len(together)]
    assert len(whole) - len(together) < (batch_size * world if drop_last else world)


def test_another_number_of_ranks_is_refused_with_both() -> None:
    """Resuming on more ranks would read some samples twice; re-splitting has to be asked for."""
    saved = stored(DataComponent("data", loader(world_size=2)))
    assert DataComponent("data", loader(world_size=4)).check(saved) == [
        "data: the number of ranks that share the data was 2 when saved, it is 4 now"
    ]


def test_the_state_of_another_rank_is_refused() -> None:
    """T100: one rank's state under another's key."""
    saved = stored(DataComponent("data", loader(world_size=2, rank=1)))
    assert DataComponent("data", loader(world_size=2)).check(saved) == ["data: the rank was 1 when saved, it is 0 now"]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"seed": 1}, "the seed of the order was 0 when saved, it is 1 now"),
        ({"length": 21}, "the length of the dataset was 20 when saved, it is 21 now"),
        ({"shuffle": False}, "shuffle was True when saved, it is False now"),
    ],
)
def test_what_would_change_the_order_is_refused(now: dict[str, Any], message: str) -> None:
    source, fresh = loader(), loader(**now)
    take(source, 2)
    assert fresh.problems(source.state_dict()) == [message]
    with pytest.raises(IncompatibleState, match=message):
        fresh.load_state_dict(source.state_dict())
    assert fresh.position() == {"epoch": 0, "samples_in_epoch": 0, "samples_total": 0}


def test_a_state_that_is_not_a_loaders_is_refused() -> None:
    each = loader()
    assert each.problems({}) == each.problems(None) == ["the saved state is not that of a ResumableLoader"]
    assert "21 samples of an epoch of 20" in each.problems({**each.state_dict(), "consumed": 21})[0]
    assert DataComponent("data", each).check([]) == ["data: the saved state is not that of a data loader"]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def test_unsuitable_arguments_are_refused_with_advice() -> None:
    with pytest.raises(ConfigurationError, match="StatefulDataLoader"):
        loader(dataset=Stream())
    for kwargs in (
        {"batch_size": 0},
        {"rank": 2, "world_size": 2},
        {"length": 0},
        {"batch_size": 30, "drop_last": True},
    ):
        with pytest.raises(ConfigurationError):
            loader(**kwargs)
    for kwargs in ({"generator": None}, {"batch_sampler": []}, {"in_order": False}):
        with pytest.raises(ConfigurationError, match="takes no"):
            loader(**kwargs)
    with pytest.raises(TypeError):
        loader(no_such_option=1)


def test_a_plain_data_loader_is_refused_with_advice() -> None:
    with pytest.raises(ConfigurationError, match="a DataLoader has no state_dict") as caught:
        DataComponent("data", DataLoader(Numbers()))
    assert "ResumableLoader" in caught.value.next_step and "StatefulDataLoader" in caught.value.next_step


def test_counters_and_position_are_the_loaders() -> None:
    each = loader()
    take(each, 8)
    component = DataComponent("data", each)
    assert component.counters() == {"epoch": 1, "samples_total": 23}
    assert component.position() == {"epoch": 1, "samples_in_epoch": 3, "samples_total": 23}
    other = DataComponent("data", stateful(0))
    assert other.counters() == {} and other.position() is None
    assert other.check(stored(component))[0].startswith(
        "data: saved from onward.state.loader.ResumableLoader, the live"
    )


# --- torchdata -------------------------------------------------------------------------------------------------------


def stateful(workers: int) -> StatefulDataLoader[int]:
    return StatefulDataLoader(Numbers(), 3, shuffle=True, num_workers=workers, collate_fn=as_list)


def run(each: Any, batches: int) -> list[Any]:
    """Trains: a draw from torch's global generator for each batch, as dropout has them."""
    source = endless(each)
    return [(next(source), float(torch.rand(1))) for _ in range(batches)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cut", [1, 4, 7, 10])
def test_a_stateful_data_loader_goes_on_exactly(workers: int, cut: int) -> None:
    """T97, T98: mid-epoch, at the end of an epoch and in the next, samples and the training's own draws are equal."""
    with host_state_kept():
        seed_host(1)
        reference = run(stateful(workers), 17)
        seed_host(1)
        source = stateful(workers)
        seen = run(source, cut)
        saved = [stored(DataComponent("data", source)), stored(RandomComponent(accelerators=[]))]
        del source
        seed_host(2)
        fresh = stateful(workers)
        for component, tree in zip(
            (DataComponent("data", fresh), RandomComponent(accelerators=[])), saved, strict=True
        ):
            assert component.check(tree) == []
            component.load(tree)
        seen += run(fresh, 17 - cut)
        assert seen == reference


def test_a_stateful_data_loader_with_other_workers_is_refused() -> None:
    """It would take the state, and lose the samples of a worker without a word."""
    with host_state_kept():
        saved = stored(DataComponent("data", stateful(2)))
        assert DataComponent("data", stateful(1)).check(saved) == [
            "data: the loader had 2 workers when saved, it has 1 now"
        ]
        assert DataComponent("data", stateful(0)).check(saved)
