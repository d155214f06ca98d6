"""Which tensors may be copied after the step boundary, and where overlapping is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onward.state.component import Component
from onward.state.optimizer import OptimizerComponent
from onward.state.overlap import before_step, held_by, optimizers, problem
from onward.state.register import register


def trained(kind: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, Any, list[Component]]:
    """A model with buffers that has made one step."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = kind(model.parameters(), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model, optimizer, register(model=model, optimizer=optimizer)


def stub(optimizer: Any) -> OptimizerComponent:
    """An optimizer's component around any object."""
    component = OptimizerComponent.__new__(OptimizerComponent)
    component.optimizer = optimizer
    return component


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS, torch.optim.Adafactor])
def test_an_ordinary_optimizer_may_overlap(kind: Any) -> None:
    assert problem(trained(kind)[2]) is None


def test_without_an_optimizer_it_is_refused() -> None:
    assert "no optimizer" in str(problem(register(model=nn.Linear(2, 2))))


def test_without_step_hooks_it_is_refused() -> None:
    class Plain:
        param_groups: tuple[Any, ...] = ()

    assert "Plain has no step hooks" in str(problem([stub(Plain())]))


def test_a_step_inside_the_backward_pass_is_refused() -> None:
    model, _, components = trained()
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert "backward" in str(problem(components)) and "AdamW" in str(problem(components))
    handle.remove()
    assert problem(components) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchs_own_optimizer_in_backward_is_refused() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers

    model = nn.Linear(3, 3)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    first = _get_in_backward_optimizers(model)[0]
    assert "backward" in str(problem([stub(first)]))


def test_moments_on_another_device_are_refused() -> None:
    model, optimizer, components = trained()
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(6, 4, device="meta")
    assert "keeps its state on meta while parameters are on cpu" in str(problem(components))


def test_a_step_counter_on_the_host_is_no_offloading() -> None:
    """Adam keeps ``step`` as a tensor without dimensions on the host, wherever the parameters are."""
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.Adam([parameter])
    optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(3, device="meta")}
    assert problem([stub(optimizer)]) is None


def test_one_unfit_optimizer_of_two_is_enough() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    one, two = torch.optim.SGD(first.parameters()), torch.optim.SGD(second.parameters())
    components = register(model=first, optimizer=one, others={"critic": second, "critic_optimizer": two})
    assert problem(components) is None and optimizers(components) == [one, two]
    second.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    assert problem(components) is not None


def test_held_are_parameters_and_moments_and_nothing_else() -> None:
    model, optimizer, components = trained()
    later = held_by(components)
    for parameter in model.parameters():
        assert later(parameter) and later(parameter.detach())
        assert later(optimizer.state[parameter]["exp_avg"]) and later(optimizer.state[parameter]["exp_avg_sq"])
        assert not later(parameter.grad)
    assert not any(later(buffer) for buffer in model.buffers())
    assert not later(torch.zeros(6, 4)), "another tensor of the same shape"


def test_moments_in_lists_are_held() -> None:
    _, optimizer, components = trained(torch.optim.LBFGS, max_iter=4)
    later, state = held_by(components), optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert state["old_dirs"] and all(later(each) for each in (*state["old_dirs"], *state["old_stps"]))


def test_a_frozen_parameter_that_no_optimizer_holds_is_not_held() -> None:
    """It may be anybody's: an average, a teacher, a table that forward changes."""
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    components = register(model=model, optimizer=torch.optim.SGD([model.weight]))
    later = held_by(components)
    assert later(model.weight) and not later(model.bias)


def test_averaged_weights_are_not_held() -> None:
    model, _, _ = trained()
    average = torch.optim.swa_utils.AveragedModel(model)
    later = held_by(register(model=model, optimizer=torch.optim.SGD(model.parameters()), others={"average": average}))
    assert not any(later(parameter) for parameter in average.parameters())


def test_empty_tensors_are_not_held() -> None:
    parameter = nn.Parameter(torch.zeros(0, 3))
    assert not held_by([stub(torch.optim.SGD([parameter]))])(parameter)


def test_a_tensor_is_not_held_because_it_begins_where_a_parameter_begins() -> None:
    """A buffer whose first part is a parameter: the rest of it belongs to forward."""
    whole = torch.zeros(10)
    parameter = nn.Parameter(whole[:4])
    later = held_by([stub(torch.optim.SGD([parameter]))])
    assert later(parameter)
    assert not later(whole)


def test_every_step_waits_before_it_changes_anything_until_the_handles_are_removed() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    one, two = torch.optim.SGD(first.parameters(), lr=1.0), torch.optim.Adam(second.parameters())
    components = register(model=first, optimizer=one, others={"critic": second, "critic_optimizer": two})
    seen: list[bool] = []
    before = [p.detach().clone() for m in (first, second) for p in m.parameters()]

    def wait() -> None:
        now = [p.detach() for m in (first, second) for p in m.parameters()]
        seen.append(all(map(torch.equal, before, now)))

    handles = before_step(components, wait)
    for model in (first, second):
        model(torch.ones(1, 2)).sum().backward()
    one.step()
    assert seen == [True]
    two.step()
    assert seen == [True, False], "the second optimizer waits too"
    for handle in handles:
        handle.remove()
    one.step()
    assert len(seen) == 2
