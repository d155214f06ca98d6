"""No part of the training state is left out, or restored in the wrong order. Exact resumes: ``tests/integration``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import onward

from .shared import refused, running, same


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
    refused(onward.errors.IncompatibleState, "numpy", url, generators=swapped)
    fewer = {name: generator for name, generator in make(5).items() if name != "python"}
    refused(onward.errors.IncompatibleState, "python", url, generators=fewer)


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
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = {"model": model, "optimizer": optimizer, "scheduler": lr_scheduler.StepLR(optimizer, 3)}
    with running(url, **parts) as (ckpt, _):
        ckpt.save(1, wait=True)
    fewer = {name: parts[name] for name in ("model", "optimizer")}
    refused(onward.errors.IncompleteState, "'scheduler'", url, **fewer)
    refused(onward.errors.IncompleteState, "'average'", url, average={}, **parts)
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


def test_between_the_optimizers_step_and_the_steps_end_a_save_is_refused(url: str) -> None:
    """The parameters are those of the next step already, and would be committed as those of this one."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    with running(url, model=model, optimizer=optimizer, scheduler=scheduler) as (ckpt, _):
        for step in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if step == 2:
                with pytest.raises(onward.errors.MidStep):
                    ckpt.save()
            scheduler.step()
            ckpt.step(step)
        ckpt.save(wait=True)
        assert [c.step for c in ckpt.checkpoints()] == [3]


def test_averages_and_schedules_of_torchs_own_utilities(url: str) -> None:
    """``AveragedModel`` with its count, ``SWALR``, and a parametrised layer."""

    def make() -> dict[str, Any]:
        model = torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        average = torch.optim.swa_utils.AveragedModel(model)
        schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
        return {"model": model, "optimizer": optimizer, "average": average, "schedule": schedule}

    def step(parts: dict[str, Any]) -> None:
        parts["optimizer"].zero_grad()
        parts["model"](torch.ones(2, 3)).sum().backward()
        parts["optimizer"].step()
        parts["average"].update_parameters(parts["model"])
        parts["schedule"].step()

    saved, fresh = make(), make()
    for _ in range(2):
        step(saved)
    with running(url, **saved) as (ckpt, _):
        ckpt.save(2, wait=True)
    with running(url, **fresh):
        for parts in (saved, fresh):
            step(parts)
        for name in ("model", "average"):
            assert same(dict(saved[name].state_dict()), dict(fresh[name].state_dict()))
        assert saved["optimizer"].param_groups[0]["lr"] == fresh["optimizer"].param_groups[0]["lr"]
