"""A run's description is plain data, the same wherever its files lie, and never stops a run for want of git."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import platform
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import onward.state.describe as describing
from onward.errors import ConfigurationError, InvalidName, UnsupportedState
from onward.records import Description
from onward.state import surroundings
from onward.state.describe import RunDescription, describe
from onward.state.surroundings import code_version, environment


@dataclasses.dataclass
class Inner:
    heads: int = 8
    dtype: torch.dtype = torch.bfloat16


@dataclasses.dataclass
class Config:
    layers: int = 2
    inner: Inner = dataclasses.field(default_factory=Inner)
    betas: tuple[float, float] = (0.9, 0.95)


class HasToDict:
    def to_dict(self) -> dict[str, Any]:
        return {"n_heads": 8, "id2label": {0: "no", 1: "yes"}}


class Kind(enum.Enum):
    GELU = "gelu"


def quick(**kwargs: Any) -> RunDescription:
    return describe(code=False, **kwargs)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"a": 1, "b": [1.5, None, True]}, {"a": 1, "b": [1.5, None, True]}),
        (Config(), {"layers": 2, "inner": {"heads": 8, "dtype": "torch.bfloat16"}, "betas": [0.9, 0.95]}),
        (argparse.Namespace(lr=0.1, out=Path("x/y")), {"lr": 0.1, "out": "x/y"}),
        (HasToDict(), {"n_heads": 8, "id2label": {"0": "no", "1": "yes"}}),
        ({"act": Kind.GELU, "n": np.int64(3), "x": np.float32(0.5)}, {"act": "gelu", "n": 3, "x": 0.5}),
        ("llama3-8b", "llama3-8b"),
        (None, None),
    ],
)
def test_configurations_become_plain_json(given: object, expected: object) -> None:
    description = quick(model_config=given, hyperparameters=given, dataset=given).description
    assert description.model_config == description.hyperparameters == description.dataset == expected
    assert msgspec.json.decode(msgspec.json.encode(description), type=Description) == description


def test_geometry_that_shapes_cannot_see_is_in_the_description() -> None:
    """Two configurations with equal shapes and other heads have other descriptions."""
    two, eight = (quick(model_config=Config(inner=Inner(heads))).description.model_config for heads in (2, 8))
    assert two != eight


class Endless(dict[str, Any]):
    pass


ENDLESS = Endless()
ENDLESS["self"] = ENDLESS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": [{"f": len}]}, r"model_config\.a\[0\]\.f is a builtins\.builtin_function_or_method"),
        ({"x": float("nan")}, r"model_config\.x is nan"),
        ({"x": [1, float("inf")]}, r"model_config\.x\[1\] is inf"),
        ({"x": {1, 2}}, r"model_config\.x is a builtins\.set"),
        ({"x": b"bytes"}, r"model_config\.x is a builtins\.bytes"),
        ({"x": torch.zeros(2)}, r"model_config\.x is a torch\.Tensor"),
        ({(1, 2): 3}, r"model_config has the key \(1, 2\)"),
        ({True: 3}, "model_config has the key True"),
        ({1: 1, "1": 2}, "both as a string and as an integer"),
        ({"x": 2**64}, "more than 64 bits"),
        ({"x": "\ud800"}, "half a surrogate pair"),
        (ENDLESS, "nested more than 64 deep"),
        (Config, "model_config is a builtins.type"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_path(given: object, message: str) -> None:
    with pytest.raises(UnsupportedState, match=message):
        quick(model_config=given)


def test_configurations_are_stored_as_files_too() -> None:
    run = quick(model_config={"b": 1, "a": "ü"}, hyperparameters={"lr": 1})
    assert run.assets["model_config.json"] == '{\n  "a": "ü",\n  "b": 1\n}\n'.encode()
    assert json.loads(bytes(run.assets["hyperparameters.json"])) == {"lr": 1}  # type: ignore[arg-type]
    assert quick(model_config="a name").assets == {}


# --- tokenizer -------------------------------------------------------------------------------------------------------


class Tokenizer:
    def __init__(self, vocabulary: dict[str, int]) -> None:
        self._vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary


def test_a_vocabulary_is_identified_by_content_not_order() -> None:
    first, same, other = (
        quick(tokenizer=Tokenizer(vocabulary)) for vocabulary in ({"a": 0, "b": 1}, {"b": 1, "a": 0}, {"a": 1, "b": 0})
    )
    assert first.description.tokenizer == same.description.tokenizer != other.description.tokenizer
    assert first.description.tokenizer["size"] == 2 and first.description.tokenizer["class"] == "Tokenizer"
    assert json.loads(bytes(first.assets["tokenizer/vocab.json"])) == {"a": 0, "b": 1}  # type: ignore[arg-type]


def test_a_tokenizer_folder_is_identified_by_content_not_place(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place / "sub").mkdir(parents=True)
        (tmp_path / place / "sub" / "merges.txt").write_text("a b")
        (tmp_path / place / "vocab.json").write_text("{}")
        (tmp_path / place / ".cache").write_text(place)
    here, there = (quick(tokenizer=tmp_path / place) for place in ("here", "there"))
    assert here.description.tokenizer == there.description.tokenizer
    assert here.assets == {
        "tokenizer/sub/merges.txt": tmp_path / "here/sub/merges.txt",
        "tokenizer/vocab.json": tmp_path / "here/vocab.json",
    }
    (tmp_path / "there/vocab.json").write_text("[]")
    assert quick(tokenizer=str(tmp_path / "there")).description.tokenizer != here.description.tokenizer


def test_a_tokenizer_file_and_links_to_files_are_read(tmp_path: Path) -> None:
    """Model hubs keep folders of links into a store of blobs."""
    (tmp_path / "blob").write_text("content")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "tokenizer.model").symlink_to(tmp_path / "blob")
    files = {"tokenizer.model": "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"}
    for tokenizer in (tmp_path / "snapshot", tmp_path / "snapshot" / "tokenizer.model"):
        assert quick(tokenizer=tokenizer).description.tokenizer == {"kind": "files", "files": files, "not_read": {}}


def test_large_files_beside_a_tokenizer_are_neither_read_nor_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "weights.bin").write_bytes(bytes(100))
    monkeypatch.setattr(describing, "ASSET_LIMIT", 50)
    run = quick(tokenizer=tmp_path)
    assert run.description.tokenizer["not_read"] == {"weights.bin": 100} and list(run.assets) == [
        "tokenizer/vocab.json"
    ]
    monkeypatch.setattr(describing, "KEPT_WITHOUT_ASKING", 1)
    run = quick(tokenizer=tmp_path)
    assert list(run.description.tokenizer["files"]) == ["vocab.json"] and run.assets == {}


def test_a_tokenizer_may_be_a_name_but_not_a_missing_path(tmp_path: Path) -> None:
    assert quick(tokenizer="gpt2").description.tokenizer == {"kind": "name", "name": "gpt2"}
    assert quick(tokenizer="x" * 5000).description.tokenizer["kind"] == "name"
    assert quick(tokenizer="").description.tokenizer["kind"] == "name"
    with pytest.raises(ConfigurationError, match="is not there"):
        quick(tokenizer=tmp_path / "missing")


# --- assets and ties -------------------------------------------------------------------------------------------------


def test_assets_are_content_or_files(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("lr: 1")
    run = quick(assets={"conf/train.yaml": tmp_path / "train.yaml", "again": str(tmp_path / "train.yaml"), "raw": b"x"})
    assert run.assets == {"conf/train.yaml": tmp_path / "train.yaml", "again": tmp_path / "train.yaml", "raw": b"x"}


@pytest.mark.parametrize("name", ["../x", "/abs", "a/../b", "", "a//b", "a\\b", "a\nb", "./a", "x" * 300, "e\u0301"])
def test_unsafe_asset_names_are_refused(name: str) -> None:
    """T130: a name is a path below the checkpoint's assets, and nothing else."""
    with pytest.raises(InvalidName, match="asset"):
        quick(assets={name: b""})


def test_assets_that_one_filesystem_takes_for_one_are_refused() -> None:
    with pytest.raises(InvalidName, match="name one file"):
        quick(assets={"Vocab.json": b"", "vocab.json": b""})


def test_missing_and_oversized_assets_are_refused_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="'a' is not a file"):
        quick(assets={"a": tmp_path / "missing"})
    with pytest.raises(ConfigurationError, match="'a' is not a file"):
        quick(assets={"a": tmp_path})
    monkeypatch.setattr(describing, "ASSET_LIMIT", 10)
    (tmp_path / "big").write_bytes(bytes(11))
    for content in (bytes(11), tmp_path / "big"):
        with pytest.raises(ConfigurationError, match="'a' has 11 bytes, more than the 10"):
            quick(assets={"a": content})


def test_declared_ties_are_groups_of_names() -> None:
    assert quick(ties=[("wte.weight", "head.weight")]).ties == (("wte.weight", "head.weight"),)
    for wrong in (["wte.weight"], [("alone",)], [(1, 2)]):
        with pytest.raises(ConfigurationError, match="a tie is a group"):
            quick(ties=wrong)


# --- code ------------------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A committed program two folders down in a repository."""
    file = tmp_path / "repo" / "src" / "train.py"
    file.parent.mkdir(parents=True)
    file.write_text("print(1)\n")
    (tmp_path / "repo" / "lib.py").write_text("x = 1\n")
    git(tmp_path / "repo", "init", "-q")
    git(tmp_path / "repo", "add", ".")
    git(tmp_path / "repo", "commit", "-q", "-m", "first")
    return file


def test_a_clean_working_tree_is_its_commit(script: Path) -> None:
    version: Any = code_version(script)
    assert version["script"] == "train.py" and len(version["git"]["commit"]) == 40
    assert version["git"]["dirty"] is False and version["git"]["diff_sha256"] is None


def test_changes_anywhere_in_the_repository_are_seen(script: Path) -> None:
    """Staged or not, tracked or not, outside of the script's own folder too; equal changes have equal digests."""
    repository = script.parent.parent
    (repository / "lib.py").write_text("x = 2\n")
    first: Any = code_version(script)
    assert first["git"]["dirty"] and first["git"]["diff_sha256"]
    git(repository, "add", ".")
    assert code_version(script) == first
    (repository / "lib.py").write_text("x = 3\n")
    assert code_version(script) != first
    git(repository, "checkout", "-q", "HEAD", "--", "lib.py")
    (repository / "naïve name.py").write_text("")
    untracked: Any = code_version(script)
    assert untracked["git"]["dirty"] and untracked["git"]["untracked"] == ["naïve name.py"]


def test_looking_does_not_touch_the_repository_or_run_what_it_configures(script: Path) -> None:
    repository, marker = script.parent.parent, script.parent / "ran"
    for key in ("core.fsmonitor", "diff.external"):
        git(repository, "config", key, f"touch {marker};:")
    (repository / "lib.py").write_text("x = 2\n")
    index = (repository / ".git" / "index").read_bytes()
    assert code_version(script)["git"] is not None
    assert not marker.exists() and (repository / ".git" / "index").read_bytes() == index


def test_without_git_or_a_commit_the_scripts_digest_has_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    expected = {"script": "train.py", "script_sha256": surroundings.sha256(b"print(1)\n"), "git": None}
    assert code_version(script) == expected
    git(tmp_path, "init", "-q")
    assert code_version(script) == expected
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_version(script) == expected
    assert code_version(tmp_path / "gone.py") == {"script": "gone.py", "script_sha256": None, "git": None}


def test_a_stuck_git_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start must not wait for a working tree on a dead mount."""
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(surroundings, "GIT_SECONDS", 0.2)
    start = time.monotonic()
    assert code_version(tmp_path / "train.py")["git"] is None  # type: ignore[index,call-overload]
    assert time.monotonic() - start < 5


def test_describing_is_quick_and_stays_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    start = time.monotonic()
    run = describe(model_config={"a": 1})
    assert time.monotonic() - start < 2 * surroundings.GIT_SECONDS + 1
    assert run.description.code is not None and run.description.training_started is None


# --- machine ---------------------------------------------------------------------------------------------------------


def test_the_environment_has_versions_and_hardware_but_no_host_name() -> None:
    facts: Any = environment()
    assert facts["torch"] == torch.__version__ and facts["python"] == platform.python_version()
    assert facts["cpu_count"] >= 1 and facts["memory_bytes"] > 0
    assert platform.node() not in json.dumps(facts)


class FakeDevices:
    class Properties:
        name = "Fake 9000"
        total_memory = 1 << 30

    def get_device_properties(self, index: int) -> Properties:
        return self.Properties()


def test_the_accelerator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(torch, "get_device_module", lambda name: FakeDevices())
    facts: Any = environment()
    assert facts["accelerator"] == {
        "kind": "cuda",
        "count": 8,
        "name": "Fake 9000",
        "memory_bytes": 1 << 30,
        "toolkit": torch.version.cuda,
    }


def test_a_driver_that_does_not_answer_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(check_available: bool) -> None:
        raise RuntimeError("driver")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", fail)
    assert environment()["accelerator"] is None  # type: ignore[index,call-overload]
