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
from cases.shared import in_process, running
from cases.training import EVERY, KINDS, Outcome, outcome_of, straight, train, train_to_file

import onward

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
