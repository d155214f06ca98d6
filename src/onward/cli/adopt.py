"""``onward adopt``: take in a checkpoint folder that was copied in by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onward.catalog.incarnation import begin
from onward.catalog.leftovers import find_owner
from onward.catalog.listing import Catalog
from onward.catalog.manifests import manifest_in
from onward.catalog.reader import Place
from onward.cli.options import ConfigOption, Home, JsonOption, RunOption, StoreOption, YesOption, closing, find_home
from onward.cli.screen import Answer, Shown, say
from onward.errors import EXIT_BUSY, EXIT_ERROR, EXIT_FINDING, EXIT_OK, UsageError
from onward.format.names import RunPlaces, checkpoint_folder
from onward.report.checkpoints import coverage_line, finding_lines, outcome_table
from onward.report.tables import plain
from onward.storage.posix import PosixStore
from onward.upkeep.adopt import adopt
from onward.upkeep.check import verdict_of
from onward.upkeep.verify import verify

EPILOG = closing(
    "onward adopt step-000000010000-42 --store file:///data/ckpt --yes",
    {
        0: "adopted, or fit to be",
        2: "a command line that makes no sense, or no such folder",
        3: "the folder is damaged",
    },
    4,
    5,
    78,
    93,
)


def command(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Its name in the run's checkpoints/, as onward ls shows it.")
    ],
    yes: YesOption = False,
    config: ConfigOption = None,
    store: StoreOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Take in a folder that was copied in by hand.

    A dry run, unless --yes is given. Copy it into the run's checkpoints/ first. Every byte is verified; then the
    folder gets a new name, from its step and the ledger's next number, and is committed. It is the newest then: a
    resume takes it. With --yes the run is taken over and cleared up, as by "onward recover". Refused while another
    live process uses the run.
    """
    home = find_home(config, store, run)
    places = home.place()
    name = _name(home, places, folder)
    catalog = home.catalog(places)
    _require_adoptable(catalog, name, home, places)
    return _adopt(home, places, name) if yes else _dry_run(home, places, catalog, name)


def _name(home: Home, places: RunPlaces, folder: str) -> str:
    """The folder's name; a path is taken too, when it leads into the run's ``checkpoints/``."""
    name = folder.rstrip("/")
    if "/" in name and isinstance(home.store, PosixStore):
        path = Path(name).absolute()
        if path.parent.resolve() == home.store.local_path(places.checkpoints).resolve():
            return path.name
    return name


def _require_adoptable(catalog: Catalog, name: str, home: Home, places: RunPlaces) -> None:
    choice = [item.name for item in catalog.foreign if item.kind == "adoptable"]
    if name not in choice:
        offered = f"adoptable are: {', '.join(choice)}" if choice else "the run has nothing to adopt"
        where = f"{home.store.url}/{places.checkpoints}"
        raise UsageError(f"{name!r} cannot be adopted; {offered}", next_step=f"copy the folder into {where} first")


def _dry_run(home: Home, places: RunPlaces, catalog: Catalog, name: str) -> Answer:
    owner = find_owner(home.store, places)
    place = Place(store=home.reader(), root=places.checkpoint(name), tier=home.tier, name=name)
    report = verify(place, None, run=places.run)
    verdict = verdict_of(report)
    document: dict[str, object] = {
        "store": home.store.url,
        "run": places.run,
        "dry_run": True,
        "folder": name,
        "verdict": verdict,
        "report": report,
        "owner": owner.state,
    }
    shown: list[Shown] = [f"{plain(name)}: {verdict}", f"  {coverage_line(report.coverage)}"]
    shown += finding_lines(report.findings)
    if not report.ok:
        shown.append("it would not be adopted")
        return Answer(document, shown, EXIT_FINDING if verdict == "damaged" else EXIT_ERROR)
    manifest = manifest_in(place)
    # Taking over uses one number itself; another process may use more in between.
    becomes = checkpoint_folder(manifest.global_step, catalog.view.highest + 2)
    document |= {"saved_by": manifest.run, "step": manifest.global_step, "becomes": becomes}
    shown.append(f"  saved by the run {manifest.run} at step {manifest.global_step}")
    shown.append(f"it would become {becomes}, the newest checkpoint of {places.run}; nothing was changed")
    if owner.state == "alive":
        shown.append("the run is in use: with --yes this is refused until that process has ended")
        return Answer(document, shown, EXIT_BUSY)
    return Answer(document, [*shown, "do it with --yes"], EXIT_OK)


def _adopt(home: Home, places: RunPlaces, name: str) -> Answer:
    incarnation = begin(home.store, places.run, lease_seconds=home.lease_seconds, say=say)
    try:
        adopted = adopt(incarnation, name)
    finally:
        incarnation.end()
    entry, report = adopted.entry, adopted.report
    document = {
        "store": home.store.url,
        "run": places.run,
        "dry_run": False,
        "folder": name,
        "entry": entry,
        "report": report,
        "outcomes": incarnation.recovered,
    }
    shown: list[Shown] = [
        f"{plain(name)} is adopted as {entry.folder}: step {entry.step}, seq:{entry.sequence}, verified",
        f"  {coverage_line(report.coverage)}",
        f"it is the newest checkpoint of {places.run}: a resume takes it",
    ]
    if incarnation.recovered:
        shown += ["", outcome_table(incarnation.recovered, heading="cleared up on the way")]
    return Answer(document, shown)
