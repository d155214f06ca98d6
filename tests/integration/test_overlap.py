"""Every checkpoint holds one step everywhere, though everything is changed in place as soon as ``step`` returns."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from steps import Everywhere, Slow, Unseen, numbers_of, slowly

import onward
from fault.writers import folder, running
from onward.save.saver import Saver

ROUNDS = 60


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def url(fast_path: Path) -> str:
    onward.init_store(f"file://{fast_path}/store")
    return f"file://{fast_path}/store"


def train(url: str, job: Everywhere, rounds: int, settings: onward.SaveSettings) -> dict[str, int]:
    """Trains with a save at every step; what the run says of itself at the end."""
    with running(url, every=1, save=settings, **job.components()) as (ckpt, _):
        for step in range(rounds):
            job.step(step + 1)
            ckpt.step(step)
        ckpt.wait()
        return {"skipped": ckpt.skipped_saves, "restarts": getattr(ckpt._saver._writer, "restarts", 0)}


def saved_steps(url: str) -> list[int]:
    """The steps of all checkpoints, in order."""
    names = [path.name for path in (Path(url.removeprefix("file://")) / "runs/r/checkpoints").iterdir()]
    return sorted(int(name.split("-")[1]) for name in names)


@pytest.mark.parametrize("writer", ["process", "thread"])
@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlap"])
def test_sixty_checkpoints_in_a_row_hold_one_step_each(
    url: str, monkeypatch: pytest.MonkeyPatch, writer: str, overlap: bool
) -> None:
    """T41, with every way of capturing and writing."""
    job = Everywhere(tensors=6, items=20_000)
    settings = onward.SaveSettings(writer=writer, overlap=overlap, verify_after_save="sizes")  # type: ignore[arg-type]
    with slowly(monkeypatch, 0.001):
        said = train(url, job, ROUNDS, settings)
    mixed = {step: found for step in range(1, ROUNDS + 1) if (found := numbers_of(folder(url, step))) != {float(step)}}
    assert not mixed and said == {"skipped": 0, "restarts": 0}
    print(f"\n{writer}, {'overlap' if overlap else 'blocking'}: {ROUNDS} checkpoints, each of one step everywhere")


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_saves_that_are_skipped_leave_the_others_whole(url: str, monkeypatch: pytest.MonkeyPatch, writer: str) -> None:
    """T43, within one tier: saves fall due faster than they are written."""
    job = Everywhere(tensors=6, items=20_000)
    settings = onward.SaveSettings(writer=writer, overlap=True, if_busy="skip")  # type: ignore[arg-type]
    with slowly(monkeypatch, 0.001):
        said = train(url, job, ROUNDS, settings)
    steps = saved_steps(url)
    assert said["skipped"] > 0 and len(steps) + said["skipped"] == ROUNDS
    assert all(numbers_of(folder(url, step)) == {float(step)} for step in steps)
    print(f"\n{writer}: {len(steps)} of {ROUNDS} due saves written, {said['skipped']} skipped and counted")


def test_the_step_must_wait_for_the_copy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without the wait, and with changes that nothing counts, checkpoints are mixes."""
    monkeypatch.setattr(Saver, "settle", lambda self: None)
    job = Everywhere(Unseen, tensors=6, items=2000)
    with slowly(monkeypatch, 0.01), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = onward.SaveSettings(writer="thread", overlap=True, verify_after_save="sizes", tolerate_failures=99)
        train(url, job, 6, settings)
    mixed = [step for step in saved_steps(url) if len(numbers_of(folder(url, step))) > 1]
    assert mixed or len(saved_steps(url)) < 6


def test_training_goes_on_while_the_copy_is_made(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward do not wait; only the step does."""
    import time

    job = Everywhere(tensors=6, items=2000)
    settings = onward.SaveSettings(writer="thread", overlap=True)
    with slowly(monkeypatch, 0.1), running(url, every=1, save=settings, **job.components()) as (ckpt, _):
        job.step(1)
        started = time.monotonic()
        ckpt.step(0)
        told = time.monotonic() - started
        job.outside(2)
        forward = time.monotonic() - started
        job.optimizer.step()
        stepped = time.monotonic() - started
    assert told < 0.6 and forward < 0.6, "twelve tensors, a tenth of a second each"
    assert stepped >= 1.1, "the step waited for the copy"
    assert numbers_of(folder(url, 1)) == {1.0}


def test_a_loop_that_forgets_nothing_but_close_is_whole_too(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save asked for with ``save()`` between two steps is captured with those of ``step``."""
    job = Everywhere(tensors=4, items=2000)
    settings = onward.SaveSettings(overlap=True)
    with slowly(monkeypatch, 0.01), running(url, every=2, save=settings, **job.components()) as (ckpt, _):
        for step in range(6):
            job.step(step + 1)
            ckpt.step(step)
            if step % 2 == 0:
                ckpt.save(reason="between")
    assert saved_steps(url) == [1, 2, 3, 4, 5, 6]
    assert all(numbers_of(folder(url, step)) == {float(step)} for step in range(1, 7))


class Sneaky(Everywhere):
    """Forward changes a parameter: weights are clipped or normalised in place."""

    def step(self, step: int) -> None:
        if step == 3:
            with torch.no_grad():
                self.model[5].mul_(1.0)
        super().step(step)


def test_a_parameter_that_forward_changes_is_noticed_and_training_goes_on(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Sneaky(tensors=6, items=2000)
    settings = onward.SaveSettings(overlap=True)
    with (
        slowly(monkeypatch, 0.01),
        pytest.warns(UserWarning, match=r"step 2: .*changed between the step boundary and optimizer\.step"),
    ):
        train(url, job, 5, settings)
    assert saved_steps(url) == [1, 3, 4, 5], "the save of step 2 failed, the others stand"
    assert all(numbers_of(folder(url, step)) == {float(step)} for step in saved_steps(url))


def test_overlap_is_refused_before_anything_is_taken_over(url: str) -> None:
    box = {"x": torch.zeros(3)}
    with pytest.raises(onward.errors.ConfigurationError, match=r"overlap cannot be used: no optimizer"):  # noqa: SIM117
        with running(url, save=onward.SaveSettings(overlap=True), box=box):
            pass
    assert not (Path(url.removeprefix("file://")) / "runs").is_dir() or not list(
        (Path(url.removeprefix("file://")) / "runs").rglob("lease.json")
    )


def test_moments_that_turn_up_elsewhere_later_end_the_overlap(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a first start there are no moments to look at; an offloading optimizer makes them in its first step."""
    from onward.save import saver

    answers = iter([None] + ["its moments are on the host"] * 100)
    monkeypatch.setattr(saver, "problem", lambda components: next(answers))
    seen: list[int] = []
    start = Slow.start

    def note(self: Slow, copies: object) -> None:
        seen.append(len(copies))  # type: ignore[arg-type]
        start(self, copies)  # type: ignore[arg-type]

    monkeypatch.setattr(Slow, "start", note)
    job = Everywhere(tensors=3, items=100)
    with (
        slowly(monkeypatch, 0),
        running(url, every=1, save=onward.SaveSettings(overlap=True), **job.components()) as (
            ckpt,
            _,
        ),
    ):
        job.step(1)
        ckpt.step(0)
    assert len(seen) == 1, "all was copied at the boundary"


def test_the_optimizer_is_given_back_without_hooks(url: str) -> None:
    job = Everywhere(tensors=2, items=10)
    with running(url, save=onward.SaveSettings(overlap=True), **job.components()):
        assert job.optimizer._optimizer_step_pre_hooks
    assert not job.optimizer._optimizer_step_pre_hooks
