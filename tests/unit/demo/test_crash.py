"""The kill hits a save between intent and ledger entry, whenever the instant falls, or says that it did not."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.demo import process
from onward.demo.crash import kill_inside_save, open_save
from onward.demo.process import DemoFailed, Trainer
from onward.format.names import checkpoint_folder, writing_folder

# A process that saves as a trainer does, as far as names on disk go; arguments: run folder, number of saves.
SAVER = """
import os, sys, time
from pathlib import Path
run, saves, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4])
log = out.open("w")
for number in range(1, saves + 1):
    time.sleep(0.05)
    print('{"step": %d, "loss": "0x1p+0"}' % (number * 10 - 1), file=log, flush=True)
    final = run / "checkpoints" / f"step-{number * 10:012d}-{number}"
    writing = final.with_name(final.name + ".writing-0123456789abcdef")
    writing.mkdir()
    time.sleep(0.01)
    (writing / "intent.json").write_text("{}")
    for part in range(8):
        time.sleep(0.01)
        (writing / f"{part}.safetensors").write_bytes(b"x" * 1000)
    os.rename(writing, final)
    time.sleep(0.02)
    (run / "ledger" / f"{number:09d}.json").write_text("{}")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    script = tmp_path / "saver.py"
    script.write_text(SAVER)
    monkeypatch.setattr(process, "training_command", lambda: [sys.executable, str(script)])
    folder = tmp_path / "run"
    (folder / "ledger").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    yield folder


def start(run: Path, saves: int) -> Trainer:
    return Trainer("run", run.parent, [str(run), str(saves)])


class Late(random.Random):
    """Draws an instant after the commit, as often as it is told to."""

    def __init__(self, times: int) -> None:
        super().__init__(1)
        self.times = times

    def uniform(self, a: float, b: float) -> float:
        self.times -= 1
        return 0.3 if self.times >= 0 else super().uniform(a, b)


def test_a_save_is_open_from_its_intent_to_its_entry(run: Path) -> None:
    assert open_save(run) is None
    writing = run / "checkpoints" / writing_folder(20, 3, "0123456789abcdef")
    writing.mkdir()
    assert open_save(run) is None
    (writing / "intent.json").write_text("{}")
    found = open_save(run)
    assert found is not None
    assert (found.step, found.sequence, found.renamed) == (20, 3, False)
    writing.rename(writing.with_name(checkpoint_folder(20, 3)))
    found = open_save(run)
    assert found is not None
    assert found.renamed
    (run / "ledger" / "000000003.json").write_text("{}")
    assert open_save(run) is None


def test_a_run_without_folders_has_no_open_save(tmp_path: Path) -> None:
    assert open_save(tmp_path / "absent") is None


@pytest.mark.parametrize("seed", range(5))
def test_the_kill_falls_inside_a_save(run: Path, seed: int) -> None:
    with start(run, 40) as trainer:
        kill = kill_inside_save(trainer, run, earliest=20, chance=random.Random(seed), tick=lambda: None)
        assert not trainer.running
    assert trainer.life().killed
    assert kill.save.step >= 20
    assert (kill.save.folder / "intent.json").exists()
    assert not (run / "ledger" / f"{kill.save.sequence:09d}.json").exists()
    assert (run / "ledger" / f"{kill.save.sequence - 1:09d}.json").exists()
    assert 0.0 <= kill.delay <= kill.usual
    assert kill.files >= 1


def test_an_instant_after_the_commit_is_a_miss_and_the_next_save_is_tried(run: Path) -> None:
    with start(run, 40) as trainer:
        kill = kill_inside_save(trainer, run, earliest=20, chance=Late(1), tick=lambda: None)
    assert kill.misses >= 1
    assert open_save(run) is not None


def test_a_run_that_ends_before_it_is_hit_is_a_failure(run: Path) -> None:
    with start(run, 4) as trainer, pytest.raises(DemoFailed, match="before a save could be hit"):
        kill_inside_save(trainer, run, earliest=20, chance=Late(100), tick=lambda: None)


def test_a_process_that_fails_is_told_with_its_last_words(run: Path) -> None:
    with pytest.raises(DemoFailed, match="FileNotFoundError"), start(run / "absent", 1) as trainer:
        while trainer.running:
            pass


def test_a_torn_last_line_is_not_taken_for_a_step(run: Path) -> None:
    with start(run, 1) as trainer:
        while trainer.running:
            pass
        assert trainer.losses() == [(9, 1.0)]
        with trainer.log.open("a") as log:
            log.write('{"step": 10, "lo')
        assert len(trainer.losses()) == 1
        with trainer.log.open("a") as log:
            log.write('ss": "0x1p+1"}\n')
        assert trainer.losses() == [(9, 1.0), (10, 2.0)]
