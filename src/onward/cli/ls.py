"""``onward ls``: what exists, and what state it is in."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import typer

from onward.catalog.attempts import read_outcomes
from onward.catalog.leftovers import AttemptFolder, Owner, find_attempts, find_owner
from onward.catalog.listing import Catalog
from onward.catalog.manifests import manifest_in, manifest_of
from onward.catalog.reader import Place, as_findings
from onward.cli.options import ConfigOption, Home, JsonOption, RunOption, StoreOption, closing, find_home
from onward.cli.screen import Answer, Shown, now
from onward.errors import Damaged, OnwardError, StorageError
from onward.format.names import RunPlaces
from onward.records import AttemptOutcome, CheckpointInfo, Finding, Manifest
from onward.report.checkpoints import Row, checkpoint_row, checkpoint_table, finding_lines, outcome_table
from onward.report.tables import Column, Table, age, ago, counted, plain
from onward.storage.base import Store, walk_files

EPILOG = closing("onward ls --store file:///data/ckpt --run llama3-8b", {0: "done, also when there is nothing"}, 3, 78)


@dataclass(frozen=True)
class _Seen:
    """Everything about one run, with the manifests that could be read."""

    places: RunPlaces
    catalog: Catalog
    owner: Owner
    attempts: tuple[AttemptFolder, ...]
    manifests: dict[int, Manifest]
    adoptable: dict[str, Manifest | None]
    outcomes: tuple[AttemptOutcome, ...]
    findings: tuple[Finding, ...]

    @property
    def unknown(self) -> list[str]:
        return [item.name for item in self.catalog.foreign if item.kind == "unknown"]


def command(
    everything: Annotated[
        bool, typer.Option("--all", help="Also what was deleted, and how attempts ended that failed.")
    ] = False,
    runs: Annotated[bool, typer.Option("--runs", help="List the runs of the store instead.")] = False,
    config: ConfigOption = None,
    store: StoreOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """List the checkpoints of a run.

    Shown are checkpoints that are committed, quarantined or being deleted, saves in progress or left over, folders
    that could be adopted, and what is wrong with the ledger or the receipts. Order is that of the ledger: the last
    committed line is what a resume takes.
    """
    home = find_home(config, store, run)
    if runs:
        return _list_runs(home)
    if run is None and home.named not in home.runs and (home.named or not home.runs):
        return _nothing_yet(home)
    return _list_checkpoints(home, home.place(), everything)


def _nothing_yet(home: Home) -> Answer:
    what = f"the run {home.named!r} has not begun" if home.named else "there is no run yet"
    others = f"; its runs are: {', '.join(home.runs)}" if home.runs else ""
    empty = dict.fromkeys(("checkpoints", "attempts", "adoptable", "unknown", "outcomes", "findings"), ())
    owner = {"state": "nobody", "lease": None}
    document = {"store": home.store.url, "tier": home.tier, "run": home.named or None, "owner": owner, "newest": None}
    return Answer({**document, **empty}, [f"{home.store.url}: {what}{others}"])


def _list_runs(home: Home) -> Answer:
    store, rows = home.reader(), []
    document: list[dict[str, object]] = []
    for name in home.runs:
        places = RunPlaces(name)
        catalog, owner = home.catalog(places), find_owner(store, places)
        newest = next(iter(catalog.offered()), None)
        document.append(
            {
                "run": name,
                "checkpoints": len(catalog.offered()),
                "newest": newest,
                "owner": owner.state,
                "findings": catalog.findings,
            }
        )
        rows.append(
            (
                name,
                str(len(catalog.offered())),
                str(newest.step) if newest else "-",
                age(newest.committed, now()) if newest else "-",
                _owner_word(owner),
            )
        )
    columns = (
        Column("run", least=20),
        Column("checkpoints", right=True),
        Column("newest step", right=True),
        Column("age", right=True),
        Column("in use"),
    )
    shown: list[Shown] = [f"store {home.store.url}, tier {home.tier}: {counted(len(rows), 'run')}"]
    shown += [Table(columns, tuple(rows))]
    return Answer({"store": home.store.url, "tier": home.tier, "runs": document}, shown)


def _look(home: Home, places: RunPlaces, everything: bool) -> _Seen:
    store, catalog = home.reader(), home.catalog(places)
    owner = find_owner(store, places)
    manifests: dict[int, Manifest] = {}
    findings = list(catalog.findings)
    for info in catalog.checkpoints:
        if info.status != "deleted" or everything:
            try:
                manifests[info.sequence] = manifest_of(store, places, info)
            except OnwardError as error:
                if info.status not in ("deleted", "deleting"):
                    findings.extend(as_findings(error, home.tier, info.folder))
    adoptable: dict[str, Manifest | None] = {}
    for item in catalog.foreign:
        if item.kind == "adoptable":
            adoptable[item.name] = None
            with suppress(OnwardError):
                place = Place(store=store, root=places.checkpoint(item.name), tier=home.tier, name=item.name)
                adoptable[item.name] = manifest_in(place)
    return _Seen(
        places=places,
        catalog=catalog,
        owner=owner,
        attempts=tuple(find_attempts(store, places, catalog.view, owner)),
        manifests=manifests,
        adoptable=adoptable,
        outcomes=tuple(read_outcomes(store, places)) if everything else (),
        findings=tuple(findings),
    )


def _list_checkpoints(home: Home, places: RunPlaces, everything: bool) -> Answer:
    seen = _look(home, places, everything)
    listed = [info for info in seen.catalog.checkpoints if everything or info.status != "deleted"]
    newest = next(iter(seen.catalog.offered()), None)
    sizes = {attempt.name: _bytes_in(home.reader(), places.checkpoint(attempt.name)) for attempt in seen.attempts}
    document = {
        "store": home.store.url,
        "tier": home.tier,
        "run": places.run,
        "owner": {"state": seen.owner.state, "lease": seen.owner.lease},
        "newest": newest.sequence if newest else None,
        "checkpoints": [_with_manifest(info, seen.manifests.get(info.sequence)) for info in listed],
        "attempts": [_as_dict(attempt, sizes[attempt.name]) for attempt in seen.attempts],
        "adoptable": [
            {"folder": name, "step": m.global_step if m else None, "run": m.run if m else None}
            for name, m in seen.adoptable.items()
        ],
        "unknown": seen.unknown,
        "outcomes": seen.outcomes,
        "findings": seen.findings,
    }
    rows = [checkpoint_row(info, seen.manifests.get(info.sequence)) for info in listed]
    rows += [
        Row(
            step=attempt.step,
            sequence=attempt.sequence,
            since=attempt.intent.started if attempt.intent else "",
            status=attempt.state,
            folder=attempt.name,
            birth_class="",
            bytes=sizes[attempt.name],
        )
        for attempt in seen.attempts
    ]
    rows += [_adoptable_row(name, manifest) for name, manifest in seen.adoptable.items()]
    return Answer(document, _shown(home, seen, rows, newest, now()))


def _shown(home: Home, seen: _Seen, rows: list[Row], newest: CheckpointInfo | None, time: datetime) -> list[Shown]:
    shown: list[Shown] = [f"run {seen.places.run}, store {home.store.url}, tier {home.tier}"]
    if seen.owner.lease is not None:
        shown.append(f"in use: {_owner_word(seen.owner)}, last start {ago(seen.owner.lease.since, time)}")
    if rows:
        shown += ["", checkpoint_table(rows, time)]
    shown.append("")
    if newest is not None:
        shown.append(f"a resume takes step {newest.step} (seq:{newest.sequence}), verified: {newest.verified}")
    elif rows:
        shown.append("nothing here can be resumed from")
    else:
        shown.append("no checkpoint yet")
    for info in seen.catalog.checkpoints:
        if info.status == "quarantined":
            shown.append(f"step {info.step} (seq:{info.sequence}) is quarantined: {plain(info.reason)}")
    shown += [f"take in with: onward adopt {plain(shlex.quote(name))}" for name in seen.adoptable]
    if any(attempt.state == "abandoned" for attempt in seen.attempts):
        shown.append("clear up what was abandoned: onward recover --yes")
    if seen.unknown:
        shown.append(f"in checkpoints/, but not of onward: {plain(', '.join(seen.unknown))}")
    if seen.outcomes:
        shown += ["", outcome_table(seen.outcomes, heading="attempts that became no checkpoint")]
    if seen.findings:
        shown += ["", "findings", *finding_lines(seen.findings)]
    return shown


def _owner_word(owner: Owner) -> str:
    lease = owner.lease
    if lease is None:
        return "no"
    who = f"{plain(lease.host)} pid {lease.pid}"
    return {"dead": f"no ({who} is dead)", "unknown": f"perhaps ({who})"}.get(owner.state, f"yes ({who})")


def _with_manifest(info: CheckpointInfo, manifest: Manifest | None) -> dict[str, object]:
    fields: dict[str, object] = {name: getattr(info, name) for name in info.__struct_fields__}
    fields["class"] = manifest.birth_class if manifest else None
    fields["bytes"] = manifest.total_bytes if manifest else None
    return fields


def _as_dict(attempt: AttemptFolder, total: int | None) -> dict[str, object]:
    return {
        "folder": attempt.name,
        "step": attempt.step,
        "sequence": attempt.sequence,
        "attempt": attempt.attempt,
        "status": attempt.state,
        "intent": attempt.intent,
        "bytes": total,
    }


def _adoptable_row(name: str, manifest: Manifest | None) -> Row:
    return Row(
        step=manifest.global_step if manifest else None,
        sequence=None,
        since=manifest.capture_started if manifest else "",
        status="adoptable",
        folder=name,
        birth_class=manifest.birth_class if manifest else "?",
        bytes=manifest.total_bytes if manifest else None,
    )


def _bytes_in(store: Store, folder: str) -> int | None:
    """What lies in an attempt's folder; None when it goes away while it is looked at."""
    try:
        return sum(entry.size for _, entry in walk_files(store, folder))
    except (StorageError, Damaged):
        return None
