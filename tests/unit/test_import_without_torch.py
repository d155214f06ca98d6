"""Looking, verifying and recovering work on a machine without torch; the public names and the error codes are fixed."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import onward
from onward import errors
from onward.storage.posix import PosixStore
from support import RUN, commit, die, start

WITHOUT = "import sys; sys.modules['torch'] = None; sys.modules['torchdata'] = None\n"
NEEDS_TORCH = ("checkpointer", "demo", "drill", "interop", "state", "supervise")
"""Rooms of torch's side; everything else runs without it."""
SAVE_OR_RESTORE = {
    *("onward.save.capture", "onward.save.saver"),
    *("onward.restore.fit", "onward.restore.load", "onward.restore.resume"),
}

NAMES = (
    *("Checkpointer", "Config", "OnwardError", "ResumableLoader", "ResumeSettings", "SaveSettings", "Start"),
    *("StepOutcome", "TriggerSettings", "__version__", "describe", "errors", "init_store", "load_config"),
)
CODES = {
    "error": 1,
    "configuration": 78,
    "store-missing": 78,
    "store-unsuitable": 78,
    "invalid-name": 78,
    "unsupported-state": 78,
    "incomplete-state": 78,
    "mid-step": 78,
    "incompatible-state": 78,
    "incompatible-configuration": 78,
    "topology-mismatch": 78,
    "damaged": 3,
    "format": 3,
    "unknown-format": 78,
    "nothing-recoverable": 4,
    "busy": 5,
    "superseded": 93,
    "deadline": 1,
    "no-capacity": 69,
    "storage": 1,
    "not-found": 1,
    "already-exists": 1,
    "save-failed": 1,
    "usage": 2,
}
"""Code → exit code. Scripts test for these: one may be added, none may change or go."""


def python(code: str, *arguments: str, torch: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own, where torch cannot be imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ONWARD_")}
    return subprocess.run(
        [sys.executable, "-c", ("" if torch else WITHOUT) + code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def onward_says(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line without torch."""
    return python("from onward.cli.main import main; sys.exit(main(sys.argv[1:]))", *words)


@pytest.fixture
def url(disk: PosixStore) -> str:
    """A run with two checkpoints whose process died."""
    run = start(disk)
    for step in (10, 20):
        commit(run, step)
    die(run)
    return disk.url


def test_importing_onward_does_not_import_torch() -> None:
    """Also where torch is there: a command line that waits seconds for it is not used."""
    found = python(
        "import sys, onward; print(sorted(m for m in sys.modules if m.split('.')[0] == 'torch'))", torch=True
    )
    assert found.stdout.strip() == "[]", found.stderr


def test_every_room_but_torchs_own_is_imported_without_torch() -> None:
    modules = [m.name for m in pkgutil.walk_packages(onward.__path__, "onward.")]
    free = [m for m in modules if m.split(".")[1] not in NEEDS_TORCH and m not in SAVE_OR_RESTORE]
    assert len(free) > 50
    code = "import importlib\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\nprint(len(sys.argv) - 1)"
    found = python(code, *free)
    assert found.stdout.strip() == str(len(free)), found.stderr[-2000:]
    print(f"{len(free)} of {len(modules)} modules need no torch")


def test_a_name_that_needs_torch_says_so_and_the_others_are_there() -> None:
    look = "for name in onward.__all__:\n    try: getattr(onward, name)\n    except ImportError: print(name)"
    found = python(f"import onward\n{look}")
    assert found.stdout.split() == ["Checkpointer", "ResumableLoader", "Start", "StepOutcome", "describe"], found.stderr


def test_looking_and_verifying_need_no_torch(url: str) -> None:
    words = ("ls", "ls --json", "show 20", "show 20 --json", "verify", "verify --full --json")
    lines = [f"{line} --store {url} --run {RUN}" for line in words]
    run_all = "from onward.cli.main import main\nprint('codes', [main(line.split()) for line in sys.argv[1:]])"
    found = python(run_all, *lines)
    assert f"codes {[0] * len(words)}" in found.stdout, found.stdout + found.stderr
    assert found.stdout.count("step-000000000020-3") >= len(words)


def test_damage_is_found_without_torch(url: str, disk: PosixStore) -> None:
    shard = next(Path(disk.root).rglob("step-000000000020-*/rank-00000/000.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    found = onward_says("verify", "--full", "--store", url, "--run", RUN)
    assert found.returncode == errors.EXIT_FINDING
    assert "000.safetensors" in found.stdout + found.stderr


def test_a_run_is_recovered_without_torch(url: str, disk: PosixStore) -> None:
    left = disk.root / "runs" / RUN / "checkpoints" / f"step-000000000030-4.writing-{'0' * 32}"
    left.mkdir()
    found = onward_says("recover", "--store", url, "--run", RUN, "--yes")
    if found.returncode == errors.EXIT_USAGE:  # where it asks for nothing
        found = onward_says("recover", "--store", url, "--run", RUN)
    assert found.returncode == 0, found.stdout + found.stderr
    assert not left.exists()


def test_a_store_is_made_without_torch(fast_path: Path) -> None:
    found = onward_says("init", f"file://{fast_path}/new")
    assert found.returncode == 0, found.stdout + found.stderr
    assert (fast_path / "new" / "onward.json").is_file()


# --- what others build on ---------------------------------------------------------------------------------------


def test_the_public_names_are_fixed() -> None:
    assert tuple(onward.__all__) == NAMES
    assert all(hasattr(onward, name) for name in NAMES)
    with pytest.raises(AttributeError, match="nothing"):
        onward.nothing


def every_error() -> list[type[errors.OnwardError]]:
    for module in pkgutil.walk_packages(onward.__path__, "onward."):
        importlib.import_module(module.name)
    found: list[type[errors.OnwardError]] = [errors.OnwardError]
    for kind in found:
        found.extend(each for each in kind.__subclasses__() if each.__module__.startswith("onward."))
    return found


def test_each_error_has_a_code_of_its_own_an_exit_code_and_advice() -> None:
    kinds = every_error()
    for kind in kinds:
        assert kind.__doc__, kind
        if kind is not errors.OnwardError:
            assert kind.advice, kind
    own = {kind: kind.code for kind in kinds if "code" in vars(kind)}
    codes = {code: kind.exit_code for kind, code in own.items()}
    assert {code: codes.get(code) for code in CODES} == CODES
    shared = {c: [k.__name__ for k in own if own[k] == c] for c in codes}
    assert {code: names for code, names in shared.items() if len(names) > 1} in (
        {},
        {"damaged": ["Damaged", "DamagedFile"]},
    )


def test_the_exit_codes_are_those_of_the_manual() -> None:
    found = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert found == {
        "EXIT_OK": 0,
        "EXIT_ERROR": 1,
        "EXIT_USAGE": 2,
        "EXIT_FINDING": 3,
        "EXIT_NOTHING_RECOVERABLE": 4,
        "EXIT_BUSY": 5,
        "EXIT_NO_CAPACITY": 69,
        "EXIT_REQUEUE": 75,
        "EXIT_CONFIGURATION": 78,
        "EXIT_DO_NOT_RESTART": 93,
    }


def test_an_error_is_shown_with_its_code_and_what_to_do_next() -> None:
    assert str(errors.Busy("held")) == f"[busy] held\n  next: {errors.Busy.advice}"
    assert str(errors.Busy("held", next_step="wait")) == "[busy] held\n  next: wait"
    assert str(errors.Busy("held", next_step="")) == "[busy] held"
