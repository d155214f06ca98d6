"""Models and other objects: checked whole before anything changes, then restored in place, bit for bit."""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from onward.errors import ConfigurationError, IncompatibleState, UnsupportedState
from onward.records import Key
from onward.state import tensors
from onward.state.component import Component
from onward.state.model import ModelComponent, ObjectComponent, digest_of, verify_live
from onward.state.snapshot import rebuild, take


class Reader:
    """A saved component as a reader gives it back: new CPU tensors, tied ones the same tensor; or meta tensors."""

    def __init__(self, component: Component) -> None:
        snapshot = take([component], 1)
        self.tree = json.loads(json.dumps(snapshot.state[component.name], sort_keys=True))
        self.layout = {entry.key: entry for entry in snapshot.layout.tensors}
        self.bytes: dict[Key, bytes] = {}
        for key, tensor in snapshot.tensors.items():
            raw = bytearray(tensors.nbytes(tensor))
            tensors.copy_into(tensor, memoryview(raw))
            self.bytes[key] = bytes(raw)

    def saved(self) -> Any:
        made: dict[Key, torch.Tensor] = {}
        for key, raw in self.bytes.items():
            made[key] = tensors.empty(self.layout[key].dtype, self.layout[key].shape)
            tensors.as_bytes(made[key])[:] = raw
        return rebuild(self.tree, lambda key: made[self.layout[key].tie or key])

    def meta(self) -> Any:
        return rebuild(
            self.tree,
            lambda key: torch.empty(
                self.layout[key].shape, dtype=tensors.torch_dtype(self.layout[key].dtype), device="meta"
            ),
        )


def of(model: nn.Module) -> ModelComponent:
    return ModelComponent("model", model)


def restore(component: Component, reader: Reader) -> None:
    assert component.check(reader.meta()) == []
    component.load(reader.saved())


def digests(model: nn.Module) -> dict[str, str]:
    return {name: digest_of(value) for name, value in of(model).state().items() if isinstance(value, torch.Tensor)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.register_buffer("scratch", torch.randn(3), persistent=False)


def test_a_model_is_restored_in_place_bit_for_bit() -> None:
    model, other = Net(), Net()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
        model.head.weight[0, 1] = -0.0
    model.embed.weight.requires_grad_(False)
    held = dict(other.named_parameters())
    scratch = other.scratch.clone()
    reader = Reader(of(model))
    assert not any("scratch" in key for key in reader.layout)
    restore(of(other), reader)
    assert digests(other) == digests(model)
    assert all(parameter is held[name] for name, parameter in other.named_parameters())
    assert torch.equal(other.scratch, scratch)
    assert of(model).counters() == {}


def test_a_model_wider_in_strides_is_restored() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    other = nn.Conv2d(3, 4, 3)
    restore(of(other), Reader(of(model)))
    assert torch.equal(other.weight, model.weight)
    restore(of(model), Reader(of(other)))
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_check_names_every_mismatch_with_both_shapes_and_touches_nothing() -> None:
    """T109."""
    live = nn.Sequential(OrderedDict(a=nn.Linear(3, 2), b=nn.Linear(2, 2), only_live=nn.Linear(1, 1)))
    saved = nn.Sequential(OrderedDict(a=nn.Linear(4, 2), b=nn.Linear(2, 2), only_saved=nn.Linear(1, 1)))
    saved.b.bias.data = saved.b.bias.data.to(torch.bfloat16)
    before = digests(live)
    reader = Reader(of(saved))
    expected = [
        "model['a.weight']: saved float32 (2, 4), live float32 (2, 3)",
        "model['b.bias']: saved bfloat16 (2,), live float32 (2,)",
        "model['only_live.bias'] is not in the checkpoint",
        "model['only_live.weight'] is not in the checkpoint",
        "model['only_saved.bias'] is in the checkpoint, not in the model",
        "model['only_saved.weight'] is in the checkpoint, not in the model",
    ]
    assert sorted(of(live).check(reader.meta())) == expected
    with pytest.raises(IncompatibleState) as caught:
        of(live).load(reader.saved())
    assert all(line in caught.value.message for line in expected)
    assert digests(live) == before


def test_no_matching_name_at_all_is_an_error() -> None:
    """T139: a non-strict load left random weights."""
    problems = of(nn.Linear(2, 2)).check(Reader(of(nn.Sequential(nn.Linear(2, 2)))).meta())
    assert len(problems) == 1
    assert "none of the 2 saved names ('0.weight', '0.bias') is among the 2 of the live model" in problems[0]
    assert of(nn.Linear(2, 2)).check({}) != []
    assert of(nn.Identity()).check(Reader(of(nn.Linear(1, 1))).meta()) != []
    assert of(nn.Linear(2, 2)).check([1]) == ["model: the saved state is a list, not the entries of a model"]
    assert of(nn.Identity()).check({}) == []


class Child(nn.Module):
    """A model with a real child called module."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.layer = nn.Linear(2, 2)


def test_wrapped_and_plain_models_load_each_others_checkpoints() -> None:
    """T139."""
    plain = Child()
    wrapped = Child()
    wrapped.layer = checkpoint_wrapper(wrapped.layer)
    for model in (nn.DataParallel(torch.compile(wrapped)), torch.compile(nn.DataParallel(wrapped)), wrapped):
        with torch.no_grad():
            wrapped.module.weight.normal_()
        assert sorted(of(model).state()) == sorted(of(plain).state())
        restore(of(plain), Reader(of(model)))
        assert torch.equal(plain.module.weight, wrapped.module.weight)
        with torch.no_grad():
            plain.module.weight.normal_()
        restore(of(model), Reader(of(plain)))
        assert torch.equal(plain.module.weight, wrapped.module.weight)


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        row = torch.randn(3).expand(2, 3)
        self.register_buffer("mask", row)
        self.register_buffer("again", row)
        self.weight = nn.Parameter(torch.randn(1).expand(4), requires_grad=False)


def test_expanded_memory_is_replaced_by_memory_of_its_own() -> None:
    """T121: the in-place load failed with a misleading shape message."""
    model = Expanded()
    held = model.mask
    state = {"mask": torch.arange(6.0).view(2, 3), "weight": torch.arange(4.0)}
    state["again"] = state["mask"]
    of(model).load(dict(state))
    assert model.mask is held
    assert model.mask.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert model.weight.tolist() == [0, 1, 2, 3]
    assert model.again.data_ptr() == model.mask.data_ptr()
    restore(of(Expanded()), Reader(of(Expanded())))
    with pytest.raises(IncompatibleState, match="share memory"):
        of(Expanded()).load({**state, "again": torch.zeros(2, 3)})


def tied() -> Net:
    model = Net()
    model.head.weight = model.embed.weight
    return model


def test_ties_stay_ties() -> None:
    model, other = tied(), tied()
    reader = Reader(of(model))
    assert [entry.tie for entry in reader.layout.values() if entry.tie] == ['["model","embed.weight"]']
    restore(of(other), reader)
    assert other.head.weight is other.embed.weight
    assert digests(other) == digests(model)


def test_a_saved_tie_fills_both_of_two_separate_tensors() -> None:
    model, other = tied(), Net()
    restore(of(other), Reader(of(model)))
    assert torch.equal(other.head.weight, model.embed.weight)
    assert torch.equal(other.embed.weight, model.embed.weight)
    assert other.head.weight.data_ptr() != other.embed.weight.data_ptr()


def test_two_saved_values_for_one_live_memory_are_refused_before_anything_changes() -> None:
    """T118: the configuration said tied, the saved memory said not; the head was dropped."""
    model, other = Net(), tied()
    before = digests(other)
    reader = Reader(of(model))
    assert not any(entry.tie for entry in reader.layout.values())
    with pytest.raises(IncompatibleState, match=r"embed\.weight'\] and model\['head\.weight'\] share memory.*differ"):
        of(other).load(reader.saved())
    assert digests(other) == before
    with torch.no_grad():
        model.head.weight.copy_(model.embed.weight)
    restore(of(other), Reader(of(model)))


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(12)
        self.register_buffer("low", flat[:8])
        self.register_buffer("high", flat[4:])
        self.register_buffer("bits", flat[6:8].view(torch.int32))
        self.register_buffer("even", torch.zeros(8)[::2])
        self.register_buffer("odd", torch.zeros(8)[1::2])


def test_tensors_that_share_parts_of_memory_are_filled_only_with_values_that_agree() -> None:
    """T115, T116."""
    model, other = Overlapping(), Overlapping()
    reader = Reader(of(model))
    restore(of(other), reader)
    assert digests(other) == digests(model)
    assert other.low[4:].data_ptr() == other.high.data_ptr()
    saved = reader.saved()
    saved["high"][0] += 1
    before = digests(other)
    with pytest.raises(IncompatibleState, match=r"model\['low'\] and .* share memory"):
        of(other).load(saved)
    assert digests(other) == before


def test_chunks_of_one_buffer_are_saved_and_loaded_apart() -> None:
    """T116."""

    def chunked() -> nn.Module:
        model = nn.Module()
        for index, part in enumerate(torch.randn(1000).chunk(10)):
            model.register_buffer(f"part{index}", part)
        return model

    model, other = chunked(), chunked()
    reader = Reader(of(model))
    assert sum(map(len, reader.bytes.values())) == 4000
    restore(of(other), reader)
    assert digests(other) == digests(model)


def test_views_of_one_memory_as_three_types_are_restored() -> None:
    """T115."""

    def typed() -> nn.Module:
        model = nn.Module()
        x = torch.randn(5)
        for name, view in {"x": x, "y": x.view(torch.int32), "z": x.view(torch.uint8)}.items():
            model.register_buffer(name, view)
        return model

    model, other = typed(), typed()
    restore(of(other), Reader(of(model)))
    assert digests(other) == digests(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float4_e2m1fn_x2,
        torch.uint16,
        torch.complex32,
        torch.bool,
        torch.int4,
    ],
)
def test_models_of_unusual_dtypes_are_restored(dtype: torch.dtype) -> None:
    """T113."""

    def odd() -> nn.Module:
        model = nn.Module()
        raw = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
        model.weight = nn.Parameter(raw.view(dtype).view(2, 3).t(), requires_grad=False)
        model.register_buffer("scalar", raw[: dtype.itemsize].view(dtype)[0])
        return model

    model, other = odd(), odd()
    restore(of(other), Reader(of(model)))
    assert digests(other) == digests(model)


def test_lazy_parameters_are_refused_by_name_until_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(UnsupportedState, match=r"model\['0.weight'\] is a lazy") as caught:
        take([of(model)], 1)
    assert "forward pass" in caught.value.next_step
    problems = of(model).check(Reader(of(nn.Sequential(nn.Linear(3, 2)))).meta())
    assert [re.match(r"model\['0\.(weight|bias)'\] is a lazy", problem) is not None for problem in problems] == [
        True
    ] * 2
    model(torch.zeros(1, 3))
    restore(of(model), Reader(of(nn.Sequential(nn.Linear(3, 2)))))


class Counting(nn.Linear):
    def __init__(self, seen: object = None) -> None:
        super().__init__(2, 2)
        self.seen = seen

    def get_extra_state(self) -> object:
        return self.seen

    def set_extra_state(self, state: object) -> None:
        self.seen = state


class Giving(nn.Linear):
    def get_extra_state(self) -> object:
        return 1


def test_extra_state_is_saved_and_handed_back() -> None:
    model = nn.DataParallel(nn.Sequential(Counting((1, {"t": torch.ones(2)})), Counting()))
    other = nn.Sequential(Counting("old"), Counting("old"))
    restore(of(other), Reader(of(model)))
    assert other[0].seen[0] == 1
    assert torch.equal(other[0].seen[1]["t"], torch.ones(2))
    assert other[1].seen is None


def test_extra_state_that_cannot_be_given_back_is_an_error() -> None:
    giving = nn.Sequential(Giving(2, 2))
    assert of(giving).check(Reader(of(giving)).meta()) == [
        "model['0._extra_state'] was saved by get_extra_state, but the module has no set_extra_state"
    ]


class Hooked(nn.Module):
    """Its state_dict shows rows of one fused weight under names of their own, and perhaps something made anew."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(4, 3))
        self.extra = extra
        self.register_state_dict_post_hook(Hooked.split)

    @staticmethod
    def split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        fused = state.pop(f"{prefix}fused")
        state[f"{prefix}q"], state[f"{prefix}k"] = fused.chunk(2)
        if module.extra is not None:
            state[f"{prefix}more"] = module.extra(fused)


def test_views_made_by_a_hook_reach_the_model() -> None:
    model, other = Hooked(), Hooked()
    assert sorted(of(model).state()) == ["k", "q"]
    restore(of(other), Reader(of(model)))
    assert torch.equal(model.fused, other.fused)


@pytest.mark.parametrize("extra", [lambda fused: fused * 2, lambda fused: 3, lambda fused: fused[:1].expand(2, 3)])
def test_what_a_hook_makes_anew_is_refused_rather_than_lost(extra: Any) -> None:
    with pytest.raises(UnsupportedState, match=r"model\['more'\] is made by a state_dict hook"):
        of(Hooked(extra)).state()


def test_digests_are_of_bytes_and_find_what_was_not_restored() -> None:
    """T143: the adapter was in the checkpoint, yet the run went on with a fresh one."""
    tensor = torch.randn(3, 4)
    assert digest_of(tensor) == digest_of(tensor.clone()) == digest_of(tensor.t().contiguous().t())
    assert digest_of(tensor) != digest_of(tensor.t())
    assert digest_of(torch.zeros(2, dtype=torch.bfloat16)) == digest_of(torch.zeros(1))
    assert digest_of(torch.empty(0)) == "99aa06d3014798d86001c324468d497f"
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    known = digests(model)
    assert verify_live(nn.DataParallel(model), known) == []
    model[1] = nn.Linear(2, 2)
    assert verify_live(model, known) == ["'1.weight' has other bytes", "'1.bias' has other bytes"]
    assert verify_live(nn.Linear(2, 2, bias=False), {"w": ""}) == ["'w' is not in the model", "'weight' has no digest"]
    assert verify_live(nn.Identity(), {}) != []


# --- other objects ---------------------------------------------------------------------------------------------


class Keeper:
    """Takes what it is given apart, as careless objects do."""

    def __init__(self, state: Any = None) -> None:
        self.kept = state

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, state: Any) -> None:
        self.kept = dict(state)
        state.clear()


@pytest.mark.parametrize("target", [{"k": []}, {"k": [{}]}, {"k": None}, {}, {"k": [1, 2, 3], "other": 1}])
def test_the_saved_tree_comes_back_whole_whatever_the_target_holds(target: dict[str, Any]) -> None:
    """T128: the list was empty when the target was built, but filled at save."""
    saved = {"k": [{"a": 1}, {"b": 2}]}
    reader = Reader(ObjectComponent("x", saved))
    restore(ObjectComponent("x", target), reader)
    assert target == saved
    keeper = Keeper(dict(target))
    restore(ObjectComponent("x", keeper), reader)
    assert keeper.kept == saved
    assert reader.saved() == saved


def test_a_strict_target_names_the_path_of_every_difference() -> None:
    """T128."""
    saved = Reader(ObjectComponent("x", {"k": [{"a": 1}], "n": 1, "t": torch.zeros(2), "s": (1, 2), "gone": 1})).meta()
    target = {"k": [{"b": 1}], "n": "1", "t": torch.zeros(3), "s": (1,), "new": 1}
    assert sorted(ObjectComponent("x", target, strict=True).check(saved)) == [
        "x['gone'] is in the checkpoint, not live",
        "x['k'][0]['a'] is in the checkpoint, not live",
        "x['k'][0]['b'] is not in the checkpoint",
        "x['n']: saved int, live str",
        "x['new'] is not in the checkpoint",
        "x['s']: saved 2 elements, live 1",
        "x['t']: saved float32 (2,), live float32 (3,)",
    ]
    assert ObjectComponent("x", target, strict=True).check(dict(target)) == []
    assert ObjectComponent("x", Keeper({"k": 1}), strict=True).check({"k": 2}) == []
    assert ObjectComponent("x", Keeper({"k": 1}), strict=True).check({}) == ["x['k'] is not in the checkpoint"]


def test_plain_values_are_all_new_after_the_load() -> None:
    """T131: epoch and lr kept the old value; tensors were fine."""
    saved = {"epoch": 20, "lr": 0.01, "s": "x", "n": None, "t": (1, 2), "groups": [{"lr": 0.01, "betas": (0.9, 0.95)}]}
    target: dict[str, Any] = {"epoch": 0, "lr": 1.0, "s": "y", "n": 3, "t": [], "groups": [{"lr": 1.0}], "stale": 1}
    groups = target["groups"][0]
    restore(ObjectComponent("x", target), Reader(ObjectComponent("x", saved)))
    assert target == saved
    assert list(target) == list(saved)
    assert type(target["t"]) is tuple
    assert target["groups"][0] is groups


def test_containers_passed_by_value_keep_their_types() -> None:
    """T127, T133."""
    saved = {
        "c": Counter({5: 2, 1: 1}),
        "d": defaultdict(list, {3: [1]}),
        "o": OrderedDict([("b", 1), ("a", 2)]),
        5: 1,
        "5": 2,
    }
    for target in ({}, {"c": Counter({5: 7, 9: 9}), "d": {}, "o": OrderedDict(), 5: 0, "5": 0}):
        restore(ObjectComponent("x", target), Reader(ObjectComponent("x", saved)))
        assert target == saved
        assert [type(value) for value in target.values()] == [type(value) for value in saved.values()]
    elements: list[Any] = [0]
    restore(ObjectComponent("x", elements), Reader(ObjectComponent("x", [1, {"a": 2}])))
    assert elements == [1, {"a": 2}]


def test_tensors_passed_by_value_are_filled_in_place_or_replaced() -> None:
    live = torch.zeros(2)
    nested = {"ema": [torch.zeros(3).t(), torch.zeros(1)]}
    held = nested["ema"][0]
    target: dict[str, Any] = {"a": live, "n": nested, "shape": torch.zeros(5)}
    saved = {
        "a": torch.ones(2),
        "n": {"ema": [torch.ones(3), torch.ones(1)]},
        "shape": torch.ones(2),
        "new": torch.ones(1),
    }
    restore(ObjectComponent("x", target), Reader(ObjectComponent("x", saved)))
    assert live.tolist() == [1, 1]
    assert target["a"] is live
    assert target["n"] is nested
    assert held.tolist() == [1, 1, 1]
    assert target["shape"].tolist() == [1, 1]
    assert target["new"].tolist() == [1]


def test_objects_that_cannot_be_restored_are_refused_at_registration() -> None:
    class Half:
        def state_dict(self) -> Any:
            return {}

    for target in (Half(), object(), 3, (1, 2), "text"):
        with pytest.raises(ConfigurationError, match=r"x .* cannot be restored"):
            ObjectComponent("x", target)
    assert ObjectComponent("x", {}).check([1]) == ["x: saved a list, live a dict"]
    assert ObjectComponent("x", []).check({}) == ["x: saved a dict, live a list"]
    with pytest.raises(IncompatibleState):
        ObjectComponent("x", []).load({})


def test_counters_are_the_usual_ones_that_are_plain_numbers() -> None:
    keeper: Any = Keeper()
    keeper.last_epoch, keeper.step, keeper._step_count = 7, (lambda: 3), 8
    assert ObjectComponent("x", keeper).counters() == {"last_epoch": 7, "_step_count": 8}
    assert ObjectComponent("x", {"epoch": 3, "step": True, "other": 4}).counters() == {"epoch": 3}
    assert ObjectComponent("x", [1]).counters() == {}


def test_components_follow_the_protocol() -> None:
    components: Iterator[Component] = iter(
        [of(nn.Linear(1, 1)), ObjectComponent("x", {}, kind="ema", scope="rank", order=5)]
    )
    model, other = components
    assert isinstance(model, Component)
    assert (model.kind, model.scope, model.order) == ("model", "global", 0)
    assert isinstance(other, Component)
    assert (other.name, other.kind, other.scope, other.order) == ("x", "ema", "rank", 5)
