"""Schedules go on where they were, and a changed plan is reported instead of overridden."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stored import stored
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as lrs

from onward.errors import IncompatibleState, MidStep, UnsupportedState, UsageError
from onward.state.optimizer import OptimizerComponent
from onward.state.scheduler import ScalerComponent, SchedulerComponent


class Ramp:
    """A callable object, whose attributes torch saves."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return min(1.0, (step + 1) / self.warmup)


class OwnSchedule(lrs.LRScheduler):
    """A scheduler of the user's own, with a field for the plan and one that counts."""

    def __init__(self, optimizer: Optimizer, horizon: int = 10) -> None:
        self.horizon = horizon
        self.seen = 0
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.seen += 1
        return [base * max(0.0, 1 - self.last_epoch / self.horizon) for base in self.base_lrs]


def cosine_after_warmup(step: int, *, warmup: int, total: int) -> float:
    return step / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def warmup_then_cosine(optimizer: Optimizer) -> lrs.LRScheduler:
    parts = [lrs.LinearLR(optimizer, 0.1, total_iters=4), lrs.CosineAnnealingLR(optimizer, 12)]
    return lrs.SequentialLR(optimizer, parts, [4])


def chained(optimizer: Optimizer) -> lrs.LRScheduler:
    return lrs.ChainedScheduler([lrs.ConstantLR(optimizer, 0.5, total_iters=3), lrs.ExponentialLR(optimizer, 0.9)])


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lrs.StepLR(o, 3, 0.5),
    "multistep": lambda o: lrs.MultiStepLR(o, [2, 5, 5, 9], 0.5),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 15),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2),
    "onecycle": lambda o: lrs.OneCycleLR(o, 0.2, total_steps=20),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 3),
    "polynomial": lambda o: lrs.PolynomialLR(o, 15, 2.0),
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "lambda-object": lambda o: lrs.LambdaLR(o, Ramp(6)),
    "lambda-partial": lambda o: lrs.LambdaLR(o, functools.partial(cosine_after_warmup, warmup=4, total=16)),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.95),
    "sequential": warmup_then_cosine,
    "chained": chained,
    "own": OwnSchedule,
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1, factor=0.5, cooldown=1),
}


def build(make: Callable[[Optimizer], Any], lr: Any = 0.1, kind: Any = None) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = kind(model.parameters(), lr=lr) if kind else SGD(model.parameters(), lr=lr, momentum=0.9)
    return model, optimizer, make(optimizer)


def train(model: nn.Module, optimizer: Optimizer, scheduler: Any, steps: range) -> list[float]:
    rates = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(torch.full((2, 3), step / 10)).square().mean()
        loss.backward()
        optimizer.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
        if isinstance(scheduler, lrs.ReduceLROnPlateau):
            scheduler.step([3.0, 2.0, 2.0, 2.0, 1.0][step % 5])
        else:
            scheduler.step()
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_of_the_following_steps_equal_the_reference(name: str) -> None:
    """T79, T80: built fresh, restored, continued twice: every rate, parameter, momentum and initial_lr is equal."""
    reference = build(SCHEDULES[name])
    rates = train(*reference, range(16))
    model, optimizer, scheduler = build(SCHEDULES[name])
    component = SchedulerComponent("scheduler", scheduler)
    seen = train(model, optimizer, scheduler, range(5))
    for first, last in ((5, 7), (7, 16)):
        before = optimizer.param_groups[0].get("initial_lr")
        saved = stored(component)
        moments = stored(OptimizerComponent("optimizer", optimizer, dict(model.named_parameters())))
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        model, optimizer, scheduler = build(SCHEDULES[name])
        component = SchedulerComponent("scheduler", scheduler)
        assert component.check(saved) == [] and component.static_differences(saved) == []
        model.load_state_dict(weights)
        OptimizerComponent("optimizer", optimizer, dict(model.named_parameters())).load(moments)
        component.load(saved)
        assert optimizer.param_groups[0].get("initial_lr") == before
        seen += train(model, optimizer, scheduler, range(first, last))
    assert seen == rates
    for p, q in zip(model.parameters(), reference[0].parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], reference[1].state[q]["momentum_buffer"])


def test_a_rate_that_is_a_tensor_goes_on_in_the_same_tensor() -> None:
    """T80: compiled steps hold on to the tensor, the scheduler writes into it."""

    def make(optimizer: Optimizer) -> Any:
        return lrs.CosineAnnealingLR(optimizer, 15)

    def adamw(params: Any, lr: Any) -> AdamW:
        return AdamW(params, lr=lr, foreach=False)

    reference = build(make, torch.tensor(0.1), adamw)
    rates = train(*reference, range(10))
    model, optimizer, scheduler = build(make, torch.tensor(0.1), adamw)
    seen = train(model, optimizer, scheduler, range(4))
    saved = stored(SchedulerComponent("scheduler", scheduler))
    moments = stored(OptimizerComponent("optimizer", optimizer, dict(model.named_parameters())))
    fresh, rebuilt, again = build(make, torch.tensor(0.1), adamw)
    fresh.load_state_dict(model.state_dict())
    rate = rebuilt.param_groups[0]["lr"]
    OptimizerComponent("optimizer", rebuilt, dict(fresh.named_parameters())).load(moments)
    SchedulerComponent("scheduler", again).load(saved)
    seen += train(fresh, rebuilt, again, range(4, 10))
    assert seen == rates and rebuilt.param_groups[0]["lr"] is rate


def closure_over(total: int) -> Callable[[int], float]:
    return lambda step: max(0.0, 1 - step / total)


TOTAL = 100


def through_a_global(step: int) -> float:
    return max(0.0, 1 - step / TOTAL)


CHANGED: dict[str, tuple[Callable[[Optimizer], Any], Callable[[Optimizer], Any], list[Any]]] = {
    "cosine": (
        lambda o: lrs.CosineAnnealingLR(o, 15),
        lambda o: lrs.CosineAnnealingLR(o, 30),
        [("T_max", 30, 15)],
    ),
    "milestones": (
        lambda o: lrs.MultiStepLR(o, [3, 9]),
        lambda o: lrs.MultiStepLR(o, [3, 12]),
        [("milestones", {3: 1, 12: 1}, {3: 1, 9: 1})],
    ),
    "sequential": (
        warmup_then_cosine,
        lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, total_iters=5), lrs.CosineAnnealingLR(o, 12)], [5]),
        [("_milestones", [5], [4]), ("_schedulers.0.total_iters", 5, 4)],
    ),
    "plateau": (
        lambda o: lrs.ReduceLROnPlateau(o, patience=1),
        lambda o: lrs.ReduceLROnPlateau(o, patience=2),
        [("patience", 2, 1)],
    ),
    "own": (lambda o: OwnSchedule(o, 10), lambda o: OwnSchedule(o, 20), [("horizon", 20, 10)]),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_schedule_is_reported_field_by_field(name: str) -> None:
    """T83: neither side wins silently; progress is not a difference."""
    before, after, expected = CHANGED[name]
    model, optimizer, scheduler = build(before)
    component = SchedulerComponent("scheduler", scheduler)
    train(model, optimizer, scheduler, range(5))
    fresh = SchedulerComponent("scheduler", build(after)[2])
    saved = stored(component)
    assert fresh.check(saved) == []
    assert sorted(fresh.static_differences(saved)) == expected


@pytest.mark.parametrize(
    ("before", "after", "seen"),
    [
        (closure_over(100), closure_over(200), ["names"]),
        (
            functools.partial(cosine_after_warmup, warmup=4, total=16),
            functools.partial(cosine_after_warmup, warmup=4, total=32),
            ["keywords"],
        ),
        (Ramp(6), Ramp(8), ["warmup"]),
        (lambda step: 0.9**step, lambda step: 0.8**step, ["constants"]),
        (lambda step: min(1.0, step / 2000), lambda step: min(1.0, step / 3000), ["constants"]),
        (closure_over(100), through_a_global, ["function", "names"]),
    ],
)
def test_a_changed_lambda_is_seen_without_calling_it(before: Any, after: Any, seen: list[str]) -> None:
    """T83: language models' schedules are mostly lambdas, of which torch saves nothing."""
    model, optimizer, scheduler = build(lambda o: lrs.LambdaLR(o, before))
    component = SchedulerComponent("scheduler", scheduler)
    train(model, optimizer, scheduler, range(3))
    saved = stored(component)
    assert component.static_differences(saved) == []
    changed = SchedulerComponent("scheduler", build(lambda o: lrs.LambdaLR(o, after))[2])
    assert [field for field, _, _ in changed.static_differences(saved)] == [f"lr_lambdas.0.{key}" for key in seen]


def test_a_changed_global_of_a_lambda_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """T83: max_steps as a constant of the training script."""
    saved = stored(SchedulerComponent("scheduler", build(lambda o: lrs.LambdaLR(o, through_a_global))[2]))
    monkeypatch.setitem(globals(), "TOTAL", 500)
    fresh = SchedulerComponent("scheduler", build(lambda o: lrs.LambdaLR(o, through_a_global))[2])
    assert fresh.static_differences(saved) == [("lr_lambdas.0.names", {"TOTAL": 500}, {"TOTAL": 100})]


def test_load_keeps_live_attributes_of_callables_that_are_named() -> None:
    """T83: torch writes the saved attributes into a callable object; its functions are the live ones in any case."""
    saved = stored(SchedulerComponent("scheduler", build(lambda o: lrs.LambdaLR(o, Ramp(6)))[2]))
    for keep, warmup in (((), 6), (("lr_lambdas.0.warmup",), 8)):
        scheduler = build(lambda o: lrs.LambdaLR(o, Ramp(8)))[2]
        SchedulerComponent("scheduler", scheduler).load(saved, keep=keep)
        assert scheduler.lr_lambdas[0].warmup == warmup
    saved = stored(SchedulerComponent("scheduler", build(lambda o: lrs.LambdaLR(o, closure_over(9)))[2]))
    fresh = SchedulerComponent("scheduler", build(lambda o: lrs.LambdaLR(o, closure_over(8)))[2])
    fresh.load(saved, keep=["lr_lambdas.0.names"])


def test_another_base_rate_is_a_difference() -> None:
    """T83: the constructor's learning rate is part of the plan."""
    saved = stored(SchedulerComponent("scheduler", build(SCHEDULES["cosine"], 0.1)[2]))
    fresh = SchedulerComponent("scheduler", build(SCHEDULES["cosine"], 0.3)[2])
    assert fresh.static_differences(saved) == [("base_lrs", [0.3], [0.1])]


def test_load_keeps_the_named_live_fields_and_takes_the_others() -> None:
    """T83: an explicit policy per field, in nested schedulers too; what was kept is the plan from then on."""
    model, optimizer, scheduler = build(warmup_then_cosine)
    component = SchedulerComponent("scheduler", scheduler)
    train(model, optimizer, scheduler, range(6))
    saved = stored(component)
    other = build(
        lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, total_iters=5), lrs.CosineAnnealingLR(o, 40)], [4])
    )[2]
    fresh = SchedulerComponent("scheduler", other)
    fresh.load(saved, keep=["_schedulers.1.T_max"])
    assert (other._schedulers[1].T_max, other._schedulers[0].total_iters, other.last_epoch) == (40, 4, 6)
    assert fresh.static_differences(stored(fresh)) == []
    again = SchedulerComponent("scheduler", build(warmup_then_cosine)[2])
    assert again.static_differences(stored(fresh)) == [("_schedulers.1.T_max", 12, 40)]
    with pytest.raises(UsageError, match="no field T_min"):
        fresh.load(saved, keep=["T_min"])


def test_a_field_that_the_live_schedule_lacks_is_a_difference_and_may_be_kept_away() -> None:
    """An upgrade of the user's own scheduler that drops a field."""
    source = build(OwnSchedule)[2]
    source.gone = 3
    saved = stored(SchedulerComponent("scheduler", source))
    fresh = SchedulerComponent("scheduler", build(OwnSchedule)[2])
    assert fresh.static_differences(saved) == [("gone", None, 3)]
    fresh.load(saved, keep=["gone"])


def test_counters_tell_how_far_the_schedule_is() -> None:
    model, optimizer, scheduler = build(SCHEDULES["cosine"])
    train(model, optimizer, scheduler, range(3))
    assert SchedulerComponent("scheduler", scheduler).counters() == {"last_epoch": 3, "_step_count": 4}


def test_another_kind_or_nesting_of_schedulers_is_refused() -> None:
    saved = stored(SchedulerComponent("scheduler", build(warmup_then_cosine)[2]))
    other = SchedulerComponent("scheduler", build(SCHEDULES["cosine"])[2])
    problem = other.check(saved)[0]
    assert "SequentialLR[torch.optim.lr_scheduler.LinearLR, torch.optim.lr_scheduler.CosineAnnealingLR]" in problem
    with pytest.raises(IncompatibleState):
        other.load(saved)
    assert other.check({"T_max": 3}) == ["scheduler: the saved state is not that of a scheduler"]


def test_another_number_of_parameter_groups_is_refused() -> None:
    """Loading base rates of one group for two would stop training at the next step."""
    saved = stored(SchedulerComponent("scheduler", build(SCHEDULES["cosine"])[2]))
    p, q = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    two = lrs.CosineAnnealingLR(SGD([{"params": [p]}, {"params": [q]}], lr=0.1), 15)
    assert SchedulerComponent("scheduler", two).check(saved) == [
        "scheduler: base_lrs was saved for 1 parameter groups, the optimizer has 2 now"
    ]


def test_a_field_that_cannot_be_copied_is_named_at_once() -> None:
    """T112: found when the component is made, not at the first save."""
    scheduler = build(SCHEDULES["cosine"])[2]
    scheduler.source = (number for number in range(3))
    with pytest.raises(UnsupportedState, match="field source"):
        SchedulerComponent("scheduler", scheduler)


# --- the gradient scaler ---------------------------------------------------------------------------------------------


def scaler(enabled: bool = True) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=enabled)


def scaled_steps(each: torch.amp.GradScaler, steps: range) -> list[tuple[float, float]]:
    p = nn.Parameter(torch.ones(1))
    optimizer = SGD([p], lr=0.125)
    seen = []
    for step in steps:
        optimizer.zero_grad()
        loss = p.sum() * (math.inf if step in (2, 7) else 1.0)  # two steps that overflow and are skipped
        each.scale(loss).backward()
        each.step(optimizer)
        each.update()
        seen.append((each.get_scale(), float(p.detach())))
    return seen


def test_scale_and_growth_go_on_where_they_were() -> None:
    """T79: with skipped steps, scale and growth tracker equal the reference at every later step."""
    whole = [scale for scale, _ in scaled_steps(scaler(), range(12))]
    first = scaler()
    seen = [scale for scale, _ in scaled_steps(first, range(5))]
    second = scaler()
    ScalerComponent("scaler", second).load(stored(ScalerComponent("scaler", first)))
    assert ScalerComponent("scaler", second).counters() == ScalerComponent("scaler", first).counters()
    seen += [scale for scale, _ in scaled_steps(second, range(5, 12))]
    assert seen == whole


def test_a_scaler_that_has_already_scaled_takes_the_saved_state() -> None:
    first, used = scaler(), scaler()
    scaled_steps(first, range(5))
    scaled_steps(used, range(2))
    ScalerComponent("scaler", used).load(stored(ScalerComponent("scaler", first)))
    assert used.state_dict() == first.state_dict()


def test_a_disabled_scaler_is_saved_as_disabled() -> None:
    component = ScalerComponent("scaler", scaler(False))
    saved: Any = stored(component)
    assert saved == {"enabled": False, "state": {}} and component.check(saved) == []
    component.load(saved)
    assert component.counters() == {}


def test_enabled_and_disabled_do_not_fit_each_other() -> None:
    off, on = ScalerComponent("scaler", scaler(False)), ScalerComponent("scaler", scaler())
    assert on.check(stored(off)) == ["scaler: the scaler was disabled when saved, it is enabled now"]
    assert off.check(stored(on)) == ["scaler: the scaler was enabled when saved, it is disabled now"]
    with pytest.raises(IncompatibleState):
        on.load(stored(off))
    assert on.check(3) == ["scaler: the saved state is not that of a gradient scaler"]
    assert on.check({"enabled": True, "state": {"scale": 1.0}})[0].startswith("scaler: the saved scaler lacks")


def test_saving_between_unscaling_and_update_is_refused() -> None:
    """The infinities found in this step's gradients are not in the state: the resumed run would not skip it."""
    each, p = scaler(), nn.Parameter(torch.ones(1))
    optimizer = SGD([p], lr=0.1)
    component = ScalerComponent("scaler", each)
    each.scale(p.sum()).backward()
    component.state()
    each.unscale_(optimizer)
    with pytest.raises(MidStep, match="update"):
        component.state()
    each.step(optimizer)
    each.update()
    component.state()
