"""The README tells the truth: its quickstart runs, its configuration is read, its tree is the tree."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import onward

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)[number]


def loop(store: Path, max_steps: int) -> list[int]:
    """Runs the quickstart as it stands, against a small model; returns the samples it trained on."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    loader = onward.ResumableLoader(list(range(10)), 2, seed=3)
    samples: list[int] = []

    def train_one(batch: torch.Tensor) -> torch.Tensor:
        samples.extend(batch.tolist())
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    code = block("python").replace("file:///data/checkpoints", f"file://{store}")
    names = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "config": {"width": 4},
        "hyperparameters": {"lr": 1e-3},
        "train_one": train_one,
        "max_steps": max_steps,
    }
    exec(compile(code, "README.md", "exec"), names)
    return samples


def test_the_quickstart_resumes_where_it_stopped(tmp_path: Path) -> None:
    store, straight = tmp_path / "store", tmp_path / "straight"
    for place in (store, straight):
        onward.init_store(f"file://{place}")
    reference = loop(straight, 502)
    assert loop(store, 500) == reference[:1000]
    assert loop(store, 502) == reference[1000:], "the second start goes on with the very next sample"


def test_the_quickstart_has_at_most_twelve_lines() -> None:
    assert len(block("python").strip().splitlines()) <= 12


def test_the_configuration_shown_is_read(tmp_path: Path) -> None:
    file = tmp_path / "onward.toml"
    file.write_text(block("toml"))
    config = onward.load_config(file, environment={})
    assert (config.run, config.triggers.every_steps) == ("llama3-8b", 500)
    assert config.resume.policies() == {"hyperparameters.max_steps": "warn"}


def test_the_tree_names_every_room_and_no_other() -> None:
    shown = set(re.findall(r"^  ([a-z_]+(?:/|\.py)) ", README, re.M))
    package = ROOT / "src" / "onward"
    real = {f"{p.name}/" for p in package.iterdir() if p.is_dir() and (p / "__init__.py").is_file()}
    real |= {p.name for p in package.glob("*.py") if not p.name.startswith("_")}
    tests = {f"{p.name}/" for p in (ROOT / "tests").iterdir() if p.is_dir() and not p.name.startswith("_")}
    assert real <= shown, real - shown
    assert shown <= real | tests | {"__init__.py"}, shown - real - tests
