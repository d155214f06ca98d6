"""Training that was interrupted goes on to the last bit as if it had not been.

The reference trains without onward. Each kind has its negative control: with one part deliberately not restored, the
same comparison must fail.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import onward
from cases.shared import in_process, refused, running
from cases.training import EVERY, KINDS, Outcome, outcome_of, straight, train, train_to_file

UNTIL = 2 * EVERY + 4
# What is not restored in the negative control of each kind.
CONTROL = {
    "adamw": "optimizer",
    "sgd-momentum": "optimizer",
    "factored": "optimizer",
    "lion": "optimizer",
    "bf16-fp32-moments": "optimizer",
    "scaler-skips": "scaler",
    "dropout": "rng",
    "resumable-0": "data",
    "resumable-2": "data",
    "torchdata-0": "data",
    "torchdata-2": "data",
    "accumulation": "rng",
    "average": "average",
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    onward.init_store(f"file://{tmp_path}/store")
    return f"file://{tmp_path}/store"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _same_from(outcome: Outcome, reference: Outcome) -> bool:
    rest = reference.steps[outcome.first :]
    return len(rest) == len(outcome.steps) > 0 and (outcome.steps, outcome.digests) == (rest, reference.digests)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_is_bit_identical_and_its_control_is_not(url: str, kind: str) -> None:
    reference = straight(kind, UNTIL)
    first = train(kind, url, 0, EVERY + 2)  # two steps past the save: those are trained again
    assert first.steps == reference.steps[: EVERY + 2], "saving changed the training"
    control = train(kind, url, 1, UNTIL, checkpoint="5", waive=[CONTROL[kind]])
    assert control.first == EVERY
    assert not _same_from(control, reference), "the comparison cannot tell a part that was not restored"
    second = train(kind, url, 2, EVERY * 2 + 1, checkpoint="5")
    assert second.steps == reference.steps[EVERY : EVERY * 2 + 1]
    third = train(kind, url, 3, UNTIL)
    assert third.first == EVERY * 2
    assert third.digests.keys() == reference.digests.keys()
    assert _same_from(third, reference)


@pytest.mark.parametrize("kind", ["scaler-skips", "dropout", "resumable-2", "torchdata-0", "average"])
def test_new_processes_go_on_bit_identically(url: str, tmp_path: Path, kind: str) -> None:
    reference = straight(kind, UNTIL)
    assert in_process(train_to_file, kind, url, 7, EVERY + 1, str(tmp_path / "other")) == 0  # another first seed
    assert outcome_of(str(tmp_path / "other")).steps[0] != reference.steps[0]
    onward.init_store(f"file://{tmp_path}/again")
    for seed, until in ((0, EVERY + 1), (1, 2 * EVERY + 3), (2, UNTIL)):  # two resumes in a row
        assert in_process(train_to_file, kind, f"{tmp_path}/again", seed, until, str(tmp_path / "out")) == 0
    outcome = outcome_of(str(tmp_path / "out"))
    assert outcome.first == 2 * EVERY
    assert _same_from(outcome, reference)


def test_a_new_interpreter_goes_on_bit_identically(url: str, tmp_path: Path) -> None:
    """Nothing is inherited: not a module, not an address, not the seed of hashes."""
    reference = straight("accumulation", UNTIL)
    train("accumulation", url, 0, EVERY)
    out = str(tmp_path / "out")
    command = [sys.executable, "-m", "cases.training", "accumulation", url, "1", str(UNTIL), out]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1], timeout=120)
    assert outcome_of(out).first == EVERY
    assert _same_from(outcome_of(out), reference)


@pytest.mark.parametrize("batch", [2, 7])  # saved in the middle of an epoch, and just at the end of one
def test_wherever_in_an_epoch_the_save_falls(url: str, batch: int) -> None:
    """The same epochs in other steps: 20 samples in 10 and in 3 batches, saved after every one of them."""
    quick = {"verify_after_save": "sizes"}

    def loop(until: int, where: str, first: str | None = None) -> list[list[int]]:
        loader = onward.ResumableLoader(range(20), batch, seed=3, num_workers=0)
        how = {"checkpoint": first} if first else {}
        with running(where, every=None if first else 1, save=quick, how=how, data=loader) as (ckpt, start):
            seen: list[list[int]] = []
            while start.next_step + len(seen) < until:
                for ids in loader:
                    seen.append(ids.tolist())
                    ckpt.step(start.next_step + len(seen) - 1)
                    if start.next_step + len(seen) == until:
                        break
            return seen

    reference = loop(12, url)
    for first in range(1, 12):
        assert loop(12, url, f"{first}") == reference[first:]


# --- what shapes cannot see, and warm start ---------------------------------------------------------------------


def _model(heads: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.MultiheadAttention(16, heads)
    return model, torch.optim.AdamW(model.parameters())


def test_other_heads_with_equal_shapes_are_refused(url: str) -> None:
    torch.manual_seed(0)
    model, optimizer = _model(2)
    described = onward.describe(model_config={"width": 16, "n_heads": 2}, code=False)
    with running(url, model=model, optimizer=optimizer, describe=described) as (ckpt, _):
        ckpt.save(5, wait=True)
    other, optimizer = _model(8)
    before = [p.detach().clone() for p in other.parameters()]
    described = onward.describe(model_config={"width": 16, "n_heads": 8}, code=False)
    for how in ({}, {"mode": "warm-start"}):
        parts = {"model": other, "optimizer": optimizer, "describe": described}
        error = refused(onward.errors.IncompatibleConfiguration, r"n_heads\s+2\s+8\s+must", url, how=how, **parts)
        assert error.exit_code == 78
    assert all(map(torch.equal, before, other.parameters()))
    relaxed = onward.ResumeSettings(policy={"model_config.n_heads": "warn"})
    with running(url, model=other, optimizer=optimizer, describe=described, resume=relaxed) as (_, start):
        assert [d.field for d in start.differences] == ["model_config.n_heads"]


def test_warm_start_takes_the_weights_and_nothing_else(url: str) -> None:
    kind = KINDS["resumable-0"]
    saved = train("resumable-0", url, 0, EVERY)
    job = kind(4)
    torch.manual_seed(11)
    with running(url, run="tuning", how={"mode": "warm-start", "source_run": "r"}, **job.components()) as (ckpt, start):
        assert (start.next_step, start.mode) == (0, "warm-start")
        assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(11))
        weights = {name: value for name, value in job.digests().items() if name in dict(job.model.named_parameters())}
        assert weights.items() <= saved.digests.items()
        assert not job.optimizer.state
        assert job.data.position()["samples_total"] == 0
        assert job.scheduler.last_epoch == 0
        for number in range(3):
            job.step(number)
            ckpt.step(number)
        ckpt.save(wait=True)
        after = job.digests()
    again = kind(5)
    # The same call after a crash: the run has gone on since, and must not begin anew from the other's weights.
    with running(url, run="tuning", how={"mode": "warm-start", "source_run": "r"}, **again.components()) as (_, start):
        assert (start.next_step, start.mode) == (3, "strict")
        assert again.digests() == after
