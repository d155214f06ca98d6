"""A tensor is the same after the round trip: bytes, dtype, shape, ties; whatever its memory looks like."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onward

from .shared import commit, files, flip, folder, load, numbers, raw, refused, root, round_trip, running, same

DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
QUANTIZED = {"torch.qint8", "torch.quint8", "torch.qint32", "torch.quint4x2", "torch.quint2x4"}


def test_eight_bit_codes_with_their_scales_come_back(url: str) -> None:
    """T112: as an 8-bit optimizer keeps its moments."""
    value = {
        "codes": torch.randint(0, 256, (256,), dtype=torch.uint8),
        "scales": torch.rand(4),
        "map": torch.linspace(-1, 1, 256),
        "small": torch.tensor([1.5]),
    }
    assert same(round_trip(url, value), value)


class TwoPart(torch.Tensor):
    """A tensor subclass whose values are those of two inner tensors."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> TwoPart:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def test_a_tensor_subclass_is_named_before_training_begins(url: str) -> None:
    """T112: told by ``resume``, not at the end of the training."""
    odd = TwoPart(torch.zeros(4, dtype=torch.uint8), torch.ones(1))
    refused(onward.errors.UnsupportedState, r"moments\['w'\].*TwoPart", url, moments={"w": odd})
    assert not (root(url) / "runs/r").exists(), "the run was taken over for nothing"


def test_every_dtype_keeps_its_bytes(url: str) -> None:
    """T113: with NaN payloads, negative zeros, subnormals; compared as bytes."""
    state = {name: _patterns(dtype) for name, dtype in DTYPES.items() if name not in QUANTIZED}
    assert len(state) > 30
    loaded = round_trip(url, state)
    for name, tensors in state.items():
        for shape, tensor in tensors.items():
            found = loaded[name][shape]
            assert (found.dtype, found.shape) == (DTYPES[name], tensor.shape), (name, shape)
            assert _bytes(found) == _bytes(tensor), (name, shape)


def _patterns(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every byte there is, at each place in an item."""
    size = torch.empty(0, dtype=dtype).element_size()
    flat = torch.arange(256).repeat(size).roll(3).to(torch.uint8) if dtype != torch.bool else torch.tensor([0, 1, 1, 0])
    flat = flat.to(torch.uint8)
    tensor = torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, (flat.numel() // size,), (1,))
    return {"all": tensor, "one": tensor[1:2].reshape(()), "grid": tensor[:4].reshape(2, 2), "none": tensor[:0]}


def _bytes(tensor: torch.Tensor) -> bytes:
    size, start = tensor.element_size(), tensor.storage_offset()
    return bytes(tensor.untyped_storage())[start * size : (start + tensor.numel()) * size]


def test_one_memory_seen_as_several_dtypes_comes_back_as_each(url: str) -> None:
    """T115."""
    x = torch.randn(4, 4)
    value = {"x": x, "y": x.view(torch.int32), "z": x.view(torch.uint8)}
    assert same(round_trip(url, value), value)


def test_a_slice_is_saved_without_the_memory_it_is_cut_from(url: str) -> None:
    """T116."""
    big = torch.rand(1_000_000)
    parts = list(big[:100_000].chunk(10))
    assert same(round_trip(url, {"a": big[:10]}), {"a": big[:10]})
    assert _shard_bytes(url, "r") < 10_000
    assert same(round_trip(url, parts, run="parts"), parts)
    assert 400_000 <= _shard_bytes(url, "parts") < 410_000


def _shard_bytes(url: str, run: str) -> int:
    return sum(file.stat().st_size for file in folder(url, 1, run).rglob("*.safetensors"))


class Headed(nn.Module):
    """An embedding and a head, tied or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def _tie() -> Any:
    return onward.describe(ties=[("embedding.weight", "head.weight")], code=False)


def test_a_declared_tie_that_is_not_real_is_warned_of_and_both_are_saved(url: str) -> None:
    """T118."""
    model, fresh = Headed(tied=False), Headed(tied=False)
    with (
        pytest.warns(UserWarning, match=r"embedding\.weight, head\.weight"),
        running(url, model=model, describe=_tie()) as (ckpt, _),
    ):
        ckpt.save(1, wait=True)
    with pytest.warns(UserWarning), running(url, model=fresh, describe=_tie()):
        assert all(map(same, model.parameters(), fresh.parameters()))
    assert not same(fresh.head.weight, fresh.embedding.weight)


def test_a_real_tie_is_stored_once_and_tied_again(url: str, recwarn: pytest.WarningsRecorder) -> None:
    """T118, the other way round."""
    model, fresh = Headed(tied=True), Headed(tied=True)
    with running(url, model=model, describe=_tie()) as (ckpt, _):
        ckpt.save(1, wait=True)
    assert len(files(folder(url, 1))["rank-00000/000.safetensors"]) == 4096 + 5 * 3 * 4
    with running(url, model=fresh, describe=_tie()):
        assert fresh.head.weight is fresh.embedding.weight
        assert same(fresh.head.weight, model.head.weight)
    assert not recwarn.list


def test_tensors_without_memory_are_not_taken_for_one(url: str) -> None:
    """T119."""
    real = torch.randn(3)
    value = {
        "e1": torch.empty(0),
        "e2": torch.empty(0),
        "e3": torch.empty(2, 0),
        "scalar": torch.tensor(1.0),
        "one": real,
        "other": real,
        "view": real.view(3, 1),
    }
    loaded = round_trip(url, value)
    assert same(loaded, value)
    layout = json.loads((folder(url, 1) / "layout.json").read_text())
    ties = {tensor["key"]: tensor["tie"] for tensor in layout["tensors"] if tensor["tie"] is not None}
    assert ties == {'["state","value","other"]': '["state","value","one"]'}


class Expanded(nn.Module):
    """A buffer whose rows are one and the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(3).expand(2, 3))


def test_a_buffer_that_is_an_expanded_view_can_be_loaded_into(url: str) -> None:
    """T121."""
    model, fresh = Expanded(), Expanded()
    model.table = torch.randn(2, 3)
    with running(url, model=model) as (ckpt, _):
        ckpt.save(1, wait=True)
    with running(url, model=fresh):
        assert same(fresh.table, model.table)
        fresh.table[0, 0] = 7  # memory of its own, not one row seen twice
        assert fresh.table[1, 0] != 7


def test_saving_over_and_deleting_what_is_in_use_changes_neither_memory_nor_disk(url: str) -> None:
    """T122."""
    commit(url, 5)
    first = files(folder(url, 5))
    box = numbers(0)
    with running(url, state=box) as (ckpt, _):
        box["x"].fill_(6)
        box["n"] = 6
        ckpt.save(5, wait=True)
    other = numbers(0)
    with running(url, state=other) as (_, start):
        place = Path(folder(url, 5))
        for file in place.rglob("*"):
            if file.is_file():
                file.unlink()
        assert start.next_step == 5
        assert bool((other["x"] == 6).all())
    start, value = load(url)
    assert (value, len(start.rejected)) == (5, 1)
    assert files(min(place.parent.iterdir(), key=lambda p: int(p.name.rpartition("-")[2]))) == first


@pytest.mark.parametrize("step", [torch.tensor(3.0), torch.tensor(3), 3, torch.tensor(3.0, dtype=torch.float64)])
def test_a_step_count_keeps_its_type(url: str, step: Any) -> None:
    """T124."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"] = copy.deepcopy(step)
    with running(url, model=model, optimizer=optimizer) as (ckpt, _):
        ckpt.save(1, wait=True)
    fresh = nn.Linear(2, 2)
    other = torch.optim.AdamW(fresh.parameters())
    with running(url, model=fresh, optimizer=other):
        assert all(same(state["step"], step) for state in other.state.values())
        if isinstance(step, torch.Tensor):  # as torch's own optimizers count
            fresh(torch.ones(1, 2)).sum().backward()
            other.step()
            assert all(float(state["step"]) == 4 for state in other.state.values())


def test_no_device_decides_where_a_tensor_goes(url: str) -> None:
    """T125: the format has no word for the device of a tensor; a device that is state itself is data."""
    value = {"where": torch.device("cuda:7"), "x": torch.ones(2)}
    loaded = round_trip(url, value)
    assert loaded["where"] == torch.device("cuda:7")
    assert loaded["x"].device == torch.device("cpu")
    assert "cuda" not in (folder(url, 1) / "layout.json").read_text()
    layout = folder(url, 1) / "layout.json"
    layout.write_text(layout.read_text().replace('"dtype":"float32"', '"device":"cuda:7","dtype":"float32"'))
    refused(onward.errors.NothingRecoverable, r"layout\.json", url, state={"value": None})


# --- further cases of the kind ---------------------------------------------------------------------------------


def test_memory_laid_out_in_odd_ways_gives_the_same_values(url: str) -> None:
    """Transposed, channels last, every second item, reversed signs of conjugate and negative views, overlapping."""
    x = torch.randn(2, 3, 4, 5)
    value = {
        "transposed": x.transpose(0, 2),
        "channels last": x.to(memory_format=torch.channels_last),
        "every second": x[:, ::2, :, 1::2],
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "imaginary of conjugate": torch.randn(3, dtype=torch.complex64).conj().imag,
        "windows": torch.arange(6.0).unfold(0, 3, 1),
        "grad": torch.ones(2, requires_grad=True),
        "no dimensions of two": torch.tensor(3, dtype=torch.int64),
    }
    loaded = round_trip(url, value)
    for name, tensor in value.items():
        assert (loaded[name].dtype, loaded[name].shape, raw(loaded[name])) == (tensor.dtype, tensor.shape, raw(tensor))


def test_ties_made_or_broken_since_the_save(url: str) -> None:
    """Tied then and apart now: both get the values. Apart then, with two values, and tied now: refused by name."""
    tied, apart = Headed(tied=True), Headed(tied=False)
    with running(url, run="tied", model=tied) as (ckpt, _):
        ckpt.save(1, wait=True)
    with running(url, run="tied", model=apart):
        assert same(apart.head.weight, tied.head.weight)
        assert same(apart.embedding.weight, tied.head.weight)
        assert apart.head.weight.data_ptr() != apart.embedding.weight.data_ptr()
    apart = Headed(tied=False)
    with running(url, run="apart", model=apart) as (ckpt, _):
        ckpt.save(1, wait=True)
    before = tied.head.weight.detach().clone()
    refused(onward.errors.IncompatibleState, r"embedding\.weight.*head\.weight", url, run="apart", model=tied)
    assert same(before, tied.head.weight)


def test_what_has_no_bytes_or_not_all_of_them_is_refused_by_name(url: str) -> None:
    """Lazy, sparse, quantized, nested, on the meta device: named when the run begins."""
    odd = {
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.empty(2, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    }
    for name, tensor in odd.items():
        refused(onward.errors.UnsupportedState, rf"state\['{name}'\]", url, state={name: tensor})
    refused(onward.errors.UnsupportedState, "lazy", url, model=nn.LazyLinear(3))


def test_the_tensor_that_is_damaged_is_named(url: str) -> None:
    """Among many in one file, by its own name."""
    value = {f"t{number}": torch.full((1000,), float(number)) for number in range(20)}
    with running(url, state=value) as (ckpt, _):
        ckpt.save(1, wait=True)
    shard = folder(url, 1) / "rank-00000/000.safetensors"
    where = shard.read_bytes().index(torch.full((1000,), 13.0).numpy().tobytes())
    flip(shard, where + 5)
    refused(onward.errors.NothingRecoverable, r"000\.safetensors", url, state={})
    (receipt,) = (root(url) / "runs/r/receipts" / folder(url, 1).name).glob("*-quarantined-*")
    findings = json.loads(receipt.read_text())["details"]["findings"]
    assert [finding["tensor"] for finding in findings] == ['["state","t13"]']
