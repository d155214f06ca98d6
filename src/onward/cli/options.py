"""The options that all commands share, and the way from them to a store and a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from onward.catalog.ledger import LedgerView
from onward.catalog.listing import Catalog, list_runs, read_catalog
from onward.catalog.stores import open_home
from onward.config import ENV_RUN, Config, load_config
from onward.errors import InvalidName, NothingRecoverable, UsageError
from onward.format.names import RunPlaces, run_name
from onward.records import CheckpointInfo, Finding
from onward.storage.base import NotFound, Store
from onward.storage.wrappers import ReadOnlyStore

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The run's onward.toml; by default $ONWARD_CONFIG, else the nearest one from here upwards.",
    ),
]
StoreOption = Annotated[str | None, typer.Option("--store", metavar="URL", help="The store, instead of --config.")]
RunOption = Annotated[
    str | None, typer.Option("--run", metavar="NAME", help="The run; may be left out where the store has only one.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do it; without this, only say what would be done.")]

EXIT_CODES = {
    0: "done",
    1: "an error of the store or of the program",
    2: "a command line that makes no sense, or a run that is not there",
    3: "something is damaged",
    4: "there is nothing of the kind",
    5: "another live process uses the run",
    78: "no such store, or a wrong configuration",
    93: "another process took the run over meanwhile",
}


def closing(example: str, codes: Mapping[int, str], *common: int) -> str:
    """The end of a command's help: the exit codes that it uses, and one example."""
    used = {**{code: EXIT_CODES[code] for code in (0, 1, 2, *common)}, **codes}
    lines = "\n".join(f"  {code:>2}  {meaning}" for code, meaning in sorted(used.items()))
    return f"\b\nExit codes:\n{lines}\n\n\b\nExample:\n  {example}"


@dataclass(frozen=True)
class Home:
    """An open store, and the run that an option, the environment or the configuration names (empty: none does)."""

    store: Store
    tier: str
    runs: tuple[str, ...]
    named: str
    lease_seconds: float

    def place(self) -> RunPlaces:
        """The run that is meant.

        Raises:
            UsageError: There are several, or none of that name.
            NothingRecoverable: The store has no run at all.
        """
        if self.named in self.runs:
            return RunPlaces(self.named)
        if not self.runs:
            raise NothingRecoverable(
                f"{self.store.url} has no run yet", next_step="the first start of a training run makes it"
            )
        if len(self.runs) == 1 and not self.named:
            return RunPlaces(self.runs[0])
        choice = ", ".join(self.runs)
        if self.named:
            raise UsageError(f"{self.store.url} has no run {self.named!r}", next_step=f"its runs are: {choice}")
        raise UsageError(f"{self.store.url} has several runs: {choice}", next_step="choose one with --run NAME")

    def reader(self) -> Store:
        """The store, of which nothing can be changed through this."""
        return ReadOnlyStore(self.store)

    def catalog(self, places: RunPlaces) -> Catalog:
        """Everything about a run; a run without a ledger is shown with that as a finding."""
        try:
            return read_catalog(self.reader(), places, self.tier)
        except NotFound:
            finding = Finding(
                code="ledger-missing",
                message="the run has no ledger: its first start was cut short, or the folder was taken away",
                tier=self.tier,
                file=places.ledger,
            )
            view = LedgerView(run=places.run, entries={}, digests={}, findings=(finding,))
            return read_catalog(self.reader(), places, self.tier, view)


def find_home(config: Path | None, store: str | None, run: str | None) -> Home:
    """Opens the store that the options, the environment or the configuration name.

    Raises:
        UsageError: Both a configuration and a store are named.
        ConfigurationError: Neither can be found, or there is no store at the place.
    """
    if config is not None and store is not None:
        raise UsageError("both --config and --store are given", next_step="name the store in one way")
    settings = Config(store=store, run=os.environ.get(ENV_RUN, "")) if store is not None else load_config(config)
    opened, record = open_home(settings.store)
    named = run if run is not None else settings.run
    if run is not None:
        run_name(run)
    return Home(
        store=opened,
        tier=record.tier,
        runs=tuple(name for name in list_runs(opened) if _is_run(name)),
        named=named,
        lease_seconds=settings.lease.seconds,
    )


def choose(catalog: Catalog, which: str, purpose: str) -> CheckpointInfo:
    """The checkpoint that is meant: ``newest``, a step, ``seq:N`` or a folder.

    Raises:
        NothingRecoverable: The run has no such checkpoint.
    """
    found = catalog.find(which)
    if found is None:
        last = catalog.find("newest")
        hint = (
            f"the newest is step {last.step}, seq:{last.sequence}; `onward ls` shows all" if last else "see `onward ls`"
        )
        what = "no checkpoint" if which == "newest" else f"no checkpoint {which!r}"
        raise NothingRecoverable(f"the run {catalog.run!r} has {what} to {purpose}", next_step=hint)
    return found


def _is_run(name: str) -> bool:
    try:
        run_name(name)
    except InvalidName:
        return False
    return True
