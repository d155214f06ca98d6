"""``onward recover``: clear up what dead incarnations of a run left unfinished."""

from __future__ import annotations

from onward.catalog.incarnation import begin
from onward.catalog.leftovers import Owner, RecoveryPlan, find_owner, plan_recovery
from onward.cli.options import (
    ConfigOption,
    Home,
    JsonOption,
    RunOption,
    StoreOption,
    YesOption,
    closing,
    find_home,
)
from onward.cli.screen import Answer, Shown, say
from onward.errors import EXIT_BUSY, EXIT_OK
from onward.format.names import RunPlaces
from onward.report.checkpoints import finding_lines, outcome_table
from onward.report.tables import Column, Table, plain

EPILOG = closing("onward recover --store file:///data/ckpt --yes", {0: "cleared up, or nothing to do"}, 3, 4, 5, 78, 93)


def command(
    yes: YesOption = False,
    config: ConfigOption = None,
    store: StoreOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Clear up what dead processes left unfinished.

    A dry run, unless --yes is given: without --yes nothing is written and the run is not taken over. With --yes the
    run is taken over (from then on an older process that only slept can no longer commit), saves that never became a
    checkpoint are removed, complete folders that no commit names are kept, and deletes that were decided are
    finished. No checkpoint is touched. It is refused while another live process uses the run. A start of the training
    does the same by itself.
    """
    home = find_home(config, store, run)
    places = home.place()
    return _recover(home, places) if yes else _dry_run(home, places)


def _plan(home: Home, places: RunPlaces) -> tuple[Owner, RecoveryPlan]:
    owner = find_owner(home.store, places)
    return owner, plan_recovery(home.reader(), places, home.catalog(places).view, owner)


def _dry_run(home: Home, places: RunPlaces) -> Answer:
    owner, plan = _plan(home, places)
    findings = home.catalog(places).findings
    busy = owner.state == "alive"
    document = {
        "store": home.store.url,
        "run": places.run,
        "dry_run": True,
        "owner": {"state": owner.state, "lease": owner.lease},
        "roll_back": [
            {"folder": a.name, "step": a.step, "sequence": a.sequence, "status": a.state, "intent": a.intent}
            for a in plan.roll_back
        ],
        "remove": plan.remove,
        "keep": plan.keep,
        "finish": plan.finish,
        "findings": findings,
    }
    shown: list[Shown] = [f"run {places.run}, store {home.store.url}"]
    rows = _rows(plan, busy)
    if rows:
        columns = (
            Column("what"),
            Column("step", right=True),
            Column("would be"),
            Column("folder", least=12, fold=True),
        )
        shown += ["", Table(columns, tuple(rows))]
    shown += ["", _verdict(places, owner, plan)]
    if findings:
        shown += ["", "findings, which recovery does not change", *finding_lines(findings)]
    return Answer(document, shown, EXIT_BUSY if busy else EXIT_OK)


def _rows(plan: RecoveryPlan, busy: bool) -> list[tuple[str, str, str, str]]:
    rows = [
        (f"save {a.state}", str(a.step), "left alone" if busy and a.state != "abandoned" else "removed", a.name)
        for a in plan.roll_back
    ]
    rows += [("link or file", "", "removed", name) for name in plan.remove]
    rows += [("not in the ledger", "", "kept", name) for name in plan.keep]
    rows += [("delete decided", "", "finished", delete.folder) for delete in plan.finish]
    return rows


def _verdict(places: RunPlaces, owner: Owner, plan: RecoveryPlan) -> str:
    lease = owner.lease
    who = f"{plain(lease.host)}, pid {lease.pid}, since {plain(lease.since)}" if lease else ""
    if owner.state == "alive":
        return f"the run is in use by {who}: with --yes this is refused until that process has ended"
    what = "nothing to clear up" if plan.empty else "nothing was changed; do it with --yes"
    if owner.state == "unknown":
        return f"{what} (it waits first for a sign of life of {who})"
    return f"{what} (the last owner, {who}, is dead)" if owner.state == "dead" else what


def _recover(home: Home, places: RunPlaces) -> Answer:
    _, plan = _plan(home, places)
    incarnation = begin(home.store, places.run, lease_seconds=home.lease_seconds, say=say)
    try:
        _, left = _plan(home, places)
    finally:
        incarnation.end()
    remaining = {delete.victim for delete in left.finish}
    finished = [delete for delete in plan.finish if delete.victim not in remaining]
    document = {
        "store": home.store.url,
        "run": places.run,
        "dry_run": False,
        "incarnation": incarnation.ledger.incarnation,
        "outcomes": incarnation.recovered,
        "removed": plan.remove,
        "finished": finished,
    }
    shown: list[Shown] = [f"run {places.run}, store {home.store.url}: taken over with entry {incarnation.ledger.epoch}"]
    if incarnation.recovered:
        shown += ["", outcome_table(incarnation.recovered)]
    shown += [f"removed: {plain(name)}" for name in plan.remove]
    shown += [f"delete finished: {delete.folder} ({plain(delete.reason)})" for delete in finished]
    if not (incarnation.recovered or plan.remove or finished):
        shown.append("there was nothing to clear up")
    return Answer(document, shown)
