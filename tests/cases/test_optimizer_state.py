"""The optimizer's state belongs to parameters by name, is only read by a save, and absent where it was absent."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import onward

from .shared import refused, running, same


class Pair(nn.Module):
    """Two parameters of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))


def _moments(optimizer: torch.optim.Optimizer, model: Pair) -> tuple[float, float]:
    return tuple(float(optimizer.state[p]["exp_avg"].mean()) for p in (model.a, model.b))  # type: ignore[return-value]


def test_moments_follow_the_name_and_not_the_place(url: str) -> None:
    """T134."""
    model = Pair()
    optimizer = torch.optim.Adam([model.a, model.b])
    (model.a.sum() + 2 * model.b.sum()).backward()
    optimizer.step()
    for number, parameter in enumerate((model.a, model.b), 1):
        optimizer.state[parameter]["exp_avg"].fill_(number)
    with running(url, model=model, optimizer=optimizer) as (ckpt, _):
        ckpt.save(1, wait=True)
    fresh = Pair()
    for order in (
        [fresh.b, fresh.a],
        [{"params": [fresh.b, fresh.a]}],
        [{"params": [fresh.b]}, {"params": [fresh.a]}],  # in groups of their own
    ):
        other = torch.optim.Adam(order)
        with running(url, model=fresh, optimizer=other):
            assert _moments(other, fresh) == (1.0, 2.0)


def test_parameters_that_never_had_a_gradient_have_no_state_and_train_later(url: str) -> None:
    """T136."""

    def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = make()
    model[1].requires_grad_(False)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    model[0].requires_grad_(False)
    with running(url, model=model, optimizer=optimizer) as (ckpt, _):
        ckpt.save(2, wait=True)
    fresh, other = make()
    with running(url, model=fresh, optimizer=other):
        assert all(same(dict(other.state[p]), dict(optimizer.state[q])) for p, q in _zip(fresh[0], model[0]))
        assert not any(other.state.get(p) for p in fresh[1].parameters())
    model[1].requires_grad_(True)
    fresh[0].requires_grad_(False)
    for net, opt in ((model, optimizer), (fresh, other)):
        opt.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        opt.step()
    assert all(map(same, model.parameters(), fresh.parameters()))


def _zip(one: nn.Module, other: nn.Module) -> Any:
    return zip(one.parameters(), other.parameters(), strict=True)


def test_half_a_state_is_an_error(url: str) -> None:
    """T136."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with running(url, model=model, optimizer=optimizer) as (ckpt, _):
        del optimizer.state[model[1].weight]["exp_avg_sq"]
        with pytest.raises(onward.errors.IncompleteState, match=r"1\.weight.*exp_avg_sq"):
            ckpt.save(1, wait=True)
        assert ckpt.latest() is None


@pytest.mark.parametrize("pending", [True, False])
def test_no_state_yet_is_saved_as_none_and_taking_no_step(url: str, pending: bool) -> None:
    """T137: gradients may be pending; the save must neither step nor make state."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    if pending:
        model(torch.ones(1, 3)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with running(url, model=model, optimizer=optimizer) as (ckpt, _):
        ckpt.save(1, wait=True)
    assert not optimizer.state
    assert same(dict(before), dict(model.state_dict()))
    assert all(g is None or same(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))
    fresh = nn.Linear(3, 3)
    other = torch.optim.AdamW(fresh.parameters())
    fresh(torch.ones(1, 3)).sum().backward()
    other.step()  # state of its own, which was not there when the checkpoint was saved
    with running(url, model=fresh, optimizer=other) as (ckpt, _):
        assert not any(other.state.values())
        other.zero_grad()
        fresh(torch.ones(1, 3)).sum().backward()
        other.step()
        ckpt.save(2, wait=True)
    with running(url, model=nn.Linear(3, 3), optimizer=None, how={"waive": ["optimizer"]}):
        pass
    third = nn.Linear(3, 3)
    last = torch.optim.AdamW(third.parameters())
    with running(url, model=third, optimizer=last):
        assert all(same(dict(last.state[p]), dict(other.state[q])) for p, q in _zip(third, fresh))


# --- further cases of the kind ---------------------------------------------------------------------------------


def test_groups_keep_their_own_fields_when_a_layer_is_thawed_on_the_way(url: str) -> None:
    """A group that was added in the middle of the training, with a rate of its own; and an empty group."""

    def make(groups: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.AdamW([{"params": list(model[1].parameters()), "lr": 0.1, "name": "head"}])
        if groups > 1:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01, "weight_decay": 0.5})
        if groups > 2:
            optimizer.param_groups.append({**optimizer.param_groups[0], "params": [], "lr": 9.0})
        return model, optimizer

    model, optimizer = make(3)
    optimizer.param_groups[1]["lr"] = 0.003
    optimizer.param_groups[2]["lr"] = 0.007
    with running(url, model=model, optimizer=optimizer) as (ckpt, _):
        ckpt.save(1, wait=True)
    fresh, other = make(3)
    with running(url, model=fresh, optimizer=other):
        assert [g["lr"] for g in other.param_groups] == [0.1, 0.003, 0.007]
        assert [g["weight_decay"] for g in other.param_groups] == [0.01, 0.5, 0.01]
    fewer, other = make(1)
    refused(onward.errors.IncompatibleState, r"0\.weight", url, model=fewer, optimizer=other)


def test_a_parameter_that_was_added_or_removed_is_named(url: str) -> None:
    """Of model and optimizer; nothing is loaded of the rest."""

    def make(names: str) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = make("ab")
    with running(url, model=model, optimizer=optimizer) as (ckpt, _):
        ckpt.save(1, wait=True)
    for names, word in (("a", r"b\.weight.*not in the model"), ("abc", r"c\.weight.*not in the checkpoint")):
        fresh, other = make(names)
        before = copy.deepcopy(fresh.state_dict())
        refused(onward.errors.IncompatibleState, word, url, model=fresh, optimizer=other)
        assert same(dict(before), dict(fresh.state_dict()))


def test_another_class_of_optimizer_and_a_stranger_among_its_parameters_are_refused(url: str) -> None:
    """Adam's moments are no momentum; and a parameter that no model has could not be found again."""
    model = nn.Linear(2, 2)
    with running(url, model=model, optimizer=torch.optim.Adam(model.parameters())) as (ckpt, _):
        ckpt.save(1, wait=True)
    refused(
        onward.errors.IncompatibleState,
        r"Adam.*SGD",
        url,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    stranger = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(7))], lr=0.1)
    refused(onward.errors.IncompleteState, r"\(7,\)", url, model=model, optimizer=stranger)


def test_flags_and_moments_of_every_flavour(url: str) -> None:
    """amsgrad, maximize, a rate that is a tensor, foreach and single, LBFGS with its history."""
    flavours: list[Any] = [
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True, maximize=True, foreach=False),
        lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
        lambda p: torch.optim.NAdam(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3),
    ]
    for number, flavour in enumerate(flavours):

        def make(flavour: Any = flavour) -> tuple[nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
            return model, flavour(model.parameters())

        def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
            inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]

        model, optimizer = make()
        train(model, optimizer, 1)
        with running(url, run=f"f{number}", model=model, optimizer=optimizer) as (ckpt, _):
            ckpt.save(1, wait=True)
        fresh, other = make()
        train(fresh, other, 9)
        with running(url, run=f"f{number}", model=fresh, optimizer=other):
            for seed in (2, 3):
                train(model, optimizer, seed)
                train(fresh, other, seed)
            assert all(map(same, model.parameters(), fresh.parameters())), type(optimizer).__name__


def test_a_component_may_be_called_like_a_part_of_the_model(url: str) -> None:
    """The model has a part ``ema``, and so has the run; optimizers know whose parameters they hold."""

    def make() -> dict[str, Any]:
        model, average = nn.ModuleDict({"ema": nn.Linear(2, 2)}), nn.Linear(2, 2)
        optimizers = {
            "optimizer": torch.optim.Adam(model.parameters()),
            "other": torch.optim.Adam(average.parameters()),
        }
        return {"model": model, "ema": average, **optimizers}

    saved, fresh = make(), make()
    for name, module in (("optimizer", "model"), ("other", "ema")):
        sum(p.sum() for p in saved[module].parameters()).backward()
        saved[name].step()
    with running(url, **saved) as (ckpt, _):
        ckpt.save(1, wait=True)
    with running(url, **fresh):
        for name in saved:
            assert same(saved[name].state_dict(), fresh[name].state_dict()) or name in ("model", "ema")
        assert all(map(same, saved["ema"].parameters(), fresh["ema"].parameters()))
        assert all(map(same, saved["model"].parameters(), fresh["model"].parameters()))


def test_a_layer_added_on_the_way_is_saved_with_its_moments(url: str) -> None:
    """A model that grows while it is trained, and its optimizer with it."""
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with running(url, model=model, optimizer=optimizer) as (ckpt, _):
        ckpt.save(1, wait=True)
        model.append(nn.Linear(2, 2))
        optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.5})
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ckpt.save(2, wait=True)
    grown = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other = torch.optim.Adam([{"params": grown[0].parameters()}, {"params": grown[1].parameters()}])
    with running(url, model=grown, optimizer=other) as (_, start):
        assert start.next_step == 2
        assert same(optimizer.state_dict(), other.state_dict())
