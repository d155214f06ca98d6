"""The command line as a person and as a script meets it: answers, exit codes, JSON, and what it must not touch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from onward import __version__
from onward.catalog import deletion
from onward.catalog.incarnation import Incarnation
from onward.catalog.listing import read_catalog
from onward.catalog.stores import open_home
from onward.cli import ls, main
from onward.cli.main import _COMMANDS
from onward.demo import story
from onward.errors import StorageError
from onward.format.codec import encode
from onward.format.names import RunPlaces
from onward.records import CheckpointInfo
from onward.save.commit import begin_attempt
from onward.storage.posix import PosixStore
from support import PLACES, RUN, commit, dead_lease, die, posix_store, start

OLD, MIDDLE, NEW = "step-000000000900-2", "step-000000001000-3", "step-000000002500-4"
SHARD = "rank-00000/000.safetensors"


@dataclass(frozen=True)
class Reply:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Onward = Callable[..., Reply]


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONWARD_CONFIG", "ONWARD_STORE", "ONWARD_RUN", "ONWARD_DEBUG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


@pytest.fixture
def onward(capsys: pytest.CaptureFixture[str]) -> Onward:
    """Runs one command line in this process."""

    def run(*words: object) -> Reply:
        capsys.readouterr()
        code = main.main([str(word) for word in words])
        said = capsys.readouterr()
        assert "Traceback" not in said.err + said.out
        return Reply(code, said.out, said.err)

    return run


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commits at 900, 1000 and 2500 (text would put 900 last); nobody holds the run."""
    root = tmp_path_factory.mktemp("master") / "store"
    run = start(posix_store(root))
    for step in (900, 1000, 2500):
        commit(run, step, assets={"vocab.txt": b"a b c"})
    run.end()
    return root


@pytest.fixture
def root(master: Path, tmp_path: Path) -> Path:
    """A store of one's own with these commits."""
    return Path(shutil.copytree(master, tmp_path / "store"))


@pytest.fixture
def use(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, found through the environment."""
    monkeypatch.setenv("ONWARD_STORE", str(root))
    return root


@pytest.fixture
def trainer(use: Path) -> Iterator[Incarnation]:
    """A live process that uses the run."""
    incarnation = start(PosixStore(use))
    yield incarnation
    incarnation.end()


def folder(root: Path, name: str) -> Path:
    return root / PLACES.checkpoints / name


def flip(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def inventory(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below a folder, so that a change of any kind shows."""
    return {
        str(path): (facts.st_mode, facts.st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
        if (facts := path.lstat())
    }


def status(root: Path) -> dict[str, str]:
    store, record = open_home(str(root))
    return {info.folder: info.status for info in read_catalog(store, PLACES, record.tier).checkpoints}


# --- the frame -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _COMMANDS)
def test_help_ends_with_exit_codes_and_an_example(onward: Onward, name: str) -> None:
    reply = onward(name, "--help")
    assert reply.code == 0
    assert "--json" in reply.out
    lines = reply.out.rstrip().splitlines()
    at = lines.index("  Exit codes:")
    codes = [int(line.split()[0]) for line in lines[at + 1 : lines.index("", at)]]
    assert codes == sorted(codes)
    assert {0, 1, 2} <= set(codes)
    assert lines[-2:] == ["  Example:", lines[-1]]
    assert lines[-1].startswith(f"    onward {name} ")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", _COMMANDS)
def test_the_example_of_the_help_is_accepted_by_the_parser(onward: Onward, name: str) -> None:
    words = onward(name, "--help").out.rstrip().splitlines()[-1].split()[1:]
    assert onward(*words, "--help").code == 0


def test_alone_it_shows_its_commands(onward: Onward) -> None:
    reply = onward()
    assert reply.code == 0
    for name in _COMMANDS:
        assert f"\n  {name} " in reply.out
    assert "..." not in reply.out.partition("Commands:")[2], "a summary was cut"


def test_version(onward: Onward) -> None:
    assert onward("--version") == Reply(0, f"onward {__version__}\n", "")


@pytest.mark.parametrize(
    "words",
    [
        ["destroy"],
        ["ls", "--bad"],
        ["init"],
        ["adopt"],
        ["init", "x", "--mode", "public"],
        ["verify", "--threads", "0"],
        ["verify", "--all", "newest"],
        ["ls", "--store", "x", "--config", "y"],
        ["verify", "./x", "--store", "y"],
        ["ls", "extra"],
    ],
)
def test_a_command_line_that_makes_no_sense_ends_with_2(onward: Onward, words: list[str]) -> None:
    reply = onward(*words)
    assert reply.code == 2
    assert reply.out == ""
    assert reply.err.startswith("error: ")
    assert "\nnext: " in reply.err
    told = onward(*words, "--json")
    assert told.code == told.document["error"]["exit_code"] == 2
    assert told.document["error"]["code"] == "usage"
    assert told.err == ""


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["ls", "--all"],
        ["ls", "--runs"],
        ["show"],
        ["show", "1000", "--tensors"],
        ["show", "copied"],
        ["verify"],
        ["verify", "--all", "--quick"],
        ["recover"],
        ["recover", "--yes"],
        ["adopt", "copied"],
        ["adopt", "copied", "--yes"],
    ],
)
def test_json_is_one_document_and_the_only_thing_on_stdout(onward: Onward, use: Path, words: list[str]) -> None:
    shutil.copytree(folder(use, OLD), folder(use, "copied"))
    reply = onward(*words, "--json")
    assert reply.code == 0
    assert isinstance(reply.document, dict)
    assert reply.err == ""
    assert reply.out.isascii()


def test_an_error_as_json_has_code_message_and_next_step(onward: Onward, tmp_path: Path) -> None:
    reply = onward("ls", "--store", tmp_path / "nothing", "--json")
    error = reply.document["error"]
    assert (reply.code, error["code"], error["exit_code"]) == (78, "store-missing", 78)
    assert "onward.json" in error["message"]
    assert error["next_step"]
    text = onward("ls", "--store", tmp_path / "nothing")
    assert (text.code, text.out) == (78, "")
    assert text.err.startswith(f"error: {error['message']}\nnext: ")


def test_a_defect_is_one_line_and_its_traceback_a_file(
    onward: Onward, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("no such thing\nin two lines")

    monkeypatch.setattr(ls, "find_home", broken)
    reply = onward("ls")
    assert (reply.code, reply.out) == (1, "")
    assert reply.err.startswith("error: unexpected KeyError: ")
    [file] = tmp_path.glob("onward-error-*.txt")
    assert str(file) in reply.err
    assert "Traceback" in file.read_text()
    assert "in broken" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    error = onward("ls", "--json").document["error"]
    assert (error["code"], error["exit_code"]) == ("defect", 1)


def test_the_traceback_is_shown_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(ls, "find_home", lambda *_: 1 / 0)
    monkeypatch.setenv("ONWARD_DEBUG", "1")
    assert main.main(["ls"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert not list(tmp_path.glob("onward-error-*"))


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupt_ends_with_130(onward: Onward, monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ls, "find_home", interrupted)
    reply = onward("ls", *["--json"] * as_json)
    assert reply.code == 130
    assert reply.document["error"]["exit_code"] == 130 if as_json else reply.err == "error: interrupted\n"


# --- the store and the run -----------------------------------------------------------------------------------------


def test_every_way_to_name_the_store(
    onward: Onward, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "onward.toml"
    config.write_text(f'store = "{root.as_uri()}"\nrun = "{RUN}"\n')
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    reference = onward("ls", "--json", "--store", root).document
    assert reference["newest"] == 4
    assert onward("ls", "--json", "--store", root.as_uri(), "--run", RUN).document == reference
    assert onward("ls", "--json", "--config", config).document == reference
    monkeypatch.chdir(deep)
    assert onward("ls", "--json").document == reference
    monkeypatch.chdir("/")
    assert onward("ls").code == 78
    monkeypatch.setenv("ONWARD_CONFIG", str(config))
    assert onward("ls", "--json").document == reference
    monkeypatch.delenv("ONWARD_CONFIG")
    monkeypatch.setenv("ONWARD_STORE", str(root))
    assert onward("ls", "--json").document == reference


def test_of_several_runs_one_has_to_be_chosen(onward: Onward, use: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(PosixStore(use), "other").end()
    for words in (["ls"], ["show"], ["verify"], ["recover"], ["adopt", "x"]):
        reply = onward(*words)
        assert reply.code == 2
        assert "other" in reply.err
        assert RUN in reply.err
        assert "--run" in reply.err
    assert onward("ls", "--run", RUN).code == 0
    monkeypatch.setenv("ONWARD_RUN", RUN)
    assert onward("ls", "--json").document["run"] == RUN
    assert onward("ls", "--json", "--run", "other").document["run"] == "other"
    runs = onward("ls", "--runs", "--json").document["runs"]
    assert [(run["run"], run["checkpoints"]) for run in runs] == [("other", 0), (RUN, 3)]


def test_a_run_that_is_not_there(onward: Onward, use: Path, tmp_path: Path) -> None:
    for words in (["ls"], ["show"], ["verify"], ["recover", "--yes"], ["adopt", "x", "--yes"]):
        reply = onward(*words, "--run", "typo")
        assert reply.code == 2
        assert "'typo'" in reply.err
        assert RUN in reply.err
    assert onward("ls", "--run", "../up").code == 78
    # A configuration may name a run that has not begun: that is no error, and makes nothing.
    config = tmp_path / "onward.toml"
    config.write_text(f'store = "{use}"\nrun = "tomorrow"\n')
    reply = onward("ls", "--config", config)
    assert reply.code == 0
    assert "has not begun" in reply.out
    assert {path.name for path in (use / "runs").iterdir()} == {RUN}


def test_an_empty_store(onward: Onward, tmp_path: Path) -> None:
    place = tmp_path / "empty"
    assert onward("init", place).code == 0
    assert "no run yet" in onward("ls", "--store", place).out
    assert onward("ls", "--store", place).code == 0
    empty = onward("ls", "--store", place, "--json").document
    assert empty["checkpoints"] == []
    for words in (["show"], ["verify"], ["recover"]):
        assert onward(*words, "--store", place).code == 4
    start(PosixStore(place)).end()
    reply = onward("ls", "--store", place)
    assert (reply.code, "no checkpoint yet" in reply.out) == (0, True)
    assert onward("ls", "--store", place, "--json").document.keys() == empty.keys()
    for words in (["show"], ["verify"], ["verify", "--all"]):
        assert onward(*words, "--store", place).code == 4


# --- ls ------------------------------------------------------------------------------------------------------------


def test_ls_is_in_the_order_of_the_ledger(onward: Onward, use: Path) -> None:
    reply = onward("ls")
    assert [line.split()[:2] for line in reply.out.splitlines() if "committed" in line] == [
        ["900", "2"],
        ["1000", "3"],
        ["2500", "4"],
    ]
    assert "a resume takes step 2500 (seq:4), verified: full" in reply.out
    document = onward("ls", "--json").document
    assert [(c["step"], c["status"], c["verified"], c["class"]) for c in document["checkpoints"]] == [
        (900, "committed", "full", "periodic"),
        (1000, "committed", "full", "periodic"),
        (2500, "committed", "full", "periodic"),
    ]
    assert all(c["bytes"] > 0 for c in document["checkpoints"])


@pytest.mark.parametrize("width", [80, 140])
def test_ls_fits_the_screen_with_everything_in_it(
    onward: Onward, trainer: Incarnation, use: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    shutil.copytree(folder(use, OLD), folder(use, "copied-by-hand-from-another-cluster"))
    folder(use, "notes.txt").write_text("mine")
    (folder(use, "\x1b[31mevil\n")).mkdir()
    begin_attempt(trainer.store, trainer.ledger, step=3000, world_size=1, pid=os.getpid())
    flip(folder(use, MIDDLE) / SHARD)
    assert onward("verify", "1000").code == 3
    damaged = next((use / PLACES.receipts / OLD).iterdir())
    flip(damaged, 20)
    monkeypatch.setenv("COLUMNS", str(width))
    reply = onward("ls")
    assert reply.code == 0
    lines = reply.out.splitlines()
    assert not [line for line in lines if len(line) > width and str(damaged.name) not in line]
    assert "\x1b" not in reply.out
    table = {line.split()[1]: line for line in lines if "  " in line.strip() and line.split()[0].isdigit()}
    assert "committed" in table["2"]
    assert "quarantined" in table["3"]
    assert "in progress" in table["6"]
    assert "adoptable" in table["-"]
    assert ("receipts" in reply.out.split("folder")[0]) == (width == 140)
    assert f"in use: yes ({trainer.lease._record.host} pid {os.getpid()})" in reply.out
    assert "onward adopt copied-by-hand-from-another-cluster" in reply.out
    assert r"\x1b[31mevil\n, notes.txt" in reply.out
    assert "receipt-damaged" in reply.out
    document = onward("ls", "--json").document
    assert [a["status"] for a in document["attempts"]] == ["in progress"]
    assert document["attempts"][0]["intent"]["pid"] == os.getpid()
    assert document["owner"]["state"] == "alive"
    assert document["unknown"] == ["\x1b[31mevil\n", "notes.txt"]
    assert [f["code"] for f in document["findings"]] == ["receipt-damaged"]


def test_ls_of_a_dead_owner_calls_its_save_abandoned(onward: Onward, trainer: Incarnation) -> None:
    begin_attempt(trainer.store, trainer.ledger, step=3000, world_size=1, pid=1)
    die(trainer)
    reply = onward("ls")
    assert "abandoned" in reply.out
    assert "onward recover --yes" in reply.out
    trainer.store.replace(PLACES.lease, encode(dead_lease(host="elsewhere")))
    assert "in progress?" in onward("ls").out
    assert "perhaps (elsewhere pid" in onward("ls").out


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "link"])
def test_ls_tolerates_a_damaged_manifest(onward: Onward, use: Path, harm: str) -> None:
    manifest = folder(use, MIDDLE) / "manifest.json"
    data = manifest.read_bytes()
    manifest.unlink()
    if harm == "flip":
        manifest.write_bytes(data.replace(b'"global_step":1000', b'"global_step":1001'))
    elif harm == "cut":
        manifest.write_bytes(data[:100])
    elif harm == "link":
        manifest.symlink_to("/etc/passwd")
    reply = onward("ls")
    assert reply.code == 0
    [line] = [line for line in reply.out.splitlines() if line.startswith("1000")]
    assert line.split()[4:7] == ["?", "?", "committed"]
    assert f"{MIDDLE}/manifest.json" in reply.out
    found = onward("ls", "--json").document["checkpoints"][1]
    assert (found["class"], found["bytes"]) == (None, None)


def test_ls_tells_of_a_damaged_ledger(onward: Onward, use: Path) -> None:
    flip(use / PLACES.entry(3), 50)
    reply = onward("ls")
    assert reply.code == 0
    assert "ledger-damaged" in reply.out
    assert MIDDLE in reply.out  # its folder is there, and could be adopted
    assert "adoptable" in reply.out
    shutil.rmtree(use / PLACES.ledger)
    reply = onward("ls")
    assert reply.code == 0
    assert "ledger-missing" in reply.out
    assert "nothing here can be resumed from" in reply.out


def test_ls_all_shows_what_was_deleted_and_how_attempts_ended(onward: Onward, trainer: Incarnation) -> None:
    begin_attempt(trainer.store, trainer.ledger, step=3000, world_size=1, pid=1)
    die(trainer)
    again = start(trainer.store)
    deletion.delete_checkpoint(again.ledger, again.view, again.view.live()[0], tier="home", reason="thinned")
    again.end()
    assert OLD not in onward("ls").out
    reply = onward("ls", "--all")
    [line] = [line for line in reply.out.splitlines() if OLD in line]
    assert "deleted" in line
    assert "periodic" in line  # from the manifest that is kept aside
    assert "rolled-back" in reply.out
    document = onward("ls", "--all", "--json").document
    assert [c["status"] for c in document["checkpoints"]] == ["deleted", "committed", "committed"]
    assert [o["outcome"] for o in document["outcomes"]] == ["rolled-back"]


# --- show ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("which", "name"), [("newest", NEW), ("1000", MIDDLE), ("seq:2", OLD), (NEW, NEW)])
def test_show_by_every_name(onward: Onward, use: Path, which: str, name: str) -> None:
    reply = onward("show", which)
    assert reply.code == 0
    assert reply.out.splitlines()[0].endswith(f"/checkpoints/{name}")
    assert "model_config.n_heads" in reply.out
    assert "assets/vocab.txt" in reply.out
    assert onward("show", which, "--json").document["manifest"]["checkpoint"] == name


def test_show_tensors(onward: Onward, use: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {t["name"]: t for t in onward("show", "--tensors", "--json").document["tensors"]}
    weight = tensors['["part","weight"]']
    assert (weight["dtype"], weight["shape"], weight["bytes"]) == ("float32", [12, 8], 384)
    assert tensors['["part","head"]']["tie"] == '["part","weight"]'
    monkeypatch.setenv("COLUMNS", "80")
    out = onward("show", "--tensors").out
    assert max(map(len, out.splitlines()[1:])) <= 80
    for part in ('["part","half"]', "bfloat16", "7×3", "scalar", "7 tensors, 6 stored"):
        assert part in out


def test_show_what_is_not_there(onward: Onward, use: Path) -> None:
    for which in ("1", "seq:99", "step-000000000001-1", "yesterday"):
        reply = onward("show", which)
        assert reply.code == 4
        assert "step 2500, seq:4" in reply.err


def test_show_of_a_damaged_manifest_names_it(onward: Onward, use: Path) -> None:
    flip(folder(use, NEW) / "manifest.json", 40)
    reply = onward("show")
    assert reply.code == 3
    assert f"home: {NEW}/manifest.json" in reply.err


# --- verify --------------------------------------------------------------------------------------------------------


def test_verify_of_a_good_run(onward: Onward, use: Path) -> None:
    for words in ([], ["newest"], ["2500", "--full"], ["seq:4"], [NEW]):
        reply = onward("verify", *words)
        assert reply.code == 0
        assert f"{NEW}: verified (full)" in reply.out
    document = onward("verify", "--all", "--json").document
    assert document["ok"] is True
    assert [c["step"] for c in document["checkpoints"]] == [900, 1000, 2500]
    for outcome in document["checkpoints"]:
        coverage = outcome["report"]["coverage"]
        assert coverage["files"] == coverage["files_total"] == 8
        assert coverage["bytes"] == coverage["bytes_total"] > 0


def test_verify_names_tier_file_tensor_and_rank(onward: Onward, use: Path) -> None:
    flip(folder(use, NEW) / SHARD)
    reply = onward("verify")
    assert reply.code == 3
    assert f'home: {NEW}/{SHARD}, tensor ["part","codes"], rank 0' in reply.out
    assert "SHA-256" in reply.out
    document = onward("verify", "--all", "--json").document
    assert document["ok"] is False
    assert [c["verdict"] for c in document["checkpoints"]] == ["verified", "verified", "damaged"]
    [finding] = document["checkpoints"][2]["report"]["findings"]
    assert (finding["tier"], finding["file"], finding["tensor"], finding["rank"]) == (
        "home",
        SHARD,
        '["part","codes"]',
        0,
    )


def test_verify_quarantines_and_lifts(onward: Onward, use: Path) -> None:
    file = folder(use, NEW) / SHARD
    good = file.read_bytes()
    flip(file)
    assert onward("verify", "--no-receipt").code == 3
    assert status(use)[NEW] == "committed"
    assert "quarantined" in onward("verify").out
    assert status(use)[NEW] == "quarantined"
    assert "a resume takes step 1000" in onward("ls").out
    assert onward("verify").out.startswith("step 1000")  # newest is the newest that is offered
    file.write_bytes(good)
    assert onward("verify", NEW, "--quick").code == 0
    assert status(use)[NEW] == "quarantined", "a quick look proves nothing about the bytes"
    assert "the quarantine is lifted" in onward("verify", NEW).out
    assert status(use)[NEW] == "committed"


def test_quick_does_not_read_tensor_bytes_and_says_so(onward: Onward, use: Path) -> None:
    flip(folder(use, NEW) / SHARD)
    reply = onward("verify", "--quick")
    assert reply.code == 0
    assert "verified (quick)" in reply.out
    coverage = onward("verify", "--quick", "--json").document["checkpoints"][0]["report"]["coverage"]
    assert coverage["bytes"] < coverage["bytes_total"]
    os.truncate(folder(use, NEW) / SHARD, 100)
    assert onward("verify", "--quick").code == 3


def test_verify_while_a_trainer_uses_the_run(onward: Onward, trainer: Incarnation) -> None:
    assert onward("verify", "--all").code == 0
    commit(trainer, 3000)
    assert onward("verify").out.startswith("step 3000")


def test_a_receipt_that_cannot_be_left_does_not_change_the_verdict(
    onward: Onward, use: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise StorageError("create receipts: Read-only file system (EROFS)")

    monkeypatch.setattr("onward.upkeep.check.record_verification", refused)
    monkeypatch.setattr("onward.upkeep.check.quarantine", refused)
    reply = onward("verify")
    assert reply.code == 0
    assert "EROFS" in reply.err
    flip(folder(use, NEW) / SHARD)
    reply = onward("verify", "--json")
    assert reply.code == 3
    assert "EROFS" in reply.document["checkpoints"][0]["receipt_problem"]


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_called_damaged(
    onward: Onward, use: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onward.upkeep import check as checking

    real = checking.verify

    def slow(*args: Any, **options: Any) -> Any:
        again = start(PosixStore(use))
        deletion.delete_checkpoint(again.ledger, again.view, again.view.live()[-1], tier="home", reason="thinned")
        again.end()
        return real(*args, **options)

    monkeypatch.setattr(checking, "verify", slow)
    reply = onward("verify")
    assert reply.code == 4
    assert "deleted while it was looked at" in reply.out
    assert not list((use / PLACES.receipts / NEW).glob("*quarantined*"))


def test_a_store_that_refuses_to_be_read_is_not_damage(
    onward: Onward, use: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PosixStore.read_into

    def refuses(self: PosixStore, path: str, begin: int, view: memoryview) -> None:
        if path.endswith(SHARD):
            raise StorageError(f"read {path}: Input/output error (EIO)")
        real(self, path, begin, view)

    monkeypatch.setattr(PosixStore, "read_into", refuses)
    reply = onward("verify")
    assert reply.code == 1
    assert "not read" in reply.out
    assert "EIO" in reply.out
    assert status(use)[NEW] == "committed"


def test_there_is_nothing_to_verify(onward: Onward, use: Path, tmp_path: Path) -> None:
    for which in ("99", "seq:9", "step-000000000001-1", tmp_path, tmp_path / "nothing", "/", "/etc/passwd"):
        reply = onward("verify", which)
        assert reply.code == 4
        assert reply.out == ""


@pytest.mark.parametrize("form", ["{0}", "{0}/", "link"])
def test_a_lone_folder_needs_no_store_and_is_not_written_to(
    onward: Onward, root: Path, tmp_path: Path, form: str
) -> None:
    lone = Path(shutil.copytree(folder(root, NEW), tmp_path / "lone"))
    (tmp_path / "cwd" / "link").symlink_to(lone)
    before = inventory(lone)
    path = form.format(lone)
    reply = onward("verify", path)
    assert reply.code == 0
    assert "looked at alone" in reply.out
    assert onward("verify", path, "--json").document["report"]["run"] == RUN
    flip(lone / SHARD)
    reply = onward("verify", path, "--json")
    assert reply.code == 3
    [finding] = reply.document["report"]["findings"]
    assert (finding["tier"], finding["tensor"]) == ("lone", '["part","codes"]')
    flip(lone / SHARD)
    (lone / "manifest.json").rename(lone / "elsewhere")
    assert onward("verify", path).code == 3
    (lone / "elsewhere").rename(lone / "manifest.json")
    assert {k: v[2] for k, v in inventory(lone).items()} == {k: v[2] for k, v in before.items()}


def test_the_folder_one_stands_in(onward: Onward, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder(root, NEW))
    assert onward("verify", ".").code == 0
    monkeypatch.chdir(folder(root, NEW).parent)
    assert "looked at alone" in onward("verify", NEW).out
    # Where a store is named, a plain name is a name of the store's.
    assert "looked at alone" not in onward("verify", NEW, "--store", root).out


# --- recover -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mess(trainer: Incarnation, use: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a dead process leaves: a save, a complete folder without an entry, a link, a decided delete."""
    with monkeypatch.context() as patch:
        patch.setattr(deletion, "finish_delete", lambda *_, **__: True)
        live = trainer.view.live()[0]
        deletion.delete_checkpoint(trainer.ledger, trainer.view, live, tier="home", reason="thinned")
    attempt = begin_attempt(trainer.store, trainer.ledger, step=3000, world_size=1, pid=1)
    (folder(use, attempt.writing) / "rank-00000").mkdir()
    shutil.copytree(folder(use, NEW), folder(use, "step-000000002750-5"))
    folder(use, f"step-000000000001-1.writing-{'a' * 32}").symlink_to("/etc")
    die(trainer)
    return use


def test_recover_is_a_dry_run_that_writes_nothing(onward: Onward, mess: Path) -> None:
    before = inventory(mess)
    reply = onward("recover")
    assert reply.code == 0
    for part in ("save abandoned", "not in the ledger", "delete decided", "link or file", "--yes", "is dead"):
        assert part in reply.out
    document = onward("recover", "--json").document
    assert document["dry_run"] is True
    assert document["owner"]["state"] == "dead"
    assert inventory(mess) == before


def test_recover_does_what_the_dry_run_said(onward: Onward, mess: Path) -> None:
    plan = onward("recover", "--json").document
    reply = onward("recover", "--yes", "--json")
    assert reply.code == 0
    done = reply.document
    by = {kind: [o for o in done["outcomes"] if o["outcome"] == kind] for kind in ("rolled-back", "kept")}
    assert [o["sequence"] for o in by["rolled-back"]] == [a["sequence"] for a in plan["roll_back"]]
    assert [o["attempt"] for o in by["kept"]] == [f"folder-{name}" for name in plan["keep"]]
    assert done["removed"] == plan["remove"]
    assert [d["folder"] for d in done["finished"]] == [d["folder"] for d in plan["finish"]] == [OLD]
    left = {path.name for path in (mess / PLACES.checkpoints).iterdir()}
    assert left == {MIDDLE, NEW, "step-000000002750-5"}
    assert Path("/etc/passwd").exists()
    assert not (mess / PLACES.lease).exists()
    again = onward("recover")
    assert again.code == 0
    assert "nothing to clear up" in again.out


def test_recover_for_people(onward: Onward, mess: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    reply = onward("recover", "--yes")
    assert reply.code == 0
    assert "rolled-back" in reply.out
    assert f"delete finished: {OLD} (thinned)" in reply.out
    assert "taking over the lease" in reply.err
    assert max(map(len, reply.out.splitlines())) <= 80


def test_recover_is_refused_while_the_owner_lives(onward: Onward, trainer: Incarnation, use: Path) -> None:
    attempt = begin_attempt(trainer.store, trainer.ledger, step=3000, world_size=1, pid=1)
    dry = onward("recover")
    assert dry.code == 5
    assert "left alone" in dry.out
    assert "in use by" in dry.out
    reply = onward("recover", "--yes", "--json")
    assert reply.code == 5
    assert reply.document["error"]["code"] == "busy"
    assert folder(use, attempt.writing).is_dir()
    commit(trainer, 4000)  # the trainer was not fenced


# --- adopt ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(use: Path) -> Path:
    """A folder that somebody has copied in."""
    return Path(shutil.copytree(folder(use, OLD), folder(use, "copied in")))


def test_adopt_is_a_dry_run_that_writes_nothing(onward: Onward, use: Path, copied: Path) -> None:
    before = inventory(use)
    reply = onward("adopt", "copied in")
    assert reply.code == 0
    assert "it would become step-000000000900-6" in reply.out
    assert "--yes" in reply.out
    assert "onward adopt 'copied in'" in onward("ls").out
    assert inventory(use) == before


@pytest.mark.parametrize("form", ["name", "path"])
def test_adopt(onward: Onward, use: Path, copied: Path, form: str) -> None:
    reply = onward("adopt", "copied in" if form == "name" else f"{copied}/", "--yes")
    assert reply.code == 0
    assert "adopted as step-000000000900-6" in reply.out
    assert status(use)["step-000000000900-6"] == "committed"
    assert "a resume takes step 900 (seq:6), verified: full" in onward("ls").out
    assert not (use / PLACES.lease).exists()


@pytest.mark.parametrize("words", [[], ["--yes"]])
def test_a_damaged_folder_is_not_adopted(onward: Onward, use: Path, copied: Path, words: list[str]) -> None:
    flip(copied / SHARD)
    reply = onward("adopt", "copied in", *words)
    assert reply.code == 3
    assert SHARD in reply.out + reply.err
    assert copied.is_dir()
    assert not (use / PLACES.lease).exists()
    assert len(status(use)) == 3


def test_adopt_refuses_what_is_not_adoptable(onward: Onward, use: Path, copied: Path, tmp_path: Path) -> None:
    before = inventory(use)
    for name in (NEW, "nothing", "..", str(tmp_path), str(folder(use, NEW))):
        reply = onward("adopt", name, "--yes")
        assert reply.code == 2
        assert "copied in" in reply.err
    assert inventory(use) == before


def test_adopt_while_the_owner_lives(onward: Onward, trainer: Incarnation, copied: Path) -> None:
    assert onward("adopt", "copied in").code == 5
    assert onward("adopt", "copied in", "--yes").code == 5
    assert copied.is_dir()
    commit(trainer, 4000)


# --- init and demo -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "bits"), [("private", 0o600), ("group", 0o640)])
def test_init(onward: Onward, tmp_path: Path, mode: str, bits: int) -> None:
    place = tmp_path / "new" / "store"
    reply = onward("init", place.as_uri(), "--mode", mode, "--tier", "warm")
    assert reply.code == 0
    assert "hard link" in reply.out
    assert f'store = "{place.as_uri()}"' in reply.out
    assert (place / "onward.json").stat().st_mode & 0o777 == bits
    again = onward("init", place, "--json")
    assert (again.code, again.document["error"]["code"]) == (78, "configuration")


def test_init_shows_the_probe_as_json(onward: Onward, tmp_path: Path) -> None:
    document = onward("init", tmp_path / "s", "--json").document
    assert document["record"]["tier"] == "home"
    assert document["probe"]["publish"] == "link"
    assert document["probe"]["problems"] == []


def test_init_where_no_home_can_be(onward: Onward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.storage.probe._race", lambda *_: False)
    reply = onward("init", tmp_path / "s")
    assert reply.code == 78
    assert "several writers" in reply.err
    assert not (tmp_path / "s" / "onward.json").exists()
    (tmp_path / "file").write_text("")
    assert onward("init", tmp_path / "file" / "s").code == 1
    assert onward("init", "ftp://host/s").code == 78


@dataclass(frozen=True)
class Told:
    out: Path
    exit_code: int
    report: Path = Path("report.html")

    def to_json(self) -> str:
        return '{"ok": false, "seed": 7}'


@pytest.mark.parametrize("code", [0, 3])
def test_demo_tells_on_stdout_or_with_json_aside(onward: Onward, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def run_demo(out: Path, console: Console, seed: int | None) -> Told:
        console.print(f"[dim]told[/] with seed {seed}")
        return Told(out, code)

    monkeypatch.setattr(story, "run_demo", run_demo)
    assert onward("demo", "--out", "here", "--seed", "7") == Reply(code, "told with seed 7\n", "")
    reply = onward("demo", "--json")
    assert (reply.code, reply.err) == (code, "told with seed None\n")
    assert reply.document == {"ok": False, "seed": 7, "out": "onward-demo", "report": "report.html"}


# --- processes of their own ----------------------------------------------------------------------------------------

PROGRAM = [sys.executable, "-c", "import sys; from onward.cli.main import main; sys.exit(main())"]
WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from onward.cli.main import main
sys.exit([line for line in json.load(sys.stdin) if main(line["words"]) != line["code"]] or None)
"""


def test_without_torch(use: Path, tmp_path: Path) -> None:
    shutil.copytree(folder(use, OLD), folder(use, "copied"))
    lines = (
        (["ls", "--all"], 0),
        (["ls", "--runs"], 0),
        (["show", "--tensors"], 0),
        (["verify", "--all"], 0),
        (["verify", str(folder(use, NEW))], 0),
        (["recover", "--yes"], 0),
        (["adopt", "copied", "--yes"], 0),
        (["init", str(tmp_path / "other")], 0),
        (["demo"], 78),
    )
    given = json.dumps([{"words": words, "code": code} for words, code in lines])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "torch is not installed here" in done.stderr


def test_a_reader_that_has_gone_is_no_error(use: Path) -> None:
    for words, code in ((["ls"], 0), (["ls", "--json"], 0), (["show", "nothing", "--json"], 4), (["--help"], 1)):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run([*PROGRAM, *words], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
        os.close(writing)
        assert (done.returncode, done.stderr) == (code, ""), words


def test_an_interrupt_while_it_waits_for_an_owner_elsewhere(use: Path) -> None:
    lease = encode(dead_lease(host="elsewhere", lease_seconds=60.0))
    (use / PLACES.lease).write_bytes(lease)
    process = subprocess.Popen(
        [*PROGRAM, "recover", "--yes"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    assert "waiting up to 60 s" in first
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "error: interrupted\n")
    assert (use / PLACES.lease).read_bytes() == lease
    assert len(list((use / PLACES.ledger).glob("*.json"))) == 4, "the run was not taken over"


def test_names_that_are_no_text_and_screens_that_know_only_ascii(use: Path) -> None:
    os.mkdir(os.fsencode(str(folder(use, "x"))) + b"\xff\xfe")
    folder(use, "größe").mkdir()
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    for words in (["ls"], ["ls", "--json"]):
        done = subprocess.run([*PROGRAM, *words], capture_output=True, env=environment, check=False)
        assert (done.returncode, done.stderr) == (0, b""), words
        assert done.stdout.isascii()
    assert len(json.loads(done.stdout)["unknown"]) == 2


def test_a_run_folder_that_is_no_run_is_not_listed(onward: Onward, use: Path) -> None:
    (use / "runs" / ".trash").mkdir()
    (use / "runs" / "latest").mkdir()
    assert onward("ls").code == 0
    assert [run["run"] for run in onward("ls", "--runs", "--json").document["runs"]] == [RUN]
    assert RunPlaces(RUN) == PLACES


def test_the_listing_as_json_reads_back_as_the_records(onward: Onward, use: Path) -> None:
    store, record = open_home(str(use))
    expected = read_catalog(store, PLACES, record.tier).checkpoints
    found = onward("ls", "--json").document["checkpoints"]
    names = CheckpointInfo.__struct_fields__
    assert [{k: c[k] for k in names if k != "receipts"} for c in found] == [
        {k: getattr(info, k) for k in names if k != "receipts"} for info in expected
    ]
