"""The optimizer comes back by name, bit for bit, whatever kind of state it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from stored import stored, stored_on_meta
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer

from onward.errors import IncompatibleState, IncompleteState, UnsupportedState
from onward.state.optimizer import OptimizerComponent


class Lion(Optimizer):
    """One moment, sign of the update; the shape of the published Lion."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.add_(torch.sign(moment * group["betas"][0] + p.grad * 0.1), alpha=-group["lr"])
                    moment.mul_(group["betas"][1]).add_(p.grad, alpha=0.01)


class MasterMoments(Optimizer):
    """bfloat16 parameters, float32 moments, and a step count that is a plain int."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("step", 0)
                    state.setdefault("moment", torch.zeros_like(p, dtype=torch.float32))
                    state["step"] += 1
                    state["moment"].mul_(0.9).add_(p.grad.float(), alpha=1e-3)
                    p.add_(-group["lr"] * state["moment"].to(p.dtype) / state["step"])


class FactoredLists(Optimizer):
    """Factored second moments kept as a list in the state, as some Adafactor versions do."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                square = p.grad.square()
                if p.ndim == 2:
                    rows, columns = self.state[p].setdefault(
                        "factors", [torch.zeros(p.shape[0]), torch.zeros(p.shape[1])]
                    )
                    rows.add_(square.mean(1)), columns.add_(square.mean(0))
                    update = p.grad / (rows[:, None] * columns[None]).sqrt().add(1e-6)
                else:
                    update = p.grad / self.state[p].setdefault("full", torch.zeros_like(p)).add_(square).sqrt().add(
                        1e-6
                    )
                p.add_(update, alpha=-group["lr"])


def build(kind: Callable[..., Optimizer], dtype: torch.dtype = torch.float32, seed: int = 0, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
    return model, kind(model.parameters(), **kwargs)


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 4, generator=generator).to(next(model.parameters()).dtype)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def component(model: nn.Module, optimizer: Optimizer) -> OptimizerComponent:
    return OptimizerComponent("optimizer", optimizer, dict(model.named_parameters()))


def assert_same(a: Any, b: Any, path: str = "") -> None:
    assert type(a) is type(b), (path, type(a), type(b))
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        assert torch.equal(a.detach(), b.detach()), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            assert_same(left, right, f"{path}[{index}]")
    else:
        assert a == b, path


KINDS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 1e-2}),
    "adamw-amsgrad": (AdamW, {"lr": 1e-2, "amsgrad": True}),
    "adamw-fused": (AdamW, {"lr": 1e-2, "fused": True}),
    "adamw-foreach": (AdamW, {"lr": 1e-2, "foreach": True}),
    "adamw-tensor-lr": (AdamW, {"lr": torch.tensor(1e-2), "foreach": False}),
    "adam-maximize": (Adam, {"lr": 1e-2, "maximize": True}),
    "nadam": (NAdam, {"lr": 1e-2}),
    "adagrad": (Adagrad, {"lr": 1e-2}),
    "sgd": (SGD, {"lr": 1e-2}),
    "sgd-momentum": (SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "adafactor": (Adafactor, {"lr": 1e-2}),
    "factored-lists": (FactoredLists, {}),
    "lion": (Lion, {}),
    "lbfgs": (LBFGS, {"lr": 0.5, "max_iter": 3}),
    "lbfgs-wolfe": (LBFGS, {"lr": 0.5, "max_iter": 3, "line_search_fn": "strong_wolfe"}),
}


@pytest.mark.parametrize("name", KINDS)
def test_continued_training_is_bit_identical(name: str) -> None:
    """T79, T124: 5 + 5 steps equal 10 at once, for every kind of state; two resumes in a row."""
    kind, kwargs = KINDS[name]
    model, optimizer = build(kind, **kwargs)
    train(model, optimizer, range(10))
    current, running = build(kind, **kwargs)
    train(current, running, range(4))
    for first, last in ((4, 7), (7, 10)):
        saved = stored(component(current, running))
        weights = {key: value.clone() for key, value in current.state_dict().items()}
        current, running = build(kind, seed=1, **kwargs)
        current.load_state_dict(weights)
        fresh = component(current, running)
        assert fresh.check(saved) == []
        fresh.load(saved)
        train(current, running, range(first, last))
    assert_same(dict(current.state_dict()), dict(model.state_dict()))
    assert_same(component(current, running).state(), component(model, optimizer).state())


def test_float32_moments_under_bfloat16_parameters_stay_float32() -> None:
    """T112: torch's own load_state_dict would cast them; the negative control shows that it does."""
    model, optimizer = build(MasterMoments, torch.bfloat16)
    train(model, optimizer, range(3))
    other, rebuilt = build(MasterMoments, torch.bfloat16, seed=1)
    component(other, rebuilt).load(stored(component(model, optimizer)))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(dict(rebuilt.state[q]), dict(optimizer.state[p]))
        assert rebuilt.state[q]["moment"].dtype == torch.float32
    control, cast = build(MasterMoments, torch.bfloat16)
    cast.load_state_dict(optimizer.state_dict())
    assert cast.state[next(control.parameters())]["moment"].dtype == torch.bfloat16


@pytest.mark.parametrize("step", [torch.tensor(3.0), torch.tensor(3, dtype=torch.int64), 3])
def test_step_count_keeps_type_shape_dtype_and_device(step: Any) -> None:
    """T124: step as a float32 tensor, as an int64 tensor, as an int."""
    model, optimizer = build(SGD, momentum=0.9, lr=0.1)
    train(model, optimizer, range(1))
    for p in model.parameters():
        optimizer.state[p]["step"] = step
    other, rebuilt = build(SGD, momentum=0.9, lr=0.1)
    component(other, rebuilt).load(stored(component(model, optimizer)))
    for p in other.parameters():
        assert_same(rebuilt.state[p]["step"], step)
    train(other, rebuilt, range(1))
    assert component(other, rebuilt).counters() == {"steps": 3}


def test_step_count_goes_to_the_device_only_for_capturable_groups() -> None:
    """T124: a count on the device makes ordinary optimizers wait for it, a captured step needs it there."""
    model, optimizer = build(AdamW)
    train(model, optimizer, range(1))
    for capturable, device in ((False, "cpu"), (True, "meta")):
        saved: Any = stored(component(model, optimizer))
        saved["groups"][0]["capturable"] = capturable
        with torch.device("meta"):  # stands in for an accelerator
            far = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        rebuilt = AdamW(far.parameters())
        component(far, rebuilt).load(saved)
        state = rebuilt.state[next(far.parameters())]
        assert (state["step"].device.type, state["exp_avg"].device.type) == (device, "meta")


def two_parameters(order: str, groups: bool = False) -> tuple[dict[str, nn.Parameter], AdamW]:
    named = {name: nn.Parameter(torch.zeros(4, 4)) for name in "ab"}
    lr = {"a": 0.1, "b": 0.2}
    if groups:
        return named, AdamW([{"params": [named[name]], "lr": lr[name], "weight_decay": lr[name]} for name in order])
    return named, AdamW([named[name] for name in order], lr=0.1)


@pytest.mark.parametrize("groups", [False, True])
def test_another_parameter_order_keeps_each_moment_with_its_name(groups: bool) -> None:
    """T134, T106: parameters, and groups, in another order; a keeps its moment and its rate."""
    named, optimizer = two_parameters("ab", groups)
    for value, p in enumerate(named.values(), 1):
        p.grad = torch.full((4, 4), float(value))
    optimizer.step()
    saved = stored(OptimizerComponent("optimizer", optimizer, named))
    others, rebuilt = two_parameters("ba", groups)
    again = OptimizerComponent("optimizer", rebuilt, others)
    assert again.check(saved) == []
    again.load(saved)
    for name in "ab":
        assert_same(dict(rebuilt.state[others[name]]), dict(optimizer.state[named[name]]))
    if groups:
        assert [group["lr"] for group in rebuilt.param_groups] == [0.2, 0.1]


def test_one_group_of_parameters_with_different_rates_is_refused() -> None:
    """T106: joining groups is right only where their hyper-parameters agree."""
    named, optimizer = two_parameters("ab", groups=True)
    saved = stored(OptimizerComponent("optimizer", optimizer, named))
    others, joined = two_parameters("ab")
    problems = OptimizerComponent("optimizer", joined, others).check(saved)
    assert any("joins the saved groups 0 and 1, whose lr differ (0.1, 0.2)" in problem for problem in problems)
    with pytest.raises(IncompatibleState):
        OptimizerComponent("optimizer", joined, others).load(saved)


def test_equal_groups_may_be_joined_and_split() -> None:
    """T106: what is in which group is free, as long as every parameter keeps its hyper-parameters."""
    named, optimizer = two_parameters("ab")
    saved = stored(OptimizerComponent("optimizer", optimizer, named))
    p, q = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, 4))
    split = AdamW([{"params": [q]}, {"params": [p]}], lr=0.5)
    OptimizerComponent("optimizer", split, {"a": p, "b": q}).load(saved)
    assert [group["lr"] for group in split.param_groups] == [0.1, 0.1]
    back = OptimizerComponent("optimizer", optimizer, named)
    assert back.check(stored(OptimizerComponent("optimizer", split, {"a": p, "b": q}))) == []


def test_split_groups_do_not_share_a_tensor_rate() -> None:
    """A rate that is one tensor in two groups would be scheduled twice."""
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    whole = AdamW([p, q], lr=torch.tensor(0.1), foreach=False)
    saved = stored(OptimizerComponent("optimizer", whole, {"p": p, "q": q}))
    split = AdamW([{"params": [p]}, {"params": [q]}], lr=0.5)
    OptimizerComponent("optimizer", split, {"p": p, "q": q}).load(saved)
    first, second = (group["lr"] for group in split.param_groups)
    assert first is not second and torch.equal(first, second)


def test_empty_groups_keep_their_fields() -> None:
    """A group without parameters is saved, and comes back with what it says."""
    p = nn.Parameter(torch.zeros(2))
    optimizer = AdamW([{"params": [p]}, {"params": [], "lr": 7.0}])
    saved = stored(OptimizerComponent("optimizer", optimizer, {"p": p}))
    rebuilt = AdamW([{"params": [], "lr": 1.0}, {"params": [p]}])
    again = OptimizerComponent("optimizer", rebuilt, {"p": p})
    again.load(saved)
    assert rebuilt.param_groups[0]["lr"] == 7.0
    assert any("no empty live group" in each for each in OptimizerComponent("o", AdamW([p]), {"p": p}).check(saved))


def test_constructor_values_give_way_before_the_first_step() -> None:
    """T82: directly after load the groups equal the saved ones, and differences() had named each."""
    model, optimizer = build(AdamW, lr=1e-2, weight_decay=0.5, betas=(0.8, 0.9))
    other, rebuilt = build(AdamW, lr=3e-3, weight_decay=0.1)
    again = component(other, rebuilt)
    saved = stored(component(model, optimizer))
    assert again.differences(saved) == [
        ("groups[0].lr", 3e-3, 1e-2),
        ("groups[0].betas", (0.9, 0.999), (0.8, 0.9)),
        ("groups[0].weight_decay", 0.1, 0.5),
    ]
    again.load(saved)
    assert again.differences(saved) == []
    hyper = [{k: v for k, v in each.param_groups[0].items() if k != "params"} for each in (optimizer, rebuilt)]
    assert_same(hyper[1], hyper[0])


def test_group_dicts_and_tensor_rates_stay_the_same_objects() -> None:
    """Schedulers, closures and compiled steps hold on to them."""
    model, optimizer = build(AdamW, lr=torch.tensor(1e-2), foreach=False)
    other, rebuilt = build(AdamW, lr=torch.tensor(5e-2), foreach=False)
    group, rate, state = rebuilt.param_groups[0], rebuilt.param_groups[0]["lr"], rebuilt.state
    component(other, rebuilt).load(stored(component(model, optimizer)))
    assert rebuilt.param_groups[0] is group and group["lr"] is rate and rebuilt.state is state
    assert torch.equal(rate, torch.tensor(1e-2))


def test_a_scheduled_rate_is_no_difference_but_its_beginning_is() -> None:
    """T83: a decayed rate differs from the constructor's at every resume; that is not news."""
    model, optimizer = build(AdamW, lr=1e-2)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["lr"] = 1e-3
    saved = stored(component(model, optimizer))
    for lr, expected in ((1e-2, []), (2e-2, [("groups[0].initial_lr", 2e-2, 1e-2)])):
        other, rebuilt = build(AdamW, lr=lr)
        torch.optim.lr_scheduler.ExponentialLR(rebuilt, 0.5)
        assert component(other, rebuilt).differences(saved) == expected


def test_frozen_layers_keep_moments_and_untrained_ones_have_none() -> None:
    """T136: train layer 0 only, freeze it, save, load: its moments are back, layer 2 has none and trains later."""
    model, optimizer = build(AdamW)
    for p in model[2].parameters():
        p.requires_grad_(False)
    train(model, optimizer, range(2))
    for p in model[0].parameters():
        p.requires_grad_(False)
    tree = component(model, optimizer).state()
    assert tree["stateless"] == ["2.weight", "2.bias"]
    other, rebuilt = build(AdamW)
    train(other, rebuilt, range(1))  # state that the checkpoint does not have must go
    component(other, rebuilt).load(stored(component(model, optimizer)))
    assert set(rebuilt.state) == set(other[0].parameters())
    assert_same(dict(rebuilt.state[other[0].weight]), dict(optimizer.state[model[0].weight]))
    train(other, rebuilt, range(2, 4))
    assert set(rebuilt.state) == set(other.parameters())


@pytest.mark.parametrize("lost", ["exp_avg_sq", "exp_avg", "step"])
def test_half_a_state_is_refused_at_save_and_in_check(lost: str) -> None:
    """T136: exp_avg without exp_avg_sq is an error that names the parameter and what it lacks."""
    model, optimizer = build(AdamW)
    train(model, optimizer, range(1))
    saved: Any = stored_on_meta(component(model, optimizer))
    del saved["state"]["0.weight"][lost]
    expected = f"0.weight (group 0) has half a state: it lacks {lost}, which 2.weight has"
    assert component(*build(AdamW)).check(saved) == [f"optimizer: {expected}"]
    del optimizer.state[model[0].weight][lost]
    with pytest.raises(IncompleteState, match="half a state"):
        component(model, optimizer).state()


def test_quantised_and_plain_moments_side_by_side_are_not_half_a_state() -> None:
    """T112: 8-bit optimizers keep code tables beside the moments of large parameters only."""
    large, small = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(2, 2))
    optimizer = SGD([large, small], lr=0.1)
    codes, scales = torch.arange(4096).to(torch.uint8).view(64, 64), torch.arange(16) / 64
    optimizer.state[large] = {"step": 3, "moment": codes, "scales": scales}
    optimizer.state[small] = {"step": 3, "moment": torch.ones(2, 2)}
    named = {"large": large, "small": small}
    saved = stored(OptimizerComponent("optimizer", optimizer, named))
    rebuilt = SGD([large, small], lr=0.1)
    OptimizerComponent("optimizer", rebuilt, named).load(saved)
    assert_same(dict(rebuilt.state[large]), {"step": 3, "moment": codes, "scales": scales})


def test_pending_gradients_do_not_bring_state_into_being() -> None:
    """T137: backward done, no step yet: the saved truth is 'no state', saving changes nothing, a step completes it."""
    model, optimizer = build(AdamW)
    model(torch.ones(2, 4)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    saved: Any = stored(component(model, optimizer))
    assert saved["state"] == {} and len(saved["stateless"]) == 4 and len(optimizer.state) == 0
    assert_same([p.detach() for p in model.parameters()], before)
    assert all(p.grad is not None for p in model.parameters())
    other, rebuilt = build(AdamW)
    component(other, rebuilt).load(saved)
    assert len(rebuilt.state) == 0 and component(other, rebuilt).counters() == {}
    train(other, rebuilt, range(1))
    assert len(rebuilt.state) == 4 and component(other, rebuilt).counters() == {"steps": 1}


def test_missing_and_unexpected_parameters_are_listed() -> None:
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    saved = stored(OptimizerComponent("optimizer", SGD([p], lr=0.1), {"old": p}))
    problems = OptimizerComponent("optimizer", SGD([q], lr=0.1), {"new": q}).check(saved)
    assert "optimizer: not in the checkpoint: new" in problems
    assert "optimizer: in the checkpoint but not in the live optimizer: old" in problems


def test_state_lost_on_the_way_is_not_taken_for_absent() -> None:
    """T136: an entry that vanished differs from one that never was."""
    model, optimizer = build(AdamW)
    train(model, optimizer, range(1))
    saved: Any = stored(component(model, optimizer))
    del saved["state"]["0.bias"]
    assert component(*build(AdamW)).check(saved) == ["optimizer: state missing from the checkpoint: 0.bias"]


def test_another_shape_and_another_class_are_refused() -> None:
    """T109: nothing is broadcast or reshaped; both shapes are named."""
    p, q = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2, 2))
    saved = stored(OptimizerComponent("optimizer", SGD([p], lr=0.1), {"w": p}))
    assert OptimizerComponent("optimizer", AdamW([q]), {"w": q}).check(saved) == [
        "optimizer: saved from torch.optim.sgd.SGD, the live optimizer is torch.optim.adamw.AdamW",
        "optimizer: w was saved with shape (4,), it is (2, 2) now",
    ]


def test_a_parameter_without_a_name_is_refused_unless_the_optimizer_names_it() -> None:
    p = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(IncompleteState, match=r"group 0 holds a parameter of shape \(3, 2\)"):
        OptimizerComponent("optimizer", SGD([p], lr=0.1), {}).state()
    named = OptimizerComponent("optimizer", SGD([("own.name", p)], lr=0.1), {})
    assert named.state()["shapes"] == {"own.name": (3, 2)}
    assert named.check(stored(named)) == []


def test_state_of_a_parameter_in_no_group_is_refused() -> None:
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(5))
    optimizer = SGD([p], lr=0.1)
    optimizer.state[q] = {"momentum_buffer": torch.zeros(5)}
    with pytest.raises(IncompleteState, match=r"shape \(5,\) that is in no group"):
        OptimizerComponent("optimizer", optimizer, {"p": p, "q": q}).state()


def test_state_that_is_not_a_dict_is_refused_by_name() -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer = SGD([p], lr=0.1)
    optimizer.state[p] = torch.zeros(2)
    with pytest.raises(UnsupportedState, match=r"the state of p is a torch\.Tensor, not a dict"):
        OptimizerComponent("optimizer", optimizer, {"p": p}).state()


def test_tied_parameters_go_by_one_name_and_are_found_by_each() -> None:
    """A tied parameter may be listed under other names first after a resume."""
    model, optimizer = build(AdamW)
    train(model, optimizer, range(1))
    names = dict(model.named_parameters())
    tied = {"head": names["0.weight"], **names}
    saved: Any = stored(OptimizerComponent("optimizer", optimizer, tied))
    assert "head" in saved["state"] and "0.weight" not in saved["state"]
    other, rebuilt = build(AdamW, seed=1)
    others = dict(other.named_parameters())
    OptimizerComponent("optimizer", rebuilt, {**others, "head": others["0.weight"]}).load(saved)
    assert_same(dict(rebuilt.state[other[0].weight]), dict(optimizer.state[model[0].weight]))
    assert any("not in the checkpoint" in each for each in component(other, rebuilt).check(saved))


def test_parameters_saved_apart_and_tied_now_are_refused() -> None:
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    saved = stored(OptimizerComponent("optimizer", SGD([p, q], lr=0.1), {"p": p, "q": q}))
    problems = OptimizerComponent("optimizer", SGD([p], lr=0.1), {"p": p, "q": p}).check(saved)
    assert problems == ["optimizer: parameters that were saved apart are tied to one now"]


def test_entries_that_belong_to_no_parameter_are_kept() -> None:
    model, optimizer = build(SGD, lr=0.1)
    optimizer.state["global"] = {"calls": 5, 3: (1, None)}
    other, rebuilt = build(SGD, lr=0.1)
    component(other, rebuilt).load(stored(component(model, optimizer)))
    assert_same(rebuilt.state["global"], {"calls": 5, 3: (1, None)})


def test_momentum_that_is_none_and_empty_state_come_back_as_they_are() -> None:
    p, q, r = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    named = {"p": p, "q": q, "r": r}
    optimizer = SGD([p, q, r], lr=0.1)
    optimizer.state[p] = {"momentum_buffer": None}
    optimizer.state[q] = {}
    saved = stored(OptimizerComponent("optimizer", optimizer, named))
    rebuilt = SGD([p, q, r], lr=0.1)
    OptimizerComponent("optimizer", rebuilt, named).load(saved)
    assert dict(rebuilt.state) == {p: {"momentum_buffer": None}, q: {}}


def test_saving_does_not_touch_the_optimizer() -> None:
    """Reading a defaultdict by key would add to it; a helper of torch would take a step."""
    model, optimizer = build(AdamW)
    train(model, optimizer, range(1))
    weights = [p.detach().clone() for p in model.parameters()]
    moments = {p: {key: value.clone() for key, value in values.items()} for p, values in optimizer.state.items()}
    optimizer.add_param_group({"params": [extra := nn.Parameter(torch.zeros(1))], "lr": 9.0})
    named = {**dict(model.named_parameters()), "extra": extra}
    tree: Any = OptimizerComponent("optimizer", optimizer, named).state()
    assert extra not in optimizer.state and tree["stateless"] == ["extra"]
    assert_same([p.detach() for p in model.parameters()], weights)
    assert_same({p: dict(values) for p, values in optimizer.state.items()}, moments)
    assert tree["state"]["0.weight"]["exp_avg"] is optimizer.state[model[0].weight]["exp_avg"]  # live, not a copy


def test_lbfgs_with_another_parameter_order_is_refused() -> None:
    """One flat vector over all parameters cannot be mapped by name; its state would be silently ignored."""
    named = {name: nn.Parameter(torch.ones(2) * index) for index, name in enumerate("ab")}
    optimizer = LBFGS(named.values())
    optimizer.step(lambda: 0.0)
    saved = stored(OptimizerComponent("optimizer", optimizer, named))
    turned = OptimizerComponent("optimizer", LBFGS(list(named.values())[::-1]), named)
    assert turned.check(saved) == [
        "optimizer: LBFGS keeps one flat vector over all parameters, and their order has changed"
    ]


class Saves(AdamW):
    """An optimizer with a form of its own: a field beside the state, and its own way to load."""

    extra_field = "fresh"
    loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "extra_field": self.extra_field}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.extra_field = state_dict["extra_field"]
        self.loads += 1
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def test_an_optimizer_with_its_own_load_state_dict_is_asked_to_load() -> None:
    """It gets parameters numbered in its own order, and torch's cast underneath is undone."""
    named = {name: nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for name in "ab"}
    optimizer = Saves([named["a"], named["b"]])
    optimizer.extra_field = "kept"
    for value, p in enumerate(named.values(), 1):
        optimizer.state[p] = {"step": torch.tensor(2.0), "exp_avg": torch.full((2,), value / 3)}
    saved = stored(OptimizerComponent("optimizer", optimizer, named))
    rebuilt = Saves([named["b"], named["a"]], lr=0.7)
    group = rebuilt.param_groups[0]
    OptimizerComponent("optimizer", rebuilt, named).load(saved)
    assert (rebuilt.extra_field, rebuilt.loads) == ("kept", 1)
    assert rebuilt.param_groups[0] is group and group["lr"] == 1e-3
    for p in named.values():
        assert_same(dict(rebuilt.state[p]), dict(optimizer.state[p]))


def test_an_optimizer_that_hides_its_parameters_is_refused_by_name() -> None:
    class Opaque(SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"everything": 1}

    p = nn.Parameter(torch.zeros(2))
    with pytest.raises(UnsupportedState, match="without 'state' and 'param_groups'"):
        OptimizerComponent("optimizer", Opaque([p], lr=0.1), {"p": p}).state()


def test_hooks_are_neither_called_nor_lost() -> None:
    model, optimizer = build(AdamW)
    called: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda *_: called.append("save"))
    optimizer.register_load_state_dict_post_hook(lambda *_: called.append("load"))
    each = component(model, optimizer)
    each.load(stored(each))
    assert called == []
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["save", "load"]


@pytest.mark.parametrize("saved", [None, [], {}, {"class": "x", "groups": []}])
def test_a_tree_that_is_not_an_optimizers_is_refused(saved: object) -> None:
    each = component(*build(AdamW))
    assert len(each.check(saved)) == 1 and "not that of an optimizer" in each.check(saved)[0]
    with pytest.raises(IncompatibleState):
        each.load(saved)


def test_check_works_without_bytes() -> None:
    """Everything that can be said from shapes and names is said before a byte is read."""
    model, optimizer = build(AdamW, lr=torch.tensor(0.1), foreach=False)
    train(model, optimizer, range(1))
    assert (
        component(*build(AdamW, lr=torch.tensor(0.2), foreach=False)).check(stored_on_meta(component(model, optimizer)))
        == []
    )
