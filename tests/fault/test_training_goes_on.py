"""Faults as a training loop meets them: steps go on, failures are told, and a resume never mixes or blames wrongly."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path

import pytest
import torch

import onward
from onward.catalog.listing import read_catalog
from onward.storage.posix import PosixStore
from onward.testing.faults import FailAt, ShortWrites

from .harness import PLACES, RUN, delete_step, posix, start
from .powercut_life import Interruption

EVERY = 2


class Job:
    """A small training job of the run; every step changes every parameter."""

    def __init__(self, store: PosixStore, *, tolerate: int = 2) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        config = onward.Config(
            store=store.url,
            run=RUN,
            triggers=onward.TriggerSettings(every_steps=EVERY),
            save=onward.SaveSettings(tolerate_failures=tolerate, writer="thread"),
        )
        self.checkpointer = onward.Checkpointer(config, model=self.model, optimizer=self.optimizer, store=store)
        self.next = self.checkpointer.resume().next_step

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.full((4, 8), float(self.next))).square().mean().backward()
            self.optimizer.step()
            self.checkpointer.step(self.next)
            self.next += 1

    def weights(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


def weights_after(steps: int, place: Path) -> torch.Tensor:
    """What the weights are after so many steps when nothing goes wrong."""
    onward.init_store(f"file://{place}")
    job = Job(posix(place))
    job.train(steps)
    job.checkpointer.close()
    return job.weights()


def offered(root: Path) -> list[int]:
    return [info.step for info in read_catalog(posix(root), PLACES, "home").offered()]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
def test_training_goes_on_while_the_store_refuses_and_saves_again_when_it_works(place: Path, number: int) -> None:
    root = place / "s"
    onward.init_store(f"file://{root}")
    fault = FailAt(1 << 60, number, "forever", only=("write", "fsync"))
    job = Job(posix(root, fault))
    job.train(2)
    job.checkpointer.wait()
    fault.arm(3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        job.train(4)  # the saves of steps 4 and 6 fail
        with pytest.raises(onward.errors.SaveFailed, match="step 6"):
            job.checkpointer.wait()
        assert offered(root) == [2]
        fault.clear()
        job.train(2)
    job.checkpointer.close()
    assert offered(root) == [8, 2]
    texts = [str(warning.message) for warning in told]
    assert len(texts) == 2 and "step 4" in texts[0] and "step 6" in texts[1]
    again = Job(posix(root))
    assert again.next == 8
    assert torch.equal(again.weights(), weights_after(8, place / "reference"))
    again.checkpointer.close()


def test_failures_that_go_on_end_training_and_the_last_one_is_never_swallowed(place: Path) -> None:
    root = place / "s"
    onward.init_store(f"file://{root}")
    fault = FailAt(1 << 60, errno.EIO, "forever", only=("fsync",))
    job = Job(posix(root, fault))
    fault.arm(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(onward.errors.SaveFailed, match="step 6"):
            job.train(10)
        assert 5 <= job.next <= 8  # told when the outcome is known, at the latest when the next save is due
        job.checkpointer.save(wait=False)
        with pytest.raises(onward.errors.SaveFailed):
            job.checkpointer.close()
    assert offered(root) == []


def test_a_store_that_writes_a_byte_at_a_time_costs_nothing_but_time(place: Path) -> None:
    root = place / "s"
    onward.init_store(f"file://{root}")
    job = Job(posix(root, ShortWrites(1)))
    job.train(2)
    job.checkpointer.close()
    again = Job(posix(root))
    assert torch.equal(again.weights(), job.weights())
    again.checkpointer.close()


@pytest.mark.parametrize("n", [0, 3, 6, 9])
def test_a_resume_whose_checkpoint_is_deleted_under_its_hands_takes_another_and_blames_nobody(
    place: Path, n: int
) -> None:
    """It looks again whether what it misses still exists, before it calls it damaged."""
    root = place / "s"
    onward.init_store(f"file://{root}")
    job = Job(posix(root))
    job.train(2 * EVERY)
    job.checkpointer.close()
    reads = 0

    def amid_the_newest(call: object) -> bool:
        nonlocal reads
        path, name = getattr(call, "path", ""), getattr(call, "name", "")
        reads += name == "pread" and "/checkpoints/step-000000000004" in path
        return reads > n

    def delete() -> None:
        (root / PLACES.lease).unlink()
        other = start(posix(root))
        delete_step(other, 4)
        other.end()

    between = Interruption(amid_the_newest, delete, posix(root).calls)
    resumed = Job(posix(root, between))
    assert between.done
    assert resumed.next == 2
    kinds = {r.kind for info in read_catalog(posix(root), PLACES, "home").checkpoints for r in info.receipts}
    assert "quarantined" not in kinds
    with pytest.raises(onward.errors.Superseded), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed.train(4)
        resumed.checkpointer.wait()
