"""Small training jobs of many kinds, and all that can be compared about them: every step, and where they end.

``python -m cases.training KIND STORE SEED UNTIL OUT`` trains in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import onward

from .optimizers import Factored, Lion, MixedAdam
from .shared import raw, running

EVERY = 5
"""Steps between saves."""


class Numbered(Dataset[tuple[int, Tensor]]):
    """Sample ``i`` is made of ``i``; and of random numbers, if asked."""

    def __init__(self, length: int, noisy: bool) -> None:
        self.length, self.noisy = length, noisy

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(())) if self.noisy else 0.0
        return index, torch.full((6,), float(index) / self.length + noise)


class Average:
    """An exponential moving average of a model's parameters, with its own count."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        self.model, self.decay, self.updates = model, decay, 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        self.updates += 1
        for name, p in self.model.named_parameters():
            self.shadow[name].lerp_(p.detach(), (1 - self.decay) / self.updates**0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates, "decay": self.decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates, self.decay = state["shadow"], state["updates"], state["decay"]


@dataclass
class Job:
    """What a training loop holds; the seed is that of its first weights only."""

    seed: int
    model: nn.Module = field(init=False)
    optimizer: Optimizer = field(init=False)
    scheduler: Any = None
    scaler: Any = None
    data: Any = None
    average: Average | None = None
    dropout: float = 0.0
    accumulate: int = 1
    broken: tuple[int, ...] = ()
    batches: Iterator[Any] | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        np.random.seed(self.seed)
        random.seed(self.seed)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(self.dropout), nn.Linear(16, 3))

    def components(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler", "data", "average")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def step(self, number: int) -> list[str]:
        """One step of training; everything about it that can be seen."""
        seen: list[str] = []
        for _ in range(self.accumulate):
            inputs = self._inputs(seen)
            loss = self.model(inputs.to(next(self.model.parameters()).dtype)).float().square().mean()
            seen.append(loss.item().hex())
            if number in self.broken:
                loss = loss * float("inf")
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            seen.append(self.scaler.get_scale().hex())
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.average is not None:
            self.average.update()
        seen += [float(group["lr"]).hex() for group in self.optimizer.param_groups]
        seen += [random.random().hex(), float(np.random.rand()).hex(), torch.rand(()).item().hex()]
        return seen

    def _inputs(self, seen: list[str]) -> Tensor:
        if self.data is None:
            return torch.randn(4, 6)
        while True:
            if self.batches is None:
                self.batches = iter(self.data)
            try:
                ids, inputs = next(self.batches)
            except StopIteration:
                self.batches = None
                continue
            seen.append(str(ids.tolist()))
            return inputs  # type: ignore[no-any-return]

    def digests(self) -> dict[str, str]:
        """Every parameter, moment, average and number that training would go on from."""
        found: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = value
        found |= {f"average.{name}": value for name, value in (self.average.shadow if self.average else {}).items()}
        numbers = {
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "updates": self.average.updates if self.average else None,
        }
        table = {name: _digest(value) for name, value in found.items()}
        return {**table, **{name: repr(value) for name, value in numbers.items()}}


def _digest(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(raw(value)).hexdigest()}"
    return repr(value)


# --- kinds ------------------------------------------------------------------------------------------------------


def _job(make: Callable[[Any], Optimizer], scheduler: bool = True, **options: Any) -> Callable[[int], Job]:
    def build(seed: int) -> Job:
        job = Job(
            seed, **{name: value for name, value in options.items() if name in ("dropout", "accumulate", "broken")}
        )
        job.model.to(options.get("dtype", torch.float32))
        job.scaler = options["scaler"]() if "scaler" in options else None
        job.data = options["data"]() if "data" in options else None  # after the seeds were set: torchdata draws one
        job.optimizer = make(job.model.parameters())
        if scheduler:
            warm_up = torch.optim.lr_scheduler.LinearLR(job.optimizer, 0.1, 1.0, 4)
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, 20)
            job.scheduler = torch.optim.lr_scheduler.SequentialLR(job.optimizer, [warm_up, cosine], [4])
        if "averaged" in options:
            job.average = Average(job.model)
        return job

    return build


def _adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


def _resumable(workers: int) -> Callable[[], Any]:
    return lambda: onward.ResumableLoader(Numbered(20, True), 3, seed=5, num_workers=workers)


def _torchdata(workers: int) -> Callable[[], Any]:
    return lambda: StatefulDataLoader(Numbered(20, False), 3, shuffle=True, num_workers=workers)


KINDS: dict[str, Callable[[int], Job]] = {
    "adamw": _job(_adamw),
    "sgd-momentum": _job(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True)),
    "factored": _job(lambda p: Factored(p, lr=0.02)),
    "lion": _job(lambda p: Lion(p, lr=0.005)),
    "bf16-fp32-moments": _job(lambda p: MixedAdam(p, lr=0.02), dtype=torch.bfloat16),
    "scaler-skips": _job(
        _adamw,
        scaler=lambda: torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3),
        broken=(1, 4, 6, 11),
    ),
    "dropout": _job(_adamw, dropout=0.5),
    "resumable-0": _job(_adamw, data=_resumable(0)),
    "resumable-2": _job(_adamw, data=_resumable(2)),
    "torchdata-0": _job(_adamw, data=_torchdata(0)),
    "torchdata-2": _job(_adamw, data=_torchdata(2)),
    "accumulation": _job(_adamw, data=_resumable(0), accumulate=4, dropout=0.2),
    "average": _job(_adamw, scheduler=False, averaged=True),
}


# --- running ----------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a run was seen to do from its first step on, and where it ended."""

    first: int
    steps: list[list[str]]
    digests: dict[str, str]


def straight(kind: str, until: int, seed: int = 0) -> Outcome:
    """Trains without onward."""
    job = KINDS[kind](seed)
    steps = [job.step(number) for number in range(until)]
    return Outcome(0, steps, job.digests())


def train(kind: str, url: str, seed: int, until: int, **how: Any) -> Outcome:
    """Trains on from where the run stands; with another seed, so that nothing is right by luck."""
    job = KINDS[kind](seed)
    with running(url, every=EVERY, how=how, **job.components()) as (ckpt, start):
        steps = []
        for number in range(start.next_step, until):
            steps.append(job.step(number))
            ckpt.step(number)
        ckpt.wait()
        return Outcome(start.next_step, steps, job.digests())


def train_to_file(kind: str, url: str, seed: int, until: int, out: str) -> None:
    """``train`` for another process, which leaves its outcome in a file."""
    Path(out).write_text(json.dumps(vars(train(kind, url, seed, until))))


def outcome_of(out: str) -> Outcome:
    """What ``train_to_file`` has left."""
    return Outcome(**json.loads(Path(out).read_text()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_to_file(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
