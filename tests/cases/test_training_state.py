"""No part of the training state is left out, or restored in the wrong order. Exact resumes: ``tests/integration``."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import onward

from .shared import in_process, running, same
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
    with pytest.raises(onward.errors.IncompatibleConfiguration, match=r"max_steps\s+100\s+200"), running(
        url, **make(200, 0.1)
    ):
        pass
    without = make(200, 0.2)
    without.pop("describe")
    with pytest.raises(onward.errors.IncompatibleConfiguration) as caught, running(url, **without):
        pass
    assert "schedule.T_max" in str(caught.value)
    assert "schedule.base_lrs" in str(caught.value)
    changed = make(200, 0.1)
    policy = {"schedule.T_max": "warn", "hyperparameters.max_steps": "warn"}
    with running(url, resume=onward.ResumeSettings(policy=policy), **changed) as (_, start):
        assert {d.field for d in start.differences} >= {"schedule.T_max", "hyperparameters.max_steps"}
        assert changed["scheduler"].T_max == 200, "a relaxed field keeps the value of the program"


def test_patience_and_best_value_of_an_early_stop_go_on_counting(url: str) -> None:
    """T85."""

    class EarlyStop:
        def __init__(self) -> None:
            self.best, self.bad = float("inf"), 0

        def evaluate(self, loss: float) -> None:
            self.bad = 0 if loss < self.best else self.bad + 1
            self.best = min(self.best, loss)

        def state_dict(self) -> dict[str, Any]:
            return vars(self)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            vars(self).update(state)

    first = EarlyStop()
    with running(url, stop=first) as (ckpt, _):
        for loss in (1.0, 2.0, 2.0):
            first.evaluate(loss)
        ckpt.save(3, wait=True)
    second = EarlyStop()
    with running(url, stop=second) as (ckpt, _):
        ckpt.finish_restore()
        second.evaluate(2.0)
        assert (second.best, second.bad) == (1.0, 3)


class Swapping:
    """An average that can be swapped into the model and back, by handing over the memory itself."""

    def __init__(self, model: torch.nn.Linear, value: float) -> None:
        self.model, self.updates, self.swapped = model, 0, False
        self.other = torch.full_like(model.weight, value)

    def swap(self) -> None:
        self.model.weight.data, self.other = self.other, self.model.weight.data
        self.swapped = not self.swapped

    def state_dict(self) -> dict[str, Any]:
        return {"other": self.other, "updates": self.updates, "swapped": self.swapped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@pytest.mark.parametrize("moment", ["swapped out", "swapped in", "asked for while swapped in"])
def test_raw_and_averaged_weights_are_both_saved_whichever_is_in_the_model(url: str, moment: str) -> None:
    """T86."""
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    average = Swapping(model, 0.5)
    average.updates = 7
    with running(url, model=model, average=average) as (ckpt, _):
        if moment != "swapped out":
            average.swap()
        if moment == "asked for while swapped in":
            ckpt.request_save("from an evaluation")
            average.swap()
            assert ckpt.step(0).saved
        else:
            ckpt.save(1, wait=True)
    fresh = torch.nn.Linear(2, 2, bias=False)
    restored = Swapping(fresh, 9.0)
    with running(url, model=fresh, average=restored):
        assert restored.swapped is (moment == "swapped in")
        if restored.swapped:
            restored.swap()
        assert bool((fresh.weight == 1.0).all())
        assert bool((restored.other == 0.5).all())
        assert restored.updates == 7


def test_generators_of_the_programs_own_each_get_their_own_state_back(url: str) -> None:
    """T88, one process: several generators stand for several ranks."""

    def make(seed: int) -> dict[str, Any]:
        return {
            "torch": torch.Generator().manual_seed(seed),
            "torch2": torch.Generator().manual_seed(seed + 1),
            "numpy": np.random.default_rng(seed),
            "philox": np.random.Generator(np.random.Philox(seed)),
            "legacy": np.random.RandomState(seed),
            "python": random.Random(seed),
        }

    def draw(generators: dict[str, Any]) -> list[float]:
        drawn = [torch.randn(3, generator=generators[name]).tolist() for name in ("torch", "torch2")]
        drawn += [generators[name].normal(size=3).tolist() for name in ("numpy", "philox", "legacy")]
        return [*drawn, generators["python"].gauss(0, 1)]

    saved = make(1)
    draw(saved)
    saved["python"].gauss(0, 1)  # the second of a pair is kept aside, and is state too
    with running(url, generators=saved) as (ckpt, _):
        ckpt.save(1, wait=True)
    expected = draw(saved)
    fresh = make(100)
    with running(url, generators=fresh):
        assert draw(fresh) == expected
    swapped = make(5)
    swapped["numpy"] = np.random.RandomState(5)
    with pytest.raises(onward.errors.IncompatibleState, match="numpy"), running(url, generators=swapped):
        pass
    fewer = {name: generator for name, generator in make(5).items() if name != "python"}
    with pytest.raises(onward.errors.IncompatibleState, match="python"), running(url, generators=fewer):
        pass


def test_random_state_is_restored_last_and_again_after_late_set_up(url: str) -> None:
    """T89."""

    class Drawing:
        """Draws while it is restored, as modules and loaders do that initialise themselves."""

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.rand(3), np.random.rand(), random.random()

    def draw() -> tuple[Any, ...]:
        return torch.rand(4).tolist(), np.random.rand(3).tolist(), random.random()

    def seed(value: int) -> None:
        torch.manual_seed(value), np.random.seed(value), random.seed(value)

    seed(1)
    with running(url, user=Drawing()) as (ckpt, _):
        ckpt.save(1, wait=True)
    reference = draw()
    seed(2)
    with running(url, user=Drawing()) as (ckpt, _):
        assert draw() == reference
        seed(3)  # set-up code after the resume
        assert draw() != reference
        ckpt.finish_restore()
        assert draw() == reference


# --- further cases of the kind ---------------------------------------------------------------------------------


def test_two_models_with_optimizers_and_schedulers_of_their_own(url: str) -> None:
    """As a GAN has them; parameters of the two have equal names and shapes."""

    def make(value: float) -> dict[str, Any]:
        models = {name: torch.nn.Linear(2, 2) for name in ("generator", "critic")}
        for number, model in enumerate(models.values()):
            torch.nn.init.constant_(model.weight, value + number)
        optimizers = {f"{name}_optimizer": torch.optim.Adam(m.parameters(), lr=0.1) for name, m in models.items()}
        schedulers = {f"{name}_schedule": lr_scheduler.StepLR(o, 2) for name, o in optimizers.items()}
        return {**models, **optimizers, **schedulers}

    def step(parts: dict[str, Any]) -> None:
        for name, scale in (("generator", 1.0), ("critic", 100.0)):
            (parts[name].weight.sum() * scale).backward()
            parts[f"{name}_optimizer"].step()
            parts[f"{name}_optimizer"].zero_grad()
            parts[f"{name}_optimizer_schedule"].step()

    saved = make(1)
    step(saved)
    with running(url, **saved) as (ckpt, _):
        ckpt.save(1, wait=True)
    fresh = make(5)
    with running(url, **fresh):
        step(saved)
        step(fresh)
        for name in ("generator", "critic"):
            assert all(map(same, saved[name].parameters(), fresh[name].parameters()))
            states = saved[f"{name}_optimizer"].state_dict(), fresh[f"{name}_optimizer"].state_dict()
            assert same(*states)


def test_a_part_that_is_missing_on_either_side_is_named(url: str) -> None:
    """Nothing is silently re-initialised, and what is left out is left out on purpose."""
    parts = dict(zip(("model", "optimizer", "scheduler"), _parts("StepLR"), strict=True))
    with running(url, **parts) as (ckpt, _):
        ckpt.save(1, wait=True)
    fewer = {name: parts[name] for name in ("model", "optimizer")}
    with pytest.raises(onward.errors.IncompleteState, match="'scheduler'"), running(url, **fewer):
        pass
    with pytest.raises(onward.errors.IncompleteState, match="'average'"), running(url, average={}, **parts):
        pass
    with running(url, how={"waive": ["scheduler"]}, **fewer) as (_, start):
        assert start.next_step == 1
    with running(url, resume=onward.ResumeSettings(waive=("average",)), average={}, **parts) as (_, start):
        assert start.next_step == 1


def test_running_statistics_and_frozen_weights_are_state_and_the_mode_is_not(url: str) -> None:
    """Batch norm's averages and count come back; a frozen parameter too; ``eval`` and ``train`` are the program's."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    for _ in range(3):
        model(torch.randn(8, 3))
    model.eval()
    with running(url, model=model) as (ckpt, _):
        ckpt.save(1, wait=True)
    fresh = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    with running(url, model=fresh):
        assert same(dict(model.state_dict()), dict(fresh.state_dict()))
        assert int(fresh[1].num_batches_tracked) == 3
        assert fresh.training
        assert fresh[0].weight.requires_grad
