"""The training script is deterministic, draws on every random state, and dumps all of its state by name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from onward.demo.corpus import Corpus, load_corpus
from onward.demo.model import GPT, ModelConfig, parameter_groups
from onward.demo.train import Training, Warmup, add_noise, dump_state, parse, random_digests, seed_everything

SMALL = ModelConfig(vocabulary=11, context=8, width=16, n_layers=2, n_heads=2)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "a.py").write_bytes(b"for line in open('a'): print(line)\n" * 200)
    return load_corpus(tmp_path)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_head_shares_the_embedding_and_every_parameter_is_in_one_group() -> None:
    model = GPT(SMALL)
    assert model.head.weight is model.tokens.weight
    decayed, spared = parameter_groups(model, 0.1)
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))  # type: ignore[arg-type]
    assert all(p.dim() >= 2 for p in decayed["params"])  # type: ignore[attr-defined]
    assert spared["weight_decay"] == 0.0


def test_a_token_does_not_see_the_ones_behind_it() -> None:
    model = GPT(SMALL).eval()
    tokens = torch.arange(8)[None] % SMALL.vocabulary
    other = tokens.clone()
    other[0, -1] += 1
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    for row in (tokens, other):
        model(row, row)
    assert torch.equal(seen[0][:, :-1], seen[1][:, :-1])
    assert not torch.equal(seen[0][:, -1], seen[1][:, -1])


def test_the_schedule_warms_up_and_comes_down() -> None:
    factors = [Warmup(110)(step) for step in range(111)]
    assert factors[0] > 0
    assert max(factors) == 1.0
    assert factors[:15] == sorted(factors[:15])
    assert factors[15:] == sorted(factors[15:], reverse=True)
    assert factors[110] == pytest.approx(0.1)


def test_each_random_state_has_a_digest_of_its_own() -> None:
    seed_everything(3)
    before = random_digests()
    for name, draw in (("python", random.random), ("numpy", np.random.random), ("torch", lambda: torch.rand(1))):
        draw()
        after = random_digests()
        assert {key for key in after if after[key] != before[key]} == {f"rng.{name}"}
        before = after
    seed_everything(3)
    assert random_digests() != before


@pytest.mark.parametrize("forgotten", ["python", "numpy"])
def test_the_noise_depends_on_both_random_states(forgotten: str) -> None:
    tokens = torch.zeros((64, 64), dtype=torch.int64)
    seed_everything(3)
    expected = add_noise(tokens, 11)
    seed_everything(3)
    assert torch.equal(add_noise(tokens, 11), expected)
    seed_everything(3)
    random.seed(4) if forgotten == "python" else np.random.seed(4)
    assert not torch.equal(add_noise(tokens, 11), expected)


def test_two_trainings_of_one_seed_are_equal_and_dump_all_their_state(corpus: Corpus, tmp_path: Path) -> None:
    options = parse(["--no-checkpoint", "--seed", "5"])
    done = []
    for name in ("a", "b"):
        training = Training(options, corpus)
        batches = training.batches()
        done.append([training.step(batches) for _ in range(2)])
        dump_state(training, tmp_path / f"{name}.safetensors")
    assert done[0] == done[1]
    assert len(set(done[0][0]["samples"]) | set(done[0][1]["samples"])) == 16, "no sample comes twice in an epoch"
    with safe_open(tmp_path / "a.safetensors", "pt") as a, safe_open(tmp_path / "b.safetensors", "pt") as b:
        names = {name for name, _ in training.model.named_parameters()}
        assert set(a.keys()) == {f"parameter.{name}" for name in names} | {
            f"moment.{moment}.{name}" for moment in ("step", "exp_avg", "exp_avg_sq") for name in names
        }
        assert all(torch.equal(a.get_tensor(name), b.get_tensor(name)) for name in a.keys())  # noqa: SIM118
        assert a.metadata() == b.metadata()


def test_a_store_is_needed_unless_nothing_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--run", "x"])
    assert "--store is needed" in capsys.readouterr().err
    assert parse(["--no-checkpoint"]).checkpointing is False
