"""Capturing: all of one boundary, at once or while training goes on; a tensor that changes meanwhile is noticed."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from torch import nn

from onward.errors import NoCapacity, UnsupportedState
from onward.runtime import memory
from onward.save.capture import Capturer
from onward.save.captured import Captured
from onward.state.copying import HostCopier
from onward.state.register import register

GIB = 1 << 30


def bytes_of(captured: Captured) -> dict[str, bytes]:
    """Every stored tensor's bytes, put together from the regions of its files."""
    found: dict[str, bytearray] = {}
    for file in captured.plan.files:
        region = captured.region(file)
        for piece in file.pieces:
            whole = found.setdefault(piece.key, bytearray())
            assert piece.offset == len(whole), "pieces of a tensor come in order"
            whole += region[piece.begin : piece.begin + piece.nbytes]
    return {key: bytes(value) for key, value in found.items()}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def module_with_everything() -> nn.Module:
    model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 3))
    model.register_buffer("halves", torch.randn(7, 3).bfloat16())
    model.register_buffer("scalar", torch.tensor(1.5, dtype=torch.float64))
    model.register_buffer("empty", torch.zeros(0, 4))
    model.register_buffer("strided", torch.randn(8, 9).t()[::2])
    model.register_buffer("wide", torch.arange(12.0).expand(3, 12))
    model.register_buffer("phase", torch.randn(5, dtype=torch.complex64).conj())
    model.register_buffer("mask", torch.rand(33) > 0.5)
    return model


def test_every_byte_is_captured_whatever_dtype_and_strides() -> None:
    model = module_with_everything()
    captured = Capturer(register(model=model)).capture(1).finish()
    expected = {f'["model","{name}"]': value for name, value in model.state_dict().items()}
    got = bytes_of(captured)
    assert set(got) == set(expected)
    for key, tensor in expected.items():
        assert got[key] == raw(tensor.resolve_conj()), key
    assert captured.tensor_bytes == sum(map(len, got.values()))
    assert {tag.step for tag in captured.tags} == {1} and captured.seconds > 0


def test_the_live_state_may_change_at_once() -> None:
    box = {"x": torch.full((500_000,), 1.0), "n": 1, "list": [1]}
    captured = Capturer(register(others={"box": box})).capture(1).finish()
    box["x"].fill_(2)
    box["n"], box["list"][:] = 2, [2]
    assert bytes_of(captured)['["box","x"]'] == raw(torch.ones(500_000))
    assert "2" not in str(captured.state["box"])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("room", [33 << 20, 80 << 20, None])
def test_a_capture_by_window_gives_the_same_bytes_as_a_full_one(
    monkeypatch: pytest.MonkeyPatch, room: int | None, threads: int
) -> None:
    """Other files, cut elsewhere, but every tensor bit for bit; and no window is larger than what there is room for."""
    model = module_with_everything()
    model.register_buffer("large", torch.randn(3, 4 << 20))  # 48 MiB
    capturer = Capturer(register(model=model), threads=threads)
    full = capturer.capture(4).finish()
    whole = bytes_of(full)
    monkeypatch.setattr(memory, "available", lambda: (room, "a test"))
    small = capturer.capture_by_window(4)
    assert bytes_of(small) == whole
    assert (small.layout, small.state, small.tags, small.step) == (full.layout, full.state, full.tags, 4)
    if room is not None:
        assert max(file.nbytes for file in small.plan.files) <= room // 2
        assert len(small.plan.files) > 1


def test_without_room_for_a_full_copy_it_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    box = {"x": torch.zeros(25_000_000)}
    capturer = Capturer(register(others={"box": box}))
    monkeypatch.setattr(memory, "available", lambda: (300_000_000, "the cgroup limit of /x"))
    with pytest.raises(NoCapacity, match=r"100\.0 MB .* the cgroup limit of /x leaves 300\.0 MB"):
        capturer.capture(1)
    assert capturer.arena.capacity == 0, "nothing was taken before it was refused"


def test_memory_that_is_held_already_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    box = {"x": torch.zeros(2_500_000)}
    capturer = Capturer(register(others={"box": box}))
    capturer.capture(1).finish()
    monkeypatch.setattr(memory, "available", lambda: (1, "a test"))
    capturer.capture(2).finish()


def test_not_even_a_window_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: (1 << 20, "MemAvailable"))
    with pytest.raises(NoCapacity, match="window"):
        Capturer(register(others={"box": {"x": torch.zeros(4)}})).capture_by_window(1)


@pytest.mark.parametrize(("room", "taken"), [(None, True), (GIB, True), (10_000_000, False)])
def test_prepare_brings_memory_in_only_where_there_is_plenty(
    monkeypatch: pytest.MonkeyPatch, room: int | None, taken: bool
) -> None:
    monkeypatch.setattr(memory, "available", lambda: (room, "a test"))
    capturer = Capturer(register(others={"box": {"x": torch.zeros(2_500_000)}}))
    capturer.prepare()
    assert (capturer.arena.capacity > 0) is taken
    capturer.close()


def test_prepare_names_what_cannot_be_saved() -> None:
    with pytest.raises(UnsupportedState, match="bad"):
        Capturer(register(others={"box": {"bad": object()}})).prepare()


def test_plan_and_memory_are_kept_until_the_layout_changes() -> None:
    box: dict[str, Any] = {"x": torch.zeros(1000)}
    capturer = Capturer(register(others={"box": box}))
    first = capturer.capture(1).finish()
    assert capturer.capture(2).finish().plan is first.plan
    box["y"] = torch.ones(5000)
    grown = capturer.capture(3).finish()
    assert grown.plan is not first.plan and set(bytes_of(grown)) == {'["box","x"]', '["box","y"]'}


def test_memory_is_pinned_for_the_engine_that_copies() -> None:
    class Pins(HostCopier):
        pinned = 0

        def pin(self, memory: mmap.mmap) -> None:
            self.pinned += 1

        def unpin(self, memory: mmap.mmap) -> None:
            self.pinned -= 1

    engine = Pins()
    capturer = Capturer(register(others={"box": {"x": torch.zeros(10)}}), engine=engine)
    capturer.capture(1).finish()
    assert engine.pinned == 1
    capturer.close()
    assert engine.pinned == 0
