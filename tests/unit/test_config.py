"""``onward.toml``: found, checked key by key, handed to its owners; a misspelt setting is never silently ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.config import Config, LeaseSettings, load_config
from onward.errors import EXIT_CONFIGURATION, ConfigurationError
from onward.policy.triggers import TriggerSettings
from onward.restore.settings import ResumeSettings
from onward.save.pipeline import SaveSettings

WHOLE = """
store = "file:///data/store"
run = "llama3-8b"

[triggers]
every_steps = 100

[save]
threads = 8
verify_after_save = "sizes"
if_busy = "skip"
tolerate_failures = 0

[resume]
threads = 2
waive = ["ema"]
policy = { "hyperparameters.lr" = "warn" }

[lease]
seconds = 10
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "onward.toml"


def load(file: Path, text: str, **environment: str) -> Config:
    file.write_text(text)
    return load_config(file, environment=environment)


def test_every_setting_reaches_its_owner(file: Path) -> None:
    config = load(file, WHOLE)
    assert (config.store, config.run) == ("file:///data/store", "llama3-8b")
    assert config.triggers == TriggerSettings(every_steps=100)
    assert (config.save.threads, config.save.verify_after_save, config.save.if_busy) == (8, "sizes", "skip")
    assert config.save.tolerate_failures == 0
    assert (config.resume.threads, config.resume.waive) == (2, ("ema",))
    assert config.resume.policies() == {"hyperparameters.lr": "warn"}
    assert config.lease.seconds == 10


def test_what_is_not_said_has_the_owners_default(file: Path) -> None:
    config = load(file, 'store = "file:///s"\n')
    assert config == Config(store="file:///s")
    assert (config.save, config.lease) == (SaveSettings(), LeaseSettings())
    assert config.resume == ResumeSettings()


@pytest.mark.parametrize(
    ("text", "named", "hint"),
    [
        ('store = "s"\nstroe = 1\n', "'stroe'", "did you mean 'store'?"),
        ('store = "s"\n[sav]\n', "'sav'", "did you mean 'save'?"),
        ('store = "s"\n[triggers]\nevery_step = 5\n', "'every_step'", "did you mean 'every_steps'?"),
        ('store = "s"\n[save]\nverify = "full"\n', "'verify'", ""),
        ('store = "s"\n[lease]\nxyzzy = 1\n', "'xyzzy'", "known are seconds"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(file: Path, text: str, named: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as caught:
        load(file, text)
    assert hint in caught.value.next_step
    assert str(file) in caught.value.message
    assert caught.value.exit_code == EXIT_CONFIGURATION


@pytest.mark.parametrize(
    "section",
    [
        '[save]\nthreads = "4"',
        "[save]\nthreads = 0",
        "[save]\nthreads = 1.5",
        "[save]\nthreads = true",
        '[save]\nverify_after_save = "yes"',
        '[save]\nif_busy = "wait a bit"',
        "[save]\ntolerate_failures = -1",
        "[triggers]\nevery_steps = 0",
        '[triggers]\nevery_steps = "5"',
        "[lease]\nseconds = 0",
        "[lease]\nseconds = -3",
        "[lease]\nseconds = nan",
        "[lease]\nseconds = '30'",
        "[resume]\nthreads = 0",
        '[resume]\nwaive = "ema"',
        '[resume]\npolicy = { "x" = "maybe" }',
        "[resume]\npolicy = 5",
        "save = 5",
        "run = 5",
        "store = 5",
        'store = ""',
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(file: Path, section: str) -> None:
    head = "" if section.startswith("store") else 'store = "file:///s"\n'
    with pytest.raises(ConfigurationError):
        load(file, head + section + "\n")


@pytest.mark.parametrize("text", ["store = ", "[[[", 'store = "s"\nstore = "t"\n', "\udcff"])
def test_a_file_that_is_no_toml_is_refused_by_name(file: Path, text: str) -> None:
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigurationError, match=str(file)):
        load_config(file, environment={})


def test_a_file_that_is_not_there_is_refused_by_name(file: Path) -> None:
    with pytest.raises(ConfigurationError, match=str(file)):
        load_config(file, environment={})


def test_the_environment_wins_over_a_file_that_was_found_not_over_one_that_was_named(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(WHOLE)
    monkeypatch.chdir(file.parent)
    environment = {"ONWARD_STORE": "file:///other", "ONWARD_RUN": "other"}
    found, named = load_config(environment=environment), load_config(file, environment=environment)
    assert (found.store, found.run, found.save.threads) == ("file:///other", "other", 8)
    assert (named.store, named.run, named.save.threads) == ("file:///data/store", "llama3-8b", 8)


def test_a_relative_store_is_meant_from_the_files_own_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found from a subfolder, it must lead to the same store."""
    file.write_text('store = "checkpoints"\n')
    inner = file.parent / "a"
    inner.mkdir()
    monkeypatch.chdir(inner)
    assert (
        load_config(environment={}).store == load_config(file, environment={}).store == str(file.parent / "checkpoints")
    )


def test_the_nearest_file_upwards_is_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('store = "file:///outer"\n')
    inner = file.parent / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert load_config(environment={}).store == "file:///outer"
    (inner.parent / "onward.toml").write_text('store = "file:///inner"\n')
    assert load_config(environment={}).store == "file:///inner"
    assert load_config(environment={"ONWARD_CONFIG": str(file)}).store == "file:///outer"


def test_a_store_alone_is_enough_and_nothing_at_all_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onward.config.Path.cwd", lambda: tmp_path)
    config = load_config(environment={"ONWARD_STORE": "file:///s", "ONWARD_RUN": "r"})
    assert (config.store, config.run) == ("file:///s", "r")
    with pytest.raises(ConfigurationError, match="ONWARD_STORE") as caught:
        load_config(environment={})
    assert "onward.toml" in caught.value.next_step
