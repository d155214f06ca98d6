"""A writer process that dies, is stuck or talks nonsense: the save ends by name, and the next one is right."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from writerside import HEAR, SERVE, Make, gone, holds

from onward.catalog.attempts import read_outcomes
from onward.catalog.listing import read_catalog
from onward.errors import SaveFailed
from onward.save import remote
from onward.save.pipeline import SaveSettings
from support import PLACES, RUN, TIER, die, start

PROGRAMS = {
    "dies at once": ("sys.exit(3)", "ended with status 3"),
    "dies after it is ready": (SERVE + "os._exit(4)", "ended with status 4"),
    "dies in the middle of a save": (SERVE + HEAR + "os._exit(5)", "ended with status 5"),
    "is killed in the middle of a save": (SERVE + HEAR + "os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
    "dies in the middle of its answer": (SERVE + HEAR + "s.sendall(b'\\0' * 7); os._exit(6)", "ended with status 6"),
    "closes its side and lives on": (SERVE + HEAR + "s.close(); time.sleep(60)", "closed its side"),
    "never gets ready": ("time.sleep(60)", "did not answer"),
    "never answers": (SERVE + HEAR + "time.sleep(60)", "did not answer for 2 s"),
    "never reads": (SERVE + "time.sleep(60)", "did not answer"),
}
GARBAGE = {
    "answers with garbage": SERVE + HEAR + "s.sendall((4).to_bytes(8, 'big') + b'junk'); time.sleep(60)",
    "answers with an absurd length": SERVE + HEAR + "s.sendall(b'\\xff' * 8); time.sleep(60)",
    "answers with another message": SERVE + HEAR + "wire.send(s, wire.Ready()); time.sleep(60)",
    "greets with garbage": "s = socket.socket(fileno=int(sys.argv[2])); s.sendall(b'x' * 64); time.sleep(60)",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_save_fails_by_name_and_the_next_one_is_right_when_the_writer(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    program, how = PROGRAMS[name]
    monkeypatch.setattr(remote, "_START_SECONDS", 2.0 if name == "never gets ready" else 60.0)
    fixture = make(program, deadline_seconds=2.0 if "never" in name else 60.0)
    old = fixture.writer.pid
    if name == "dies at once":
        assert old and gone(old)
        assert fixture.writer.look_after() == f"{how}; it was started again", (
            "seen at the next step, before a save is due"
        )
    else:
        started = time.monotonic()
        with pytest.raises(SaveFailed, match="step 10") as failed:
            fixture.save(10)
        assert how in failed.value.message and time.monotonic() - started < 30
    monkeypatch.setattr(remote, "_START_SECONDS", 60.0)
    fixture.writer._settings = SaveSettings(threads=2)
    assert old and gone(old)
    assert fixture.save(20).entry.step == 20 and fixture.steps() == [20]


def test_how_it_died_is_told_though_it_takes_a_moment_to_die(make: Make) -> None:
    fixture = make(SERVE + HEAR + "s.close(); time.sleep(0.3); sys.exit(9)")
    with pytest.raises(SaveFailed, match="ended with status 9"):
        fixture.save(10)


@pytest.mark.parametrize("name", GARBAGE)
def test_a_writer_that_cannot_be_understood_is_ended_when_it(make: Make, name: str) -> None:
    fixture = make(GARBAGE[name])
    old = fixture.writer.pid
    with pytest.raises(SaveFailed, match="step 10"):
        fixture.save(10)
    assert old and gone(old, 2), "it must not be asked again: its next answer would be taken for another save's"
    assert fixture.save(20).entry.step == 20 and fixture.steps() == [20]


def test_a_commit_whose_answer_was_lost_is_found_in_the_ledger(make: Make) -> None:
    silent = "worker.send = lambda s, m: os._exit(7) if isinstance(m, wire.Done) else wire.send(s, m)\n"
    fixture = make(silent + "worker.main(*map(int, sys.argv[2:]))")
    result = fixture.save(10)
    assert result.entry.step == 10 and result.report is None
    assert fixture.steps() == [10]
    assert fixture.save(20).entry.sequence == result.entry.sequence + 1


def test_every_start_after_the_first_is_counted(make: Make) -> None:
    fixture = make(SERVE + HEAR + "os._exit(5)")
    with pytest.raises(SaveFailed):
        fixture.save(10)
    assert fixture.writer.restarts == 1
    assert fixture.writer.pid
    os.kill(fixture.writer.pid, signal.SIGKILL)
    assert gone(fixture.writer.pid)
    fixture.writer.look_after()
    assert fixture.writer.restarts == 2


def test_what_a_dead_writer_leaves_is_cleared_up_and_its_story_told(make: Make) -> None:
    """A writer that dies again and again must not fill the disk, and a failed save is on record."""
    dying = (
        "from onward.save import pipeline\n"
        "pipeline.seal = lambda *a, **o: os._exit(8)\n"  # the shards are written, nothing is committed
    )
    fixture = make(dying + "worker.main(*map(int, sys.argv[2:]))")
    with pytest.raises(SaveFailed, match="ended with status 8"):
        fixture.save(10)
    fixture.save(20)
    left = [item.name for item in fixture.incarnation.store.list(PLACES.checkpoints) if "writing" in item.name]
    stories = [(story.step, story.outcome) for story in read_outcomes(fixture.incarnation.store, PLACES)]
    assert left == [] and stories == [(10, "failed")]


def test_a_store_that_is_away_for_a_moment_fails_one_save_and_not_the_training(make: Make) -> None:
    """A configuration error would end the loop at once; but the configuration was right an hour ago."""
    fixture = make()
    fixture.save(10)
    fixture.writer.end()
    root = Path(fixture.incarnation.store.url.removeprefix("file://"))
    root.rename(root.with_name("away"))
    with pytest.raises(SaveFailed, match="step 20"):
        fixture.save(20)
    root.with_name("away").rename(root)
    assert fixture.save(30).entry.step == 30


@pytest.mark.parametrize("call", ["socket.socketpair", "subprocess.Popen"])
def test_a_writer_that_cannot_be_started_now_does_not_end_the_training(
    make: Make, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    fixture = make()
    pid = fixture.writer.pid
    assert pid
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    with monkeypatch.context() as patch:

        def refuse(*_: Any, **__: Any) -> Any:
            raise OSError(24, "Too many open files")

        patch.setattr(f"onward.save.remote.{call}", refuse)
        assert fixture.writer.look_after() is not None
        with pytest.raises(SaveFailed, match="step 10"):
            fixture.save(10)
    assert fixture.save(20).entry.step == 20


def test_a_folder_that_was_complete_but_not_committed_does_no_harm_to_the_next_save(make: Make) -> None:
    """The writer dies between the final name and the ledger entry; the next checkpoint gets the same number."""
    fixture = make("from onward.save import pipeline\n"
                   "pipeline.append_commit = lambda *a: os._exit(8)\nworker.main(*map(int, sys.argv[2:]))")  # fmt: skip
    with pytest.raises(SaveFailed, match="ended with status 8"):
        fixture.save(10)
    entry = fixture.save(20).entry
    again = fixture.save(10).entry
    assert fixture.steps() == [10, 20]
    assert [item.name for item in fixture.incarnation.store.list(PLACES.checkpoints) if "writing" in item.name] == []
    die(fixture.incarnation)
    newer = start(fixture.incarnation.store, RUN)
    offered = {info.sequence: info.status for info in read_catalog(newer.store, PLACES, TIER).offered()}
    assert offered == {entry.sequence: "committed", again.sequence: "committed"}
    assert all(holds(newer.store, each.folder, each.step) for each in (entry, again))
    newer.end()
