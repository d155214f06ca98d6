"""The training script of the demonstration: what a user's own script looks like with a ``Checkpointer`` in it.

``python -m onward.demo.train --store file:///DIR/store --run demo --steps 85 --every 15``

All randomness that training can draw on is drawn on here: torch for dropout, python and numpy for the noise on the
input, the loader's own generator for the order of the samples. With a fixed number of threads the run is
deterministic, so whatever a resume failed to bring back shows in the last bit of a loss.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.optim.lr_scheduler import LambdaLR

import onward
from onward.demo.corpus import Corpus, Windows, load_corpus
from onward.demo.model import GPT, ModelConfig, parameter_groups

ACCUMULATION = 2
MICRO_BATCH = 4
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
CLIP = 1.0
WARM_UP = 15
NOISE = 0.05
THREADS = 1
"""Fixed, because the order of additions and with it the last bit of a sum depends on the number of threads."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    store: str | None
    run: str
    steps: int
    every: int
    out: Path | None
    stop_at: int
    seed: int
    checkpointing: bool
    skip_rng: bool


@dataclass
class Progress:
    """The script's own counters, registered as a component beside model and optimizer."""

    samples: int = 0
    tokens: int = 0

    def state_dict(self) -> dict[str, int]:
        """What is saved."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Puts the counters back."""
        self.samples, self.tokens = state["samples"], state["tokens"]


@dataclass(frozen=True)
class Warmup:
    """The learning rate's factor: a linear warm-up, then half a cosine down to a tenth."""

    steps: int

    def __call__(self, step: int) -> float:
        if step < WARM_UP:
            return (step + 1) / WARM_UP
        done = min(1.0, (step - WARM_UP) / max(1, self.steps - WARM_UP))
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))


class Log:
    """One JSON line per step, flushed, so that what was done before a kill is on record."""

    def __init__(self, path: Path | None) -> None:
        self._file = sys.stdout if path is None else path.open("x", encoding="utf-8")

    def write(self, **fields: object) -> None:
        """Appends a line, with the time of day."""
        self._file.write(json.dumps({**fields, "time": time.time()}) + "\n")
        self._file.flush()


class Training:
    """Model, optimizer, schedule and data, and one optimizer step over them."""

    def __init__(self, options: Options, corpus: Corpus) -> None:
        seed_everything(options.seed)
        self.config = ModelConfig(vocabulary=len(corpus.vocabulary))
        self.model = GPT(self.config)
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, WEIGHT_DECAY), lr=LEARNING_RATE)
        self.scheduler = LambdaLR(self.optimizer, Warmup(options.steps))
        self.loader = onward.ResumableLoader(
            Windows(corpus.tokens, self.config.context),
            MICRO_BATCH,
            shuffle=True,
            seed=options.seed,
            num_workers=2,
            drop_last=True,
        )
        self.progress = Progress()

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """Micro-batches without end, epoch after epoch, from where the loader stands."""
        while True:
            yield from self.loader

    def step(self, batches: Iterator[dict[str, torch.Tensor]]) -> dict[str, Any]:
        """One optimizer step; returns loss, learning rate, gradient norm and the samples' numbers."""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        samples: list[int] = []
        for _ in range(ACCUMULATION):
            batch = next(batches)
            inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
            loss = self.model(add_noise(inputs, self.config.vocabulary), targets) / ACCUMULATION
            loss.backward()
            total += loss.detach()
            samples += batch["id"].tolist()
            self.progress.tokens += inputs.numel()
        self.progress.samples += len(samples)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.scheduler.step()
        return {"loss": total.item(), "lr": rate, "grad_norm": norm.item(), "samples": samples}


def add_noise(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Replaces a few input tokens; python's generator decides how many, numpy's where and by what."""
    rate = random.uniform(0.0, 2 * NOISE)
    hit = torch.from_numpy(np.random.random(tuple(tokens.shape)) < rate)
    other = torch.from_numpy(np.random.randint(0, vocabulary, tuple(tokens.shape)))
    return torch.where(hit, other, tokens)


def seed_everything(seed: int) -> None:
    """Seeds the global generators of python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_digests() -> dict[str, str]:
    """A digest of each global random state."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "python": repr(random.getstate()).encode(),
        "numpy": repr((kind, rest)).encode() + np.asarray(keys).tobytes(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    return {f"rng.{name}": hashlib.sha256(state).hexdigest() for name, state in states.items()}


def dump_state(training: Training, path: Path) -> None:
    """Writes parameters and moments by name as plain safetensors, for a comparison that needs nothing of Onward."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in training.model.named_parameters():
        tensors[f"parameter.{name}"] = parameter.detach()
        for moment, value in training.optimizer.state[parameter].items():
            tensors[f"moment.{moment}.{name}"] = value
    save_file(tensors, path, metadata={**random_digests(), "progress": json.dumps(training.progress.state_dict())})


def make_checkpointer(options: Options, training: Training, corpus: Corpus) -> onward.Checkpointer:
    """All that makes this script recoverable."""
    hyperparameters = {
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "clip": CLIP,
        "warm_up": WARM_UP,
        "steps": options.steps,
        "micro_batch": MICRO_BATCH,
        "accumulation": ACCUMULATION,
        "noise": NOISE,
        "seed": options.seed,
    }
    triggers = onward.TriggerSettings(every_steps=options.every)
    return onward.Checkpointer(
        onward.Config(
            store=options.store or "", run=options.run, triggers=triggers, save=onward.SaveSettings(overlap=True)
        ),
        model=training.model,
        optimizer=training.optimizer,
        scheduler=training.scheduler,
        data=training.loader,
        progress=training.progress,
        describe=onward.describe(
            model_config=training.config,
            tokenizer=corpus.tokenizer_identity(),
            dataset=corpus.dataset_identity(),
            hyperparameters=hyperparameters,
            assets={"vocabulary.json": corpus.vocabulary_asset()},
            ties=[("tokens.weight", "head.weight")],
        ),
    )


def resume(ckpt: onward.Checkpointer, log: Log) -> int:
    """Resumes, puts on record what was chosen, refused and rolled back, and returns the first step to do."""
    start = ckpt.resume()
    log.write(
        event="resume",
        writer=ckpt.writer_pid,
        next_step=start.next_step,
        checkpoint=start.checkpoint.folder if start.checkpoint else None,
        rejected=[
            {"folder": rejection.folder, "reasons": [finding.message for finding in rejection.reasons]}
            for rejection in start.rejected
        ],
        recovered=[
            {"attempt": outcome.attempt, "step": outcome.step, "outcome": outcome.outcome, "reason": outcome.reason}
            for outcome in start.recovered
        ],
    )
    return start.next_step


def train(options: Options) -> None:
    """Trains until ``steps`` or ``stop_at``, whichever comes first."""
    torch.set_num_threads(THREADS)
    # The same as use_deterministic_algorithms(True), without importing the compiler, which takes seconds.
    torch.set_deterministic_debug_mode("error")
    log = Log(options.out)
    corpus = load_corpus()
    training = Training(options, corpus)
    ckpt = make_checkpointer(options, training, corpus) if options.checkpointing else None
    first = resume(ckpt, log) if ckpt else 0
    if options.skip_rng:
        # The negative control: everything is restored but the random state.
        seed_everything(options.seed + 1)
    batches = training.batches()
    for step in range(first, min(options.steps, options.stop_at)):
        done = training.step(batches)
        log.write(step=step, loss=done["loss"].hex(), lr=done["lr"].hex(), samples=done["samples"])
        if ckpt and ckpt.step(step, loss=done["loss"], lr=done["lr"], grad_norm=done["grad_norm"]).stop:
            break
    if ckpt:
        ckpt.close()
    if options.out is not None:
        dump_state(training, options.out.with_suffix(".safetensors"))
    log.write(event="end")


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m onward.demo.train", description="Train a small GPT, recoverably.")
    parser.add_argument("--store", help="URL of the store, for example file:///data/store")
    parser.add_argument("--run", default="demo", help="name of the run")
    parser.add_argument("--steps", type=int, default=85, help="length of the run and of its schedule")
    parser.add_argument("--every", type=int, default=15, help="steps between two checkpoints")
    parser.add_argument("--out", type=Path, help="new log file (JSON lines; final state beside it); default: stdout")
    parser.add_argument("--stop-at", type=int, default=sys.maxsize, help="end early, schedule unchanged")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-checkpoint", action="store_true", help="train without saving: the reference")
    parser.add_argument("--skip-rng", action="store_true", help="do not restore random state: the negative control")
    found = parser.parse_args(arguments)
    if not found.no_checkpoint and found.store is None:
        parser.error("--store is needed, or --no-checkpoint")
    return Options(
        store=found.store,
        run=found.run,
        steps=found.steps,
        every=found.every,
        out=found.out,
        stop_at=found.stop_at,
        seed=found.seed,
        checkpointing=not found.no_checkpoint,
        skip_rng=found.skip_rng,
    )


if __name__ == "__main__":
    train(parse())
