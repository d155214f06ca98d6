"""The state that is saved: a real module and a real AdamW whose state is filled, of a chosen size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Attributes:
        width: Of the model.
        layers: Of the model.
        vocabulary: Of the model.
        steps: Training steps of a run.
        saves: Saves of a run, evenly spread over it.
        step_seconds: How long a step keeps the accelerator busy, at least.
        rounds: Pairs of samples for a figure that has a bar.
        rival_rounds: Samples of a rival's row.
        many: Tensors of the state of many small tensors.
    """

    width: int
    layers: int
    vocabulary: int
    steps: int
    saves: int
    step_seconds: float
    rounds: int
    rival_rounds: int
    many: int

    def as_dict(self) -> dict[str, Any]:
        """As plain values, to be handed to a process."""
        return asdict(self)


FULL = Size(
    width=768,
    layers=12,
    vocabulary=32768,
    steps=200,
    saves=5,
    step_seconds=0.04,
    rounds=5,
    rival_rounds=2,
    many=20_000,
)
QUICK = Size(
    width=256,
    layers=3,
    vocabulary=12288,
    steps=10,
    saves=1,
    step_seconds=0.05,
    rounds=1,
    rival_rounds=1,
    many=1_000,
)


class Block(nn.Module):
    """The weights of one transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Model(nn.Module):
    """The weights of a GPT. It is never run: the accelerator's work is imitated by the passing of time."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)


@dataclass(frozen=True)
class Trainee:
    """What is trained: bf16 parameters, fp32 moments."""

    model: nn.Module
    optimizer: torch.optim.AdamW

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors of the state."""
        yield from (parameter.detach() for parameter in self.model.parameters())
        for state in self.optimizer.state.values():
            yield from state.values()

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tree(self) -> dict[str, Any]:
        """The state as other libraries take it; its tensors are the live ones."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def flat(self) -> dict[str, torch.Tensor]:
        """The tensors alone, by name, for formats that know nothing else."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            found.update({f"optimizer.{name}.{key}": v for key, v in self.optimizer.state[parameter].items()})
        return found

    def touch(self) -> None:
        """A change in place, as an optimizer step makes one, of the smallest parameter: two saves are never equal.

        Not of all of them: what the accelerator does in an instant would take the host longer than the save.
        """
        with torch.no_grad():
            next(iter(self.model.get_submodule("norm").parameters())).add_(1)


def build(size: Size) -> Trainee:
    """The state, every page of it in memory."""
    torch.manual_seed(1)
    # On the meta device first: initialising weights that are overwritten would take longer than all the rest.
    with torch.device("meta"):
        model = Model(size)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    noise = torch.randn(_BLOCK)
    for parameter in model.parameters():
        _fill(parameter.data, noise)
        moments = {name: torch.empty(parameter.shape, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        for moment in moments.values():
            _fill(moment, noise)
        moments["exp_avg_sq"].abs_()
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return Trainee(model=model, optimizer=optimizer)


def many(count: int) -> dict[str, torch.Tensor]:
    """Many small tensors of 16 kB each."""
    noise = torch.randn(4096)
    return {f"t{number:05d}": noise * (number + 1) for number in range(count)}


def _fill(tensor: torch.Tensor, noise: torch.Tensor) -> None:
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), _BLOCK):
        part = flat[start : start + _BLOCK]
        part.copy_(noise[: part.numel()])
        part.mul_(1.0 + start / _BLOCK / 1000)
