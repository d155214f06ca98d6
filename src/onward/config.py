"""``onward.toml`` and the environment → the dataclasses of those who use the settings.

Each setting lives beside its owner, who also refuses contradictions; here they are only found and handed out. An
unknown key is refused: a misspelt setting that is silently ignored is how runs are lost.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from onward.catalog.incarnation import DEFAULT_LEASE_SECONDS
from onward.errors import ConfigurationError
from onward.policy.triggers import TriggerSettings
from onward.restore.settings import ResumeSettings
from onward.save.pipeline import SaveSettings

CONFIG_FILE = "onward.toml"
ENV_CONFIG, ENV_STORE, ENV_RUN = "ONWARD_CONFIG", "ONWARD_STORE", "ONWARD_RUN"

T = TypeVar("T")


@dataclass(frozen=True)
class LeaseSettings:
    """``seconds``: after how long without a sign of life an owner on another machine counts as dead."""

    seconds: float = DEFAULT_LEASE_SECONDS

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigurationError(f"lease.seconds is {self.seconds}; it must be positive")


@dataclass(frozen=True)
class Config:
    """All settings of a run.

    Attributes:
        store: URL of the home.
        run: The run's name; may be left to the call.
        triggers: When to save.
        save: How a save is written.
        resume: How a resume decides.
        lease: How a second job is held off.
    """

    store: str
    run: str = ""
    triggers: TriggerSettings = field(default_factory=TriggerSettings)
    save: SaveSettings = field(default_factory=SaveSettings)
    resume: ResumeSettings = field(default_factory=ResumeSettings)
    lease: LeaseSettings = field(default_factory=LeaseSettings)


_SECTIONS: dict[str, type[Any]] = {
    "triggers": TriggerSettings,
    "save": SaveSettings,
    "resume": ResumeSettings,
    "lease": LeaseSettings,
}


def load_config(path: str | Path | None = None, *, environment: Mapping[str, str] | None = None) -> Config:
    """Reads the configuration.

    Args:
        path: The file; by default ``$ONWARD_CONFIG``, else the nearest ``onward.toml`` from here upwards.
        environment: Variables; ``ONWARD_STORE`` and ``ONWARD_RUN`` win over a file that was found, not over one that
            was named.

    Raises:
        ConfigurationError: Says the file, the key and what would be right.
    """
    env: Mapping[str, str] = os.environ if environment is None else environment
    if path is not None:  # named on purpose: nothing in the environment changes what it says
        env = {}
    file = Path(path) if path is not None else _find(env)
    if file is None:
        if ENV_STORE in env:
            return Config(store=env[ENV_STORE], run=env.get(ENV_RUN, ""))
        raise ConfigurationError(
            f"no {CONFIG_FILE} here or above, and neither {ENV_CONFIG} nor {ENV_STORE} is set",
            next_step=f'write an {CONFIG_FILE} with `store = "file:///path"`, or name the store',
        )
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: {error}") from error
    return _parse(table, str(file), env)


def _find(env: Mapping[str, str]) -> Path | None:
    if env.get(ENV_CONFIG):
        return Path(env[ENV_CONFIG])
    here = Path.cwd()
    return next((folder / CONFIG_FILE for folder in (here, *here.parents) if (folder / CONFIG_FILE).is_file()), None)


def _parse(table: dict[str, Any], where: str, env: Mapping[str, str]) -> Config:
    _refuse_unknown(table, {"store", "run", *_SECTIONS}, where)
    sections = {name: _section(kind, table.get(name, {}), f"{where}: [{name}]") for name, kind in _SECTIONS.items()}
    store, run = env.get(ENV_STORE) or _beside(table.get("store"), where), env.get(ENV_RUN) or table.get("run", "")
    if not isinstance(store, str) or not store:
        raise ConfigurationError(f"{where} names no store", next_step='write `store = "file:///path"`')
    if not isinstance(run, str):
        raise ConfigurationError(f"{where}: run is {run!r}, not a name")
    return Config(store=store, run=run, **sections)


def _beside(store: object, where: str) -> object:
    """A relative path is meant from the file's folder: found from a subfolder, it must lead to the same store."""
    if isinstance(store, str) and store and "://" not in store:
        return str(Path(where).absolute().parent / store)
    return store


def _section(kind: type[T], table: object, where: str) -> T:
    if not isinstance(table, dict):
        raise ConfigurationError(f"{where} is not a table")
    hints = get_type_hints(kind)
    _refuse_unknown(table, set(hints), where)
    values: dict[str, object] = {}
    for key, value in table.items():
        try:
            values[key] = msgspec.convert(value, type=hints[key], strict=True)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{where} {key} is {value!r}: {error}") from error
    return kind(**values)


def _refuse_unknown(table: Mapping[str, object], known: set[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigurationError(f"{where}: {key!r} is not a setting", next_step=hint)
