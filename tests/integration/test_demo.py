"""The demonstration, whole: what it prints, what it leaves, and that the kill really fell inside a save."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from onward.demo.proof import DemoResult
from onward.demo.story import run_demo
from onward.errors import UsageError


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoResult, str]:
    screen = io.StringIO()
    out = tmp_path_factory.mktemp("demo") / "out"
    result = run_demo(out, Console(file=screen, width=120))
    return result, screen.getvalue()


def test_everything_is_proven_and_printed(told: tuple[DemoResult, str]) -> None:
    result, text = told
    assert result.ok, text
    assert result.exit_code == 0
    for part in ("loss", "learning rate", "samples", "parameters", "moments"):
        assert re.search(rf"^{part} +bit-identical: yes", text, flags=re.MULTILINE), text
    assert "control differs: yes" in text
    assert re.search(r"found: tier home, rank-00000/\S+, tensor \S+: it does not match its SHA-256", text)
    assert ": NO" not in text


def test_the_kill_fell_between_intent_and_entry(told: tuple[DemoResult, str]) -> None:
    result, text = told
    seen = result.evidence
    run = result.out / "store" / "runs" / "demo"
    assert seen.first.killed
    assert seen.kill.files >= 1, "the intent, at least"
    # What was cut off never became a checkpoint: no entry names it, and its story is told.
    entries = [json.loads(path.read_text()) for path in sorted((run / "ledger").glob("*.json"))]
    assert all(entry.get("folder") != seen.kill.save.folder.name.partition(".")[0] for entry in entries)
    stories = [json.loads(path.read_text()) for path in (run / "attempts").glob("*.json")]
    assert [story["sequence"] for story in stories] == [seen.kill.save.sequence]
    assert stories[0]["outcome"] in text
    assert not list((run / "checkpoints").glob("*.writing-*"))


def test_steps_were_lost_and_done_again(told: tuple[DemoResult, str]) -> None:
    seen = told[0].evidence
    assert seen.second.resumed is not None
    assert seen.second.resumed["next_step"] == seen.newest.step
    assert seen.newest.step < seen.kill.save.step <= seen.kill.steps
    assert seen.second.losses[0][0] == seen.newest.step
    # The control had the same start and went another way; only its random state was another.
    assert seen.control.losses[0][0] == seen.newest.step
    assert seen.control_comparison.equal("samples")
    assert not seen.control_comparison.equal("loss")


def test_it_leaves_what_it_promises(told: tuple[DemoResult, str]) -> None:
    out = told[0].out
    assert {path.name for path in out.iterdir()} == {"store", "logs", "report.html", "result.json", "train-command"}
    assert json.loads((out / "result.json").read_text())["ok"] is True
    page = (out / "report.html").read_text()
    assert page.count("bit-identical: yes") == 6
    for name in ("reference", "run-1", "run-2", "control", "fallback"):
        assert (out / "logs" / f"{name}.jsonl").stat().st_size > 0


def test_the_training_command_is_one_line_that_resumes_the_run(told: tuple[DemoResult, str]) -> None:
    out = told[0].out
    text = (out / "train-command").read_text()
    assert text.count("\n") == 1
    done = subprocess.run(
        [*shlex.split(text), "--stop-at", "0"], capture_output=True, text=True, check=True, env=os.environ
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines[0]["event"] == "resume"
    assert lines[0]["checkpoint"] == told[0].evidence.commits[-1].folder


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        run_demo(tmp_path, Console(file=io.StringIO()))
    assert (tmp_path / "thesis.txt").read_text() == "mine"
