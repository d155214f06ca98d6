"""Learning rate and schedule go on where they stood: of the kind *training state left out*."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import onward

from .shared import in_process, refused, running
from .training import outcome_of, straight, train, train_to_file

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 7], 0.5),
    "Cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "WarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "Cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 4, mode="exp_range", gamma=0.9),
    "Lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "Multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "Sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1, 4), lr_scheduler.ExponentialLR(o, 0.8)], [4]
    ),
    "Chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.PolynomialLR(o, 15)]
    ),
    "ReduceOnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1),
}


def _parts(schedule: str, lr: float = 0.05, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, **options)
    return model, optimizer, SCHEDULERS[schedule](optimizer)


def _rates(parts: tuple[Any, torch.optim.Optimizer, Any], steps: range) -> list[float]:
    found = []
    for step in steps:
        parts[1].step()
        parts[2].step(*([1.0 + (step // 4)] if isinstance(parts[2], lr_scheduler.ReduceLROnPlateau) else []))
        found.append(parts[1].param_groups[0]["lr"])
    return found


def test_warm_up_and_decay_go_on_in_a_new_process(url: str, tmp_path: Path) -> None:
    """T79."""
    reference = straight("adamw", 20)
    train("adamw", url, 0, 10)
    assert in_process(train_to_file, "adamw", url, 1, 20, str(tmp_path / "out")) == 0
    outcome = outcome_of(str(tmp_path / "out"))
    assert (outcome.first, outcome.steps, outcome.digests) == (10, reference.steps[10:], reference.digests)


@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_a_freshly_built_scheduler_goes_on_where_the_saved_one_stood(url: str, schedule: str) -> None:
    """T80."""
    reference = _rates(_parts(schedule), range(14))
    first = _parts(schedule)
    with running(url, model=first[0], optimizer=first[1], scheduler=first[2]) as (ckpt, _):
        assert _rates(first, range(5)) == reference[:5]
        ckpt.save(5, wait=True)
    second = _parts(schedule)
    began = second[1].param_groups[0].get("initial_lr")
    with running(url, model=second[0], optimizer=second[1], scheduler=second[2]) as (_, start):
        assert start.next_step == 5
        assert second[1].param_groups[0]["lr"] == reference[4]
        assert second[1].param_groups[0].get("initial_lr") == began
        assert _rates(second, range(5, 14)) == reference[5:]


def test_hyper_parameters_are_the_saved_ones_before_the_first_step(url: str) -> None:
    """T82."""
    model = torch.nn.Linear(3, 3)
    saved = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.2, betas=(0.8, 0.9), amsgrad=True)
    saved.param_groups[0]["lr"] = 0.03  # changed by hand on the way, without a scheduler
    with running(url, model=model, optimizer=saved) as (ckpt, _):
        ckpt.save(1, wait=True)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.0)
    group = fresh.param_groups[0]
    with running(url, model=model, optimizer=fresh) as (_, start):
        assert fresh.param_groups[0] is group, "who holds the group would look at the old one"
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in saved.param_groups[0].items() if k != "params"
        }
        assert {d.field for d in start.differences} == {
            f"optimizer.groups[0].{name}" for name in ("lr", "weight_decay", "betas", "amsgrad")
        }


def test_another_length_or_rate_of_the_schedule_stops_the_resume_unless_a_policy_says_which_wins(url: str) -> None:
    """T83."""

    def make(steps: int, lr: float) -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, steps)
        described = onward.describe(hyperparameters={"max_steps": steps, "lr": lr}, code=False)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "describe": described}

    with running(url, **make(100, 0.1)) as (ckpt, _):
        ckpt.save(1, wait=True)
    refused(onward.errors.IncompatibleConfiguration, r"max_steps\s+100\s+200", url, **make(200, 0.1))
    without = make(200, 0.2)
    without.pop("describe")
    error = refused(onward.errors.IncompatibleConfiguration, r"schedule\.T_max", url, **without)
    assert "schedule.base_lrs" in str(error)
    changed = make(200, 0.1)
    policy = {"schedule.T_max": "warn", "hyperparameters.max_steps": "warn"}
    with running(url, resume=onward.ResumeSettings(policy=policy), **changed) as (_, start):
        assert {d.field for d in start.differences} >= {"schedule.T_max", "hyperparameters.max_steps"}
        assert changed["scheduler"].T_max == 200, "a relaxed field keeps the value of the program"
